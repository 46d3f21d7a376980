"""TrainNode with real topics and services in one process; the mapper is a double unless a test says otherwise, the frame pairing is the real one."""
import array
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import conftest
import cv2
import numpy as np
import pytest

rclpy = conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
conftest.importorskip("spirula_ros.msg", "build the messages: make develop")
from geometry_msgs.msg import PoseStamped, TransformStamped
from nav_msgs.msg import Odometry, Path as PathMsg
from rclpy.parameter import Parameter
from rclpy.parameter_client import AsyncParameterClient
from sensor_msgs.msg import CameraInfo, CompressedImage, Image, PointCloud2
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger
from visualization_msgs.msg import Marker, MarkerArray

import messages
from node_rig import BEST_EFFORT, CAMERA, LATCHED, Rig
from fake_mapper import WRITTEN, FakeMapper
from spirula_gpu.checkpoint import Resumed
from spirula_gpu.mapper import Mapper
from spirula_gpu.report import CameraPath
from spirula_ros.msg import MapStatus, VramReport
from spirula_ros.node import TrainNode
from spirula_ros.session import check_path
from spirula_ros.publish import camera_info_msg, header
from spirula_ros.srv import SaveMap

pytestmark = pytest.mark.usefixtures("ros")


@pytest.fixture
def rig(request):
    rig = Rig(**getattr(request, "param", {}))
    yield rig
    rig.close()


def test_the_viewer_in_the_node(tmp_path):
    """A change in a browser is one of the node's parameters; what the node asks of the mapper includes what browsers want."""
    conftest.importorskip("viser", "run `make test`, which installs it")
    rig = Rig(Mapper, **{"web.enabled": True, "web.port": 0, "engine.backend": "cpu", "engine.threads": 1})
    web = rig.session.web
    try:
        web._act("configure", {"train.steps_per_frame": 7})
        rig.until(lambda: rig.node.get_parameter("train.steps_per_frame").value == 7 and rig.mapper.config.train.steps_per_frame == 7)
        rig.mapper.command("configure", {"prune.growth": 0.1}).result(60)   # not of the node's
        web._act("configure", {"train.lr_mean": 1e-3})
        web._act("configure", {"train.steps_per_frame": 8})
        rig.until(lambda: rig.mapper.config.train.steps_per_frame == 8)
        rig.node.set_parameters([Parameter("train.steps_per_frame", value=9)])
        rig.until(lambda: rig.mapper.config.train.steps_per_frame == 9)
        assert rig.mapper.config.train.lr_mean == rig.node.get_parameter("train.lr_mean").value == 1e-3 and rig.mapper.config.prune.growth == 0.1
        web._act("configure", {"train.steps_per_frame": -7})
        rig.until(lambda: "steps_per_frame" in rig.session.internal_error)   # shown in the panel
        web._server.get_clients = lambda: {0: None}
        rig.until(lambda: rig.mapper.wants.splats == 1_000_000)
        rig.node.set_parameters([Parameter("web.max_splats", value=1000)])
        rig.until(lambda: rig.mapper.wants.splats == 1000)
        web._server.get_clients = dict
        rig.until(lambda: rig.mapper.wants.splats == 0)
    finally:
        assert rig.close() == 0
    assert not web._thread.is_alive()


def test_frames_in_and_everything_out(rig):
    rgb, depth, info = rig.hear(Image, "render/image"), rig.hear(Image, "render/depth"), rig.hear(CameraInfo, "render/camera_info")
    status, vram, mesh = rig.hear(MapStatus, "status", LATCHED), rig.hear(VramReport, "vram", LATCHED), rig.hear(MarkerArray, "mesh", LATCHED)
    rig.connected()
    for _ in range(3):
        rig.send_frame()
        rig.spin(0.05)
    rig.until(lambda: len(rig.mapper.frames) == 3 and rgb and depth and info and vram and mesh and status and status[-1].frames_used == 3)
    frame = rig.mapper.frames[-1]
    assert frame.stamp_ns == 300_000_000 and frame.frame_id == "camera" and (frame.rgb == 3).all()
    assert frame.camera == CAMERA and frame.T_world_cam[0, 3] == pytest.approx(0.3) and (frame.depth_m == 2).all()
    assert rgb[-1].encoding == "rgb8" and rgb[-1].header.frame_id == "camera" and depth[-1].encoding == "32FC1"
    assert info[-1].k[2] == CAMERA.cx - 0.5
    assert (status[-1].state, status[-1].frames_in, status[-1].frames_pending, status[-1].gaussians) == ("running", 3, 0, 1000)
    assert (vram[-1].total_bytes, vram[-1].categories[0].name, len(vram[-1].buffers)) == (1000, "splat", 0)
    assert (mesh[-1].markers[0].action, len(mesh[-1].markers[0].points)) == (Marker.ADD, 3)


