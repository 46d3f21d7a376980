"""Several cameras of one robot: topics and names, the intake, the mapper, a recording of a front and a rear camera in the synthetic room."""
import json

import messages as m
import numpy as np
import pytest

from conftest import importorskip
from spirula_gpu.camera import Frame
from spirula_gpu.config import Config, replaced
from spirula_gpu.correct import motions
from spirula_gpu.gate import Gate
from spirula_gpu.keyframes import Keyframe, Keyframes
from spirula_gpu.mapper import Mapper, Wants
from spirula_gpu.report import FrameLedger
from spirula_gpu.track import Moments, Track
from spirula_gpu.trajectory import write_poses_of
from spirula_ros import bags
from spirula_ros.bag_writer import BagWriter
from spirula_ros.cli import main
from spirula_ros.errors import InputError
from spirula_ros.intake import Intake, IntakeConfig
from spirula_ros.params import split
from spirula_ros.bag_topics import pick_topics
from spirula_ros.rig import cameras_of
from spirula_ros.room import Room
from spirula_ros.synthetic import render, room_camera, trajectory
from test_checkpoint import everything, save
from test_correct import MS, SCALE, drifted, walk
from test_intake import H, PERIOD, RGB, S, T0, W
from test_mapper import SMALL, frame

TURNED = np.diag([-1.0, 1.0, -1.0, 1.0])   # half a turn about the axis that points down: the rear camera in the front one
TURNED[:3, 3] = 0, 0, -0.2
BODY = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
REAR = (0.0, 0.0, -0.2, 0.0, 1.0, 0.0, 0.0)   # TURNED


class TwoCameras:
    """An intake of a front and a rear camera."""

    def __init__(self, holdout_every=0, **config):
        self.ledger, self.frames, self.paths, self.laps, self.now = FrameLedger(), [], [], [], 0.0
        self.intake = Intake(IntakeConfig(**{"depth": "ignore", "T_body_camera": BODY + REAR, **config}), self.ledger, self.take, holdout_every, lambda: self.now,
                             lambda *path: self.paths.append(path), ("front", "rear"), self.laps.append)

    def take(self, frame):
        self.frames.append(frame)
        self.ledger.used()

    def info(self):
        for camera in ("front", "rear"):
            self.intake.on("info", m.info(T0, W, H), self.now, camera)

    def image(self, camera, stamp):
        self.intake.on("image", m.image(stamp, W, H, "rgb8", RGB.tobytes(), frame_id=camera), self.now, camera)

    def pose(self, stamp, x=0.0):
        self.intake.on(self.intake.config.pose_source, m.pose(stamp, (x, 0, 0)), self.now)

    def both(self, stamp, x=0.0):
        self.pose(stamp, x)
        self.image("front", stamp)
        self.image("rear", stamp)


# ---- names ------------------------------------------------------------------------------------------------------------

def test_names_of_cameras():
    one, _ = split({})
    several, _ = split({"topics.cameras": "front, rear", "topics.image": "/{camera}/image", "topics.camera_info": "/{camera}/info", "intake.depth": "ignore"})
    assert cameras_of(one) == [""] and cameras_of(several) == ["front", "rear"]


@pytest.mark.parametrize("values, why", [
    ({"topics.cameras": "front, rear"}, "topics.image = 'image' is the same for all 2 of topics.cameras"),
    ({"topics.cameras": "a,b", "topics.image": "{camera}/i"}, "topics.camera_info = 'camera_info' is the same"),
    ({"topics.cameras": "a,b", "topics.image": "{camera}/i", "topics.camera_info": "{camera}/c"}, "topics.depth = 'depth' is the same"),
    ({"topics.cameras": "a,b", "topics.image": "{camera}/i", "topics.camera_info": "{camera}/c", "intake.depth": "ignore", "intake.mask": "require"}, "topics.mask = 'mask' is the same"),
    ({"topics.image": "/{camera}/image"}, "topics.image = '/{camera}/image' has {camera}, but topics.cameras is empty"),
    ({"intake.camera_frame": "{camera}_optical"}, "intake.camera_frame = '{camera}_optical' has {camera}"),
    ({"topics.cameras": "a,a", "topics.image": "{camera}/i"}, "must be different names"),
    ({"topics.cameras": "a,,b"}, "must be different names"), ({"topics.cameras": "a b"}, "must be different names")])
