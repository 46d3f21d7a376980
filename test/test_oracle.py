"""The oracle against a second formulation (torch, dense), finite differences, and facts that are known without either."""
import numpy as np
import pytest
import torch

import oracle
import oracle_torch
from scenes import cameras, gaussians


def tensors(arrays, requires_grad=False):
    return [torch.tensor(np.asarray(a, np.float64), requires_grad=requires_grad) for a in arrays]


@pytest.mark.parametrize("degree, width, height", [(0, 17, 13), (1, 33, 21), (2, 1, 1), (3, 40, 30)])
def test_both_formulations_render_the_same(degree, width, height):
    g = gaussians(60, degree, degree)
    viewmats, Ks = cameras(2, width, height, degree)
    background = (0.1, 0.5, 0.9)
    rgb, alpha, depth = oracle_torch.render(*tensors(g), *tensors((viewmats, Ks)), width, height, degree, background=background)
    for c in range(2):
        want = oracle.render(g, viewmats[c], Ks[c], width, height, degree, background=background)
        np.testing.assert_allclose(rgb[c], want[0], atol=1e-12)
        np.testing.assert_allclose(alpha[c], want[1], atol=1e-12)
        np.testing.assert_allclose(depth[c], want[2], atol=1e-12)
        assert want[3].mean() < 0.2 or width * height == 1


def test_autograd_is_the_slope_of_the_oracle():
    """Directional derivative of sum(v . image) by central differences, away from the thresholds."""
    width, height, degree, g = 24, 18, 2, gaussians(25, 2, 5)
    viewmats, Ks = cameras(1, width, height, 5)
    rng = np.random.default_rng(0)
    edge = oracle.render(g, viewmats[0], Ks[0], width, height, degree, band=0.05)[3]
    v_rgb, v_alpha, v_depth = (rng.normal(size=(height, width, *k)) * ~edge.reshape(height, width, *[1] * len(k)) for k in ((3,), (), ()))
    inputs = tensors((*g, viewmats), True)
    rgb, alpha, depth = oracle_torch.render(*inputs, *tensors((Ks,)), width, height, degree)
    total = (rgb[0] * torch.tensor(v_rgb)).sum() + (alpha[0] * torch.tensor(v_alpha)).sum() + (depth[0] * torch.tensor(v_depth)).sum()
    grads = torch.autograd.grad(total, inputs)
    for i, (base, gradient) in enumerate(zip(inputs, grads)):
        direction = rng.normal(size=base.shape)

        def value(h):
            moved = [t.detach().numpy() + (h * direction if i == j else 0) for j, t in enumerate(inputs)]
            r, a, d, _ = oracle.render(oracle.Gaussians(*moved[:5]), moved[5][0], Ks[0], width, height, degree)
            return (r * v_rgb).sum() + (a * v_alpha).sum() + (d * v_depth).sum()

        slope = (value(1e-6) - value(-1e-6)) / 2e-6
        assert float((gradient.numpy() * direction).sum()) == pytest.approx(slope, rel=1e-5, abs=1e-5), f"input {i}"


def test_one_gaussian_in_front_of_the_camera():
    """sigma = 0.1 m at 2 m with f = 100 px is 5 px."""
    g = oracle.Gaussians(np.array([[0, 0, 2.0]]), np.array([[2.0, 0, 0, 0]]), np.full((1, 3), 0.1), np.array([0.8]), np.ones((1, 1, 3)))
    K = np.array([[100, 0, 10.5], [0, 100, 10.5], [0, 0, 1]])
    rgb, alpha, depth, _ = oracle.render(g, np.eye(4), K, 21, 21, 0, blur=0.0)
    color = 0.5 + 0.28209479177387814
    assert alpha[10, 10] == pytest.approx(0.8) and rgb[10, 10, 0] == pytest.approx(0.8 * color)
    assert depth[10, 10] == pytest.approx(1.6) and alpha[10, 15] == pytest.approx(0.8 * np.exp(-0.5))
    assert alpha[10, 0] == pytest.approx(0.8 * np.exp(-2))


def test_opaque_layers_stop_before_the_one_that_closes():
    """alpha is capped at 0.999; the second layer would leave T = 1e-6 <= 1e-4: it is not added."""
    n = 3
    g = oracle.Gaussians(np.array([[0, 0, 2.0], [0, 0, 3], [0, 0, 4]]), np.tile([1.0, 0, 0, 0], (n, 1)), np.full((n, 3), 5.0),
                         np.ones(n), np.eye(3))
    K = np.array([[10, 0, 0.5], [0, 10, 0.5], [0, 0, 1]])
    rgb, alpha, _, _ = oracle.render(g, np.eye(4), K, 1, 1, 0)
    np.testing.assert_allclose(rgb[0, 0], [0.999, 0, 0])
    assert alpha[0, 0] == pytest.approx(0.999)


@pytest.mark.parametrize("change", [dict(means=[[np.nan, 0, 2]]), dict(means=[[0, 0, -2]]), dict(means=[[0, 0, 0.005]]),
                                    dict(quats=[[0, 0, 0, 0]]), dict(scales=[[np.inf, 1, 1]]), dict(opacities=[0.003]),
                                    dict(means=[[50, 0, 2]]), dict(opacities=[np.nan]), dict(sh=[[[np.inf, 0, 0]]])])
