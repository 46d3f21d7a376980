"""Points and masks through the Intake: pairing, where the lidar is, what is missing or unusable."""
import cv2
import messages as m
import numpy as np
import pytest

from spirula_ros import convert
from spirula_ros.convert import mask_from_msg
from spirula_ros.intake import Intake, IntakeConfig
from test_intake import H, MS, PERIOD, RGB, S, T0, W, Rig as ImageRig

F = 100.0
POINTS = np.array([[0.0, 0, 2], [0.03, 0.02, 4]])  # camera axes; pixels (4, 3) and (4, 3) + 0.75, 0.5
MASK = np.ones((H, W), np.uint8)
MASK[:, 5:] = 0


class Rig(ImageRig):
    def points(self, stamp, points=POINTS, frame_id="cam"):
        self.intake.on("points", m.cloud_of(stamp, points, frame_id), self.now)

    def mask(self, stamp, mask=MASK * 255, encoding="mono8"):
        self.intake.on("mask", m.image(stamp, *mask.shape[1::-1], encoding, mask.tobytes()), self.now)

    def feed(self, stamp, *names, **points):
        for name in names:
            self.points(stamp, **points) if name == "points" else getattr(self, name)(stamp)


def lidar_rig(**config):
    return Rig(**{"depth_source": "points", "pose_source": "pose"} | config)


# ---------------------------------------------------------------------------------------------------------- points

@pytest.mark.parametrize("order", [("info", "points", "pose", "image"), ("image", "pose", "points", "info")])
def test_points_become_depth(order):
    rig = lidar_rig()
    rig.feed(T0, *order)
    frame, = rig.frames
    assert frame.depth_m[3, 4] == 2 and (frame.depth_m > 0).sum() == 1 and frame.depth_m.dtype == np.float32  # the nearer of both hides the other
    assert rig.dropped == {} and [s.kind for s in rig.intake.states()] == ["image", "points", "info", "pose", "tf"]


def test_the_nearest_cloud_is_taken_once_it_is_known():
    rig = lidar_rig()
    rig.info()
    rig.pose(T0 - 100 * MS)
    rig.pose(T0 + 100 * MS)
    rig.points(T0 - 60 * MS, [[0, 0, 1.0]])
    rig.image(T0)
    assert not rig.frames and rig.intake.waiting_for == "the points of its stamp"
    rig.points(T0 + 40 * MS, [[0, 0, 3.0]])
    assert rig.frames[0].depth_m[3, 4] == 3


@pytest.mark.parametrize("mode, frames", [("require", 0), ("use_if_there", 1)])
def test_no_points(mode, frames):
    rig = lidar_rig(depth=mode)
    rig.points(T0 - 150 * MS)
    rig.feed(T0, "info", "pose", "image")
    rig.expire()
    assert len(rig.frames) == frames and rig.dropped == ({} if frames else {"no_points": 1})
    if not frames:
        assert all(word in rig.intake.last_problem for word in ("intake.points_tolerance_s = 0.1", "use_if_there", "none has arrived"))


def test_the_motion_between_cloud_and_image_counts():
    """The robot drives sideways by 1 m/s: what lay on the axis at the cloud's stamp lies beside it at the image's."""
    rig = lidar_rig()
    rig.info()
    for i in range(-2, 3):
        rig.pose(T0 + i * PERIOD, 0.1 * i)
    rig.points(T0 + 50 * MS, [[0, 0, 2.0]])
    rig.image(T0)
    v, u = np.argwhere(rig.frames[0].depth_m)[0]
    assert (v, u) == (3, int(W / 2 + F * 0.05 / 2)) and rig.frames[0].depth_m[v, u] == 2


def test_the_pose_at_the_cloud_is_waited_for():
    rig = lidar_rig()
    rig.feed(T0, "info", "pose", "image")
    rig.points(T0 + 50 * MS)
    assert not rig.frames and "at the stamp of what was measured beside it" in rig.intake.waiting_for
    rig.pose(T0 + PERIOD)
    assert len(rig.frames) == 1
    rig.feed(T0 + PERIOD, "image")
    rig.points(T0 + PERIOD + 40 * MS)
    rig.expire()
    assert rig.dropped == {"pose_too_old": 1} and "at the stamp of what was measured beside it" in rig.intake.last_problem


def test_points_in_the_frame_of_the_map():
    rig = lidar_rig()
    rig.info()
    rig.pose(T0, 1.0)
    rig.points(T0 + 90 * MS, [[1, 0, 2.0]], frame_id="map")  # registered by whoever made them: their stamp does not matter, nor poses at it
    rig.image(T0)
    assert rig.frames[0].depth_m[3, 4] == 2


