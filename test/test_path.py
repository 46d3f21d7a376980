"""Corrected paths on the ROS side: nav_msgs/Path through the intake (frames, extrinsics, order) and out of a recording."""
import json
import re

import messages as m
import numpy as np
import pytest

from spirula_ros import bags
from spirula_ros.bag_writer import BagWriter
from spirula_ros.cli import main
from spirula_ros.convert import path_from_msg
from spirula_ros.intake import Intake, IntakeConfig
from test_intake import PERIOD, T0, Rig
from test_mapper import CAMERA, frame


def path(stamps, xs, frame_id="map", family="rosbags"):
    return m.put(m.stamped("nav_msgs/msg/Path", max(stamps, default=T0), frame_id, family), poses=[m.pose(s, (x, 0, 0), frame_id=frame_id, family=family) for s, x in zip(stamps, xs)])


class PathRig(Rig):
    def __init__(self, **config):
        super().__init__(**config)
        self.paths = []
        self.intake = Intake(IntakeConfig(**config), self.ledger, self.take, clock=lambda: 0.0, correct=lambda *path: self.paths.append(path))


@pytest.mark.parametrize("family", ["rosbags", "rclpy"])
def test_a_path_becomes_stamps_and_camera_poses(family):
    rig = PathRig(T_body_camera=(0.0, 0.0, 0.5, 0.0, 0.0, 1.0, 0.0))   # half a turn about z, and 0.5 m up
    rig.intake.on("path", path([T0], [9.0], family=family))
    assert not rig.paths, "before the first image nothing is to be corrected"
    rig.all_at(T0)
    rig.intake.on("path", path([T0, T0 + PERIOD], [0.1, 0.2], family=family), rig.now)
    (stamps, poses, _), = rig.paths
    assert stamps.tolist() == [T0, T0 + PERIOD] and stamps.dtype == np.int64
    np.testing.assert_allclose(poses[:, :3, 3], [(0.1, 0, 0.5), (0.2, 0, 0.5)])
    np.testing.assert_allclose(poses[:, :3, :3], [np.diag([-1, -1, 1])] * 2, atol=1e-12)
    assert [s.count for s in rig.intake.states() if s.kind == "path"] == [2]


def test_extrinsics_come_from_tf():
    static = m.tf(m.pose(0, (0, 0, 2), kind="TransformStamped", frame_id="base", child="head"), m.pose(0, (0, 3, 0), kind="TransformStamped", frame_id="head", child="cam"))
    rig = PathRig(pose_source="tf", depth="ignore")
    rig.info()
    rig.intake.on("tf_static", static, rig.now)
    rig.intake.on("tf", m.tf(m.pose(T0, kind="TransformStamped", frame_id="map", child="base")), rig.now)
    rig.image(T0)
    rig.intake.on("path", path([T0], [0.1]), rig.now)
    odom = PathRig(pose_source="odom", depth="ignore")
    odom.info()
    odom.intake.on("tf_static", static, odom.now)
    odom.intake.on("odom", m.pose(T0, kind="Odometry", child="base"), odom.now)
    odom.image(T0)
    odom.intake.on("path", path([T0], [0.1]), odom.now)
    for r in (rig, odom):
        (_, poses, _), = r.paths
        np.testing.assert_allclose(poses[0, :3, 3], [0.1, 3, 2])
        np.testing.assert_allclose(r.frames[0].T_world_cam[:3, 3], [0, 3, 2])


def test_a_path_waits_for_the_images_of_its_time_and_the_newest_counts():
    rig = PathRig(depth="require")
    rig.info()
    rig.pose(T0)
    rig.image(T0)
    rig.intake.on("path", path([T0], [0.1]), rig.now)
    rig.intake.on("path", path([T0, T0 + 1], [0.2, 0.2]), rig.now)
    assert not rig.paths and not rig.frames
    rig.depth(T0)
    assert len(rig.frames) == 1 and len(rig.paths) == 1 and rig.paths[0][1][0, 0, 3] == 0.2
    rig.image(T0 + PERIOD)   # later than the path: no reason to wait
    rig.intake.on("path", path([T0], [0.3]), rig.now)
    assert len(rig.paths) == 2 and rig.intake.pending == 1


def test_bad_paths_are_counted_with_their_reason():
    rig = PathRig()
    rig.all_at(T0)
    far = path([T0], [1e9])
    other, mixed, nan, zero = path([T0], [0.1], "odom"), path([T0, T0 + 1], [0.1, 0.1]), path([T0], [np.nan]), path([T0], [0.0])
    mixed.poses[1].header.frame_id, zero.poses[0].pose.orientation.w = "odom", 0.0
    for msg, why in ((other, "path is in frame 'odom', the map in 'map'; .*intake.map_frame 'odom'"), (mixed, "poses of it in 'odom'"), (nan, "1 of 1 poses .* not finite"), (zero, "no unit quaternion"), (far, "1000000000.0.* more than 100000 m")):
        rig.intake.on("path", msg, rig.now)
        assert re.search(why, rig.intake.last_problem), rig.intake.last_problem
    assert not rig.paths and [s.bad for s in rig.intake.states() if s.kind == "path"] == [{"bad_path": 5}]
    rig.intake.on("path", path([], []), rig.now)
    assert path_from_msg(path([], []))[1].shape == (0, 4, 4) and not rig.paths


# ---- recordings ----------------------------------------------------------------------------------------------------------------

N = 14


@pytest.fixture
def drifting_bag():
    """test_mapper's wall, with poses that are off by 10 cm from frame 7 on, and two paths at the end: a plan and the truth."""
    with BagWriter("bag") as bag:
        for i in range(N):
            f, T = frame(i), frame(i).T_world_cam.copy()
            T[0, 3] += 0.1 * (i >= 7)
            bag.info("/camera_info", f.stamp_ns, "cam", CAMERA)
            bag.pose("/pose", f.stamp_ns, "map", T)
            bag.depth("/depth", f.stamp_ns, "cam", f.depth_m)
            bag.image("/image", f.stamp_ns, "cam", f.rgb)
        stamps, poses = [frame(i).stamp_ns for i in range(N)], [frame(i).T_world_cam for i in range(N)]
        bag.nav_path("/plan", stamps[-1] + 1, "map", [stamps[-1]] * 3, poses[:3])
        bag.nav_path("/slam/path", stamps[-1] + 2, "map", stamps, poses)
    return "bag"


def replayed(bag, *more):
    assert main(["replay", bag, "--lossless", "--backend", "cpu", "--threads", "1", "--holdout", "4", "--no-mesh", "--refine-steps", "300", *more]) == 0
    return json.load(open("spirula_out/report.json"))


def test_a_recording_with_a_path_closes_its_loop(drifting_bag, capsys):
    without = replayed(drifting_bag)
    assert "path: none; if one of /plan, /slam/path" in capsys.readouterr().err and without["corrections"] == 0
    closed, plan = replayed(drifting_bag, "--set", "topics.path=/slam/path"), replayed(drifting_bag, "--path-topic", "/plan")
    assert closed["corrections"] == 1 and closed["topics"]["/slam/path"] == "path" and closed["heldout_psnr"] > without["heldout_psnr"] + 3
    assert plan["corrections"] == 0 and "3 of 3 poses of the path share a stamp" in plan["hint"] and plan["heldout_psnr"] == pytest.approx(without["heldout_psnr"], abs=1e-9)
    with bags.open_bag(drifting_bag) as bag, pytest.raises(bags.BagError, match="--path-topic /pose is a geometry_msgs/msg/PoseStamped"):
        bags.pick_topics(bag, {"path": "/pose"})
