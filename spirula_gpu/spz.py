"""Niantic's .spz: every attribute in a few bytes, then compressed. Described in the README of github.com/nianticlabs/spz (MIT).

    versions 1 to 3   one gzip stream: a head of 16 bytes, then means, opacities, colours, scales, rotations, SH of all Gaussians
    version 4         a head of 32 bytes, a table of (packed, unpacked) sizes, and the same six attributes as zstd streams

    mean      24-bit fixed point (version 1: half floats)     opacity   uint8, 255 = 1
    colour    uint8, 127.5 + 0.15 * 255 * SH coefficient 0    scale     uint8, 16 * (log of m + 10)
    rotation  versions 1, 2: x y z as bytes; 3, 4: the three smaller of x y z w, 10 bits each, and which one is missing
    SH        uint8, 128 + 128 * coefficient, the channel fastest

Version 3 is written: every reader that was looked at takes it, and its rotations are better than those of version 2. Numbers are stored in the
map's frame as they are, which is what Niantic's ply_to_spz and splat-transform 3 do too; the axes that the README gives (right, up, back) are not
those of a map anyway. splat-transform 2 turns y and z around between .ply and .spz.
"""
from __future__ import annotations

import os
import struct
import zlib
from typing import Iterator, NamedTuple

import numpy as np

from .splats import FormatError, Splats, as_byte, logits_of_bytes, opacities, unit, with_largest, without_largest

MAGIC, GZIP = b"NGSP", b"\x1f\x8b"
HEAD = struct.Struct("<4sIIBBBB")          # magic, version, Gaussians, SH degree, fractional bits, flags, streams (version 4)
MORE, TOC = struct.Struct("<I12x"), struct.Struct("<QQ")  # of version 4: offset of the table; packed and unpacked bytes of a stream
ANTIALIASED = 0x1                          # flag: trained with the 2D mip filter
EXTENSIONS = 0x2                           # flag: records that other vendors know follow, or (version 4) precede the table
MAX_RATIO = 1032                           # unpacked over packed bytes: deflate reaches no more, and no zstd stream of real Gaussians does
FRACTIONAL_BITS, MAX_FRACTIONAL_BITS = 12, 24
COLOR_SCALE = 0.15
LEVEL = 6                                  # of gzip


class Head(NamedTuple):
    version: int
    count: int
    degree: int
    fractional_bits: int
    flags: int
    streams: int

    @property
    def sizes(self) -> list[int]:
        """Bytes of means, opacities, colours, scales, rotations, SH."""
        return [self.count * n for n in (6 if self.version == 1 else 9, 1, 3, 3, 4 if self.version > 2 else 3, 3 * ((self.degree + 1) ** 2 - 1))]


# ---- writing ---------------------------------------------------------------------------------------------------------------------

def pack_spz(splats: Splats) -> Iterator[bytes]:
    """Raises FormatError when a mean lies outside of what 24 bits can say, or the SH degree is above 3."""
    if splats.degree > 3:
        raise FormatError(f"SH degree {splats.degree} > 3: cut it with --sh-degree")
    bits, farthest = FRACTIONAL_BITS, float(np.abs(splats.means).max(initial=0))
    while bits and farthest * (1 << bits) >= (1 << 23) - 1:
        bits -= 1
    if farthest >= 1 << 23:
        raise FormatError(f"a Gaussian is {farthest:g} m from the origin, and .spz ends at {1 << 23} m: write another format")
    stream = zlib.compressobj(LEVEL, wbits=31)
    yield stream.compress(HEAD.pack(MAGIC, 3, len(splats.means), splats.degree, bits, ANTIALIASED * splats.antialiased, 0))
    for attribute in (lambda s: _fixed24(s.means, bits), lambda s: as_byte(255 * opacities(s)), lambda s: as_byte(127.5 + 255 * COLOR_SCALE * s.sh[:, 0]),
                      lambda s: as_byte(16 * (s.log_scales + 10)), _rotations, _harmonics):
        for block in splats.blocks():
            yield stream.compress(attribute(block).tobytes())
    yield stream.flush()