def test_names_that_do_not_fit_are_refused(values, why):
    with pytest.raises(ValueError, match=why.replace("{", r"\{").replace("}", r"\}")):
        cameras_of(split(values)[0])


def test_the_topics_of_every_camera():
    importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
    from spirula_ros.inputs import inputs_of
    ros, _ = split({"topics.cameras": "front, rear", "topics.image": "/{camera}/image", "topics.camera_info": "/{camera}/info", "topics.points": "/lidar", "intake.depth_source": "points",
                    "intake.mask": "require", "topics.mask": "/{camera}/mask", "topics.image_transport": "compressed"})
    found = {(i.topic, i.kind, i.camera) for i in inputs_of(ros) if not i.kind.startswith("tf")}
    assert found == {*((f"/{c}/{topic}", kind, c) for c in ("front", "rear") for topic, kind in (("image/compressed", "compressed"), ("info", "info"), ("mask", "mask"))),
                     ("/lidar", "points", ""), ("pose", "pose", "")}
    with pytest.raises(ValueError, match="takes poses from topics.path, which is empty"):
        inputs_of(split({"intake.pose_source": "path"})[0])


# ---- intake -------------------------------------------------------------------------------------------------------------

def test_both_cameras_of_one_stamp_get_their_poses_and_their_held_out_frames():
    rig = TwoCameras(holdout_every=4)
    rig.info()
    for i in range(8):
        rig.both(T0 + i * PERIOD, float(i))
    assert [(f.stamp_ns, f.sensor, f.frame_id) for f in rig.frames[:4]] == [(T0, 0, "front"), (T0, 1, "rear"), (T0 + PERIOD, 0, "front"), (T0 + PERIOD, 1, "rear")]
    for front, rear in zip(rig.frames[::2], rig.frames[1::2]):
        np.testing.assert_allclose(rear.T_world_cam, front.T_world_cam @ TURNED, atol=1e-12)
    assert [f.sensor for f in rig.frames if f.held_out] == [0, 1, 0, 1] and rig.ledger.counts().dropped == {}
    with pytest.raises(KeyError, match="the cameras are front, rear"):
        rig.image("left", T0 + S)


def test_one_camera_that_waits_does_not_hold_up_the_other_and_is_explained():
    rig = TwoCameras()
    rig.intake.on("info", m.info(T0, W, H), 0.0, "front")
    for i in range(3):
        rig.both(T0 + i * PERIOD)
    assert [f.sensor for f in rig.frames] == [0, 0, 0] and rig.intake.pending == 3 and rig.intake.waiting_for.startswith("rear: no CameraInfo")
    rig.now = 2.0
    rig.intake.poll(rig.now)
    assert rig.ledger.counts().dropped == {"no_camera_info": 3}
    story = rig.intake.describe_silence()
    assert "rear info: nothing yet" in story and "front info: 1 messages" in story and "newest problem: rear: no_camera_info: " in story
    assert list(rig.intake.unused()) == [f"camera rear: of 3 images not one could be used: {rig.intake.cameras[1].last_problem}"]


def test_extrinsics_of_each_camera_by_tf():
    """One of the cameras is the body; without a body there is no telling where the cameras are."""
    for source, body in (("odom", ""), ("pose", "base"), ("path", "base"), ("tf", "")):
        rig = TwoCameras(pose_source=source, T_body_camera=BODY, body_frame=body, camera_frame="{camera}_optical")
        rig.info()
        static = [m.pose(0, REAR[:3] if name == "rear" else (0, 0, 0), REAR[3:] if name == "rear" else (0, 0, 0, 1), "base", "TransformStamped", child=f"{name}_optical") for name in ("front", "rear")]
        rig.intake.on("tf_static", m.tf(*static))
        if source == "tf":
            rig.intake.on("tf", m.tf(m.pose(T0, (1, 0, 0), kind="TransformStamped", child="base")))
        elif source == "path":
            rig.intake.on("path", m.put(m.stamped("nav_msgs/msg/Path", T0, "map"), poses=[m.pose(T0, (1, 0, 0))]))
        else:
            rig.intake.on(source, m.pose(T0, (1, 0, 0), kind="Odometry" if source == "odom" else "PoseStamped", child="base" if source == "odom" else ""))
        rig.image("front", T0)
        rig.image("rear", T0)
        front, rear = rig.frames
        assert front.T_world_cam[:3, 3].tolist() == [1, 0, 0] and rear.frame_id == "rear_optical", source
        np.testing.assert_allclose(rear.T_world_cam, front.T_world_cam @ TURNED, atol=1e-12)
    both = TwoCameras(T_body_camera=BODY + BODY)   # both at the body's place, as somebody has written
    both.info()
    both.pose(T0)
    both.both(T0)
    assert len(both.frames) == 2 and both.ledger.counts().dropped == {}
    lost = TwoCameras(T_body_camera=BODY)
    lost.info()
    lost.both(T0)
    assert lost.ledger.counts().dropped == {"no_extrinsics": 2} and "set intake.body_frame" in lost.intake.last_problem


