"""The launch files, run by launch itself in processes of their own."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch_process import Launched
from spirula_ros import params, settings
from spirula_ros.inputs import inputs_of
from spirula_ros.share import share_directory
from spirula_ros.synthetic import make_bag

HERE = Path(__file__).resolve().parent
TRAIN = share_directory() / "launch" / "train.launch.py"
FILES = sorted(file.name.removesuffix(".launch.py") for file in TRAIN.parent.glob("*.launch.py"))
SENSORS = sorted(set(FILES) - {"train", "replay"})


@pytest.fixture
def environment(launch_env, ros_domain, tmp_path):
    return {**launch_env, "ROS_DOMAIN_ID": str(ros_domain), "ROS_LOG_DIR": str(tmp_path / "log"),
            "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [launch_env.get("PYTHONPATH")])])}


def test_every_argument_and_sensor_is_documented(environment):
    section = (HERE.parent / "docs" / "ros.md").read_text().split("## Launch files")[1]
    arguments = [line.split(":")[0] for line in launch_file("train", "--show-args", **environment).stdout.splitlines()]
    assert len(arguments) > 30 and [name for name in arguments + SENSORS if f"`{name}`" not in section] == []


def launch_file(name: str, *words: str, **changes: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, HERE / "launch_file.py", TRAIN.with_name(f"{name}.launch.py"), *words], env=changes,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)


def installed(folder: Path, *packages: str) -> Path:
    """An ament prefix in which the packages are installed: their executable, and the command ros2, write their arguments to the folder `called`."""
    called = folder / "called"
    called.mkdir()
    for package in packages:
        for name in ("share/ament_index/resource_index/packages", f"share/{package}", f"lib/{package}"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "share/ament_index/resource_index/packages" / package).write_text("")
    for file in [folder / "lib" / package / package for package in packages] + [folder / "ros2"]:
        file.write_text(f'#!/bin/sh\necho "$@" > {called}/{file.name}.tmp; mv {called}/{file.name}.tmp {called}/{file.name}\n')
        file.chmod(0o755)
    return folder


@pytest.mark.parametrize("file", FILES)
def test_show_args(file, environment):
    done = launch_file(file, "--show-args", **environment)
    assert done.returncode == 0, done.stdout
    arguments = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert all(re.match(r"\w.{8,} \(default: ", text) for text in arguments.values()), "an argument without description"
    assert {"bag", "rate", "loop", "rviz", "foxglove", "respawn", "driver", "sensor", "autostart"} <= set(arguments)
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
    with Launched(TRAIN, ["backend:=cpu", *arguments], environment, tmp_path / "launch.log") as launched:
        launched.until("listening to")
        launched.interrupt()
        text = launched.end()
    assert set(re.search(r"listening to (.*)", text)[1].split(", ")) - {"/tf", "/tf_static"} == set(topics)
    assert "process has finished cleanly" in text, text


@pytest.mark.parametrize("sensor", SENSORS)
def test_a_sensor_has_a_valid_configuration_and_its_topics_are_listened_to(sensor, environment, tmp_path):
    ros, _ = params.split(settings.read_file(sensor))   # raises ValueError on a name or a value that there is not
    topics = {source.topic for source in inputs_of(ros)} - {"/tf", "/tf_static"}
    with Launched(TRAIN.with_name(f"{sensor}.launch.py"), ["backend:=cpu"], environment, tmp_path / "launch.log") as launched:
        launched.until("listening to")
        launched.interrupt()
        heard = re.search(r"listening to (.*)", launched.end())[1].split(", ")
    assert {topic if topic.startswith("/") else f"/{topic}" for topic in topics} == set(heard) - {"/tf", "/tf_static"}
    assert ros.topics.image.startswith("/") and (ros.intake.pose_source == "odom") == bool(ros.intake.map_frame)


@pytest.mark.parametrize("sensor", SENSORS)
def test_a_sensor_names_its_sources_and_says_what_was_not_tried(sensor):
    text = (share_directory() / "config" / f"{sensor}.yaml").read_text()
    assert re.search(r"Sources: [\w-]+/[\w-]+, \w+", text) and "not tried with" in text


def test_a_bag_rviz_and_foxglove_in_a_namespace(environment, tmp_path):
    """Their commands; what stands in for them writes them down."""
    prefix = installed(tmp_path, "rviz2", "foxglove_bridge", "ros2bag")
    bag, called = tmp_path / "walk", tmp_path / "called"
    bag.mkdir()
    (bag / "metadata.yaml").write_text("")
    changed = {**environment, "AMENT_PREFIX_PATH": f"{prefix}:{environment['AMENT_PREFIX_PATH']}", "PATH": f"{prefix}:{environment['PATH']}"}
    arguments = ["backend:=cpu", f"bag:={bag}", "rate:=0.5", "loop:=true", "rviz:=true", "foxglove:=true", "foxglove_port:=9000", "namespace:=robot1", "map_frame:=odom"]
    with Launched(TRAIN, arguments, changed, tmp_path / "launch.log") as launched:
        launched.until("listening to")
        launched.until("process has finished cleanly", times=3)
        launched.interrupt()
        text = launched.end()
    said = {file.name: file.read_text() for file in called.iterdir()}
    assert said["ros2"].split() == ["bag", "play", str(bag), "--clock", "100", "--delay", "5", "--rate", "0.5", "--loop"]
    assert said["rviz2"].startswith(f"-d {share_directory() / 'rviz' / 'spirula.rviz'} -f odom ")
    for topic in ("mesh", "points", "path", "render/image", "render/depth"):
        assert f"-r /spirula/{topic}:=/robot1/spirula/{topic} " in said["rviz2"].strip() + " "
    parameters = [Path(name).read_text() for name in re.findall(r"--params-file (\S+)", said["foxglove_bridge"] + said["rviz2"])]
    assert "port: 9000" in parameters[0] and "address: 127.0.0.1" in parameters[0] and all("use_sim_time: true" in text for text in parameters)
    assert "the recording has ended; the node goes on" in text and "ws://127.0.0.1:9000" in text and "/robot1/spirula/ in place of /spirula/" in text and "/robot1/image" in text


def test_bad_argument_is_one_sentence(environment):
    done = launch_file("train", "pose_source:=gps", **environment)
    assert "pose_source" in done.stdout and "gps" in done.stdout and "Traceback" not in done.stdout, done.stdout


BAD = {  # arguments -> what is said
    "config:=nosuch": "nosuch: no such file, and no installed configuration of that name (default, isaac, lidar_camera, oak, orbbec, realsense, zed)",
    "resume:=maybe": "resume:=maybe: must be true or false",
    "web_port:=http": "web_port:=http: must be a whole number",
    "bag:=. rate:=-1": "rate:=-1: must be a number above 0",
    "rate:=2": "rate:=2.0 is of a recording: give bag:=FOLDER",
    "bag:=walk": "bag:=walk: no such recording",
    "time_offset:=soon": "time_offset:=soon: must be a number",
    "respawn:=true": "needs a checkpoint to come back from: give checkpoint:=FILE",
    "respawn:=true checkpoint:=c resume:=false": "leave resume:=false out",
    "sensor:=lidar": "must be one of realsense, zed, oak, orbbec, isaac, lidar_camera",
    "driver:=true": "which one? Give sensor:= as well",
    "sensor:=lidar_camera driver:=true": "start those of your devices yourself",
    "sensor:=zed driver:=true": "needs the package zed_wrapper, which is not installed here: sudo apt install ros-$ROS_DISTRO-zed-wrapper",
    "rviz:=true": "needs the package rviz2",
    "foxglove:=true": "sudo apt install ros-$ROS_DISTRO-foxglove-bridge",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_arguments_end_the_launch_before_anything_starts(environment, arguments):
    done = launch_file("train", *arguments.split(), **environment)
    assert done.returncode != 0 and BAD[arguments] in done.stdout, done.stdout
    assert "process started" not in done.stdout and "\nTraceback" not in done.stdout
    assert len(re.findall("Caught exception in launch", done.stdout)) == 1 and len(done.stdout.splitlines()) == 3, done.stdout


def test_a_recording_is_played_without_rosbag2_on_its_own_clock(environment, tmp_path):
    """The main job by launch file: a recording in, a map out; every frame counted."""
    make_bag(str(tmp_path / "room"), frames=12, size=(64, 48), fps=6.0)
    arguments = [f"bag:={tmp_path / 'room'}", "backend:=cpu", "image:=/camera/color/image_raw", "camera_info:=/camera/color/camera_info", "depth:=/camera/depth/image_raw",
                 "pose:=/camera/pose", f"save_path:={tmp_path / 'map.ply'}"]
    with Launched(TRAIN.with_name("replay.launch.py"), arguments, environment, tmp_path / "launch.log") as launched:
        launched.until("the recording has ended")
        launched.interrupt()
        text = launched.end()
    assert "played" in text and (tmp_path / "map.ply").stat().st_size > 10_000 and "Traceback" not in text, text


DRIVER = """from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, LogInfo
from launch.substitutions import LaunchConfiguration


