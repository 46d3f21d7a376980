"""ROS messages <-> numpy. Duck-typed on the fields, so that rclpy's messages (data is array.array) and those of the
`rosbags` reader (data is numpy) both work; nothing of ROS is imported. A message that cannot be used raises BadMessage.
"""
from __future__ import annotations

import math
import re
import sys
from typing import Any, Callable, NamedTuple

import cv2
import numpy as np

from spirula_gpu.camera import MAX_M, Camera
from spirula_gpu.correct import matrices_of

from .poses import matrix_from_pose, quat_from_matrix

NATIVE_BIG = sys.byteorder == "big"


class BadMessage(Exception):
    """A message that cannot be used. reason: the snake_case word it is counted under; text: for a person, with remedy."""

    def __init__(self, reason: str, text: str):
        super().__init__(f"{reason}: {text}")
        self.reason, self.text = reason, text


def stamp_ns(header: Any) -> int:
    """Nanoseconds of a std_msgs/Header."""
    return header.stamp.sec * 1_000_000_000 + header.stamp.nanosec


# ---------------------------------------------------------------------------------------------------------- colour

class _Encoding(NamedTuple):
    channels: int                                 # per pixel
    dtype: type
    to_rgb: Callable[[np.ndarray], np.ndarray]    # [H,W,channels] -> [H,W,3] uint8


