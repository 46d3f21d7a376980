"""Direct alignment of an image against a render of the map: the small motion that takes the render's camera to the image's.

Forward-compositional Gauss-Newton on SE(3) over an image pyramid (Baker & Matthews 2004; Kerl et al. 2013): points of the render with
depth and texture are projected into the image; residuals are grey levels, and depth where the frame has it, with weights of a t-distribution.
Gain and offset of the image are solved for with the motion. The pose as given is a Gaussian prior, so that what the image does not say stays.
"""
from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from .camera import Camera

LEVELS = 3
ITERATIONS = 6         # a level, at most
POINTS = 4000          # a level, at most
MIN_POINTS = 150       # .. and at least at the finest: below that nothing is said about the pose
MIN_SHARE = 0.2        # of the image that the map must cover
ALPHA = 0.9            # where the render counts
EDGE = 0.05            # relative step of depth: no point at one
CORRELATED = 200.0     # residuals of neighbours go together (the map is wrong in patches): so many pixels say as much as one would alone
LEAST_GAIN = 0.1       # an image that is darker than this share of the render, or its negative, shows something else
T_DOF = 5.0            # of the t-distribution of residuals (Kerl et al. 2013)
LEAST_GREY, LEAST_DEPTH = 2.0, 0.005   # floor of their spread: grey levels; share of the depth


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
    pyramid, T, result = _pyramid(image, render, camera), np.eye(4), None
    for level, (a, b, c) in enumerate(reversed(pyramid)):
        points = _points(b, c)
        if len(points.grey) < (MIN_POINTS if level == LEVELS - 1 else 40):
            if level == LEVELS - 1:
                return "texture"
            continue
        moved, result = _descend(_Level(a, c), points, T, T_prior, sigma_m, sigma_rad)
        if result is None and level == LEVELS - 1:
            return "overlap"
        T = T if result is None else moved   # a coarse level that got lost is left out
    if result.gain < LEAST_GAIN:
        return "texture"
    _, begin = _descend(_Level(pyramid[0][0], camera), points, np.eye(4), T_prior, sigma_m, sigma_rad, iterations=0, scales=result.scales)
    return Aligned(T, result.information, begin.cost, result.cost) if begin else "overlap"


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
    """Grey by the mean, depth by a sample, valid where all that it is made of is."""
    size = (c.width, c.height)
    depth_m = None if s.depth_m is None else cv2.resize(s.depth_m, size, interpolation=cv2.INTER_NEAREST)
    valid = cv2.resize(s.valid.astype(np.float32), size, interpolation=cv2.INTER_AREA) > 0.99
    return Seen(cv2.resize(s.grey, size, interpolation=cv2.INTER_AREA), depth_m, valid)


class _Points(NamedTuple):
    X: np.ndarray      # [N,3] float64, render's camera, m
    grey: np.ndarray   # [N]


def _points(render: Seen, c: Camera) -> _Points:
    """Valid pixels away from steps of depth, of those the half with more texture, evenly thinned out."""
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
    z = z.flat[at].astype(np.float64)
    X = np.stack([(u + 0.5 - c.cx) / c.fx * z, (v + 0.5 - c.cy) / c.fy * z, z], 1)
    return _Points(X, render.grey.flat[at].astype(np.float64))


