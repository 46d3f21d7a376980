"""Exposure of a keyframe: one gain a channel between its image and the map's render of it, and the image with it taken out."""
from __future__ import annotations

import cv2
import numpy as np

CELL = 8               # px: means over cells are compared, so that a pose that is a few pixels off does not matter
DARK, BRIGHT = 5, 250  # beyond these a pixel may be clipped
ALPHA = 0.9            # where the render counts
CLIP_GAIN = 0.05       # log: below that white stays about white
MIN_CELLS = 0.1        # share of the image's cells that must be left


def log_gain(image: np.ndarray, render: np.ndarray, alpha: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray | None:
    """[3] float64: log(image / render), the median over cells. image [H,W,3] uint8; render [H,W,3] float32 in [0,1] over black with
    alpha [H,W]; mask [H,W], 0: left out. None: too little of the image is covered by the map and not clipped."""
    height, width = alpha.shape
    seen = (alpha > ALPHA) & (image.min(2) >= DARK) & (image.max(2) <= BRIGHT)
    if mask is not None:
        seen &= mask != 0
    weight = seen.astype(np.float32)
    size = (max(width // CELL, 1), max(height // CELL, 1))
    mean = lambda x: cv2.resize(x, size, interpolation=cv2.INTER_AREA)
    share = mean(weight)
    use = share > 0.125
    if use.sum() < max(MIN_CELLS * use.size, 8):
        return None
    ours = mean(render * (weight / np.maximum(alpha, 1e-6))[..., None])[use] / share[use][:, None]
    theirs = mean(image * (weight / 255)[..., None])[use] / share[use][:, None]
    floor = DARK / 255
    return np.array([_median(np.log(t / np.maximum(o, floor / 4)), t) for o, t in zip(ours.T, theirs.T)])


def _median(values: np.ndarray, weights: np.ndarray) -> float:
    """Weighted: dark cells say little about a gain."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order].astype(np.float64))
    return float(values[order[np.searchsorted(total, total[-1] / 2)]])


def corrected(image: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """[H,W,3] uint8: the image divided by exp(gain [3]), as if taken with the exposure of the map."""
    if not gain.any():
        return image
    table = np.rint(np.clip(np.arange(256)[:, None] * np.exp(-gain), 0, 255)).astype(np.uint8)
    return cv2.LUT(image, table[None])


def unclipped(image: np.ndarray, gain: np.ndarray, mask: np.ndarray | None) -> np.ndarray | None:
    """[H,W] uint8, 0 where `mask` is 0 or a channel was clipped that would not be white in `corrected`: it was brighter than that says."""
    dimmed = gain > CLIP_GAIN
    if not dimmed.any():
        return mask
    known = (image[..., dimmed].max(2) <= BRIGHT).astype(np.uint8)
    return known if mask is None else known * (mask != 0)
