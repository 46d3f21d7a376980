"""Gaussians as files hold them, and what several formats do to them: bytes for opacities, three numbers for a rotation."""
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

SH0 = 0.28209479177387814  # the constant spherical harmonic: colour = 0.5 + SH0 * coefficient
BLOCK = 1 << 16            # Gaussians that a writer packs at a time
SANE = dict(means=(-1e6, 1e6), quats=(-1e6, 1e6), log_scales=(-1e3, 20.0), logit_opacities=(-1e4, 1e4), sh=(-1e4, 1e4))  # far beyond what training makes; what chance writes rarely lies within


class FormatError(ValueError):
    """A file that cannot be read, or a map that cannot be written as asked: one line that says which, what is wrong, the limit and the remedy."""


class Splats(NamedTuple):
    """Gaussians in raw parameters, all float32, and how they are meant to be drawn."""
    means: np.ndarray            # [N,3] map frame, m
    quats: np.ndarray            # [N,4] wxyz
    log_scales: np.ndarray       # [N,3] log of m
    logit_opacities: np.ndarray  # [N]
    sh: np.ndarray               # [N,K,3], K = (degree+1)^2
    antialiased: bool = False    # trained with the 2D mip filter; without it small ones are drawn too bold

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return self[:5]

    @property
    def degree(self) -> int:
        return math.isqrt(self.sh.shape[1]) - 1

    def chosen(self, which) -> "Splats":
        """Those of a mask, a slice or indices."""
        return Splats(*(x[which] for x in self.arrays), self.antialiased)

    def finite(self) -> np.ndarray:
        """[N] bool: the others are never drawn."""
        return np.logical_and.reduce([np.isfinite(x.reshape(len(x), -1)).all(1) for x in self.arrays])

    def sound(self) -> np.ndarray:
        """[N] bool: finite, and within SANE. Formats without a checksum show damage by nothing else."""
        with np.errstate(invalid="ignore"):
            return np.logical_and.reduce([((x >= low) & (x <= high)).reshape(len(x), -1).all(1) for x, (low, high) in zip(self, SANE.values())])

    def complaint(self) -> str:
        """'' or how many are not sound, and why."""
        if (sound := self.sound()).all():
            return ""
        n, finite = len(sound), self.finite()
        beyond = [f"{count:,} with {name} beyond {low:g} to {high:g}" for name, x, (low, high) in zip(SANE, self, SANE.values())
                  if (count := int((finite & ~((x >= low) & (x <= high)).reshape(n, -1).all(1)).sum()))]
        return f"{int((~sound).sum()):,} of {n:,} Gaussians are not finite or absurd ({', '.join([f'{int((~finite).sum()):,} not finite', *beyond])})"

    def with_degree(self, degree: int) -> "Splats":
        """Higher SH degrees are cut off, missing ones are 0."""
        k, have = (degree + 1) ** 2, self.sh.shape[1]
        if k == have:
            return self
        sh = np.zeros((len(self.sh), k, 3), np.float32)
        sh[:, :have] = self.sh[:, :k]
        return self._replace(sh=sh)

    def blocks(self):
        """The same Gaussians, BLOCK at a time."""
        return (self.chosen(np.s_[first:first + BLOCK]) for first in range(0, len(self.means), BLOCK))


def opacities(splats: Splats) -> np.ndarray:
    """[N] float32, 0..1."""
    return 1 / (1 + np.exp(-np.clip(splats.logit_opacities, -80, 80)))


def colors(splats: Splats) -> np.ndarray:
    """[N,3] float32: the colour without its dependence on the view; may leave 0..1."""
    return 0.5 + SH0 * splats.sh[:, 0]


def most_visible(log_scales: np.ndarray, logit_opacities: np.ndarray, most: int) -> np.ndarray:
    """Sorted indices of at most `most` Gaussians, those with the largest opacity * area; the area goes with the product of the two larger axes [N,3]."""
    if len(log_scales) <= most:
        return np.arange(len(log_scales))
    with np.errstate(invalid="ignore"):
        shows = log_scales.sum(1) - log_scales.min(1) - np.logaddexp(0, -logit_opacities)
    return np.sort(np.argpartition(np.nan_to_num(shows, nan=-np.inf, posinf=-np.inf), -most)[-most:])


def as_byte(x: np.ndarray) -> np.ndarray:
    """The nearest of 0..255; uint8."""
    return np.rint(np.clip(x, 0, 255)).astype(np.uint8)


def logits_of_bytes(x: np.ndarray) -> np.ndarray:
    """Opacities x/255 as logits. 0 and 255 stand for what rounds to them: their own logits are infinite."""
    p = np.clip(x, 0.25, 254.75) / 255
    return np.log(p / (1 - p)).astype(np.float32)


def unit(quats: np.ndarray) -> np.ndarray:
    """[N,4] float64 of length 1; a quaternion of length 0 becomes the identity (w first)."""
    q = quats.astype(np.float64)
    length = np.linalg.norm(q, axis=1, keepdims=True)
    return np.where(length > 0, q / np.where(length > 0, length, 1), [1.0, 0, 0, 0])


def without_largest(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q [N,4] of length 1 -> (index [N] of the component that is largest in magnitude, the other three [N,3], in order, with the sign that
    makes the largest one positive): |others| <= sqrt(1/2)."""
    largest = np.abs(q).argmax(1)
    at = largest[:, None]
    q = np.where(np.take_along_axis(q, at, 1) < 0, -q, q)
    return largest, q[np.arange(4) != at].reshape(-1, 3)


def with_largest(largest: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The inverse of without_largest."""
    q = np.empty((len(others), 4), np.float64)
    kept = np.arange(4) != largest[:, None]
    q[kept] = others.ravel()
    q[~kept] = np.sqrt(np.maximum(0, 1 - (others**2).sum(1)))
    return q


def covariances(splats: Splats) -> np.ndarray:
    """[N,6] float32, m^2: xx xy xz yy yz zz of R diag(scale^2) R^T."""
    w, x, y, z = unit(splats.quats).T
    R = np.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y), 2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
                  2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], 1).reshape(-1, 3, 3)
    M = R * np.exp(splats.log_scales.astype(np.float64))[:, None]
    S = M @ M.transpose(0, 2, 1)
    return np.stack([S[:, i, j] for i, j in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))], 1).astype(np.float32)
