"""What happens to processes that the launch file started: a crash, two robots, another domain, Ctrl-C while the map is saved."""
import os
import signal
import re
import time
from contextlib import suppress

import pytest
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from launch_process import HERE, Launched
from robot import Robot
from spirula_gpu.ply import read_ply
from spirula_ros.dds import fastdds_profile
from spirula_ros.msg import MapStatus
from spirula_ros.share import share_directory
from spirula_ros.srv import SaveMap

TRAIN = share_directory() / "launch" / "train.launch.py"
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)
CONFIG = "/**: {ros__parameters: {train: {steps_per_frame: 2}, publish: {status_hz: 20.0}, watch: {silence_s: 0.5}, checkpoint: {period_s: 0.2}}}"
PID = r"train_node-1\]: process started with pid \[(\d+)"
NAMES = ["backend:=cpu", "config:=config.yaml", "image:=image", "camera_info:=camera_info", "depth:=depth", "pose:=pose"]


class Operator:
    """A robot in a namespace, and what the node there says."""

    def __init__(self, context, namespace: str, size=(160, 120)):
        self.node = rclpy.create_node("operator", namespace=namespace, context=context)
        self.robot, self.status, self._sent = Robot(self.node, *size), MapStatus(), 0
        self.node.create_subscription(MapStatus, "spirula/status", lambda msg: setattr(self, "status", msg), LATCHED)
        self.executor = SingleThreadedExecutor(context=context)
        self.executor.add_node(self.node)

    def spin(self, send: bool = True) -> None:
        if send and self.robot.connected():
            self.robot.send(self._sent, time.time_ns())
            self._sent += 1
        deadline = time.monotonic() + 0.05
        while time.monotonic() < deadline:
            self.executor.spin_once(timeout_sec=0.01)

    def until(self, condition, launched: Launched, seconds: float = 30.0, send: bool = True) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{self.status}\n{launched.text}"
            self.spin(send)


@pytest.fixture
def environment(launch_env, ros_domain, tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text(CONFIG)
    changes = {**fastdds_profile(os.environ), "ROS_LOG_DIR": str(tmp_path / "log")}
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    return {**launch_env, **changes, "ROS_DOMAIN_ID": str(ros_domain), "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [launch_env.get("PYTHONPATH")])])}


@pytest.fixture
def operator(environment, ros_domain):
    """Makes Operators, in the domain of the tests."""
    context = rclpy.context.Context()
    rclpy.init(context=context, domain_id=ros_domain)
    made = []
    yield lambda *arguments: made.append(Operator(context, *arguments)) or made[-1]
    for one in made:
        one.node.destroy_node()
        one.executor.shutdown()
    rclpy.shutdown(context=context)


def test_after_a_crash_the_node_comes_back_and_goes_on_from_its_checkpoint(environment, operator, tmp_path):
    user, checkpoint = operator("", (160, 120)), tmp_path / "map.spc"
    with Launched(TRAIN, [*NAMES, "respawn:=true", f"checkpoint:={checkpoint}"], environment, tmp_path / "launch.log") as launched:
        user.until(lambda: user.status.keyframes >= 5 and checkpoint.exists(), launched)
        os.kill(int(re.search(PID, launched.text)[1]), signal.SIGKILL)
        launched.until("resumed ", meanwhile=lambda: user.spin(send=False))
        said = re.search(r"resumed \S+: (\d+) Gaussians, (\d+) keyframes, (\d+) steps", launched.text)
        gaussians, keyframes, steps = map(int, said.groups())
        assert gaussians > 100 and keyframes >= 1 and steps >= 1
        user.until(lambda: user.status.keyframes > keyframes and user.status.steps > steps, launched)
        launched.interrupt()
        text = launched.end()
    assert text.count("process started") == 2 and "exit code -9" in text


def test_two_robots_in_two_namespaces_do_not_hear_each_other(environment, operator, tmp_path):
    with (Launched(TRAIN, [*NAMES, "namespace:=robot1"], environment, tmp_path / "1.log") as first,
          Launched(TRAIN, [*NAMES, "namespace:=robot2"], environment, tmp_path / "2.log") as second):
        one, two = operator("robot1"), operator("robot2")
        one.until(lambda: one.status.keyframes >= 3, first)
        two.until(lambda: two.status.state == "waiting" and "/robot2/image" in two.status.hint, second, send=False)
        assert (two.status.frames_in, two.status.gaussians) == (0, 0) and one.status.gaussians > 100
        two.until(lambda: two.status.keyframes >= 3, second)
        for launched in (first, second):
            launched.interrupt()
        assert "nodes are called" not in first.end() + second.end()


def test_in_another_domain_nothing_is_heard_and_the_node_says_so(environment, operator, tmp_path):
    other = int(environment["ROS_DOMAIN_ID"]) % 100 + 101
    user = operator("", (160, 120))
    with Launched(TRAIN, NAMES, {**environment, "ROS_DOMAIN_ID": str(other)}, tmp_path / "launch.log") as launched:
        launched.until(f"do the publishers have this node's ROS_DOMAIN_ID ({other})", meanwhile=lambda: user.spin())
        assert "/image [sensor_msgs/msg/Image]: NO PUBLISHER" in launched.text and user.status.state == ""
        launched.interrupt()
        launched.end()


def test_ctrl_c_while_the_map_is_saved_leaves_whole_files(environment, operator, tmp_path):
    """Ctrl-C again and again, as an impatient person does, from before the node has answered ~/save_map until it has gone."""
    user = operator("", (640, 480))
    asked, at_end = tmp_path / "asked.ply", tmp_path / "at_end.ply"
    with Launched(TRAIN, [*NAMES, f"save_path:={at_end}", f"checkpoint:={tmp_path / 'map.spc'}"], environment, tmp_path / "launch.log") as launched:
        user.until(lambda: user.status.gaussians > 10_000, launched)
        node = int(re.search(PID, launched.text)[1])
        client = user.node.create_client(SaveMap, "spirula/save_map")
        user.until(client.service_is_ready, launched, send=False)
        client.call_async(SaveMap.Request(path=str(asked)))
        started, n = time.monotonic(), 0
        launched.interrupt()
        while "process has " not in launched.text:
            assert time.monotonic() < started + 15, launched.text
            with suppress(ProcessLookupError):
                os.kill(node, signal.SIGINT)   # to the node alone: launch itself may hang when it gets dozens
            n += 1
            time.sleep(0.01)
        text = launched.end()
    assert n > 3 and "map saved to" in text and "process has finished cleanly" in text, text
    assert len(read_ply(at_end).means) > 10_000
    assert not asked.exists() or len(read_ply(asked).means) > 10_000
    assert {file.name for file in tmp_path.iterdir()} <= {"asked.ply", "at_end.ply", "map.spc", "config.yaml", "launch.log", "log"}, "a half-written file is left"
