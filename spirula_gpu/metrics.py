"""Image metrics: PSNR, SSIM and PSNR after a colour fit. Images are [H,W,C], uint8 or float in [0,1]; both of the same shape.
Where a mask [H,W] is given, only pixels that are not 0 in it count; none: NaN."""
from __future__ import annotations

import cv2
import numpy as np

SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2


def psnr(a: np.ndarray, b: np.ndarray, mask: np.ndarray | None = None) -> float:
    """Peak signal-to-noise ratio in dB over all pixels (that the mask shows) and channels; inf for equal images."""
    a, b = _pair(a, b)
    return _psnr_of(_mean(np.square(a - b), mask))


def cc_psnr(image: np.ndarray, truth: np.ndarray, mask: np.ndarray | None = None) -> float:
    """PSNR after the affine colour map (3x3 and offset) that takes `image` closest to `truth` in the least-squares
    sense, clipped to [0,1]: tells a wrong exposure from a wrong scene. Over what the mask shows."""
    image, truth = _pair(image, truth)
    shown = np.ones(image.shape[:2], bool) if mask is None else mask != 0
    if not shown.any():
        return float("nan")
    colors, wanted = image[shown], truth[shown]
    design = np.concatenate([colors, np.ones((len(colors), 1))], 1)
    fit = np.linalg.lstsq(design, wanted, rcond=None)[0]
    return _psnr_of(np.square((design @ fit).clip(0, 1) - wanted).mean())


def ssim(a: np.ndarray, b: np.ndarray, mask: np.ndarray | None = None) -> float:
    """Mean structural similarity (Wang et al. 2004): 11x11 Gaussian window, sigma 1.5, biased moments, peak 1. Every
    pixel of every channel counts; the window reads zeros outside the image ("same" padding), as fused-ssim and the
    3DGS training loss do. scikit-image drops the border instead and differs slightly. With a mask the pixels it hides read as zeros too, in both
    images, as in the training loss, and the mean is over the others."""
    a, b = _pair(a, b)
    if mask is not None:
        shown = (mask != 0)[..., None]
        a, b = a * shown, b * shown
    x = cv2.getGaussianKernel(SSIM_WINDOW, SSIM_SIGMA, cv2.CV_64F)
    blur = lambda image: cv2.sepFilter2D(image, -1, x, x, borderType=cv2.BORDER_CONSTANT)
    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b, cov = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2, blur(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + SSIM_C1) / (mean_a**2 + mean_b**2 + SSIM_C1)
    return _mean(luminance * (2 * cov + SSIM_C2) / (var_a + var_b + SSIM_C2), mask)


def _mean(values: np.ndarray, mask: np.ndarray | None) -> float:
    """Of [H,W,C] over what the mask shows."""
    if mask is None:
        return float(values.mean())
    if mask.shape != values.shape[:2]:
        raise ValueError(f"mask of shape {mask.shape}, images {values.shape}: it must have one value a pixel")
    shown = values[mask != 0]
    return float(shown.mean()) if shown.size else float("nan")


def _pair(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 in [0,1]: float32 moments lose three digits of SSIM in flat areas."""
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape or a.ndim != 3 or a.size == 0:
        raise ValueError(f"images of shape {a.shape} and {b.shape}: both must be the same non-empty [H,W,C]")
    return _unit(a), _unit(b)


def _unit(image: np.ndarray) -> np.ndarray:
    if image.dtype == np.uint8:
        return image / 255.0
    if not np.issubdtype(image.dtype, np.floating):
        raise ValueError(f"image of {image.dtype}: must be uint8 or float in [0,1]")
    return image.astype(np.float64)


def _psnr_of(mse: float) -> float:
    return float("inf") if mse == 0 else float(-10 * np.log10(mse))
