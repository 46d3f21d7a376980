"""Direct alignment of an image against a render of the map: the small motion that takes the render's camera to the image's.

Forward-compositional Gauss-Newton on SE(3) over an image pyramid (Baker & Matthews 2004; Kerl et al. 2013): points of the render with
depth and texture are projected into the image; residuals are grey levels, and depth where the frame has it, with weights of a t-distribution.
Gain and offset of the image are solved for with the motion. The pose as given is a Gaussian prior, so that what the image does not say stays.
"""
from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from . import native
from .camera import Camera, resized_depth

LEVELS = 3
ITERATIONS = 6         # a level, at most
POINTS = 2000          # a level, at most
MIN_POINTS = 150       # .. and at least at the finest: below that nothing is said about the pose
LEAST_PX = 4           # of a level, each way
MIN_SHARE = 0.2        # of the image that the map must cover
ALPHA = 0.9            # where the render counts
EDGE = 0.05            # relative step of depth: no point at one
LEAST_GAIN = 0.1       # an image that is darker than this share of the render, or its negative, shows something else


class Seen(NamedTuple):
    """The map from a camera, or a frame. grey [H,W] float32 0..255, depth_m [H,W] float32, 0: unknown, or None; valid [H,W] bool."""
    grey: np.ndarray
    depth_m: np.ndarray | None
    valid: np.ndarray


class Aligned(NamedTuple):
    T: np.ndarray            # [4,4] float64: render's camera -> image's camera
    information: np.ndarray  # [6,6] of the images alone, without the prior: (translation in m, rotation in rad)
    before: float            # robust residual per point at the start, in units of its spread ..
    after: float             # .. and at the end


def align(image: Seen, render: Seen, camera: Camera, T_prior: np.ndarray, sigma_m: float, sigma_rad: float) -> Aligned | str:
    """Both at `camera`. T_prior [4,4]: render's camera -> image's camera as given; sigma_m, sigma_rad: its noise along and around each axis.
    A string says why there is no answer: `overlap` or `texture`."""
    if render.valid.mean() < MIN_SHARE:
        return "overlap"
    pyramid, T, result, sigmas = _pyramid(image, render, camera), np.eye(4), None, (sigma_m, sigma_rad)
    for level, (a, b, c) in enumerate(reversed(pyramid)):
        points = _points(b, c)
        if min(c.width, c.height) < LEAST_PX or len(points) < (MIN_POINTS if level == LEVELS - 1 else 40):
            if level == LEVELS - 1:
                return "texture"
            continue
        moved, result = _descend(a, points, c, T, T_prior, sigmas)
        if result is None and level == LEVELS - 1:
            return "overlap"
        T = T if result is None else moved   # a coarse level that got lost is left out
    if result.gain < LEAST_GAIN:
        return "texture"
    shown = image if result.scales[1] else image._replace(depth_m=None)   # both with depth or both without
    _, begin = _descend(shown, points, camera, np.eye(4), T_prior, sigmas, iterations=0, scales=result.scales)
    return Aligned(T, np.array(result.information).reshape(6, 6), begin.cost, result.cost) if begin else "overlap"


# ---- the pyramid -----------------------------------------------------------------------------------------------------
def _pyramid(image: Seen, render: Seen, camera: Camera) -> list[tuple[Seen, Seen, Camera]]:
    """Finest first."""
    levels = [(image, render, camera)]
    while len(levels) < LEVELS:
        a, b, c = levels[-1]
        c = c.resized(max(c.width // 2, 1), max(c.height // 2, 1))
        levels.append((_halved(a, c), _halved(b, c), c))
    return levels


def _halved(s: Seen, c: Camera) -> Seen:
    """Grey by the mean, depth too where it has no step, valid where all that it is made of is."""
    size = (c.width, c.height)
    depth_m = None if s.depth_m is None else resized_depth(s.depth_m, *size)
    valid = cv2.resize(s.valid.astype(np.float32), size, interpolation=cv2.INTER_AREA) > 0.99
    return Seen(cv2.resize(s.grey, size, interpolation=cv2.INTER_AREA), depth_m, valid)


def _points(render: Seen, c: Camera) -> np.ndarray:
    """[N,4] float32: place in the render's camera, m, and grey level. Valid pixels away from steps of depth, of those the half with more texture, evenly thinned out."""
    z = render.depth_m
    kernel = np.ones((3, 3), np.uint8)
    step = cv2.dilate(z, kernel) - cv2.erode(z, kernel)
    good = render.valid & (z > 0) & (step < EDGE * z)
    good[[0, -1]] = good[:, [0, -1]] = False
    gx, gy = _gradient(render.grey)
    strength = gx * gx + gy * gy
    at = np.flatnonzero(good)
    if len(at):
        at = at[strength.flat[at] >= max(np.median(strength.flat[at]), 0.25)]
        at = at[::-(-len(at) // POINTS) or 1]
    v, u = np.divmod(at, c.width)
    z = z.flat[at]
    return np.stack([(u + 0.5 - c.cx) / c.fx * z, (v + 0.5 - c.cy) / c.fy * z, z, render.grey.flat[at]], 1).astype(np.float32)


def _gradient(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Central differences, per pixel."""
    kernel = np.array([-0.5, 0, 0.5], np.float32)
    one = np.ones(1, np.float32)
    return cv2.sepFilter2D(image, cv2.CV_32F, kernel, one), cv2.sepFilter2D(image, cv2.CV_32F, one, kernel)


# ---- one level: align.h ------------------------------------------------------------------------------------------------
def _descend(image: Seen, points: np.ndarray, c: Camera, T: np.ndarray, T_prior: np.ndarray, sigmas, iterations: int = ITERATIONS, scales=(0.0, 0.0)):
    """(T, the native result), or (T, None) when too few points fall into the image."""
    found = native.align(grey=image.grey, depth_m=image.depth_m, valid=image.valid, points=points, intrinsics=(c.fx, c.fy, c.cx, c.cy), T=T, T_prior=T_prior,
                         sigma_m=sigmas[0], sigma_rad=sigmas[1], iterations=iterations, scales=scales)
    return np.array(found.T).reshape(4, 4), found if found.found else None


# ---- SE(3) -----------------------------------------------------------------------------------------------------------
def exp_se3(xi: np.ndarray) -> np.ndarray:
    """[6] (translation, rotation vector) -> [4,4]; the translation is that of the matrix: small motions only need no more."""
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = cv2.Rodrigues(np.asarray(xi[3:], np.float64))[0], xi[:3]
    return T


def log_se3(T: np.ndarray) -> np.ndarray:
    """The inverse of exp_se3."""
    return np.concatenate([T[:3, 3], cv2.Rodrigues(T[:3, :3])[0][:, 0]])
