"""intake.py: pairing by stamp, waiting, held-out choice; every bad input ends under exactly one reason and nothing raises."""
import copy

import cv2
import messages as m
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from spirula_gpu.report import FrameLedger
from spirula_ros import convert
from spirula_ros.intake import Intake, IntakeConfig

W, H, S, MS = 8, 6, 10**9, 10**6
T0 = 100 * S
RGB = np.arange(W * H * 3, dtype=np.uint8).reshape(H, W, 3)
PERIOD = 100 * MS


class Rig:
    """An Intake with its frames and shorthands; time is given explicitly, in seconds."""

    def __init__(self, holdout_every=0, clock=lambda: 0.0, **config):
        self.ledger, self.frames = FrameLedger(), []
        self.intake = Intake(IntakeConfig(**config), self.ledger, self.take, holdout_every, clock)
        self.now = 0.0

    def take(self, frame):
        self.frames.append(frame)
        self.ledger.used()

    def image(self, stamp, encoding="rgb8", data=RGB.tobytes(), size=(W, H), **more):
        self.intake.on_image(m.image(stamp, *size, encoding, data, **more), self.now)

    def depth(self, stamp, metres=2.0, size=(W, H)):
        self.intake.on_depth(m.image(stamp, *size, "32FC1", np.full(size[::-1], metres, np.float32).tobytes()), self.now)

    def info(self, stamp=T0, **more):
        self.intake.on_info(m.info(stamp, **{"width": W, "height": H} | more), self.now)

    def pose(self, stamp, x=0.0, **more):
        self.intake.on_pose(m.pose(stamp, (x, 0, 0), **more), self.now)

    def all_at(self, stamp):
        self.info(stamp)
        self.depth(stamp)
        self.pose(stamp)
        self.image(stamp)

    def expire(self):
        self.now += self.intake.config.wait_s
        self.intake.poll(self.now)

    @property
    def dropped(self):
        counts = self.ledger.counts()
        assert counts.pending == self.intake.pending  # the rig uses every frame at once
        assert counts.frames_in == counts.used + sum(counts.dropped.values()) + counts.pending
        return counts.dropped


# --------------------------------------------------------------------------------------------------------- pairing

@pytest.mark.parametrize("order", [("info", "depth", "pose", "image"), ("image", "pose", "depth", "info"), ("depth", "image", "info", "pose")])
def test_a_frame_is_complete_in_any_order(order):
    rig = Rig()
    for name in order:
        assert not rig.frames
        getattr(rig, name)(T0)
    frame, = rig.frames
    assert frame.stamp_ns == T0 and frame.frame_id == "cam" and not frame.held_out
    np.testing.assert_array_equal(frame.rgb, RGB)
    assert (frame.depth_m == 2).all() and (frame.camera.cx, frame.camera.cy) == (W / 2, H / 2)
    assert rig.dropped == {} and rig.intake.map_frame == "map"


@pytest.mark.parametrize("family", ["rosbags", "rclpy"])
def test_both_message_families(family):
    rig = Rig()
    rig.intake.on_info(m.info(T0, W, H, family=family), 0.0)
    rig.intake.on_depth(m.image(T0, W, H, "16UC1", np.full((H, W), 1500, np.uint16).tobytes(), family=family), 0.0)
    rig.intake.on_pose(m.pose(T0, (1, 2, 3), family=family), 0.0)
    rig.intake.on_image(m.image(T0, W, H, "bgr8", RGB.tobytes(), family=family), 0.0)
    frame, = rig.frames
    np.testing.assert_array_equal(frame.rgb, RGB[..., ::-1])
    np.testing.assert_allclose(frame.depth_m, 1.5)
    np.testing.assert_array_equal(frame.T_world_cam[:3, 3], [1, 2, 3])


def test_the_pose_is_interpolated_at_the_image_stamp():
    rig = Rig(depth="ignore")
    rig.info()
    rig.pose(T0, 0.0)
    rig.image(T0 + 25 * MS)
    assert rig.intake.pending == 1 and "older than the image" in rig.intake.waiting_for
    rig.pose(T0 + PERIOD, 1.0)
    np.testing.assert_allclose(rig.frames[0].T_world_cam[:3, 3], [0.25, 0, 0])
    assert rig.frames[0].depth_m is None and rig.intake.waiting_for == ""


def test_the_nearest_depth_is_taken_once_it_is_known():
    rig = Rig(sync_tolerance_s=0.03)
    rig.info()
    rig.pose(T0)
    rig.depth(T0 - 20 * MS, 1.0)
    rig.image(T0)
    assert not rig.frames  # a nearer one may come
    rig.depth(T0 + 10 * MS, 3.0)
    assert (rig.frames[0].depth_m == 3).all()
    rig.pose(T0 + PERIOD)
    rig.image(T0 + PERIOD)
    rig.depth(T0 + PERIOD - 25 * MS, 4.0)
    rig.expire()  # nothing nearer came
    assert (rig.frames[1].depth_m == 4).all() and rig.dropped == {}


