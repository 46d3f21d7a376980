"""`BagWriter`: rosbag2 recordings from numpy, playable by `ros2 bag play`."""
from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from rosbags.interfaces import Qos, QosDurability, QosHistory, QosLiveliness, QosReliability, QosTime
from rosbags.rosbag2 import StoragePlugin, Writer
from rosbags.typesys import Stores, get_typestore

from spirula_gpu.camera import Camera

from .bag_files import BagError
from .convert import image_fields, info_fields, pose_fields
from .pointcloud import cloud_fields

TYPES = get_typestore(Stores.ROS2_KILTED)  # the layout on the wire is the same in every distribution since Foxy
_FOREVER = QosTime(9223372036, 854775807)  # RMW_DURATION_INFINITE


def _qos(depth: int, durability: QosDurability) -> Qos:
    """Offered QoS: reliable, which serves best-effort and reliable subscribers alike."""
    return Qos(QosHistory.KEEP_LAST, depth, QosReliability.RELIABLE, durability, _FOREVER, _FOREVER, QosLiveliness.AUTOMATIC, _FOREVER, False)


VOLATILE, LATCHED = _qos(10, QosDurability.VOLATILE), _qos(100, QosDurability.TRANSIENT_LOCAL)


class BagWriter:
    """Writes a new rosbag2 directory; a context manager. `path` must not exist, and does when the recording is whole: until then it is
    .NAME.part/NAME beside it, which goes when the block raises; what a killed process left is written over. Every message is recorded at its own stamp unless recv_ns says otherwise. Raises BagError."""

    def __init__(self, path: str | Path, storage: str = "mcap"):
        plugins = {"mcap": StoragePlugin.MCAP, "sqlite3": StoragePlugin.SQLITE3}
        if storage not in plugins:
            raise BagError(f"storage '{storage}' is unknown; use {' or '.join(plugins)}")
        self.path, self.count = Path(path), 0
        self._connections: dict[str, Any] = {}
        self._part = self.path.parent / f".{self.path.name}.part"
        if self.path.exists():
            raise BagError(f"{path}: exists already; remove it or choose another name")
        try:
            if self._part.exists():
                shutil.rmtree(self._part)
            self._writer = Writer(self._part / self.path.name, version=9, storage_plugin=plugins[storage])   # files in it are called as the directory
            self._writer.open()
        except OSError as error:
            raise BagError(f"{path}: cannot be written ({error.strerror}); choose another directory") from None

    def image(self, topic: str, stamp_ns: int, frame_id: str, rgb: np.ndarray, recv_ns: int | None = None) -> None:
        """rgb [H,W,3] uint8 -> rgb8, or [H,W] uint8 -> mono8."""
        self._write(topic, "sensor_msgs/msg/Image", stamp_ns, recv_ns, self._header(stamp_ns, frame_id), *image_fields(rgb))

    def compressed(self, topic: str, stamp_ns: int, frame_id: str, form: str, data: bytes, recv_ns: int | None = None) -> None:
        """data: a jpeg or png file; form: 'jpeg' | 'png'."""
        self._write(topic, "sensor_msgs/msg/CompressedImage", stamp_ns, recv_ns, self._header(stamp_ns, frame_id), form, np.frombuffer(data, np.uint8))

    def depth(self, topic: str, stamp_ns: int, frame_id: str, depth: np.ndarray, recv_ns: int | None = None) -> None:
        """depth [H,W] float32 in metres -> 32FC1, or uint16 in millimetres -> 16UC1; 0 = unknown."""
        if depth.dtype not in (np.float32, np.uint16):
            raise ValueError(f"depth is {depth.dtype}; use float32 (m) or uint16 (mm)")
        self._write(topic, "sensor_msgs/msg/Image", stamp_ns, recv_ns, self._header(stamp_ns, frame_id), *image_fields(depth))

    def points(self, topic: str, stamp_ns: int, frame_id: str, points: np.ndarray, recv_ns: int | None = None) -> None:
        """PointCloud2: points [P,3] float32, m, in frame_id."""
        height, width, fields, *rest = cloud_fields(points)
        fields = [TYPES.types["sensor_msgs/msg/PointField"](*row) for row in fields]
        self._write(topic, "sensor_msgs/msg/PointCloud2", stamp_ns, recv_ns, self._header(stamp_ns, frame_id), height, width, fields, *rest)

    def info(self, topic: str, stamp_ns: int, frame_id: str, camera: Camera, recv_ns: int | None = None, distortion: tuple[str, np.ndarray] | None = None) -> None:
        """A pinhole CameraInfo, or with distortion (distortion_model, d); the engine's pixel centres go back to ROS's (cx, cy less 0.5)."""
        roi = TYPES.types["sensor_msgs/msg/RegionOfInterest"](0, 0, 0, 0, False)
        self._write(topic, "sensor_msgs/msg/CameraInfo", stamp_ns, recv_ns, self._header(stamp_ns, frame_id), *info_fields(camera, distortion), 0, 0, roi)

    def pose(self, topic: str, stamp_ns: int, frame_id: str, T: np.ndarray, recv_ns: int | None = None) -> None:
        """PoseStamped: T [4,4] maps points of the moving frame to frame_id."""
        self._write(topic, "geometry_msgs/msg/PoseStamped", stamp_ns, recv_ns, self._header(stamp_ns, frame_id), self._pose(T))

    def nav_path(self, topic: str, stamp_ns: int, frame_id: str, stamps: np.ndarray, T: np.ndarray, recv_ns: int | None = None) -> None:
        """Path: stamps [n] int64 ns and T [n,4,4], which map points of the moving frame to frame_id."""
        poses = [TYPES.types["geometry_msgs/msg/PoseStamped"](self._header(int(s), frame_id), self._pose(T_i)) for s, T_i in zip(stamps, T)]
        self._write(topic, "nav_msgs/msg/Path", stamp_ns, recv_ns, self._header(stamp_ns, frame_id), poses)

    def odom(self, topic: str, stamp_ns: int, frame_id: str, child_frame_id: str, T: np.ndarray, recv_ns: int | None = None) -> None:
        """Odometry: T [4,4] maps points of child_frame_id to frame_id; twist and covariances are zero (unknown)."""
        t, zero = TYPES.types, TYPES.types["geometry_msgs/msg/Vector3"](0.0, 0.0, 0.0)
        pose = t["geometry_msgs/msg/PoseWithCovariance"](self._pose(T), np.zeros(36))
        twist = t["geometry_msgs/msg/TwistWithCovariance"](t["geometry_msgs/msg/Twist"](zero, zero), np.zeros(36))
        self._write(topic, "nav_msgs/msg/Odometry", stamp_ns, recv_ns, self._header(stamp_ns, frame_id), child_frame_id, pose, twist)

    def tf(self, stamp_ns: int, parent: str, child: str, T: np.ndarray, static: bool = False, recv_ns: int | None = None) -> None:
        """One transform on /tf or /tf_static: T [4,4] maps points of `child` to `parent`."""
        t, (xyz, quat) = TYPES.types, pose_fields(T)
        transform = t["geometry_msgs/msg/Transform"](t["geometry_msgs/msg/Vector3"](*xyz), t["geometry_msgs/msg/Quaternion"](*quat))
        stamped = t["geometry_msgs/msg/TransformStamped"](self._header(stamp_ns, parent), child, transform)
        self._write("/tf_static" if static else "/tf", "tf2_msgs/msg/TFMessage", stamp_ns, recv_ns, [stamped], qos=LATCHED if static else VOLATILE)

    def message(self, topic: str, msgtype: str, msg: Any, recv_ns: int, qos: Qos = VOLATILE) -> None:
        """Any message object of `TYPES` (or one with the same fields)."""
        try:
            connection = self._connections.get(topic)
            if connection is None:
                connection = self._connections[topic] = self._writer.add_connection(topic, msgtype, typestore=TYPES, offered_qos_profiles=[qos])
            self._writer.write(connection, recv_ns, TYPES.serialize_cdr(msg, msgtype))
            self.count += 1
        except OSError as error:
            raise BagError(f"{self.path}: cannot be written after {self.count} messages ({error.strerror}); is the disk full?") from error

    def close(self) -> None:
        try:
            self._writer.close()
            self._writer.path.rename(self.path)
            self._part.rmdir()
        except OSError as error:
            shutil.rmtree(self._part, ignore_errors=True)
            raise BagError(f"{self.path}: cannot be finished ({error.strerror}); is the disk full?") from error

    def __enter__(self) -> "BagWriter":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.abort()
            shutil.rmtree(self._part)

    def _write(self, topic: str, msgtype: str, stamp_ns: int, recv_ns: int | None, *values: Any, qos: Qos = VOLATILE) -> None:
        self.message(topic, msgtype, TYPES.types[msgtype](*values), stamp_ns if recv_ns is None else recv_ns, qos)

    @staticmethod
    def _header(stamp_ns: int, frame_id: str) -> Any:
        time = TYPES.types["builtin_interfaces/msg/Time"](stamp_ns // 1_000_000_000, stamp_ns % 1_000_000_000)
        return TYPES.types["std_msgs/msg/Header"](time, frame_id)

    @staticmethod
    def _pose(T: np.ndarray) -> Any:
        xyz, quat = pose_fields(T)
        return TYPES.types["geometry_msgs/msg/Pose"](TYPES.types["geometry_msgs/msg/Point"](*xyz), TYPES.types["geometry_msgs/msg/Quaternion"](*quat))
