"""Storage files that were cut off (recorder killed, disk full): what is wrong with them, and what can still be read."""
from __future__ import annotations

import sqlite3
import struct
from pathlib import Path
from typing import BinaryIO, Callable, Collection, Iterator, NamedTuple

try:
    from compression import zstd  # Python >= 3.14
except ImportError:
    from backports import zstd

from .errors import InputError

MCAP_MAGIC = b"\x89MCAP0\r\n"
SQLITE_MAGIC = b"SQLite format 3\0"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
HEADER, SCHEMA, CHANNEL, MESSAGE, CHUNK = 0x01, 0x03, 0x04, 0x05, 0x06  # record types of https://mcap.dev/spec


class BagError(InputError):
    """A recording that cannot be read or written; the text says what, where and what to do."""


class Connection(NamedTuple):
    id: int
    topic: str
    msgtype: str
    msgcount: int


class Salvaged:
    """The readable part of a cut file, with the interface of rosbags' Reader as far as `bags` uses it."""

    def __init__(self, scan: Callable[[], Iterator[tuple[int, str, str, int, bytes]]]):
        """scan() yields (connection id, topic, type, stamp ns, CDR bytes) until the damage."""
        self._scan, self.start_time, self.end_time = scan, 2**63 - 1, 0
        counts: dict[tuple[int, str, str], int] = {}
        for cid, topic, msgtype, stamp, _ in scan():
            counts[cid, topic, msgtype] = counts.get((cid, topic, msgtype), 0) + 1
            self.start_time, self.end_time = min(self.start_time, stamp), max(self.end_time, stamp + 1)
        self.connections = [Connection(*key, n) for key, n in counts.items()]

    def messages(self, connections: Collection[Connection]) -> Iterator[tuple[Connection, int, bytes]]:
        wanted = {c.id: c for c in connections}
        for cid, _, _, stamp, raw in self._scan():
            if cid in wanted:
                yield wanted[cid], stamp, raw

    def close(self) -> None:
        pass


def complaint(path: Path) -> str:
    """'' or how the .mcap or .db3 file was cut off. Only looks at its ends; other files are not judged."""
    size = path.stat().st_size
    if size == 0:
        return "0 bytes"
    with open(path, "rb") as file:
        head = file.read(32)
        if path.suffix == ".mcap" and head.startswith(MCAP_MAGIC):
            file.seek(max(0, size - 8))
            return "" if size > 16 and file.read() == MCAP_MAGIC else f"cut off at {size} bytes: the end mark is missing"
        if path.suffix == ".db3" and head.startswith(SQLITE_MAGIC) and len(head) == 32:
            page, = struct.unpack(">H", head[16:18])
            pages, = struct.unpack(">I", head[28:32])
            whole = pages * (65536 if page == 1 else page)
            return "" if size >= whole else f"cut off at {size} of {whole} bytes"
    return ""


def salvage(path: Path) -> Salvaged:
    return Salvaged(lambda: _scan_mcap(path) if path.suffix == ".mcap" else _scan_sqlite3(path))


def message_bytes(raw: bytes | memoryview) -> bytes:
    """CDR; decompressed where each message was compressed by itself and no metadata.yaml has said so. CDR begins with 0, zstd does not."""
    return zstd.decompress(raw) if raw[:4] == ZSTD_MAGIC else bytes(raw)


def mcap_encodings(path: Path) -> set[str] | None:
    """How the messages of an .mcap are encoded (cdr, json, protobuf, ros1, ..), where its profile is not ros2; None: it is, or this is no MCAP."""
    with open(path, "rb") as file:
        if file.read(len(MCAP_MAGIC)) != MCAP_MAGIC:
            return None
        head = file.read(9 + 4 + 4)
        if len(head) < 17 or head[0] != HEADER or head[9:] == b"\4\0\0\0ros2":
            return None
        file.seek(len(MCAP_MAGIC))
        return {_string(body, _string(body, 4)[1])[0] for op, body in _mcap_records(file) if op == CHANNEL}


def _scan_mcap(path: Path) -> Iterator[tuple[int, str, str, int, bytes]]:
    schemas: dict[int, str] = {}
    channels: dict[int, tuple[str, str]] = {}
    with open(path, "rb") as file:
        file.seek(len(MCAP_MAGIC))
        for op, body in _mcap_records(file):
            if op == SCHEMA:
                schemas[_unpack("<H", body, 0)] = _string(body, 2)[0]
            elif op == CHANNEL:
                topic, at = _string(body, 4)
                if _string(body, at)[0] == "cdr":
                    channels[_unpack("<H", body, 0)] = (topic, schemas.get(_unpack("<H", body, 2), ""))
            elif op == MESSAGE and (cid := _unpack("<H", body, 0)) in channels:
                yield cid, *channels[cid], _unpack("<Q", body, 6), bytes(body[22:])


def _mcap_records(file: BinaryIO) -> Iterator[tuple[int, memoryview]]:
    """(type, body) of every complete record, those inside chunks included; ends where the file or the sense ends."""
    while len(head := file.read(9)) == 9:
        op, size = struct.unpack("<BQ", head)
        body = memoryview(file.read(size)) if size < 2**40 else memoryview(b"")
        if op == CHUNK and len(body) > 40:
            compression, at = _string(body, 28)
            inner = _chunk_bytes(compression, body[at + 8:])
            while len(inner) >= 9:
                op, size = struct.unpack_from("<BQ", inner)
                if len(inner) < 9 + size:
                    break
                yield op, inner[9:9 + size]
                inner = inner[9 + size:]
        elif len(body) == size:
            yield op, body


def _chunk_bytes(compression: str, data: memoryview) -> memoryview:
    """The records of a chunk; nothing if its compressed bytes are cut."""
    try:
        if compression == "zstd":
            return memoryview(zstd.decompress(data))
        if compression == "lz4":
            import lz4.frame
            return memoryview(lz4.frame.decompress(data))
    except (zstd.ZstdError, RuntimeError, EOFError):
        return memoryview(b"")
    return data if compression == "" else memoryview(b"")


def _unpack(layout: str, data: memoryview, at: int) -> int:
    return struct.unpack_from(layout, data, at)[0]


def _string(data: memoryview, at: int) -> tuple[str, int]:
    """A length-prefixed string and the offset behind it."""
    end = at + 4 + _unpack("<I", data, at)
    return str(data[at + 4:end], "utf8"), end


def _scan_sqlite3(path: Path) -> Iterator[tuple[int, str, str, int, bytes]]:
    db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        db.execute("PRAGMA writable_schema = ON")  # without it SQLite refuses a file that is shorter than its header says
        topics: dict[int, tuple[str, str]] = {
            cid: (name, kind) for cid, name, kind, form in db.execute("SELECT id, name, type, serialization_format FROM topics") if form == "cdr"}
        for cid, stamp, raw in db.execute("SELECT topic_id, timestamp, data FROM messages ORDER BY id"):
            if cid in topics:
                yield cid, *topics[cid], stamp, raw
    except sqlite3.DatabaseError:
        return  # the damage: everything before it was yielded, and `complaint` has said that there is some
    finally:
        db.close()
