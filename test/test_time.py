"""Stamps that jump, stand still, are late or off: what becomes of frames and map; and poses of every source, late, out of order and with gaps."""
import os

import messages as m
import numpy as np
import pytest

from spirula_gpu.config import replaced
from spirula_gpu.mapper import Mapper
from spirula_ros.errors import InputError
from spirula_ros.intake import Intake, IntakeConfig
from spirula_ros.params import split
from spirula_ros.replay import time_jump_of
from spirula_ros.time_jump import TimeJump, free_path
from spirula_ros.settings import Settings
from test_intake import MS, PERIOD, S, T0, Rig
from test_mapper import SMALL, frame
from test_path import path


class LapRig(Rig):
    def __init__(self, **config):
        super().__init__(**config)
        self.laps, self.paths = [], []
        self.intake = Intake(IntakeConfig(**config), self.ledger, self.take, clock=lambda: 0.0, correct=lambda *p: self.paths.append(p), restarted=lambda lap: self.laps.append((lap, len(self.frames))))


# ---- jumps ------------------------------------------------------------------------------------------------------------

def test_a_restart_is_told_before_a_frame_of_the_new_lap():
    rig = LapRig()
    for lap in range(3):
        for i in range(20):
            rig.all_at(T0 + i * PERIOD)
    assert rig.laps == [(1, 20), (2, 40)] and [f.lap for f in rig.frames] == [0] * 20 + [1] * 20 + [2] * 20 and rig.dropped == {}


def test_a_single_stamp_from_the_future_begins_no_lap():
    """The map would be emptied for it."""
    rig = LapRig()
    for stamp in (T0, T0 + PERIOD, T0 + 3600 * S, T0 + 2 * PERIOD, T0 + 3 * PERIOD):
        rig.all_at(stamp)
    assert rig.laps == [] and rig.intake.time_jumps == 1 and {f.lap for f in rig.frames} == {0} and len(rig.frames) == 5
    first = LapRig()
    for stamp in (T0 + 3600 * S, T0, T0 + PERIOD):
        first.all_at(stamp)
    assert first.laps == []


def test_the_ros_clock_tells_of_a_restart_and_the_images_do_not_tell_again():
    rig = LapRig(depth="ignore")
    rig.info()
    for i in range(30):
        rig.pose(T0 + i * PERIOD)
        rig.image(T0 + i * PERIOD)
    rig.image(T0 + 30 * PERIOD)   # waits for its pose
    rig.intake.clock_jumped(T0 + 29 * PERIOD)
    assert rig.laps == [] and rig.intake.pending == 1, "a clock that is a little behind the images was not restarted"
    rig.intake.clock_jumped(T0 - S)
    assert rig.laps == [(1, 30)] and rig.dropped == {"time_jump": 1} and rig.intake.pending == 0
    rig.image(T0 + 31 * PERIOD)   # was on its way
    rig.pose(T0)
    rig.image(T0)
    rig.intake.clock_jumped(T0)
    assert rig.laps == [(1, 30)] and rig.dropped == {"time_jump": 2} and rig.frames[-1].lap == 1


@pytest.mark.parametrize("stamp, reason", [(0, "bad_stamp"), (T0 + 10 * PERIOD, "stamp_backwards"), (T0 + 9 * PERIOD, "stamp_backwards"), (T0 + 10 * PERIOD - S, "stamp_backwards"),
                                           (T0 + 10 * PERIOD + 60 * S, "pose_too_old"), (T0 + 10 * PERIOD + 1, "pose_too_old")])
def test_stamps_that_cannot_be_used_end_under_their_reason(stamp, reason):
    rig = LapRig(depth="ignore")
    rig.info()
    for i in range(11):
        rig.pose(T0 + i * PERIOD)
        rig.image(T0 + i * PERIOD)
    rig.image(stamp)
    rig.expire()
    assert rig.dropped == {reason: 1} and len(rig.frames) == 11 and rig.laps == []


def test_a_forward_jump_of_images_and_poses_costs_nothing():
    rig = LapRig(depth="ignore")
    rig.info()
    for i in range(20):
        stamp = T0 + i * PERIOD + (3600 * S if i >= 10 else 0)
        rig.pose(stamp)
        rig.image(stamp)
    assert len(rig.frames) == 20 and rig.dropped == {} and rig.laps == []


# ---- an offset ----------------------------------------------------------------------------------------------------------