def test_what_cannot_be_seen_is_culled(change):
    g = oracle.Gaussians(np.array([[0, 0, 2.0]]), np.array([[1.0, 0, 0, 0]]), np.full((1, 3), 0.1), np.array([0.8]), np.zeros((1, 1, 3)))
    K = np.array([[50, 0, 10], [0, 50, 10], [0, 0, 1.0]])
    assert oracle.project(g, np.eye(4), K, 20, 20, 0).visible.all()
    assert not oracle.project(g._replace(**{k: np.array(v) for k, v in change.items()}), np.eye(4), K, 20, 20, 0).visible.any()


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("with_depth", [False, True])
def test_losses_agree(with_mask, with_depth):
    rng = np.random.default_rng(3)
    shape = (2, 17, 14)
    rgb, alpha, depth = rng.random((*shape, 3)), rng.random(shape), rng.random(shape) * 3
    target = rng.integers(0, 256, (*shape, 3), np.uint8)
    d = np.where(rng.random(shape) < 0.3, 0, rng.uniform(1, 4, shape)) if with_depth else None
    mask = (rng.random(shape) < 0.7).astype(np.uint8) if with_mask else None
    want = float(oracle_torch.loss(*tensors((rgb, alpha, depth)), target, d, mask, 0.3, 0.2))
    assert oracle.loss(rgb, alpha, depth, target, d, mask, 0.3, 0.2)["loss"] == pytest.approx(want, abs=1e-12)


def test_adam_is_torch_adam_for_what_is_always_visible():
    rng = np.random.default_rng(4)
    p, m, v, step = rng.normal(size=(5, 3)), np.zeros((5, 3)), np.zeros((5, 3)), np.zeros(5, int)
    q = torch.tensor(p.copy(), requires_grad=True)
    optimizer = torch.optim.Adam([q], lr=0.01, eps=1e-8)
    before = p.copy()
    for i in range(5):
        gradient = rng.normal(size=(5, 3))
        q.grad = torch.tensor(gradient)
        optimizer.step()
        oracle.adam(p, gradient, m, v, step, np.array([1, 1, 1, 1, i < 2]), 0.01, eps=1e-8)
    np.testing.assert_allclose(p[:4], q.detach()[:4], rtol=1e-12)
    assert list(step) == [5, 5, 5, 5, 2] and (p[4] != before[4]).all() and (p[4] != q.detach().numpy()[4]).all()


def test_tile_alpha_is_the_maximum_over_the_tile():
    rng = np.random.default_rng(5)
    for _ in range(200):
        A = rng.normal(size=(2, 2)) * 8 + 2 * np.eye(2)
        conic = np.linalg.inv(A @ A.T + 0.3 * np.eye(2))
        xy = rng.uniform((6, -8), (42, 24))
        best = oracle.tile_alpha(xy, (conic[0, 0], conic[0, 1], conic[1, 1]), 0.7, 1, 0, 40, 40)
        d = np.stack(np.meshgrid(np.linspace(16.5, 31.5, 61), np.linspace(0.5, 15.5, 61)), -1) - xy
        sampled = 0.7 * np.exp(-0.5 * np.einsum("...i,ij,...j", d, conic, d)).max()
        assert sampled <= best * (1 + 1e-9)
        radius = lambda alpha: np.sqrt(-2 * np.log(max(alpha, 1e-300) / 0.7))  # in sigmas
        assert radius(best) >= min(radius(sampled), 30) - 0.25 * np.sqrt(2 * np.linalg.eigvalsh(conic)[1])


def test_box_codes_enclose():
    for extent in (1, 608, 6000, 32767):
        for x in np.random.default_rng(6).uniform(-5, extent + 5, 50):
            lo, hi = oracle.encode_edge(x, extent, False), oracle.encode_edge(x, extent, True)
            inside = min(max(x, 0), extent)
            assert 0 <= hi - lo <= 1 and oracle.decode_edge(lo, extent) <= inside <= oracle.decode_edge(hi, extent)


def test_compaction_slots():
    visible = np.random.default_rng(7).random(300) < 0.4
    words, scan, pairs = oracle.compact(visible)
    assert len(words) == 12 and len(scan) == 3 and scan[-1] == visible.sum()
    for slot, p in enumerate(pairs):
        block, lane = divmod(int(p), 128)
        own = [int(w) for w in words[4 * block:4 * block + 4]]
        below = sum(bin(w).count("1") for w in own[:lane // 32]) + bin(own[lane // 32] & ((1 << lane % 32) - 1)).count("1")
        assert slot == (scan[block - 1] if block else 0) + below


def test_keys_sort_by_tile_then_depth():
    order = [(0, 0.01), (0, 3.0), (0, 3.0000002), (1, 0.5), (70000, 1e-3), (70000, 1e9)]
    keys = [oracle.tile_key(*k) for k in order]
    assert keys == sorted(keys) and len(set(keys)) == len(keys) and keys[-1] < 1 << 63


@pytest.mark.parametrize("copies", [2, 3, 7])
def test_relocation_keeps_the_rendered_sum(copies):
    """Along the line through the centre: opacity exactly, and the integral of the blended profile as eq. 9 demands."""
    opacity, scale = 0.7, np.array([1.0, 2, 3])
    new, smaller = oracle.relocated(opacity, scale, copies, 0.005)
    assert 1 - (1 - new)**copies == pytest.approx(opacity)
    x = np.linspace(-12, 12, 20001)
    profile = lambda o, s, n: 1 - (1 - o * np.exp(-x**2 / (2 * s**2)))**n
    before, after = profile(opacity, scale[0], 1), profile(new, smaller[0], copies)
    assert np.trapezoid(after, x) == pytest.approx(np.trapezoid(before, x), rel=1e-6)
