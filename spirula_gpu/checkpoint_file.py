"""The file of a checkpoint: sections of raw numbers and a table that describes them.

    head      36 bytes: magic, version, crc32 / offset / bytes of the table, crc32 of these
    sections  raw little-endian arrays, one right behind the other
    table     JSON: name, dtype, shape, offset, bytes and crc32 of every section, and facts of the caller's

Every byte lies under one checksum, and the head says how long the file is. Nothing is executed, and nothing is allocated that the
file's own length does not allow. A file appears whole or not at all, and the one before stays until then.
"""
from __future__ import annotations

import fcntl
import json
import math
import os
import struct
import zlib
from contextlib import contextmanager
from typing import Any, Iterable, NamedTuple

import numpy as np

MAGIC, VERSION = b"SPIRULA\x1a", 5
HEAD, CRC = struct.Struct("<8sIIQQ"), struct.Struct("<I")
HEAD_BYTES = HEAD.size + CRC.size
MAX_TABLE_BYTES = 1 << 22
REMEDY = "use another checkpoint, or start without checkpoint.resume"
OTHER_PROGRAM = "resume it with the program that wrote it, or start without checkpoint.resume"
BYTES = np.dtype("u1")


class CheckpointError(ValueError):
    """A file that cannot be resumed from, or not be written now: one line that says which, what is wrong, where, and the remedy."""


class Section(NamedTuple):
    """An array of a file, as pieces that are made while it is written."""
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    pieces: Iterable[np.ndarray]


def write_file(path: str | os.PathLike, facts: dict, sections: Iterable[Section]) -> int:
    """`facts`: what else goes into the table, as JSON knows it. Returns the bytes of the file. Raises OSError, CheckpointError."""
    path, table, at = os.fspath(path), [], HEAD_BYTES
    with _replacing(path) as file:
        file.write(bytes(HEAD_BYTES))
        for name, dtype, shape, pieces in sections:
            crc = size = 0
            for piece in pieces:
                file.write(piece.data)
                crc, size = zlib.crc32(piece.data, crc), size + piece.nbytes
            if size != math.prod(shape) * dtype.itemsize:
                raise CheckpointError(f"{path}: section {name} came as {size} bytes, its shape {shape} has {math.prod(shape) * dtype.itemsize} (internal error)")
            table.append(dict(name=name, dtype=_described(dtype), shape=shape, offset=at, bytes=size, crc32=crc))
            at += size
        text = json.dumps({**facts, "sections": table}, allow_nan=False).encode()
        if len(text) > MAX_TABLE_BYTES:
            raise CheckpointError(f"{path}: a table of {len(text)} bytes > {MAX_TABLE_BYTES}; do the images come under many frame ids?")
        file.write(text)
        file.seek(0)
        head = HEAD.pack(MAGIC, VERSION, zlib.crc32(text), at, len(text))
        file.write(head + CRC.pack(zlib.crc32(head)))
    return at + len(text)


@contextmanager
def _replacing(path: str):
    """A file beside `path` that becomes it at the end, once all of it is on the disk; after an error `path` is what it was. The name
    is always the same: what a killed process left is written over."""
    part = f"{path}.part"
    with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "wb") as file:
        _lock(file, part)
        try:
            file.truncate(0)
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too
    finally:
        os.close(folder)