def test_the_offset_is_added_where_poses_are_looked_up_and_nowhere_else():
    rig = LapRig(time_offset_s=0.05)   # images are stamped 50 ms before what the poses' clock said
    rig.info()
    for i in range(3):
        rig.pose(T0 + i * PERIOD, float(i))
    rig.depth(T0)
    rig.image(T0)
    assert rig.frames[0].stamp_ns == T0 and rig.frames[0].T_world_cam[0, 3] == pytest.approx(0.5) and (rig.frames[0].depth_m == 2).all()
    rig.intake.on("path", path([T0 + 50 * MS], [7.0]), rig.now)
    stamps, poses, _ = rig.paths[0]
    assert stamps.tolist() == [T0] and poses[0, 0, 3] == 7, "paths are in the poses' time, frames in that of the images"


def test_the_offset_holds_for_tf_and_points():
    rig = LapRig(pose_source="tf", depth="require", depth_source="points", time_offset_s=-0.05, points_tolerance_s=0.2)
    rig.info()
    rig.intake.on("tf_static", m.tf(m.pose(0, kind="TransformStamped", frame_id="cam", child="lidar")))
    for i in range(4):
        rig.intake.on("tf", m.tf(m.pose(T0 + i * PERIOD, (0, 0, float(i)), kind="TransformStamped", child="cam")))
    rig.image(T0 + PERIOD)
    rig.intake.on("points", m.cloud_of(T0 + 2 * PERIOD, np.array([[0, 0, 3.0]], np.float32)), 0.0)   # the camera has gone on by 1 m
    assert rig.frames[0].T_world_cam[2, 3] == pytest.approx(0.5) and rig.frames[0].depth_m.max() == pytest.approx(4.0)


# ---- the map --------------------------------------------------------------------------------------------------------------

def laps(policy: str, map_path: str = "", n: int = 6) -> tuple[Mapper, list[str]]:
    """Two laps of a wall with the same stamps, whose poses differ by 3 cm."""
    said, mapper = [], Mapper(replaced(SMALL, {"train.steps_per_frame": 5, "refine.exposure": False, "refine.pose": False}))
    ros, _ = split({"intake.map_on_time_jump": policy, "output.map_path": map_path})
    sessions = TimeJump(ros, mapper.command, mapper.status, said.append)
    for lap in range(2):
        if lap:
            sessions.restarted(lap)
        for i in range(n):
            T = frame(i).T_world_cam.copy()
            T[0, 3] += 0.03 * lap
            mapper.ledger.arrived()
            mapper.submit(frame(i, lap=lap, T_world_cam=T))
            mapper.run_due()
    return mapper, said


def test_keep_goes_on_and_a_corrected_path_moves_the_current_lap_alone():
    mapper, said = laps("keep")
    assert {k.frame.lap for k in mapper._keyframes} == {0, 1} and len(mapper._track) == 12 and "the map goes on" in said[0]
    before = {k.id: k.frame.T_world_cam for k in mapper._keyframes}
    stamps, poses = np.array([frame(i).stamp_ns for i in range(6)]), np.array([frame(i).T_world_cam for i in range(6)])
    assert mapper.command("correct", stamps, poses).result().frames == 6
    for k in mapper._keyframes:
        np.testing.assert_allclose(k.frame.T_world_cam[:3, 3], before[k.id][:3, 3] - (0.03 * k.frame.lap, 0, 0), atol=1e-9)
    assert not mapper.command("correct", stamps, poses).result().frames


def test_reset_empties_the_map():
    mapper, said = laps("reset")
    assert {k.frame.lap for k in mapper._keyframes} == {1} and len(mapper._track) == 6 and "begins anew" in said[0]
    fresh, _ = laps("keep", n=0)
    for i in range(6):
        T = frame(i).T_world_cam.copy()
        T[0, 3] += 0.03
        fresh.ledger.arrived()
        fresh.submit(frame(i, T_world_cam=T))
        fresh.run_due()
    np.testing.assert_array_equal(mapper._engine.read("map.mean"), fresh._engine.read("map.mean"))


def test_frames_of_the_new_lap_that_wait_already_survive_the_reset():
    mapper = Mapper(replaced(SMALL, {"gate.inbox_frames": 20}))
    for lap in (0, 1):
        for i in range(4):
            mapper.ledger.arrived()
            mapper.submit(frame(i, lap=lap))
    mapper.command("reset", 1)   # as from the thread of the mapper, later than they came
    waiting = mapper._inbox.frames()
    assert waiting and {f.lap for f in waiting} == {1} and set(mapper._track.moments.laps.tolist()) == {1}
    assert mapper.ledger.counts().dropped["reset"] == 4


