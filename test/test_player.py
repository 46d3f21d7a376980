"""`spirula replay --via-ros`: the command, the node it starts, and real topics between them."""
import json
import os
import subprocess
import sys
from pathlib import Path

import cv2
import pytest

pytest.importorskip("rclpy", reason="needs a ROS 2 Python (rclpy)")

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
    assert "Traceback" not in Path("out/node.log").read_text() + done.stderr


def test_a_node_that_fails_is_reported_with_its_log(room, ros_domain):
    done = replay(room, ros_domain, "--set", "engine.vram_budget_mb=1")
    assert done.returncode == 1 and "spirula: the mapper failed" in done.stderr and "engine.vram_budget_mb" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr.split("the mapper failed")[0], done.stderr


def test_bad_input_is_one_sentence(room, ros_domain):
    done = replay(room, ros_domain, "--image-topic", "/nothing")
    assert done.returncode == 2 and "/nothing" in done.stderr and "Traceback" not in done.stderr, done.stderr