LIDAR_TF = m.tf(m.pose(1, (0, -0.01, 0.5), q=(0.5, -0.5, 0.5, 0.5), frame_id="cam", child="lidar", kind="TransformStamped"))  # x forward, y left, z up


@pytest.mark.parametrize("source", ["pose", "tf"])
def test_the_lidar_s_place_by_tf(source):
    rig = lidar_rig(pose_source=source)
    if source == "tf":
        rig.intake.on("tf", m.tf(m.pose(T0, (3, 0, 0), kind="TransformStamped", child="cam")), 0.0)
    else:
        rig.pose(T0, 3.0)
    rig.info()
    rig.image(T0)
    rig.points(T0, [[1.5, 0, 0]], frame_id="lidar")
    assert not rig.frames and "'lidar'" in rig.intake.waiting_for
    rig.intake.on("tf_static", LIDAR_TF, 0.0)
    assert np.argwhere(rig.frames[0].depth_m).tolist() == [[2, 4]] and rig.frames[0].depth_m[2, 4] == pytest.approx(2)
    assert rig.frames[0].T_world_cam[0, 3] == 3


def test_the_lidar_s_place_by_parameter():
    rig = lidar_rig(T_camera_lidar=(0, -0.01, 0.5, 0.5, -0.5, 0.5, 0.5))
    rig.feed(T0, "info", "pose", "image", "points", points=[[1.5, 0, 0]], frame_id="lidar")
    assert rig.frames[0].depth_m[2, 4] == pytest.approx(2)


def test_an_unknown_place_of_the_lidar():
    rig = lidar_rig()
    rig.feed(T0, "info", "pose", "image", "points", frame_id="velodyne")
    rig.expire()
    assert rig.dropped == {"no_extrinsics": 1}
    assert all(word in rig.intake.last_problem for word in ("'velodyne'", "'cam'", "/tf_static", "intake.T_camera_lidar"))


def test_unusable_points_end_the_image_under_their_reason():
    rig = lidar_rig()
    rig.feed(T0, "info", "pose", "image")
    rig.intake.on("points", m.cloud(T0, [("x", 0, 7, 1)], 12, bytes(12), (1, 1), frame_id="cam"), 0.0)
    assert rig.dropped == {"bad_points": 1} and "x FLOAT32 at 0" in rig.intake.last_problem
    rig.points(0)
    assert rig.intake.states()[1].bad == {"bad_stamp": 1}


def test_an_empty_cloud_is_depth_that_knows_nothing():
    rig = lidar_rig()
    rig.feed(T0, "info", "pose", "image", "points", points=np.empty((0, 3)))
    assert not rig.frames[0].depth_m.any()


def test_points_go_into_the_rectified_camera():
    rig = lidar_rig()
    rig.info(d=[-0.3, 0, 0, 0, 0], f=5.0)
    rig.feed(T0, "pose", "image", "points", points=[[0.55, 0.35, 1.0]])
    camera = rig.frames[0].camera
    v, u = np.argwhere(rig.frames[0].depth_m)[0]
    assert (u, v) == (int(0.55 * camera.fx + camera.cx), int(0.35 * camera.fy + camera.cy)) and camera.fx != 5


@pytest.mark.parametrize("source", ["image", "points"])
def test_what_is_not_the_depth_source_is_ignored(source):
    rig = Rig(depth_source=source)
    rig.info()
    rig.pose(T0)
    rig.image(T0)
    rig.intake.on("depth" if source == "points" else "points", object(), 0.0)
    rig.intake.on("mask", object(), 0.0)
    rig.intake.refused("mask", convert.BadMessage("bad_message", "x"))
    assert rig.intake.pending == 1
    rig.points(T0) if source == "points" else rig.depth(T0)
    assert (rig.frames[0].depth_m > 0).sum() == (1 if source == "points" else W * H)


def test_a_restarted_clock_forgets_points_and_masks():
    rig = lidar_rig(mask="require")
    rig.points(T0 + 50 * S)
    rig.mask(T0 + 50 * S)
    rig.feed(T0 + 50 * S, "image")
    rig.feed(T0, "info", "pose", "image")
    assert rig.dropped == {"time_jump": 1} and not rig.frames
    rig.mask(T0)
    rig.points(T0)
    assert len(rig.frames) == 1


# ------------------------------------------------------------------------------------------------------------ mask