@pytest.mark.parametrize("rig", [{"intake.pose_source": "odom", "intake.depth": "ignore"}], indirect=True)
def test_poses_from_odometry(rig):
    odometry = rig.robot.create_publisher(Odometry, "pose", BEST_EFFORT)
    rig.until(lambda: rig.image.get_subscription_count() and rig.info.get_subscription_count() and odometry.get_subscription_count())
    assert not rig.depth.get_subscription_count(), "depth is ignored, so it is not received"
    msg = Odometry(header=header(100_000_000, "odom"))
    msg.pose.pose.orientation.w, msg.pose.pose.position.z = 1.0, 7.0
    odometry.publish(msg)
    rig.send_frame("no pose")
    rig.until(lambda: rig.mapper.frames)
    assert rig.mapper.frames[0].T_world_cam[2, 3] == 7 and rig.mapper.frames[0].depth_m is None
    assert rig.session.intake.map_frame == "odom"


@pytest.mark.parametrize("rig", [{"intake.depth_source": "points", "intake.mask": "require", "topics.points": "lidar", "intake.T_camera_lidar": [0.0, 0.0, 1.0, 0.5, -0.5, 0.5, 0.5]}],
                         indirect=True)
def test_points_and_masks_over_dds(rig):
    lidar, mask = rig.robot.create_publisher(PointCloud2, "lidar", BEST_EFFORT), rig.robot.create_publisher(Image, "mask", BEST_EFFORT)
    rig.until(lambda: all(p.get_subscription_count() for p in (lidar, mask, rig.image, rig.info, rig.pose)))
    assert not rig.depth.get_subscription_count(), "depth comes from points"
    shown = np.ones((48, 64), np.uint8)
    shown[:, 40:] = 0
    lidar.publish(messages.cloud_of(100_000_000, [[1.0, 0, 0], [np.nan, 0, 0]], "lidar", "rclpy"))  # 1 m before the lidar, which is 1 m before the camera
    mask.publish(messages.image(100_000_000, 64, 48, "mono8", shown.tobytes(), frame_id="camera", family="rclpy"))
    rig.send_frame()
    frame = rig.until(lambda: rig.mapper.frames)[0]
    assert np.argwhere(frame.depth_m).tolist() == [[24, 32]] and frame.depth_m[24, 32] == pytest.approx(2)
    np.testing.assert_array_equal(frame.mask, shown)


@pytest.mark.parametrize("rig", [{"intake.depth_source": "points", "watch.silence_s": 0.2}], indirect=True)
def test_points_by_tf_and_what_the_node_says_when_they_are_missing(rig):
    messages_tf = conftest.importorskip("tf2_msgs.msg", "make test")
    lidar, static = rig.robot.create_publisher(PointCloud2, "points", BEST_EFFORT), rig.robot.create_publisher(messages_tf.TFMessage, "/tf_static", LATCHED)
    rig.until(lambda: all(p.get_subscription_count() for p in (lidar, static, rig.image, rig.info, rig.pose)))
    rig.send_frame()
    rig.until(lambda: "waiting" in rig.session.hint or "wait for" in rig.session.hint)
    assert "points" in rig.session.hint and "PointCloud2" in rig.session.hint
    place = TransformStamped(header=header(1, "camera"), child_frame_id="lidar")
    place.transform.translation.z, place.transform.rotation.w = 0.5, 1.0
    static.publish(messages_tf.TFMessage(transforms=[place]))
    lidar.publish(messages.cloud_of(100_000_000, [[0, 0, 1.5]], "lidar", "rclpy"))
    frame = rig.until(lambda: rig.mapper.frames)[0]
    assert frame.depth_m[24, 32] == pytest.approx(2) and frame.mask is None
