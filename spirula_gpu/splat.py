"""antimatter15's .splat: 32 bytes a Gaussian and no header. Described by the conversion script of github.com/antimatter15/splat (MIT).

    float32 x 3  mean, m          uint8 x 4  red green blue opacity, 255 = 1
    float32 x 3  scale, m         uint8 x 4  quaternion wxyz, (byte - 128) / 128
"""
from __future__ import annotations

import os
from typing import Iterator

import numpy as np

from .splats import SH0, FormatError, Splats, as_byte, colors, logits_of_bytes, opacities, unit

RECORD = np.dtype([("mean", "<f4", 3), ("scale", "<f4", 3), ("rgb", "u1", 3), ("opacity", "u1"), ("quat", "u1", 4)])


def pack_splat(splats: Splats) -> Iterator[bytes]:
    for s in splats.blocks():
        rows = np.empty(len(s.means), RECORD)
        rows["mean"], rows["scale"] = s.means, np.exp(s.log_scales)
        rows["rgb"], rows["opacity"] = as_byte(255 * colors(s)), as_byte(255 * opacities(s))
        q = unit(s.quats)
        rows["quat"] = as_byte(128 + 128 * np.where(np.take_along_axis(q, np.abs(q).argmax(1)[:, None], 1) > 0, -q, q))  # -1 has a byte, 1 has none
        yield rows.tobytes()


def read_splat(path: str | os.PathLike) -> Splats:
    """SH degree 0. Raises FormatError, OSError."""
    size = os.path.getsize(path)
    if not size or size % RECORD.itemsize:
        raise FormatError(f"{path}: {size} bytes: a .splat file has {RECORD.itemsize} for each Gaussian and nothing else; was it cut short?")
    rows = np.fromfile(path, RECORD)
    with np.errstate(divide="ignore", invalid="ignore"):  # a scale of 0 or below is none: Splats.finite tells
        log_scales = np.log(rows["scale"])
    quats = unit((rows["quat"].astype(np.float32) - 128) / 128).astype(np.float32)
    sh = ((rows["rgb"] / np.float32(255) - np.float32(0.5)) / np.float32(SH0))[:, None]
    return Splats(rows["mean"].copy(), quats, log_scales, logits_of_bytes(rows["opacity"]), sh)