def test_extrinsics_of_another_number_of_cameras_are_refused():
    for values in (BODY + REAR + REAR, REAR):
        with pytest.raises(ValueError, match=f"has {len(values)} numbers, 14 are needed"):
            TwoCameras(T_body_camera=values)
    with pytest.raises(ValueError, match="for each camera"):
        IntakeConfig(T_body_camera=BODY + (1.0,))


def test_one_lidar_for_all_cameras():
    rig = TwoCameras(depth="require", depth_source="points", T_camera_lidar=BODY + (*np.linalg.inv(TURNED)[:3, 3], 0.0, -1.0, 0.0, 0.0))   # it is at the front camera
    rig.info()
    rig.pose(T0)
    rig.intake.on("points", m.cloud_of(T0, np.array([[0, 0, 3.0], [0, 0, -2.0]], np.float32)), 0.0)
    rig.image("front", T0)
    rig.image("rear", T0)
    assert [round(float(f.depth_m.max()), 5) for f in rig.frames] == [3.0, 1.8]


def test_a_path_is_given_for_each_camera():
    rig = TwoCameras()
    rig.info()
    rig.both(T0)
    rig.intake.on("path", m.put(m.stamped("nav_msgs/msg/Path", T0, "map"), poses=[m.pose(T0, (1, 0, 0)), m.pose(T0 + PERIOD, (2, 0, 0))]), 0.0)
    (stamps, poses, sensors), = rig.paths
    assert stamps.tolist() == [T0, T0 + PERIOD] * 2 and sensors.tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(poses[2:], poses[:2] @ TURNED, atol=1e-12)


def test_images_from_before_a_restart_that_come_after_it_start_no_other_lap():
    """Between topics there is no order: the rear camera's last images of the old lap come when the front one has begun the new."""
    rig = TwoCameras()
    rig.info()
    for i in range(100):
        rig.both(T0 + i * PERIOD)
    rig.pose(T0)
    rig.image("front", T0)
    rig.pose(T0 + 100 * PERIOD)
    rig.image("rear", T0 + 100 * PERIOD)
    rig.image("rear", T0)
    rig.both(T0 + PERIOD)
    assert rig.laps == [1] and [(f.lap, f.sensor) for f in rig.frames[200:]] == [(1, 0), (1, 1), (1, 0), (1, 1)]
    assert rig.ledger.counts().dropped == {"time_jump": 1}
    rig.now += 30
    for i in range(300):   # far beyond where the lap before ended: that window was closed
        rig.both(T0 + (2 + i) * PERIOD)
    assert len(rig.frames) == 204 + 600


# ---- the parts of the mapper ----------------------------------------------------------------------------------------------

def test_moments_are_found_by_lap_camera_and_stamp():
    rng = np.random.default_rng(0)
    rows = sorted({tuple(r) for r in rng.integers(0, (3, 50, 3), (200, 3)).tolist()})
    known, wanted = Moments.rows(rows), Moments.rows(rng.integers(0, (4, 60, 4), (500, 3)))
    at, found = known.find(wanted)
    for row, i, is_there in zip(wanted.table().tolist(), at, found):
        assert is_there == (tuple(row) in rows) and (not is_there or rows[i] == tuple(row))


