"""`spirula replay --via-ros`: starts train_node, plays a recording to it through real topics, and has it write the report.

The recorded messages are sent as they are, undecoded. Lossless: the next image is sent when the node's status says that the
last one is in the map and its training steps are done."""
from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

from spirula_gpu.config import rows
from spirula_gpu.ply import write_atomically
from spirula_gpu.report import FrameCounts, Status

from . import bags
from .dds import fastdds_profile
from .bag_topics import pick_topics
from .errors import InputError
from .node_process import NodeError, NodeProcess
from .progress import Progress, StopRequest
from .replay import IMAGE_KINDS, intake_config_for, overrides_for, watching, with_source
from .report import check_out, cut_short, prepare_folder, remove_results
from .report_page import write_page
from .rig import PLACE

DISCOVERY_LIMIT_S, ARRIVAL_LIMIT_S, SILENCE_LIMIT_S = 60.0, 30.0, 60.0
COMPANION_GRACE_S = 0.3  # an image that waits in the node so long waits for a message that comes later in the recording


def replay_via_ros(args) -> None:
    """args: as the options of `spirula replay`. Raises InputError; ends the program with status 1 when the node fails."""
    from .cli import settings_from, topics_from
    if importlib.util.find_spec("rclpy") is None:
        raise InputError("--via-ros needs ROS 2 for this Python (rclpy): source its setup file, or install the extra: pip install 'spirula_ros[ros]'")
    os.environ.update(fastdds_profile(os.environ))
    settings = settings_from(args)
    with bags.open_bag(args.bag) as bag, StopRequest(args.max_seconds) as stop:
        topics = pick_topics(bag, overrides_for(settings, topics_from(args)), settings.ros)
        settings = with_source(settings, bag, topics)
        check_out(args.out, args.bag, settings.ros.output.map_file, args.mesh, settings.config)
        out = prepare_folder(args.out).absolute()
        for note in topics.notes:
            print(note, file=sys.stderr)
        parameters, remap = node_parameters(args, settings, bag, topics, out)
        with NodeProcess(out, parameters, remap) as node, Link(node, bag, topics, parameters) as link:
            try:
                link.wait_until_connected()
                remove_results(out, settings.ros.output.map_file, args.mesh)
                with watching(link, bag.count(topics), sys.stderr) as progress:
                    problem = play(bag, topics, link, None if args.lossless else args.rate, stop, progress)
                    stopped_early, images = stop.reason, bag.images(topics)
                    sentence = link.finish(progress)
            except NodeError as error:
                raise SystemExit(f"spirula: {error}") from None
    if problem:
        print(f"warning: {problem}", file=sys.stderr)
    report = complete_report(out / "report.json", {
        "bag": Path(args.bag).name, "mode": "via-ros, " + ("lossless" if args.lossless else f"rate {args.rate:g}"), "topics": topics.chosen(),
        "images_sent": link.images_sent, "images": images, "stopped_early": stopped_early, "bag_problem": problem, "config": values_of(settings.config)})
    write_page(out / "report.html", report, sentence + cut_short(report))
    print(sentence + cut_short(report))
    if not report["frames"]["used"]:
        raise InputError(f"{args.bag}: not one frame could be used: {report['frames']['dropped'] or 'no image arrived'}\n{node.tail()}")


