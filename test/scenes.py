"""Small random scenes and cameras for the engine's tests."""
from __future__ import annotations

import numpy as np

from oracle import Gaussians


def look(yaw, pitch=0.0, position=(0.0, 0.0, 0.0)) -> np.ndarray:
    """[4,4] T_cam_world of a camera at `position`, turned right by yaw and up by pitch (rad)."""
    cy, sy, cp, sp = np.cos(yaw), np.sin(yaw), np.cos(pitch), np.sin(pitch)
    R = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]]) @ np.array([[1, 0, 0], [0, cp, -sp], [0, sp, cp]])
    T = np.eye(4)
    T[:3, :3], T[:3, 3] = R.T, -R.T @ np.asarray(position)
    return T


def cameras(n, width, height, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """viewmats [n,4,4] that look along +z from about the origin, Ks [n,3,3], all different; float32."""
    rng = np.random.default_rng(seed + 1000)
    views, Ks = [], []
    for _ in range(n):
        views.append(look(*rng.uniform(-0.3, 0.3, 2), rng.uniform(-0.4, 0.4, 3)))
        f = rng.uniform(0.7, 1.2, 2) * max(width, height)
        Ks.append([[f[0], 0, width * rng.uniform(0.4, 0.6)], [0, f[1], height * rng.uniform(0.4, 0.6)], [0, 0, 1]])
    return np.array(views, np.float32), np.array(Ks, np.float32)


def gaussians(n, degree, seed=0, size=(0.02, 0.4)) -> Gaussians:
    """float32; most in front of `cameras`, some beside, behind or hidden."""
    rng = np.random.default_rng(seed)
    means = rng.uniform((-2.5, -2.5, 1.0), (2.5, 2.5, 7), (n, 3))
    means[rng.random(n) < 0.1] *= -1
    scales = np.exp(rng.uniform(*np.log(size), (n, 1)) + rng.uniform(-0.7, 0.7, (n, 3)))
    sh = rng.normal(0, 0.25, (n, (degree + 1)**2, 3))
    sh[:, 0] = rng.normal(0.3, 0.7, (n, 3))
    return Gaussians(*(a.astype(np.float32) for a in (
        means, rng.normal(size=(n, 4)), scales, rng.uniform(0.02, 0.99, n), sh)))