def test_a_track_of_several_cameras_and_laps_sorts_and_replaces():
    rng, expected, track = np.random.default_rng(1), {}, Track()
    for lap in range(3):
        for _ in range(200):
            stamp, sensor, T = int(rng.integers(100)), int(rng.integers(3)), np.eye(4) * rng.random()
            track.add(stamp, T, sensor, lap)
            expected[lap, stamp, sensor] = T
    assert list(map(tuple, track.moments.table().tolist())) == sorted(expected) and track.lap == 2
    for row, T in zip(map(tuple, track.moments.table().tolist()), track.poses):
        assert np.array_equal(T, expected[row])
    assert set(track.copy(1).moments.laps.tolist()) == {1, 2} and len(track.copy()) == len(track)


def rig_track(given: np.ndarray, period_ms: int = 10, offset_ms: int = 0, lap: int = 0, track: Track | None = None) -> Track:
    """given [n,4,4]: the front camera, period_ms apart; the rear one offset_ms later (the pose between), every third of its frames lost."""
    track = track or Track()
    for i in range(len(given) - 1):
        track.add((1000 + i * period_ms) * MS, given[i], 0, lap)
        if i % 3:
            T = given[i].copy()
            T[:3, 3] += offset_ms / period_ms * (given[i + 1] - given[i])[:3, 3]
            track.add((1000 + i * period_ms + offset_ms) * MS, T @ TURNED, 1, lap)
    return track


@pytest.mark.parametrize("offset_ms", [0, 4])
def test_the_motion_that_one_camera_s_path_says_is_that_of_all(offset_ms):
    true = walk(200, 0.005)
    track, exact = rig_track(drifted(true, 50, 100), offset_ms=offset_ms), rig_track(true, offset_ms=offset_ms)
    stamps = (1000 + np.arange(0, 199) * 10) * MS
    found = motions(track, stamps, true[:199], SCALE)   # of camera 0 alone
    D, moved = found.of(track.moments)
    off = np.abs(D @ track.poses - exact.poses).max((1, 2))
    assert off.max() < 1e-3 and off[track.moments.sensors == 0].max() < 1e-9 and (off.max() < 1e-9 or offset_ms)
    assert {0, 1} == set(track.moments.sensors[moved].tolist()) and not moved[track.stamps < stamps[50]].any()
    both = motions(track, np.tile(stamps, 2), np.concatenate([true[:199], true[:199] @ TURNED]), SCALE, np.repeat([0, 1], 199))
    assert np.abs(both.D @ track.poses - exact.poses).max() < 1e-3


def test_a_camera_that_fell_out_is_corrected_by_the_other():
    true = walk(100, 0.005)
    track, given = Track(), drifted(true, 20, 60)
    for i in range(100):
        if i < 10:
            track.add(i * 10 * MS, given[i], 0)
        track.add(i * 10 * MS, given[i] @ TURNED, 1)
    stamps = np.arange(100) * 10 * MS
    found = motions(track, np.tile(stamps, 2), np.concatenate([true, true @ TURNED]), SCALE, np.repeat([0, 1], 100))
    rear = track.moments.sensors == 1
    assert np.abs(found.D[rear] @ track.poses[rear] - true @ TURNED).max() < 1e-9 and found.moved[rear][60:].all()


def test_a_path_of_the_second_lap_leaves_the_first():
    true = walk(60, 0.005)
    track = rig_track(true)
    rig_track(drifted(true, 10, 30), lap=1, track=track)
    stamps = (1000 + np.arange(59) * 10) * MS
    found = motions(track, stamps, true[:59], SCALE)
    laps = track.moments.laps
    assert not found.moved[laps == 0].any() and found.moved[(laps == 1) & (track.stamps > stamps[30])].all()
    before = track.poses.copy()
    found.apply(track)
    assert np.array_equal(track.poses[laps == 0], before[laps == 0]) and np.abs(track.poses[laps == 1] - rig_track(true).poses).max() < 1e-9
    old = frame(0, stamp_ns=int(stamps[40]), lap=0)
    assert found.place(old) is old and not np.array_equal(found.place(frame(0, stamp_ns=int(stamps[40]), lap=1)).T_world_cam, old.T_world_cam)