@pytest.mark.parametrize("rig", [{"topics.path": "slam_path"}], indirect=True)
def test_a_corrected_path_reaches_the_mapper_as_camera_poses(rig):
    latched = rig.robot.create_publisher(PathMsg, "slam_path", LATCHED)
    rig.connected().until(latched.get_subscription_count)
    rig.send_frame()
    rig.until(lambda: rig.mapper.frames)
    poses = [PoseStamped(header=header(stamp, "map")) for stamp in (100_000_000, 200_000_000)]
    for pose in poses:
        pose.pose.orientation.w, pose.pose.position.y = 1.0, 0.5
    latched.publish(PathMsg(header=header(200_000_000, "map"), poses=poses))
    name, stamps, T, sensors = rig.until(lambda: next((c for c in rig.mapper.commands if c[0] == "correct"), None))
    assert sensors.tolist() == [0, 0] and stamps.tolist() == [100_000_000, 200_000_000] and T.shape == (2, 4, 4) and (T[:, 1, 3] == 0.5).all()
    latched.publish(PathMsg(header=header(200_000_000, "elsewhere"), poses=[PoseStamped(pose=pose.pose) for pose in poses]))
    rig.until(lambda: "path is in frame 'elsewhere', the map in 'map'" in rig.session.intake.last_problem)
    assert rig.session.internal_errors == 0 and sum(c[0] == "correct" for c in rig.mapper.commands) == 1


@pytest.mark.parametrize("rig", [{"intake.pose_source": "tf", "intake.depth": "use_if_there", "qos.sensors": "reliable", "topics.image_transport": "compressed"}], indirect=True)
def test_poses_from_tf_between_two_stamps_and_compressed_images(rig):
    messages = conftest.importorskip("tf2_msgs.msg", "make test")

    def transform(stamp_ns, parent, child, x):
        out = TransformStamped(header=header(stamp_ns, parent), child_frame_id=child)
        out.transform.rotation.w, out.transform.translation.x = 1.0, x
        return out
    tf, static = rig.robot.create_publisher(messages.TFMessage, "/tf", 10), rig.robot.create_publisher(messages.TFMessage, "/tf_static", LATCHED)
    image, info = rig.robot.create_publisher(CompressedImage, "image/compressed", 10), rig.robot.create_publisher(CameraInfo, "camera_info", 10)
    rig.until(lambda: all(p.get_subscription_count() for p in (tf, static, image, info)))
    static.publish(messages.TFMessage(transforms=[transform(0, "base", "camera", 10.0)]))
    head = header(1_050_000_000, "camera")
    info.publish(camera_info_msg(CAMERA, head))
    data = array.array("B", cv2.imencode(".png", np.full((48, 64, 3), (10, 20, 30), np.uint8))[1].tobytes())
    image.publish(CompressedImage(header=head, format="png", data=data))
    tf.publish(messages.TFMessage(transforms=[transform(1_000_000_000, "map", "base", 0.0)]))
    tf.publish(messages.TFMessage(transforms=[transform(1_100_000_000, "map", "base", 1.0)]))
    frame = rig.until(lambda: rig.mapper.frames and rig.mapper.frames[0])
    assert frame.T_world_cam[0, 3] == pytest.approx(10.5) and tuple(frame.rgb[0, 0]) == (30, 20, 10)


def test_only_what_is_heard_is_wanted(rig):
    rig.spin(0.2)
    assert (rig.mapper.wants.render, rig.mapper.wants.mesh) == (False, False)
    rig.hear(Image, "render/depth")
    rig.until(lambda: rig.mapper.wants.render and not rig.mapper.wants.mesh)
    rig.hear(MarkerArray, "mesh", LATCHED)
    rig.until(lambda: rig.mapper.wants.mesh)


def test_a_late_mesh_listener_gets_everything(rig):
    first = rig.hear(MarkerArray, "mesh")
    rig.connected().send_frame()
    rig.until(lambda: first)
    second = rig.hear(MarkerArray, "mesh")  # volatile: the history is not replayed to it
    rig.until(lambda: second)
    assert second[-1].markers[0].action == Marker.ADD


