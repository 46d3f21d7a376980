"""Plain tables: gaussians.npy for numpy, the gzip of floats that splat.js takes, and a point cloud. They are written, not read back."""
from __future__ import annotations

import io
import zlib
from typing import Iterator

import numpy as np

from .ply import header
from .splats import Splats, as_byte, colors, covariances, opacities

SPLAT_JS = 13  # floats of a Gaussian: x y z, r g b, opacity, covariance xx xy xz yy yz zz
NPY = 25       # .. x y z, the covariance and three zeros, opacity, SH to degree 1: [4,3], the channel fastest
POINT = np.dtype([("xyz", "<f4", 3), ("rgb", "u1", 3)])


def pack_npy(splats: Splats) -> Iterator[bytes]:
    """[N,25] float32."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, dict(descr="<f4", fortran_order=False, shape=(len(splats.means), NPY)))
    yield head.getvalue()
    for s in splats.with_degree(1).blocks():
        n = len(s.means)
        yield np.concatenate([s.means, covariances(s), np.zeros((n, 3)), opacities(s)[:, None], s.sh.reshape(n, 12)], 1).astype("<f4").tobytes()


def pack_splat_js(splats: Splats) -> Iterator[bytes]:
    """gzip of [N,13] float32."""
    stream = zlib.compressobj(6, wbits=31)
    for s in splats.blocks():
        yield stream.compress(np.concatenate([s.means, np.clip(colors(s), 0, 1), opacities(s)[:, None], covariances(s)], 1).astype("<f4").tobytes())
    yield stream.flush()


def pack_points(splats: Splats) -> Iterator[bytes]:
    """A .ply of the means with their colours."""
    yield header(("vertex", len(splats.means), [("float", axis) for axis in "xyz"] + [("uchar", name) for name in ("red", "green", "blue")]))
    for s in splats.blocks():
        rows = np.empty(len(s.means), POINT)
        rows["xyz"], rows["rgb"] = s.means, as_byte(255 * colors(s))
        yield rows.tobytes()
