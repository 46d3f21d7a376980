"""CDR, the bytes of ROS messages on the wire (OMG DDS-XTypes 1.3, 7.4: plain XCDR1): a writer, and a reader of the large sensor messages.

rclpy makes a Python object of an Image by copying its bytes twice, and holds the interpreter's lock meanwhile. What is read here has the same fields
(convert.py and pointcloud.py are duck-typed on them), and its `data` is a view on the bytes that came. Imports nothing of ROS."""
from __future__ import annotations

import struct
from typing import Any, Callable, NamedTuple

import numpy as np

from .convert import BadMessage

MOST_FIELDS = 1000  # of a point; more are no layout but a broken length


# -------------------------------------------------------------------------------------------------------------------- writing

class Cdr:
    """Little-endian writer; alignment counts from behind the four header bytes."""

    def __init__(self):
        self.out = bytearray(b"\x00\x01\x00\x00")

    def align(self, n: int) -> None:
        self.out += bytes(-(len(self.out) - 4) % n)

    def write(self, code: str, *values) -> None:
        """Values of one struct code: b i I f d."""
        self.align(struct.calcsize(code))
        self.out += struct.pack(f"<{len(values)}{code}", *values)

    def text(self, text: str) -> None:
        data = text.encode() + b"\0"
        self.write("I", len(data))
        self.out += data

    def items(self, values: np.ndarray) -> None:
        """A sequence of values.shape[0] structs of float32 or float64."""
        self.write("I", len(values))
        if values.size:
            self.align(values.itemsize)
            self.out += memoryview(np.ascontiguousarray(values)).cast("B")


# -------------------------------------------------------------------------------------------------------------------- reading

class Stamp(NamedTuple):
    sec: int
    nanosec: int


class Header(NamedTuple):
    stamp: Stamp
    frame_id: str


class Image(NamedTuple):
    """The fields of sensor_msgs/Image. data [n] uint8: a read-only view."""
    header: Header
    height: int
    width: int
    encoding: str
    is_bigendian: int
    step: int
    data: np.ndarray


class CompressedImage(NamedTuple):
    """The fields of sensor_msgs/CompressedImage. data [n] uint8: a read-only view."""
    header: Header
    format: str
    data: np.ndarray


class PointField(NamedTuple):
    name: str
    offset: int
    datatype: int
    count: int


class PointCloud2(NamedTuple):
    """The fields of sensor_msgs/PointCloud2. data [n] uint8: a read-only view."""
    header: Header
    height: int
    width: int
    fields: tuple[PointField, ...]
    is_bigendian: bool
    point_step: int
    row_step: int
    data: np.ndarray
    is_dense: bool


class Reader:
    """Reads either byte order. Every read is checked against the end of the bytes before it is made; BadMessage('bad_message') says what was missing."""

    def __init__(self, data: bytes):
        if len(data) < 4 or data[:2] not in (b"\x00\x00", b"\x00\x01"):
            raise BadMessage("bad_message", f"{len(data)} bytes that begin with {data[:4].hex(' ') or 'nothing'} are no plain CDR (00 00 or 00 01); "
                                            "does the publisher's middleware use another encoding (XCDR2)?")
        self._data, self._at, self._order = data, 4, "<" if data[1] else ">"

    def _need(self, n: int, what: str) -> int:
        """Goes on by n bytes; returns where they begin."""
        at, left = self._at, len(self._data) - self._at
        if n > left:
            raise BadMessage("bad_message", f"{what} needs {n} bytes at {at}, the message of {len(self._data)} bytes has {max(left, 0)} more; it was cut or is of another type")
        self._at = at + n
        return at

    def values(self, codes: str, what: str) -> tuple:
        """Values of one size: B, or of i and I."""
        size = struct.calcsize("=" + codes[0])
        self._at += -(self._at - 4) % size
        return struct.unpack_from(self._order + codes, self._data, self._need(size * len(codes), what))

    def text(self, what: str) -> str:
        n, = self.values("I", what)
        at = self._need(n, what)
        try:
            return self._data[at:at + n].removesuffix(b"\0").decode()
        except UnicodeDecodeError:
            raise BadMessage("bad_message", f"{what}, {n} bytes at {at}, is no UTF-8 text; the message is of another type or damaged") from None

    def octets(self, what: str) -> np.ndarray:
        """[n] uint8: a sequence<uint8>, a view."""
        n, = self.values("I", what)
        return np.frombuffer(self._data, np.uint8, n, self._need(n, what))

    def header(self) -> Header:
        return Header(Stamp(*self.values("iI", "header.stamp")), self.text("header.frame_id"))


def read_image(data: bytes) -> Image:
    """A serialised sensor_msgs/Image. Raises BadMessage: bad_message."""
    r = Reader(data)
    header, (height, width), encoding = r.header(), r.values("II", "height and width"), r.text("encoding")
    return Image(header, height, width, encoding, *r.values("B", "is_bigendian"), *r.values("I", "step"), r.octets("data"))


def read_compressed_image(data: bytes) -> CompressedImage:
    """A serialised sensor_msgs/CompressedImage. Raises BadMessage: bad_message."""
    r = Reader(data)
    return CompressedImage(r.header(), r.text("format"), r.octets("data"))


def read_point_cloud(data: bytes) -> PointCloud2:
    """A serialised sensor_msgs/PointCloud2. Raises BadMessage: bad_message."""
    r = Reader(data)
    header, (height, width), (n,) = r.header(), r.values("II", "height and width"), r.values("I", "fields")
    if n > MOST_FIELDS:
        raise BadMessage("bad_message", f"a point with {n} fields, limit {MOST_FIELDS}; the message is of another type or damaged")
    fields = tuple(_point_field(r) for _ in range(n))
    big, = r.values("B", "is_bigendian")
    return PointCloud2(header, height, width, fields, bool(big), *r.values("II", "point_step and row_step"), r.octets("data"), bool(*r.values("B", "is_dense")))


def _point_field(r: Reader) -> PointField:
    return PointField(r.text("fields.name"), *r.values("I", "fields.offset"), *r.values("B", "fields.datatype"), *r.values("I", "fields.count"))


READERS: dict[str, Callable[[bytes], Any]] = {  # by message type
    "sensor_msgs/msg/Image": read_image, "sensor_msgs/msg/CompressedImage": read_compressed_image, "sensor_msgs/msg/PointCloud2": read_point_cloud}
