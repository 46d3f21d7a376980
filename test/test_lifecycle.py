"""The transitions of the node, with real services, and with the real engine where memory is freed."""
import os
import time

import conftest
import numpy as np
import pytest

rclpy = conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
conftest.importorskip("spirula_ros.msg", "build the messages: make develop")
from action_msgs.msg import GoalStatus
from lifecycle_msgs.msg import State, Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rclpy.parameter import Parameter
from std_srvs.srv import SetBool

from fake_mapper import FakeMapper
from node_rig import LATCHED, Rig
from spirula_gpu.mapper import Mapper
from spirula_gpu.native import NativeError
from spirula_ros.action import ExtractMesh, Refine
from spirula_ros.msg import MapStatus
from spirula_ros.srv import SaveMap

SMALL = {"engine.backend": "cpu", "engine.threads": 1, "gate.min_translation_m": 0.0, "gate.min_rotation_deg": 0.0, "gate.min_sharpness": 0.0}


pytestmark = pytest.mark.usefixtures("ros")


@pytest.fixture
def make_rig():
    rigs = []

    def make(*args, **parameters):
        rigs.append(Rig(*args, **parameters))
        return rigs[-1]
    yield make
    for rig in rigs:
        rig.close()


def change(rig, transition: int) -> bool:
    return rig.call(ChangeState, "change_state", ChangeState.Request(transition=Transition(id=transition)), 20).success


def state(rig) -> int:
    return rig.call(GetState, "get_state", GetState.Request()).current_state.id


def heard(rig) -> list[str]:
    return sorted(s.topic_name for s in rig.node.subscriptions if s.topic_name.rsplit("/", 1)[1] in ("image", "depth", "camera_info", "pose"))


def frames_until(rig, condition) -> None:
    """Best effort may lose one."""
    for _ in range(50):
        rig.send_frame()
        rig.spin(0.2)
        if condition():
            return
    raise AssertionError("no frame became a keyframe in 50")


def test_autostart_is_active_at_once(make_rig):
    rig = make_rig()
    assert state(rig) == State.PRIMARY_STATE_ACTIVE and len(heard(rig)) == 4 and rig.mapper.started


def test_the_whole_walk_keeps_the_map_from_deactivate_to_cleanup(make_rig, tmp_path):
    rig = make_rig(Mapper, **SMALL, **{"lifecycle.autostart": False, "output.map_path": str(tmp_path / "map.ply")})
    assert state(rig) == State.PRIMARY_STATE_UNCONFIGURED and rig.node.session is None and not heard(rig)
    assert change(rig, Transition.TRANSITION_CONFIGURE) and state(rig) == State.PRIMARY_STATE_INACTIVE
    assert not heard(rig), "an inactive node listens to nothing"
    assert change(rig, Transition.TRANSITION_ACTIVATE) and len(heard(rig)) == 4
    rig.connected()
    mapper = rig.node.session.mapper
    frames_until(rig, lambda: mapper.status().keyframes >= 1)

    assert change(rig, Transition.TRANSITION_DEACTIVATE) and state(rig) == State.PRIMARY_STATE_INACTIVE and not heard(rig)
    rig.until(lambda: mapper.status().state == "paused")
    gaussians, steps, status = mapper.status().gaussians, mapper.status().steps, rig.hear(MapStatus, "status", LATCHED)
    rig.until(lambda: len(status) > 3)   # outputs go on
    assert status[-1].state == "paused" and mapper.status().steps == steps and gaussians > 0
    assert change(rig, Transition.TRANSITION_ACTIVATE)
    rig.connected()
    keyframes = mapper.status().keyframes
    frames_until(rig, lambda: mapper.status().keyframes > keyframes)
    assert mapper.status().state == "running" and mapper.status().gaussians >= gaussians

    assert change(rig, Transition.TRANSITION_DEACTIVATE) and change(rig, Transition.TRANSITION_CLEANUP)
    assert state(rig) == State.PRIMARY_STATE_UNCONFIGURED and rig.node.session is None
    assert os.path.getsize(tmp_path / "map.ply") > 1000
    assert not [p.topic_name for p in rig.node.publishers if "/spirula/" in p.topic_name and "transition_event" not in p.topic_name]
    with pytest.raises(NativeError):   # the engine is closed: its memory is free
        mapper._engine.vram()
    assert change(rig, Transition.TRANSITION_CONFIGURE) and change(rig, Transition.TRANSITION_ACTIVATE), "and it begins again"
    assert rig.node.session.mapper.status().gaussians == 0 and len(heard(rig)) == 4