def _gradient(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Central differences, per pixel."""
    kernel = np.array([-0.5, 0, 0.5], np.float32)
    one = np.ones(1, np.float32)
    return cv2.sepFilter2D(image, cv2.CV_32F, kernel, one), cv2.sepFilter2D(image, cv2.CV_32F, one, kernel)


# ---- one level -------------------------------------------------------------------------------------------------------
class _Level:
    """The frame's image with its gradients, to be sampled."""

    def __init__(self, image: Seen, camera: Camera):
        self.camera = camera
        self.planes = np.dstack([image.grey, *_gradient(image.grey)])
        self.valid = image.valid.astype(np.float32)
        self.depth = None
        if image.depth_m is not None:
            z, kernel = image.depth_m, np.ones((3, 3), np.uint8)
            low = cv2.erode(z, kernel)
            smooth = (low > 0) & (cv2.dilate(z, kernel) - low < EDGE * z)
            self.depth = np.dstack([z, *_gradient(z), smooth.astype(np.float32)])


class _State(NamedTuple):
    information: np.ndarray
    cost: float
    gain: float     # of the image over the render
    scales: tuple[float, float]


def _descend(level: _Level, points: _Points, T: np.ndarray, T_prior, sigma_m, sigma_rad, iterations: int = ITERATIONS, scales=None):
    """(T, its _State), or (T, None) when too few points fall into the image."""
    W = np.diag([sigma_m**-2] * 3 + [sigma_rad**-2] * 3)
    given = scales
    for i in range(iterations + 1):
        terms = _terms(level, points, T, given)
        if terms is None:
            return T, None
        H, g, cost, gain, scales = terms
        if i == iterations:
            break
        e = log_se3(T @ np.linalg.inv(T_prior))
        step = -np.linalg.solve(H + W, g + W @ e)
        T = exp_se3(step) @ T
        if np.abs(step[:3]).max() < 1e-3 * sigma_m and np.abs(step[3:]).max() < 1e-3 * sigma_rad:
            iterations = i + 1   # once more, for the cost at the end
            H, g, cost, gain, scales = _terms(level, points, T, given) or terms
            break
    return T, _State(H, cost, gain, scales)


def _terms(level: _Level, p: _Points, T: np.ndarray, scales):
    """Normal equations of the motion at T: H [6,6], g [6], robust cost per point, gain, spreads (grey, depth); None: too few points in the image."""
    c, X = level.camera, p.X @ T[:3, :3].T + T[:3, 3]
    z = np.maximum(X[:, 2], 1e-6)
    u, v = c.fx * X[:, 0] / z + c.cx - 0.5, c.fy * X[:, 1] / z + c.cy - 0.5   # OpenCV's pixel centres
    inside = (X[:, 2] > 1e-6) & (u >= 1) & (v >= 1) & (u <= c.width - 2) & (v <= c.height - 2)
    mu, mv = u.astype(np.float32)[None], v.astype(np.float32)[None]
    inside &= cv2.remap(level.valid, mu, mv, cv2.INTER_LINEAR)[0] > 0.99
    if inside.sum() < max(40, 0.3 * len(X)):
        return None
    X, z = X[inside], z[inside]
    grey, gx, gy = cv2.remap(level.planes, mu[:, inside], mv[:, inside], cv2.INTER_LINEAR)[0].astype(np.float64).T
    J = _motion(gx, gy, X, z, c)
    A, s_grey = np.column_stack([p.grey[inside], np.ones(len(z))]), scales and scales[0]
    r, s_grey, weight, gain = _photometric(grey, A, s_grey)
    B = A * weight[:, None]
    H = J.T @ (J * weight[:, None])
    cross = J.T @ B
    H -= cross @ np.linalg.solve(A.T @ B + 1e-9 * np.eye(2), cross.T)   # gain and offset go their own way
    g, cost, s_depth = J.T @ (weight * r), _robust(r, s_grey), 0.0
    H, g = H / (s_grey**2 * CORRELATED), g / (s_grey**2 * CORRELATED)
    if level.depth is not None:
        Hd, gd, costd, s_depth = _geometric(level.depth, mu[0, inside], mv[0, inside], X, z, c, scales and scales[1])
        H, g, cost = H + Hd, g + gd, cost + costd
    return H, g, cost, gain, (s_grey, s_depth)


def _motion(gx, gy, X, z, c: Camera) -> np.ndarray:
    """[N,6]: change of a sampled value with gradient (gx, gy) as the points move by v + w x X."""
    d = np.stack([gx * c.fx / z, gy * c.fy / z, -(gx * c.fx * X[:, 0] + gy * c.fy * X[:, 1]) / z**2], 1)
    return np.column_stack([d, np.cross(X, d)])


def _photometric(grey: np.ndarray, A: np.ndarray, scale):
    """Residuals after the best gain and offset, their spread, their weights, and the gain."""
    weight = np.ones(len(grey))
    for _ in range(2):
        B = A * weight[:, None]
        gain, offset = np.linalg.solve(A.T @ B + 1e-9 * np.eye(2), B.T @ grey)
        r = grey - A @ (gain, offset)
        s = max(1.4826 * float(np.median(np.abs(r))), LEAST_GREY) if scale is None else scale
        weight = (T_DOF + 1) / (T_DOF + (r / s) ** 2)
    return r, s, weight, gain


def _geometric(depth: np.ndarray, u, v, X, z, c: Camera, scale):
    """The same of relative depth, measured against the map's."""
    measured, gx, gy, smooth = depth[np.rint(v).astype(int), np.rint(u).astype(int)].astype(np.float64).T
    measured = measured + gx * (u - np.rint(u)) + gy * (v - np.rint(v))
    r = (measured - z) / z
    ok = (smooth > 0) & (np.abs(r) < 4 * EDGE)
    if ok.sum() < 40:
        return np.zeros((6, 6)), np.zeros(6), 0.0, 0.0
    r, X, z, gx, gy = r[ok], X[ok], z[ok], gx[ok], gy[ok]
    J = _motion(gx, gy, X, z, c)
    J[:, 2] -= 1
    J[:, 3:5] -= np.stack([X[:, 1], -X[:, 0]], 1)   # e_z . (w x X) = w . (X x e_z)
    J /= z[:, None]
    s = scale or max(1.4826 * float(np.median(np.abs(r))), LEAST_DEPTH)
    weight = (T_DOF + 1) / (T_DOF + (r / s) ** 2) / (s**2 * CORRELATED)
    return J.T @ (J * weight[:, None]), J.T @ (weight * r), _robust(r, s), s


def _robust(r: np.ndarray, s: float) -> float:
    return float(np.log1p((r / s) ** 2 / T_DOF).mean()) * (T_DOF + 1) / 2


# ---- SE(3) -----------------------------------------------------------------------------------------------------------
def exp_se3(xi: np.ndarray) -> np.ndarray:
    """[6] (translation, rotation vector) -> [4,4]; the translation is that of the matrix: small motions only need no more."""
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = cv2.Rodrigues(np.asarray(xi[3:], np.float64))[0], xi[:3]
    return T


def log_se3(T: np.ndarray) -> np.ndarray:
    """The inverse of exp_se3."""
    return np.concatenate([T[:3, 3], cv2.Rodrigues(T[:3, :3])[0][:, 0]])
