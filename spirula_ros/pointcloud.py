"""sensor_msgs/PointCloud2 <-> numpy. Duck-typed as convert.py is; the layout is read from the message, not assumed."""
from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from spirula_gpu.splats import SH0, Splats, as_byte

from .convert import NATIVE_BIG, BadMessage, bytes_of

FLOATS = {7: "f4", 8: "f8"}  # PointField.FLOAT32, FLOAT64
TYPE_NAMES = dict(zip(range(1, 9), ("INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "FLOAT32", "FLOAT64")))
_LIVOX = "set xfer_format: 0 in the launch file of the Livox driver, which then publishes PointCloud2"
NOT_SUPPORTED = {"livox_ros_driver2/msg/CustomMsg": _LIVOX, "livox_interfaces/msg/CustomMsg": _LIVOX,
                 "sensor_msgs/msg/PointCloud": "convert it (point_cloud_converter), or have the driver publish PointCloud2",
                 "velodyne_msgs/msg/VelodyneScan": "use the points of velodyne_pointcloud"}  # message type -> remedy


def points_from_msg(msg: Any) -> np.ndarray:
    """[P,3] float32, m, in the frame of the message's header: x y z of every point, in any layout (organised or not, padded, FLOAT32 or FLOAT64,
    either byte order). Points that are not finite, and (0, 0, 0), which drivers send for 'no return', are left out.
    Raises BadMessage: bad_points."""
    layout = _layout(msg)
    data, rows, row_step = bytes_of(msg.data), msg.height, msg.row_step if msg.height > 1 else msg.width * msg.point_step
    needed = row_step * (rows - 1) + msg.width * msg.point_step
    if msg.width == 0 or rows == 0:
        return np.empty((0, 3), np.float32)
    if row_step < msg.width * msg.point_step or len(data) < needed:
        raise BadMessage("bad_points", f"PointCloud2 of {msg.width}x{rows} points, point_step {msg.point_step}, row_step {msg.row_step}: needs a row_step of at least "
                                       f"{msg.width * msg.point_step} and {needed} bytes of data, has {len(data)}; the publisher is broken or the message was cut")
    cloud = np.ndarray((rows, msg.width), layout, data, 0, (row_step, msg.point_step))
    points = np.empty((rows * msg.width, 3), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # a FLOAT64 beyond FLOAT32 becomes infinite, and goes
        for i, axis in enumerate("xyz"):
            points[:, i] = cloud[axis].reshape(-1)
        squared = np.einsum("ij,ij->i", points, points)  # several times cheaper than looking at each coordinate; a NaN fails both comparisons
    return points[(squared > 0) & (squared < np.inf)]


def _layout(msg: Any) -> np.dtype:
    """Structured dtype of x, y, z in one point."""
    fields = {f.name: f for f in msg.fields}
    described = ", ".join(f"{f.name} {TYPE_NAMES.get(f.datatype, f.datatype)} at {f.offset}" for f in msg.fields) or "none"
    for axis in "xyz":
        field = fields.get(axis)
        size = 0 if field is None else int(FLOATS.get(field.datatype, "f0")[1])
        if not size or field.count > 1 or field.offset + size > msg.point_step:
            raise BadMessage("bad_points", f"PointCloud2 needs x, y and z, each one FLOAT32 or FLOAT64 within point_step {msg.point_step}; its fields are: {described}; "
                                           "set its driver to publish Cartesian points, and topics.points to that topic")
    order = ">" if msg.is_bigendian else "<"
    return np.dtype({"names": list("xyz"), "formats": [order + FLOATS[fields[a].datatype] for a in "xyz"], "offsets": [fields[a].offset for a in "xyz"],
                     "itemsize": msg.point_step})


class CloudFields(NamedTuple):
    """The fields of a sensor_msgs/PointCloud2 besides its header; `fields`: rows (name, offset, datatype, count)."""
    height: int
    width: int
    fields: tuple[tuple[str, int, int, int], ...]
    is_bigendian: bool
    point_step: int
    row_step: int
    data: np.ndarray
    is_dense: bool


def cloud_fields(points: np.ndarray, names: Sequence[str] = "xyz") -> CloudFields:
    """[P,len(names)] float32, positions in m -> an unorganised cloud with one FLOAT32 of each name a point."""
    data, step = np.ascontiguousarray(points, np.float32), 4 * len(names)
    return CloudFields(1, len(data), tuple((name, 4 * i, 7, 1) for i, name in enumerate(names)), NATIVE_BIG, step, step * len(data), data.reshape(-1).view(np.uint8),
                       bool(np.isfinite(data).all()))


SPLAT_NAMES = ("x", "y", "z", "f_dc_0", "f_dc_1", "f_dc_2", "opacity", "scale_0", "scale_1", "scale_2", "rot_0", "rot_1", "rot_2", "rot_3")


def splat_fields(splats: Splats | None) -> CloudFields:
    """A cloud of SPLAT_NAMES, which mean what they do in a 3DGS .ply: m, constant SH coefficient of red, green, blue, logit of the opacity, log of m, quaternion
    w x y z (unit). None: no points."""
    if splats is None:
        return cloud_fields(np.empty((0, len(SPLAT_NAMES))), SPLAT_NAMES)
    quats = splats.quats / np.maximum(np.linalg.norm(splats.quats, axis=1, keepdims=True), 1e-12)
    return cloud_fields(np.concatenate([splats.means, splats.sh[:, 0], splats.logit_opacities[:, None], splats.log_scales, quats], 1), SPLAT_NAMES)


def colored_points(splats: Splats | None) -> CloudFields:
    """A cloud of x y z in m and rgb, the constant colour, packed as 0x00RRGGBB into the bytes of a float as PCL and rviz2 have it. None: no points."""
    n = 0 if splats is None else len(splats.means)
    points = np.empty((n, 4), np.float32)
    if n:
        red, green, blue = as_byte(255 * (0.5 + SH0 * splats.sh[:, 0])).astype(np.uint32).T
        points[:, :3], points.view(np.uint32)[:, 3] = splats.means, red << 16 | green << 8 | blue
    return cloud_fields(points, ("x", "y", "z", "rgb"))._replace(is_dense=True)   # rgb is no number: it may look like a NaN
