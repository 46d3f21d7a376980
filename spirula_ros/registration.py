"""Depth seen from another camera, and images at another size: plain numpy, no loops over pixels."""
from __future__ import annotations

import cv2
import numpy as np

from spirula_gpu.camera import Camera


def register_depth(depth_m: np.ndarray, depth_camera: Camera, color_camera: Camera, T_color_depth: np.ndarray) -> np.ndarray:
    """Depth of one camera as another that sees the same sees it: forward projection with a z-buffer (nearest wins).

    depth_m [h,w] float32, z in metres, 0 = unknown; T_color_depth [4,4], metres: maps points from the axes of the depth camera to those of the other.
    Returns [H,W] float32 of `color_camera`, 0 where the depth camera saw nothing.
    Every depth pixel covers its own footprint plus a quarter of a pixel all round, so that a surface whose projection
    stretches up to half a pixel more than on average still has no cracks.
    """
    v, u = np.nonzero(depth_m > 0)
    z = depth_m[v, u]
    ray_x, ray_y = (((np.arange(n) + 0.5 - c) / f).astype(np.float32) for n, c, f in
                    ((depth_camera.width, depth_camera.cx, depth_camera.fx), (depth_camera.height, depth_camera.cy, depth_camera.fy)))
    seen = np.stack([ray_x[u] * z, ray_y[v] * z, z])
    R, t = np.asarray(T_color_depth, np.float32)[:3, :3], np.asarray(T_color_depth, np.float32)[:3, 3:]
    x, y, z_new = R @ seen + t
    front = z_new > 1e-3
    if not front.all():
        x, y, z, z_new = x[front], y[front], z[front], z_new[front]

    out = np.full((color_camera.height, color_camera.width), np.inf, np.float32)
    wide, high = (0.5 * np.abs(R[:2, :2]) @ [1 / depth_camera.fx, 1 / depth_camera.fy]).tolist()  # half a pixel of the depth camera, at a metre, along the other's axes
    zoom = z / z_new
    u0, u1 = _centres_within(color_camera.fx * x / z_new + color_camera.cx, zoom * (wide * color_camera.fx) + 0.25)
    v0, v1 = _centres_within(color_camera.fy * y / z_new + color_camera.cy, zoom * (high * color_camera.fy) + 0.25)
    for dv in range(int((v1 - v0).max(initial=-1)) + 1):
        for du in range(int((u1 - u0).max(initial=-1)) + 1):
            uu, vv = u0 + du, v0 + dv
            ok = (uu <= u1) & (vv <= v1) & (uu >= 0) & (vv >= 0) & (uu < color_camera.width) & (vv < color_camera.height)
            np.minimum.at(out.reshape(-1), vv[ok].astype(np.intp) * color_camera.width + uu[ok], z_new[ok])  # flat: numpy's fast way
    out[np.isinf(out)] = 0
    return out


def _centres_within(centre: np.ndarray, half: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last pixel whose centre (i + 0.5) lies in [centre - half, centre + half]."""
    return np.ceil(centre - half - 0.5).astype(np.int32), np.floor(centre + half - 0.5).astype(np.int32)


def shrink_color(rgb: np.ndarray, width: int, height: int) -> np.ndarray:
    """[H,W,3] uint8 -> [height,width,3] uint8, the mean over the area of each new pixel."""
    return rgb if rgb.shape[:2] == (height, width) else cv2.resize(rgb, (width, height), interpolation=cv2.INTER_AREA)


def shrink_depth(depth_m: np.ndarray, width: int, height: int) -> np.ndarray:
    """[H,W] float32 -> [height,width] float32: for every new pixel, ONE of the valid samples it covers (the lower median).

    A sample that was measured, not a mean: across an edge a mean is a surface that does not exist. The median of a slanted
    surface is its depth in the middle of the block, and across an edge it takes the side that fills most of the pixel,
    as the colour does. 0 where no sample is valid.
    """
    h, w = depth_m.shape
    if (h, w) == (height, width):
        return depth_m
    rows, cols = _samples(h, height), _samples(w, width)
    block = depth_m[rows[:, None, :, None], cols[None, :, None, :]].reshape(height, width, -1)
    valid = block > 0
    ordered = np.sort(np.where(valid, block, np.inf), axis=-1)
    middle = np.maximum(valid.sum(-1) - 1, 0) // 2
    picked = np.take_along_axis(ordered, middle[..., None], -1)[..., 0]
    return np.where(valid.any(-1), picked, 0).astype(np.float32)


def _samples(size: int, new_size: int) -> np.ndarray:
    """[new_size, k]: the source pixels that each of the new pixels covers (k evenly spaced ones, nearest pixel)."""
    k = -(-size // new_size)
    at = (np.arange(new_size)[:, None] + (np.arange(k)[None] + 0.5) / k) * (size / new_size)
    return np.minimum(at.astype(np.intp), size - 1)