def _fixed24(means: np.ndarray, bits: int) -> np.ndarray:
    return np.rint(means.astype(np.float64) * (1 << bits)).astype("<i4").reshape(-1, 3, 1).view(np.uint8)[..., :3]


def _rotations(s: Splats) -> np.ndarray:
    largest, others = without_largest(unit(s.quats)[:, [1, 2, 3, 0]])
    fields = np.rint(np.minimum(np.abs(others) * np.sqrt(2), 1) * 511).astype(np.uint32) | (others < 0).astype(np.uint32) << 9
    return (largest.astype(np.uint32) << 30 | fields[:, 0] << 20 | fields[:, 1] << 10 | fields[:, 2]).astype("<u4")


def _harmonics(s: Splats) -> np.ndarray:
    """All 8 bits: Niantic's packer keeps 5 and 4 of them, which halves the file and costs 1 dB (docs/formats.md)."""
    return as_byte(128 + 128 * s.sh[:, 1:])


# ---- reading ---------------------------------------------------------------------------------------------------------------------

def read_spz(path: str | os.PathLike) -> Splats:
    """Versions 1 to 4, packed or (1 to 3) not. Nothing is unpacked before the head's sizes were compared with the file's. Raises FormatError, OSError."""
    with open(path, "rb") as file:
        data = file.read()
    if data[:2] == GZIP:
        head, streams = _inflated(path, data)
    elif len(data) >= HEAD.size and data[:4] == MAGIC:
        head = _head(path, data, len(data))
        streams = _zstd_streams(path, head, data) if head.version == 4 else _cut(path, head, data[HEAD.size:])
    else:
        raise FormatError(f"{path}: not an .spz file: it begins with {data[:4]!r}, neither NGSP nor gzip")
    return _unpacked(head, [np.frombuffer(s, np.uint8) for s in streams])


def _head(path, data: bytes, size: int) -> Head:
    """size: bytes of the file."""
    if len(data) < HEAD.size:
        raise FormatError(f"{path}: cut short: {len(data)} bytes, the head alone has {HEAD.size}")
    magic, *numbers = HEAD.unpack(data[:HEAD.size])
    head = Head(*numbers)
    if magic != MAGIC:
        raise FormatError(f"{path}: not an .spz file: {magic!r} instead of {MAGIC!r}")
    if not 1 <= head.version <= 4:
        raise FormatError(f"{path}: version {head.version} of .spz; versions 1 to 4 are read")
    if head.degree > 4 or head.fractional_bits > MAX_FRACTIONAL_BITS:
        raise FormatError(f"{path}: damaged: SH degree {head.degree} (at most 4), {head.fractional_bits} fractional bits (at most {MAX_FRACTIONAL_BITS})")
    if not head.count or sum(head.sizes) > size * MAX_RATIO:
        raise FormatError(f"{path}: damaged: {head.count} Gaussians in {size} bytes, which can hold 1 to {size * MAX_RATIO * head.count // max(sum(head.sizes), 1)}")
    return head


def _inflated(path, data: bytes) -> tuple[Head, list]:
    stream = zlib.decompressobj(wbits=31)
    try:
        head = _head(path, stream.decompress(data, HEAD.size), len(data))
        if head.version == 4:
            raise FormatError(f"{path}: damaged: version 4 inside gzip")
        body = stream.decompress(stream.unconsumed_tail, sum(head.sizes) + 1)  # one more: what is too long is seen, and so is the end's checksum
    except zlib.error as e:
        raise FormatError(f"{path}: damaged: {e}") from None
    if not stream.eof and not (head.flags & EXTENSIONS) and len(body) <= sum(head.sizes):
        raise FormatError(f"{path}: cut short: {len(data)} bytes end inside the packed data")
    return head, _cut(path, head, body)


