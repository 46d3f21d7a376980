"""Posed images from what people have: a COLMAP project, a folder of 7-Scenes or TUM, a packed scene."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Callable

import cv2
import numpy as np

from spirula_gpu.dataset import MM_PER_M, Scene, SceneError, read_colmap

from . import rgbd
from .errors import InputError
from .progress import Progress

KINDS = "a COLMAP project (images/ and sparse/0/), a folder of 7-Scenes (frame-NNNNNN.color.jpg|png ..) or TUM (rgb.txt ..), or a packed scene (.npz)"
PNG_LEVEL = 1  # of depth: 9 takes 36 times as long (0.44 s for 640x480) for 27 % fewer bytes


def read_scene(data: str, *, say: Callable[[str], None] = print, **rig) -> Scene:
    """`data` is one of KINDS; rig: as of `read_rgbd`. Raises InputError."""
    path, given = Path(data), [name for name, value in rig.items() if value is not None and any(np.atleast_1d(value))]
    if not path.exists():
        raise InputError(f"{data}: does not exist")
    try:
        if path.is_dir() and not (path / "sparse").is_dir():
            if not rgbd.layout_of(path):
                raise InputError(f"{data}: not {KINDS}")
            return read_rgbd(path, say=say, **rig)
        if given:
            raise InputError(f"--{given[0].replace('_', '-')} is for folders of 7-Scenes and TUM: {data} says itself what its cameras are")
        if path.is_dir():
            return read_colmap(path)
        if path.suffix != ".npz":
            raise InputError(f"{data}: not {KINDS}")
        return Scene.load(path)
    except SceneError as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"{error.filename or data}: {error.strerror or error}") from None


def read_rgbd(root: Path, *, intrinsics: tuple[float, ...] | None = None, color_f: float | None = None, color_intrinsics: tuple[float, ...] | None = None,
              color_offset: tuple[float, ...] = (0.0, 0.0, 0.0), say: Callable[[str], None] = print) -> Scene:
    """A 7-Scenes or TUM folder; depth is registered to the colour camera here. Intrinsics are (fx, fy, cx, cy), as in `rgbd.make_bag`. Raises InputError."""
    layout = rgbd.find_layout(root)
    items = rgbd.read_items(root, layout, say=say)
    rig = rgbd.find_rig(root, layout, items[0], intrinsics, color_f, color_intrinsics, color_offset)
    depths, poses = [], []
    with Progress(len(items), sys.stderr, lambda: f"{len(poses)}/{len(items)} images read") as progress:
        for item in items:
            _, depth_m, T_world_color = rgbd.read_frame(item, rig, rgbd.UNITS_PER_M[layout])
            mm = np.round(depth_m * MM_PER_M)
            depths.append(cv2.imencode(".png", np.where(mm <= 65534, mm, 0).astype(np.uint16), [cv2.IMWRITE_PNG_COMPRESSION, PNG_LEVEL])[1].tobytes())
            poses.append(T_world_color)
            progress.show(1)
    return Scene(tuple(item.color.name for item in items), (rig.color,) * len(items), np.array(poses),
                 tuple(item.color.read_bytes() for item in items), tuple(depths))
