"""Poses as files: TUM (one line a frame) and COLMAP (cameras and images, which trainers and COLMAP itself read)."""
from __future__ import annotations

import os
from typing import Iterable, Sequence

import numpy as np

from .camera import Camera, Frame
from .correct import quats_of
from .ply import write_atomically
from .splats import FormatError

Posed = tuple[int, Camera, np.ndarray]  # stamp_ns, camera, T_world_cam [4,4]; camera axes x right, y down, z forward


def write_poses(path: str | os.PathLike, posed: Iterable[Posed], names: Sequence[str] | None = None) -> int:
    """`path` with .txt: TUM; without a suffix, or ending in /: a folder with a COLMAP model as text, its images called `names` or <stamp_ns>.png. Returns how many poses.
    Raises FormatError for another suffix or no poses, OSError."""
    posed, path = list(posed), os.fspath(path)
    suffix = "" if path.endswith("/") else os.path.splitext(path)[1]
    if suffix not in ("", ".txt"):
        raise FormatError(f"{path}: poses are written to a .txt (TUM) or a folder (COLMAP), not to {suffix}")
    if not posed:
        raise FormatError(f"{path} was not touched: there are no poses")
    if suffix:
        _write_tum(path, posed)
    else:
        _write_colmap(path, posed, names or [f"{stamp_ns}.png" for stamp_ns, _, _ in posed])
    return len(posed)


def write_poses_of(path: str | os.PathLike, frames: Sequence[Frame]) -> int:
    """As write_poses, of frames of one or several cameras. TUM: a file has the poses of one camera, <name>.camera1.txt those of the second, and so on; COLMAP: images are
    called camera1/<stamp_ns>.png then, and lap1/.. after a restart of the clock."""
    sensors, path, suffix = sorted({f.sensor for f in frames}), os.fspath(path), os.path.splitext(path)[1]
    if suffix and len(sensors) > 1:
        of = {sensor: [f for f in frames if f.sensor == sensor] for sensor in sensors}
        return sum(write_poses_of(path if sensor == sensors[0] else f"{path.removesuffix(suffix)}.camera{sensor}{suffix}", of[sensor]) for sensor in sensors)
    name = lambda f: (f"lap{f.lap}/" if f.lap else "") + (f"camera{f.sensor}/" if f.sensor else "") + f"{f.stamp_ns}.png"
    return write_poses(path, [(f.stamp_ns, f.camera, f.T_world_cam) for f in frames], list(map(name, frames)))


def _write_tum(path: str, posed: list[Posed]) -> None:
    lines = ["# stamp tx ty tz qx qy qz qw: T_world_cam, metres; camera axes x right, y down, z forward"]
    for stamp_ns, _, T in posed:
        q = np.roll(quats_of(T[None, :3, :3])[0], -1)
        lines.append(f"{stamp_ns // 10**9}.{stamp_ns % 10**9:09d} " + _numbers([*T[:3, 3], *q]))
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def _write_colmap(folder: str, posed: list[Posed], names: Sequence[str]) -> None:
    """cameras.txt, images.txt (world to camera) and a points3D.txt without points. COLMAP has the centre of the first pixel
    at (0.5, 0.5), as Camera."""
    os.makedirs(folder, exist_ok=True)
    ids: dict[Camera, int] = {}
    images = ["# IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME, then a line of observations (none)"]
    for n, ((_, camera, T), name) in enumerate(zip(posed, names, strict=True), 1):
        T_cam_world = np.linalg.inv(T)
        q = quats_of(T_cam_world[None, :3, :3])[0]
        images += [f"{n} {_numbers([*q, *T_cam_world[:3, 3]])} {ids.setdefault(camera, len(ids) + 1)} {name}", ""]
    cameras = ["# CAMERA_ID MODEL WIDTH HEIGHT fx fy cx cy", *(f"{id} PINHOLE {c.width} {c.height} {_numbers([c.fx, c.fy, c.cx, c.cy])}" for c, id in ids.items())]
    for name, lines in (("cameras", cameras), ("images", images), ("points3D", ["# no points"])):
        write_atomically(os.path.join(folder, f"{name}.txt"), ("\n".join(lines) + "\n").encode())


def _numbers(values: Iterable[float]) -> str:
    return " ".join(f"{v:.17g}" for v in values)
