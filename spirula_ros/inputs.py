"""The topics that the node listens to, by kind of the Intake's input."""
from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Callable

from geometry_msgs.msg import PoseStamped, PoseWithCovarianceStamped, TransformStamped
from nav_msgs.msg import Odometry, Path
from rclpy.exceptions import InvalidParameterTypeException
from rclpy.qos import DurabilityPolicy, QoSPolicyKind, QoSProfile, ReliabilityPolicy
from rclpy.qos_overriding_options import InvalidQosOverridesError, QoSOverridingOptions
from sensor_msgs.msg import CameraInfo, CompressedImage, Image, PointCloud2

from .cdr import READERS
from .params import RosConfig
from .rig import PLACE, cameras_of

try:
    from tf2_msgs.msg import TFMessage
except ImportError:  # on a ROS installation it is always there; the PyPI wheels have none
    TFMessage = None

POSE_TYPES = {kind.__name__: kind for kind in (PoseStamped, PoseWithCovarianceStamped, TransformStamped)}


@dataclass
class Input:
    """`kind`: as in Intake.on; `parameter`: the one that decides about the topic; `lost`: messages that DDS reported lost; `incompatible`: publishers that cannot
    be heard for their QoS; `camera`: the name of that which it is of."""
    topic: str
    kind: str
    msg_type: type
    parameter: str
    qos: QoSProfile
    lost: int = 0
    incompatible: int = 0
    camera: str = ""

    def __post_init__(self):
        self.qos = copy.copy(self.qos)  # its own: parameters may change it

    @property
    def type_name(self) -> str:
        return f"{self.msg_type.__module__.split('.')[0]}/msg/{self.msg_type.__name__}"

    @property
    def reader(self) -> Callable[[bytes], Any] | None:
        """Of large messages, which are taken as bytes; None: rclpy makes the object. Raises BadMessage."""
        return READERS.get(self.type_name)


def inputs_of(ros: RosConfig) -> list[Input]:
    """Every topic that the parameters ask for. Raises ValueError as `cameras_of`, when TF is asked for and tf2_msgs is not installed, and when there is no path to take poses from."""
    topics, intake, source = ros.topics, ros.intake, ros.intake.pose_source
    poses, out = profile(ros.qos.sensors, ros.qos.pose_queue), []
    points, cameras = intake.depth != "ignore" and intake.depth_source == "points", cameras_of(ros)
    for name in cameras:
        out += camera_inputs(ros, name)
    if points:
        out += [Input(topics.points.replace(PLACE, name), "points", PointCloud2, "topics.points", profile(ros.qos.sensors, ros.qos.sensor_queue), camera=name)
                for name in (cameras if PLACE in topics.points else [""] if len(cameras) > 1 else cameras)]
    if source in ("pose", "odom"):
        out.append(Input(topics.pose, source, Odometry if source == "odom" else POSE_TYPES[topics.pose_type], "topics.pose", poses))
    if source == "path" and not topics.path:
        raise ValueError("intake.pose_source = path takes poses from topics.path, which is empty; name the nav_msgs/Path there")
    if topics.path:
        out.append(Input(topics.path, "path", Path, "topics.path", profile("reliable", 1)))  # every path is whole: the newest counts
    if source == "tf" and TFMessage is None:
        raise ValueError("intake.pose_source = tf needs the package tf2_msgs, which is not installed (ros-$ROS_DISTRO-tf2-msgs)")
    if (source in ("tf", "odom") or points or topics.depth_info or intake.body_frame or len(cameras) > 1) and TFMessage is not None:  # base -> camera; camera -> lidar, or depth camera
        static = QoSProfile(depth=100, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        out += [Input("/tf", "tf", TFMessage, "intake.pose_source", profile("reliable", ros.qos.pose_queue)),
                Input("/tf_static", "tf_static", TFMessage, "intake.pose_source", static)]
    return out


def camera_inputs(ros: RosConfig, name: str) -> list[Input]:
    """Image, CameraInfo, depth and mask of one camera."""
    topics, sensors = ros.topics, profile(ros.qos.sensors, ros.qos.sensor_queue)
    of = lambda topic: topic.replace(PLACE, name)
    image = of(topics.image)
    if topics.image_transport == "compressed" and not image.endswith("/compressed"):
        image += "/compressed"
    kind = "compressed" if image.endswith("/compressed") else "image"
    out = [Input(image, kind, CompressedImage if kind == "compressed" else Image, "topics.image", sensors, camera=name),
           Input(of(topics.camera_info), "info", CameraInfo, "topics.camera_info", sensors, camera=name)]
    if ros.intake.depth != "ignore" and ros.intake.depth_source == "image":
        out.append(Input(of(topics.depth), "depth", image_type(topics.depth), "topics.depth", sensors, camera=name))
        if topics.depth_info:
            out.append(Input(of(topics.depth_info), "depth_info", CameraInfo, "topics.depth_info", sensors, camera=name))
    if ros.intake.mask != "off":
        out.append(Input(of(topics.mask), "mask", image_type(topics.mask), "topics.mask", sensors, camera=name))
    return out


OVERRIDES = QoSOverridingOptions((QoSPolicyKind.HISTORY, QoSPolicyKind.DEPTH, QoSPolicyKind.RELIABILITY, QoSPolicyKind.DURABILITY))


def subscribe(node, source: Input, callback, event_callbacks):
    """A subscription whose QoS the parameters qos_overrides.<topic>.subscription.{history,depth,reliability,durability} may change; source.qos says what it
    came to. Large messages come as bytes. Raises ValueError on a value that is none."""
    try:
        return node.create_subscription(source.msg_type, source.topic, callback, source.qos, event_callbacks=event_callbacks, qos_overriding_options=OVERRIDES,
                                        raw=source.reader is not None)
    except (RuntimeError, ValueError, AssertionError, InvalidParameterTypeException, InvalidQosOverridesError) as error:
        raise ValueError(f"qos_overrides.{source.topic}.subscription: {error}; history is keep_last or keep_all, depth a whole number of messages, reliability "
                         "best_effort or reliable, durability volatile or transient_local") from None


def unused_overrides(node) -> list[str]:
    """Parameters qos_overrides.* that are given and of no topic or policy of the node's."""
    return sorted(name for name in node._parameter_overrides if name.startswith("qos_overrides.") and not node.has_parameter(name))


def check_distinct(inputs: list[Input]) -> None:
    """Raises ValueError when one topic is to be two things."""
    taken: dict[str, Input] = {}
    for source in inputs:
        other = taken.setdefault(source.topic, source)
        if other is not source:
            raise ValueError(f"{other.parameter} and {source.parameter} are both {source.topic}: one topic cannot be {other.kind} and {source.kind}")


def image_type(topic: str) -> type:
    return CompressedImage if topic.endswith(("/compressed", "/compressedDepth")) else Image


def profile(reliability: str, depth: int) -> QoSProfile:
    return QoSProfile(depth=depth, durability=DurabilityPolicy.VOLATILE,
                      reliability=ReliabilityPolicy.RELIABLE if reliability == "reliable" else ReliabilityPolicy.BEST_EFFORT)
