"""cdr.py: what it reads is what rclpy reads, in either byte order; whatever else comes is a BadMessage, and no byte beyond the message is looked at."""
import struct

import conftest
import messages as m
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

conftest.importorskip("rclpy", "source a ROS 2 installation for this Python, or pip install 'spirula_ros[ros]'")
from rclpy.serialization import deserialize_message, serialize_message

from spirula_ros import cdr
from spirula_ros.convert import BadMessage, depth_to_m, image_to_rgb
from spirula_ros.pointcloud import points_from_msg

STAMP = 1_700_000_000_123_456_789
POINTS = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
TEXTS = ["", "c", "ca", "cam", "camé", "camera_optical_frame"]   # every alignment of what follows


def samples(frame_id="camera"):
    """(message type, rclpy's message)"""
    rng = np.random.default_rng(1)
    octets = lambda n: rng.integers(0, 256, n).astype(np.uint8).tobytes()
    yield "sensor_msgs/msg/Image", m.image(STAMP, 5, 3, "rgb8", octets(45), frame_id=frame_id, family="rclpy")
    yield "sensor_msgs/msg/Image", m.image(STAMP, 4, 2, "16UC1", octets(20), step=10, big=True, frame_id=frame_id, family="rclpy")
    yield "sensor_msgs/msg/Image", m.image(0, 0, 1, "", b"", frame_id=frame_id, family="rclpy")
    yield "sensor_msgs/msg/CompressedImage", m.stamped("sensor_msgs/msg/CompressedImage", STAMP, frame_id, "rclpy", format="jpeg", data=octets(33))
    yield "sensor_msgs/msg/PointCloud2", m.cloud_of(STAMP, POINTS, frame_id, family="rclpy")
    yield "sensor_msgs/msg/PointCloud2", m.cloud(STAMP, [("intensity", 12, 2, 1), ("x", 0, 7, 1)], 16, octets(96), (2, 3), big=True, frame_id=frame_id, family="rclpy")
    yield "sensor_msgs/msg/PointCloud2", m.cloud(STAMP, [], 0, b"", (1, 0), frame_id=frame_id, family="rclpy")


def assert_same(ours, theirs):
    """Field by field; bytes as bytes."""
    for name in theirs.get_fields_and_field_types():
        a, b = getattr(ours, name), getattr(theirs, name)
        if hasattr(b, "get_fields_and_field_types"):
            assert_same(a, b)
        elif name == "data":
            assert a.dtype == np.uint8 and a.tobytes() == bytes(b)
        elif name == "fields":
            assert len(a) == len(b)
            [assert_same(x, y) for x, y in zip(a, b)]
        else:
            assert a == b and type(a) is type(b), name


@pytest.mark.parametrize("frame_id", TEXTS)
def test_it_reads_what_rclpy_wrote(frame_id):
    for kind, msg in samples(frame_id):
        assert_same(cdr.READERS[kind](serialize_message(msg)), msg)
    assert len({kind for kind, _ in samples()}) == len(cdr.READERS)


def big_endian(msg) -> bytes:
    """An independent writer: walks rclpy's type description."""
    out = bytearray(b"\x00\x00\x00\x00")
    codes = {"int32": "i", "uint32": "I", "uint8": "B", "boolean": "?"}

    def number(code, value):
        size = struct.calcsize(code)
        out.extend(bytes(-(len(out) - 4) % size) + struct.pack(">" + code, value))

    def put(kind, value):
        if kind in codes:
            number(codes[kind], value)
        elif kind == "string":
            number("I", len(value.encode()) + 1)
            out.extend(value.encode() + b"\0")
        elif kind.startswith("sequence<"):
            number("I", len(value))
            [put(kind[9:-1], v) for v in value]
        else:
            [put(k, getattr(value, name)) for name, k in value.get_fields_and_field_types().items()]
    [put(kind, getattr(msg, name)) for name, kind in msg.get_fields_and_field_types().items()]
    return bytes(out)


@pytest.mark.parametrize("frame_id", TEXTS)
def test_it_reads_big_endian(frame_id):
    for kind, msg in samples(frame_id):
        data = big_endian(msg)
        assert deserialize_message(data, type(msg)) == msg, "the writer of this test"
        assert_same(cdr.READERS[kind](data), msg)