def test_the_refined_path_is_published_to_who_listens(rig):
    assert not rig.mapper.wants or not rig.mapper.wants.path
    heard = rig.hear(PathMsg, "path", LATCHED)
    rig.connected().send_frame()
    rig.until(lambda: rig.mapper.wants and rig.mapper.wants.path and rig.mapper.frames)
    T = np.tile(np.eye(4), (2, 1, 1))
    T[1, :3, 3], T[1, :3, :3] = (1, 2, 3), [[0, -1, 0], [1, 0, 0], [0, 0, 1]]   # a quarter turn about z
    rig.mapper.path.set(CameraPath(np.array([1_500_000_000, 2_000_000_001]), T))
    rig.until(lambda: heard)
    first, second = heard[-1].poses
    assert (first.header.stamp.sec, first.header.stamp.nanosec, second.header.stamp.nanosec) == (1, 500_000_000, 1)
    assert heard[-1].header.frame_id == first.header.frame_id == rig.session.intake.map_frame != ""
    assert (second.pose.position.x, second.pose.position.y, second.pose.position.z) == (1, 2, 3)
    assert (second.pose.orientation.z, second.pose.orientation.w) == pytest.approx((0.5**0.5, 0.5**0.5))
    rig.spin(0.3)
    assert len(heard) == 1


@pytest.mark.parametrize("rig", [{"publish.render_width": 32}], indirect=True)
def test_wide_cameras_are_rendered_smaller(rig):
    rig.connected().send_frame()
    rig.until(lambda: rig.mapper.frames)
    views = [c for c in rig.mapper.commands if c[0] == "view"]
    assert views == [("view", None, CAMERA.resized(32, 24))]


@pytest.mark.parametrize("rig", [{"publish.vram_buffers": True}], indirect=True)
def test_vram_lists_buffers_on_request(rig):
    vram = rig.hear(VramReport, "vram", LATCHED)
    rig.until(lambda: vram)
    assert [(b.name, b.category, b.used_bytes, b.capacity_bytes) for b in vram[-1].buffers] == [("means", "splat", 900, 1000)]


def test_save_map_tells_the_real_outcome_while_topics_run(rig, tmp_path):
    rig.connected()
    rig.mapper.busy_s = 0.5
    client = rig.robot.create_client(SaveMap, "spirula/save_map")
    rig.until(client.service_is_ready)
    saving = client.call_async(SaveMap.Request(path=str(tmp_path / "map.ply")))
    rig.spin(0.1)
    rig.send_frame()
    rig.until(lambda: rig.mapper.frames)
    assert not saving.done(), "the frame went through while the map was being saved"
    rig.until(saving.done)
    assert saving.result().success and f"{WRITTEN} Gaussians" in saving.result().message and (tmp_path / "map.ply").exists()
    refused = rig.call(SaveMap, "save_map", SaveMap.Request(path=str(tmp_path / "no" / "map.ply")))
    assert not refused.success and refused.message == f"path '{tmp_path / 'no' / 'map.ply'}': must be a file in a folder that exists and can be written; give another one"
    assert "output.map_path" in rig.call(SaveMap, "save_map", SaveMap.Request()).message


def test_reset_pause_and_finish(rig):
    mesh = rig.hear(MarkerArray, "mesh")
    rig.connected().send_frame()
    rig.until(lambda: mesh)
    assert rig.call(Trigger, "reset", Trigger.Request()).success
    rig.until(lambda: mesh[-1].markers[0].action == Marker.DELETEALL)
    assert rig.call(SetBool, "pause", SetBool.Request(data=True)).message == "paused"
    assert ("pause", True) in rig.mapper.commands and ("reset",) in rig.mapper.commands
    refused = rig.call(Trigger, "finish", Trigger.Request())
    assert not refused.success and "output.report_dir" in refused.message


NOISE = np.kron(np.random.default_rng(0).integers(0, 256, (12, 16, 3)), np.ones((4, 4, 1))).astype(np.uint8)
REAL = {"engine.backend": "cpu", "engine.threads": 1, "mesh.period_s": 0.1, "publish.render_hz": 20.0, "publish.mesh_hz": 20.0, "gate.min_translation_m": 0.01}
ENDLESS = {**REAL, "output.report_dir": "report", "output.refine_steps": 10**9}


