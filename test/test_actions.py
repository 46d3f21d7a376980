"""Services and actions that look at the map, with the real mapper: feedback, cancel, refusal, and sensors that go on meanwhile."""
import math
import os

import conftest
import numpy as np
import pytest

rclpy = conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
conftest.importorskip("spirula_ros.msg", "build the messages: make develop")
from action_msgs.msg import GoalStatus
from geometry_msgs.msg import PoseStamped
from sensor_msgs.msg import Image, PointCloud2
from std_srvs.srv import SetBool

from node_rig import BEST_EFFORT, CAMERA, LATCHED, Rig
from spirula_gpu.camera import Camera
from spirula_gpu.mapper import Mapper
from spirula_ros.action import ExtractMesh, Refine
from spirula_ros.pointcloud import SPLAT_NAMES
from spirula_ros.publish import VIEW_FRAME, camera_info_msg, header
from spirula_ros.srv import LoadMap, RenderView, SaveMap, SetView

SMALL = {"engine.backend": "cpu", "engine.threads": 1, "gate.min_translation_m": 0.0, "gate.min_rotation_deg": 0.0, "gate.min_sharpness": 0.0, "train.steps_per_frame": 3,
         "publish.render_hz": 20.0, "publish.splats_hz": 20.0, "refine.pose": False, "mesh.voxel_m": 0.1, "eval.holdout_every": 4}


pytestmark = pytest.mark.usefixtures("ros")


@pytest.fixture
def rig():
    rig = Rig(Mapper, **SMALL)
    yield rig
    rig.close()


@pytest.fixture
def mapped(rig):
    rig.connected()
    texture = np.random.default_rng(0).integers(0, 256, (12, 16, 3)).astype(np.uint8).repeat(4, 0).repeat(4, 1)
    for _ in range(6):
        rig.send_frame(rgb=texture, moves=0.01)
    rig.until(lambda: rig.mapper.status().keyframes >= 4 and rig.mapper.status().frames.pending == 0, 30)
    return rig


def pose(x=0.0, z=0.0, frame="map") -> PoseStamped:
    msg = PoseStamped(header=header(1, frame))
    msg.pose.position.x, msg.pose.position.z, msg.pose.orientation.w = x, z, 1.0
    return msg


# ---- refine ----------------------------------------------------------------------------------------------------------------

def test_refine_by_steps_tells_how_far_it_is_and_measures(mapped):
    told, before = [], mapped.mapper.status().steps
    status, result = mapped.outcome(mapped.act(Refine, "refine", Refine.Goal(steps=40), told.append), 60)
    assert status == GoalStatus.STATUS_SUCCEEDED and result.success, result.message
    assert 40 <= result.steps < 40 + 2 * Mapper.STEPS_PER_TICK and mapped.mapper.status().steps >= before + 40
    assert math.isfinite(result.heldout_psnr) and f"{result.heldout_psnr:.2f} dB" in result.message
    assert told and all(0 <= f.share <= 1 for f in told)


def test_refine_can_be_cancelled_and_frames_go_on_meanwhile(mapped):
    told, frames = [], mapped.mapper.status().frames.used
    handle = mapped.act(Refine, "refine", Refine.Goal(seconds=600.0), told.append)
    assert handle.accepted
    again = mapped.act(Refine, "refine", Refine.Goal(steps=1))
    assert not again.accepted, "one at a time"
    mapped.send_frame()
    mapped.until(lambda: mapped.mapper.status().frames.used > frames and told)
    future = handle.cancel_goal_async()
    mapped.until(future.done)
    status, result = mapped.outcome(handle)
    assert status == GoalStatus.STATUS_CANCELED and not result.success and "cancelled" in result.message and result.steps > 0
    mapped.until(lambda: not mapped.mapper._refining)
    assert mapped.act(Refine, "refine", Refine.Goal(steps=1)).accepted, "and another one may come"


@pytest.mark.parametrize("goal, why", [(Refine.Goal(), "one must be more than 0"), (Refine.Goal(seconds=-1.0), "one must be more than 0")])
def test_a_refinement_without_end_is_refused(mapped, goal, why):
    status, result = mapped.outcome(mapped.act(Refine, "refine", goal))
    assert status == GoalStatus.STATUS_ABORTED and not result.success and result.message.startswith(f"steps = 0, seconds = {goal.seconds:g}: {why}") and math.isnan(result.heldout_psnr)


def test_refine_says_why_it_cannot(rig):
    status, result = rig.outcome(rig.act(Refine, "refine", Refine.Goal(steps=5)))
    assert status == GoalStatus.STATUS_ABORTED and "no keyframe" in result.message
    rig.call(SetBool, "pause", SetBool.Request(data=True))
    status, result = rig.outcome(rig.act(Refine, "refine", Refine.Goal(steps=5)))
    assert status == GoalStatus.STATUS_ABORTED and "paused" in result.message and math.isnan(result.heldout_psnr)


