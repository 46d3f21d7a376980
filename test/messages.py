"""Builders of the messages that the intake takes, in two families: `rosbags` (numpy data) and `rclpy` (array.array data)."""
from __future__ import annotations

import array
from typing import Any

import conftest
import numpy as np

from spirula_ros.bag_writer import TYPES
from spirula_ros.pointcloud import cloud_fields


def _blank(msgtype: str) -> Any:
    """A rosbags message with every field at zero."""
    kinds = {"bool": False, "float32": 0.0, "float64": 0.0, "string": ""}
    values = []
    for _, (tag, detail) in TYPES.fielddefs[msgtype][1]:
        if tag.name == "BASE":
            values.append(kinds.get(detail[0], 0))
        elif tag.name == "NAME":
            values.append(_blank(detail))
        else:
            (item_tag, item), n = detail
            values.append([] if item_tag.name == "NAME" else np.zeros(n or 0, {"octet": "uint8"}.get(item[0], item[0])))
    return TYPES.types[msgtype](*values)


def blank(msgtype: str, family: str = "rosbags") -> Any:
    """e.g. blank('sensor_msgs/msg/Image')."""
    if family == "rosbags":
        return _blank(msgtype)
    package, _, name = msgtype.split("/")
    return getattr(conftest.importorskip(f"{package}.msg", "the rclpy half of these tests needs a ROS 2 Python"), name)()


def put(msg: Any, **values: Any) -> Any:
    """Sets fields; dotted names with __ : put(msg, header__frame_id='x'). Bytes become what the family uses."""
    for name, value in values.items():
        *path, leaf = name.split("__")
        owner = msg
        for part in path:
            owner = getattr(owner, part)
        old = getattr(owner, leaf)
        if isinstance(old, array.array):
            value = array.array(old.typecode, bytes(value) if old.typecode == "B" else list(value))
        elif isinstance(old, np.ndarray):
            value = np.frombuffer(value, np.uint8) if isinstance(value, (bytes, bytearray)) else np.asarray(value, old.dtype)
        setattr(owner, leaf, value)
    return msg


def stamped(msgtype: str, stamp_ns: int, frame_id: str = "", family: str = "rosbags", **values: Any) -> Any:
    return put(blank(msgtype, family), header__stamp__sec=stamp_ns // 10**9, header__stamp__nanosec=stamp_ns % 10**9,
               header__frame_id=frame_id, **values)


def image(stamp_ns: int, width: int, height: int, encoding: str, data: bytes, step: int | None = None, big: bool = False,
          frame_id: str = "cam", family: str = "rosbags") -> Any:
    return stamped("sensor_msgs/msg/Image", stamp_ns, frame_id, family, width=width, height=height, encoding=encoding,
                   step=len(data) // height if step is None else step, is_bigendian=int(big), data=data)


def info(stamp_ns: int, width: int, height: int, f: float = 100.0, d=(), model: str = "plumb_bob", family: str = "rosbags", **values: Any) -> Any:
    K = [f, 0, (width - 1) / 2, 0, f, (height - 1) / 2, 0, 0, 1]
    return stamped("sensor_msgs/msg/CameraInfo", stamp_ns, "cam", family, width=width, height=height, k=K, d=np.asarray(d, np.float64),
                   distortion_model=model, **values)


def pose(stamp_ns: int, xyz=(0, 0, 0), q=(0, 0, 0, 1), frame_id: str = "map", kind: str = "PoseStamped", family: str = "rosbags", child: str = "") -> Any:
    """kind: PoseStamped | PoseWithCovarianceStamped | Odometry | TransformStamped."""
    msg = stamped(f"{'nav_msgs' if kind == 'Odometry' else 'geometry_msgs'}/msg/{kind}", stamp_ns, frame_id, family)
    owner = msg.transform if kind == "TransformStamped" else msg.pose if kind == "PoseStamped" else msg.pose.pose
    t, r = (owner.translation, owner.rotation) if kind == "TransformStamped" else (owner.position, owner.orientation)
    t.x, t.y, t.z = (float(v) for v in xyz)
    r.x, r.y, r.z, r.w = (float(v) for v in q)
    if child:
        msg.child_frame_id = child
    return msg


def tf(*transforms: Any) -> Any:
    """A TFMessage of TransformStamped."""
    return TYPES.types["tf2_msgs/msg/TFMessage"](list(transforms))


def cloud(stamp_ns: int, fields, point_step: int, data: bytes, shape: tuple[int, int], row_step: int | None = None, big: bool = False, frame_id: str = "lidar",
          family: str = "rosbags") -> Any:
    """A PointCloud2; fields: rows (name, offset, datatype, count); shape: (height, width)."""
    rows = [put(blank("sensor_msgs/msg/PointField", family), name=name, offset=offset, datatype=kind, count=count) for name, offset, kind, count in fields]
    return stamped("sensor_msgs/msg/PointCloud2", stamp_ns, frame_id, family, height=shape[0], width=shape[1], fields=rows, point_step=point_step,
                   row_step=point_step * shape[1] if row_step is None else row_step, is_bigendian=big, data=data)


def cloud_of(stamp_ns: int, points: np.ndarray, frame_id: str = "lidar", family: str = "rosbags") -> Any:
    """x y z of [P,3] as float32."""
    f = cloud_fields(points)
    return cloud(stamp_ns, f.fields, f.point_step, f.data.tobytes(), (f.height, f.width), f.row_step, f.is_bigendian, frame_id, family)