def map_wall(rig, wall_m, frames=4):
    """Until a wall seen from the side is in the map of a real Mapper."""
    used = rig.mapper.ledger.counts().used
    for i in range(frames):
        rig.send_frame(wall_m=wall_m, rgb=np.roll(NOISE, -6 * i, 1))
        rig.until(lambda: rig.mapper.ledger.counts().used == used + i + 1, 20)


def depths(markers):
    """z of every corner in MarkerArrays; the cameras look along z from z = 0."""
    return np.array([p.z for array in markers for marker in array.markers for p in marker.points])


def test_after_a_reset_nothing_of_the_old_map_comes_back():
    rig = Rig(Mapper, **REAL)
    mesh, render = rig.hear(MarkerArray, "mesh"), rig.hear(Image, "render/image")
    rig.connected()
    map_wall(rig, 2.0)
    rig.until(lambda: depths(mesh).size and render, 20)
    rig.spin(0.5)
    assert rig.call(Trigger, "reset", Trigger.Request()).success
    rig.until(lambda: any(marker.action == Marker.DELETEALL for marker in mesh[-1].markers))
    mesh.clear()
    render.clear()
    late = rig.hear(MarkerArray, "mesh")
    rig.spin(1.0)
    assert not depths(mesh + late).size, "a chunk of the old map was sent after the reset"
    assert not render and rig.mapper.status().gaussians == 0
    map_wall(rig, 1.0)
    rig.until(lambda: depths(mesh).size and render, 20)
    assert depths(mesh).max() < 1.5, "the wall of the old map, at 2 m"
    assert rig.close() == 0


@pytest.mark.parametrize("rig", [{"watch.silence_s": 0.3, "output.report_dir": "report"}], indirect=True)
def test_after_finish_silence_is_explained_again_once_an_image_comes(rig):
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.connected().send_frame()
    rig.until(lambda: rig.mapper.frames)
    done = rig.call(Trigger, "finish", Trigger.Request())
    assert done.success, done.message
    rig.spin(1.0)
    assert status[-1].hint == "", "the recording is over"
    rig.send_frame("no pose")
    rig.until(lambda: "no usable frame" in status[-1].hint)


def test_finish_while_paused_is_refused():
    rig = Rig(Mapper, **ENDLESS)
    map_wall(rig.connected(), 2.0, 1)
    assert rig.call(SetBool, "pause", SetBool.Request(data=True)).success
    refused = rig.call(Trigger, "finish", Trigger.Request())
    assert not refused.success and "paused" in refused.message and "~/pause" in refused.message
    rig.close()


@pytest.mark.parametrize("phase", ["catching up", "refining"])
def test_closing_during_finish_ends_the_training(phase, monkeypatch):
    def caught_up_by_the_stop(mapper):  # which drops the frames that were waited for
        while mapper.status().state != "stopped":
            time.sleep(0.01)
    if phase == "catching up":
        monkeypatch.setattr("spirula_ros.finish.wait_until_idle", caught_up_by_the_stop)
    rig = Rig(Mapper, **ENDLESS)
    map_wall(rig.connected(), 2.0, 1)
    client = rig.robot.create_client(Trigger, "spirula/finish")
    rig.until(client.service_is_ready)
    client.call_async(Trigger.Request())
    finishing = lambda: [t for t in threading.enumerate() if t.name.startswith("finish")]
    rig.until(finishing)
    rig.spin(0.7)
    assert rig.close() == 0
    steps, deadline = rig.mapper._trainer.steps, time.monotonic() + 5
    while finishing() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not finishing() and rig.mapper._trainer.steps == steps, "the background thread trains after the end"
    with pytest.raises(RuntimeError, match="ending"):
        rig.session.command("refine", 0.1)


