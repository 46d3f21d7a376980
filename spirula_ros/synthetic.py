"""`spirula bag synthetic`: a small furnished room, ray cast exactly, with its ground truth.

Every surface is a patch with a texture in linear light: albedo (drawn) times irradiance (baked once from two soft lamps, a window
and the sky of open space around it). Frames are then a ray cast, a filtered texture lookup, and the sRGB curve, so
that what a camera sees does not depend on where it stands, as the map assumes, and depth is exact.
"""
from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np

from spirula_gpu.camera import Camera

from .errors import InputError
from .room import Room

SUPERSAMPLES = 3  # per axis; odd: the middle one is the pixel's centre, whose depth is the pixel's depth
TILE_PX = 40
HORIZONTAL_FOV_DEG = 75.0
LIDAR_SPAN_DEG, LIDAR_STEP_DEG = 60.0, 0.5  # between the outer lines; from one measurement of a line to the next
T_CAMERA_LIDAR = np.array([[0, -1, 0, 0.05], [0, 0, -1, -0.12], [1, 0, 0, -0.04], [0, 0, 0, 1]])  # it stands above the camera


@dataclass(frozen=True)
class View:
    """rgb [H,W,3] uint8 (sRGB), depth_m [H,W] float32 (camera z, exact, everywhere), T_world_cam [4,4] float64."""
    rgb: np.ndarray
    depth_m: np.ndarray
    T_world_cam: np.ndarray


def make_bag(out: str, *, frames: int = 150, size: tuple[int, int] = (160, 120), fps: float = 15.0, seed: int = 0,
             storage: str = "mcap", lines: int | None = None, say: Callable[[str], None] = print) -> int:
    """lines: the points of a lidar with so many lines instead of depth images. Writes the bag `out` and `out`.truth.npz (camera, poses, and points on the true surfaces). Raises InputError."""
    from .bags import BagWriter
    from .rgbd import COLOR_FRAME, FIRST_STAMP_NS, write_color
    if frames < 2:
        raise InputError(f"--frames {frames}: at least 2")
    camera = room_camera(*size)
    poses = trajectory(frames)
    stamps = [FIRST_STAMP_NS + round(i * 1e9 / fps) for i in range(frames)]
    points = []
    with BagWriter(out, storage) as bag, ThreadPoolExecutor(os.cpu_count()) as pool:
        room = Room(seed)
        views = pool.map(lambda T: render(room, camera, T), poses)
        if lines:
            bag.tf(stamps[0], COLOR_FRAME, "lidar", T_CAMERA_LIDAR, static=True)
        for n, (stamp, view) in enumerate(zip(stamps, views), 1):
            write_color(bag, stamp, camera, view.rgb, view.T_world_cam)
            if lines:
                bag.points("/lidar/points", stamp, "lidar", scan(room, view.T_world_cam @ T_CAMERA_LIDAR, lines))
            else:
                bag.depth("/camera/depth/image_raw", stamp, COLOR_FRAME, view.depth_m)
            points.append(surface_points(camera, view, stride=8))
            if n % 50 == 0:
                say(f"{n}/{frames} frames")
    truth = Path(f"{str(out).rstrip('/')}.truth.npz")
    np.savez_compressed(truth, stamps_ns=np.array(stamps), T_world_cam=np.array(poses), K=camera.K, size=np.array(size),
                        points=np.concatenate(points).astype(np.float32))
    say(f"{out}: {frames} frames, {size[0]}x{size[1]}, {storage}; truth in {truth}")
    return frames


def room_camera(width: int, height: int) -> Camera:
    f = 0.5 * width / np.tan(np.radians(HORIZONTAL_FOV_DEG) / 2)
    return Camera(width, height, f, f, width / 2, height / 2)


def trajectory(frames: int) -> list[np.ndarray]:
    """T_world_cam [4,4] of a walk: a bit more than once around a closed loop, so that the end sees the beginning again.
    World: z up, metres. The camera looks across the loop's centre at the far side of the room, swaying and nodding."""
    poses = []
    for s in np.arange(frames) / (frames - 1) * 1.12:
        a = 2 * np.pi * s
        eye = np.array([1.25 * np.cos(a), 0.95 * np.sin(a), 1.45 + 0.22 * np.sin(2 * a + 0.5)])
        yaw = a + np.pi + 0.35 * np.sin(3 * a)
        pitch = np.radians(-12 + 11 * np.sin(2 * a - 0.4))
        poses.append(look_along(eye, [np.cos(yaw) * np.cos(pitch), np.sin(yaw) * np.cos(pitch), np.sin(pitch)]))
    return poses