def test_one_who_paused_finds_it_paused_after_activation(make_rig):
    rig = make_rig(Mapper, **SMALL)
    rig.mapper.command("pause", True).result(5)
    assert change(rig, Transition.TRANSITION_DEACTIVATE) and change(rig, Transition.TRANSITION_ACTIVATE)
    assert rig.mapper.status().state == "paused"


def test_start_only_parameters_may_be_set_until_it_is_configured(make_rig):
    rig = make_rig(**{"lifecycle.autostart": False})
    assert not rig.node.describe_parameter("engine.sh_degree").read_only
    assert rig.node.set_parameters([Parameter("engine.sh_degree", value=1)])[0].successful
    assert "must be" in rig.node.set_parameters([Parameter("intake.pose_source", value="gps")])[0].reason
    assert change(rig, Transition.TRANSITION_CONFIGURE) and rig.node.session.config.engine.sh_degree == 1
    refused = rig.node.set_parameters([Parameter("engine.sh_degree", value=2)])[0]
    assert not refused.successful and "engine.sh_degree is read when the node is configured" in refused.reason and "cleanup" in refused.reason
    assert rig.node.set_parameters([Parameter("publish.render_hz", value=3.0)])[0].successful
    assert rig.node.session.ros.publish.render_hz == 3.0


def test_with_autostart_they_are_read_only(make_rig):
    rig = make_rig()
    assert rig.node.describe_parameter("engine.sh_degree").read_only and not rig.node.describe_parameter("publish.render_hz").read_only


def test_a_transition_that_fails_leaves_the_state_before_and_can_be_tried_again(make_rig, tmp_path):
    rig = make_rig(**{"lifecycle.autostart": False, "output.map_path": str(tmp_path / "not" / "there.ply")})
    assert not change(rig, Transition.TRANSITION_CONFIGURE) and state(rig) == State.PRIMARY_STATE_UNCONFIGURED
    assert "output.map_path" in str(rig.node._why)
    (tmp_path / "not").mkdir()
    assert change(rig, Transition.TRANSITION_CONFIGURE)
    assert rig.node.set_parameters([Parameter("qos.sensor_queue", value=5)])[0].successful is False


def test_what_was_begun_is_undone_when_configuring_fails(monkeypatch, make_rig):
    def broken(*_):
        raise ValueError("no viewer")
    monkeypatch.setattr("spirula_ros.session.Session._open_viewer", broken)
    rig = make_rig(**{"lifecycle.autostart": False, "web.enabled": True})
    publishers = len(list(rig.node.publishers))
    assert not change(rig, Transition.TRANSITION_CONFIGURE)
    assert len(list(rig.node.publishers)) == publishers and rig.node.session is None
    monkeypatch.undo()
    assert "no viewer" in str(rig.node._why)


def test_shutdown_ends_the_process_and_saves(make_rig):
    rig = make_rig(**{"output.map_path": "map.ply"})
    rig.connected().send_frame()
    rig.until(lambda: rig.mapper.frames)
    assert change(rig, Transition.TRANSITION_ACTIVE_SHUTDOWN)
    assert rig.node.ended and os.path.exists("map.ply") and rig.mapper.stopped


def test_a_bad_start_raises_from_the_constructor():
    with pytest.raises(ValueError, match="output.map_path"):
        Rig(FakeMapper, **{"output.map_path": "not/there/map.ply"})


