"""Small corrections of relative poses before depth is triangulated: corners are tracked from the reference into each view, and poses and corner depths
are fitted together, the poses anchored at what was given, as firmly as the tracks agree with them. Odometry that is off by half a degree makes depths that are
off by several percent; poses that are right (COLMAP) must not drift."""
from __future__ import annotations

import math

import cv2
import numpy as np

from .camera import Camera

CORNERS, WINDOW_PX = 300, 11
FAR_PX = 0.04         # of the image's longest edge: a corner is looked for so far from where the poses say
BACK_PX = 0.5         # a track must lead back to within this
NOISE_PX = 0.2        # of a track: residuals up to this are no reason to doubt the poses
FIRM_DEG = 0.003      # poses may always move by this
ITERATIONS = 3, 6     # of the depths of corners alone, which leaves what no depth explains; of all
LEAST = 20            # tracks of a view; with fewer its pose stays as it is


def adjusted(gray: np.ndarray, camera: Camera, depth_m: np.ndarray, views: list[tuple[np.ndarray, Camera, np.ndarray]],
             shown: list[np.ndarray | None] | None = None) -> list[np.ndarray]:
    """T_view_ref [4,4] float64 of each view, corrected. gray [h,w] uint8, depth_m [h,w] along z, 0 = unknown, at least roughly right; views: (gray, camera, T_view_ref);
    shown: of the reference and each view, [h,w] uint8, 0 = not of the scene: no corner is there; None: all is."""
    shown = [_away_from_masked(s) for s in shown or [None] * (1 + len(views))]
    corners = cv2.goodFeaturesToTrack(gray, CORNERS, 0.01, max(3, max(gray.shape) // 50), mask=shown[0])
    T = [t for _, _, t in views]
    if corners is None:
        return T
    corners = corners[:, 0]
    known = depth_m[depth_m > 0]
    z = depth_m[corners[:, 1].astype(int), corners[:, 0].astype(int)]
    inv = 1 / np.where(z > 0, z, np.median(known)).astype(float)
    rays = np.stack([(corners[:, 0] + 0.5 - camera.cx) / camera.fx, (corners[:, 1] + 0.5 - camera.cy) / camera.fy, np.ones(len(corners))], 1)
    size = np.max([gray.shape, *(g.shape for g, _, _ in views)], axis=0)   # optical flow wants images of one size
    seen, there = zip(*(_tracked(_padded(gray, size), corners, rays, inv, (_padded(g, size), c, t)) for g, c, t in views))
    seen, there = np.array(seen), np.array(there, float)          # [V,F], [V,F,2]
    for found, at, s in zip(seen, there, shown[1:]):
        if s is not None:
            found &= s[tuple(np.clip(at.astype(int), 0, np.array(s.shape[::-1]) - 1).T[::-1])] > 0
    seen[seen.sum(1) < LEAST] = False
    return _fitted(rays, inv, [c for _, c, _ in views], T, seen, there, float(np.median(known)))


def disagreement(a: tuple[np.ndarray, Camera], b: tuple[np.ndarray, Camera], T_b_a: np.ndarray, shown=(None, None)) -> float | None:
    """rad: how much farther tracks from a into b, (gray [h,w] uint8, camera) of one size, lie from their epipolar lines by T_b_a [4,4] than by the motion that fits them best: of the
    medians, and NOISE_PX at least; 0 where that may be chance. shown: of a and b, [h,w] uint8, 0 = not of the scene, or None. None: fewer than twice LEAST tracks. No depth is needed: where tracks lie along their lines is left to it."""
    (gray, camera), (other, lens) = a, b
    scale = gray.std() / max(other.std(), 1.0)   # optical flow takes exposures for equal
    other = cv2.convertScaleAbs(other, alpha=scale, beta=gray.mean() - scale * other.mean())
    corners = cv2.goodFeaturesToTrack(gray, CORNERS, 0.01, max(3, max(gray.shape) // 50), mask=_away_from_masked(shown[0]))
    if corners is None:
        return None
    at, found, _ = cv2.calcOpticalFlowPyrLK(gray, other, corners, None, winSize=(WINDOW_PX, WINDOW_PX), maxLevel=3)
    back, found_back, _ = cv2.calcOpticalFlowPyrLK(other, gray, at, None, winSize=(WINDOW_PX, WINDOW_PX), maxLevel=3)
    good = (found[:, 0] > 0) & (found_back[:, 0] > 0) & (np.linalg.norm((back - corners)[:, 0], axis=1) < BACK_PX)
    if shown[1] is not None:
        good &= _away_from_masked(shown[1])[tuple(np.clip(at[:, 0].astype(int), 0, np.array(other.shape[::-1]) - 1).T[::-1])] > 0
    if (n := int(good.sum())) < 2 * LEAST:
        return None
    rays_a, rays_b = (np.column_stack([(p[good, 0] + 0.5 - (c.cx, c.cy)) / (c.fx, c.fy), np.ones(n)]) for p, c in ((corners, camera), (at, lens)))
    before, after = (float(np.median(np.abs(_across(rays_a, rays_b, T)))) for T in (T_b_a, _by_tracks(rays_a, rays_b, T_b_a, NOISE_PX / lens.fx)))
    noise2 = max(after**2 * n / (n - 5), (NOISE_PX / lens.fx) ** 2)   # five numbers were fitted
    more = before**2 - noise2
    return math.sqrt(more) if more > 2 * noise2 / math.sqrt(n) else 0.0   # a median of n is sure to that, about


def _away_from_masked(shown: np.ndarray | None) -> np.ndarray | None:
    return None if shown is None else cv2.erode(shown, np.ones((WINDOW_PX, WINDOW_PX), np.uint8))


def _across(rays_a, rays_b, T) -> np.ndarray:
    """[F] rad: how far tracks lie from their epipolar lines in b, of T [4,4] from a to b; without a base line, from their points along the longer way."""
    turned = rays_a @ T[:3, :3].T
    (x, y, z), t = turned.T, T[:3, 3]
    normals = np.stack([t[1] * z - t[2] * y, t[2] * x - t[0] * z, t[0] * y - t[1] * x], 1)
    lines = np.linalg.norm(normals[:, :2], axis=1)
    off = rays_b[:, :2] - turned[:, :2] / np.maximum(turned[:, 2:], 1e-6)
    return np.where(lines > 1e-9, (normals * rays_b).sum(1) / np.maximum(lines, 1e-9), np.linalg.norm(off, axis=1))


def _by_tracks(rays_a, rays_b, T, noise) -> np.ndarray:
    """The T near the given one that the tracks agree with best: damped Gauss-Newton, Huber weights."""
    for _ in range(ITERATIONS[0]):
        r = _across(rays_a, rays_b, T)
        J = np.stack([(_across(rays_a, rays_b, move @ T) - r) / 1e-5 for move in _nudges(np.linalg.norm(T[:3, 3]))], 1)
        weight = 1 / np.maximum(np.abs(r) / (2 * noise), 1)
        A = J.T @ (J * weight[:, None])
        step = -np.linalg.solve(A + 1e-3 * np.diag(np.diag(A)) + 1e-12 * np.eye(6), J.T @ (weight * r))
        T = _moved_by(step * np.repeat([np.linalg.norm(T[:3, 3]), 1.0], 3)) @ T
    return T


def _moved_by(step: np.ndarray) -> np.ndarray:
    move = np.eye(4)
    move[:3, :3], move[:3, 3] = cv2.Rodrigues(step[3:])[0], step[:3]
    return move


def _nudges(base_m: float) -> list[np.ndarray]:
    """1e-5 along each axis, in units of the base line, and around it."""
    return [_moved_by(1e-5 * np.eye(6)[k] * (base_m if k < 3 else 1.0)) for k in range(6)]


def _padded(image: np.ndarray, size) -> np.ndarray:
    """At least as high and wide, the edge repeated."""
    return cv2.copyMakeBorder(image, 0, size[0] - image.shape[0], 0, size[1] - image.shape[1], cv2.BORDER_REPLICATE)


def _tracked(gray, corners, rays, inv, view) -> tuple[np.ndarray, np.ndarray]:
    """Which corners are found in the view, and where, px."""
    other, camera, T = view
    p = rays @ T[:3, :3].T + inv[:, None] * T[:3, 3]
    z = np.maximum(p[:, 2], 1e-6)
    guess = np.stack([camera.fx * p[:, 0] / z + camera.cx - 0.5, camera.fy * p[:, 1] / z + camera.cy - 0.5], 1).astype(np.float32)
    options = dict(winSize=(WINDOW_PX, WINDOW_PX), maxLevel=1, flags=cv2.OPTFLOW_USE_INITIAL_FLOW)
    at, found, _ = cv2.calcOpticalFlowPyrLK(gray, other, corners, guess.copy(), **options)
    back, found_back, _ = cv2.calcOpticalFlowPyrLK(other, gray, at, corners.copy(), **options)
    near = np.linalg.norm(at - guess, axis=1) < FAR_PX * max(other.shape)
    return (p[:, 2] > 0) & (found[:, 0] > 0) & (found_back[:, 0] > 0) & near & (np.linalg.norm(back - corners, axis=1) < BACK_PX), at + 0.5


def _fitted(rays, inv, cameras, T, seen, there, depth_m) -> list[np.ndarray]:
    """Gauss-Newton over 6 numbers a view and one a corner, which are eliminated (Schur); Huber weights."""
    n, T, given = len(T), np.array(T), np.zeros(6 * len(T))   # given: what the poses have moved so far
    lenses = np.array([(c.fx, c.fy, c.cx, c.cy) for c in cameras]).T[..., None]   # [4,V,1]
    for _ in range(ITERATIONS[0]):
        *_, own, pull, _ = _errors(rays, inv, lenses, T, seen, there)
        inv = _moved(inv, own, pull)
    residual = _errors(rays, inv, lenses, T, seen, there)[-1]
    if not len(residual):
        return list(T)
    sigma = max(np.sqrt(max(np.median(residual)**2 - NOISE_PX**2, 0.0)) / cameras[0].fx, np.radians(FIRM_DEG))
    prior = np.tile([sigma * depth_m] * 3 + [sigma] * 3, n)**-2.0    # a camera elsewhere by that much looks turned by as much, seen from the scene
    for _ in range(ITERATIONS[1]):
        H, g, cross, own, pull = _normal(rays, inv, lenses, T, seen, there)
        scaled = np.where(own > 1e-6, cross / np.maximum(own, 1e-6), 0)
        step = np.linalg.solve(H + np.diag(prior) - scaled @ cross.T, g - prior * given - scaled @ pull)
        inv = _moved(inv, own, pull - step @ cross)
        given += step
        for i in range(n):
            move = np.eye(4)
            move[:3, :3], move[:3, 3] = cv2.Rodrigues(step[6 * i + 3:6 * i + 6])[0], step[6 * i:6 * i + 3]
            T[i] = move @ T[i]
    return list(T)


def _moved(inv, own, pull) -> np.ndarray:
    return np.where(own > 1e-6, np.clip(inv + pull / np.maximum(own, 1e-6), 0.2 * inv, 5 * inv), inv)


def _errors(rays, inv, lenses, T, seen, there):
    """Of the corners in the views: where they are, p [V,F,3]; the reprojection errors r [V,F,2], px, their derivatives by p (negative), D [V,F,2,3], and by the inverse depths, Jw [V,F,2];
    weights [V,F]; of the inverse depths' normal equations own and pull [F]; and the errors of all tracks."""
    fx, fy, cx, cy = lenses
    p = rays @ T[:, :3, :3].transpose(0, 2, 1) + inv[:, None] * T[:, None, :3, 3]
    z = np.maximum(p[..., 2], 1e-6)
    x, y = p[..., 0] / z, p[..., 1] / z
    r = there - np.stack([fx * x + cx, fy * y + cy], 2)
    D = np.zeros((*seen.shape, 2, 3))
    D[..., 0, 0], D[..., 0, 2], D[..., 1, 1], D[..., 1, 2] = fx / z, -fx * x / z, fy / z, -fy * y / z
    Jw = (D @ T[:, None, :3, 3, None])[..., 0]
    size = np.linalg.norm(r, axis=2)
    weight = np.where(seen, 1 / np.maximum(size / (2 * NOISE_PX), 1), 0) / NOISE_PX**2
    return p, r, D, Jw, weight, (weight * (Jw**2).sum(2)).sum(0), (weight * (Jw * r).sum(2)).sum(0), size[seen]


def _normal(rays, inv, lenses, T, seen, there):
    """H [6V,6V] and g of the poses, cross [6V,F], own and pull [F] of the inverse depths."""
    p, r, D, Jw, weight, own, pull, _ = _errors(rays, inv, lenses, T, seen, there)
    n, F = seen.shape
    J = np.empty((n, F, 2, 6))   # translation; rotation: D (w x p) = w (p x D)
    J[..., :3] = D * inv[:, None, None]
    for i in range(3):
        j, k = (i + 1) % 3, (i + 2) % 3
        J[..., 3 + i] = p[..., j, None] * D[..., k] - p[..., k, None] * D[..., j]
    weighted = weight[..., None, None] * J
    rows, H = weighted.reshape(n, 2 * F, 6).transpose(0, 2, 1), np.zeros((6 * n, 6 * n))
    for i, block in enumerate(rows @ J.reshape(n, 2 * F, 6)):
        H[6 * i:6 * i + 6, 6 * i:6 * i + 6] = block
    g = (rows @ r.reshape(n, 2 * F, 1)).ravel()
    cross = (weighted * Jw[..., None]).sum(2).transpose(0, 2, 1).reshape(6 * n, F)
    return H, g, cross, own, pull