@pytest.mark.parametrize("rig", [{"watch.silence_s": 0.3, "watch.repeat_s": 0.3}], indirect=True)
def test_silence_names_the_topic_without_publisher_and_the_wrong_qos(rig, ros):
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.robot.destroy_publisher(rig.depth)
    rig.robot.destroy_publisher(rig.pose)
    rig.robot.create_publisher(PoseStamped, "slam/pose", 10)
    other = rclpy.Context()  # one participant cannot have two types on a topic
    rclpy.init(context=other, domain_id=ros)
    stranger = rclpy.create_node("stranger", context=other)
    stranger.create_publisher(String, f"{rig.namespace}/depth", 10)
    rig.until(lambda: status and "slam/pose" in status[-1].hint and "stranger" in status[-1].hint)
    stranger.destroy_node()
    rclpy.shutdown(context=other)
    hint = status[-1].hint
    ns = rig.namespace
    assert f"{ns}/pose [geometry_msgs/msg/PoseStamped]: NO PUBLISHER (parameter topics.pose); geometry_msgs/msg/PoseStamped is published on {ns}/slam/pose" in hint
    assert f"{ns}/image [sensor_msgs/msg/Image]: 1 publisher ({ns}/robot is best_effort, volatile: compatible); received 0" in hint
    assert "sends std_msgs/msg/String: WRONG TYPE" in hint


@pytest.mark.parametrize("rig", [{"watch.silence_s": 0.3}], indirect=True)
def test_what_is_offered_for_a_missing_image_is_no_mask_and_no_other_input(rig):
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.robot.destroy_publisher(rig.image)
    for name in ("front/image", "front/mask"):
        rig.robot.create_publisher(Image, name, 10)
    rig.until(lambda: status and "front/image" in status[-1].hint)
    rig.spin(1.0)
    line = next(line for line in status[-1].hint.splitlines() if f"{rig.namespace}/image [" in line)
    assert f"sensor_msgs/msg/Image is published on {rig.namespace}/front/image;" in line, line


@pytest.mark.parametrize("rig", [{"watch.silence_s": 0.3, "qos.sensors": "reliable"}], indirect=True)
def test_silence_names_the_incompatible_qos(rig):
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.until(lambda: status and "QOS INCOMPATIBLE with ours (reliable, volatile)" in status[-1].hint)
    assert f"{rig.namespace}/robot is best_effort, volatile" in status[-1].hint


@pytest.mark.parametrize("source, center, told", [("live: images of /a, poses of /b", 0.0, "its map is of live: images of /a"), ("", 500.0, "the first frame lies 499.9 m from the nearest keyframe"), ("", 0.0, "")])
def test_frames_that_may_not_be_of_the_resumed_map_are_doubted_for_good(source, center, told, capfd):
    class Resuming(FakeMapper):
        resumed = Resumed("map.ckpt", 10, 1, 5, 0, "map", None, {}, source, np.array([[center, 0.0, 0.0]]), 40.0)
    rig = Rig(Resuming).connected()
    try:
        assert rig.mapper.config.checkpoint.source == f"live: images of {rig.namespace}/image, poses of {rig.namespace}/pose"
        heard = rig.hear(MapStatus, "status", LATCHED)
        for n in (1, 2):
            rig.send_frame()
            rig.until(lambda: len(rig.mapper.frames) == n)
        del heard[:]
        rig.until(lambda: heard)
        assert told in heard[-1].hint if told else not heard[-1].hint
    finally:
        rig.close()
    assert capfd.readouterr().err.count(told) == 1 if told else True


def test_what_limits_the_map_is_logged_once_when_it_lasts(capfd):
    """A camera that stands still, without depth: all of it real."""
    rig = Rig(Mapper, **{"intake.depth": "ignore", "engine.backend": "cpu", "engine.threads": 1, "watch.silence_s": 0.5, "gate.min_translation_m": 0.0, "publish.status_hz": 20.0})
    try:
        rig.until(lambda: all(p.get_subscription_count() for p in (rig.image, rig.info, rig.pose)))
        rgb = np.random.default_rng(0).integers(0, 256, (48, 64, 3)).astype(np.uint8)
        deadline = time.monotonic() + 20
        while not rig.session.limits_told and time.monotonic() < deadline:
            rig.send_frame(rgb=rgb, moves=0.0)
            rig.spin(0.1)
        for _ in range(8):
            rig.send_frame(rgb=rgb, moves=0.0)
            rig.spin(0.1)
        assert "move the camera sideways" in rig.mapper.status().hint
    finally:
        rig.close()
    assert capfd.readouterr().err.count("move the camera sideways") == 1


