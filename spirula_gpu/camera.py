"""A pinhole camera and a posed frame: what every image is measured with. Shapes and values are checked once, here."""
from __future__ import annotations

from dataclasses import dataclass, replace

import cv2
import numpy as np


@dataclass(frozen=True)
class Camera:
    """Pinhole intrinsics in pixels. The CENTRE of the first pixel is at (0.5, 0.5), so scaling is exact (gsplat's
    convention; ROS and OpenCV put it at (0, 0): their cx, cy are smaller by 0.5)."""
    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float

    def __post_init__(self):
        if not (self.width > 0 and self.height > 0 and self.width <= 32767 and self.height <= 32767):
            raise ValueError(f"camera size {self.width}x{self.height}: must be 1..32767")
        if not (np.isfinite([self.fx, self.fy, self.cx, self.cy]).all() and self.fx > 0 and self.fy > 0):
            raise ValueError(f"focal lengths fx={self.fx}, fy={self.fy}: must be positive and finite; is the camera calibrated?")

    @property
    def K(self) -> np.ndarray:
        """[3, 3] float32."""
        return np.array([[self.fx, 0, self.cx], [0, self.fy, self.cy], [0, 0, 1]], np.float32)

    def resized(self, width: int, height: int) -> "Camera":
        """The camera whose image is this one's, resampled to width x height."""
        sx, sy = width / self.width, height / self.height
        return replace(self, width=width, height=height, fx=self.fx * sx, fy=self.fy * sy, cx=self.cx * sx, cy=self.cy * sy)


DEPTH_STEP = 0.02   # spread of depths, as a share of it, beyond which a pixel covers a step
MAX_M = 1e5  # of a coordinate: there the map's float32 is exact to 4 mm


@dataclass(frozen=True)
class Frame:
    """One posed image. rgb [H,W,3] uint8; depth_m [H,W] float32, camera z in metres, 0 = unknown, or None; samples of a lidar, with gaps between
    them, are depth too (points.fill);
    T_world_cam [4,4] float64, camera axes x right, y down, z forward; held_out: only ever used to measure the map;
    mask [H,W] uint8, 0 = what is seen there is not of the scene (a person, the robot itself), or None;
    sensor: which camera of the robot took it; lap: how often the clock of the stamps had been restarted before."""
    stamp_ns: int
    camera: Camera
    T_world_cam: np.ndarray
    rgb: np.ndarray
    depth_m: np.ndarray | None = None
    held_out: bool = False
    frame_id: str = "camera"
    mask: np.ndarray | None = None
    sensor: int = 0
    lap: int = 0

    def __post_init__(self):
        size = (self.camera.height, self.camera.width)
        if self.rgb.shape != (*size, 3) or self.rgb.dtype != np.uint8:
            raise ValueError(f"rgb is {self.rgb.dtype} {self.rgb.shape}, the camera says uint8 {(*size, 3)}")
        if self.depth_m is not None and (self.depth_m.shape != size or self.depth_m.dtype != np.float32):
            raise ValueError(f"depth_m is {self.depth_m.dtype} {self.depth_m.shape}, the camera says float32 {size}")
        if self.mask is not None and (self.mask.shape != size or self.mask.dtype != np.uint8):
            raise ValueError(f"mask is {self.mask.dtype} {self.mask.shape}, the camera says uint8 {size}")
        R = self.T_world_cam[:3, :3]
        if self.T_world_cam.shape != (4, 4) or not np.isfinite(self.T_world_cam).all():
            raise ValueError("T_world_cam must be a finite 4x4 matrix")
        if np.abs(R @ R.T - np.eye(3)).max() > 1e-3 or np.linalg.det(R) < 0:
            raise ValueError("T_world_cam: the rotation is not orthonormal to 1e-3")
        if np.abs(self.T_world_cam[:3, 3]).max() > MAX_M:
            raise ValueError(f"T_world_cam: {self.T_world_cam[:3, 3].tolist()} is more than {MAX_M:g} m from the map's origin; the map needs one nearby")

    @property
    def moment(self) -> tuple[int, int, int]:
        """(lap, stamp in ns, sensor): no two frames share it."""
        return self.lap, self.stamp_ns, self.sensor

    @property
    def T_cam_world(self) -> np.ndarray:
        """[4, 4] float32."""
        R, t = self.T_world_cam[:3, :3], self.T_world_cam[:3, 3]
        out = np.eye(4)
        out[:3, :3], out[:3, 3] = R.T, -R.T @ t
        return out.astype(np.float32)

    def resized(self, width: int, height: int) -> "Frame":
        """The frame at another size: means of the image's pixels when it gets smaller, and of its depth where it has no step there; single values of the mask."""
        if (width, height) == (self.camera.width, self.camera.height):
            return self
        small = lambda x, how: None if x is None else cv2.resize(x, (width, height), interpolation=how)
        return replace(self, camera=self.camera.resized(width, height), rgb=small(self.rgb, cv2.INTER_AREA), depth_m=None if self.depth_m is None else resized_depth(self.depth_m, width, height),
                       mask=small(self.mask, cv2.INTER_NEAREST))


def resized_depth(depth_m: np.ndarray, width: int, height: int) -> np.ndarray:
    """[height,width] of [H,W] float32, 0 = unknown. Smaller: the mean of what a pixel covers, which lies at its middle as its colour does, where all of that is known and within
    DEPTH_STEP of it; else one value."""
    if width > depth_m.shape[1] or height > depth_m.shape[0]:
        return cv2.resize(depth_m, (width, height), interpolation=cv2.INTER_NEAREST)
    mean, square, known = (cv2.resize(x, (width, height), interpolation=cv2.INTER_AREA) for x in (depth_m, depth_m * depth_m, (depth_m > 0).astype(np.float32)))
    smooth = (known > 0.999) & (square - mean * mean < (DEPTH_STEP * mean) ** 2)
    return np.where(smooth, mean, cv2.resize(depth_m, (width, height), interpolation=cv2.INTER_NEAREST_EXACT))