def _cvt(code: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: cv2.cvtColor(np.ascontiguousarray(x), code)


def _high_byte(x: np.ndarray) -> np.ndarray:
    return (x >> 8).astype(np.uint8)


_BGR, _BGRA, _RGBA, _GRAY = (_cvt(c) for c in (cv2.COLOR_BGR2RGB, cv2.COLOR_BGRA2RGB, cv2.COLOR_RGBA2RGB, cv2.COLOR_GRAY2RGB))
_ENCODINGS: dict[str, _Encoding] = {
    "rgb8": _Encoding(3, np.uint8, lambda x: x),
    "bgr8": _Encoding(3, np.uint8, _BGR), "8UC3": _Encoding(3, np.uint8, _BGR),
    "rgba8": _Encoding(4, np.uint8, _RGBA),
    "bgra8": _Encoding(4, np.uint8, _BGRA), "8UC4": _Encoding(4, np.uint8, _BGRA),
    "mono8": _Encoding(1, np.uint8, _GRAY), "8UC1": _Encoding(1, np.uint8, _GRAY),
    "mono16": _Encoding(1, np.uint16, lambda x: _GRAY(_high_byte(x))),
    "rgb16": _Encoding(3, np.uint16, _high_byte),
    "bgr16": _Encoding(3, np.uint16, lambda x: _BGR(_high_byte(x))),
    # OpenCV names a Bayer pattern by its second row and column, ROS by its first
    "bayer_rggb8": _Encoding(1, np.uint8, _cvt(cv2.COLOR_BayerBG2RGB)),
    "bayer_bggr8": _Encoding(1, np.uint8, _cvt(cv2.COLOR_BayerRG2RGB)),
    "bayer_gbrg8": _Encoding(1, np.uint8, _cvt(cv2.COLOR_BayerGR2RGB)),
    "bayer_grbg8": _Encoding(1, np.uint8, _cvt(cv2.COLOR_BayerGB2RGB)),
    "yuv422": _Encoding(2, np.uint8, _cvt(cv2.COLOR_YUV2RGB_UYVY)), "uyvy": _Encoding(2, np.uint8, _cvt(cv2.COLOR_YUV2RGB_UYVY)),
    "yuv422_yuy2": _Encoding(2, np.uint8, _cvt(cv2.COLOR_YUV2RGB_YUY2)), "yuyv": _Encoding(2, np.uint8, _cvt(cv2.COLOR_YUV2RGB_YUY2)),
}


def image_to_rgb(msg: Any) -> np.ndarray:
    """[H,W,3] uint8, C-contiguous, of a sensor_msgs/Image or CompressedImage (jpeg, png). rgb8 without row padding is a
    view on the message's bytes. Raises BadMessage: unknown_encoding, bad_image_size, bad_image_data."""
    if hasattr(msg, "format"):
        return cv2.cvtColor(_decompressed(msg, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION), cv2.COLOR_BGR2RGB)
    encoding = _encoding(msg)
    pixels = _pixels(msg, encoding.dtype, encoding.channels)
    try:
        return np.ascontiguousarray(encoding.to_rgb(pixels))
    except cv2.error as error:
        raise BadMessage("bad_image_size", f"image of {msg.width}x{msg.height} '{msg.encoding}' cannot be converted (4:2:2 needs an even width): "
                                           f"{error.err or error}; have the driver send another size or encoding") from None


def check_image(msg: Any) -> tuple[int, int]:
    """(width, height) of a sensor_msgs/Image. Raises BadMessage as image_to_rgb does, but looks at no pixel."""
    encoding = _encoding(msg)
    _check_size(msg, encoding.dtype, encoding.channels)
    if encoding.channels == 2 and msg.width % 2:
        raise BadMessage("bad_image_size", f"image of {msg.width}x{msg.height} '{msg.encoding}' cannot be converted: 4:2:2 needs an even width; have the driver send another "
                                           "size or encoding")
    return msg.width, msg.height


def _encoding(msg: Any) -> _Encoding:
    encoding = _ENCODINGS.get(msg.encoding)
    if encoding is None:
        raise BadMessage("unknown_encoding", f"image encoding '{msg.encoding}' is not supported; use one of "
                                             f"{', '.join(_ENCODINGS)} (image_proc or the camera driver can convert)")
    return encoding


def _check_size(msg: Any, dtype: type, channels: int) -> np.ndarray:
    """The message's bytes [n] uint8: enough for its size."""
    row, data = msg.width * channels * np.dtype(dtype).itemsize, bytes_of(msg.data)
    if msg.width < 1 or msg.height < 1 or msg.step < row or len(data) < msg.step * (msg.height - 1) + row:
        raise BadMessage("bad_image_size", f"image of {msg.width}x{msg.height} '{msg.encoding}', step {msg.step}: needs a step of at least {row} bytes and "
                                           f"{max(msg.step, row) * max(msg.height, 1)} bytes of data, has {len(data)}; the publisher is broken or the message was cut")
    return data


def _pixels(msg: Any, dtype: type, channels: int) -> np.ndarray:
    """[H,W,channels] (or [H,W] for one channel): a view on the message's bytes; a byte-swapped copy if they are foreign."""
    data = _check_size(msg, dtype, channels)
    width, height, step, size = msg.width, msg.height, msg.step, np.dtype(dtype).itemsize
    order = np.dtype(dtype).newbyteorder(">" if msg.is_bigendian else "<")
    out = np.ndarray((height, width, channels), order, data, 0, (step, channels * size, size))
    out = out if order.isnative else out.astype(dtype)
    return out[:, :, 0] if channels == 1 else out


def bytes_of(data: Any) -> np.ndarray:
    """[n] uint8: a view on the message's bytes."""
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


def _decompressed(msg: Any, flags: int, skip: int = 0) -> np.ndarray:
    data = bytes_of(msg.data)[skip:]
    try:
        out = cv2.imdecode(data, flags) if len(data) else None
    except cv2.error:
        out = None
    if out is None:
        raise BadMessage("bad_image_data", f"compressed image of {len(data)} bytes, format '{msg.format}', cannot be decoded; jpeg and png are "
                                           "supported; was the message cut?")
    return out


# ----------------------------------------------------------------------------------------------------------- depth

def depth_to_m(msg: Any, unit_m: float = 0.001) -> np.ndarray:
    """[H,W] float32, metres along the camera's z, 0 = unknown (REP-118). 32FC1 is metres; 16UC1 and mono16 count in
    `unit_m`, 0 and 65535 unknown; NaN, infinite and negative depth is unknown. A CompressedImage holds a 16-bit png,
    plain or behind the 12-byte header of `compressedDepth`. Raises BadMessage as `image_to_rgb` does."""
    if hasattr(msg, "format"):
        skip = 12 if "compressedDepth" in msg.format else 0
        raw = _decompressed(msg, cv2.IMREAD_UNCHANGED, skip)
        if raw.dtype != np.uint16 or raw.ndim != 2 or msg.format.startswith("32FC1"):
            raise BadMessage("unknown_encoding", f"compressed depth '{msg.format}' ({raw.dtype} {raw.shape}): only 16-bit png of 16UC1 is supported")
    elif msg.encoding in ("16UC1", "mono16"):
        raw = _pixels(msg, np.uint16, 1)
    elif msg.encoding == "32FC1":
        raw = _pixels(msg, np.float32, 1)
        return np.where((raw > 0) & (raw < np.inf), raw, np.float32(0))  # NaN fails both
    else:
        raise BadMessage("unknown_encoding", f"depth encoding '{msg.encoding}' is not supported; use 32FC1 (m), 16UC1 or mono16 (mm); is it a depth topic?")
    depth_m = raw.astype(np.float32)
    depth_m *= unit_m
    depth_m[raw == 65535] = 0
    return depth_m


def mask_from_msg(msg: Any) -> np.ndarray:
    """[H,W] uint8, 1 = of the scene, 0 = to be ignored (pixels that are 0 in the message), of a sensor_msgs/Image with one integer channel or a
    CompressedImage (png). Raises BadMessage: unknown_encoding, bad_image_size, bad_image_data."""
    if hasattr(msg, "format"):
        raw = _decompressed(msg, cv2.IMREAD_UNCHANGED)
        if raw.ndim != 2 or not np.array_equal(bytes_of(msg.data)[:4], PNG_MAGIC):
            raise BadMessage("unknown_encoding", f"compressed mask '{msg.format}' {raw.shape}: only a png with one channel is supported (after jpeg 0 is not 0)")
    else:
        if msg.encoding not in _MASKS:
            raise BadMessage("unknown_encoding", f"mask encoding '{msg.encoding}' is not supported; use one of {', '.join(_MASKS)}, with 0 where pixels shall be ignored")
        raw = _pixels(msg, _MASKS[msg.encoding], 1)
    return (raw != 0).astype(np.uint8)


def looks_like_mask(msg: Any) -> bool:
    """Whether an image message has one integer channel with two values: no camera makes that. Raises BadMessage as mask_from_msg does."""
    if not hasattr(msg, "format") and msg.encoding not in _MASKS:
        return False
    raw = _decompressed(msg, cv2.IMREAD_UNCHANGED) if hasattr(msg, "format") else _pixels(msg, _MASKS[msg.encoding], 1)
    return raw.ndim == 2 and len(np.unique(raw)) == 2


_MASKS = {"mono8": np.uint8, "8UC1": np.uint8, "8SC1": np.int8, "mono16": np.uint16, "16UC1": np.uint16}
MASK_NAME = re.compile(r"(^|[/_])masks?($|[/_])")  # topics that say what they are
PNG_MAGIC = np.frombuffer(b"\x89PNG", np.uint8)


# ---------------------------------------------------------------------------------------------------------- camera

# models whose equations are a pinhole when every coefficient is 0 (a fisheye model is not: r = f theta)
_POLYNOMIAL = ("", "none", "pinhole", "plumb_bob", "rational_polynomial", "brown_conrady", "inverse_brown_conrady", "modified_brown_conrady")


MAX_ZOOM = 4  # between the focal lengths of the raw and the rectified image; 116 degrees with k1 = -0.45 need 2.9


def camera_from_info(msg: Any) -> Camera:
    """The pinhole camera of K (the RAW image), binning and region of interest applied, and 0.5 added to cx, cy (the
    engine counts from the corner of the first pixel, ROS from its centre). Raises BadMessage: uncalibrated."""
    K = np.asarray(msg.k, np.float64).reshape(-1).tolist()
    if len(K) != 9 or not np.isfinite(K).all() or not (K[0] > 0 and K[4] > 0):
        raise BadMessage("uncalibrated", f"CameraInfo has K = {K}: fx and fy must be positive; calibrate the camera "
                                         "(camera_calibration) or set camera_info_url in its driver")
    bin_x, bin_y = max(1, msg.binning_x), max(1, msg.binning_y)
    width, height = msg.roi.width or msg.width, msg.roi.height or msg.height
    try:
        return Camera(width // bin_x, height // bin_y, K[0] / bin_x, K[4] / bin_y,
                      (K[2] + 0.5 - msg.roi.x_offset) / bin_x, (K[5] + 0.5 - msg.roi.y_offset) / bin_y)
    except ValueError as error:
        raise BadMessage("uncalibrated", f"CameraInfo: {error}") from None


class Rectifier:
    """Removes lens distortion: images of `raw` become images of the pinhole `camera`, of the same size and with no empty
    borders. Without distortion both are the same and nothing is copied. Maps are made once, here."""

    def __init__(self, raw: Camera, distortion: np.ndarray):
        """distortion: [4], [5] or [8] float64, k1 k2 p1 p2 [k3 [k4 k5 k6]] as in OpenCV. Raises BadMessage
        ('unsupported_distortion') when the focal length would change more than MAX_ZOOM."""
        self.raw = self.camera = raw
        self._maps = None
        if not np.any(distortion):
            return
        size = (raw.width, raw.height)
        K = np.array([[raw.fx, 0, raw.cx - 0.5], [0, raw.fy, raw.cy - 0.5], [0, 0, 1]])
        new_K, _ = cv2.getOptimalNewCameraMatrix(K, distortion, size, 0)  # 0: keep only pixels that were seen
        if not all(1 / MAX_ZOOM <= new / old <= MAX_ZOOM for new, old in ((new_K[0, 0], raw.fx), (new_K[1, 1], raw.fy))):
            raise BadMessage("unsupported_distortion", f"CameraInfo has D = {distortion.tolist()}: without distortion fx, fy = {raw.fx:g}, {raw.fy:g} "
                             f"become {new_K[0, 0]:.4g}, {new_K[1, 1]:.4g}, limit {MAX_ZOOM}x; calibrate again, or take rectified images (image_rect)")
        self.camera = Camera(*size, float(new_K[0, 0]), float(new_K[1, 1]), float(new_K[0, 2]) + 0.5, float(new_K[1, 2]) + 0.5)
        self._maps = cv2.initUndistortRectifyMap(K, distortion, None, new_K, size, cv2.CV_32FC1)

    def rgb(self, image: np.ndarray) -> np.ndarray:
        """[H,W,3] uint8 of `raw` -> of `camera`."""
        return image if self._maps is None else cv2.remap(image, *self._maps, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)

    def nearest(self, image: np.ndarray) -> np.ndarray:
        """[H,W] float32 depth or uint8 mask of `raw` -> of `camera`; the nearest pixel, so that nothing is invented at edges."""
        return image if self._maps is None else cv2.remap(image, *self._maps, cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=0)


def rectifier_from_info(msg: Any) -> Rectifier:
    """Raises BadMessage: uncalibrated, unsupported_distortion."""
    raw, D = camera_from_info(msg), np.asarray(msg.d, np.float64).reshape(-1)
    if not np.isfinite(D).all():
        raise BadMessage("uncalibrated", f"CameraInfo has D = {D.tolist()}: not finite; calibrate the camera")
    supported = msg.distortion_model in ("plumb_bob", "rational_polynomial") and len(D) in (4, 5, 8)
    if not (supported or (msg.distortion_model in _POLYNOMIAL and not D.any())):
        raise BadMessage("unsupported_distortion", f"CameraInfo has distortion_model '{msg.distortion_model}' with {len(D)} coefficients; plumb_bob (4, 5) and "
                                                   "rational_polynomial (8) are supported; use a rectified topic (image_rect and its camera_info)")
    return Rectifier(raw, D)


def info_key(msg: Any) -> tuple:
    """Equal for two CameraInfo messages that describe the same camera: says when a Rectifier can be kept."""
    roi = msg.roi
    return (msg.width, msg.height, msg.distortion_model, bytes(np.asarray(msg.k, np.float64)), bytes(np.asarray(msg.d, np.float64)),
            msg.binning_x, msg.binning_y, roi.x_offset, roi.y_offset, roi.width, roi.height)


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
