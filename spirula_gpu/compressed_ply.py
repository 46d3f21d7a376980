"""PlayCanvas' compressed .ply: 16 bytes a Gaussian, and one for each SH coefficient. As splat-transform (MIT) reads and writes it.

    element chunk   for every 256 Gaussians: float min and max of the means, the log scales (within +-20) and the colours
    element vertex  uint x 4: mean 11 10 11 bits and log scale 11 10 11 bits between the chunk's limits; rotation: index of the largest of
                    w x y z, 10 bits for each of the others; colour 8 8 8 bits between the chunk's limits and opacity 8 bits
    element sh      uchar for each of f_rest_*, channel after channel: 256 * (coefficient / 8 + 1/2), rounded down

Gaussians are written along a Z-order curve: the nearer those of a chunk are, the finer its steps.
"""
from __future__ import annotations

import os
from typing import Iterator

import numpy as np

from .ply import Element, header, read_header, read_table, says_antialiased
from .splats import SH0, FormatError, Splats, as_byte, colors, logits_of_bytes, opacities, unit, with_largest, without_largest

CHUNK = 256
LIMITS = [f"{end}_{name}" for group in ("", "scale_") for end in ("min", "max") for name in (group + axis for axis in "xyz")]
COLOR_LIMITS = [f"{end}_{channel}" for end in ("min", "max") for channel in "rgb"]
PACKED = ["packed_position", "packed_rotation", "packed_scale", "packed_color"]
MAX_LOG_SCALE = 20
BITS, SHIFTS = np.array([11, 10, 11]), np.array([21, 11, 0])


# ---- writing ---------------------------------------------------------------------------------------------------------------------

