"""The launch files, run by launch itself in processes of their own."""
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spirula_ros import params
from spirula_ros.share import share_directory

HERE = Path(__file__).resolve().parent
TRAIN = share_directory() / "launch" / "train.launch.py"


@pytest.fixture
def environment(launch_env, ros_domain, tmp_path):
    return {**launch_env, "ROS_DOMAIN_ID": str(ros_domain), "ROS_LOG_DIR": str(tmp_path / "log"),
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [launch_env.get("PYTHONPATH")])])}


@pytest.mark.parametrize("file", ["train", "replay"])
def test_show_args(file, environment):
    done = subprocess.run([sys.executable, HERE / "launch_file.py", TRAIN.with_name(f"{file}.launch.py"), "--show-args"],
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    arguments = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert {"image", "camera_info", "depth", "points", "mask", "pose", "pose_source", "config", "use_sim_time"} <= set(arguments)
    known = {name for name, *_ in params.rows()}
    named = {found[1] for text in arguments.values() if (found := re.search(r"\[(\w+\.\w+)\]", text))}
    assert named and named <= known, "an argument sets a parameter that does not exist"


def test_train_launch_takes_frames_and_ends_cleanly(environment, tmp_path):
    done = subprocess.run([sys.executable, "-m", "launch_testing.launch_test", HERE / "launch_train.py"], env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-5000:]
    assert len(re.findall(r"Ran 1 test", done.stdout)) == 2, done.stdout[-5000:]


@pytest.mark.parametrize("arguments, topics", [
    (["points:=/velodyne_points", "mask:=/people", "path:=/slam/path"], ["/image", "/camera_info", "/people", "/slam/path", "/velodyne_points", "/pose"]),
    ([], ["/image", "/camera_info", "/pose"]),                                     # without depth:= image and pose are enough
    (["depth:=/depth_registered"], ["/image", "/camera_info", "/depth_registered", "/pose"])], ids=["points", "alone", "depth"])
def test_it_listens_to_what_is_given_and_ctrl_c_ends_launch_and_node(environment, tmp_path, arguments, topics):
    log = tmp_path / "launch.log"
    with log.open("w") as file:  # a session of its own: like a terminal, and unlike a shell's background job, it takes SIGINT
        process = subprocess.Popen([sys.executable, HERE / "launch_file.py", TRAIN, "backend:=cpu", *arguments], env=environment,
                                   stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while "listening to" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text()
    assert set(re.search(r"listening to (.*)", text)[1].split(", ")) - {"/tf", "/tf_static"} == set(topics)
    assert "process has finished cleanly" in text and "Traceback" not in text, text


def test_bad_argument_is_one_sentence(environment):
    done = subprocess.run([sys.executable, HERE / "launch_file.py", TRAIN, "pose_source:=gps"], env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)
    assert "pose_source" in done.stdout and "gps" in done.stdout and "Traceback" not in done.stdout, done.stdout


@pytest.mark.parametrize("argument, text", [("config:=nosuch", "nosuch: no such file, and no installed configuration of that name (default, realsense)"),
                                            ("resume:=maybe", "'maybe': must be true or false")])
def test_bad_arguments_end_the_launch(environment, argument, text):
    done = subprocess.run([sys.executable, HERE / "launch_file.py", TRAIN, argument], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=60)
    assert done.returncode != 0 and text in done.stdout and "listening to" not in done.stdout, done.stdout
