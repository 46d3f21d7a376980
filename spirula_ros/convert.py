"""ROS messages <-> numpy: masks, poses, paths and what goes out; images are read in `encodings`, depth in `depth_codec`, CameraInfo in `lens`, points in
`pointcloud`. Duck-typed on the fields, so that rclpy's messages (data is array.array) and those of the `rosbags` reader (data is numpy) both work; nothing of
ROS is imported. A message that cannot be used raises BadMessage.
"""
from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import numpy as np

from spirula_gpu.camera import MAX_M, Camera
from spirula_gpu.correct import matrices_of

from .depth_codec import depth_to_m
from .encodings import NATIVE_BIG, bytes_of, decompressed, image_to_rgb, pixels_of
from .errors import BadMessage
from .lens import Rectifier, camera_from_info, info_key, rectifier_from_info
from .poses import matrix_from_pose, quat_from_matrix

__all__ = ["BadMessage", "NATIVE_BIG", "Rectifier", "bytes_of", "camera_from_info", "check_near", "depth_to_m", "image_fields", "image_to_rgb", "info_fields", "info_key",
           "looks_like_mask", "mask_from_msg", "path_from_msg", "pose_fields", "pose_from_msg", "rectifier_from_info", "stamp_ns"]


def stamp_ns(header: Any) -> int:
    """Nanoseconds of a std_msgs/Header."""
    return header.stamp.sec * 1_000_000_000 + header.stamp.nanosec


# ----------------------------------------------------------------------------------------------------------- masks

def mask_from_msg(msg: Any) -> np.ndarray:
    """[H,W] uint8, 1 = of the scene, 0 = to be ignored (pixels that are 0 in the message), of a sensor_msgs/Image with one integer channel or a
    CompressedImage (png). Raises BadMessage: unknown_encoding, bad_image_size, bad_image_data."""
    if hasattr(msg, "format"):
        raw = decompressed(msg)
        if raw.ndim != 2 or not np.array_equal(bytes_of(msg.data)[:4], PNG_MAGIC):
            raise BadMessage("unknown_encoding", f"compressed mask '{msg.format}' {raw.shape}: only a png with one channel is supported (after jpeg 0 is not 0)")
    else:
        if msg.encoding not in _MASKS:
            raise BadMessage("unknown_encoding", f"mask encoding '{msg.encoding}' is not supported; use one of {', '.join(_MASKS)}, with 0 where pixels shall be ignored")
        raw = pixels_of(msg, _MASKS[msg.encoding], 1)
    return (raw != 0).astype(np.uint8)


def looks_like_mask(msg: Any) -> bool:
    """Whether an image message has one integer channel with two values: no camera makes that. Raises BadMessage as mask_from_msg does."""
    if not hasattr(msg, "format") and msg.encoding not in _MASKS:
        return False
    raw = decompressed(msg) if hasattr(msg, "format") else pixels_of(msg, _MASKS[msg.encoding], 1)
    return raw.ndim == 2 and len(np.unique(raw)) == 2


_MASKS = {"mono8": np.uint8, "8UC1": np.uint8, "8SC1": np.int8, "mono16": np.uint16, "16UC1": np.uint16}
MASK_NAME = re.compile(r"(^|[/_])masks?($|[/_])")  # topics that say what they are
PNG_MAGIC = np.frombuffer(b"\x89PNG", np.uint8)


# ----------------------------------------------------------------------------------------------------------- poses

def pose_from_msg(msg: Any) -> np.ndarray:
    """T [4,4] float64 of a PoseStamped, PoseWithCovarianceStamped, Odometry or TransformStamped: maps points of the moving
    (child) frame to header.frame_id. Raises BadMessage('bad_pose') when it is not finite or the quaternion is not unit to
    1e-2; a smaller deviation is normalised away."""
    if hasattr(msg, "transform"):
        t, q = msg.transform.translation, msg.transform.rotation
    else:
        pose = msg.pose.pose if hasattr(msg.pose, "pose") else msg.pose
        t, q = pose.position, pose.orientation
    values = (t.x, t.y, t.z, q.x, q.y, q.z, q.w)
    if not all(map(math.isfinite, values)):
        raise BadMessage("bad_pose", f"pose {values} is not finite; has its source lost tracking?")
    norm = math.sqrt(sum(v * v for v in values[3:]))
    if abs(norm - 1) > 1e-2:
        raise BadMessage("bad_pose", f"quaternion (x, y, z, w) = {values[3:]} has norm {norm:.4g}, must be 1 to 0.01; its source must "
                                     "normalise it (all zeros: never set)")
    return matrix_from_pose(values[:3], [v / norm for v in values[3:]])