def test_optional_depth():
    rig = Rig(depth="use_if_there", wait_s=0.5)
    rig.info()
    for i in range(4):
        rig.pose(T0 + i * PERIOD)
    rig.image(T0)
    assert not rig.frames  # the first images wait: depth may start a little later
    rig.now = 0.5
    rig.image(T0 + PERIOD)
    assert [f.depth_m for f in rig.frames] == [None, None]  # now it is known that there is none
    rig.depth(T0 + 2 * PERIOD)
    rig.image(T0 + 2 * PERIOD)
    assert rig.frames[2].depth_m is not None
    rig.image(T0 + 3 * PERIOD)
    assert len(rig.frames) == 3
    rig.expire()
    assert rig.frames[3].depth_m is None and rig.dropped == {}


def test_frames_leave_in_order():
    rig = Rig(depth="ignore")
    rig.image(T0)
    rig.image(T0 + PERIOD)
    rig.pose(T0)
    rig.pose(T0 + PERIOD)
    rig.info()
    assert [f.stamp_ns for f in rig.frames] == [T0, T0 + PERIOD]


def test_held_out_counts_complete_frames_only():
    rig = Rig(holdout_every=4, depth="ignore")
    rig.info()
    for i in range(24):
        rig.pose(T0 + i * PERIOD)
        rig.image(T0 + i * PERIOD, "rgb8" if i % 3 else "foo")  # every third never becomes a frame
    assert [f.held_out for f in rig.frames] == [i % 4 == 2 for i in range(16)]
    assert rig.dropped == {"unknown_encoding": 8}


def test_distorted_images_are_rectified_with_their_depth():
    rig = Rig()
    depth_m = np.arange(1, 1 + W * H, dtype=np.float32).reshape(H, W)
    rig.info(d=[-0.3, 0, 0, 0, 0], f=5.0)
    rig.intake.on_depth(m.image(T0, W, H, "32FC1", depth_m.tobytes()), 0.0)
    rig.pose(T0)
    rig.image(T0)
    frame, = rig.frames
    lens = convert.rectifier_from_info(m.info(T0, W, H, 5.0, d=[-0.3, 0, 0, 0, 0]))
    assert frame.camera == lens.camera != lens.raw
    np.testing.assert_array_equal(frame.rgb, lens.rgb(RGB))
    np.testing.assert_array_equal(frame.depth_m, lens.nearest(depth_m))
    assert not np.array_equal(frame.depth_m, depth_m)


def test_maps_are_made_once_and_again_when_the_camera_changes(monkeypatch):
    made = []
    real = convert.rectifier_from_info
    monkeypatch.setattr("spirula_ros.companions.rectifier_from_info", lambda *args: made.append(1) or real(*args))
    rig = Rig()
    for i in range(5):
        rig.all_at(T0 + i * PERIOD)
    rig.info(f=50.0)
    rig.info(T0 + S, f=50.0)
    assert len(made) == 2 and len(rig.frames) == 5


# ------------------------------------------------------------------------------------------------- where poses are

def test_odometry_of_a_body_needs_the_camera_s_place_in_it():
    def odom(rig, stamp):
        rig.intake.on("odom", m.pose(stamp, (1, 0, 0), kind="Odometry", frame_id="odom", child="base"), rig.now)

    rig = Rig(pose_source="odom", depth="ignore")
    rig.info()
    odom(rig, T0)
    rig.image(T0)
    assert not rig.frames
    rig.expire()
    assert rig.dropped == {"no_extrinsics": 1} and "intake.T_body_camera" in rig.intake.last_problem and "'base'" in rig.intake.last_problem
    odom(rig, T0 + PERIOD)
    rig.image(T0 + PERIOD)
    rig.intake.on("tf_static", m.tf(m.pose(0, (0, 0, 0.5), kind="TransformStamped", frame_id="base", child="cam")), rig.now)
    np.testing.assert_allclose(rig.frames[0].T_world_cam[:3, 3], [1, 0, 0.5])
    assert rig.intake.map_frame == "odom"

    s = np.sqrt(0.5)
    rig = Rig(pose_source="odom", depth="ignore", T_body_camera=(0, 0, 0.5, 0, 0, s, s))
    rig.info()
    odom(rig, T0)
    rig.image(T0)
    np.testing.assert_allclose(rig.frames[0].T_world_cam, [[0, -1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0.5], [0, 0, 0, 1]], atol=1e-12)

    rig = Rig(pose_source="odom", depth="ignore", camera_frame="base")  # said to be the same
    rig.info()
    odom(rig, T0)
    rig.image(T0)
    assert rig.frames[0].frame_id == "base" and rig.frames[0].T_world_cam[0, 3] == 1


