"""Exposure of a keyframe: one gain a channel between its image and the map's render of it, and the image with it taken out."""
from __future__ import annotations

import cv2
import numpy as np

CELL = 8               # px: means over cells are compared, so that a pose that is a few pixels off does not matter
DARK, BRIGHT = 5, 250  # beyond these a pixel may be clipped ..
EXPECTED_BRIGHT = 210  # .. and beyond this, when the render says what to expect
PASSES = 2
MOST_GAIN = 8          # what is farther off than this, either way, is a covered lens or a place that the map does not show
ALPHA = 0.9            # where the render counts
MIN_SHARE = 0.125      # of a cell that must be left
MIN_CELLS = 0.1        # share of the image's cells that must be left


def log_gain(image: np.ndarray, render: np.ndarray, alpha: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray | None:
    """[3] float64: log(image / render), the median over cells, over black as it is trained: colours make up for what alpha lacks. image [H,W,3] uint8; render [H,W,3] float32 in [0,1] over black with
    alpha [H,W]; mask [H,W], 0: left out. None: too little of the image is covered by the map and not clipped, or the gain is beyond 1/MOST_GAIN .. MOST_GAIN."""
    covered = np.where(alpha > ALPHA, np.uint8(255), np.uint8(0))   # cv2.compare raises on one pixel beside a scalar
    if mask is not None:
        covered[mask == 0] = 0
    render, colours = np.ascontiguousarray(render, np.float32), image.astype(np.float32)
    seen = cv2.inRange(image, (DARK,) * 3, (BRIGHT,) * 3)
    for last in range(PASSES + 1):
        gain = _compared(colours, render, covered & seen)
        if gain is None or np.abs(gain).max() > np.log(MOST_GAIN):
            return None
        if last < PASSES:   # what is clipped is told by the render, which noise of the image does not bias
            scale = 255 * np.exp(gain)
            seen = cv2.inRange(render, tuple(DARK / scale), tuple(EXPECTED_BRIGHT / scale))
    return gain


def _compared(image: np.ndarray, render: np.ndarray, seen: np.ndarray) -> np.ndarray | None:
    """log(image / 255 / render) [3] of two float32 images, where seen [H,W] uint8 is not 0."""
    height, width = seen.shape
    size = (max(width // CELL, 1), max(height // CELL, 1))
    mean = lambda x: cv2.resize(x, size, interpolation=cv2.INTER_AREA)
    use = mean((seen != 0).astype(np.float32)) > MIN_SHARE
    if use.sum() < max(MIN_CELLS * use.size, 8):
        return None
    ours, theirs = mean(cv2.copyTo(render, seen))[use], mean(cv2.copyTo(image, seen))[use] / 255
    return np.array([_median(np.log(np.maximum(t, 1e-4) / np.maximum(o, 1e-4)), t) for o, t in zip(ours.T, theirs.T)])


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