@pytest.mark.parametrize("order", [("mask", "info", "depth", "pose", "image"), ("image", "pose", "depth", "info", "mask")])
def test_a_frame_gets_the_mask_of_its_stamp(order):
    rig = Rig(mask="require")
    rig.feed(T0, *order)
    np.testing.assert_array_equal(rig.frames[0].mask, MASK)
    assert rig.dropped == {} and (rig.frames[0].depth_m == 2).all()


@pytest.mark.parametrize("mode, frames", [("require", 0), ("use_if_there", 1)])
def test_no_mask(mode, frames):
    rig = Rig(mask=mode)
    rig.mask(T0 - 30 * MS)
    rig.feed(T0, "info", "depth", "pose", "image")
    assert rig.intake.pending == 1 and rig.intake.waiting_for == "the mask of its stamp"
    rig.expire()
    assert len(rig.frames) == frames and rig.dropped == ({} if frames else {"no_mask": 1})
    if frames:
        assert rig.frames[0].mask is None
    else:
        assert "intake.sync_tolerance_s = 0.02" in rig.intake.last_problem and "intake.mask to use_if_there" in rig.intake.last_problem


def test_optional_masks_that_never_come_are_waited_for_only_at_the_start():
    rig = Rig(mask="use_if_there", wait_s=0.5)
    rig.feed(T0, "info", "depth", "pose", "image")
    assert not rig.frames
    rig.now = 0.5
    rig.feed(T0 + PERIOD, "depth", "pose", "image")
    assert len(rig.frames) == 2


def test_a_mask_of_another_size_is_refused():
    rig = Rig(mask="require")
    rig.mask(T0, np.ones((3, 4), np.uint8))
    rig.feed(T0, "info", "depth", "pose", "image")
    assert rig.dropped == {"mask_size_mismatch": 1} and "4x3" in rig.intake.last_problem and "8x6" in rig.intake.last_problem


def test_masks_are_rectified_with_the_image():
    rig = Rig(mask="require")
    rig.info(d=[-0.3, 0, 0, 0, 0], f=5.0)
    mask = (np.random.default_rng(0).random((H, W)) < 0.5).astype(np.uint8)
    rig.mask(T0, mask)
    rig.feed(T0, "depth", "pose", "image")
    np.testing.assert_array_equal(rig.frames[0].mask, convert.rectifier_from_info(m.info(T0, W, H, 5.0, d=[-0.3, 0, 0, 0, 0])).nearest(mask))
    assert set(np.unique(rig.frames[0].mask)) == {0, 1}


@pytest.mark.parametrize("encoding, dtype", [("mono8", np.uint8), ("8UC1", np.uint8), ("8SC1", np.int8), ("mono16", np.uint16), ("16UC1", np.uint16)])
@pytest.mark.parametrize("value", [1, 127, -1])
def test_mask_encodings(encoding, dtype, value):
    mask = (MASK * np.array(value, np.int64)).astype(dtype)
    np.testing.assert_array_equal(mask_from_msg(m.image(T0, W, H, encoding, mask.tobytes())), MASK)


def compressed(image, form):
    return m.stamped("sensor_msgs/msg/CompressedImage", T0, "cam", format=form, data=cv2.imencode(f".{form}", image)[1].tobytes())


def test_compressed_masks():
    np.testing.assert_array_equal(mask_from_msg(compressed(MASK * 255, "png")), MASK)
    for msg, word in ((compressed(MASK * 255, "jpeg"), "png"), (compressed(np.dstack([MASK] * 3), "png"), "one channel"), (m.image(T0, W, H, "rgb8", RGB.tobytes()), "mono8")):
        with pytest.raises(convert.BadMessage, match=word) as caught:
            mask_from_msg(msg)
        assert caught.value.reason == "unknown_encoding"


def test_bad_words_are_refused():
    for values, text in (({"mask": "on"}, "off | use_if_there | require"), ({"depth_source": "lidar"}, "image | points"), ({"T_camera_lidar": (0,) * 7}, "unit quaternion")):
        with pytest.raises(ValueError) as caught:
            Rig(**values)
        assert text in str(caught.value)


# -------------------------------------------------------------------------------------------- from message to the map

