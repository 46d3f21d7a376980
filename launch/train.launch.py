"""ros2 launch spirula_ros train.launch.py image:=/camera/color/image_raw camera_info:=/camera/color/camera_info \\
    depth:=/camera/aligned_depth_to_color/image_raw pose:=/odom pose_source:=odom

An argument that is left empty leaves the parameter to the config file, or to its default. `--show-args` lists them."""
import os

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, OpaqueFunction, SetEnvironmentVariable, Shutdown
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from spirula_ros.dds import fastdds_profile
from spirula_ros.share import config_file


def flag(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise RuntimeError(f"'{text}': must be true or false")
    return text.lower() == "true"


PARAMETERS = (  # argument, parameter, type, description
    ("image", "topics.image", str, "colour image topic; CompressedImage when it ends in /compressed"),
    ("image_transport", "topics.image_transport", str, "raw | compressed: compressed appends /compressed to the image topic"),
    ("camera_info", "topics.camera_info", str, "CameraInfo topic of the colour image"),
    ("depth", "topics.depth", str, "depth image topic, registered to the colour image; without depth, points and config, depth comes from several views"),
    ("depth_mode", "intake.depth", str, "require | use_if_there | ignore"),
    ("points", "topics.points", str, "PointCloud2 topic of a lidar: depth comes from it"),
    ("mask", "topics.mask", str, "mask topic, mono8: pixels of the image that are 0 in it are not of the scene"),
    ("mask_mode", "intake.mask", str, "off | use_if_there | require; require when a mask is given"),
    ("pose", "topics.pose", str, "pose topic"),
    ("pose_source", "intake.pose_source", str, "pose (PoseStamped) | odom (Odometry) | tf"),
    ("path", "topics.path", str, "nav_msgs/Path that a SLAM corrects (loop closure): the map moves with it"),
    ("map_frame", "intake.map_frame", str, "frame of the map; needed with pose_source tf unless it is 'map'"),
    ("camera_frame", "intake.camera_frame", str, "optical frame of the camera, if the images do not name it"),
    ("backend", "engine.backend", str, "auto | cpu | cuda"),
    ("holdout_every", "eval.holdout_every", int, "keep every n-th frame out of the map and measure with it"),
    ("checkpoint", "checkpoint.path", str, "save everything that training needs here, once a minute and when the node stops"),
    ("resume", "checkpoint.resume", flag, "true: go on from the checkpoint when it is there"),
    ("web", "web.enabled", flag, "true: serve the live viewer to browsers"),
    ("web_port", "web.port", int, "port of the live viewer"),
    ("web_host", "web.host", str, "address of the live viewer; another one than loopback needs web_token"),
    ("web_token", "web.token", str, "token that browsers must know"),
    ("save_path", "output.map_path", str, "write the map here (.ply) when the node stops"),
)
IMPLIED = (("points", "intake.depth_source", "points"), ("mask", "intake.mask", "require"))  # argument, parameter, value when the argument is given
OTHERS = (
    ("config", "", "parameter file, or the name of an installed one (realsense); `spirula params` prints one with every parameter"),
    ("use_sim_time", "false", "take the time from /clock"),
    ("namespace", "", "namespace of the node"),
    ("log_level", "info", "debug | info | warn | error"),
)


def train_node(context):
    value = {name: LaunchConfiguration(name).perform(context) for name, *_ in PARAMETERS + OTHERS}
    given = {parameter: kind(value[name]) for name, parameter, kind, _ in PARAMETERS if value[name]}
    for name, parameter, implied in IMPLIED:
        if value[name]:
            given.setdefault(parameter, implied)
    if not any(value[name] for name in ("depth", "points", "depth_mode", "config")):
        given["intake.depth"] = "ignore"  # image and pose alone
    config = value["config"] and str(config_file(value["config"]))
    given["use_sim_time"] = flag(value["use_sim_time"])
    return [Node(
        package="spirula_ros", executable="train_node", name="spirula", namespace=value["namespace"], output="screen",
        parameters=[*([config] if config else []), given],
        arguments=["--ros-args", "--log-level", f"spirula:={value['log_level']}"],
        sigterm_timeout="30", sigkill_timeout="30",  # a large map takes a while to save
        on_exit=Shutdown(reason="train_node ended"))]


def generate_launch_description():
    return LaunchDescription([
        *(DeclareLaunchArgument(name, default_value="", description=f"{text} [{parameter}]") for name, parameter, _, text in PARAMETERS),
        *(DeclareLaunchArgument(name, default_value=default, description=text) for name, default, text in OTHERS),
        *(SetEnvironmentVariable(name, value) for name, value in fastdds_profile(os.environ).items()),
        OpaqueFunction(function=train_node)])