def look_along(eye: np.ndarray, forward: np.ndarray) -> np.ndarray:
    """T_world_cam of a level camera at `eye` (world, z up) looking along `forward`; axes x right, y down, z forward."""
    z = np.asarray(forward, np.float64) / np.linalg.norm(forward)
    x = np.cross(z, [0, 0, 1])
    x /= np.linalg.norm(x)
    T = np.eye(4)
    T[:3, 0], T[:3, 1], T[:3, 2], T[:3, 3] = x, np.cross(z, x), z, eye
    return T


def render(room: Room, camera: Camera, T_world_cam: np.ndarray, supersamples: int = SUPERSAMPLES) -> View:
    """One exact view: supersamples**2 rays a pixel, averaged in linear light; tile by tile, as few solids are in a tile."""
    linear = np.empty((camera.height, camera.width, 3), np.float32)
    depth_m = np.empty((camera.height, camera.width), np.float32)
    for y in range(0, camera.height, TILE_PX):
        for x in range(0, camera.width, TILE_PX):
            tile = np.s_[y:y + TILE_PX, x:x + TILE_PX]
            linear[tile], depth_m[tile] = _render_tile(room, camera, T_world_cam, tile, supersamples)
    return View(to_srgb(linear), depth_m, T_world_cam)


def scan(room: Room, T_world_lidar: np.ndarray, lines: int) -> np.ndarray:
    """[P,3] float32, m, in the lidar (x forward, y left, z up): one exact revolution of `lines` lines over LIDAR_SPAN_DEG."""
    up = np.radians(np.linspace(-LIDAR_SPAN_DEG / 2, LIDAR_SPAN_DEG / 2, lines))[:, None]
    points = []
    for side in range(0, 360, 45):  # Room.cast looks for solids in a cone around its rays
        turn = np.radians(side + np.arange(0, 45, LIDAR_STEP_DEG))[None]
        rays = np.stack(np.broadcast_arrays(np.cos(up) * np.cos(turn), np.cos(up) * np.sin(turn), np.sin(up))).reshape(3, -1)
        hit = room.cast(T_world_lidar[:3, 3], (T_world_lidar[:3, :3] @ rays).astype(np.float32))
        points.append((rays * hit.t).T)
    return np.concatenate(points).astype(np.float32)


def _render_tile(room: Room, camera: Camera, T_world_cam: np.ndarray, tile: tuple[slice, slice], n: int) -> tuple[np.ndarray, np.ndarray]:
    y0, y1, _ = tile[0].indices(camera.height)
    x0, x1, _ = tile[1].indices(camera.width)
    h, w = y1 - y0, x1 - x0
    u, v = np.meshgrid(x0 + (np.arange(w * n) + 0.5) / n, y0 + (np.arange(h * n) + 0.5) / n)
    rays = np.stack([(u - camera.cx) / camera.fx, (v - camera.cy) / camera.fy, np.ones_like(u)]).reshape(3, -1)
    directions = (T_world_cam[:3, :3] @ rays).astype(np.float32)  # camera z = 1: the ray parameter IS the depth
    hit = room.cast(T_world_cam[:3, 3], directions)
    linear = room.color(hit, directions, pixel=1 / (n * camera.fx)).reshape(h, n, w, n, 3).mean((1, 3))
    return linear, hit.t.reshape(h, n, w, n)[:, n // 2, :, n // 2]


def to_srgb(linear: np.ndarray) -> np.ndarray:
    """Linear light -> uint8, with a soft shoulder (Reinhard with white at 2.5) so that lamps do not clip hard; IEC 61966-2-1."""
    x = np.clip(linear * (1 + linear / 2.5**2) / (1 + 0.35 * linear), 0, 1)
    return np.round(255 * np.where(x <= 0.0031308, 12.92 * x, 1.055 * np.maximum(x, 1e-9) ** (1 / 2.4) - 0.055)).astype(np.uint8)


def surface_points(camera: Camera, view: View, stride: int) -> np.ndarray:
    """[n,3] points in the world on every stride-th pixel's surface."""
    v, u = np.mgrid[stride // 2:camera.height:stride, stride // 2:camera.width:stride]
    z = view.depth_m[v, u].ravel().astype(np.float64)
    x, y = (u.ravel() + 0.5 - camera.cx) / camera.fx * z, (v.ravel() + 0.5 - camera.cy) / camera.fy * z
    return np.stack([x, y, z], -1) @ view.T_world_cam[:3, :3].T + view.T_world_cam[:3, 3]
