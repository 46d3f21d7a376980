"""Two processes and real DDS: a robot that publishes best effort at 15 Hz, and the installed train_node.

SPIRULA_DDS_SECONDS=60 makes it the long run, which also asks that the node's memory stays flat once the map does not grow."""
import itertools
import json
import os
import signal
import statistics
import time
from pathlib import Path

import conftest
import pytest

rclpy = conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
from rclpy.executors import SingleThreadedExecutor
from rclpy.parameter import Parameter
from rclpy.parameter_client import AsyncParameterClient
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from std_srvs.srv import Trigger

from robot import Robot
from spirula_ros.dds import fastdds_profile
from spirula_ros.msg import MapStatus
from spirula_ros.node_process import NodeProcess

os.environ.update(fastdds_profile(os.environ))  # Fast DDS reads it once, for the first participant of any test in this process
SECONDS, HZ = float(os.environ.get("SPIRULA_DDS_SECONDS", 12)), 15
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


def rss_mb(node: NodeProcess) -> float:
    node.check()
    return int(next(line for line in Path(f"/proc/{node.process.pid}/status").read_text().splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


@pytest.fixture
def context(ros_domain):
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=ros_domain)
    yield context
    rclpy.shutdown(context=context)


@pytest.fixture
def run(tmp_path, ros_domain, context, monkeypatch):
    """(train_node, the robot's node, its executor, the robot, the statuses heard)"""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(ros_domain))
    node = NodeProcess(tmp_path, {"output.map_path": str(tmp_path / "map.ply"), "publish.status_hz": 10.0, "train.steps_per_frame": 2})
    ros = rclpy.create_node("robot", context=context)
    executor = SingleThreadedExecutor(context=context)
    executor.add_node(ros)
    statuses = []
    ros.create_subscription(MapStatus, "spirula/status", statuses.append, LATCHED)
    yield node, ros, executor, Robot(ros), statuses
    node.stop(signal.SIGKILL)
    executor.shutdown()
    ros.destroy_node()


def spin_until(executor, condition, seconds, node):
    deadline = time.monotonic() + seconds
    while not condition():
        node.check()
        assert time.monotonic() < deadline, f"no answer within {seconds} s:\n{node.tail()}"
        executor.spin_once(timeout_sec=0.05)


def close_the_gate(ros) -> None:
    """No frame becomes a keyframe any more, so the map stops growing; frames go on arriving and the map goes on training."""
    client = AsyncParameterClient(ros, "spirula")
    assert client.services_are_ready()
    client.set_parameters([Parameter("gate.min_translation_m", value=100.0), Parameter("gate.min_rotation_deg", value=180.0),
                           Parameter("gate.max_interval_s", value=3600.0)])