def _cut(path, head: Head, body: bytes) -> list:
    need = sum(head.sizes)
    if len(body) < need or (len(body) > need and not head.flags & EXTENSIONS):
        raise FormatError(f"{path}: {head.count} Gaussians of SH degree {head.degree} need {need} bytes, "
                          f"there are {len(body) if len(body) < need else 'more'}: it was cut short, or something was added")
    ends = np.cumsum(head.sizes)
    return [memoryview(body)[end - size:end] for end, size in zip(ends, head.sizes)]


def _zstd_streams(path, head: Head, data: bytes) -> list:
    sizes = [n for n in head.sizes if n]
    at = MORE.unpack_from(data.ljust(32, b"\0"), HEAD.size)[0]
    begin = at + TOC.size * len(sizes)
    if head.streams != len(sizes) or at < HEAD.size + MORE.size or begin > len(data):
        raise FormatError(f"{path}: damaged: {head.streams} streams (must be {len(sizes)}), their table at byte {at} of {len(data)}")
    unpack, streams = zstd_decompressor(path), []
    for (packed, unpacked), size in zip(TOC.iter_unpack(data[at:begin]), sizes):
        if unpacked != size or packed > len(data) - begin:
            raise FormatError(f"{path}: damaged: stream {len(streams)} has {packed} bytes, {len(data) - begin} are left, and becomes {unpacked}, must be {size}")
        streams.append(unpack(data[begin:begin + packed], size))
        begin += packed
    if begin != len(data):
        raise FormatError(f"{path}: {len(data) - begin} bytes follow the last stream: something was added")
    return streams + [b""] * (6 - len(streams))


def zstd_decompressor(path):
    """A function: (packed bytes, size) -> exactly so many bytes, or FormatError."""
    try:
        from compression import zstd  # Python 3.14
    except ImportError:
        try:
            from backports import zstd
        except ImportError as e:
            raise FormatError(f"{path}: version 4 of .spz needs zstd: pip install backports.zstd; import says: {e}") from None

    def unpack(packed: bytes, size: int) -> bytes:
        stream = zstd.ZstdDecompressor()
        try:
            out = stream.decompress(packed, max_length=size + 1)
        except zstd.ZstdError as e:
            raise FormatError(f"{path}: damaged: {e}") from None
        if len(out) != size or not stream.eof or stream.unused_data:
            raise FormatError(f"{path}: damaged: a stream gives {'more than ' if len(out) > size else ''}{min(len(out), size)} bytes, must be one frame of {size}")
        return out
    return unpack


def _unpacked(head: Head, streams: list[np.ndarray]) -> Splats:
    means, alphas, colors, scales, rotations, sh = streams
    n = head.count
    if head.version == 1:
        xyz = means.view("<f2").reshape(n, 3).astype(np.float32)
    else:
        b = means.reshape(n, 3, 3).astype(np.int32)
        xyz = (((b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16) ^ 0x800000) - 0x800000) * np.float32(2.0**-head.fractional_bits)
    dc = ((colors.reshape(n, 1, 3) / np.float32(255) - np.float32(0.5)) / np.float32(COLOR_SCALE))
    rest = (sh.reshape(n, -1, 3).astype(np.float32) - 128) / 128 if len(sh) else dc[:, :0]
    return Splats(xyz.astype(np.float32), _quats(head, rotations), scales.reshape(n, 3) / np.float32(16) - 10, logits_of_bytes(alphas), np.concatenate([dc, rest], 1),
                  bool(head.flags & ANTIALIASED))


def _quats(head: Head, rotations: np.ndarray) -> np.ndarray:
    if head.version < 3:
        xyz = rotations.reshape(-1, 3) / 127.5 - 1
        q = np.concatenate([np.sqrt(np.maximum(0, 1 - (xyz**2).sum(1, keepdims=True))), xyz], 1)
    else:
        words = rotations.view("<u4")
        fields = words[:, None] >> np.array([20, 10, 0], np.uint32) & 1023
        others = np.where(fields & 512, -1, 1) * (fields & 511) / (511 * np.sqrt(2))
        q = with_largest((words >> 30).astype(np.int64), others)[:, [3, 0, 1, 2]]
    return unit(q).astype(np.float32)