@pytest.mark.parametrize("kind, goal, name", [(Refine, Refine.Goal(seconds=600.0), "refine"), (ExtractMesh, ExtractMesh.Goal(path="mesh.ply", voxel_m=0.05), "extract_mesh")])
def test_cleanup_ends_what_an_action_was_doing(make_rig, kind, goal, name, monkeypatch):
    """The client gets its answer, or the server is gone; the executor, which raises what a task raises, goes on."""
    rig = make_rig(Mapper, **SMALL, **{"mesh.voxel_m": 0.1})
    rig.connected()
    mapper = rig.node.session.mapper
    frames_until(rig, lambda: mapper.status().keyframes >= 2)
    fuse = mapper._output._fuse
    monkeypatch.setattr(mapper._output, "_fuse", lambda *args: (time.sleep(0.5), fuse(*args)))
    handle = rig.act(kind, name, goal)
    assert handle.accepted
    began = time.monotonic()
    assert change(rig, Transition.TRANSITION_DEACTIVATE) and change(rig, Transition.TRANSITION_CLEANUP)
    rig.spin(1.0)
    assert time.monotonic() - began < 6 and not os.path.exists("mesh.ply") and state(rig) == State.PRIMARY_STATE_UNCONFIGURED
    assert change(rig, Transition.TRANSITION_CONFIGURE) and change(rig, Transition.TRANSITION_ACTIVATE)
    assert rig.act(Refine, "refine", Refine.Goal(steps=1)).accepted, "the next session has its own"


def test_deactivate_aborts_an_action_and_its_client_hears_why(make_rig):
    rig = make_rig(Mapper, **SMALL)
    rig.connected()
    frames_until(rig, lambda: rig.node.session.mapper.status().keyframes >= 2)
    handle = rig.act(Refine, "refine", Refine.Goal(seconds=600.0))
    asked = handle.get_result_async()
    rig.spin(0.3)
    assert change(rig, Transition.TRANSITION_DEACTIVATE)
    rig.until(asked.done, 10)
    assert asked.result().status == GoalStatus.STATUS_ABORTED and "the node was deactivated" in asked.result().result.message
    answer = rig.call(SetBool, "pause", SetBool.Request(data=False))
    assert not answer.success and "inactive" in answer.message and "activate" in answer.message


def test_cleanup_waits_for_services_that_still_have_to_answer(make_rig):
    rig = make_rig()
    rig.connected().send_frame()
    rig.until(lambda: rig.mapper.frames)
    rig.mapper.busy_s = 1.0
    client = rig.robot.create_client(SaveMap, "spirula/save_map")
    rig.until(client.service_is_ready)
    future = client.call_async(SaveMap.Request(path="map.ply"))
    rig.until(lambda: rig.session.services.answering == 1)
    assert change(rig, Transition.TRANSITION_DEACTIVATE) and not change(rig, Transition.TRANSITION_CLEANUP)
    assert "1 service call(s)" in str(rig.node._why)
    rig.until(future.done)
    assert future.result().success and change(rig, Transition.TRANSITION_CLEANUP)


def test_a_failed_activation_leaves_no_subscription(make_rig):
    rig = make_rig(**{"lifecycle.autostart": False})
    topic = f"{rig.namespace}/depth"
    assert change(rig, Transition.TRANSITION_CONFIGURE)
    rig.node.declare_parameter(f"qos_overrides.{topic}.subscription.reliability", "perhaps")
    assert not change(rig, Transition.TRANSITION_ACTIVATE) and state(rig) == State.PRIMARY_STATE_INACTIVE and not heard(rig), rig.node._why


def test_a_view_survives_a_reset(make_rig):
    rig = make_rig(Mapper, **SMALL)
    rig.session.show(np.eye(4), None)
    rig.mapper.command("reset").result(10)
    assert (rig.mapper._view[0] == np.eye(4)).all()
