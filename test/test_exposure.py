"""The gain between an image and a render is found in spite of clipping, outliers and a pose that is off; a map from changing exposure is as good."""
import numpy as np
import pytest

from spirula_gpu.exposure import corrected, log_gain
from test_align import mapped, stream, wall

FULL = np.ones((60, 80), np.float32)


def exposed(rgb: np.ndarray, gain) -> np.ndarray:
    return np.clip(np.rint(rgb * gain), 0, 255).astype(np.uint8)


@pytest.mark.parametrize("gain", [(1, 1, 1), (0.5, 0.5, 0.5), (1.1, 0.9, 1.0), (1.7, 1.7, 1.7)])
def test_a_known_gain_is_found_though_pixels_are_clipped(gain):
    rgb, _ = wall(np.eye(4))
    image = exposed(rgb, gain)
    assert max(gain) < 1.5 or (image == 255).mean() > 0.15
    assert np.exp(log_gain(image, rgb / 255, FULL)) == pytest.approx(gain, rel=0.02)


def test_outliers_masks_and_a_wrong_pose():
    rgb, _ = wall(np.eye(4))
    image = exposed(rgb, 0.8)
    image[:25, :30] = 200
    assert np.exp(log_gain(image, rgb / 255, FULL)) == pytest.approx([0.8] * 3, rel=0.04)
    image[:, :50] = 200
    mask = np.ones((60, 80), np.uint8)
    mask[:, :50] = 0
    assert np.exp(log_gain(image, rgb / 255, FULL, mask)) == pytest.approx([0.8] * 3, rel=0.02)
    off = np.eye(4)
    off[0, 3] = 0.06   # 2 px
    assert np.exp(log_gain(exposed(wall(off)[0], 0.8), rgb / 255, FULL)) == pytest.approx([0.8] * 3, rel=0.03)


def test_too_little_to_compare_is_no_answer():
    rgb, _ = wall(np.eye(4))
    alpha = FULL.copy()
    alpha[:, 5:] = 0.5
    assert log_gain(exposed(rgb, 1), rgb / 255, alpha) is None
    assert log_gain(np.full((60, 80, 3), 255, np.uint8), rgb / 255, FULL) is None


def test_an_image_is_brought_to_the_exposure_of_the_map():
    image = np.arange(256, dtype=np.uint8)[:, None, None].repeat(3, 2)
    assert corrected(image, np.zeros(3)) is image
    out = corrected(image, np.log([2.0, 1.0, 0.5])).astype(int)[:, 0]
    assert out[200].tolist() == [100, 200, 255] and out[255].tolist() == [128, 255, 255]


def ramp(n: int):
    return lambda i: 0.6 * 3 ** (i / (n - 1))


def cc(mapper) -> float:
    return float(np.mean([h.cc_psnr for h in mapper.evaluate()]))


def test_a_ramp_of_exposure_costs_little_with_it_and_much_without():
    on = dict(refine__pose=False, refine__exposure=True)
    off = dict(refine__pose=False)
    clean, bright = stream(24, False), stream(24, False, gain=ramp(24))
    best, with_it, without = cc(mapped(clean, **off)), cc(mapped(bright, **on)), cc(mapped(bright, **off))
    assert best - without > 1.5 and best - with_it < 0.5 * (best - without), (best, with_it, without)


def test_constant_exposure_stays_as_it_is_and_costs_nothing():
    on, off = mapped(stream(24, False), refine__pose=False, refine__exposure=True), mapped(stream(24, False), refine__pose=False)
    gains = np.array([k.log_gain for k in on._keyframes])
    assert gains.any() and np.abs(gains).max() < 0.05 and np.abs(gains.mean(0)).max() < 0.02
    assert on.evaluate()[0].psnr > off.evaluate()[0].psnr - 0.5
