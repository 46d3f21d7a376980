"""Depth of sensor_msgs/Image and of image_transport's compressedDepth (png, rvl) -> metres.

compressedDepth (compressed_depth_image_transport): 12 bytes ConfigHeader {int32 format, float32 a, float32 b}, then 16-bit codes. 16UC1: the codes are the depth;
32FC1: depth = a / (code - b), code 0 = unknown."""
from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .encodings import bytes_of, decompressed, pixels_of
from .errors import BadMessage

MAX_RVL_PIXELS = 1 << 26  # 8192 x 8192; the message itself says how many there are, and they are allocated
_HEADER, _SIZE = 12, 8    # bytes of ConfigHeader, and of rvl's two uint32 width, height
_MAX_NIBBLES = 11         # of a 32-bit number, 3 bits each
_PNG = b"\x89PNG"


def depth_to_m(msg: Any, unit_m: float = 0.001) -> np.ndarray:
    """[H,W] float32, metres along the camera's z, 0 = unknown (REP-118). 32FC1 is metres; 16UC1 and mono16 count in `unit_m`, 0 and 65535 unknown; NaN,
    infinite and negative depth is unknown. A CompressedImage holds a 16-bit png, a float tiff, or compressedDepth (png or rvl of 16UC1, mono16, 32FC1).
    Raises BadMessage: unknown_encoding, bad_image_size, bad_image_data."""
    if hasattr(msg, "format"):
        return _compressed_to_m(msg, unit_m)
    if msg.encoding in ("16UC1", "mono16"):
        return _counts_to_m(pixels_of(msg, np.uint16, 1), unit_m)
    if msg.encoding == "32FC1":
        return _known(pixels_of(msg, np.float32, 1))
    raise BadMessage("unknown_encoding", f"depth encoding '{msg.encoding}' is not supported; use 32FC1 (m), 16UC1 or mono16 (mm); is it a depth topic?")


def _counts_to_m(raw: np.ndarray, unit_m: float) -> np.ndarray:
    depth_m = raw.astype(np.float32)
    depth_m *= unit_m
    depth_m[raw == 65535] = 0
    return depth_m


def _known(depth_m: np.ndarray) -> np.ndarray:
    return np.where((depth_m > 0) & (depth_m < np.inf), depth_m, np.float32(0))  # NaN fails both


def _compressed_to_m(msg: Any, unit_m: float) -> np.ndarray:
    data, name = bytes_of(msg.data), msg.format.partition(";")[0].strip()
    rvl = "rvl" in msg.format.lower()
    with_header = rvl or data[_HEADER:_HEADER + 4].tobytes() == _PNG
    if rvl:
        raw = rvl_decoded(data[_HEADER:])
    else:
        raw = decompressed(msg, _HEADER if with_header else 0)
    if raw.ndim == 2 and raw.dtype == np.uint16 and name != "32FC1":
        return _counts_to_m(raw, unit_m)
    if raw.ndim == 2 and raw.dtype == np.uint16 and with_header:
        return _inverse_to_m(raw, *np.frombuffer(data[4:_HEADER].tobytes(), "<f4").tolist())
    if raw.ndim == 2 and raw.dtype == np.float32:
        return _known(raw)
    raise BadMessage("unknown_encoding", f"compressed depth '{msg.format}' ({raw.dtype} {raw.shape}) is not supported; send compressedDepth (png or rvl of 16UC1 or 32FC1), "
                                         "or a 16-bit png of 16UC1")


def _inverse_to_m(code: np.ndarray, a: float, b: float) -> np.ndarray:
    """As in decodeCompressedDepthImage of compressed_depth_image_transport."""
    if not (np.isfinite(a) and np.isfinite(b) and a > 0):
        raise BadMessage("bad_image_data", f"compressedDepth of 32FC1 has quantisation a, b = {a:g}, {b:g}: a must be positive and both finite; is its publisher broken?")
    with np.errstate(divide="ignore"):
        depth_m = _known(np.float32(a) / (code - np.float32(b)))
    depth_m[code == 0] = 0
    return depth_m


def rvl_decoded(data: np.ndarray) -> np.ndarray:
    """[H,W] uint16 of RVL (A. D. Wilson, Fast Lossless Depth Image Compression, 2017) behind uint32 width, height.

    Numbers are nibbles of 3 bits and a continuation bit, lowest bits first, packed from the top of uint32 words. They say, over and over: how many zeros, how
    many others, and of each of these its zigzag difference to the one before. There are loops over runs, none over pixels. Raises BadMessage('bad_image_data')."""
    if len(data) < _SIZE:
        raise _cut(f"{len(data)} bytes have no size")
    width, height = np.frombuffer(data[:_SIZE].tobytes(), "<u4").tolist()
    if not 0 < width * height <= MAX_RVL_PIXELS:
        raise _cut(f"its size is {width}x{height}, limit {MAX_RVL_PIXELS:,} pixels")
    numbers = _numbers(data[_SIZE:])
    at, counts, first = _runs(numbers, width * height)
    total = np.concatenate(([0], np.cumsum(counts)))
    within = np.arange(total[-1]) - np.repeat(total[:-1], counts)
    zigzag = numbers[np.repeat(first, counts) + within]
    out = np.zeros(width * height, np.uint16)
    out[np.repeat(at, counts) + within] = np.cumsum((zigzag >> 1) ^ -(zigzag & 1)) & 0xFFFF
    return out.reshape(height, width)


def _numbers(data: np.ndarray) -> np.ndarray:
    """[n] int64: every number of the stream."""
    words = np.frombuffer(data[:len(data) // 4 * 4].tobytes(), "<u4")
    high_first = (words.byteswap() if sys.byteorder == "little" else words).view(np.uint8)
    nibbles = np.stack([high_first >> 4, high_first & 15], 1).reshape(-1)
    last = np.flatnonzero(nibbles < 8)
    first = np.concatenate(([0], last[:-1] + 1)) if len(last) else last
    length = last - first + 1
    if length.max(initial=0) > _MAX_NIBBLES:
        raise _cut(f"a number has {length.max()} nibbles, limit {_MAX_NIBBLES}")
    out = (nibbles[first] & 7).astype(np.int64)
    for i in range(1, length.max(initial=0)):
        longer = np.flatnonzero(length > i)
        out[longer] |= (nibbles[first[longer] + i] & 7).astype(np.int64) << 3 * i
    return out


def _runs(numbers: np.ndarray, n_pixels: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([r] first pixel, [r] pixels, [r] first number) of every run that is not zero."""
    rows, pixel, i = [], 0, 0
    while pixel < n_pixels:
        zeros, count = (int(numbers[k]) if k < len(numbers) else 0 for k in (i, i + 1))  # the last count may be missing: there is none left then
        rows.append((pixel + zeros, count, i + 2))
        pixel, i = pixel + zeros + count, i + 2 + count
        if pixel > n_pixels or (i > len(numbers) if pixel < n_pixels else i > len(numbers) + 1):
            raise _cut(f"{len(numbers)} numbers do not fit {n_pixels} pixels")
    at, counts, first = np.array(rows, np.int64).reshape(-1, 3).T
    if (first + counts > len(numbers))[counts > 0].any():
        raise _cut(f"{len(numbers)} numbers do not fit {n_pixels} pixels")
    return at, counts, first


def _cut(what: str) -> BadMessage:
    return BadMessage("bad_image_data", f"rvl depth cannot be decoded: {what}; was the message cut?")
