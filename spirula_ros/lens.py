"""CameraInfo -> the pinhole camera that the engine trains with, and the way of images into it."""
from __future__ import annotations

import functools
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np

from spirula_gpu.camera import Camera

from .errors import BadMessage

if TYPE_CHECKING:
    from .intake import IntakeConfig

# models whose equations are a pinhole when every coefficient is 0
_POLYNOMIAL = ("", "none", "pinhole", "plumb_bob", "rational_polynomial", "brown_conrady", "inverse_brown_conrady", "modified_brown_conrady")
_FISHEYE = ("equidistant", "fisheye", "kannala_brandt")  # one model: r = f (t + k1 t^3 + k2 t^5 + k3 t^7 + k4 t^9) of the angle t off the axis
_LENGTHS = (4, 5, 8, 12, 14)                             # of OpenCV's polynomial
MAX_ZOOM = 4        # between the focal lengths of the raw and the rectified image; 116 degrees with k1 = -0.45 need 2.9
_MARGIN_PX = 1 / 16  # cv2.remap rounds to 1/32 px: so close to its border the picture would be mixed with what lies outside
_RECT = re.compile(r"(?<![a-z])rect", re.IGNORECASE)     # image_rect, image_rect_color, rectified; not "direct"


def resolved(config: IntakeConfig, image_topic: str) -> IntakeConfig:
    """`intake.rectified` auto becomes raw or rectified, by the last name of the image topic (that of its transport left out). The one place where it does."""
    if config.rectified != "auto":
        return config
    names = [name for name in image_topic.split("/") if name not in ("", "compressed", "compressedDepth")]
    return replace(config, rectified="rectified" if names and _RECT.search(names[-1]) else "raw")


def camera_from_info(msg: Any, rectified: bool = False) -> Camera:
    """The pinhole camera of K (the raw image), or of P (the rectified one), binning and region of interest applied, and 0.5 added to cx, cy (the
    engine counts from the corner of the first pixel, ROS from its centre). Raises BadMessage: uncalibrated."""
    name, n, columns = ("P", 12, 4) if rectified else ("K", 9, 3)
    values = np.asarray(msg.p if rectified else msg.k, np.float64).reshape(-1).tolist()
    if len(values) != n or not np.isfinite(values).all() or not (values[0] > 0 and values[columns + 1] > 0):
        remedy = ("or, if the images are not rectified, set intake.rectified raw" if rectified else "or set camera_info_url in its driver")
        raise BadMessage("uncalibrated", f"CameraInfo has {name} = {values}: fx and fy must be positive; calibrate the camera (camera_calibration) {remedy}")
    fx, cx, fy, cy = values[0], values[2], values[columns + 1], values[columns + 2]
    bin_x, bin_y = max(1, msg.binning_x), max(1, msg.binning_y)
    width, height = msg.roi.width or msg.width, msg.roi.height or msg.height
    try:
        return Camera(width // bin_x, height // bin_y, fx / bin_x, fy / bin_y,
                      (cx + 0.5 - msg.roi.x_offset) / bin_x, (cy + 0.5 - msg.roi.y_offset) / bin_y)
    except ValueError as error:
        raise BadMessage("uncalibrated", f"CameraInfo: {error}; calibrate the camera, or have its driver send width and height") from None