def test_data_is_a_view_and_converts_as_rclpy_s():
    rgb = np.random.default_rng(2).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    data = serialize_message(m.image(STAMP, 8, 6, "rgb8", rgb.tobytes(), family="rclpy"))
    image = image_to_rgb(cdr.read_image(data))
    address = image.__array_interface__["data"][0] - np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    assert 0 < address < len(data) and not image.flags.writeable
    np.testing.assert_array_equal(image, rgb)
    depth = m.image(STAMP, 8, 6, "16UC1", rgb[..., :2].tobytes(), family="rclpy")
    np.testing.assert_array_equal(depth_to_m(cdr.read_image(serialize_message(depth))), depth_to_m(depth))
    np.testing.assert_array_equal(points_from_msg(cdr.read_point_cloud(serialize_message(m.cloud_of(STAMP, POINTS, family="rclpy")))), POINTS)


def test_texts_without_their_zero_and_bytes_behind_the_end():
    """Some middlewares write an empty string as length 0, and pad the payload."""
    data = b"\0\1\0\0" + struct.pack("<iII", 5, 6, 0) + struct.pack("<I", 4) + b"jpeg" + struct.pack("<I", 2) + b"ab" + b"\0\0"
    msg = cdr.read_compressed_image(data)
    assert msg.header == ((5, 6), "") and msg.format == "jpeg" and msg.data.tobytes() == b"ab"


class Watched(bytes):
    """Bytes that fail the test when a slice leaves them (Python's own would be shortened in silence)."""
    def __getitem__(self, key):
        assert not isinstance(key, slice) or (key.stop or 0) <= max(len(self), 4)
        return super().__getitem__(key)


def read_or_refuse(kind, data):
    try:
        msg = cdr.READERS[kind](Watched(data))
    except BadMessage as error:
        assert error.reason == "bad_message" and len(str(error)) < 300
        return None
    assert len(msg.data) <= len(data)
    return msg


def test_every_cut_is_refused():
    for kind, msg in samples():
        for data in (serialize_message(msg), big_endian(msg)):
            whole = next(n for n in range(len(data) + 1) if read_or_refuse(kind, data[:n]))   # padding may follow
            assert len(data) - whole < 4
            for n in range(whole):
                assert read_or_refuse(kind, data[:n]) is None


@pytest.mark.parametrize("head", [b"", b"\0", b"\0\1\0", b"\0\2\0\0", b"\0\7\0\0", b"\1\0\0\0", b"\xff\xff\xff\xff"])
def test_other_encodings_are_refused(head):
    for kind in cdr.READERS:
        with pytest.raises(BadMessage, match="no plain CDR"):
            cdr.READERS[kind](head + bytes(100) * (len(head) == 4))


@pytest.mark.parametrize("kind, text", [("sensor_msgs/msg/Image", "header.frame_id"), ("sensor_msgs/msg/CompressedImage", "header.frame_id"), ("sensor_msgs/msg/PointCloud2", "header.frame_id")])
def test_what_is_wrong_is_said(kind, text):
    for tail in (struct.pack("<iII", 1, 2, 2**32 - 1) + b"cam\0", struct.pack("<iII", 1, 2, 4) + b"\xff\xfe\xfd\0"):
        with pytest.raises(BadMessage, match=text):
            cdr.READERS[kind](b"\0\1\0\0" + tail)


def test_a_broken_number_of_fields_costs_no_time():
    data = b"\0\1\0\0" + struct.pack("<iIIIII", 1, 2, 0, 1, 1, 2**31) + bytes(10**6)
    with pytest.raises(BadMessage, match="2147483648 fields, limit 1000"):
        cdr.read_point_cloud(data)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(cdr.READERS)), st.booleans(), st.binary(max_size=200))
def test_random_bytes(kind, little, data):
    read_or_refuse(kind, bytes([0, little, 0, 0]) + data)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.integers(0, 6), st.booleans(), st.data())
def test_damaged_messages(which, little, data):
    kind, msg = list(samples())[which]
    damaged = bytearray(serialize_message(msg) if little else big_endian(msg))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(damaged) - 4))
        damaged[at:at + 4] = data.draw(st.sampled_from([b"\xff\xff\xff\xff", b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\0\0\0\x80"]) | st.binary(min_size=4, max_size=4))
    read_or_refuse(kind, bytes(damaged[:data.draw(st.integers(4, len(damaged)))]))