def pack_compressed_ply(splats: Splats) -> Iterator[bytes]:
    """Raises FormatError above SH degree 3."""
    if splats.degree > 3:
        raise FormatError(f"SH degree {splats.degree} > 3: cut it with --sh-degree")
    splats = splats.chosen(z_order(splats.means))
    n, rest = len(splats.means), 3 * (splats.sh.shape[1] - 1)
    elements = [("chunk", -(-n // CHUNK), [("float", name) for name in LIMITS + COLOR_LIMITS]), ("vertex", n, [("uint", name) for name in PACKED])]
    yield header(*elements, *([("sh", n, [("uchar", f"f_rest_{i}") for i in range(rest)])] if rest else []), antialiased=splats.antialiased)
    columns = (splats.means, np.clip(splats.log_scales, -MAX_LOG_SCALE, MAX_LOG_SCALE), colors(splats))
    ends = [_ends(x) for x in columns]
    yield np.concatenate([x for low_high in ends for x in low_high], 1).astype("<f4").tobytes()
    mean, scale, rgb = (_share(x, *low_high) for x, low_high in zip(columns, ends))
    alpha = as_byte(255 * opacities(splats))
    yield np.stack([_words(mean), _rotation(splats.quats), _words(scale), _rgba(rgb, alpha)], 1).astype("<u4").tobytes()
    if rest:
        yield np.clip(np.floor(256 * (splats.sh[:, 1:] / 8 + 0.5)), 0, 255).astype(np.uint8).transpose(0, 2, 1).tobytes()


def z_order(means: np.ndarray) -> np.ndarray:
    """[N]: indices along a Z-order curve of 1024 cells an axis (a Gaussian that is not finite comes first)."""
    if not len(means):
        return np.empty(0, int)
    low, high = means.min(0), means.max(0)
    cells = np.clip((means - low) / np.maximum(high - low, 1e-30) * 1024, 0, 1023).astype(np.uint32)
    code = np.zeros(len(means), np.uint32)
    for bit in range(10):
        for axis in range(3):
            code |= (cells[:, axis] >> bit & 1) << (3 * bit + axis)
    return np.argsort(code, kind="stable")


def _ends(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[chunks,3] each: the least and the greatest of every chunk."""
    if not len(x):
        return x, x
    starts = np.arange(0, len(x), CHUNK)
    return np.minimum.reduceat(x, starts), np.maximum.reduceat(x, starts)


def _share(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """[N,3], 0..1: where x lies between the limits of its chunk."""
    low, high = (np.repeat(e.astype(np.float64), CHUNK, 0)[:len(x)] for e in (low, high))
    return (x - low) / np.where(high > low, high - low, 1)


def _words(share: np.ndarray) -> np.ndarray:
    return (np.rint(share * ((1 << BITS) - 1)).astype(np.uint32) << SHIFTS.astype(np.uint32)).sum(1, dtype=np.uint32)


def _rotation(quats: np.ndarray) -> np.ndarray:
    largest, others = without_largest(unit(quats))
    f = np.rint(np.clip(others / np.sqrt(2) + 0.5, 0, 1) * 1023).astype(np.uint32)
    return largest.astype(np.uint32) << 30 | f[:, 0] << 20 | f[:, 1] << 10 | f[:, 2]


def _rgba(rgb: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    r, g, b = as_byte(255 * rgb).T.astype(np.uint32)
    return r << 24 | g << 16 | b << 8 | alpha


# ---- reading ---------------------------------------------------------------------------------------------------------------------

def is_compressed(elements: list[Element]) -> bool:
    return elements[0].name == "chunk"


def read_compressed_ply(path: str | os.PathLike) -> Splats:
    """In the file's order. Raises FormatError, OSError."""
    with open(path, "rb") as file:
        elements = read_header(file, path)
        _check(path, elements)
        chunks, rows, *sh = (read_table(file, path, element) for element in elements)
    at = np.arange(len(rows)) // CHUNK
    columns = lambda names: np.stack([chunks[name] for name in names], 1)[at].astype(np.float64)
    mean, scale = ((rows[name][:, None] >> SHIFTS.astype(np.uint32) & ((1 << BITS) - 1).astype(np.uint32)) / ((1 << BITS) - 1) for name in ("packed_position", "packed_scale"))
    mean, scale = (columns(L[:3]) * (1 - share) + columns(L[3:]) * share for L, share in ((LIMITS[:6], mean), (LIMITS[6:], scale)))
    rgba = (rows["packed_color"][:, None] >> np.array([24, 16, 8, 0], np.uint32) & 255)
    rgb = rgba[:, :3] / 255
    if COLOR_LIMITS[0] in chunks.dtype.names:
        rgb = columns(COLOR_LIMITS[:3]) * (1 - rgb) + columns(COLOR_LIMITS[3:]) * rgb
    harmonics = ((rgb - 0.5) / SH0)[:, None]
    if sh:
        harmonics = np.concatenate([harmonics, _harmonics(sh[0])], 1)
    return Splats(mean.astype(np.float32), _quats(rows["packed_rotation"]), scale.astype(np.float32), logits_of_bytes(rgba[:, 3]), harmonics.astype(np.float32),
                  says_antialiased(path))


def _check(path, elements: list[Element]) -> None:
    names = [e.name for e in elements]
    if names not in (["chunk", "vertex"], ["chunk", "vertex", "sh"]) or any(e.dtype is None for e in elements):
        raise FormatError(f"{path}: not a compressed .ply: its elements are {', '.join(names[:5])}, must be chunk, vertex and perhaps sh, without lists")
    for element, kind, allowed in zip(elements, ("<f4", "<u4", "u1"), ((LIMITS, LIMITS + COLOR_LIMITS), (PACKED,), [[f"f_rest_{i}" for i in range(n)] for n in (9, 24, 45)])):
        if not any(element.dtype == np.dtype([(name, kind) for name in these]) for these in allowed):
            raise FormatError(f"{path}: element {element.name} has other properties than a compressed .ply: {', '.join(element.dtype.names[:4])} ..")
    n = elements[1].count
    if elements[0].count != -(-n // CHUNK) or elements[-1].count != n:
        raise FormatError(f"{path}: damaged: {n} Gaussians need {-(-n // CHUNK)} chunks and, if there is sh, {n} rows of it, "
                          f"not {elements[0].count} and {elements[-1].count}")


def _quats(words: np.ndarray) -> np.ndarray:
    fields = words[:, None] >> np.array([20, 10, 0], np.uint32) & 1023
    return unit(with_largest((words >> 30).astype(np.int64), (fields / 1023 - 0.5) * np.sqrt(2))).astype(np.float32)


def _harmonics(rows: np.ndarray) -> np.ndarray:
    """[N,K-1,3]. A byte stands for the middle of what it was rounded down from; the outermost two for the ends."""
    x = rows.view(np.uint8).reshape(len(rows), 3, len(rows.dtype.names) // 3).transpose(0, 2, 1)
    return 8 * (np.where(x == 0, 0, np.where(x == 255, 1, (x + 0.5) / 256)) - 0.5)
