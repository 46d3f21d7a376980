"""encodings.py: every encoding x row padding x byte order gives the picture that was sent; compressed images by their format; every refusal."""
import cv2
import encoders
import messages as m
import numpy as np
import pytest

from spirula_ros import encodings
from spirula_ros.encodings import ENCODINGS, image_to_rgb
from spirula_ros.errors import BadMessage

FAMILIES = ["rosbags", "rclpy"]
W, H = 32, 24
RGB = encoders.picture(H, W)
FLAT = np.broadcast_to(np.uint8([200, 90, 30]), (H, W, 3))
rng = np.random.default_rng(0)


def expected(rgb, name):
    return np.dstack([rgb[..., 1]] * 3) if encoders.ORDERS.get(name) == "m" else rgb


def refused(msg) -> BadMessage:
    with pytest.raises(BadMessage) as caught:
        image_to_rgb(msg)
    assert len(caught.value.text) > 40
    return caught.value


def compressed(form, image, codec=None, family="rosbags"):
    data = image if isinstance(image, bytes) else cv2.imencode("." + (codec or form), image)[1].tobytes()
    return m.stamped("sensor_msgs/msg/CompressedImage", 1, "cam", family, format=form, data=data)


def test_the_matrix_has_every_encoding():
    assert set(encoders.EVERY) == set(ENCODINGS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("name", encoders.EVERY)
def test_every_encoding_gives_the_picture(name, big, extra, family):
    """Exactly; YUV, which is rounded to 8 bits twice, to 2 of 255; Bayer, which interpolates, of a flat picture."""
    source = FLAT if name in encoders.BAYER else RGB
    data, step = encoders.padded(encoders.rows_of(source, name), extra, big)
    rgb = image_to_rgb(m.image(1, W, H, name, data, step, big, family=family))
    assert rgb.dtype == np.uint8 and rgb.shape == (H, W, 3) and rgb.flags.c_contiguous
    off = np.abs(rgb.astype(int) - expected(source, name))
    assert off.max() <= (2 if name in encoders.PACKED_YUV or name in encoders.PLANAR_YUV else 0)


@pytest.mark.parametrize("name", encoders.BAYER)
def test_bayer_keeps_what_was_measured(name):
    """Where the mosaic has a colour's own pixel, debayering must not change it (borders excepted): not true of a wrong pattern."""
    rgb = image_to_rgb(m.image(1, W, H, name, encoders.rows_of(RGB, name).tobytes()))
    for i, c in enumerate(encoders.BAYER[name]):
        inner = (slice(2 + i // 2, -2, 2), slice(2 + i % 2, -2, 2), "rgb".index(c))
        np.testing.assert_array_equal(rgb[inner], RGB[inner])


def test_16_bits_are_scaled_as_a_fraction_of_65535_and_rounded():
    x = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    grey = image_to_rgb(m.image(1, 256, 256, "mono16", x.tobytes()))[..., 0]
    np.testing.assert_array_equal(grey, np.round(x * (255 / 65535)).astype(np.uint8))
    assert (grey != x >> 8).mean() > 0.2  # the high byte is not it


def test_rgb8_is_not_copied():
    for family in FAMILIES:
        msg = m.image(1, W, H, "rgb8", RGB.tobytes(), family=family)
        assert np.shares_memory(image_to_rgb(msg), np.frombuffer(msg.data, np.uint8)), family


def test_nv12_has_the_height_of_the_picture_and_chroma_behind_luma():
    rows = encoders.rows_of(RGB, "nv12")
    assert len(rows) == H * 3 // 2
    error = refused(m.image(1, W, H * 3 // 2, "nv12", rows.tobytes(), W))  # a publisher that counts the rows of chroma in height
    assert error.reason == "bad_image_size" and f"{H * 9 // 4} rows: {H * 3 // 2} of luma" in error.text and "height must be the picture's" in error.text
    refused(m.image(1, W, H, "nv12", rows[:H].tobytes(), W))                # luma alone
    tail = rows.tobytes() + bytes(4096)                                     # libcamera and V4L2 hand out whole pages
    np.testing.assert_array_equal(image_to_rgb(m.image(1, W, H, "nv12", tail, W)), image_to_rgb(m.image(1, W, H, "nv12", rows.tobytes(), W)))


@pytest.mark.parametrize("name, odd", [*((name, (7, 4)) for name in encoders.PACKED_YUV), *((name, size) for name in ("nv12", "nv21") for size in ((7, 4), (8, 3)))])
def test_pixels_that_share_chroma_need_even_sizes(name, odd):
    error = refused(m.image(1, *odd, name, bytes(400), 20))
    assert error.reason == "bad_image_size" and "must be even" in error.text and f"{odd[0]}x{odd[1]}" in error.text


@pytest.mark.parametrize("name", ["foo12", "16UC1", "16SC1", "32FC1", "64FC3", "8UC2", "8UC", "RGB8", ""])
def test_unknown_encodings_say_what_is_known(name):
    error = refused(m.image(1, W, H, name, bytes(W * H * 32)))
    assert error.reason == "unknown_encoding" and f"'{name}'" in error.text and "rgb8, " in error.text
    assert ("is it a depth topic" in error.text) == ("C" in name)


@pytest.mark.parametrize("name", encoders.EVERY)
def test_sizes_that_do_not_fit(name):
    rows = encoders.rows_of(RGB, name)
    data, row = rows.tobytes(), rows[0].nbytes
    for bad in (m.image(1, W, H, name, data[:-1], row), m.image(1, W, H, name, b"", row), m.image(1, W, H, name, data, row - 1), m.image(1, W, H, name, data, 0),
                m.image(1, 0, H, name, data, row), m.image(1, W, 10**9, name, data, row), m.image(1, W, 0, name, data, row)):
        assert refused(bad).reason == "bad_image_size"
    unpadded_last_row, step = encoders.padded(rows, 5)
    np.testing.assert_array_equal(image_to_rgb(m.image(1, W, H, name, unpadded_last_row[:-5], step)), image_to_rgb(m.image(1, W, H, name, data, row)))


# ------------------------------------------------------------------------------------------------------ compressed

SMOOTH = np.dstack([np.add.outer(np.arange(48), np.arange(64)).astype(np.uint8) + c for c in (0, 60, 120)])
BGR = SMOOTH[..., ::-1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form, image, codec, wanted", [
    ("png", BGR, "png", SMOOTH), ("jpeg", BGR, "jpeg", SMOOTH), ("rgb8; jpeg compressed bgr8", BGR, "jpeg", SMOOTH), ("rgb8; png compressed bgr8", BGR, "png", SMOOTH),
    ("rgb8; png compressed rgb8", SMOOTH, "png", SMOOTH), ("rgb8; jpeg compressed rgb8", SMOOTH, "jpeg", SMOOTH),  # coded with red and blue swapped, and it says so
    ("bgr8; jpeg compressed bgr8", BGR, "jpeg", SMOOTH), ("rgb8;jpeg compressed bgr8", BGR, "jpeg", SMOOTH), ("yuv422_yuy2; jpeg compressed bgr8", BGR, "jpeg", SMOOTH),
    ("bgra8; png compressed bgr8", np.dstack([BGR, BGR[..., :1]]), "png", SMOOTH), ("rgb16; png compressed bgr16", BGR.astype(np.uint16) * 257, "png", SMOOTH),
    ("mono8; jpeg compressed mono8", SMOOTH[..., 0], "jpeg", np.dstack([SMOOTH[..., 0]] * 3)), ("mono8; png compressed ", SMOOTH[..., 0], "png", np.dstack([SMOOTH[..., 0]] * 3)),
    ("mono16; png compressed ", SMOOTH[..., 0].astype(np.uint16) * 257, "png", np.dstack([SMOOTH[..., 0]] * 3)),
    ("bayer_rggb8; jpeg compressed mono8", SMOOTH[..., 0], "jpeg", np.dstack([SMOOTH[..., 0]] * 3)),  # image_transport made it grey first
    ("bayer_rggb8; jpeg compressed bgr8", BGR, "jpeg", SMOOTH)])
def test_compressed_images(form, image, codec, wanted, family):
    rgb = image_to_rgb(compressed(form, image, codec, family))
    assert rgb.flags.c_contiguous and np.abs(rgb.astype(int) - wanted).max() <= (12 if codec == "jpeg" else 0)


@pytest.mark.parametrize("name", encoders.BAYER)
def test_a_compressed_mosaic_is_debayered(name):
    rows = encoders.rows_of(RGB, name)
    np.testing.assert_array_equal(image_to_rgb(compressed(f"{name}; png compressed ", rows, "png")), image_to_rgb(m.image(1, W, H, name, rows.tobytes())))


def test_exif_does_not_turn_images():
    """CameraInfo is that of the sensor."""
    data = cv2.imencode(".jpeg", BGR)[1].tobytes()
    tiff = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"  # orientation 6
    app1 = b"\xff\xe1" + (len(tiff) + 8).to_bytes(2, "big") + b"Exif\0\0" + tiff
    assert image_to_rgb(compressed("jpeg", data[:2] + app1 + data[2:])).shape == SMOOTH.shape


def test_refused_compressed_images():
    png = cv2.imencode(".png", BGR)[1].tobytes()
    for data in (png[:10], b"", b"junk"):
        assert refused(compressed("png", data)).reason == "bad_image_data"
    for form in ("h264", "hevc", "bgr8; h265", "rgb8; ffmpeg av1"):
        error = refused(compressed(form, png))
        assert error.reason == "unknown_encoding" and "video" in error.text and "republish" in error.text
    for form in ("16UC1; compressedDepth png", "32FC1; compressedDepth rvl", "16UC1; png compressed "):
        error = refused(compressed(form, png))
        assert error.reason == "unknown_encoding" and "depth" in error.text
    assert refused(compressed("tiff", rng.random((4, 4)).astype(np.float32), "tiff")).reason == "unknown_encoding"


# ------------------------------------------------------------------------------------------------------- cv_bridge

class Bridge:
    """Stands for a cv_bridge that knows two encodings, so that its use is tested where there is none; notes what it was given."""

    def __init__(self):
        self.given = []

    def imgmsg_to_cv2(self, msg, desired):
        assert desired == "rgb8" and msg.encoding in ("bgr8", "mono16"), "unknown"
        self.given.append(msg)
        dtype, shape = (np.uint8, (msg.height, msg.width, 3)) if msg.encoding == "bgr8" else (np.uint16, (msg.height, msg.width))
        x = np.ndarray(shape, dtype, msg.data)     # as ROS 1's: it ignores the step
        return np.full((msg.height, msg.width, 3), 77, np.uint8) if msg.encoding == "bgr8" else np.dstack([(x // 257).astype(np.uint8)] * 3)


@pytest.fixture
def bridge(monkeypatch):
    there = Bridge()
    monkeypatch.setattr(encodings, "cv_bridge_state", lambda: (there, ""))
    encodings.in_cv_bridge.cache_clear()
    yield there
    encodings.in_cv_bridge.cache_clear()


def test_cv_bridge_converts_what_it_knows_and_only_that(bridge):
    for name in encoders.EVERY:
        data, step = encoders.padded(encoders.rows_of(RGB, name), 5, big=True)
        rgb = image_to_rgb(m.image(1, W, H, name, data, step, True))
        assert (rgb == 77).all() == (name == "bgr8"), name
    assert {msg.encoding for msg in bridge.given} == {"bgr8", "mono16"}
    for msg in bridge.given:  # packed rows, this machine's byte order
        assert msg.step * msg.height == len(msg.data) and not msg.is_bigendian
    np.testing.assert_array_equal(image_to_rgb(m.image(1, W, H, "mono16", encoders.padded(encoders.rows_of(RGB, "mono16"), 3, True)[0], 2 * W + 3, True)), expected(RGB, "mono16"))


def test_sizes_are_checked_before_cv_bridge_sees_them(bridge):
    given = len(bridge.given)
    assert refused(m.image(1, W, H, "mono16", bytes(2 * W * H - 1), 2 * W)).reason == "bad_image_size"
    assert len(bridge.given) == given


def test_a_cv_bridge_that_does_not_load_is_said(monkeypatch):
    import sys
    import types
    broken = types.ModuleType("cv_bridge")
    broken.CvBridge = lambda: (_ for _ in ()).throw(SystemError("compiled for numpy 1"))
    for module, word in ((broken, "compiled for numpy 1"), (None, "not importable")):
        monkeypatch.setitem(sys.modules, "cv_bridge", module)
        there, why = encodings.cv_bridge_state.__wrapped__()
        assert there is None and word in why
