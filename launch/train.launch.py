"""ros2 launch spirula_ros train.launch.py image:=/camera/color/image_raw camera_info:=/camera/color/camera_info \\
    depth:=/camera/aligned_depth_to_color/image_raw pose:=/odom pose_source:=odom

An argument that is left empty leaves the parameter to the config file, or to its default. `--show-args` lists them.
The other launch files are this one with some arguments set: replay (bag) and those of the sensors (SENSORS)."""
import os
import shutil
from pathlib import Path

import yaml
from ament_index_python.packages import PackageNotFoundError, get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, GroupAction, IncludeLaunchDescription, LogInfo, OpaqueFunction, SetEnvironmentVariable, Shutdown
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from spirula_ros.dds import fastdds_profile
from spirula_ros.share import config_file, share_directory


def flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("must be true or false")
    return text.lower() == "true"


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("must be a number") from None


def positive(text: str) -> float:
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise ValueError("must be a number above 0")


PARAMETERS = (  # argument, parameter, type, description
    ("cameras", "topics.cameras", str, "names of several cameras, 'front, rear': {camera} in the topics is replaced by each"),
    ("image", "topics.image", str, "colour image topic; CompressedImage when it ends in /compressed"),
    ("image_transport", "topics.image_transport", str, "raw | compressed: compressed appends /compressed to the image topic"),
    ("camera_info", "topics.camera_info", str, "CameraInfo topic of the colour image"),
    ("depth", "topics.depth", str, "depth image topic, registered to the colour image unless depth_info is given; without depth, points, sensor, config: from several views"),
    ("depth_info", "topics.depth_info", str, "CameraInfo topic of a depth image that is not registered to the colour image"),
    ("depth_mode", "intake.depth", str, "require | use_if_there | ignore"),
    ("points", "topics.points", str, "PointCloud2 topic of a lidar: depth comes from it"),
    ("mask", "topics.mask", str, "mask topic, mono8: pixels of the image that are 0 in it are not of the scene"),
    ("mask_mode", "intake.mask", str, "off | use_if_there | require; require when a mask is given"),
    ("pose", "topics.pose", str, "pose topic"),
    ("pose_source", "intake.pose_source", str, "pose (PoseStamped) | odom (Odometry) | tf | path (a nav_msgs/Path that grows)"),
    ("path", "topics.path", str, "nav_msgs/Path that a SLAM corrects (loop closure): the map moves with it"),
    ("map_frame", "intake.map_frame", str, "frame of the map, also rviz's fixed frame; needed with pose_source tf unless it is 'map'"),
    ("camera_frame", "intake.camera_frame", str, "optical frame of the camera, if the images do not name it"),
    ("time_offset", "intake.time_offset_s", number, "s added to the stamps of images before poses are looked up"),
    ("map_on_time_jump", "intake.map_on_time_jump", str, "keep | reset | new_session: what becomes of the map when stamps jump back (looped recording)"),
    ("backend", "engine.backend", str, "auto | cpu | cuda"),
    ("holdout_every", "eval.holdout_every", whole, "keep every n-th frame out of the map and measure with it"),
    ("checkpoint", "checkpoint.path", str, "save everything that training needs here, once a minute and when the node stops"),
    ("resume", "checkpoint.resume", flag, "true: go on from the checkpoint when it is there"),
    ("web", "web.enabled", flag, "true: serve the live viewer to browsers"),
    ("web_port", "web.port", whole, "port of the live viewer"),
    ("web_host", "web.host", str, "address of the live viewer; another one than loopback needs web_token"),
    ("web_token", "web.token", str, "token that browsers must know"),
    ("save_path", "output.map_path", str, "write the map here (.ply) when the node stops"),
    ("autostart", "lifecycle.autostart", flag, "false: wait for `ros2 lifecycle set` or a lifecycle manager"),
)
IMPLIED = (("points", "intake.depth_source", "points"), ("mask", "intake.mask", "require"))  # argument, parameter, value when the argument is given
OTHERS = (  # argument, default, type, description
    ("config", "", str, "parameter file, or the name of an installed one (realsense); `spirula params` prints one with every parameter"),
    ("sensor", "", str, "realsense | zed | oak | orbbec | isaac | lidar_camera: its installed configuration; config, then arguments, come on top"),
    ("driver", "false", flag, "true: start the driver of the sensor too"),
    ("driver_args", "", str, "more arguments for the driver's launch file: 'camera_model:=zed2i serial_number:=1234'"),
    ("respawn", "false", flag, "true: after a crash the node comes back and goes on from its checkpoint; needs checkpoint"),
    ("bag", "", str, "recording to play into the node: with `ros2 bag play --clock`, 5 s after the start, or, where rosbag2 is missing or cannot read it (ROS 1), with `spirula bag play`"),
    ("rate", "1.0", positive, "speed of the replay; needs bag"),
    ("loop", "false", flag, "true: play the recording again and again; needs bag"),
    ("use_sim_time", "", flag, "take the time from /clock; empty: true with bag, else false"),
    ("rviz", "false", flag, "true: start rviz2 with the installed layout"),
    ("foxglove", "false", flag, "true: start foxglove_bridge; the layout to import is foxglove/spirula.json"),
    ("foxglove_port", "8765", whole, "port of foxglove_bridge"),
    ("foxglove_host", "127.0.0.1", str, "address that foxglove_bridge listens on; 0.0.0.0: everybody on the network may look and call services"),
    ("namespace", "", str, "namespace of the node"),
    ("log_level", "info", str, "debug | info | warn | error"),
)
SENSORS = {  # sensor: package and launch file of its driver, with arguments (None: the user must say); config/<sensor>.yaml names the sources
    "realsense": ("realsense2_camera", "rs_launch.py", {"align_depth.enable": "true", "enable_sync": "true"}),
    "zed": ("zed_wrapper", "zed_camera.launch.py", {"camera_model": None}),
    "oak": ("depthai_ros_driver", "driver.launch.py", {"params_file": "{share}/config/rtabmap.yaml", "parent_frame": "oak_parent_frame"}),
    "orbbec": ("orbbec_camera", "gemini_330_series.launch.py", {"depth_registration": "true"}),
    "isaac": ("isaac_ros_visual_slam", "isaac_ros_visual_slam_realsense_rgbd.launch.py", {}),
    "lidar_camera": None,
}