@pytest.mark.parametrize("name, first, second", [("map.ply", "map.session1.ply", "map.session2.ply"), ("map.compressed.ply", "map.session1.compressed.ply", "map.session2.compressed.ply")])
def test_a_new_session_saves_the_map_before_it_begins(tmp_path, name, first, second):
    path = str(tmp_path / name)
    mapper, said = laps("new_session", path)
    assert os.listdir(tmp_path) == [first] and f"saved to {tmp_path / first}, a new map begins" in said[0]
    assert {k.frame.lap for k in mapper._keyframes} == {1} and free_path(path) == str(tmp_path / second)


def test_a_map_that_cannot_be_saved_goes_on(tmp_path):
    mapper, said = laps("new_session", str(tmp_path / "gone" / "map.ply"))
    assert {k.frame.lap for k in mapper._keyframes} == {0, 1} and "was not saved" in said[0] and "goes on" in said[0]


def test_new_sessions_need_somewhere_to_go():
    ros, config = split({"intake.map_on_time_jump": "new_session"})
    with pytest.raises(ValueError, match="output.map_path, which is empty"):
        TimeJump(ros, None, None, None)
    with pytest.raises(InputError, match="output.map_path"):
        time_jump_of(Settings(config, ros, frozenset()), Mapper(SMALL))
    with pytest.raises(ValueError, match="must be one of keep, reset, new_session"):
        split({"intake.map_on_time_jump": "forget"})


# ---- a path as the source of poses -------------------------------------------------------------------------------------------

def test_a_growing_path_gives_poses_and_moves_the_map_when_it_is_corrected():
    rig = LapRig(pose_source="path", depth="ignore")
    rig.info()
    for i in range(6):   # the SLAM publishes its poses so far after each
        rig.image(T0 + i * PERIOD - 50 * MS if i else T0)
        rig.intake.on("path", path([T0 + j * PERIOD for j in range(i + 1)], [0.1 * j for j in range(i + 1)]), rig.now)
    assert [round(f.T_world_cam[0, 3], 6) for f in rig.frames] == [0, 0.05, 0.15, 0.25, 0.35, 0.45] and rig.dropped == {} and rig.paths == []
    rig.intake.on("path", path([T0 + j * PERIOD for j in range(7)], [0.2 * j for j in range(7)]), rig.now)
    stamps, poses, _ = rig.paths[0]
    assert len(rig.paths) == 1 and len(stamps) == 7 and poses[3, 0, 3] == pytest.approx(0.6) and rig.intake.map_frame == "map"
    rig.intake.on("path", path([T0 + j * PERIOD for j in range(8)], [0.2 * j for j in range(8)]), rig.now)
    assert len(rig.paths) == 1, "it has grown, that is all"
    rig.intake.on("pose", m.pose(T0, (9, 0, 0)), rig.now)
    assert rig.dropped == {} and [s.kind for s in rig.intake.states()].count("pose") == 0


@pytest.mark.parametrize("stamps, frame_id, why", [([T0, T0], "map", "1 repeat a stamp"), ([0, T0], "map", "1 have none"), ([T0], "odom", "path is in frame 'odom', the map in 'map'")])
def test_a_path_that_gives_no_poses_is_counted(stamps, frame_id, why):
    rig = LapRig(pose_source="path", depth="ignore", map_frame="map")
    rig.info()
    rig.image(T0)
    rig.intake.on("path", path(stamps, [0.0] * len(stamps), frame_id), rig.now)
    assert why in rig.intake.last_problem
    rig.expire()
    assert rig.dropped == {"no_pose": 1} and [s.bad for s in rig.intake.states() if s.kind == "path"] == [{"bad_path": 1}]


def test_a_corrected_path_as_the_source_moves_the_map():
    """The frames are where the first path said; the loop closure is in a later one."""
    mapper = Mapper(replaced(SMALL, {"train.steps_per_frame": 5, "refine.exposure": False, "refine.pose": False}))
    for i in range(10):
        mapper.ledger.arrived()
        T = frame(i).T_world_cam.copy()
        T[0, 3] += 0.05 * i
        mapper.submit(frame(i, T_world_cam=T))
        mapper.run_due()
    rig = LapRig(pose_source="path", depth="ignore")
    stamps = [frame(i).stamp_ns for i in range(10)]
    rig.intake.on("path", path(stamps, [frame(i).T_world_cam[0, 3] + 0.05 * i for i in range(10)]), 0.0)
    rig.info()
    rig.image(stamps[-1], frame_id="cam")
    rig.intake.on("path", path(stamps, [frame(i).T_world_cam[0, 3] for i in range(10)]), 0.0)
    (s, T, sensors), = rig.paths
    T[:, 1:3, 3] = np.array([frame(i).T_world_cam[1:3, 3] for i in range(10)])
    T[:, :3, :3] = np.array([frame(i).T_world_cam[:3, :3] for i in range(10)])
    assert mapper.command("correct", s, T, sensors).result().frames == 9
    for k in mapper._keyframes:
        i = stamps.index(k.frame.stamp_ns)
        assert k.frame.T_world_cam[0, 3] == pytest.approx(frame(i).T_world_cam[0, 3], abs=1e-9)