def node_parameters(args, settings, bag: bags.Bag, topics: bags.Topics, out: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(parameters, remappings) of the node for this recording."""
    intake, remap = intake_config_for(settings, topics), {}

    def named(topic: str, suffix: str) -> str:
        """The node tells a CompressedImage by its topic's ending: one that is named otherwise is remapped."""
        if not topic or topic.endswith(suffix) or bag.topics[topic].type != "sensor_msgs/msg/CompressedImage":
            return topic
        remap[topic + suffix] = topic
        return topic + suffix
    for kind, name in (("tf", "/tf"), ("tf_static", "/tf_static")):
        if getattr(topics, kind) not in ("", name):
            remap[name] = getattr(topics, kind)
    pose = topics.pose or topics.odom
    values = {**values_of(replace(settings.ros, intake=intake)), **values_of(settings.config), "topics.image_transport": "raw", "output.report_dir": str(out), "output.refine_seconds": float(args.refine_seconds),
              "output.refine_steps": args.refine_steps, "output.mesh": args.mesh}
    one = {"image": named(topics.image or topics.compressed, "/compressed"), "camera_info": topics.info, "depth": named(topics.depth, "/compressedDepth"), "points": topics.points,
           "mask": named(topics.mask, "/compressed")}
    if topics.rig:   # the node finds those of several cameras by the same names
        one, remap = {}, {name: topic for name, topic in remap.items() if name.startswith("/tf")}
        other = [topic for topic, kind, _ in topics.rig if kind in ("compressed", "depth", "mask") and bag.topics[topic].type.endswith("CompressedImage") and not topic.endswith(("/compressed", "/compressedDepth"))]
        missing = [row for row in ("image", "camera_info", "depth") if PLACE not in getattr(settings.ros.topics, row) and not (row == "depth" and not topics.depth)]
        if other or missing:
            raise InputError(f"--via-ros with several cameras needs topics.{missing[0]} with {PLACE}" if missing else f"--via-ros with several cameras: {other[0]} is a CompressedImage, and its name must end in /compressed")
    values.update({f"topics.{row}": topic for row, topic in one.items() if topic})
    if pose:
        values["topics.pose"] = pose
    values["topics.path"] = topics.path
    if topics.pose:
        values["topics.pose_type"] = bag.topics[topics.pose].type.rpartition("/")[2]
    if args.lossless:
        values.update({"qos.sensors": "reliable", "publish.status_hz": 50.0})
    return values, remap


def play(bag: bags.Bag, topics: bags.Topics, link: "Link", rate: float | None, stop: StopRequest, progress: Progress) -> str:
    """Every message in recorded order; rate None: lossless. Returns '' or what is wrong with the recording's end."""
    first_ns, begin, problem = None, time.monotonic(), ""
    try:
        for message in bags.messages(bag, topics):
            if rate is None:
                if message.kind in IMAGE_KINDS:
                    link.wait_until_trained(stop, progress)
            else:
                first_ns = message.recv_ns if first_ns is None else first_ns
                due = begin + (message.recv_ns - first_ns) / 1e9 / rate
                while (left := due - time.monotonic()) > 0 and not stop.reason:
                    link.spin(min(left, 0.1))
            if stop.reason:
                break
            link.publish(message)
            progress.show(1)
    except bags.BagError as error:
        problem = str(error)
    link.wait_until_arrived(must=rate is None)
    return problem


class Link:
    """The player's end of the topics. `status()` and `vram()` are the node's newest, in the shape that `watching` wants."""

    def __init__(self, node: NodeProcess, bag: bags.Bag, topics: bags.Topics, parameters: dict[str, Any]):
        import rclpy
        from rclpy.executors import SingleThreadedExecutor
        from std_srvs.srv import Trigger

        from .msg import MapStatus, VramReport
        from .outputs import latched
        self._node, self._steps_per_frame = node, parameters["train.steps_per_frame"]
        self.images_sent, self._used, self._steps_due = 0, 0, 0
        self._images_before = 0  # of the run that the node goes on from
        self._status, self._vram, self._heard_at = None, VramReport(), time.monotonic()
        self._silence_limit_s = SILENCE_LIMIT_S + 1 / parameters["publish.status_hz"]
        self._context = rclpy.Context()
        rclpy.init(context=self._context)
        self._ros = rclpy.create_node("spirula_player", context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._ros)
        self._publishers = {topic: self._ros.create_publisher(message_class(bag.topics[topic].type), topic, qos_of(kind))
                            for topic, kind in topics.chosen().items() if heard(kind, parameters)}
        self._ros.create_subscription(MapStatus, "spirula/status", self._hear, latched(1))
        self._ros.create_subscription(VramReport, "spirula/vram", lambda msg: setattr(self, "_vram", msg), latched(1))
        self._finish = self._ros.create_client(Trigger, "spirula/finish")

    def _hear(self, status: Any) -> None:
        self._status, self._heard_at = status, time.monotonic()

    def spin(self, seconds: float) -> None:
        """Handles what arrives, for at most so long. Raises NodeError when the node has ended, failed or fallen silent."""
        self._node.check()
        self._executor.spin_once(timeout_sec=seconds)
        if self._status is not None and self._status.state == "error":
            raise NodeError(f"the mapper failed: {self._status.last_error}\n{self._node.tail()}")
        if time.monotonic() > self._heard_at + self._silence_limit_s:
            raise NodeError(f"no status from the node for {self._silence_limit_s:.0f} s; its log ends with:\n{self._node.tail()}")

    def until(self, condition: Callable[[], Any], what: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            self.spin(0.05)
            if time.monotonic() > deadline:
                raise NodeError(f"no {what} within {limit_s:.0f} s; the node's log ends with:\n{self._node.tail()}")

    def wait_until_connected(self) -> None:
        self.until(lambda: self._status is not None, "status from the node", DISCOVERY_LIMIT_S)
        same = sum((name, space) == ("spirula", "/") for name, space in self._ros.get_node_names_and_namespaces())
        if same > 1:
            raise NodeError(f"{same} nodes are called /spirula in this ROS domain: the recording would go into the map of another one; stop it, or use another ROS_DOMAIN_ID")
        self.until(self._finish.service_is_ready, "service spirula/finish", DISCOVERY_LIMIT_S)
        for topic, publisher in self._publishers.items():
            self.until(publisher.get_subscription_count, f"subscription to {topic} by the node", DISCOVERY_LIMIT_S)
        self._images_before, self._used = self._status.frames_in, self._status.frames_used

    def publish(self, message: bags.BagMessage) -> None:
        if (publisher := self._publishers.get(message.topic)) is not None:
            publisher.publish(message.raw)
            self.images_sent += message.kind in IMAGE_KINDS
        self.spin(0)

    def wait_until_arrived(self, must: bool) -> None:
        """Until every image sent has been received; a best-effort one may be lost."""
        arrived = lambda: self._status.frames_in >= self._images_before + self.images_sent
        if must:
            self.until(arrived, f"arrival of image {self.images_sent}", ARRIVAL_LIMIT_S)
        deadline = time.monotonic() + 2.0
        while not arrived() and time.monotonic() < deadline:
            self.spin(0.05)

    def wait_until_trained(self, stop: StopRequest, progress: Progress) -> None:
        """Until the last image is accounted for, or waits for its pose or depth, and the steps it brought are done."""
        self.wait_until_arrived(must=True)
        grace = time.monotonic() + COMPANION_GRACE_S
        while not stop.reason:
            s = self._status
            if s.state in ("paused", "stopped"):
                raise NodeError(f"the mapper's state is {s.state}, so that image {self.images_sent} will never be in the map; has somebody called ~/pause?")
            if s.frames_used > self._used:
                self._used, self._steps_due = s.frames_used, s.steps + self._steps_per_frame if s.keyframes else 0
            waiting = s.inbox_frames or (s.frames_pending and time.monotonic() < grace)
            if not waiting and s.steps >= self._steps_due:
                return
            self.spin(0.05)
            progress.show(0)

    def finish(self, progress: Progress) -> str:
        """Has the node refine, measure and write. Returns its sentence."""
        from std_srvs.srv import Trigger
        future = self._finish.call_async(Trigger.Request())
        while not future.done():
            self.spin(0.1)
            progress.show(0)
        if not future.result().success:
            raise NodeError(f"the report was not written: {future.result().message}\n{self._node.tail()}")
        return future.result().message

    def status(self) -> Status:
        s = self._status
        dropped = {count.key: count.count for count in s.dropped}
        return Status(state=s.state, gaussians=s.gaussians, steps=s.steps, steps_per_s=s.steps_per_s, loss=s.loss, heldout_psnr=s.heldout_psnr,
                      frames=FrameCounts(s.frames_in, s.frames_used, dropped))

    def vram(self) -> Any:
        """Has `total`, bytes."""
        class Total:
            total = self._vram.total_bytes
        return Total

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: Any) -> None:
        self._executor.shutdown(timeout_sec=1)
        self._ros.destroy_node()
        self._context.try_shutdown()


def heard(kind: str, parameters: dict[str, Any]) -> bool:
    """Whether a node with these parameters listens to topics of this kind."""
    source, depth = parameters["intake.pose_source"], parameters["intake.depth"] != "ignore" and parameters["intake.depth_source"]
    return {"pose": source == "pose", "odom": source == "odom", "depth": depth == "image", "points": depth == "points", "mask": parameters["intake.mask"] != "off", "path": bool(parameters["topics.path"]),
            **dict.fromkeys(("tf", "tf_static"), source in ("odom", "tf") or depth == "points" or bool(parameters["intake.body_frame"]) or "," in parameters["topics.cameras"])}.get(kind, True)


def qos_of(kind: str):
    from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
    latched = kind == "tf_static"
    return QoSProfile(depth=100, reliability=ReliabilityPolicy.RELIABLE,
                      durability=DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE)


def message_class(type_name: str) -> type:
    """The class of 'package/msg/Name'. Raises InputError when its package is not installed."""
    package, _, name = type_name.split("/")
    try:
        return getattr(importlib.import_module(f"{package}.msg"), name)
    except ImportError:
        raise InputError(f"the recording has {type_name}, and the package {package} is not installed (ros-$ROS_DISTRO-{package.replace('_', '-')})") from None


def values_of(config: Any) -> dict[str, Any]:
    """{dotted name: value}."""
    return {name: value for name, value, _ in rows(config)}


def complete_report(path: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Adds to report.json what only the player knows."""
    report = {**json.loads(path.read_text()), **extra}
    write_atomically(path, (json.dumps(report, indent=2) + "\n").encode())
    return report