def test_best_effort_frames_arrive_and_are_accounted_for(run, tmp_path):
    node, ros, executor, robot, statuses = run
    spin_until(executor, lambda: robot.connected() and statuses, 60, node)
    start, sent, memory, n = time.monotonic(), 0, [], round(SECONDS * HZ)
    while sent < n:
        robot.send(sent, time.time_ns())
        sent += 1
        if sent == n // 2 and SECONDS >= 60:
            close_the_gate(ros)
        if sent % HZ == 0:
            memory.append(rss_mb(node))
        while (left := start + sent / HZ - time.monotonic()) > 0:
            executor.spin_once(timeout_sec=left)
    spin_until(executor, lambda: statuses[-1].frames_in >= 0.99 * n and statuses[-1].frames_pending == 0, 30, node)
    last = statuses[-1]
    dropped = {c.key: c.count for c in last.dropped}
    print("dds", json.dumps({"seconds": SECONDS, "sent": n, "frames_in": last.frames_in, "used": last.frames_used, "dropped": dropped, "gaussians": last.gaussians,
                             "steps": last.steps, "latency_ms": round(last.latency_ms, 1), "rss_mb": [round(m) for m in memory]}))
    assert last.frames_in == last.frames_used + sum(dropped.values()), "every frame is used or dropped under a reason"
    assert last.frames_used > 0 and last.state == "running" and last.gaussians > 1000
    assert "internal error" not in last.last_error
    assert "internal_error" not in dropped
    if SECONDS >= 60:
        third, fourth = (statistics.median(memory[len(memory) * k // 4:len(memory) * (k + 1) // 4]) for k in (2, 3))
        assert fourth < 1.02 * third, f"memory grows: {third:.0f} MB in the third quarter, {fourth:.0f} MB in the fourth"
    assert node.stop() == 0 and (tmp_path / "map.ply").stat().st_size > 1000
    log = node.log.read_text()
    assert "Traceback" not in log and "map saved to" in log, log[-3000:]


def test_sigterm_ends_it_cleanly(tmp_path, ros_domain, monkeypatch):
    monkeypatch.setenv("ROS_DOMAIN_ID", str(ros_domain))
    node = NodeProcess(tmp_path, {})
    deadline = time.monotonic() + 60
    while "listening to" not in node.log.read_text():
        node.check()
        assert time.monotonic() < deadline, node.tail()
        time.sleep(0.1)
    assert node.stop(signal.SIGTERM) == 0 and "Traceback" not in node.log.read_text()


def test_sigterm_during_finish_ends_it_cleanly(tmp_path, ros_domain, context, monkeypatch):
    monkeypatch.setenv("ROS_DOMAIN_ID", str(ros_domain))
    node = NodeProcess(tmp_path, {"output.map_path": str(tmp_path / "map.ply"), "output.report_dir": str(tmp_path / "report"), "output.refine_steps": 10**9})
    ros, executor, statuses = rclpy.create_node("robot", context=context), SingleThreadedExecutor(context=context), []
    executor.add_node(ros)
    ros.create_subscription(MapStatus, "spirula/status", statuses.append, LATCHED)
    robot, finish = Robot(ros, 160, 120), ros.create_client(Trigger, "spirula/finish")
    spin_until(executor, lambda: robot.connected() and statuses and finish.service_is_ready(), 60, node)
    robot.send(0, time.time_ns())
    spin_until(executor, lambda: statuses[-1].frames_used == 1, 30, node)
    finish.call_async(Trigger.Request())
    steps = statuses[-1].steps
    spin_until(executor, lambda: statuses[-1].steps > steps + 20, 30, node)
    asked = time.monotonic()
    assert node.stop(signal.SIGTERM) == 0, "it had to be killed"
    assert time.monotonic() - asked < 20 and (tmp_path / "map.ply").stat().st_size > 1000
    assert "Traceback" not in node.log.read_text(), node.tail()
    executor.shutdown()
    ros.destroy_node()


def test_bad_parameters_are_one_sentence(tmp_path):
    node = NodeProcess(tmp_path, {"train.lr_mean": 5.0})
    assert node.process.wait(timeout=60) == 2
    assert "train.lr_mean" in node.log.read_text() and "Traceback" not in node.log.read_text()


def test_a_node_goes_on_from_its_checkpoint(tmp_path, ros_domain, context, monkeypatch, request):
    """Ended by SIGTERM, then by kill -9: the map, its frame and the counts are those of the last checkpoint."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(ros_domain))
    path = tmp_path / "map.ckpt"
    parameters = {"checkpoint.path": str(path), "checkpoint.resume": True, "checkpoint.period_s": 0.5, "publish.status_hz": 10.0}
    ros, executor, statuses = rclpy.create_node("robot", context=context), SingleThreadedExecutor(context=context), []
    executor.add_node(ros)
    ros.create_subscription(MapStatus, "spirula/status", statuses.append, LATCHED)
    robot, stamps, folder = Robot(ros, 160, 120), itertools.count(), iter(range(3))

    def started() -> NodeProcess:
        (home := tmp_path / str(next(folder))).mkdir()
        node = NodeProcess(home, parameters)
        request.addfinalizer(node.process.kill)  # nothing is left running when the test fails
        spin_until(executor, lambda: "listening to" in node.log.read_text(), 60, node)
        statuses.clear()  # those of the node before
        spin_until(executor, lambda: statuses, 60, node)
        return node

    def map_a_frame(node: NodeProcess) -> None:
        """Sent until one arrives (the last node's subscriptions may still seem to be there), and two checkpoints further."""
        used, times, sent_at = statuses[-1].frames_used, set(), 0.0

        def arrived():
            nonlocal sent_at
            if time.monotonic() > sent_at + 1:
                sent_at = time.monotonic()
                robot.send(next(stamps), time.time_ns())
            return statuses[-1].frames_used > used
        spin_until(executor, arrived, 60, node)

        def saved_twice():
            times.add(path.stat().st_mtime_ns if path.exists() else 0)
            return len(times) > 2 and statuses[-1].frames_pending == 0
        spin_until(executor, saved_twice, 30, node)

    seen = 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        node = started()
        assert statuses[-1].frames_in == seen and ("is not there yet" if seen == 0 else f"resumed {path}: ") in node.log.read_text()
        map_a_frame(node)
        seen, gaussians, frame = statuses[-1].frames_in, statuses[-1].gaussians, statuses[-1].header.frame_id
        assert node.stop(number) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        assert ("checkpoint saved to" in node.log.read_text()) == (number == signal.SIGTERM)
    node = started()
    assert statuses[-1].frames_in == seen >= 2 and statuses[-1].frames_pending == 0 and statuses[-1].header.frame_id == frame
    assert statuses[-1].gaussians > 0.8 * gaussians
    path.write_bytes(path.read_bytes()[:-1])
    assert node.stop(signal.SIGKILL) and NodeProcess(tmp_path, parameters).process.wait(60) == 2
    assert f"train_node: {path}: " in (tmp_path / "node.log").read_text() and "cut short" in (tmp_path / "node.log").read_text()
    executor.shutdown()
    ros.destroy_node()
