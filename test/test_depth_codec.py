"""depth_codec.py: raw and compressed depth of every kind, both message families, RVL against a plain encoder, and every refusal."""
import cv2
import encoders
import messages as m
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from spirula_ros.depth_codec import MAX_RVL_PIXELS, depth_to_m, rvl_decoded
from spirula_ros.errors import BadMessage

FAMILIES = ["rosbags", "rclpy"]
W, H = 6, 4
rng = np.random.default_rng(0)
MM = rng.integers(1, 65536, (H, W), np.uint16)
MM[1, 2] = MM[3, :3] = 0
MM[2, 4] = 65535
IN_M = np.where(MM == 65535, 0, MM * np.float32(0.001))


def compressed(form, data, family="rosbags"):
    return m.stamped("sensor_msgs/msg/CompressedImage", 1, "cam", family, format=form, data=data)


def png(image):
    return cv2.imencode(".png", image)[1].tobytes()


def quantised(depth_m, z0=100.0, z_max=10.0):
    """(header, codes) as compressed_depth_image_transport's encodeCompressedDepthImage makes them, one pixel after the other."""
    a = np.float32(z0 * (z0 + 1))
    b = np.float32(1) - a / np.float32(z_max)
    codes = [int(a / z + b) if z < z_max else 0 for z in depth_m.reshape(-1)]
    return np.int32(0).tobytes() + np.array([a, b], "<f4").tobytes(), np.array(codes, np.uint16).reshape(depth_m.shape)


def refused(msg):
    with pytest.raises(BadMessage) as caught:
        depth_to_m(msg)
    assert len(caught.value.text) > 40
    return caught.value


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("big", [False, True])
def test_depth(big, extra, family):
    mm = np.array([[0, 1, 1000], [65535, 65534, 12345]], np.uint16)
    expected = np.array([[0, 0.001, 1.0], [0, 65.534, 12.345]], np.float32)
    for encoding in ("16UC1", "mono16"):
        data, step = encoders.padded(mm, extra, big)
        depth = depth_to_m(m.image(1, 3, 2, encoding, data, step, big, family=family))
        assert depth.dtype == np.float32 and depth.flags.c_contiguous
        np.testing.assert_allclose(depth, expected, rtol=1e-6)
    metres = np.array([[np.nan, np.inf, -np.inf], [-1, 0, 2.5]], np.float32)
    data, step = encoders.padded(metres, extra, big)
    depth = depth_to_m(m.image(1, 3, 2, "32FC1", data, step, big, family=family))
    assert depth.dtype == np.float32 and depth.flags.c_contiguous
    np.testing.assert_array_equal(depth, [[0, 0, 0], [0, 0, 2.5]])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form, data", [("png", png(MM)), ("16UC1; png compressed ", png(MM)), ("16UC1; compressedDepth png", bytes(12) + png(MM)),
                                        ("16UC1; compressedDepth", bytes(12) + png(MM)), ("16UC1", bytes(12) + png(MM)), ("mono16; compressedDepth png", bytes(12) + png(MM)),
                                        ("16UC1; compressedDepth rvl", bytes(12) + encoders.rvl(MM))])
def test_compressed_counts(form, data, family):
    depth_m = depth_to_m(compressed(form, data, family))
    assert depth_m.dtype == np.float32
    np.testing.assert_allclose(depth_m, IN_M, rtol=1e-6)
    np.testing.assert_allclose(depth_to_m(compressed(form, data), 0.0002), IN_M * np.float32(0.2), rtol=1e-6)


@pytest.mark.parametrize("codec", ["png", "rvl"])
def test_compressed_metres(codec):
    """Inverse depth: off by half a code at most, which is 0.5 / a of the depth squared, and cut to whole codes."""
    depth_m = rng.uniform(0.3, 9.9, (40, 50)).astype(np.float32)
    depth_m[3, 4], depth_m[7] = np.nan, 12
    header, codes = quantised(depth_m)
    got = depth_to_m(compressed(f"32FC1; compressedDepth {codec}", header + (png(codes) if codec == "png" else encoders.rvl(codes))))
    seen = depth_m < 10
    assert got.dtype == np.float32 and (got[~seen] == 0).all() and (~seen).sum() == 51
    error = np.abs(got[seen] - depth_m[seen])
    assert (error <= 1.001 * depth_m[seen] * got[seen] / 10100 + 1e-6).all() and error.max() > 1e-4


