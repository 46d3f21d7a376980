"""convert.py: every encoding, row padding, byte order, both message families, and every refusal."""
import cv2
import messages as m
import numpy as np
import pytest

from spirula_gpu.camera import Camera
from spirula_ros import convert
from spirula_ros.convert import BadMessage

FAMILIES = ["rosbags", "rclpy"]
W, H = 6, 4
rng = np.random.default_rng(0)
RGB = rng.integers(0, 256, (H, W, 3), np.uint8)


def padded(rows: np.ndarray, extra: int) -> tuple[bytes, int]:
    """Bytes of [H, row bytes] with `extra` junk bytes behind every row, and the step."""
    rows = rows.reshape(rows.shape[0], -1).view(np.uint8)
    out = np.full((rows.shape[0], rows.shape[1] + extra), 0xAB, np.uint8)
    out[:, :rows.shape[1]] = rows
    return out.tobytes(), out.shape[1]


def reason(call, *args) -> str:
    with pytest.raises(BadMessage) as caught:
        call(*args)
    assert len(caught.value.text) > 20
    return caught.value.reason


gray = RGB[..., 1]
wide = (RGB.astype(np.uint16) << 8) | 0x5A
alpha = np.dstack([RGB, np.full((H, W), 7, np.uint8)])
COLOUR = {  # encoding -> (raw array, expected rgb)
    "rgb8": (RGB, RGB), "bgr8": (RGB[..., ::-1], RGB), "8UC3": (RGB[..., ::-1], RGB), "rgba8": (alpha, RGB),
    "bgra8": (alpha[..., [2, 1, 0, 3]], RGB), "8UC4": (alpha[..., [2, 1, 0, 3]], RGB),
    "mono8": (gray, np.dstack([gray] * 3)), "8UC1": (gray, np.dstack([gray] * 3)),
    "rgb16": (wide, RGB), "bgr16": (wide[..., ::-1], RGB), "mono16": (wide[..., 1], np.dstack([gray] * 3)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("encoding", COLOUR)
def test_colour_encodings(encoding, big, extra, family):
    raw, expected = COLOUR[encoding]
    raw = np.ascontiguousarray(raw)
    data, step = padded(raw.astype(raw.dtype.newbyteorder(">")) if big else raw, extra)
    rgb = convert.image_to_rgb(m.image(1, W, H, encoding, data, step, big, family=family))
    assert rgb.dtype == np.uint8 and rgb.flags.c_contiguous
    np.testing.assert_array_equal(rgb, expected)


@pytest.mark.parametrize("pattern", ["rggb", "bggr", "gbrg", "grbg"])
def test_bayer_puts_each_colour_where_the_pattern_says(pattern):
    """A flat colour seen through the filter must come back as that colour."""
    colour = {"r": 200, "g": 90, "b": 30}
    tile = np.array([[colour[pattern[0]], colour[pattern[1]]], [colour[pattern[2]], colour[pattern[3]]]], np.uint8)
    raw = np.tile(tile, (8, 8))
    rgb = convert.image_to_rgb(m.image(1, 16, 16, f"bayer_{pattern}8", raw.tobytes()))
    np.testing.assert_array_equal(rgb[4:12, 4:12], np.broadcast_to(np.uint8([200, 90, 30]), (8, 8, 3)))


@pytest.mark.parametrize("encoding, order", [("yuv422", "uyvy"), ("uyvy", "uyvy"), ("yuv422_yuy2", "yuyv"), ("yuyv", "yuyv")])
def test_yuv422(encoding, order):
    """A flat colour; YUV of (R,G,B) by BT.601 in video range."""
    r, g, b = 180.0, 60.0, 100.0
    values = {"y": 16 + (65.738 * r + 129.057 * g + 25.064 * b) / 256, "u": 128 + (-37.945 * r - 74.494 * g + 112.439 * b) / 256,
              "v": 128 + (112.439 * r - 94.154 * g - 18.285 * b) / 256}
    raw = np.tile(np.array([round(values[c]) for c in order], np.uint8), (4, 4))
    rgb = convert.image_to_rgb(m.image(1, 8, 4, encoding, raw.tobytes()))
    assert np.abs(rgb.astype(int) - [r, g, b]).max() <= 2


def test_rgb8_is_not_copied():
    for family in FAMILIES:
        msg = m.image(1, W, H, "rgb8", RGB.tobytes(), family=family)
        assert np.shares_memory(convert.image_to_rgb(msg), np.frombuffer(msg.data, np.uint8)), family


@pytest.mark.parametrize("family", FAMILIES)
def test_compressed_images(family):
    smooth = np.dstack([np.add.outer(np.arange(48), np.arange(64)).astype(np.uint8) + c for c in (0, 60, 120)])
    for form, tolerance in (("png", 0), ("jpeg", 12)):
        _, data = cv2.imencode("." + form, smooth[..., ::-1])
        msg = m.stamped("sensor_msgs/msg/CompressedImage", 1, "cam", family, format=f"rgb8; {form} compressed bgr8", data=data.tobytes())
        assert np.abs(convert.image_to_rgb(msg).astype(int) - smooth).max() <= tolerance
    m.put(msg, data=data.tobytes()[:10])
    assert reason(convert.image_to_rgb, msg) == "bad_image_data"
    m.put(msg, data=b"")
    assert reason(convert.image_to_rgb, msg) == "bad_image_data"


def test_refused_images():
    ok = RGB.tobytes()
    with pytest.raises(BadMessage, match="'foo12'.*rgb8") as caught:
        convert.image_to_rgb(m.image(1, W, H, "foo12", ok))
    assert caught.value.reason == "unknown_encoding"
    for bad in (m.image(1, W, H, "rgb8", ok[:-1], W * 3), m.image(1, W, H, "rgb8", b"", W * 3), m.image(1, W, H, "rgb8", ok, W * 3 - 1),
                m.image(1, W, H, "rgb8", ok, 0), m.image(1, 0, H, "rgb8", ok, W * 3), m.image(1, W, 10**9, "rgb8", ok, W * 3)):
        assert reason(convert.image_to_rgb, bad) == "bad_image_size"
    for encoding in ("yuv422", "uyvy", "yuv422_yuy2", "yuyv"):  # two pixels share a colour
        assert reason(convert.image_to_rgb, m.image(1, 7, H, encoding, bytes(14 * H))) == "bad_image_size", encoding
    unpadded_last_row, step = padded(RGB, 5)
    np.testing.assert_array_equal(convert.image_to_rgb(m.image(1, W, H, "rgb8", unpadded_last_row[:-5], step)), RGB)


# ----------------------------------------------------------------------------------------------------------- depth

@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("big", [False, True])
def test_depth(big, extra, family):
    mm = np.array([[0, 1, 1000], [65535, 65534, 12345]], np.uint16)
    expected = np.array([[0, 0.001, 1.0], [0, 65.534, 12.345]], np.float32)
    order = ">" if big else "<"
    for encoding in ("16UC1", "mono16"):
        data, step = padded(mm.astype(order + "u2"), extra)
        depth = convert.depth_to_m(m.image(1, 3, 2, encoding, data, step, big, family=family))
        assert depth.dtype == np.float32 and depth.flags.c_contiguous
        np.testing.assert_allclose(depth, expected, rtol=1e-6)
    metres = np.array([[np.nan, np.inf, -np.inf], [-1, 0, 2.5]], np.float32)
    data, step = padded(metres.astype(order + "f4"), extra)
    depth = convert.depth_to_m(m.image(1, 3, 2, "32FC1", data, step, big, family=family))
    assert depth.dtype == np.float32 and depth.flags.c_contiguous
    np.testing.assert_array_equal(depth, [[0, 0, 0], [0, 0, 2.5]])


def test_compressed_depth():
    mm = rng.integers(0, 65536, (4, 6), np.uint16)
    png = cv2.imencode(".png", mm)[1].tobytes()
    expected = np.where(mm == 65535, 0, mm * np.float32(0.001))
    for form, data in (("png", png), ("16UC1; compressedDepth png", b"\0" * 12 + png)):
        np.testing.assert_allclose(convert.depth_to_m(m.stamped("sensor_msgs/msg/CompressedImage", 1, format=form, data=data)), expected, rtol=1e-6)
    assert reason(convert.depth_to_m, m.stamped("sensor_msgs/msg/CompressedImage", 1, format="32FC1; compressedDepth png", data=b"\0" * 12 + png)) == "unknown_encoding"


def test_refused_depth():
    assert reason(convert.depth_to_m, m.image(1, W, H, "rgb8", RGB.tobytes())) == "unknown_encoding"
    assert reason(convert.depth_to_m, m.image(1, W, H, "32FC1", b"\0" * 10, W * 4)) == "bad_image_size"


# ---------------------------------------------------------------------------------------------------------- camera

@pytest.mark.parametrize("family", FAMILIES)
def test_camera_has_the_engine_s_pixel_centres(family):
    msg = m.info(1, 640, 480, 500.0, family=family)  # cx = 319.5 in ROS: the middle of 0..639
    assert convert.camera_from_info(msg) == Camera(640, 480, 500, 500, 320, 240)
    assert convert.camera_from_info(m.put(msg, binning_x=2, binning_y=2)) == Camera(320, 240, 250, 250, 160, 120)
    m.put(msg, binning_x=0, binning_y=0, roi__x_offset=20, roi__y_offset=10, roi__width=100, roi__height=50)
    assert convert.camera_from_info(msg) == Camera(100, 50, 500, 500, 300, 230)


def test_camera_round_trip():
    camera = Camera(64, 48, 50.5, 51.5, 30.25, 24.75)
    f = convert.info_fields(camera)
    msg = m.put(m.info(1, 1, 1), width=f.width, height=f.height, k=f.k, d=f.d, distortion_model=f.distortion_model)
    assert convert.camera_from_info(msg) == camera
    assert convert.rectifier_from_info(msg).camera == camera
    np.testing.assert_array_equal(f.p.reshape(3, 4)[:, :3], f.k.reshape(3, 3))


def test_refused_infos():
    for k in ([0] * 9, [np.nan, 0, 1, 0, 1, 1, 0, 0, 1], [5, 0, 1, 0, -5, 1, 0, 0, 1], [5, 0, np.inf, 0, 5, 1, 0, 0, 1]):
        msg = m.put(m.info(1, 640, 480), k=k)
        assert reason(convert.camera_from_info, msg) == "uncalibrated"
    with pytest.raises(BadMessage, match="calibrate"):
        convert.rectifier_from_info(m.put(m.info(1, 640, 480), k=[0] * 9))
    assert reason(convert.camera_from_info, m.info(1, 0, 0)) == "uncalibrated"
    assert reason(convert.rectifier_from_info, m.info(1, 640, 480, d=[np.nan] * 5)) == "uncalibrated"
    for model, d in (("equidistant", [0] * 4), ("equidistant", [0.1, 0, 0, 0]), ("plumb_bob", [0.1] * 7), ("double_sphere", [0.1]), ("none", [0.1] * 5)):
        assert reason(convert.rectifier_from_info, m.info(1, 640, 480, d=d, model=model)) == "unsupported_distortion"
    for d in ([0, 0, 5, 5, 0], [1000, 0, 0, 0, 0], [0, 0, 0, 0, 1e300], [0, 0, 1e6, 0, 0]):  # fx becomes negative, 1190 times K's, ..
        assert reason(convert.rectifier_from_info, m.info(1, 320, 240, d=d)) == "unsupported_distortion", d
    with pytest.raises(BadMessage, match=r"\[1000.0, .* 100, 100 become 3.*e\+05.*limit 4x.*image_rect"):
        convert.rectifier_from_info(m.info(1, 320, 240, d=[1000, 0, 0, 0, 0]))
    for model, d in (("plumb_bob", [0] * 5), ("", []), ("rational_polynomial", [0] * 8), ("inverse_brown_conrady", [0] * 5)):
        assert convert.rectifier_from_info(m.info(1, 640, 480, d=d, model=model)).camera.fx == 100


@pytest.mark.parametrize("d, model", [([-0.3, 0.1, 0.001, -0.002, 0], "plumb_bob"), ([0.15, 0, 0, 0], "plumb_bob"),
                                      ([0.2, 0.1, 0.001, 0, 0.01, 0.1, 0.05, 0.01], "rational_polynomial")])
def test_rectified_points_lie_where_a_pinhole_projects_them(d, model):
    """Independent oracle: the distortion polynomial of OpenCV's documentation, in numpy, on single bright points."""
    width, height = 320, 240
    lens = convert.rectifier_from_info(m.info(1, width, height, 250.0, d=d, model=model))
    k1, k2, p1, p2, k3, k4, k5, k6 = [*d, 0, 0, 0, 0][:8]
    for x, y in ((0.0, 0.0), (0.3, 0.2), (-0.35, 0.1), (0.1, -0.28)):
        r2 = x * x + y * y
        radial = (1 + k1 * r2 + k2 * r2**2 + k3 * r2**3) / (1 + k4 * r2 + k5 * r2**2 + k6 * r2**3)
        u = 250 * (x * radial + 2 * p1 * x * y + p2 * (r2 + 2 * x * x)) + (width - 1) / 2
        v = 250 * (y * radial + p1 * (r2 + 2 * y * y) + 2 * p2 * x * y) + (height - 1) / 2
        columns, rows = np.meshgrid(np.arange(width), np.arange(height))
        blob = np.exp(-((columns - u)**2 + (rows - v)**2) / (2 * 3.0**2))
        out = lens.rgb(np.dstack([np.round(255 * blob).astype(np.uint8)] * 3))[..., 0].astype(float)
        centre = np.array([(out * (columns + 0.5)).sum(), (out * (rows + 0.5)).sum()]) / out.sum()  # the engine's pixel centres
        expected = [lens.camera.fx * x + lens.camera.cx, lens.camera.fy * y + lens.camera.cy]
        np.testing.assert_allclose(centre, expected, atol=0.15)


def test_rectified_images_have_no_empty_border_and_no_invented_depth():
    for d in ([-0.3, 0.1, 0, 0, 0], [0.2, 0.05, 0, 0, 0]):
        lens = convert.rectifier_from_info(m.info(1, 320, 240, 250.0, d=d))
        assert lens.camera.width == 320 and lens.camera.height == 240 and lens.camera != lens.raw
        assert lens.rgb(np.full((240, 320, 3), 255, np.uint8)).min() == 255
        checker = (np.indices((240, 320)).sum(0) // 8 % 2 * 4 + 1).astype(np.float32)
        depth = lens.nearest(checker)
        assert set(np.unique(depth)) <= {0, 1, 5} and (depth == 0).mean() < 0.01


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