# ---- poses: source x order x gap ---------------------------------------------------------------------------------------------

SOURCES = ("PoseStamped", "PoseWithCovarianceStamped", "TransformStamped", "odom", "tf", "path")


class Source:
    """Poses of a camera at x = 1 m/s after T0, by one of the sources."""

    def __init__(self, source: str):
        kind = source if source in ("odom", "tf", "path") else "pose"
        self.source, self.kind, self.known, self.rig = source, kind, {}, LapRig(pose_source=kind, depth="ignore", max_gap_s=0.25, wait_s=1.0)
        self.rig.info()

    def pose(self, ms: int) -> None:
        stamp, at = T0 + ms * MS, (ms / 1000, 0, 0)
        if self.kind == "tf":
            self.rig.intake.on("tf", m.tf(m.pose(stamp, at, kind="TransformStamped", child="cam")), self.rig.now)
        elif self.kind == "path":
            self.known[stamp] = at[0]
            self.rig.intake.on("path", path(sorted(self.known), [self.known[s] for s in sorted(self.known)]), self.rig.now)
        else:
            self.rig.intake.on(self.kind, m.pose(stamp, at, kind="Odometry" if self.kind == "odom" else self.source), self.rig.now)

    def image(self, ms: int) -> None:
        self.rig.image(T0 + ms * MS)

    def check(self, used: list[int], dropped: dict[str, int]) -> None:
        assert [(f.stamp_ns - T0) // MS for f in self.rig.frames] == used and self.rig.dropped == dropped, (self.source, self.rig.intake.last_problem)
        np.testing.assert_allclose([f.T_world_cam[0, 3] for f in self.rig.frames], [ms / 1000 for ms in used], atol=1e-12)


@pytest.mark.parametrize("source", SOURCES)
def test_poses_before_the_images(source):
    s = Source(source)
    for ms in range(0, 500, 100):
        s.pose(ms)
    for ms in (0, 33, 150, 400):
        s.image(ms)
    s.check([0, 33, 150, 400], {})


@pytest.mark.parametrize("source", SOURCES)
def test_poses_that_are_late(source):
    s = Source(source)
    s.pose(0)
    for ms in (50, 150, 250):
        s.image(ms)
    for ms in (100, 200):
        s.rig.now += 0.2
        s.pose(ms)
    s.check([50, 150], {})
    s.rig.expire()
    s.pose(300)
    s.check([50, 150], {"pose_too_old": 1})


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("order", [(0, 200, 100, 300), (300, 0, 100, 200), (100, 0, 300, 200)])
def test_poses_out_of_order(source, order):
    s = Source(source)
    for ms in order:
        s.pose(ms)
    for ms in (50, 150, 250):
        s.image(ms)
    s.check([50, 150, 250], {})


@pytest.mark.parametrize("source", SOURCES)
def test_poses_with_a_gap(source):
    s = Source(source)
    for ms in (0, 100, 600, 700):
        s.pose(ms)
    for ms in (50, 100, 300, 600, 650):
        s.image(ms)
    s.check([50, 100, 600, 650], {"pose_gap": 1})


@pytest.mark.parametrize("source", SOURCES)
def test_a_late_pose_in_a_gap_comes_too_late_for_the_image_that_it_cost(source):
    """Between two poses that are too far apart nothing can come any more, as far as one knows; what comes all the same serves the images after it."""
    s = Source(source)
    for ms in (0, 400):
        s.pose(ms)
    s.image(100)
    s.pose(200)
    s.image(150)
    s.image(300)
    s.check([150, 300], {"pose_gap": 1})


@pytest.mark.parametrize("source", SOURCES)
def test_images_before_the_first_pose(source):
    s = Source(source)
    s.image(0)
    s.pose(100)
    s.pose(200)
    s.image(150)
    s.check([150], {"no_pose": 1})


@pytest.mark.parametrize("source", SOURCES)
def test_poses_of_a_looped_recording(source):
    s = Source(source)
    for lap in range(2):
        s.known.clear()
        for ms in range(0, 3000, 100):
            s.pose(ms)
            s.image(ms)
    assert s.rig.laps == [(1, 30)]
    s.check([*range(0, 3000, 100)] * 2, {})