def test_poses_from_tf():
    rig = Rig(pose_source="tf", depth="ignore")
    rig.info()
    rig.image(T0 + 50 * MS)
    for i in (0, 1):
        rig.intake.on("tf", m.tf(m.pose(T0 + i * PERIOD, (i, 0, 0), kind="TransformStamped", frame_id="map", child="base")), rig.now)
        assert not rig.frames
    rig.intake.on("tf_static", m.tf(m.pose(0, (0, 0, 2), kind="TransformStamped", frame_id="base", child="cam")), rig.now)
    np.testing.assert_allclose(rig.frames[0].T_world_cam[:3, 3], [0.5, 0, 2])
    rig.intake.on("pose", m.pose(T0), rig.now)  # not the source: ignored
    assert {s.kind: s.count for s in rig.intake.states()} == {"image": 1, "depth": 0, "info": 1, "pose": 0, "tf": 3}


def test_a_broken_tf_tree_is_named():
    rig = Rig(pose_source="tf", depth="ignore")
    rig.info()
    rig.intake.on_tf(m.tf(m.pose(0, kind="TransformStamped", frame_id="world", child="base")), True, 0.0)
    rig.image(T0)
    rig.expire()
    assert rig.dropped == {"no_pose": 1}
    assert "known frames: base, world" in rig.intake.last_problem and "intake.map_frame" in rig.intake.last_problem
    rig.intake.on_tf(m.tf(m.pose(0, kind="TransformStamped", frame_id="base", child="world")), True, 0.0)
    assert rig.intake.states()[-1].bad == {"bad_tree": 1}


# ------------------------------------------------------------------------------------------------------- bad input

def uncalibrated(rig):
    rig.intake.on_info(m.put(m.info(T0, W, H), k=[0] * 9), rig.now)
    rig.depth(T0)
    rig.pose(T0)
    rig.image(T0)


def bad_pose(rig, **values):
    for i in range(3):
        rig.pose(T0 + (i - 1) * 50 * MS, **values)
    rig.info()
    rig.depth(T0)
    rig.image(T0)


def without(*names):
    def feed(rig):
        for name in ("info", "depth", "pose", "image"):
            if name not in names:
                getattr(rig, name)(T0)
    return feed


def pose_at(*offsets_ms):
    def feed(rig):
        for ms in offsets_ms:
            rig.pose(T0 + ms * MS)
        rig.info()
        rig.depth(T0)
        rig.image(T0)
    return feed


def image_of(**values):
    def feed(rig):
        without("image")(rig)
        rig.image(**{"stamp": T0} | values)
    return feed


def depth_of(encoding, data):
    def feed(rig):
        rig.info()
        rig.pose(T0)
        rig.intake.on_depth(m.image(T0, W, H, encoding, data), rig.now)
        rig.image(T0)
    return feed


