"""Every parameter of the node, once. The engine's rows come from `spirula_gpu.config`, the frame pairing's from
`spirula_ros.intake`; the rows of the ROS side are here. ROS parameters, `spirula params` and the documentation derive
from them. Row `image` of group `topics` is the ROS parameter `topics.image`."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Iterator

from spirula_gpu import config as engine
from spirula_gpu.config import Config, param, replaced
from spirula_gpu.formats import FormatError, format_of

from .intake import IntakeConfig


@dataclass(frozen=True)
class LifecycleConfig:
    autostart: bool = param(True, "", "configure and activate at start; false: wait for `ros2 lifecycle set` or a lifecycle manager, and parameters of \"at start only\" may be set until the node is configured")


@dataclass(frozen=True)
class TopicsConfig:
    cameras: str = param("", "", "names of several cameras, e.g. 'front, rear': {camera} in topics.image, camera_info, depth, depth_info, mask (and points) and in intake.camera_frame is replaced by each; empty = one camera")
    image: str = param("image", "", "colour Image, or CompressedImage when the name ends in /compressed")
    image_transport: str = param("raw", "", "raw | compressed; compressed appends /compressed to topics.image")
    camera_info: str = param("camera_info", "", "CameraInfo of the colour image")
    depth: str = param("depth", "", "depth Image registered to the colour image, 32FC1 m or 16UC1 mm; not used with intake.depth ignore or intake.depth_source points")
    depth_info: str = param("", "", "CameraInfo of the depth camera, if topics.depth is of another one than the image: depth is registered here, with the transform that TF has; empty = it is registered")
    points: str = param("points", "", "PointCloud2 of a lidar, which gives the depth with intake.depth_source points; without {camera} it is that of all cameras")
    mask: str = param("mask", "", "mono8 Image (or png, when the name ends in /compressed), as large as the image: what is 0 is not of the scene (a person, the robot itself); see intake.mask")
    pose: str = param("pose", "", "PoseStamped or Odometry, as intake.pose_source says; not used with tf and path")
    path: str = param("", "", "nav_msgs/Path of corrected poses (loop closure) of the same body as topics.pose: the map moves with it; empty = none; with intake.pose_source path it is where poses come from")
    pose_type: str = param("PoseStamped", "", "message of topics.pose with pose_source pose: PoseStamped | PoseWithCovarianceStamped | TransformStamped")


@dataclass(frozen=True)
class QosConfig:
    sensors: str = param("best_effort", "", "best_effort | reliable subscriptions; best_effort hears every publisher, reliable only reliable ones")
    sensor_queue: int = param(30, "messages", "images that may wait for the node, per topic", 1, 10000)
    pose_queue: int = param(500, "messages", "poses that may wait for the node", 1, 100000)


@dataclass(frozen=True)
class PublishConfig:
    render_hz: float = param(2.0, "Hz", "highest rate of ~/render/*; each render takes time from training", 0.01, 1000, True)
    render_width: int = param(640, "px", "renders are not wider than this; 0 = the camera's size", 0, 32767)
    status_hz: float = param(2.0, "Hz", "rate of ~/status", 0.01, 1000, True)
    vram_hz: float = param(1.0, "Hz", "rate of ~/vram", 0.01, 1000, True)
    vram_buffers: bool = param(False, "", "~/vram also lists every buffer", live=True)
    mesh_hz: float = param(4.0, "Hz", "highest rate of ~/mesh messages", 0.01, 1000, True)
    splats_hz: float = param(0.5, "Hz", "highest rate of ~/splats and ~/points", 0.001, 100, True)
    splats_max: int = param(200_000, "Gaussians", "~/splats and ~/points hold so many at most, those that show most; 56 and 16 bytes each", 1, 20_000_000, True)
    diagnostics_hz: float = param(1.0, "Hz", "rate of /diagnostics", 0.01, 100, True)
    mesh_triangles: int = param(50_000, "triangles", "most triangles in one ~/mesh message (120 bytes each); the rest follows in the next ones", 100, 10_000_000, True)


@dataclass(frozen=True)
class OutputConfig:
    map_path: str = param("", "", "~/save_map without a path writes here, in the format of its suffix (see map_file), and so does a clean shutdown; empty = no file at shutdown")
    report_dir: str = param("", "", "~/finish writes report.html, report.json, renders/, the map, poses.txt, mesh.ply and compare.png here")
    map_file: str = param("map.ply", "", "name of the map in report_dir; the suffix says the format: .ply | .compressed.ply | .splat | .spz | .npy | .f32.gz | .points.ply")
    refine_seconds: float = param(0.0, "s", "training time that ~/finish adds before it measures; 0 = no limit", 0, 1e6, True)
    refine_steps: int = param(0, "steps", ".. and training steps; the first limit counts, both 0 = none", 0, 1_000_000_000, True)
    mesh: bool = param(True, "", "~/finish also writes mesh.ply", live=True)


@dataclass(frozen=True)
class WatchConfig:
    silence_s: float = param(5.0, "s", "explain the silence after this long without a usable frame", 0.1, 3600, True)
    repeat_s: float = param(10.0, "s", ".. and again this often", 0.1, 3600, True)


@dataclass(frozen=True)
class WebConfig:
    enabled: bool = param(False, "", "serve the live viewer to browsers (needs viser: pip install 'spirula_ros[web]')")
    host: str = param("127.0.0.1", "", "address that it listens on; another one than loopback needs web.token")
    port: int = param(8080, "", "port that it listens on; 0 = any that is free", 0, 65535)
    token: str = param("", "", "browsers must know it (?token=..): 12 or more of A-Z a-z 0-9 - _; it travels unencrypted; empty = none, loopback alone")
    max_splats: int = param(1_000_000, "Gaussians", "a browser gets so many at most, those that show most; 32 bytes each and update", 1, 20_000_000, True)
    period_s: float = param(2.0, "s", "shortest time between updates of the splats while someone looks", 0.1, 3600, True)


CHOICES = {
    "topics.image_transport": ("raw", "compressed"),
    "topics.pose_type": ("PoseStamped", "PoseWithCovarianceStamped", "TransformStamped"),
    "qos.sensors": ("best_effort", "reliable"),
    "intake.pose_source": ("pose", "odom", "tf", "path"),
    "intake.map_on_time_jump": ("keep", "reset", "new_session"),
    "intake.depth": ("require", "use_if_there", "ignore"),
    "intake.depth_source": ("image", "points"),
    "intake.mask": ("off", "use_if_there", "require"),
    "intake.rectified": ("auto", "raw", "rectified"),
    "engine.backend": ("auto", "cpu", "cuda"),
    "engine.precision": ("full", "compact"),
}


@dataclass(frozen=True)
class RosConfig:
    lifecycle: LifecycleConfig = LifecycleConfig()
    topics: TopicsConfig = TopicsConfig()
    qos: QosConfig = QosConfig()
    intake: IntakeConfig = IntakeConfig()
    publish: PublishConfig = PublishConfig()
    output: OutputConfig = OutputConfig()
    watch: WatchConfig = WatchConfig()
    web: WebConfig = WebConfig()


def rows() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """(dotted name, default, field) of every parameter of the node, ROS side first."""
    yield from engine.rows(RosConfig())
    yield from engine.rows(Config())


def split(values: dict[str, Any], ros: RosConfig = RosConfig(), config: Config = Config()) -> tuple[RosConfig, Config]:
    """Both configurations with dotted names replaced. Raises ValueError with name, value and what is allowed."""
    known = [name for name, _, _ in rows()]
    for name, value in values.items():
        if name not in known:
            raise engine.unknown(name, known)
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(CHOICES[name])}")
        if name in ("output.map_path", "output.map_file") and value:
            _check_map_file(name, value)
    ours = {name for name, _, _ in engine.rows(ros)}
    return (replaced(ros, {k: v for k, v in values.items() if k in ours}),
            replaced(config, {k: v for k, v in values.items() if k not in ours}))


def _check_map_file(name: str, value: Any) -> None:
    try:
        format_of(value)
    except (FormatError, TypeError) as error:
        raise ValueError(f"{name} = {value!r}: {error}") from None
    if name == "output.map_file" and "/" in value:
        raise ValueError(f"{name} = {value!r}: a name, it lies in output.report_dir")


def describe(field: dataclasses.Field) -> str:
    """Help text of a row, with its unit."""
    unit = field.metadata["unit"]
    return field.metadata["help"] + (f" [{unit}]" if unit else "")


def yaml_text(values: dict[str, Any] | None = None) -> str:
    """Every parameter as a ROS parameter file that `ros2 run .. --params-file` and `spirula --config` both read;
    `values` replaces defaults."""
    values, group, lines = values or {}, None, ["/**:", "  ros__parameters:"]
    for name, default, field in rows():
        head, leaf = name.split(".")
        if head != group:
            group = head
            lines.append(f"    {head}:")
        meta = field.metadata
        span = f" ({meta['low']:g}..{meta['high']:g})" if meta["low"] is not None else ""
        lines.append(f"      {leaf}: {_scalar(values.get(name, default))}  # {describe(field)}{span}{'' if meta['live'] else '; at start only'}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_scalar, value)) + "]"
    if isinstance(value, float):  # YAML reads 1e-05 as text and ROS reads 1 as an integer
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return str(value)


def declare_all(node) -> None:
    """Declares every row on an rclpy node: type, description, range; read-only unless live, or unless somebody else than lifecycle.autostart says when to configure.
    Raises ValueError that names the parameter when an override has the wrong type or leaves its range, or is of a group of
    ours and unknown; what is of no group of ours may be meant for another node of the same file, and is warned of."""
    from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor
    from rclpy.exceptions import InvalidParameterTypeException, InvalidParameterValueException
    autostart = True
    for name, default, field in rows():
        meta = field.metadata
        descriptor = ParameterDescriptor(description=describe(field) + ("" if meta["live"] else "; at start only"), read_only=not meta["live"] and autostart)
        if name in CHOICES:
            descriptor.additional_constraints = "one of " + ", ".join(CHOICES[name])
        if meta["low"] is not None and isinstance(default, int):
            descriptor.integer_range = [IntegerRange(from_value=int(meta["low"]), to_value=int(meta["high"]), step=0)]
        elif meta["low"] is not None:
            descriptor.floating_point_range = [FloatingPointRange(from_value=float(meta["low"]), to_value=float(meta["high"]), step=0.0)]
        try:
            node.declare_parameter(name, list(default) if isinstance(default, tuple) else default, descriptor)
            autostart = node.get_parameter("lifecycle.autostart").value
        except (InvalidParameterTypeException, InvalidParameterValueException) as e:
            hint = " (write whole numbers of this parameter with a point, 1.0)" if isinstance(default, float) and isinstance(e, InvalidParameterTypeException) else ""
            raise ValueError(f"parameter {name}: {e}{hint}") from None
    groups = {name.split(".")[0] for name, _, _ in rows()}
    unknown = sorted(name for name in node._parameter_overrides if not node.has_parameter(name) and not name.startswith("qos_overrides."))
    for name in unknown:
        if name.split(".")[0] in groups:
            split({name: node._parameter_overrides[name].value})  # says what is unknown, and what may have been meant
    if unknown:
        node.get_logger().warning(f"unknown parameters, without effect here: {', '.join(unknown)}; `spirula params` lists all")


def config_from(node) -> tuple[RosConfig, Config]:
    """Both configurations as the node's parameters say. Raises ValueError on a value that no row allows."""
    return split({name: node.get_parameter(name).value for name, _, _ in rows()})


def check_change(parameters, ros: RosConfig, config: Config, configured: bool = True) -> tuple[RosConfig, Config]:
    """Both configurations after a `set_parameters` request; parameters of other tables (use_sim_time) are left alone.
    Raises ValueError when one may not be set, which of an "at start only" one is so while the node is configured."""
    live = {name: field.metadata["live"] for name, _, field in rows()}
    for p in parameters:
        if configured and not live.get(p.name, True):
            raise ValueError(f"{p.name} is read when the node is configured: `ros2 lifecycle set` it to deactivate, then cleanup, set the parameter, and configure it again")
    return split({p.name: p.value for p in parameters if p.name in live}, ros, config)