def test_another_node_of_the_same_name_is_noticed(rig, monkeypatch):
    monkeypatch.setattr("spirula_ros.session.TWINS_S", 0.1)
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.spin(0.3)
    assert not status or "nodes are called" not in status[-1].hint
    twin = rclpy.create_node("spirula", namespace=rig.namespace)
    try:
        rig.until(lambda: status and f"2 nodes are called {rig.namespace}/spirula" in status[-1].hint and "namespace:=" in status[-1].hint)
    finally:
        twin.destroy_node()


def test_parameters_of_other_nodes_in_the_same_file_are_warned_of(capfd):
    Rig(**{"base_driver.frame": "odom"}).close()
    assert "unknown parameters, without effect here: base_driver.frame" in capfd.readouterr().err


@pytest.mark.parametrize("rig", [{"watch.silence_s": 0.3}], indirect=True)
def test_silence_ends_with_a_frame(rig):
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.until(lambda: status and status[-1].hint)
    rig.connected().send_frame()
    rig.until(lambda: rig.mapper.frames and not status[-1].hint)


def test_bad_frames_are_counted_and_the_good_ones_go_on(rig):
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.connected()
    for wrong in ("nan pose", None, "short image", None):
        rig.send_frame(wrong)
        rig.spin(0.1)
    rig.until(lambda: len(rig.mapper.frames) == 2)
    rig.until(lambda: status and status[-1].frames_in == 4 and status[-1].frames_pending == 0, seconds=10)
    assert sum(c.count for c in status[-1].dropped) == 2 and status[-1].frames_used == 2
    assert status[-1].last_error == ""


def test_an_exception_in_a_callback_is_counted_and_shown(rig):
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.connected()

    def broken(frame):
        raise RuntimeError("seventeen")
    submit, rig.mapper.submit = rig.mapper.submit, broken
    rig.send_frame()
    rig.until(lambda: status and "internal error 1 in" in status[-1].last_error)
    assert "seventeen" in status[-1].last_error
    rig.mapper.submit = submit
    rig.send_frame()
    rig.until(lambda: rig.mapper.frames)


def test_exceptions_in_event_callbacks_services_and_parameters_do_not_end_the_node(rig, monkeypatch):
    def broken(*_):
        raise RuntimeError("eighteen")
    rig.connected()
    monkeypatch.setattr("spirula_ros.node.check_change", broken)
    subscription = next(s for s in rig.node.subscriptions if s.topic_name.endswith("/depth"))
    for handler in subscription.event_handlers:  # two are the node's, and None has no total_count
        handler.callback(None)
    assert rig.session.internal_errors == 2
    client = AsyncParameterClient(rig.robot, "spirula")
    rig.until(client.services_are_ready)
    future = client.set_parameters([Parameter("train.lr_mean", value=0.001)])
    rig.until(future.done)
    assert not future.result().results[0].successful and "eighteen" in future.result().results[0].reason
    rig.session.intake.flush = broken
    rig.session.ros = replace(rig.session.ros, output=replace(rig.session.ros.output, report_dir="report"))
    assert "eighteen" in rig.call(Trigger, "finish", Trigger.Request()).message


BROKEN_MAIN = """
import sys
from rclpy.parameter import Parameter
from fake_mapper import FakeMapper
from spirula_ros import node

class Broken(node.SingleThreadedExecutor):
    def spin_once(self, **_):
        raise RuntimeError("nineteen")

node.SingleThreadedExecutor = Broken
make = node.TrainNode
node.TrainNode = lambda: make(FakeMapper, parameter_overrides=[Parameter("output.map_path", value="map.ply")])
sys.exit(node.main([]))
"""