def _lock(file, part: str) -> None:
    """Two writers would mix their bytes. The lock goes with the process; whoever got it late may hold a file that has its final name already."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.path.samestat(os.fstat(file.fileno()), os.stat(part))
    except (BlockingIOError, FileNotFoundError):
        mine = False
    if not mine:
        raise CheckpointError(f"{part}: another process is writing there; give each its own checkpoint.path")


def _described(dtype: np.dtype) -> Any:
    return json.loads(json.dumps(dtype.descr)) if dtype.names else dtype.str


class Reader:
    """A checkpoint that is being read: the table is checked at once, a section when it has been read. A context: whatever a
    wrong content raises inside comes out as a CheckpointError."""

    def __init__(self, path: str | os.PathLike):
        self.path = os.fspath(path)
        with self._sense():
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.facts = self._read_table()
            except BaseException:
                os.close(self._file)
                raise

    def __enter__(self) -> "Reader":
        self._senses = self._sense()
        self._senses.__enter__()
        return self

    def __exit__(self, *error) -> None:
        os.close(self._file)
        self._senses.__exit__(*error)

    def refuse(self, what: str, remedy: str = REMEDY):
        raise CheckpointError(f"{self.path}: {what}; {remedy}")

    @contextmanager
    def _sense(self):
        try:
            yield
        except CheckpointError:
            raise
        except OSError as e:
            self.refuse(f"it cannot be read: {e.strerror}")
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as e:
            self.refuse(f"what it holds makes no sense ({type(e).__name__}: {e})")

    def _read_table(self) -> dict:
        size = os.fstat(self._file).st_size
        if size < HEAD_BYTES:
            self.refuse(f"cut short: {size} bytes, the head alone has {HEAD_BYTES}")
        head = self._bytes(0, HEAD_BYTES)
        magic, version, crc, at, length = HEAD.unpack(head[:HEAD.size])
        if magic != MAGIC:
            self.refuse("not a checkpoint, or its first 8 bytes are damaged")
        if CRC.unpack(head[HEAD.size:])[0] != zlib.crc32(head[:HEAD.size]):
            self.refuse(f"the head (bytes 0..{HEAD_BYTES - 1}) is damaged: its checksum is another")
        if version != VERSION:
            self.refuse(f"version {version} of the format, and this program reads version {VERSION}", OTHER_PROGRAM)
        if at + length != size or at < HEAD_BYTES or length > MAX_TABLE_BYTES:
            self.refuse(f"{size} bytes, the head says {at} + {length}: it was cut short, or something was added")
        text = self._bytes(at, length)
        if zlib.crc32(text) != crc:
            self.refuse(f"the table (bytes {at}..{size - 1}) is damaged: its checksum is another")
        facts, end = json.loads(text), HEAD_BYTES
        for s in facts["sections"]:
            if s["offset"] != end or not isinstance(s["bytes"], int) or not 0 <= s["bytes"] <= at - end:
                self.refuse(f"section {s['name']} does not lie where the one before it ends")
            end += s["bytes"]
        if end != at:
            self.refuse(f"bytes {end}..{at - 1} belong to no section")
        self._sections = {s["name"]: s for s in facts["sections"]}
        return facts

    def _bytes(self, at: int, count: int) -> bytes:
        out = np.empty(count, BYTES)
        self._fill(at, out)
        return out.tobytes()

    def _fill(self, at: int, out: np.ndarray) -> None:
        view = memoryview(out.reshape(-1).view(BYTES))
        while len(view):
            got = os.preadv(self._file, [view], at)
            if not got:
                self.refuse(f"cut short at byte {at} while it was read")
            view, at = view[got:], at + got

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._sections[name]["shape"])

    @contextmanager
    def section(self, name: str, dtype: np.dtype, shape: tuple[int, ...]):
        """A function: shape -> the next elements of a section of this dtype and shape (-1: any). The checksum is compared at the end."""
        s = self._sections.get(name) or self.refuse(f"section {name} is missing")
        have = tuple(s["shape"])
        fits = s["dtype"] == _described(dtype) and len(have) == len(shape) and all(type(k) is int and k >= 0 and w in (-1, k) for k, w in zip(have, shape))
        if not fits or math.prod(have) * dtype.itemsize != s["bytes"]:
            self.refuse(f"section {name} is {s['dtype']} {list(have)} in {s['bytes']} bytes, must be {_described(dtype)} {list(shape)} (-1: any)")
        at, crc, end = s["offset"], 0, s["offset"] + s["bytes"]

        def take(shape: tuple[int, ...]) -> np.ndarray:
            nonlocal at, crc
            if math.prod(shape) * dtype.itemsize > end - at:
                self.refuse(f"section {name} ends at byte {end - 1}: too early for what belongs into it")
            out = np.empty(shape, dtype)
            self._fill(at, out)
            at, crc = at + out.nbytes, zlib.crc32(out.reshape(-1).view(BYTES).data, crc)
            return out

        yield take
        if at != end or crc != s["crc32"]:
            self.refuse(f"section {name} (bytes {s['offset']}..{end - 1}) is damaged: its checksum is another" if at == end else f"section {name} is too long by {end - at} bytes")

    def check(self, piece: int = 1 << 24) -> None:
        """Every section against its checksum. Raises CheckpointError."""
        for name, s in self._sections.items():
            crc = 0
            for at in range(s["offset"], s["offset"] + s["bytes"], piece):
                crc = zlib.crc32(self._bytes(at, min(piece, s["offset"] + s["bytes"] - at)), crc)
            if crc != s["crc32"]:
                self.refuse(f"section {name} (bytes {s['offset']}..{s['offset'] + s['bytes'] - 1}) is damaged: its checksum is another")

    def array(self, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """A section as a whole."""
        with self.section(name, dtype, shape) as take:
            return take(self.shape(name))
