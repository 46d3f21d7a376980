"""sensor_msgs/Image and CompressedImage -> rgb. One table of encodings; cv_bridge converts those that it knows where it is installed, OpenCV everywhere else,
to the same picture (test_cv_bridge.py). Sizes are checked here first, whoever converts. Duck-typed on the fields: nothing of ROS is imported before the first
image that cv_bridge shall convert."""
from __future__ import annotations

import functools
import re
import sys
from types import SimpleNamespace
from typing import Any, Callable, NamedTuple

import cv2
import numpy as np

from .errors import BadMessage

NATIVE_BIG = sys.byteorder == "big"


class Encoding(NamedTuple):
    """to_rgb: pixels [H,W,channels] of dtype ([H,W] for one channel; [H * rows / 2, W] uint8 for planes) -> [H,W,3] uint8."""
    channels: int
    dtype: type
    to_rgb: Callable[[np.ndarray], np.ndarray]
    rows: int = 2            # rows of bytes for two rows of the picture: 2 where pixels are interleaved, 3 and 6 with a plane of chroma behind that of luma
    even: tuple[int, int] = (1, 1)  # the picture's width and height must be multiples of these: pixels share chroma


def to_8bit(x: np.ndarray) -> np.ndarray:
    """uint16 -> uint8: x * 255 / 65535, rounded, as cv_bridge scales."""
    return cv2.convertScaleAbs(np.ascontiguousarray(x), alpha=255 / 65535).reshape(x.shape)