# ---- mesh ------------------------------------------------------------------------------------------------------------------

def test_extract_mesh_writes_it_at_the_voxel_asked_for(mapped):
    told, sizes = [], []
    for voxel in (0.0, 0.05):
        status, result = mapped.outcome(mapped.act(ExtractMesh, "extract_mesh", ExtractMesh.Goal(path="mesh.ply", voxel_m=voxel), told.append), 60)
        assert status == GoalStatus.STATUS_SUCCEEDED and result.success, result.message
        assert f"element vertex {result.vertices}".encode() in open("mesh.ply", "rb").read(300) and result.triangles > 0
        sizes.append(result.triangles)
    assert sizes[1] > 2 * sizes[0] and told and told[0].share == 0


@pytest.mark.parametrize("goal, why", [(ExtractMesh.Goal(path="mesh.obj"), "must end in .ply"), (ExtractMesh.Goal(path="no/where.ply"), "folder that exists"),
                                       (ExtractMesh.Goal(path="mesh.ply", voxel_m=-1.0), "mesh.voxel_m")])
def test_a_mesh_that_cannot_be_made_says_why(mapped, goal, why):
    status, result = mapped.outcome(mapped.act(ExtractMesh, "extract_mesh", goal))
    assert status == GoalStatus.STATUS_ABORTED and why in result.message and not os.path.exists("mesh.ply")


def test_no_mesh_of_nothing(rig):
    status, result = rig.outcome(rig.act(ExtractMesh, "extract_mesh", ExtractMesh.Goal(path="mesh.ply")))
    assert status == GoalStatus.STATUS_ABORTED and "0 Gaussians" in result.message and not os.path.exists("mesh.ply")


def test_a_cancelled_mesh_leaves_the_file_as_it_was(mapped, monkeypatch):
    open("mesh.ply", "w").write("old")
    fuse = mapped.mapper._output._fuse
    handle = None

    def slowly(mesher, keyframe):
        import time
        time.sleep(0.3)
        fuse(mesher, keyframe)
    monkeypatch.setattr(mapped.mapper._output, "_fuse", slowly)
    handle = mapped.act(ExtractMesh, "extract_mesh", ExtractMesh.Goal(path="mesh.ply"))
    future = handle.cancel_goal_async()
    mapped.until(future.done)
    status, result = mapped.outcome(handle)
    assert status == GoalStatus.STATUS_CANCELED and "keyframes were fused" in result.message and open("mesh.ply").read() == "old"
    assert mapped.mapper.status().state == "running"


# ---- load, views -----------------------------------------------------------------------------------------------------------

def test_save_and_load(mapped):
    saved = mapped.call(SaveMap, "save_map", SaveMap.Request(path="map.ply"), 30)
    n = mapped.mapper.status().gaussians
    assert saved.success, saved.message
    loaded = mapped.call(LoadMap, "load_map", LoadMap.Request(path="map.ply"), 30)
    assert loaded.success and f"{n} Gaussians" in loaded.message, loaded.message
    assert mapped.mapper.status().gaussians == n and mapped.mapper.status().keyframes == 0
    mapped.send_frame()
    mapped.send_frame()   # one of them is held out
    mapped.until(lambda: mapped.mapper.status().keyframes == 1 and mapped.mapper.status().gaussians >= n, 10)


def test_a_bad_file_leaves_the_map(mapped):
    n = mapped.mapper.status().gaussians
    open("broken.ply", "w").write("ply\nnonsense")
    for path, why in (("nowhere.ply", "No such file"), ("broken.ply", "broken.ply")):
        answer = mapped.call(LoadMap, "load_map", LoadMap.Request(path=path), 30)
        assert not answer.success and why in answer.message and "train.start_map" not in answer.message, answer.message
    assert mapped.mapper.status().gaussians == n


def test_render_view_from_anywhere(mapped):
    answer = mapped.call(RenderView, "render_view", RenderView.Request(pose=pose(0.02)), 20)
    assert answer.success, answer.message
    assert (answer.image.width, answer.image.height, answer.depth.encoding) == (CAMERA.width, CAMERA.height, "32FC1") and answer.image.header.frame_id == VIEW_FRAME
    assert np.std(np.frombuffer(answer.image.data, np.uint8)) > 10
    depth = np.frombuffer(answer.depth.data, np.float32)
    assert np.nanmedian(depth) == pytest.approx(2.0, abs=0.1)
    small = mapped.call(RenderView, "render_view", RenderView.Request(pose=pose(), camera=camera_info_msg(Camera(32, 24, 30.0, 30.0, 16.0, 12.0), header(0, ""))), 20)
    assert (small.image.width, small.camera_info.height) == (32, 24)


