"""Plain encoders of what drivers send: rgb -> rows of bytes of every encoding, and RVL. Written from the formats' definitions, not from our decoders."""
from __future__ import annotations

import numpy as np

ORDERS = {"rgb8": "rgb", "bgr8": "bgr", "rgba8": "rgba", "bgra8": "bgra", "8UC3": "bgr", "8UC4": "bgra", "mono8": "m", "8UC1": "m",
          "rgb16": "rgb", "bgr16": "bgr", "rgba16": "rgba", "bgra16": "bgra", "16UC3": "bgr", "16UC4": "bgra", "mono16": "m"}
PACKED_YUV = {"yuv422": "uyvy", "uyvy": "uyvy", "yuv422_yuy2": "yuyv", "yuyv": "yuyv", "yvyu": "yvyu"}
PLANAR_YUV = {"nv12": "uv", "nv21": "vu", "nv24": "uv"}
BAYER = {f"bayer_{pattern}{bits}": pattern for bits in (8, 16) for pattern in ("rggb", "bggr", "gbrg", "grbg")}
EVERY = [*ORDERS, *PACKED_YUV, *PLANAR_YUV, *BAYER]
WORDS = {name for name in EVERY if "16" in name}  # of 16 bits


def picture(height: int, width: int) -> np.ndarray:
    """[H,W,3] uint8: blocks of 8x8 pixels of one colour each, dark to bright."""
    rng = np.random.default_rng(5)
    blocks = rng.integers(20, 236, (-(-height // 8), -(-width // 8), 3), np.uint8)
    return np.kron(blocks, np.ones((8, 8, 1), np.uint8))[:height, :width]


def rows_of(rgb: np.ndarray, name: str) -> np.ndarray:
    """[rows, bytes of a row / itemsize] uint8 or uint16 of [H,W,3] uint8; of mono, green counts."""
    if name in ORDERS:
        planes = dict(zip("rgb", np.moveaxis(rgb, 2, 0))) | {"m": rgb[..., 1], "a": np.full(rgb.shape[:2], 7, np.uint8)}
        out = np.stack([planes[c] for c in ORDERS[name]], 2)
    elif name in BAYER:
        out = np.empty(rgb.shape[:2], np.uint8)
        for i, c in enumerate(BAYER[name]):
            out[i // 2::2, i % 2::2] = rgb[i // 2::2, i % 2::2, "rgb".index(c)]
    else:
        out = _yuv_rows(rgb, name)
    out = out.reshape(len(out), -1)
    return out.astype(np.uint16) * 257 if name in WORDS else out  # 255 * 257 = 65535


def yuv(rgb: np.ndarray) -> np.ndarray:
    """[H,W,3] uint8: BT.601 in video range."""
    r, g, b = np.moveaxis(rgb.astype(float), 2, 0)
    return np.round(np.stack([16 + (65.738 * r + 129.057 * g + 25.064 * b) / 256, 128 + (-37.945 * r - 74.494 * g + 112.439 * b) / 256,
                              128 + (112.439 * r - 94.154 * g - 18.285 * b) / 256], 2)).astype(np.uint8)


def _yuv_rows(rgb: np.ndarray, name: str) -> np.ndarray:
    y, u, v = np.moveaxis(yuv(rgb), 2, 0)
    h, w = y.shape
    if name in PACKED_YUV:
        lumas, chroma = iter((y[:, 0::2], y[:, 1::2])), {"u": u[:, ::2], "v": v[:, ::2]}
        return np.stack([next(lumas) if c == "y" else chroma[c] for c in PACKED_YUV[name]], 2)
    by = 1 if name == "nv24" else 2
    pairs = np.stack([{"u": u, "v": v}[c][::by, ::by] for c in PLANAR_YUV[name]], 2)
    return np.concatenate([y, pairs.reshape(-1, w)])


def padded(rows: np.ndarray, extra: int, big: bool = False) -> tuple[bytes, int]:
    """Bytes of [rows, n] with `extra` junk bytes behind every row, and the step."""
    rows = rows.astype(rows.dtype.newbyteorder(">" if big else "<"))
    rows = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)
    out = np.full((rows.shape[0], rows.shape[1] + extra), 0xAB, np.uint8)
    out[:, :rows.shape[1]] = rows
    return out.tobytes(), out.shape[1]


def rvl(image: np.ndarray) -> bytes:
    """uint32 width, height and the RVL stream of [H,W] uint16, one pixel after the other (A. D. Wilson, 2017)."""
    nibbles: list[int] = []

    def put(value: int) -> None:
        while True:
            nibbles.append((value & 7) | (8 if value > 7 else 0))
            value >>= 3
            if not value:
                return

    pixels, i, before = image.reshape(-1).tolist(), 0, 0
    while i < len(pixels):
        start = i
        while i < len(pixels) and not pixels[i]:
            i += 1
        put(i - start)
        end = i
        while end < len(pixels) and pixels[end]:
            end += 1
        put(end - i)
        for value in pixels[i:end]:
            difference = value - before
            put(2 * difference if difference >= 0 else -2 * difference - 1)
            before = value
        i = end
    nibbles += [0] * (-len(nibbles) % 8)
    words = [sum(n << 28 - 4 * k for k, n in enumerate(nibbles[at:at + 8])) for at in range(0, len(nibbles), 8)]
    return np.array([image.shape[1], image.shape[0], *words], "<u4").tobytes()
