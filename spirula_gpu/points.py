"""Points of a lidar as depth of a camera: `project` makes the sparse depth image, `fill` what lies between its samples.

Inverse depth is what is interpolated: a plane is linear in it over the image (1/z = (n . ray) / d), so planes come out exactly.
A depth image whose samples stand close together, with holes or without, is left as it is by both.
"""
from __future__ import annotations

import cv2
import numpy as np

from .camera import Camera

NEAR_M = 0.01          # points nearer than this to the image plane are not seen
JUMP = 0.05            # of inverse depth, relative: two samples that differ by more are of two surfaces ..
SLANT_JUMP = 0.3       # .. or, up to this, of a slanted one that continues on one side as it runs between them
REACH = 2              # gaps of up to so many sampling distances are filled
FARTHEST = 1 / 8       # of the image's height: samples at larger distances are not of surfaces that could be filled
SATURATED = 1.3        # see sampling_distance


def project(points_cam: np.ndarray, camera: Camera) -> np.ndarray:
    """depth_m [H,W] float32, camera z in metres, 0 = unknown: the nearest of the points [P,3] float (camera axes x right, y down,
    z forward, m) in each pixel, without those that a nearer surface hides. Between the samples of that surface there are gaps through which
    one sees a point that the lidar saw from elsewhere: it is hidden when nearer samples lie on two opposite sides of it within the
    sampling distance. At the outline of a surface they lie on one side only, and the point stays."""
    z = points_cam[:, 2]
    points_cam = points_cam[z > NEAR_M]  # also drops NaN
    inverse = (1.0 / points_cam[:, 2]).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is not inside
        u, v = (np.floor(points_cam[:, k] * inverse * f + c) for k, f, c in ((0, camera.fx, camera.cx), (1, camera.fy, camera.cy)))
    inside = (u >= 0) & (u < camera.width) & (v >= 0) & (v < camera.height)
    at = v[inside].astype(np.intp) * camera.width + u[inside].astype(np.intp)
    out = np.zeros(camera.height * camera.width, np.float32)
    np.maximum.at(out, at, inverse[inside])
    out = out.reshape(camera.height, camera.width)
    out[_hidden(out, camera.fx)] = 0
    return _inverted(out)


def _hidden(inverse: np.ndarray, f_px: float) -> np.ndarray:
    """[H,W] bool: see `project`; inverse [H,W] float32, 0 = unknown."""
    n = sampling_distance(inverse > 0)
    if n == 1:
        return np.zeros(inverse.shape, bool)
    half, padded = n // 2, np.pad(inverse, 1)
    limit = inverse * (1 + JUMP + n / f_px)  # in a corner of two walls, each at 45 degrees to the ray, 1/z grows by 1 / f_px a pixel

    def nearer(side: np.ndarray, size: tuple[int, int], anchor: tuple[int, int]) -> np.ndarray:
        """Whether a nearer sample lies up to n pixels away on one side; side: the image, moved by a pixel so that this row or column does not count."""
        return cv2.dilate(side, np.ones(size, np.uint8), anchor=anchor, borderType=cv2.BORDER_CONSTANT, borderValue=0) > limit
    across, along = (n, 2 * half + 1), (2 * half + 1, n)
    above, below = nearer(padded[:-2, 1:-1], across, (half, n - 1)), nearer(padded[2:, 1:-1], across, (half, 0))
    left, right = nearer(padded[1:-1, :-2], along, (n - 1, half)), nearer(padded[1:-1, 2:], along, (0, half))
    return (inverse > 0) & ((above & below) | (left & right))


def sampling_distance(known: np.ndarray) -> int:
    """Pixels between neighbouring samples, a power of two, by box counting: `known` [H,W] bool is covered with boxes of 1, 2, 4, .. pixels, and the area
    of the boxes that hold a sample grows until there are no gaps between samples any more. Holes, and what the lidar does not reach, stay
    outside. Of scan lines it is the distance between the lines, of scattered samples 1.5 times their mean distance. 1: they lie beside each other, or
    so far apart that nothing can be said about what is between them."""
    size, area, largest = 1, np.count_nonzero(known), FARTHEST * known.shape[0]
    while size <= largest:
        known = np.pad(known, [(0, n % 2) for n in known.shape])
        known = known[::2, ::2] | known[1::2, ::2] | known[::2, 1::2] | known[1::2, 1::2]
        larger = 4 * size * size * np.count_nonzero(known)
        if larger <= SATURATED * area:
            return size
        size, area = 2 * size, larger
    return 1


def fill(depth_m: np.ndarray) -> np.ndarray:
    """depth_m [H,W] float32, m, 0 = unknown -> the same with what lies between neighbouring samples of one surface.

    Gaps along rows and columns, the shortest first, from 2 pixels to REACH sampling distances: what is filled in a short one helps with the
    longer. Linear in inverse depth between the two ends. Nothing across a discontinuity, and nothing where there are no samples around."""
    distance = sampling_distance(depth_m > 0)
    if distance == 1:
        return depth_m
    inverse, gap = _inverted(depth_m), 2
    while gap <= REACH * distance:
        _bridge(inverse, gap)
        across = np.ascontiguousarray(inverse.T)
        _bridge(across, gap)
        inverse, gap = np.ascontiguousarray(across.T), 2 * gap
    _bridge(inverse, gap // 2)
    return np.where(depth_m > 0, depth_m, _inverted(inverse))


def _bridge(inverse: np.ndarray, gap: float) -> None:
    """Fills along the rows, in place, between samples at most `gap` pixels apart that are of one surface."""
    flat, width = inverse.reshape(-1), inverse.shape[1]
    at = np.flatnonzero(flat)
    step = np.diff(at)
    k = np.flatnonzero((step > 1) & (step <= gap))
    k = k[at[k] // width == at[k + 1] // width]
    first, n, a, b = at[k], step[k], flat[at[k]], flat[at[k + 1]]
    jump, least, slope = np.abs(b - a), np.minimum(a, b), (b - a) / n.astype(np.float32)

    def goes_on(k: np.ndarray) -> np.ndarray:
        """Whether the surface between samples k and k + 1 has that slope too."""
        k = k.clip(0, len(step) - 1)
        near = (step[k] <= gap) & (at[k] // width == at[k + 1] // width)
        return near & (np.abs((flat[at[k + 1]] - flat[at[k]]) / step[k] - slope) * n <= JUMP * least)
    good = jump <= JUMP * least
    good |= (jump <= SLANT_JUMP * least) & (goes_on(k - 1) | goes_on(k + 1))
    first, inner, a, slope = first[good], n[good] - 1, a[good], slope[good]
    i = np.arange(int(inner.sum())) - np.repeat(np.cumsum(inner) - inner, inner) + 1  # 1 .. inner within each gap
    flat[np.repeat(first, inner) + i] = np.repeat(a, inner) + np.repeat(slope, inner) * i.astype(np.float32)


def _inverted(x: np.ndarray) -> np.ndarray:
    """1/x, and 0 where x is 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 0)