def test_each_camera_has_its_gate():
    """The rear camera is always duller; neither where it is nor how sharp it is counts for the front one."""
    gate, config, dull = Gate(), replaced(Config(), {"gate.min_translation_m": 0.05, "gate.max_interval_s": 100.0}).gate, np.full((30, 40, 3), 100, np.uint8)
    dull[::6] = 104
    seen = [(gate.refuses(frame(i, **more), config), more["sensor"]) for i in range(0, 12, 3) for more in ({"sensor": 0}, {"sensor": 1, "rgb": dull})]
    assert [reason for reason, _ in seen] == [None] * 8
    again = frame(0, stamp_ns=frame(11).stamp_ns)
    assert gate.refuses(again, config) == "not_keyframe" and gate.refuses(frame(0, stamp_ns=again.stamp_ns, sensor=2), config) is None
    assert gate.refuses(frame(0, lap=1), config) is None, "how long ago that was nobody knows"
    other = Gate()
    other.resume(gate.state())
    for a, b in zip(gate.state()[:2], other.state()[:2]):
        np.testing.assert_array_equal(np.concatenate([np.ravel(x) for x in a]), np.concatenate([np.ravel(x) for x in b]))
    assert gate.state().sharpness == other.state().sharpness


def test_keyframes_of_a_camera_say_where_its_other_frames_are():
    kept, mounts = Keyframes(0), {0: np.eye(4), 1: np.eye(4)}
    mounts[1][:3, 3] = 0.03, 0, 0   # the rear camera is 3 cm from where it was said to be
    for i in range(20):
        for sensor in (0, 1):
            k = Keyframe(2 * i + sensor, frame(i, sensor=sensor), 0.3)
            k.place(k.frame.T_world_cam @ mounts[sensor])
            k.expose(np.full(3, 0.1 * sensor))
            kept.add(k, SMALL.train)
    between = frame(5, stamp_ns=frame(5).stamp_ns + 50 * MS)
    for sensor in (0, 1):
        f = Frame(between.stamp_ns, between.camera, between.T_world_cam, between.rgb, sensor=sensor)
        np.testing.assert_allclose(kept.placed(f).T_world_cam, f.T_world_cam @ mounts[sensor], atol=1e-9)
        np.testing.assert_allclose(kept.log_gain_at(f.stamp_ns, sensor), 0.1 * sensor)
    assert kept.placed(frame(3, sensor=1, lap=1)).T_world_cam is not None and kept.shown.frame.sensor == 0
    assert {k.frame.sensor for k in kept.spread(20)} == {0, 1} and sum(k.frame.sensor for k in kept.spread(20)) == 10
    newest = {kept.choose(replaced(Config(), {"train.newest_probability": 1.0}).train).id for _ in range(40)}
    assert newest == {38, 39}, "the newest of either camera"


def test_poses_of_several_cameras_are_written_apart(tmp_path):
    frames = [frame(i, sensor=s) for i in range(3) for s in (0, 1)]
    assert write_poses_of(tmp_path / "poses.txt", frames) == 6
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("poses.txt", "poses.camera1.txt")] == [4, 4]
    write_poses_of(tmp_path / "model", frames)
    images = [line.split()[-1] for line in (tmp_path / "model/images.txt").read_text().splitlines() if line.endswith("png")]
    assert len(set(images)) == 6 and f"camera1/{frame(0).stamp_ns}.png" in images


# ---- the mapper -------------------------------------------------------------------------------------------------------------

SHIFT = np.array([0.1, 0, 0.05])


def two_cameras(off=lambda i: 0.0, n=14, laps=1, **changes) -> Mapper:
    """The same wall seen by two cameras side by side, at the same stamps."""
    mapper = Mapper(replaced(SMALL, {"train.steps_per_frame": 6, "refine.exposure": False, "refine.pose": False, **{k.replace("__", "."): v for k, v in changes.items()}}))
    for lap in range(laps):
        for i in range(n):
            for sensor in (0, 1):
                T = frame(i + 2 * sensor).T_world_cam.copy()
                T[:3, 3] += off(i) * SHIFT + 0.003 * lap
                mapper.ledger.arrived()
                mapper.submit(frame(i + 2 * sensor, stamp_ns=frame(i).stamp_ns, T_world_cam=T, sensor=sensor, lap=lap, held_out=i % 4 == 3))
                mapper.run_due()
    return mapper


