"""Everything the node publishes: Snapshot, Status, VramReport and splats -> topics, at the parameters' rates, only what someone hears."""
from __future__ import annotations

import time
from contextlib import ExitStack

from nav_msgs.msg import Path
from rclpy._rclpy_pybind11 import RCLError
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from visualization_msgs.msg import MarkerArray

from spirula_gpu.mapper import Wants
from spirula_gpu.report import Snapshot
from spirula_gpu.splats import most_visible

from .markers import MeshMarkers
from .msg import MapStatus, VramReport
from .params import PublishConfig
from .pointcloud import colored_points, splat_fields
from .publish import VIEW_FRAME, camera_info_msg, cloud_msg, depth_msg, header, image_msg, path_msg, status_msg, vram_msg
from .watch import describe_qos, policy_name


def latched(depth: int) -> QoSProfile:
    return QoSProfile(depth=depth, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class Outputs:
    """Owned by the executor's thread. `frame_id`, `stamp_delay_ms`: of the newest frame that was taken, and its stamp -> the inbox."""

    def __init__(self, session, stack: ExitStack):
        self._session, self._node, self._mapper = session, session.node, session.mapper
        self.mesh, self.frame_id, self.stamp_delay_ms, self.failed_sends = MeshMarkers(), "", float("nan"), 0
        self._revision, self._due, self._mesh_count, self._path, self._path_count, self._clouds = None, {}, 0, None, 0, {}

        def create(kind, name, qos):
            publisher = self._publisher(kind, name, qos)
            stack.callback(self._node.destroy_publisher, publisher)
            return publisher
        self.rgb = create(Image, "~/render/image", 2)
        self.depth = create(Image, "~/render/depth", 2)
        self.info = create(CameraInfo, "~/render/camera_info", 2)
        self.status = create(MapStatus, "~/status", latched(1))
        self.vram = create(VramReport, "~/vram", latched(1))
        self.path = create(Path, "~/path", latched(1))
        self.markers = create(MarkerArray, "~/mesh", latched(10))  # a whole mesh takes several messages
        self.splats = create(PointCloud2, "~/splats", latched(1))
        self.points = create(PointCloud2, "~/points", latched(1))

    def wanted(self, config: PublishConfig) -> Wants:
        """What has listeners."""
        splats = config.splats_max if self.splats.get_subscription_count() + self.points.get_subscription_count() else 0
        return Wants(self.render_listeners() > 0, self.mesh_listeners() > 0, self.path.get_subscription_count() > 0, 1 / config.render_hz, splats, 1 / config.splats_hz)

    def _publisher(self, kind: type, name: str, qos):
        topic = self._node.resolve_topic_name(name)
        events = PublisherEventCallbacks(incompatible_qos=self._session.safely(f"the QoS of {topic}", lambda info: self._incompatible(topic, publisher, info)))
        publisher = self._node.create_publisher(kind, name, qos, event_callbacks=events)
        return publisher

    def _incompatible(self, topic: str, publisher, info) -> None:
        policy = policy_name(info.last_policy_kind)
        self._session.log.warning(f"{topic}: {info.total_count} subscriber(s) ask for another QoS ({policy}) than is offered ({describe_qos(publisher.qos_profile)}) "
                                        f"and hear nothing; change their {policy}")

    def render_listeners(self) -> int:
        return self.rgb.get_subscription_count() + self.depth.get_subscription_count()

    def mesh_listeners(self) -> int:
        return self.markers.get_subscription_count()

    def publish(self, config: PublishConfig, hint: str, internal_error: str) -> None:
        """Whatever is due."""
        now = time.monotonic()
        if self._is_due("status", config.status_hz, now):
            self.publish_status(hint, internal_error)
        if self._is_due("vram", config.vram_hz, now):
            self._send(self.vram, vram_msg(self._mapper.vram(), header(self._now_ns(), self._session.intake.map_frame), config.vram_buffers))
        snapshot = self._mapper.latest.get()
        if snapshot is not None and snapshot.revision != self._revision and self._is_due("render", config.render_hz, now):
            self._revision = snapshot.revision
            self._publish_render(snapshot)
        self._publish_path()
        self._publish_splats(config, now)
        self._publish_mesh(snapshot, config, now)

    def publish_status(self, hint: str, internal_error: str) -> None:
        status = self._mapper.status()
        text = "; ".join(line for line in (status.last_error, internal_error) if line)
        hint = "; ".join(line for line in (hint, status.hint) if line)
        msg = status_msg(status, header(self._now_ns(), self._session.intake.map_frame), hint, self.stamp_delay_ms + status.latency_ms)
        msg.last_error = text
        self._send(self.status, msg)

    def _publish_render(self, snapshot) -> None:
        head = header(snapshot.stamp_ns, self.frame_id if self._session.view[0] is None else VIEW_FRAME)
        if self.rgb.get_subscription_count():
            self._send(self.rgb, image_msg(snapshot.rgb, head))
        if self.depth.get_subscription_count():
            self._send(self.depth, depth_msg(snapshot.depth_m, head))
        if self.info.get_subscription_count():
            self._send(self.info, camera_info_msg(snapshot.camera, head))

    def _publish_path(self) -> None:
        before, self._path_count = self._path_count, self.path.get_subscription_count()
        path = self._mapper.path.get()
        if path is not None and (path is not self._path or self._path_count > before):   # who is volatile has not got the latched one
            self._path = path
            self._send(self.path, path_msg(path, header(self._now_ns(), self._session.intake.map_frame)))

    def _publish_splats(self, config: PublishConfig, now: float) -> None:
        """The newest copy of the map, to whoever has not got it; who comes later gets the last message."""
        shown = self._mapper.splats.get()
        ask = [(p, fields) for p, fields in ((self.splats, splat_fields), (self.points, colored_points)) if p.get_subscription_count() and self._clouds.get(p) is not shown]
        if not ask or not self._is_due("splats", config.splats_hz, now):
            return
        head, splats = header(self._now_ns(), self._session.intake.map_frame), shown and shown.splats   # None: the map was reset
        if splats is not None:
            splats = splats.chosen(most_visible(splats.log_scales, splats.logit_opacities, config.splats_max))
        for publisher, fields in ask:
            self._clouds[publisher] = shown
            self._send(publisher, cloud_msg(fields(splats), head))

    def _publish_mesh(self, snapshot: Snapshot | None, config: PublishConfig, now: float) -> None:
        self.mesh.update(*((), None) if snapshot is None else (snapshot.mesh, snapshot.map))
        listeners = self.mesh_listeners()
        if listeners > self._mesh_count:  # the history behind a latched topic is too short for a whole mesh
            self.mesh.resend()
        self._mesh_count = listeners
        if listeners and self.mesh.pending() and self._is_due("mesh", config.mesh_hz, now):
            self._send(self.markers, self.mesh.next_message(self._now_ns(), self._session.intake.map_frame, config.mesh_triangles))

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