def share_of(package: str, argument: str) -> Path:
    """The package's share folder. Raises RuntimeError with the remedy."""
    try:
        return Path(get_package_share_directory(package))
    except PackageNotFoundError:
        raise RuntimeError(f"{argument} needs the package {package}, which is not installed here: "
                           f"sudo apt install ros-$ROS_DISTRO-{package.replace('_', '-')}, or source the workspace that has it") from None


def read_arguments(context) -> dict:
    """{argument: value}; '' where none is given."""
    values = {}
    for name, kind in [(name, kind) for name, _, kind, _ in PARAMETERS + OTHERS]:
        text = LaunchConfiguration(name).perform(context)
        try:
            values[name] = kind(text) if text else ""
        except ValueError as e:
            raise RuntimeError(f"{name}:={text}: {e}") from None
    if values["sensor"] and values["sensor"] not in SENSORS:
        raise RuntimeError(f"sensor:={values['sensor']}: must be one of {', '.join(SENSORS)}")
    for name, default, kind, _ in OTHERS:
        if name in ("rate", "loop") and not values["bag"] and values[name] not in ("", kind(default)):
            raise RuntimeError(f"{name}:={values[name]} is of a recording: give bag:=FOLDER, or leave it out")
    return values


def parameters_of(value: dict) -> list:
    """Files and values for the node, the last one counts."""
    given = {parameter: value[name] for name, parameter, _, _ in PARAMETERS if value[name] != ""}
    for name, parameter, implied in IMPLIED:
        if value[name]:
            given.setdefault(parameter, implied)
    if not any(value[name] for name in ("depth", "points", "depth_mode", "config", "sensor")):
        given["intake.depth"] = "ignore"  # image and pose alone
    given["use_sim_time"] = bool(value["bag"]) if value["use_sim_time"] == "" else value["use_sim_time"]
    files = [str(config_file(name)) for name in (value["sensor"], value["config"]) if name]
    if value["respawn"]:
        if not (value["checkpoint"] or any(in_file(file, "checkpoint", "path") for file in files)):
            raise RuntimeError("respawn:=true needs a checkpoint to come back from: give checkpoint:=FILE")
        if given.setdefault("checkpoint.resume", True) is False:
            raise RuntimeError("respawn:=true goes on from the checkpoint: leave resume:=false out, or respawn")
    return [*files, given]


def in_file(file: str, group: str, leaf: str):
    """What a parameter file says, else None; the node says what is wrong with the file."""
    try:
        nodes = yaml.safe_load(Path(file).read_text())
        return next((node["ros__parameters"][group][leaf] for node in nodes.values() if leaf in node.get("ros__parameters", {}).get(group, {})), None)
    except (yaml.YAMLError, AttributeError, KeyError, TypeError, UnicodeDecodeError):
        return None


# ---- what is started -----------------------------------------------------------------------------------------------------

def mapping_node(value: dict, parameters: list) -> Node:
    def ended(event, context):
        crashed = event.returncode not in (0, 2)  # 0: stopped, 2: it could not start and would not the next time
        return None if value["respawn"] and crashed else Shutdown(reason="train_node ended")
    return Node(
        package="spirula_ros", executable="train_node", name="spirula", namespace=value["namespace"], output="screen", parameters=parameters,
        arguments=["--ros-args", "--log-level", f"spirula:={value['log_level']}"],
        sigterm_timeout="30", sigkill_timeout="30",  # a large map takes a while to save
        respawn=bool(value["respawn"]), respawn_delay=1.0, on_exit=ended)