def drifting(i: int) -> float:
    return float(np.clip((i - 4) / 4, 0, 1))


def test_a_closed_loop_moves_the_frames_and_gaussians_of_both_cameras():
    mapper, n = two_cameras(drifting, laps=2), 14
    assert len(mapper._held_out) == 6 and len({f.moment for f in mapper._held_out}) == 6, "three of each camera; the same images of the second lap replace those of the first"
    assert {k.frame.sensor for k in mapper._keyframes} == {0, 1} and len(mapper._track) == 4 * n
    means, owner = mapper._engine.read("map.mean"), mapper._engine.read("map.owner")
    of = {k.id: k.frame for k in mapper._keyframes}
    stamps = np.array([frame(i).stamp_ns for i in range(n)])
    true = np.array([frame(i).T_world_cam for i in range(n)])
    true[:, :3, 3] += 0.003
    done = mapper.command("correct", stamps, true, np.zeros(n, np.int64)).result()
    assert done.frames == 2 * (n - 5), "of the second lap, both cameras"
    after, tested = mapper._engine.read("map.mean"), {0: 0, 1: 0}
    for id, f in of.items():
        i = round((f.stamp_ns - frame(0).stamp_ns) / 1e8)
        expected = drifting(i) * SHIFT if f.lap == 1 else 0 * SHIFT
        np.testing.assert_allclose(after[owner == id], means[owner == id] - expected, atol=1e-5)
        tested[f.sensor] += expected.any() and (owner == id).any()
    assert min(tested.values()) >= 1
    for k in mapper._keyframes:
        i = round((k.frame.stamp_ns - frame(0).stamp_ns) / 1e8)
        expected = frame(i + 2 * k.frame.sensor).T_world_cam[:3, 3] + 0.003 * k.frame.lap + (drifting(i) * SHIFT if k.frame.lap == 0 else 0)
        np.testing.assert_allclose(k.frame.T_world_cam[:3, 3], expected, atol=1e-9)


@pytest.mark.parametrize("laps", [1, 2])
def test_a_map_of_two_cameras_resumes_bit_for_bit(laps):
    def more(mapper):
        stamps, poses = np.array([frame(i).stamp_ns for i in range(14)]), np.array([frame(i).T_world_cam for i in range(14)])
        done = mapper.command("correct", stamps, poses).result()
        mapper.train(steps=20)
        return done, everything(mapper), [(h.frame.moment, h.psnr) for h in mapper.evaluate()]
    mapper = two_cameras(drifting, laps=laps)
    resumed = Mapper(mapper.config)
    resumed.resume(save(mapper))
    assert [f.moment for f in resumed._held_out] == [f.moment for f in mapper._held_out] and resumed._owners == mapper._owners
    assert more(resumed) == more(mapper)
    resumed.ledger.arrived()
    resumed.submit(frame(20))
    assert resumed._track.lap == laps - 1 and len(resumed._track) == 28 * laps + 1, "what comes goes on in the newest lap"


def test_both_cameras_are_measured_and_what_is_shown_stays_with_the_first():
    mapper = two_cameras(n=6)
    results = mapper.evaluate()
    assert [h.frame.sensor for h in results] == [0, 1] and results[0].frame.stamp_ns == results[1].frame.stamp_ns
    assert mapper.status().heldout_psnr == pytest.approx(np.mean([h.psnr for h in results])) and results[0].psnr != results[1].psnr
    mapper.wants = Wants(path=True)
    mapper._show_path(1e9)
    np.testing.assert_array_equal(mapper.path.get().T_world_cam, [k.frame.T_world_cam for k in mapper._keyframes if k.frame.sensor == 0])
    assert (np.diff(mapper.path.get().stamps_ns) > 0).all()
    snapshot = mapper._snapshot()
    last = [k.frame for k in mapper._keyframes if k.frame.sensor == 0][-1]
    assert mapper._keyframes.newest.frame.sensor == 1 and snapshot.stamp_ns == last.stamp_ns
    np.testing.assert_array_equal(snapshot.T_world_cam, last.T_world_cam)


