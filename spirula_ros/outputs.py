"""Everything the node publishes: Snapshot, Status and VramReport -> topics, at the parameters' rates, only what someone hears."""
from __future__ import annotations

import time
from typing import Iterable

from nav_msgs.msg import Path
from rclpy._rclpy_pybind11 import RCLError
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, Image
from visualization_msgs.msg import MarkerArray

from spirula_gpu.mapper import Mapper
from spirula_gpu.report import MeshChunk

from .markers import MeshMarkers
from .msg import MapStatus, VramReport
from .params import PublishConfig
from .publish import camera_info_msg, depth_msg, header, image_msg, path_msg, status_msg, vram_msg
from .watch import describe_qos, policy_name


def latched(depth: int) -> QoSProfile:
    return QoSProfile(depth=depth, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class Outputs:
    """Owned by the executor's thread. `frame_id`: of the newest input frame; `stamp_delay_ms`: its stamp -> the inbox."""

    def __init__(self, node: Node, mapper: Mapper):
        self._node, self._mapper = node, mapper
        self.mesh, self.frame_id, self.stamp_delay_ms, self.failed_sends = MeshMarkers(), "", float("nan"), 0
        self._revision, self._due, self._mesh_count, self._path, self._path_count = None, {}, 0, None, 0
        create = self._publisher
        self.rgb = create(Image, "~/render/image", 2)
        self.depth = create(Image, "~/render/depth", 2)
        self.info = create(CameraInfo, "~/render/camera_info", 2)
        self.status = create(MapStatus, "~/status", latched(1))
        self.vram = create(VramReport, "~/vram", latched(1))
        self.path = create(Path, "~/path", latched(1))
        self.markers = create(MarkerArray, "~/mesh", latched(10))  # a whole mesh takes several messages

    def _publisher(self, kind: type, name: str, qos):
        topic = self._node.resolve_topic_name(name)
        events = PublisherEventCallbacks(incompatible_qos=self._node._safely(f"the QoS of {topic}", lambda info: self._incompatible(topic, publisher, info)))
        publisher = self._node.create_publisher(kind, name, qos, event_callbacks=events)
        return publisher

    def _incompatible(self, topic: str, publisher, info) -> None:
        policy = policy_name(info.last_policy_kind)
        self._node.get_logger().warning(f"{topic}: {info.total_count} subscriber(s) ask for another QoS ({policy}) than is offered ({describe_qos(publisher.qos_profile)}) "
                                        f"and hear nothing; change their {policy}")

    def render_listeners(self) -> int:
        return self.rgb.get_subscription_count() + self.depth.get_subscription_count()

    def mesh_listeners(self) -> int:
        return self.markers.get_subscription_count()

    def path_listeners(self) -> int:
        return self.path.get_subscription_count()

    def publish(self, config: PublishConfig, hint: str, internal_error: str) -> None:
        """Whatever is due."""
        now = time.monotonic()
        if self._is_due("status", config.status_hz, now):
            self.publish_status(hint, internal_error)
        if self._is_due("vram", config.vram_hz, now):
            self._send(self.vram, vram_msg(self._mapper.vram(), header(self._now_ns(), self._node.intake.map_frame), config.vram_buffers))
        snapshot = self._mapper.latest.get()
        if snapshot is not None and snapshot.revision != self._revision and self._is_due("render", config.render_hz, now):
            self._revision = snapshot.revision
            self._publish_render(snapshot)
        self._publish_path()
        self._publish_mesh(() if snapshot is None else snapshot.mesh, config, now)  # without a map listeners still have to drop the last one

    def publish_status(self, hint: str, internal_error: str) -> None:
        status = self._mapper.status()
        text = "; ".join(line for line in (status.last_error, internal_error) if line)
        hint = "; ".join(line for line in (hint, status.hint) if line)
        msg = status_msg(status, header(self._now_ns(), self._node.intake.map_frame), hint, self.stamp_delay_ms + status.latency_ms)
        msg.last_error = text
        self._send(self.status, msg)

    def _publish_render(self, snapshot) -> None:
        head = header(snapshot.stamp_ns, self.frame_id)
        if self.rgb.get_subscription_count():
            self._send(self.rgb, image_msg(snapshot.rgb, head))
        if self.depth.get_subscription_count():
            self._send(self.depth, depth_msg(snapshot.depth_m, head))
        if self.info.get_subscription_count():
            self._send(self.info, camera_info_msg(snapshot.camera, head))

    def _publish_path(self) -> None:
        before, self._path_count = self._path_count, self.path_listeners()
        path = self._mapper.path.get()
        if path is not None and (path is not self._path or self._path_count > before):   # who is volatile has not got the latched one
            self._path = path
            self._send(self.path, path_msg(path, header(self._now_ns(), self._node.intake.map_frame)))

    def _publish_mesh(self, chunks: Iterable[MeshChunk], config: PublishConfig, now: float) -> None:
        self.mesh.update(chunks)
        listeners = self.mesh_listeners()
        if listeners > self._mesh_count:  # the history behind a latched topic is too short for a whole mesh
            self.mesh.resend()
        self._mesh_count = listeners
        if listeners and self.mesh.pending() and self._is_due("mesh", config.mesh_hz, now):
            self._send(self.markers, self.mesh.next_message(self._now_ns(), self._node.intake.map_frame, config.mesh_triangles))

    def _is_due(self, name: str, hz: float, now: float) -> bool:
        if now < self._due.get(name, 0.0):
            return False
        self._due[name] = now + 1.0 / hz
        return True

    def _now_ns(self) -> int:
        return self._node.get_clock().now().nanoseconds

    def _send(self, publisher, msg) -> None:
        """A reliable publish raises when the middleware has no room left; the next one may do better."""
        try:
            publisher.publish(msg)
        except RCLError as e:
            self.failed_sends += 1
            self._node.get_logger().warning(f"{publisher.topic_name}: message not sent ({self.failed_sends} so far): {e}", throttle_duration_sec=10.0)