BAD = {  # case -> (feed, reason, what the text must hold: the number, the limit, the remedy)
    "no CameraInfo": (without("info"), "no_camera_info", ["intake.wait_s = 1.0"]),
    "K is zero": (uncalibrated, "uncalibrated", ["calibrate"]),
    "K is NaN": (lambda rig: (rig.info(f=np.nan), without("info")(rig)), "uncalibrated", ["calibrate"]),
    "info of another size": (lambda rig: (rig.info(width=W * 2), without("info")(rig)), "info_size_mismatch", ["8x6", "16x6", "camera_info of this"]),
    "another lens": (lambda rig: (rig.info(model="double_sphere", d=[0.1] * 4), without("info")(rig)), "unsupported_distortion", ["double_sphere", "4 coefficients", "image_rect"]),
    "distortion beyond reason": (lambda rig: (rig.info(d=[0, 0, 5, 5, 0]), without("info")(rig)), "unsupported_distortion", ["5.0, 5.0", "limit 4x"]),
    "distortion after a good CameraInfo": (lambda rig: (rig.info(), rig.info(d=[0, 0, 5, 5, 0]), without("info")(rig)), "unsupported_distortion", ["limit 4x"]),
    "odd width of two-pixel colour": (image_of(encoding="yuyv", size=(7, 6), data=bytes(84)), "bad_image_size", ["7x6", "width must be even"]),
    "unknown encoding": (image_of(encoding="foo12"), "unknown_encoding", ["foo12", "rgb8"]),
    "cut image": (image_of(data=RGB.tobytes()[:-1], step=W * 3), "bad_image_size", ["143"]),
    "no data": (image_of(data=b"", step=W * 3), "bad_image_size", ["has 0"]),
    "zero size": (image_of(size=(0, 6)), "bad_image_size", ["0x6"]),
    "depth of another size": (lambda rig: (rig.depth(T0, size=(4, 3)), without("depth")(rig)), "depth_size_mismatch", ["4x3", "8x6", "aligned_depth_to_color"]),
    "depth is colour": (depth_of("rgb8", RGB.tobytes()), "unknown_encoding", ["rgb8", "32FC1"]),
    "depth is cut": (depth_of("32FC1", b"\0" * 6), "bad_image_size", ["has 6"]),
    "no depth": (without("depth"), "no_depth", ["0.02 s", "none has arrived", "use_if_there"]),
    "depth far away in time": (lambda rig: (rig.depth(T0 + 30 * MS), without("depth")(rig)), "no_depth", ["0.030 s", "intake.sync_tolerance_s"]),
    "no pose": (without("pose"), "no_pose", ["pose topic", "intake.pose_source"]),
    "poses start later": (pose_at(5, 10), "no_pose", ["0.005 s newer"]),
    "pose too old": (pose_at(-300, -200), "pose_too_old", ["0.200 s older", "intake.wait_s = 1.0", "use_sim_time"]),
    "poses too far apart": (pose_at(-300, 300), "pose_gap", ["0.600 s apart", "limit 0.5", "intake.max_gap_s"]),
    "pose is NaN": (lambda rig: bad_pose(rig, x=np.nan), "bad_pose", ["not finite"]),
    "pose is beyond the map's numbers": (lambda rig: bad_pose(rig, x=1e9), "bad_pose", ["1000000000.0", "more than 100000 m", "local frame"]),
    "quaternion is zero": (lambda rig: bad_pose(rig, q=(0, 0, 0, 0)), "bad_pose", ["norm 0", "0.01"]),
    "quaternion is not unit": (lambda rig: bad_pose(rig, q=(0, 0, 0, 1.1)), "bad_pose", ["norm 1.1"]),
    "pose in another frame": (lambda rig: (rig.pose(T0 - 40 * S, frame_id="odom"), bad_pose(rig, frame_id="map")), "bad_pose", ["'map'", "'odom'", "intake.map_frame"]),
    "stamp is zero": (image_of(stamp=0), "bad_stamp", ["header.stamp"]),
    "pose stamp is zero": (lambda rig: (rig.pose(0), without("pose")(rig)), "no_pose", []),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_under_one_reason(case):
    feed, reason, words = BAD[case]
    rig = Rig()
    feed(rig)
    rig.expire()
    assert rig.dropped == {reason: 1} and not rig.frames and rig.intake.pending == 0
    assert reason in rig.intake.last_problem and reason in rig.intake.describe_silence(rig.now)
    for word in words:
        assert word in rig.intake.last_problem
    rig.all_at(T0 + 60 * S) if case != "pose in another frame" else None  # and the next good frame is taken
    assert len(rig.frames) == (case != "pose in another frame")


@pytest.mark.parametrize("case", BAD)
def test_the_end_of_the_stream_gives_the_same_reasons(case):
    feed, reason, _ = BAD[case]
    rig = Rig()
    feed(rig)
    rig.intake.flush()
    assert rig.dropped == {reason: 1} and rig.intake.pending == 0


@pytest.mark.parametrize("x", [np.nan, 1e9])
def test_one_bad_pose_between_good_ones_costs_no_frame(x):
    rig = Rig(depth="ignore")
    rig.info()
    rig.pose(T0 - 50 * MS)
    rig.pose(T0, x=x)
    rig.pose(T0 + 50 * MS)
    rig.image(T0)
    assert len(rig.frames) == 1 and rig.intake.states()[3].bad == {"bad_pose": 1}


def test_tf_may_be_far_in_its_parts_but_not_as_a_whole():
    for x, used in ((-6e6, 1), (0.0, 0)):
        rig = Rig(pose_source="tf", depth="ignore", map_frame="map")
        rig.info()
        for parent, child, at in (("map", "earth", x), ("earth", "cam", 6e6)):
            rig.intake.on_tf(m.tf(m.pose(T0, (at, 0, 0), frame_id=parent, kind="TransformStamped", child=child)), False, rig.now)
        rig.image(T0)
        assert len(rig.frames) == used and rig.dropped == ({} if used else {"bad_pose": 1})


def test_texts_do_not_grow():
    rig = Rig(depth="ignore")
    rig.info()
    for i in range(50):
        rig.pose(T0 + i * PERIOD, x=np.nan)
        rig.image(T0 + i * PERIOD)
        rig.expire()
    assert rig.dropped == {"bad_pose": 50} and len(rig.intake.last_problem) < 400


def test_an_undecodable_recording():
    rig = Rig()
    bad = convert.BadMessage("bad_message", "12 bytes are not an image")
    for kind in ("image", "compressed", "depth", "info", "pose", "odom", "tf", "tf_static"):
        rig.intake.refused(kind, bad)
    assert rig.dropped == {"bad_message": 2} and rig.ledger.counts().frames_in == 2
    assert {s.kind: s.bad.get("bad_message") for s in rig.intake.states()} == {"image": 2, "depth": 1, "info": 1, "pose": 2, "tf": 2}


KIND_OF = {"image_to_rgb": "image", "rectifier_from_info": "info", "pose_from_msg": "pose"}


@pytest.mark.parametrize("place", KIND_OF)
def test_an_exception_that_nobody_thought_of_is_counted(place, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("eleven")
    rig = Rig(depth="ignore")
    rig.all_at(T0)
    module = "one_camera" if place == "image_to_rgb" else "companions"
    with monkeypatch.context() as patch:
        patch.setattr(f"spirula_ros.companions.{place}", broken)
        rig.info(f=50.0)
        rig.pose(T0 + PERIOD)
        rig.image(T0 + PERIOD)
        rig.expire()
    assert len(rig.frames) == 1 and sum(rig.dropped.values()) == 1, "no frame with the lens or the pose of another"
    state = next(s for s in rig.intake.states() if s.kind == KIND_OF[place])
    assert state.bad == {"internal_error": 1}
    if place == "image_to_rgb":
        assert rig.dropped == {"internal_error": 1} and "ZeroDivisionError: eleven" in rig.intake.last_problem
    rig.all_at(T0 + 2 * PERIOD)
    assert len(rig.frames) == 2


def test_an_exception_in_a_transform_is_counted(monkeypatch):
    rig = Rig(pose_source="tf")
    monkeypatch.setattr("spirula_ros.companions.pose_from_msg", lambda _: 1 / 0)
    rig.intake.on("tf", m.tf(m.pose(T0, kind="TransformStamped", child="cam")), 0.0)
    assert rig.intake.states()[-1].bad == {"internal_error": 1}


def test_queue_full_drops_the_oldest():
    rig = Rig(depth="ignore", queue_frames=3)
    for i in range(5):
        rig.image(T0 + i * PERIOD)
    assert rig.dropped == {"queue_full": 2} and "intake.queue_frames" in rig.intake.last_problem and "CameraInfo" in rig.intake.last_problem
    for i in range(5):
        rig.pose(T0 + i * PERIOD)
    rig.info()
    assert [f.stamp_ns for f in rig.frames] == [T0 + i * PERIOD for i in (2, 3, 4)]


# ------------------------------------------------------------------------------------------------------------ time

def test_stamps_that_go_back_a_little():
    rig = Rig()
    rig.all_at(T0)
    rig.image(T0)
    rig.image(T0 - 500 * MS)
    assert rig.dropped == {"stamp_backwards": 2} and "0.500 s before" in rig.intake.last_problem
    rig.all_at(T0 + PERIOD)
    assert len(rig.frames) == 2 and rig.intake.time_jumps == 0


@pytest.mark.parametrize("mode", ["clock", "message time"])
@pytest.mark.parametrize("order", [("image", "info", "depth", "pose"), ("image", "info", "pose", "depth"), ("pose", "depth", "info", "image")])
@pytest.mark.parametrize("back", [0, 5 * S])
def test_a_looped_recording_maps_the_same_frames_again(order, mode, back):
    """Whatever jumps first. back: each loop starts that much earlier, so that no old stamp fits by accident."""
    rig = Rig(**({"clock": None} if mode == "message time" else {}))
    for loop in range(3):
        for i in range(20):
            rig.now = None if mode == "message time" else loop * 100.0 + i * 0.1
            for name in order:
                getattr(rig, name)(T0 - loop * back + i * PERIOD)
    rig.intake.flush()
    assert rig.dropped == {} and len(rig.frames) == 60 and rig.intake.time_jumps == 2


def test_a_jump_forgets_bad_poses():
    rig = Rig(depth="ignore")
    rig.info()
    rig.pose(T0, x=np.nan)
    rig.image(T0)
    rig.image(T0 + 50 * S)
    rig.image(T0 + MS)
    rig.expire()
    assert rig.dropped == {"time_jump": 2, "no_pose": 1}


def test_a_depth_image_from_the_future_is_forgotten():
    rig = Rig()
    rig.info()
    rig.pose(T0)
    rig.depth(T0 + 3600 * S)
    rig.depth(T0 - 15 * MS, 1.0)
    rig.image(T0)
    rig.depth(T0 + 5 * MS, 3.0)
    assert (rig.frames[0].depth_m == 3).all()


def test_a_restarted_arrival_clock_starts_waiting_anew():
    rig = Rig(depth="use_if_there")
    rig.now = 100.0
    rig.image(T0)
    for rig.now, pending in ((5.0, 1), (5.9, 1), (6.0, 0)):
        rig.intake.poll(rig.now)
        assert rig.intake.pending == pending
    rig.info()
    rig.pose(T0 + PERIOD)
    rig.image(T0 + PERIOD)  # and what was learnt about absent depth is learnt anew
    assert rig.dropped == {"no_camera_info": 1} and len(rig.frames) == 1


def test_images_from_before_a_jump_are_counted():
    rig = Rig(depth="ignore")
    rig.info()
    rig.image(T0)
    rig.image(T0 + PERIOD)
    rig.image(T0 - 50 * S)
    assert rig.dropped == {"time_jump": 2} and rig.intake.pending == 1 and "50.100 s" in rig.intake.last_problem
    rig.pose(T0 - 50 * S)
    assert len(rig.frames) == 1


def test_a_single_stamp_from_the_future_does_not_stop_the_intake():
    rig = Rig()
    rig.all_at(T0)
    rig.all_at(T0 + 3600 * S)
    for i in range(1, 10):
        rig.all_at(T0 + i * PERIOD)
    assert len(rig.frames) == 11 and rig.dropped == {}


def test_waiting_is_measured_in_arrival_time():
    rig = Rig(depth="ignore", wait_s=1.0)
    rig.info()
    rig.image(T0)
    rig.now = 0.999
    rig.intake.poll(rig.now)
    assert rig.intake.pending == 1
    rig.now = 1.0
    rig.intake.poll(rig.now)
    assert rig.dropped == {"no_pose": 1}


def test_the_node_s_clock():
    now = [50.0]
    rig = Rig(depth="ignore", clock=lambda: now[0])
    rig.intake.on_info(m.info(T0, W, H))
    rig.intake.on_image(m.image(T0, W, H, "rgb8", RGB.tobytes()))
    rig.intake.poll()
    assert rig.intake.pending == 1 and "image: 1 messages" in rig.intake.describe_silence() and "pose: nothing yet" in rig.intake.describe_silence()
    now[0] = 51.0
    assert "1.0 s ago" in rig.intake.describe_silence()
    rig.intake.poll()
    assert rig.dropped == {"no_pose": 1}


def test_the_rate_of_an_input():
    rig = Rig(depth="ignore")
    for i in range(100):
        rig.now = i * 0.05
        rig.image(T0 + i * 50 * MS)
    state = rig.intake.states(now_s=10.0)[0]
    assert state.count == 100 and state.rate_hz == pytest.approx(20) and state.age_s == pytest.approx(10 - 99 * 0.05)


def test_bad_configurations():
    for values, match in (({"depth": "maybe"}, "require | use_if_there | ignore"), ({"pose_source": "gps"}, "pose | odom | tf"),
                          ({"T_body_camera": (0, 0, 0, 0, 0, 0, 0)}, "unit quaternion"), ({"T_body_camera": (0, 0, 0)}, "x y z qx qy qz qw")):
        with pytest.raises(ValueError) as caught:
            IntakeConfig(**values)
        assert match in str(caught.value)


# ------------------------------------------------------------------------------------------------ random sequences

stamps = st.one_of(st.integers(0, 40).map(lambda i: T0 + i * 50 * MS), st.sampled_from([0, T0 + 17 * MS, T0 - 20 * S, T0 + 90 * S]))
XYZ = [(axis, 4 * i, 7, 1) for i, axis in enumerate("xyz")]
GOOD_IMAGE, GOOD_DEPTH = RGB.tobytes(), np.ones((H, W), np.float32).tobytes()
events = st.one_of(
    st.builds(lambda s, e, n: ("image", m.image(s, W, H, e, GOOD_IMAGE[:n], W * 3)), stamps, st.sampled_from(["rgb8"] * 6 + ["foo"]), st.sampled_from([144] * 6 + [10])),
    st.builds(lambda s, e, w: ("depth", m.image(s, w, H, e, GOOD_DEPTH, W * 4)), stamps, st.sampled_from(["32FC1"] * 6 + ["foo"]), st.sampled_from([W] * 6 + [4])),
    st.builds(lambda s, frame, n: ("points", m.cloud(s, XYZ[:n], 12, bytes(24), (1, 2), frame_id=frame)), stamps, st.sampled_from(["cam"] * 6 + ["map", "x"]), st.sampled_from([3] * 6 + [2])),
    st.builds(lambda s, e, w: ("mask", m.image(s, w, H, e, bytes(W * H), W)), stamps, st.sampled_from(["mono8"] * 6 + ["foo"]), st.sampled_from([W] * 6 + [4])),
    st.builds(lambda s, f, w: ("info", m.info(s, w, H, f)), stamps, st.sampled_from([100.0] * 6 + [0.0]), st.sampled_from([W] * 6 + [5])),
    st.builds(lambda s, x, q: ("pose", m.pose(s, (x, 0, 0), q)), stamps, st.sampled_from([0.0] * 6 + [np.nan]), st.sampled_from([(0, 0, 0, 1)] * 6 + [(0, 0, 0, 0)])),
    st.builds(lambda s, c: ("tf", m.tf(m.pose(s, kind="TransformStamped", frame_id="map", child=c))), stamps, st.sampled_from(["cam", "x", "map"])),
    st.builds(lambda dt: ("poll", dt), st.sampled_from([0.01, 0.3, 2.0, -5.0])))


@settings(max_examples=400, deadline=None)
@given(st.lists(events, max_size=60), st.sampled_from(["require", "use_if_there", "ignore"]), st.sampled_from(["pose", "tf"]), st.booleans(), st.integers(1, 5),
       st.sampled_from(["image", "points"]), st.sampled_from(["off", "use_if_there", "require"]))
def test_every_image_is_accounted_for(sequence, depth, source, message_time, queue, depth_source, mask):
    """Any messages in any order: nothing raises, in = used + dropped + pending after each, nothing is pending after flush,
    frames leave with increasing stamps (but for jumps), and a second run decides the same."""
    def run():
        rig = Rig(holdout_every=3, depth=depth, depth_source=depth_source, mask=mask, pose_source=source, queue_frames=queue, clock=None if message_time else lambda: 0.0)
        n_images = 0
        for kind, what in sequence:
            if kind == "poll":
                rig.now += what
                rig.intake.poll(None if message_time else rig.now)
            else:
                n_images += kind == "image"
                rig.intake.on(kind, copy.copy(what), None if message_time else rig.now)
            assert rig.ledger.counts().frames_in == n_images and rig.dropped is not None and rig.intake.pending <= queue
        rig.intake.flush()
        assert rig.intake.pending == 0 and rig.ledger.counts().pending == 0
        return rig

    rig = run()
    backwards = sum(b.stamp_ns <= a.stamp_ns for a, b in zip(rig.frames, rig.frames[1:]))
    assert backwards <= rig.intake.time_jumps
    assert [f.held_out for f in rig.frames] == [i % 3 == 1 for i in range(len(rig.frames))]
    again = run()
    assert [f.stamp_ns for f in again.frames] == [f.stamp_ns for f in rig.frames] and again.dropped == rig.dropped


# ------------------------------------------------------------------------------------------------------------ lens

def test_an_image_is_of_the_info_that_was_valid_at_its_stamp():
    rig = Rig(depth="ignore")
    stamps = [T0 + i * PERIOD for i in range(6)]
    for stamp in stamps[:5]:
        rig.image(stamp)                            # they wait: there are no poses yet
    rig.info(stamps[1], f=100.0)
    rig.info(stamps[3], f=120.0)
    rig.info(stamps[4], f=120.0)
    rig.info(stamps[2], f=100.0)                    # out of order, and no change
    for stamp in stamps:
        rig.pose(stamp)
    rig.image(stamps[5])
    assert [f.camera.fx for f in rig.frames] == [100, 100, 100, 120, 120, 120] and rig.dropped == {}  # before the first: the first


def test_infos_without_a_stamp_count_from_their_arrival():
    rig = Rig(depth="ignore")
    for i, f in enumerate((100.0, 120.0)):
        rig.info(0, f=f)
        rig.pose(T0 + i * PERIOD)
        rig.image(T0 + i * PERIOD)
    assert [f.camera.fx for f in rig.frames] == [100, 120]


def test_an_image_of_a_new_size_waits_for_its_info():
    rig = Rig(depth="ignore")
    big = np.zeros((2 * H, 2 * W, 3), np.uint8)
    rig.info(T0)
    for i in range(3):
        rig.pose(T0 + i * PERIOD)
    rig.image(T0 + PERIOD, data=big.tobytes(), size=(2 * W, 2 * H))
    assert not rig.frames and rig.intake.pending == 1 and "16x12" in rig.intake.waiting_for and "8x6" in rig.intake.waiting_for
    rig.info(T0 + PERIOD, width=2 * W, height=2 * H)
    assert rig.frames[0].camera.width == 2 * W and rig.dropped == {}
    rig.image(T0 + 2 * PERIOD)                      # small again, and no info says so
    rig.expire()
    assert len(rig.frames) == 1 and rig.dropped == {"info_size_mismatch": 1}


def test_infos_from_before_a_time_jump_are_forgotten():
    rig = Rig(depth="ignore")
    rig.info(T0 + 50 * S, f=100.0)
    rig.pose(T0 + 50 * S)
    rig.image(T0 + 50 * S)
    rig.info(T0 + 60 * S, f=120.0)
    rig.image(T0)                                   # the recording begins again, its first info a little later
    rig.pose(T0)
    rig.info(T0 + PERIOD, f=110.0)
    rig.pose(T0 + PERIOD)
    rig.image(T0 + PERIOD)
    assert [f.camera.fx for f in rig.frames] == [100, 120, 110]


def test_what_a_fisheye_did_not_see_is_masked():
    for mask in ("off", "require"):
        rig = Rig(depth="ignore", mask=mask)
        rig.info(f=3.0, d=[0.0] * 4, model="equidistant")
        rig.pose(T0)
        if mask == "require":
            half = np.ones((H, W), np.uint8)
            half[:, :W // 2] = 0
            rig.intake.on_mask(m.image(T0, W, H, "mono8", half.tobytes()), 0.0)
        rig.image(T0)
        lens = convert.rectifier_from_info(m.info(T0, W, H, 3.0, d=[0.0] * 4, model="equidistant"))
        assert 0 < lens.seen.mean() < 1 and rig.frames[0].camera == lens.camera
        np.testing.assert_array_equal(rig.frames[0].mask, lens.seen if mask == "off" else lens.nearest(half))
        if mask == "require":
            assert (rig.frames[0].mask <= lens.seen).all() and not np.array_equal(rig.frames[0].mask, lens.seen)


def test_the_parameters_of_the_lens_are_used():
    info = dict(f=3.0, d=[0.0] * 4, model="equidistant", p=[2.0, 0, 3, 0, 0, 2, 2, 0, 0, 0, 1, 0])
    for config, fx in (({}, None), ({"max_fov_deg": 60.0}, None), ({"rectified": "rectified"}, 2.0)):
        rig = Rig(depth="ignore", **config)
        rig.info(**info)
        rig.pose(T0)
        rig.image(T0)
        c = rig.frames[0].camera
        assert c.fx == fx if fx else abs(np.degrees(np.arctan(c.cx / c.fx)) - config.get("max_fov_deg", 130.0) / 2) < 1e-3


# -------------------------------------------------------------------------------------------- what the mapper does not want

def test_no_pixel_is_made_of_what_the_mapper_refuses(monkeypatch):
    """And which frames are held out, and that each is counted once, stays as it is when the mapper drops them afterwards."""
    made = []
    for name in ("image_to_rgb", "depth_to_m", "mask_from_msg"):
        real = getattr(convert, name)
        monkeypatch.setattr(f"spirula_ros.companions.{name}", lambda *args, real=real, name=name: made.append(name) or real(*args))
    rig, asked = Rig(holdout_every=4, mask="require"), []

    def refuses(stamp, T_world_cam, sensor, lap):
        asked.append((stamp, T_world_cam[0, 3]))
        if len(asked) % 3 == 1:
            return False
        rig.ledger.dropped("not_keyframe")
        return True
    rig.intake.cameras[0]._refuses = refuses
    for i in range(16):
        stamp = T0 + i * PERIOD
        rig.intake.on("mask", m.image(stamp, W, H, "mono8", bytes(W * H)), 0.0)
        rig.info(stamp)
        rig.depth(stamp)
        rig.pose(stamp, float(i))
        rig.image(stamp, "bgr8")
    assert [(f.stamp_ns - T0) // PERIOD for f in rig.frames if f.held_out] == [2, 6, 10, 14]
    assert [(f.stamp_ns - T0) // PERIOD for f in rig.frames if not f.held_out] == [0, 4, 8, 12]
    assert [x for _, x in asked] == [i for i in range(16) if i % 4 != 2] and rig.dropped == {"not_keyframe": 8}
    assert {name: made.count(name) for name in made} == {"image_to_rgb": 8, "depth_to_m": 8, "mask_from_msg": 8}


def test_a_damaged_jpeg_is_counted_when_it_is_decoded():
    rig = Rig(depth="ignore")
    rig.info()
    rig.pose(T0)
    rig.intake.on("compressed", m.stamped("sensor_msgs/msg/CompressedImage", T0, "cam", format="jpeg", data=b"no jpeg"), 0.0)
    assert rig.dropped == {"bad_image_data": 1} and rig.intake.states()[0].bad == {"bad_image_data": 1} and "7 bytes" in rig.intake.last_problem
    jpeg = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
    rig.pose(T0 + PERIOD)
    rig.intake.on("compressed", m.stamped("sensor_msgs/msg/CompressedImage", T0 + PERIOD, "cam", format="png", data=jpeg), 0.0)
    rig.expire()
    assert rig.dropped == {"bad_image_data": 1, "info_size_mismatch": 1} and "4x4" in rig.intake.last_problem