def driver(value: dict) -> GroupAction:
    """The driver's own launch file, which sees none of our arguments (namespace, log_level, ..)."""
    if not value["sensor"]:
        raise RuntimeError("driver:=true: which one? Give sensor:= as well")
    if SENSORS[value["sensor"]] is None:
        raise RuntimeError(f"driver:=true: {value['sensor']} has no driver of one kind; start those of your devices yourself")
    package, file, arguments = SENSORS[value["sensor"]]
    share = share_of(package, "driver:=true")
    path = share / "launch" / file
    if not path.is_file():
        raise RuntimeError(f"driver:=true: {path} is not there: this {package} is of another version than we know; start its driver yourself and leave driver out")
    words = [word.partition(":=") for word in value["driver_args"].split()]
    if bad := [name for name, equals, _ in words if not equals]:
        raise RuntimeError(f"driver_args: '{bad[0]}' is not name:=value")
    arguments = {**{name: text and text.replace("{share}", str(share)) for name, text in arguments.items()}, **{name: text for name, _, text in words}}
    if lacking := [name for name, text in arguments.items() if text is None]:
        raise RuntimeError(f"driver:=true: {package} has to know its {lacking[0]}: give driver_args:='{lacking[0]}:=..'")
    return GroupAction([IncludeLaunchDescription(PythonLaunchDescriptionSource(str(path)), launch_arguments=arguments.items())], scoped=True, forwarding=False)


def player(value: dict) -> ExecuteProcess:
    bag = Path(value["bag"]).expanduser()
    if not bag.exists():
        raise RuntimeError(f"bag:={value['bag']}: no such recording (from {Path.cwd()}); give the folder with metadata.yaml in it")

    def ended(event, context):
        said = "has ended" if event.returncode == 0 else f"could not be played (exit code {event.returncode}, see above)"
        return None if context.is_shutdown else LogInfo(msg=f"the recording {said}; the node goes on: stop it with Ctrl-C")
    if has_rosbag2() and bag.suffix != ".bag" and (bag.is_file() or (bag / "metadata.yaml").is_file()):
        command = ["ros2", "bag", "play", str(bag), "--clock", "100", "--delay", "5"]  # for the node to load its engine and to be discovered
    else:  # our own reads ROS 1 recordings and folders without metadata.yaml too
        command = [str(share_directory().parents[1] / "lib" / "spirula_ros" / "spirula"), "bag", "play", str(bag), "--clock", "--wait", "60"]
    return ExecuteProcess(cmd=[*command, "--rate", str(value["rate"] or 1.0), *(["--loop"] if value["loop"] else [])], output="screen", on_exit=ended)


def has_rosbag2() -> bool:
    try:
        return bool(get_package_share_directory("ros2bag") and shutil.which("ros2"))
    except PackageNotFoundError:
        return False


def rviz(value: dict, parameters: list) -> Node:
    share_of("rviz2", "rviz:=true")
    layout = share_directory() / "rviz" / "spirula.rviz"
    displays = yaml.safe_load(layout.read_text())["Visualization Manager"]["Displays"]
    topics = [topic for display in displays if (topic := display.get("Topic", {}).get("Value", ""))]
    frame = value["map_frame"] or next((frame for file in parameters[-2::-1] if (frame := in_file(file, "intake", "map_frame"))), "")
    space = "/" + value["namespace"].strip("/")
    return Node(package="rviz2", executable="rviz2", name="rviz_spirula", output="log", parameters=[{"use_sim_time": parameters[-1]["use_sim_time"]}],
                arguments=["-d", str(layout), *(["-f", frame] if frame else [])],
                remappings=[(topic, space + topic) for topic in topics] if value["namespace"] else None)


def foxglove(value: dict, parameters: list) -> list:
    share_of("foxglove_bridge", "foxglove:=true")
    layout = share_directory() / "foxglove" / "spirula.json"
    renamed = f", with /{value['namespace'].strip('/')}/spirula/ in place of /spirula/" if value["namespace"] else ""
    return [Node(package="foxglove_bridge", executable="foxglove_bridge", name="foxglove_bridge", output="screen",
                 parameters=[{"port": value["foxglove_port"], "address": value["foxglove_host"], "use_sim_time": parameters[-1]["use_sim_time"]}]),
            LogInfo(msg=f"Foxglove: open ws://{value['foxglove_host']}:{value['foxglove_port']} and import the layout {layout}{renamed}")]


def start(context):
    """Everything is checked before anything is started."""
    value = read_arguments(context)
    parameters = parameters_of(value)
    return [mapping_node(value, parameters),
            *([driver(value)] if value["driver"] else []), *([player(value)] if value["bag"] else []),
            *([rviz(value, parameters)] if value["rviz"] else []), *(foxglove(value, parameters) if value["foxglove"] else [])]


def generate_launch_description():
    return LaunchDescription([
        *(DeclareLaunchArgument(name, default_value="", description=f"{text} [{parameter}]") for name, parameter, _, text in PARAMETERS),
        *(DeclareLaunchArgument(name, default_value=default, description=text) for name, default, _, text in OTHERS),
        *(SetEnvironmentVariable(name, value) for name, value in fastdds_profile(os.environ).items()),
        OpaqueFunction(function=start)])