def test_a_tiff_of_metres():
    depth_m = rng.uniform(0.3, 9.9, (H, W)).astype(np.float32)
    depth_m[0, 0] = np.nan
    got = depth_to_m(compressed("32FC1; tiff compressed ", cv2.imencode(".tiff", depth_m)[1].tobytes()))
    np.testing.assert_array_equal(got, np.nan_to_num(depth_m))


def test_refused_depth():
    assert refused(m.image(1, W, H, "rgb8", bytes(W * H * 3))).reason == "unknown_encoding"
    assert refused(m.image(1, W, H, "32FC1", b"\0" * 10, W * 4)).reason == "bad_image_size"
    assert refused(compressed("32FC1; png compressed ", png(MM))).reason == "unknown_encoding"         # what would its codes be?
    assert refused(compressed("jpeg", cv2.imencode(".jpeg", MM.astype(np.uint8))[1].tobytes())).reason == "unknown_encoding"
    for a, b in ((0, 0), (-1, 0), (np.nan, 0), (1, np.inf)):
        error = refused(compressed("32FC1; compressedDepth png", np.int32(0).tobytes() + np.array([a, b], "<f4").tobytes() + png(MM)))
        assert error.reason == "bad_image_data" and "quantisation" in error.text
    for form, data in (("16UC1; compressedDepth png", bytes(12) + png(MM)[:20]), ("16UC1; compressedDepth png", b""), ("16UC1; compressedDepth rvl", bytes(12))):
        assert refused(compressed(form, data)).reason == "bad_image_data"


# ------------------------------------------------------------------------------------------------------------- rvl

def test_rvl_example_by_hand():
    """0 0 5 4: two zeros (2), two others (2), +5 -> 10 = 0b1_010 -> nibbles 1010 0001, -1 -> 1."""
    word = 0x2 << 28 | 0x2 << 24 | 0b1010 << 20 | 0b0001 << 16 | 0b0001 << 12
    np.testing.assert_array_equal(rvl_decoded(np.frombuffer(np.array([2, 2, word], "<u4").tobytes(), np.uint8)), [[0, 0], [5, 4]])


@settings(max_examples=300, deadline=None)
@given(arrays.arrays(np.uint16, arrays.array_shapes(min_dims=2, max_dims=2, max_side=24),
                     elements=st.one_of(st.just(0), st.integers(0, 65535), st.integers(990, 1010)), fill=st.just(0)))
def test_rvl_of_anything(image):
    np.testing.assert_array_equal(rvl_decoded(np.frombuffer(encoders.rvl(image), np.uint8)), image)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 40), st.integers(0, 40))
def test_rvl_of_junk_is_an_image_or_refused(data, width, height):
    junk = np.frombuffer(np.array([width, height], "<u4").tobytes() + data, np.uint8)
    try:
        assert rvl_decoded(junk).shape == (height, width)
    except BadMessage as error:
        assert error.reason == "bad_image_data"


def test_rvl_that_was_cut_is_refused_at_every_length():
    image = rng.integers(500, 5000, (12, 16), np.uint16) * (rng.random((12, 16)) > 0.4)
    image[-1, -1] = 1
    data = np.frombuffer(encoders.rvl(image.astype(np.uint16)), np.uint8)
    for n in range(len(data)):
        with pytest.raises(BadMessage):
            rvl_decoded(data[:n])


def test_rvl_sizes_that_cannot_be():
    for width, height in ((0, 5), (5, 0), (2**31, 2**31), (MAX_RVL_PIXELS + 1, 1)):
        with pytest.raises(BadMessage, match=f"{width}x{height}.*limit"):
            rvl_decoded(np.frombuffer(np.array([width, height, 0], "<u4").tobytes(), np.uint8))
    assert not rvl_decoded(np.frombuffer(encoders.rvl(np.zeros((480, 640), np.uint16)), np.uint8)).any()  # all unknown: 12 bytes