@pytest.mark.parametrize("change, why", [(dict(pose=pose(frame="odom")), "frame 'odom', the map in 'map'"), (dict(pose=PoseStamped()), "norm 0"), (dict(pose=pose(math.nan)), "not finite")])
def test_a_bad_view_says_why(mapped, change, why):
    if "norm" in why:
        change["pose"].pose.orientation.w = 0.0
    assert why in mapped.call(RenderView, "render_view", RenderView.Request(**change), 20).message
    answer = mapped.call(SetView, "set_view", SetView.Request(**change))
    assert not answer.success and why in answer.message


def test_render_view_needs_a_map_and_a_camera(rig):
    answer = rig.call(RenderView, "render_view", RenderView.Request(pose=pose()))
    assert not answer.success and "no frame has come yet" in answer.message
    bent = camera_info_msg(CAMERA, header(0, ""))
    bent.d = [0.1, 0.0, 0.0, 0.0, 0.0]
    assert "without distortion" in rig.call(RenderView, "render_view", RenderView.Request(pose=pose(), camera=bent)).message
    assert "map is empty" in rig.call(RenderView, "render_view", RenderView.Request(pose=pose(), camera=camera_info_msg(CAMERA, header(0, "")))).message


def test_set_view_and_the_topic_view_move_the_render(mapped):
    rendered = mapped.hear(Image, "render/image")
    mapped.until(lambda: rendered and rendered[-1].header.frame_id == "camera")
    assert mapped.call(SetView, "set_view", SetView.Request(pose=pose(5.0), camera=camera_info_msg(Camera(32, 24, 30.0, 30.0, 16.0, 12.0), header(0, "")))).success
    mapped.until(lambda: rendered[-1].width == 32 and rendered[-1].header.frame_id == VIEW_FRAME)
    empty = np.frombuffer(rendered[-1].data, np.uint8).mean()
    view = mapped.robot.create_publisher(PoseStamped, "spirula/view", BEST_EFFORT)
    mapped.until(view.get_subscription_count)
    view.publish(pose(0.03))
    mapped.until(lambda: abs(np.frombuffer(rendered[-1].data, np.uint8).mean() - empty) > 10)
    assert rendered[-1].width == 32, "the camera stays that of set_view"
    mapped.send_frame()
    mapped.until(lambda: mapped.mapper.status().frames.pending == 0)
    assert mapped.mapper._view[0][0, 3] == pytest.approx(0.03), "a new frame does not take the view away"
    assert mapped.call(SetView, "set_view", SetView.Request(follow=True)).success
    mapped.until(lambda: rendered[-1].width == 64 and rendered[-1].header.frame_id == "camera")


# ---- splats ----------------------------------------------------------------------------------------------------------------

def test_splats_as_clouds_only_when_someone_listens(mapped):
    mapped.spin(0.2)
    assert mapped.mapper.splats.get() is None, "nobody listens: nothing is copied"
    points = mapped.hear(PointCloud2, "points", LATCHED)
    mapped.until(lambda: points)
    splats = mapped.hear(PointCloud2, "splats", LATCHED)   # later than the other
    mapped.until(lambda: splats)
    assert tuple(f.name for f in splats[-1].fields) == SPLAT_NAMES and splats[-1].header.frame_id == "map" and splats[-1].point_step == 56
    rows = np.frombuffer(splats[-1].data, np.float32).reshape(-1, 14)
    assert len(rows) == splats[-1].width > 100 and np.median(rows[:, 2]) == pytest.approx(2.0, abs=0.1)
    assert np.allclose(np.linalg.norm(rows[:, 10:], axis=1), 1, atol=1e-5)
    raw = np.frombuffer(points[-1].data, np.uint8).reshape(-1, 16)
    assert [f.name for f in points[-1].fields] == ["x", "y", "z", "rgb"] and raw[:, 12:15].std() > 10 and not raw[:, 15].any()
    mapped.mapper.command("reset").result(10)
    mapped.until(lambda: splats[-1].width == 0 and points[-1].width == 0)


def test_a_view_that_takes_gigabytes_is_refused(mapped):
    huge = camera_info_msg(Camera(20000, 20000, 9000.0, 9000.0, 10000.0, 10000.0), header(0, ""))
    for kind, name in ((RenderView, "render_view"), (SetView, "set_view")):
        answer = mapped.call(kind, name, kind.Request(pose=pose(), camera=huge))
        assert not answer.success and "400,000,000 pixels, at most 8,388,608" in answer.message


def test_a_mesh_of_a_paused_map(mapped):
    mapped.call(SetBool, "pause", SetBool.Request(data=True))
    status, result = mapped.outcome(mapped.act(ExtractMesh, "extract_mesh", ExtractMesh.Goal(path="mesh.ply")))
    assert status == GoalStatus.STATUS_SUCCEEDED and result.triangles > 0, result.message