def test_the_map_is_saved_even_when_spinning_fails(ros_domain):
    done = subprocess.run([sys.executable, "-c", BROKEN_MAIN], env={**os.environ, "ROS_DOMAIN_ID": str(ros_domain), "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "nineteen" in done.stderr and Path("map.ply").is_file(), done.stderr


def test_live_parameters_reach_the_mapper_and_the_others_are_refused(rig):
    client = AsyncParameterClient(rig.robot, "spirula")
    rig.until(client.services_are_ready)

    def set_parameter(name, value):
        future = client.set_parameters([Parameter(name, value=value)])
        rig.until(future.done)
        return future.result().results[0]
    assert set_parameter("train.lr_mean", 0.001).successful
    rig.until(lambda: rig.mapper.config.train.lr_mean == 0.001)
    assert rig.mapper.config.engine == rig.session.config.engine
    assert set_parameter("publish.status_hz", 5.0).successful and rig.session.ros.publish.status_hz == 5.0
    assert "out of range" in set_parameter("train.lr_mean", 7.0).reason
    assert "read-only" in set_parameter("engine.threads", 3).reason
    assert rig.mapper.config.train.lr_mean == 0.001


def test_bad_start_values_name_the_parameter():
    for name, value, text in (("train.lr_mean", 7.0, "train.lr_mean"), ("train.lr_mean", 1, "with a point, 1.0"),
                              ("qos.sensors", "sometimes", "best_effort, reliable")):
        with pytest.raises(ValueError, match=text) as caught:
            TrainNode(FakeMapper, parameter_overrides=[Parameter(name, value=value)])
        assert ("with a point" in str(caught.value)) == (value == 1)   # the advice fits a wrong type alone


def test_a_failed_mapper_is_shown_everywhere_and_ends_the_node(tmp_path):
    rig = Rig(**{"output.map_path": str(tmp_path / "map.ply")})
    status = rig.hear(MapStatus, "status", LATCHED)
    rig.mapper.fail("out of memory in the test")
    rig.until(lambda: status and status[-1].state == "error")
    assert "out of memory in the test" in status[-1].last_error and rig.node.failed
    answer = rig.call(SaveMap, "save_map", SaveMap.Request(path="x.ply"))
    assert not answer.success and "out of memory" in answer.message
    assert rig.close() == 1


def test_the_map_is_saved_at_the_end(tmp_path):
    rig = Rig(**{"output.map_path": str(tmp_path / "map.ply")})
    assert rig.close() == 0 and (tmp_path / "map.ply").exists() and rig.mapper.stopped
    (tmp_path / "gone").mkdir()
    rig = Rig(**{"output.map_path": str(tmp_path / "gone" / "map.ply")})
    (tmp_path / "gone").rmdir()
    assert rig.close() == 1, "a map that could not be saved is a failure"


@pytest.mark.parametrize("path", ["no/such/folder/map.ply", ".", "fifo", "/dev/null"])
def test_a_map_path_that_cannot_be_written_is_refused_at_the_start(path):
    os.mkfifo("fifo")
    with pytest.raises(ValueError, match="output.map_path"):
        check_path("output.map_path", path)


def test_a_map_path_that_can_be_written_or_none_is_taken(tmp_path):
    check_path("output.map_path", "")
    check_path("output.map_path", str(tmp_path / "map.ply"))


@pytest.mark.parametrize("rig", [{"intake.depth": "require"}, {"intake.depth_source": "points"}], indirect=True)
def test_bytes_that_are_no_message_are_counted(rig):
    """Images and points are taken as bytes and read by cdr.py."""
    points = rig.node.ros.intake.depth_source == "points"
    depth = rig.robot.create_publisher(PointCloud2, "points", BEST_EFFORT) if points else rig.depth
    rig.until(lambda: rig.image.get_subscription_count() and depth.get_subscription_count())
    rig.image.publish(b"\0\1\0\0" + bytes(5))
    depth.publish(b"\0\1\0\0" + bytes(9))
    rig.until(lambda: rig.mapper.ledger.counts().dropped.get("bad_message") == 1 and rig.session.intake.states()[1].bad)
    assert rig.session.intake.states()[1].bad == {"bad_message": 1} and "it was cut" in rig.session.intake.last_problem and rig.session.internal_errors == 0


def test_the_topics_of_the_lens_and_of_another_depth_camera():
    from spirula_ros import params
    from spirula_ros.inputs import inputs_of
    for values, wanted in (({}, False), ({"topics.depth_info": "d/info"}, True), ({"topics.depth_info": "d/info", "intake.depth": "ignore"}, False),
                           ({"topics.depth_info": "d/info", "intake.depth_source": "points"}, False)):
        kinds = {source.kind: source for source in inputs_of(params.split(values)[0])}
        assert ("depth_info" in kinds) == wanted
        assert not wanted or (kinds["depth_info"].topic, kinds["depth_info"].parameter) == ("d/info", "topics.depth_info")