def test_a_masked_person_neither_enters_the_map_nor_the_measurement():
    """A wall, and something red before it in the left half, at another place in each frame. The held-out frame shows it too."""
    from spirula_gpu.config import Config, replaced
    from spirula_gpu.mapper import Mapper
    width, height = 64, 48
    wall = cv2.resize(np.random.default_rng(0).integers(60, 200, (12, 16, 3)).astype(np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
    figures = {}
    for masked in (True, False):
        mapper = Mapper(replaced(Config(), {"engine.backend": "cpu", "engine.threads": 1, "train.steps_per_frame": 20, "gate.min_rotation_deg": 0.0, "gate.min_sharpness": 0.0}))
        rig = Rig(holdout_every=4, mask="require" if masked else "off")
        rig.take = lambda frame: (mapper.ledger.arrived(), mapper.submit(frame), mapper.run_due())
        rig.intake._emit = rig.take
        for i in range(8):
            rgb, depth_m, mask, stamp = wall.copy(), np.full((height, width), 3, np.float32), np.full((height, width), 255, np.uint8), T0 + i * PERIOD
            at = np.s_[8:40, 4 * i:4 * i + 12]
            rgb[at], depth_m[at], mask[at] = (255, 0, 0), 1, 0
            rig.info(stamp, width=width, height=height, f=60.0)
            rig.pose(stamp)
            rig.intake.on("depth", m.image(stamp, width, height, "32FC1", depth_m.tobytes()), 0.0)
            rig.mask(stamp, mask)
            rig.image(stamp, data=rgb.tobytes(), size=(width, height))
        near = mapper._engine.read("map.mean")[:, 2] < 2
        held_out = mapper.evaluate()
        assert len(held_out) == 2 and all((h.frame.mask is not None) == masked for h in held_out)
        figures[masked] = int(near.sum()), float(np.mean([h.psnr for h in held_out]))
        mapper.close()
    assert figures[True][0] == 0 and figures[False][0] > 50
    assert figures[True][1] > figures[False][1] + 5, figures


# ---------------------------------------------------------------------------------------- depth of another camera

def unregistered_rig(**config):
    rig = Rig(**config)
    rig.intake = Intake(IntakeConfig(**config), rig.ledger, rig.take, 0, lambda: 0.0, unregistered=True)
    return rig


def depth_of_another(rig, stamp, size=(4, 3), metres=2.0, frame="depth_cam"):
    rig.intake.on("depth", m.image(stamp, *size, "32FC1", np.full(size[::-1], metres, np.float32).tobytes(), frame_id=frame), rig.now)


def test_depth_of_another_camera_is_registered():
    """Half as many pixels and half the focal length, 0.1 m behind the camera of the images."""
    rig = unregistered_rig()
    rig.info(f=10.0)
    rig.intake.on("depth_info", m.info(T0, 4, 3, 5.0), rig.now)
    rig.pose(T0)
    depth_of_another(rig, T0)
    rig.image(T0)
    assert not rig.frames and "'depth_cam'" in rig.intake.waiting_for and "/tf_static" in rig.intake.waiting_for
    rig.intake.on("tf_static", m.tf(m.pose(0, (0, 0, -0.1), kind="TransformStamped", frame_id="cam", child="depth_cam")), rig.now)
    frame, = rig.frames
    assert frame.depth_m.shape == (H, W) and frame.depth_m.dtype == np.float32
    np.testing.assert_allclose(frame.depth_m[frame.depth_m > 0], 1.9, rtol=1e-6)
    assert (frame.depth_m > 0).mean() == 1 and rig.dropped == {}


def test_depth_of_another_camera_needs_its_info_of_its_size():
    rig = unregistered_rig(T_camera_lidar=(0.0, 0.0, -0.1, 0.0, 0.0, 0.0, 1.0))   # instead of TF
    for i, (info, why) in enumerate(((None, "no_depth_info"), ((8, 3), "info_size_mismatch"))):
        stamp = T0 + i * PERIOD
        rig.info(f=10.0)
        if info:
            rig.intake.on("depth_info", m.info(stamp, *info, 5.0), rig.now)
        rig.pose(stamp)
        depth_of_another(rig, stamp)
        rig.image(stamp)
        assert rig.intake.pending == 1 and not rig.frames
        rig.expire()
        assert rig.dropped[why] == 1 and "topics.depth_info" in rig.intake.last_problem
    rig.intake.on("depth_info", m.info(T0 + 2 * PERIOD, 4, 3, 5.0), rig.now)
    rig.pose(T0 + 2 * PERIOD)
    depth_of_another(rig, T0 + 2 * PERIOD)
    rig.image(T0 + 2 * PERIOD)
    assert len(rig.frames) == 1
    rig.intake.on("depth_info", m.info(T0 + 3 * PERIOD, 4, 3, 0.0), rig.now)
    assert [s for s in rig.intake.states() if s.kind == "depth_info"][0].bad == {"uncalibrated": 1}


def test_depth_info_is_ignored_where_depth_is_registered():
    rig = Rig()
    rig.intake.on("depth_info", m.info(T0, 4, 3, 5.0), rig.now)
    rig.all_at(T0)
    assert len(rig.frames) == 1
