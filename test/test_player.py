"""`spirula replay --via-ros`: the command, the node it starts, and real topics between them."""
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import conftest
import pytest

rclpy = conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")

from spirula_ros import player
from spirula_ros.msg import MapStatus
from spirula_ros.node_process import NodeError
from spirula_ros.outputs import latched
from spirula_ros.synthetic import make_bag

FRAMES = 16


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    path = tmp_path_factory.mktemp("bag") / "room"
    make_bag(path, frames=FRAMES, size=(80, 60), fps=15.0)
    return path


def replay(bag, ros_domain, *options):
    return subprocess.run([Path(sys.executable).parent / "spirula", "replay", bag, "--via-ros", *options, "--out", "out", "--set", "train.steps_per_frame=4"],
                          env={**os.environ, "ROS_DOMAIN_ID": str(ros_domain)}, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("pace", [["--lossless"], ["--rate", "2"]])
def test_the_report_of_the_node(room, ros_domain, pace):
    done = replay(room, ros_domain, *pace, "--holdout", "8", "--refine-steps", "20")
    assert done.returncode == 0, done.stderr
    report = json.loads(Path("out/report.json").read_text())
    frames = report["frames"]
    assert frames["in"] == frames["used"] + sum(frames["dropped"].values()) == report["images_sent"] == FRAMES
    if pace == ["--lossless"]:
        assert "inbox_full" not in frames["dropped"] and len(report["heldout"]) == FRAMES // 8
        assert report["steps"] >= 4 * frames["used"] + 20
    assert report["heldout_psnr"] > 12 and report["gaussians"] > 500 and report["topics"] and report["mode"].startswith("via-ros")
    for held_out in report["heldout"]:
        assert cv2.imread(f"out/renders/{held_out['stamp_ns']}.png").shape == (60, 80, 3)
    assert all(Path("out", name).stat().st_size > 500 for name in ("map.ply", "mesh.ply", "compare.png"))
    page = Path("out/report.html").read_text()
    assert f"<h1>{report['bag']}</h1>" in page and report["mode"] in page and page.count("data:image/jpeg") == 1
    assert "Traceback" not in Path("out/node.log").read_text() + done.stderr


def test_a_node_that_does_not_start_is_reported_with_its_log(room, ros_domain):
    done = replay(room, ros_domain, "--set", "checkpoint.path=no/such/folder/map.ckpt")
    assert done.returncode != 0 and "train_node ended with exit code 2" in done.stderr and "no/such/folder" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr


def test_a_checkpoint_that_cannot_be_gone_on_with_starts_no_node(room, ros_domain):
    Path("broken.ckpt").write_bytes(b"not a checkpoint")
    done = replay(room, ros_domain, "--set", "checkpoint.path=broken.ckpt", "--set", "checkpoint.resume=true")
    assert done.returncode == 2 and "broken.ckpt: cut short" in done.stderr and "train_node" not in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_map_that_does_not_fit_the_budget_ends_empty_and_says_why(room, ros_domain):
    done = replay(room, ros_domain, "--set", "engine.vram_budget_mb=1")
    assert done.stdout.startswith("0 Gaussians (") and "raise engine.vram_budget_mb" in done.stdout and "16 used" in done.stdout, done.stdout + done.stderr


class Node:
    """What Link asks of a NodeProcess."""
    def check(self):
        pass

    def tail(self):
        return "  its last words"


class Silence:
    """What Link asks of Progress and StopRequest."""
    reason = ""

    def show(self, messages):
        pass


@pytest.fixture
def link(ros_domain, monkeypatch):
    """(a player's Link, publish(status) of a node that is played by the test)"""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(ros_domain))
    monkeypatch.setattr(player, "SILENCE_LIMIT_S", 1.0)
    context = rclpy.Context()
    rclpy.init(context=context, domain_id=ros_domain)
    node = rclpy.create_node("spirula", context=context)
    publisher = node.create_publisher(MapStatus, "spirula/status", latched(1))
    with player.Link(Node(), None, SimpleNamespace(chosen=dict), {"train.steps_per_frame": 4, "publish.status_hz": 10.0}) as link:
        publisher.publish(MapStatus(state="running", frames_in=1, frames_used=1, keyframes=1))
        link.until(lambda: link._status, "status", 10)
        yield link, publisher.publish
    node.destroy_node()
    rclpy.shutdown(context=context)


@pytest.mark.parametrize("state", ["paused", "stopped"])
def test_waiting_for_a_mapper_that_does_not_work_ends(link, state):
    link, publish = link
    publish(MapStatus(state=state, frames_in=1, frames_used=1, keyframes=1))
    with pytest.raises(NodeError, match=f"state is {state}"):
        link.wait_until_trained(Silence(), Silence())


def test_a_mapper_that_fails_ends_it_with_the_log(link):
    link, publish = link
    publish(MapStatus(state="error", frames_in=1, frames_used=1, keyframes=1, last_error="the device is gone"))
    with pytest.raises(NodeError, match="(?s)the mapper failed: the device is gone.*its last words"):
        link.wait_until_trained(Silence(), Silence())


def test_another_node_of_that_name_is_no_place_for_the_recording(link):
    link, _ = link
    twin = rclpy.create_node("spirula", context=link._context)
    try:
        link.until(lambda: link._ros.get_node_names().count("spirula") > 1, "the twin", 30)
        with pytest.raises(NodeError, match="2 nodes are called /spirula in this ROS domain: .*another ROS_DOMAIN_ID"):
            link.wait_until_connected()
    finally:
        twin.destroy_node()


def test_waiting_for_a_silent_node_ends(link):
    with pytest.raises(NodeError, match="(?s)no status from the node for 1 s.*its last words"):
        link[0].wait_until_trained(Silence(), Silence())
    with pytest.raises(NodeError, match="no status from the node"):
        link[0].finish(Silence())


def test_bad_input_is_one_sentence(room, ros_domain):
    done = replay(room, ros_domain, "--image-topic", "/nothing")
    assert done.returncode == 2 and "/nothing" in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("values, kinds", [
    ({}, {"image", "info", "pose", "depth"}),
    ({"intake.pose_source": "odom", "intake.depth": "ignore"}, {"image", "info", "odom", "tf", "tf_static"}),
    ({"topics.path": "/slam/path"}, {"image", "info", "pose", "depth", "path"}),
    ({"intake.depth_source": "points", "intake.mask": "require"}, {"image", "info", "pose", "points", "mask", "tf", "tf_static"}),
    ({"intake.pose_source": "tf", "intake.depth": "ignore", "intake.depth_source": "points"}, {"image", "info", "tf", "tf_static"})])
def test_only_what_the_node_hears_is_sent(values, kinds):
    """A publisher without a subscriber would be waited for in vain."""
    conftest.importorskip("tf2_msgs.msg", "make test")
    from spirula_ros import bags, inputs, params
    ros, config = params.split(values)
    sent = {kind for kind in bags.KINDS if kind != "compressed" and player.heard(kind, {**player.values_of(ros), **player.values_of(config)})}
    assert sent == kinds
    listened = {source.kind for source in inputs.inputs_of(ros)}
    assert sent == listened