def check_near(T: np.ndarray, reason: str) -> np.ndarray:
    """T [..,4,4]. Raises BadMessage(reason) when a position is farther from the map's origin than its float32 coordinates allow."""
    if np.abs(T[..., :3, 3]).max(initial=0) > MAX_M:
        far = T[..., :3, 3].reshape(-1, 3)[np.abs(T[..., :3, 3]).reshape(-1, 3).max(1).argmax()]
        raise BadMessage(reason, f"position {tuple(far.tolist())} is more than {MAX_M:g} m from the origin of the map frame, too far for the map's numbers; has its "
                                 "source failed? Of UTM or earth coordinates take a local frame (intake.map_frame)")
    return T


def path_from_msg(msg: Any) -> tuple[np.ndarray, np.ndarray]:
    """(stamps [n] int64 ns, T [n,4,4] float64) of a nav_msgs/Path, in the frame of its header. Raises BadMessage('bad_path') when a pose is not
    finite, a quaternion is not unit to 1e-2, or a pose says another frame."""
    poses = [p.pose for p in msg.poses]
    t = np.array([(p.position.x, p.position.y, p.position.z) for p in poses], np.float64).reshape(-1, 3)
    q = np.array([(p.orientation.x, p.orientation.y, p.orientation.z, p.orientation.w) for p in poses], np.float64).reshape(-1, 4)
    norm = np.linalg.norm(q, axis=1)
    bad = ~(np.isfinite(t).all(1) & (np.abs(norm - 1) <= 1e-2))
    if bad.any():
        i = int(np.argmax(bad))
        raise BadMessage("bad_path", f"{bad.sum()} of {len(bad)} poses of the path are not finite or have no unit quaternion, e.g. pose {i}: {(*t[i].tolist(), *q[i].tolist())}")
    frames = {p.header.frame_id.lstrip("/") for p in msg.poses} - {"", msg.header.frame_id.lstrip("/")}
    if frames and msg.header.frame_id:
        raise BadMessage("bad_path", f"the path is in frame '{msg.header.frame_id}', poses of it in '{min(frames)}'; its publisher must use one")
    T = np.tile(np.eye(4), (len(t), 1, 1))
    T[:, :3, :3], T[:, :3, 3] = matrices_of(q[:, [3, 0, 1, 2]]), t
    return np.array([stamp_ns(p.header) for p in msg.poses], np.int64), T


# ------------------------------------------------------------------------------------------------ numpy -> messages

class ImageFields(NamedTuple):
    """The fields of a sensor_msgs/Image besides its header; data [bytes] uint8, contiguous, a view where possible."""
    height: int
    width: int
    encoding: str
    is_bigendian: int
    step: int
    data: np.ndarray


def image_fields(image: np.ndarray) -> ImageFields:
    """[H,W,3] uint8 -> rgb8, [H,W] uint8 -> mono8, [H,W] uint16 -> 16UC1 (mm), [H,W] float32 -> 32FC1 (m)."""
    encoding = {(3, "uint8"): "rgb8", (2, "uint8"): "mono8", (2, "uint16"): "16UC1", (2, "float32"): "32FC1"}.get((image.ndim, image.dtype.name))
    if encoding is None or (encoding == "rgb8" and image.shape[2] != 3):
        raise ValueError(f"no image encoding for {image.dtype} {image.shape}; use uint8 [H,W,3] or [H,W], uint16 [H,W], float32 [H,W]")
    image = np.ascontiguousarray(image)
    return ImageFields(image.shape[0], image.shape[1], encoding, int(NATIVE_BIG), image.strides[0], image.reshape(-1).view(np.uint8))


class InfoFields(NamedTuple):
    """The fields of a sensor_msgs/CameraInfo besides its header, binning and roi; row-major float64."""
    height: int
    width: int
    distortion_model: str
    d: np.ndarray
    k: np.ndarray
    r: np.ndarray
    p: np.ndarray


def info_fields(camera: Camera, distortion: tuple[str, np.ndarray] | None = None) -> InfoFields:
    """A pinhole, with distortion (distortion_model, d) or without; cx, cy go back to ROS's pixel centres (0.5 less)."""
    cx, cy = camera.cx - 0.5, camera.cy - 0.5
    return InfoFields(camera.height, camera.width, *(distortion or ("plumb_bob", np.zeros(5))),
                      np.array([camera.fx, 0, cx, 0, camera.fy, cy, 0, 0, 1], np.float64), np.eye(3).reshape(-1),
                      np.array([camera.fx, 0, cx, 0, 0, camera.fy, cy, 0, 0, 0, 1, 0], np.float64))


def pose_fields(T: np.ndarray) -> tuple[tuple[float, float, float], tuple[float, float, float, float]]:
    """(x, y, z), (qx, qy, qz, qw) of T [4,4]."""
    return tuple(float(v) for v in T[:3, 3]), tuple(float(v) for v in quat_from_matrix(T))