def generate_launch_description():
    return LaunchDescription([DeclareLaunchArgument("log_level", default_value="none"), DeclareLaunchArgument("serial_no", default_value="any"),
                              DeclareLaunchArgument("align_depth.enable", default_value="false"),
                              LogInfo(msg=["driver: ", LaunchConfiguration("align_depth.enable"), " ", LaunchConfiguration("serial_no"), " ", LaunchConfiguration("log_level")])])
"""


def test_the_driver_gets_its_arguments_and_none_of_ours(environment, tmp_path):
    prefix = installed(tmp_path, "realsense2_camera", "zed_wrapper")
    changed = {**environment, "AMENT_PREFIX_PATH": f"{prefix}:{environment['AMENT_PREFIX_PATH']}"}
    for package, name in (("realsense2_camera", "rs_launch.py"), ("zed_wrapper", "zed_camera.launch.py")):
        (prefix / "share" / package / "launch").mkdir()
        (prefix / "share" / package / "launch" / name).write_text(DRIVER)
    with Launched(TRAIN.with_name("realsense.launch.py"), ["backend:=cpu", "driver:=true", "driver_args:=serial_no:=_12", "log_level:=warn"], changed, tmp_path / "launch.log") as launched:
        launched.until("driver: true _12 none")
        launched.interrupt()
    done = launch_file("zed", "driver:=true", **changed)
    assert done.returncode != 0 and "zed_wrapper has to know its camera_model: give driver_args:='camera_model:=..'" in done.stdout
    (prefix / "share/zed_wrapper/launch/zed_camera.launch.py").unlink()
    done = launch_file("zed", "driver:=true", **changed)
    assert done.returncode != 0 and "zed_camera.launch.py is not there" in done.stdout


def test_autostart_false_waits_to_be_configured(environment, tmp_path):
    with Launched(TRAIN, ["backend:=cpu", "autostart:=false"], environment, tmp_path / "launch.log") as launched:
        launched.until("unconfigured, as lifecycle.autostart is false: ros2 lifecycle set /spirula configure")
        launched.interrupt()
        assert "listening to" not in launched.end()


def test_respawn_does_not_repeat_what_cannot_start(environment, tmp_path):
    (tmp_path / "own.yaml").write_text("/**: {ros__parameters: {checkpoint: {path: c.spc}}}")   # the checkpoint may stand in the file as well
    done = launch_file("train", "backend:=cpu", "respawn:=true", "config:=own.yaml", "pose_source:=gps", **environment)
    assert done.stdout.count("process started") == 1 and "gps" in done.stdout, done.stdout


def test_rviz_takes_the_map_frame_of_the_sensor(environment, tmp_path):
    prefix = installed(tmp_path, "rviz2")
    changed = {**environment, "AMENT_PREFIX_PATH": f"{prefix}:{environment['AMENT_PREFIX_PATH']}"}
    with Launched(TRAIN.with_name("lidar_camera.launch.py"), ["backend:=cpu", "rviz:=true"], changed, tmp_path / "launch.log") as launched:
        launched.until("process has finished cleanly")
        launched.until("listening to")
        launched.interrupt()
        launched.end()
    said = (tmp_path / "called" / "rviz2").read_text()
    assert " -f odom_lidar " in said and "/spirula/mesh:=" not in said