def _cvt(code: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: cv2.cvtColor(np.ascontiguousarray(x), code)


def _cvt16(code: int) -> Callable[[np.ndarray], np.ndarray]:
    """In 16 bits, then to 8: for Bayer, so that what is interpolated is rounded once."""
    return lambda x: to_8bit(cv2.cvtColor(np.ascontiguousarray(x), code))


_FROM_YUV = np.array([[1.16438, 0, 1.59603], [1.16438, -0.39176, -0.81297], [1.16438, 2.01723, 0]])  # BT.601, video range: of Y - 16, U - 128, V - 128


def _nv24(x: np.ndarray) -> np.ndarray:
    """Luma [H,W], and behind it chroma [H,W,2] as [2H,W]. OpenCV has no 4:4:4; this is what it computes for the others, to 1 of 255."""
    h, w = x.shape[0] // 3, x.shape[1]
    yuv = cv2.merge([cv2.max(np.ascontiguousarray(x[:h]), 16), *cv2.split(np.ascontiguousarray(x[h:]).reshape(h, w, 2))])
    return cv2.transform(yuv, np.hstack([_FROM_YUV, -_FROM_YUV @ [[16], [128], [128]]]))


_BGR, _BGRA, _RGBA, _GRAY = cv2.COLOR_BGR2RGB, cv2.COLOR_BGRA2RGB, cv2.COLOR_RGBA2RGB, cv2.COLOR_GRAY2RGB
_BAYER = {  # OpenCV names a pattern by its second row and column, ROS by its first
    "rggb": cv2.COLOR_BayerBG2RGB, "bggr": cv2.COLOR_BayerRG2RGB, "gbrg": cv2.COLOR_BayerGR2RGB, "grbg": cv2.COLOR_BayerGB2RGB}
_UYVY, _YUYV, _YVYU = (Encoding(2, np.uint8, _cvt(c), even=(2, 1)) for c in (cv2.COLOR_YUV2RGB_UYVY, cv2.COLOR_YUV2RGB_YUY2, cv2.COLOR_YUV2RGB_YVYU))
ENCODINGS: dict[str, Encoding] = {
    "rgb8": Encoding(3, np.uint8, lambda x: x), "rgba8": Encoding(4, np.uint8, _cvt(_RGBA)),
    "bgr8": Encoding(3, np.uint8, _cvt(_BGR)), "bgra8": Encoding(4, np.uint8, _cvt(_BGRA)), "mono8": Encoding(1, np.uint8, _cvt(_GRAY)),
    "rgb16": Encoding(3, np.uint16, to_8bit), "rgba16": Encoding(4, np.uint16, lambda x: _cvt(_RGBA)(to_8bit(x))),
    "bgr16": Encoding(3, np.uint16, lambda x: _cvt(_BGR)(to_8bit(x))), "bgra16": Encoding(4, np.uint16, lambda x: _cvt(_BGRA)(to_8bit(x))),
    "mono16": Encoding(1, np.uint16, lambda x: _cvt(_GRAY)(to_8bit(x))),
    **{f"bayer_{name}8": Encoding(1, np.uint8, _cvt(code)) for name, code in _BAYER.items()},
    **{f"bayer_{name}16": Encoding(1, np.uint16, _cvt16(code)) for name, code in _BAYER.items()},
    "yuv422": _UYVY, "uyvy": _UYVY, "yuv422_yuy2": _YUYV, "yuyv": _YUYV, "yvyu": _YVYU,
    "nv12": Encoding(1, np.uint8, _cvt(cv2.COLOR_YUV2RGB_NV12), 3, (2, 2)), "nv21": Encoding(1, np.uint8, _cvt(cv2.COLOR_YUV2RGB_NV21), 3, (2, 2)),
    "nv24": Encoding(1, np.uint8, _nv24, 6),
    # OpenCV's own types, in OpenCV's order. Not 16UC1: that is depth, or counts of an unknown range
    "8UC1": Encoding(1, np.uint8, _cvt(_GRAY)), "8UC3": Encoding(3, np.uint8, _cvt(_BGR)), "8UC4": Encoding(4, np.uint8, _cvt(_BGRA)),
    "16UC3": Encoding(3, np.uint16, lambda x: _cvt(_BGR)(to_8bit(x))), "16UC4": Encoding(4, np.uint16, lambda x: _cvt(_BGRA)(to_8bit(x))),
}
_NUMBERS = re.compile(r"(8U|8S|16U|16S|32S|32F|64F)(C\d*)?")  # encodings without a meaning of their own
_NOT_8BIT = "counts or metres, not colour; a camera's driver says mono16 where 65535 is white; is it a depth topic?"


def image_to_rgb(msg: Any) -> np.ndarray:
    """[H,W,3] uint8, C-contiguous, of a sensor_msgs/Image or CompressedImage. rgb8 without row padding is a view on the message's bytes. 16 bits are scaled by
    255 / 65535; YUV is BT.601 in video range. Raises BadMessage: unknown_encoding, bad_image_size, bad_image_data.

    nv12, nv21, nv24 (sensor_msgs/image_encodings.hpp, V4L2): height is the picture's; step is that of a row of luma; height rows of luma are followed by
    height / 2 rows (nv24: twice as many as luma) of interleaved chroma of the same step."""
    if hasattr(msg, "format"):
        return _compressed_to_rgb(msg)
    check_image(msg)
    encoding = ENCODINGS[msg.encoding]
    pixels = pixels_of(msg, encoding.dtype, encoding.channels, encoding.rows)
    return pixels if msg.encoding == "rgb8" and pixels.flags.c_contiguous else rgb_of(pixels, msg.encoding)


def check_image(msg: Any) -> tuple[int, int]:
    """(width, height) of a sensor_msgs/Image. Raises BadMessage as image_to_rgb does, but looks at no pixel."""
    encoding = ENCODINGS.get(msg.encoding)
    if encoding is None:
        why = _NOT_8BIT if _NUMBERS.fullmatch(msg.encoding) else "image_proc or the camera driver can convert"
        raise BadMessage("unknown_encoding", f"image encoding '{msg.encoding}' is not supported ({why}); use one of {', '.join(ENCODINGS)}")
    if msg.width % encoding.even[0] or msg.height % encoding.even[1]:
        raise BadMessage("bad_image_size", f"image of {msg.width}x{msg.height} '{msg.encoding}': pixels share chroma, so the width must be even" +
                         (" and the height too" if encoding.even[1] > 1 else "") + "; have the driver send another size or encoding")
    check_bytes(msg, encoding.dtype, encoding.channels, encoding.rows)
    return msg.width, msg.height


def rgb_of(pixels: np.ndarray, name: str) -> np.ndarray:
    """[H,W,3] uint8, C-contiguous, of pixels as `pixels_of` gives them, by cv_bridge if it knows the encoding `name`. Raises BadMessage."""
    try:
        out = cv_bridge_rgb(pixels, name) if in_cv_bridge(name) else ENCODINGS[name].to_rgb(pixels)
    except cv2.error as error:
        raise BadMessage("bad_image_size", f"image of {pixels.shape[1]}x{pixels.shape[0]} '{name}' cannot be converted: {error.err or error}; have the driver "
                                           "send another size or encoding") from None
    return np.ascontiguousarray(out)


def pixels_of(msg: Any, dtype: type, channels: int, rows: int = 2) -> np.ndarray:
    """[H,W,channels] (or [H * rows / 2, W] for one channel): a view on the message's bytes; a byte-swapped copy if they are foreign.
    Raises BadMessage: bad_image_size."""
    data = check_bytes(msg, dtype, channels, rows)
    width, height, step, size = msg.width, msg.height * rows // 2, msg.step, np.dtype(dtype).itemsize
    order = np.dtype(dtype).newbyteorder(">" if msg.is_bigendian else "<")
    out = np.ndarray((height, width, channels), order, data, 0, (step, channels * size, size))
    out = out if order.isnative else out.astype(dtype)
    return out[:, :, 0] if channels == 1 else out


def check_bytes(msg: Any, dtype: type, channels: int, rows: int = 2) -> np.ndarray:
    """The message's bytes [n] uint8: enough of them for its size. Raises BadMessage: bad_image_size."""
    width, height, step = msg.width, msg.height * rows // 2, msg.step
    row, data = width * channels * np.dtype(dtype).itemsize, bytes_of(msg.data)
    if width < 1 or height < 1 or step < row or len(data) < step * (height - 1) + row:
        planes = f" ({height} rows: {msg.height} of luma, then chroma; height must be the picture's)" if rows != 2 else ""
        raise BadMessage("bad_image_size", f"image of {width}x{msg.height} '{msg.encoding}', step {step}: needs a step of at least {row} bytes and "
                                           f"{max(step, row) * max(height, 1)} bytes of data{planes}, has {len(data)}; the publisher is broken or the message was cut")
    return data


def bytes_of(data: Any) -> np.ndarray:
    """[n] uint8: a view on the message's bytes."""
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


# ------------------------------------------------------------------------------------------------------- cv_bridge

@functools.cache
def cv_bridge_state() -> tuple[Any, str]:
    """(a CvBridge, '') or (None, why there is none): imported once, when first asked. One that was compiled for another numpy fails to load with anything."""
    try:
        import cv_bridge
        bridge = cv_bridge.CvBridge()
        bridge.imgmsg_to_cv2(_packed(np.zeros((2, 2, 3), np.uint8), "bgr8"), "rgb8")
        return bridge, ""
    except ImportError as error:
        return None, f"not importable: {error}"
    except Exception as error:
        return None, f"does not work here: {type(error).__name__}: {error}"


@functools.cache
def in_cv_bridge(name: str) -> bool:
    """Whether cv_bridge is here and makes rgb8 of this encoding (versions differ, so that it is tried once on a black image)."""
    bridge, encoding = cv_bridge_state()[0], ENCODINGS[name]
    if bridge is None or name == "rgb8" or encoding.rows != 2:  # there is nothing to convert; cv_bridge has no planes
        return False
    shape = (4, 4) if encoding.channels == 1 else (4, 4, encoding.channels)
    try:
        out = cv_bridge_rgb(np.zeros(shape, encoding.dtype), name)
    except Exception:  # CvBridgeError, and what its C++ raises
        return False
    return out.shape == (4, 4, 3) and out.dtype == np.uint8


def cv_bridge_rgb(pixels: np.ndarray, name: str) -> np.ndarray:
    """As rgb_of. cv_bridge is given packed rows of this machine's byte order: some versions ignore the step, or cannot swap bytes with numpy 2."""
    return cv_bridge_state()[0].imgmsg_to_cv2(_packed(pixels, name), "rgb8")


def _packed(pixels: np.ndarray, name: str) -> SimpleNamespace:
    pixels = np.ascontiguousarray(pixels)
    return SimpleNamespace(height=pixels.shape[0], width=pixels.shape[1], encoding=name, is_bigendian=int(NATIVE_BIG), step=pixels.strides[0],
                           data=pixels.reshape(-1).view(np.uint8))


# ------------------------------------------------------------------------------------------------------ compressed

_VIDEO = re.compile(r"h\.?26[45]|hevc|av1|vp[89]|ffmpeg|theora", re.IGNORECASE)


def _compressed_to_rgb(msg: Any) -> np.ndarray:
    """By image_transport's format, '<encoding>; <codec> compressed <encoding of what was coded>', or a bare 'jpeg', 'png', ..: the encoding before ';'
    says that a picture with one channel is a Bayer mosaic, or is no colour; 'compressed rgb..' that red and blue were swapped when it was coded."""
    name, _, coded = (part.strip() for part in msg.format.partition(";"))
    if _VIDEO.search(msg.format):
        raise BadMessage("unknown_encoding", f"compressed image of format '{msg.format}' is a video stream; decode it with image_transport's republish, or send jpeg or png")
    if "compressedDepth" in coded or (coded and _NUMBERS.fullmatch(name) and name not in ENCODINGS):
        raise BadMessage("unknown_encoding", f"compressed image of format '{msg.format}' is not a colour image: {_NOT_8BIT}")
    raw = decompressed(msg)
    if raw.dtype not in (np.uint8, np.uint16) or (raw.ndim == 3 and raw.shape[2] not in (3, 4)):
        raise BadMessage("unknown_encoding", f"compressed image of format '{msg.format}' holds {raw.dtype} {raw.shape}; 8 or 16 bits and 1, 3 or 4 channels are supported")
    target = coded.rpartition("compressed")[2].strip()
    bits = 8 * raw.itemsize
    if raw.ndim == 2:
        mosaic = name.startswith("bayer_") and not target
        return rgb_of(raw, f"{name[:10]}{bits}" if mosaic and f"{name[:10]}{bits}" in ENCODINGS else f"mono{bits}")
    return rgb_of(raw, ("rgb" if target.startswith("rgb") else "bgr") + ("a" if raw.shape[2] == 4 else "") + str(bits))


def decompressed(msg: Any, skip: int = 0) -> np.ndarray:
    """What imdecode makes of the bytes after `skip`, unchanged: uint8, uint16 or float32, [H,W] or [H,W,C] in BGR order. Raises BadMessage: bad_image_data."""
    data = bytes_of(msg.data)[skip:]
    try:
        out = cv2.imdecode(data, cv2.IMREAD_UNCHANGED) if len(data) else None
    except cv2.error:
        out = None
    if out is None:
        raise BadMessage("bad_image_data", f"compressed image of {len(data)} bytes, format '{msg.format}', cannot be decoded; jpeg and png are "
                                           "supported; was the message cut?")
    return out