class Rectifier:
    """Images of `raw` become images of the pinhole `camera`. Without distortion both are the same and nothing is copied. Maps are made once, at first use.

    seen [H,W] uint8 of `camera`, 0 where the lens saw nothing; None where it saw everything."""

    def __init__(self, raw: Camera, camera: Camera | None = None, maps: Any = None):
        """maps: makes (columns, rows, seen) of `camera`: [H,W] float32 of the pixel centres' places in the raw image (ROS's pixels), [H,W] uint8 or None."""
        self.raw, self.camera, self._make = raw, camera or raw, maps

    @functools.cached_property
    def _maps(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
        return self._make and self._make()

    @property
    def seen(self) -> np.ndarray | None:
        return self._maps and self._maps[2]

    def rgb(self, image: np.ndarray) -> np.ndarray:
        """[H,W,3] uint8 of `raw` -> of `camera`; black where it saw nothing."""
        if self._maps is None:
            return image
        border = cv2.BORDER_REPLICATE if self.seen is None else cv2.BORDER_CONSTANT
        return cv2.remap(image, *self._maps[:2], cv2.INTER_LINEAR, borderMode=border)

    def nearest(self, image: np.ndarray) -> np.ndarray:
        """[H,W] float32 depth or uint8 mask of `raw` -> of `camera`; the nearest pixel, so that nothing is invented at edges; 0 where it saw nothing.
        Depth stays: both cameras have one z axis."""
        return image if self._maps is None else cv2.remap(image, *self._maps[:2], cv2.INTER_NEAREST, borderMode=cv2.BORDER_CONSTANT, borderValue=0)


def rectifier_from_info(msg: Any, rectified: bool = False, max_fov_deg: float = 130.0) -> Rectifier:
    """rectified: the images are, P counts and D, R do not (image_proc publishes image_rect beside a camera_info that still has D).
    max_fov_deg: see fisheye. Raises BadMessage: uncalibrated, unsupported_distortion."""
    raw = camera_from_info(msg, rectified)
    if rectified:
        return Rectifier(raw)
    D, model = np.asarray(msg.d, np.float64).reshape(-1), msg.distortion_model
    if not np.isfinite(D).all():
        raise BadMessage("uncalibrated", f"CameraInfo has D = {D.tolist()}: not finite; calibrate the camera")
    if model in _FISHEYE and len(D) >= 4 and not D[4:].any():
        return fisheye(raw, D[:4], max_fov_deg)
    if model in _POLYNOMIAL and not D.any():
        return Rectifier(raw)
    if model in ("plumb_bob", "rational_polynomial") and len(D) in _LENGTHS:
        return polynomial(raw, D)
    raise BadMessage("unsupported_distortion", f"CameraInfo has distortion_model '{model}' with {len(D)} coefficients; plumb_bob (4, 5), rational_polynomial (8, 12, 14) and "
                                               f"{', '.join(_FISHEYE)} (4) are supported; use a rectified topic (image_rect), with intake.rectified rectified")


def polynomial(raw: Camera, D: np.ndarray) -> Rectifier:
    """D: k1 k2 p1 p2 [k3 [k4 k5 k6 [s1 .. s4 [tx ty]]]] as in OpenCV. The image keeps its size and has no empty borders. Raises BadMessage
    ('unsupported_distortion') when the focal length would change more than MAX_ZOOM."""
    size, K = (raw.width, raw.height), _matrix(raw)
    new_K, _ = cv2.getOptimalNewCameraMatrix(K, D, size, 0)  # 0: keep only pixels that were seen
    if not all(1 / MAX_ZOOM <= new / old <= MAX_ZOOM for new, old in ((new_K[0, 0], raw.fx), (new_K[1, 1], raw.fy))):
        raise BadMessage("unsupported_distortion", f"CameraInfo has D = {D.tolist()}: without distortion fx, fy = {raw.fx:g}, {raw.fy:g} "
                         f"become {new_K[0, 0]:.4g}, {new_K[1, 1]:.4g}, limit {MAX_ZOOM}x; calibrate again, or take rectified images (image_rect)")
    camera = Camera(*size, float(new_K[0, 0]), float(new_K[1, 1]), float(new_K[0, 2]) + 0.5, float(new_K[1, 2]) + 0.5)
    return Rectifier(raw, camera, lambda: (*cv2.initUndistortRectifyMap(K, D, None, new_K, size, cv2.CV_32FC1), None))


def fisheye(raw: Camera, D: np.ndarray, max_fov_deg: float) -> Rectifier:
    """D: k1 .. k4 (J. Kannala, S. Brandt, A Generic Camera Model, 2006; cv2.fisheye). `camera` shows all that the lens saw, up to half of max_fov_deg left, right,
    above and below of the axis, with as many pixels as the raw image and pixels of its shape. Raises BadMessage ('unsupported_distortion')."""
    angle, bent = _bent(D)
    if len(angle) < 2:
        raise BadMessage("unsupported_distortion", f"CameraInfo has D = {D.tolist()} of a fisheye: with it nothing off the axis is seen; calibrate again")
    limit = math.tan(math.radians(max_fov_deg) / 2)
    u, v = _border(raw)
    mx, my = (u - raw.cx) / raw.fx, (v - raw.cy) / raw.fy
    r = np.hypot(mx, my)
    tangent = np.tan(np.minimum(np.interp(r, bent, angle), math.radians(89.9))) / np.maximum(r, 1e-12)  # what lies beyond 90 degrees is beyond every limit
    (x0, x1), (y0, y1) = ((max(-limit, float((t * tangent).min())), min(limit, float((t * tangent).max()))) for t in (mx, my))
    if not (x0 < 0 < x1 and y0 < 0 < y1):
        raise BadMessage("unsupported_distortion", f"CameraInfo has cx, cy = {raw.cx:g}, {raw.cy:g} outside of its {raw.width}x{raw.height} image, which a fisheye cannot have; calibrate again")
    fx = math.sqrt(raw.width * raw.height * raw.fx / raw.fy / ((x1 - x0) * (y1 - y0)))
    width, height = max(1, round((x1 - x0) * fx)), max(1, round((y1 - y0) * fx * raw.fy / raw.fx))
    fx, fy = width / (x1 - x0), height / (y1 - y0)
    camera = Camera(width, height, fx, fy, -x0 * fx, -y0 * fy)
    return Rectifier(raw, camera, lambda: _fisheye_maps(raw, camera, angle, bent))


def _bent(D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(angles off the axis [n], what the lens makes of them [n]), both increasing, up to 180 degrees or to where the polynomial turns back."""
    angle = np.linspace(0, math.pi, 8192)
    bent = angle * np.polynomial.polynomial.polyval(angle**2, [1, *D])
    rising = np.diff(bent) > 0
    n = len(angle) if rising.all() else 1 + int(np.argmin(rising))
    return angle[:n], bent[:n]


def _border(camera: Camera) -> tuple[np.ndarray, np.ndarray]:
    """(u, v) of places along the edge of the image, and of those edges' middles: seen from the axis, what is farthest lies there."""
    u, v = np.linspace(0, camera.width, 257), np.linspace(0, camera.height, 257)
    return (np.concatenate([u, u, np.zeros_like(v), np.full_like(v, camera.width), [camera.cx, camera.cx, 0, camera.width]]),
            np.concatenate([np.zeros_like(u), np.full_like(u, camera.height), v, v, [0, camera.height, camera.cy, camera.cy]]))


def _fisheye_maps(raw: Camera, camera: Camera, angle: np.ndarray, bent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    x = ((np.arange(camera.width) + 0.5 - camera.cx) / camera.fx)[None]
    y = ((np.arange(camera.height) + 0.5 - camera.cy) / camera.fy)[:, None]
    r = np.hypot(x, y)
    theta = np.arctan(r)
    scale = np.interp(theta, angle, bent) / np.maximum(r, 1e-12)
    u, v = scale * x * raw.fx + raw.cx - 0.5, scale * y * raw.fy + raw.cy - 0.5
    seen = (theta <= angle[-1]) & (u >= _MARGIN_PX) & (v >= _MARGIN_PX) & (u <= raw.width - 1 - _MARGIN_PX) & (v <= raw.height - 1 - _MARGIN_PX)
    u, v = (np.where(seen, t, -2).astype(np.float32) for t in (u, v))
    return u, v, None if seen.all() else seen.astype(np.uint8)


def _matrix(camera: Camera) -> np.ndarray:
    return np.array([[camera.fx, 0, camera.cx - 0.5], [0, camera.fy, camera.cy - 0.5], [0, 0, 1]])


def info_key(msg: Any) -> tuple:
    """Equal for two CameraInfo messages that describe the same camera: says when a Rectifier can be kept."""
    roi = msg.roi
    return (msg.width, msg.height, msg.distortion_model, *(bytes(np.asarray(v, np.float64)) for v in (msg.k, msg.d, msg.p)),
            msg.binning_x, msg.binning_y, roi.x_offset, roi.y_offset, roi.width, roi.height)
