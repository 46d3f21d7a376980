"""convert.py: poses and what goes out, both message families. Images: test_encodings.py, depth: test_depth_codec.py, CameraInfo: test_lens.py."""
import messages as m
import numpy as np
import pytest

from spirula_ros import convert
from spirula_ros.convert import BadMessage

FAMILIES = ["rosbags", "rclpy"]
W, H = 6, 4
rng = np.random.default_rng(0)
RGB = rng.integers(0, 256, (H, W, 3), np.uint8)


def reason(call, *args) -> str:
    with pytest.raises(BadMessage) as caught:
        call(*args)
    assert len(caught.value.text) > 20
    return caught.value.reason


# ----------------------------------------------------------------------------------------------------------- poses

@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["PoseStamped", "PoseWithCovarianceStamped", "Odometry", "TransformStamped"])
def test_poses(kind, family):
    s = np.sqrt(0.5)
    T = convert.pose_from_msg(m.pose(1, (1, 2, 3), (0, 0, s, s), kind=kind, family=family))  # 90 degrees about z: x -> y
    np.testing.assert_allclose(T, [[0, -1, 0, 1], [1, 0, 0, 2], [0, 0, 1, 3], [0, 0, 0, 1]], atol=1e-15)
    T = convert.pose_from_msg(m.pose(1, q=(0, 0, s * 1.005, s * 1.005), kind=kind, family=family))
    np.testing.assert_allclose(T[:3, :3] @ T[:3, :3].T, np.eye(3), atol=1e-14)
    for q in ((0, 0, 0, 0), (0, 0, 0, 1.02), (0, 0, 0, 0.98), (np.nan, 0, 0, 1)):
        assert reason(convert.pose_from_msg, m.pose(1, q=q, kind=kind, family=family)) == "bad_pose"
    for xyz in ((np.nan, 0, 0), (0, np.inf, 0)):
        assert reason(convert.pose_from_msg, m.pose(1, xyz, kind=kind, family=family)) == "bad_pose"


def test_image_fields_round_trip():
    for array, decode in ((RGB, convert.image_to_rgb), (rng.uniform(0.1, 9, (H, W)).astype(np.float32), convert.depth_to_m)):
        f = convert.image_fields(array)
        np.testing.assert_array_equal(decode(m.image(1, f.width, f.height, f.encoding, f.data.tobytes(), f.step, bool(f.is_bigendian))), array)
    mm = rng.integers(1, 65535, (H, W), np.uint16)
    f = convert.image_fields(mm)
    np.testing.assert_allclose(convert.depth_to_m(m.image(1, f.width, f.height, f.encoding, f.data.tobytes())), mm / 1000, rtol=1e-6)
    assert np.shares_memory(convert.image_fields(RGB).data, RGB)
    for bad in (RGB.astype(np.int32), RGB[..., :2], np.zeros((2, 2), np.float64)):
        with pytest.raises(ValueError, match="no image encoding"):
            convert.image_fields(bad)


def test_nothing_of_ros_is_imported():
    import subprocess
    import sys
    code = "import sys, spirula_ros.convert, spirula_ros.intake, spirula_ros.bags; print([n for n in sys.modules if n.split('.')[0] in ('rclpy', 'sensor_msgs', 'geometry_msgs', 'nav_msgs')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
