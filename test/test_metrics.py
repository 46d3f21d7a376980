"""Metrics against a direct evaluation of their definitions and known values."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from spirula_gpu.metrics import cc_psnr, psnr, ssim


def ssim_by_definition(a, b):
    """Explicit window sum per pixel."""
    offset = np.arange(11) - 5
    w = np.exp(-offset**2 / (2 * 1.5**2))
    w = np.outer(w, w) / np.outer(w, w).sum()
    pad = lambda x: np.pad(x, ((5, 5), (5, 5), (0, 0)))
    a, b, out = pad(a), pad(b), []
    for y in range(a.shape[0] - 10):
        for x in range(a.shape[1] - 10):
            p, q = a[y:y + 11, x:x + 11], b[y:y + 11, x:x + 11]
            mean = lambda v: (w[..., None] * v).sum((0, 1))
            mp, mq = mean(p), mean(q)
            vp, vq, c = mean(p * p) - mp**2, mean(q * q) - mq**2, mean(p * q) - mp * mq
            out.append((2 * mp * mq + 1e-4) * (2 * c + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
    return np.mean(out)


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (17, 13), (24, 32)])
def test_ssim_is_its_definition(size):
    rng = np.random.default_rng(0)
    a, b = rng.random((*size, 3)), rng.random((*size, 3))
    assert ssim(a, b) == pytest.approx(ssim_by_definition(a, b), abs=1e-12)


def test_ssim_is_the_torch_loss_of_3dgs():
    rng = np.random.default_rng(1)
    a = rng.integers(0, 256, (40, 60, 3), np.uint8)
    b = (a * 0.8 + 20).astype(np.uint8)
    x = torch.arange(11, dtype=torch.float64) - 5
    g = torch.exp(-x**2 / 4.5)
    window = (g[:, None] * g[None] / g.sum()**2).expand(3, 1, 11, 11)
    p, q = (torch.tensor(i / 255.0).permute(2, 0, 1)[None] for i in (a, b))
    blur = lambda i: F.conv2d(i, window, padding=5, groups=3)
    mp, mq = blur(p), blur(q)
    vp, vq, c = blur(p * p) - mp**2, blur(q * q) - mq**2, blur(p * q) - mp * mq
    want = ((2 * mp * mq + 1e-4) * (2 * c + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4))).mean()
    assert ssim(a, b) == pytest.approx(float(want), abs=1e-12)


def test_known_values():
    a = np.full((8, 8, 3), 100, np.uint8)
    assert psnr(a, a) == np.inf and ssim(a, a) == pytest.approx(1)
    assert psnr(a, a + 10) == pytest.approx(20 * np.log10(255 / 10))
    assert psnr(a / 255.0, (a + 10) / 255.0) == pytest.approx(psnr(a, a + 10))


def test_cc_psnr_undoes_an_affine_colour_change_and_nothing_else():
    rng = np.random.default_rng(2)
    truth = rng.random((30, 40, 3)) * 0.5 + 0.2
    noisy = truth + rng.normal(0, 0.01, truth.shape)
    mixed = noisy @ (np.eye(3) * 0.7 + 0.05) + [0.02, -0.03, 0.1]
    assert psnr(mixed, truth) < 25
    assert cc_psnr(mixed, truth) == pytest.approx(psnr(noisy, truth), abs=0.05)
    assert cc_psnr(rng.random(truth.shape), truth) < 20


def test_wrong_images_are_refused():
    with pytest.raises(ValueError, match=r"\(4, 4, 3\) and \(4, 5, 3\)"):
        psnr(np.zeros((4, 4, 3)), np.zeros((4, 5, 3)))
    with pytest.raises(ValueError, match="int64"):
        ssim(np.zeros((4, 4, 3), int), np.zeros((4, 4, 3), int))


def test_a_mask_leaves_out_what_it_hides():
    rng = np.random.default_rng(3)
    a = rng.integers(0, 256, (40, 60, 3), np.uint8)
    b = np.clip(a.astype(int) + rng.integers(-9, 10, a.shape), 0, 255).astype(np.uint8)
    mask = np.full((40, 60), 255, np.uint8)
    mask[:, :25] = 0
    ghost = b.copy()
    ghost[:, :25] = 255 - ghost[:, :25]  # where nothing is shown anything may be
    assert psnr(a, ghost, mask) == psnr(a, b, mask) == pytest.approx(psnr(a[:, 25:], b[:, 25:]))
    assert ssim(a, ghost, mask) == ssim(a, b, mask)
    # the window reads zeros beyond the mask as it does beyond the border: the part alone has the same score
    assert ssim(a, b, mask) == pytest.approx(ssim(a[:, 25:], b[:, 25:]), abs=1e-12)
    assert psnr(a, b, np.ones((40, 60), bool)) == psnr(a, b) and ssim(a, b, np.ones((40, 60), bool)) == ssim(a, b)
    assert np.isnan(psnr(a, b, np.zeros((40, 60)))) and np.isnan(ssim(a, b, np.zeros((40, 60))))
    with pytest.raises(ValueError, match=r"mask of shape \(40, 59\)"):
        psnr(a, b, mask[:, 1:])