# ---- a recording ----------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def rig_bag(tmp_path_factory):
    """A front and a rear camera, at the same stamps, in the synthetic room; the poses are those of the body, and TF says where the cameras are on it."""
    path, room, camera, frames = tmp_path_factory.mktemp("rig") / "drive", Room(0), room_camera(96, 72), 48
    T_base = np.array([[0, 0, 1, 0], [-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 0, 1]], float)   # the front camera's optical frame in the body's
    with BagWriter(path, "mcap") as bag:
        for name, T in (("front", T_base), ("rear", T_base @ TURNED)):
            bag.tf(T0, "base", f"{name}_optical", T, static=True)
        for i, T in enumerate(trajectory(frames)):
            stamp = T0 + i * PERIOD
            bag.tf(stamp, "map", "base", T @ np.linalg.inv(T_base))
            for name, T_camera in (("front", T), ("rear", T @ TURNED)):
                view = render(room, camera, T_camera, 1)
                bag.info(f"/{name}/camera_info", stamp, f"{name}_optical", camera)
                bag.depth(f"/{name}/depth", stamp, f"{name}_optical", view.depth_m)
                bag.image(f"/{name}/image_raw", stamp, f"{name}_optical", view.rgb)
    return str(path)


RIG = ["--set", "topics.cameras=front,rear", "--set", "topics.image=/{camera}/image_raw", "--set", "topics.camera_info=/{camera}/camera_info", "--set", "topics.depth=/{camera}/depth"]
FRONT = ["--image-topic", "/front/image_raw", "--info-topic", "/front/camera_info", "--depth-topic", "/front/depth"]


def replayed(bag, *more):
    assert main(["replay", bag, "--lossless", "--backend", "cpu", "--threads", "1", "--holdout", "4", "--no-mesh", "--out", "out", "--set", "train.steps_per_frame=15",
                 "--set", "engine.sh_degree=0", *more]) == 0
    return json.loads(open("out/report.json").read())


def test_a_recording_of_two_cameras_becomes_one_map(rig_bag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both, front = replayed(rig_bag, *RIG), replayed(rig_bag, *FRONT)
    assert both["frames"]["in"] == 96 and set(both["frames"]["dropped"]) <= {"blurred", "not_keyframe"} and both["frames"]["used"] > 80 and both["images"] == both["images_sent"] == 96 and front["frames"]["in"] == 48
    psnr = both["heldout_psnr_by_camera"]
    assert set(psnr) == {"0", "1"} and len(both["heldout"]) == 24 and "heldout_psnr_by_camera" not in front
    print(f"held-out PSNR front {psnr['0']:.2f} dB, rear {psnr['1']:.2f} dB; front alone {front['heldout_psnr']:.2f} dB")
    assert min(psnr.values()) > 15 and psnr["0"] > front["heldout_psnr"] - 1.0
    assert both["topics"]["/rear/image_raw"] == "image" and both["keyframes"] > front["keyframes"]


def test_a_recording_in_which_two_cameras_would_share_a_topic_is_refused(rig_bag):
    with bags.open_bag(rig_bag) as bag:
        ros, _ = split({"topics.cameras": "front,rear", "topics.image": "/{camera}/image_raw", "topics.camera_info": "/{camera}/camera_info", "topics.depth": "/{camera}/depth"})
        with pytest.raises(InputError, match="/front/depth would be the depth of camera front and of rear"):
            pick_topics(bag, {"image": "/{camera}/image_raw", "info": "/{camera}/camera_info", "depth": "/front/depth"}, ros)
        topics = pick_topics(bag, {"image": "/{camera}/image_raw", "info": "/{camera}/camera_info", "depth": "/{camera}/depth"}, ros)
    assert topics.camera_of("/rear/depth") == "rear" and topics.camera_of("/tf") == "" and len(topics.chosen()) == 8


def test_a_recording_of_two_cameras_through_the_node(rig_bag, tmp_path, monkeypatch, ros_domain):
    importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROS_DOMAIN_ID", str(ros_domain))
    through = replayed(rig_bag, "--via-ros", *RIG)
    assert through["frames"]["in"] == through["images_sent"] == 96 and set(through["heldout_psnr_by_camera"]) == {"0", "1"} and through["heldout_psnr"] > 20
