"""spirula_gpu.rasterize: values and gradients through torch, shapes, messages, threads."""
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import oracle_torch
from oracle import Gaussians
from scenes import cameras, gaussians
from spirula_gpu.native import NativeError
from spirula_gpu.ops import rasterize
from test_gradients import assert_gradients, upstream

W, H = 26, 19


def inputs(degree=2, n=50, n_cameras=2, seed=0, requires_grad=False):
    g, (viewmats, Ks) = gaussians(n, degree, seed), cameras(n_cameras, W, H, seed)
    tensors = [torch.tensor(np.float32(a), requires_grad=requires_grad) for a in (*g, viewmats)]
    return tensors, torch.tensor(Ks)


@pytest.mark.parametrize("mode, channels, antialiased", [("RGB", 3, False), ("D", 1, False), ("ED", 1, False), ("RGB+D", 4, False), ("RGB+ED", 4, False), ("RGB+D", 4, True)])
def test_values_and_gradients_of_every_mode(mode, channels, antialiased):
    (*g, viewmats), Ks = inputs(requires_grad=True)
    backgrounds = torch.tensor([[0.1, 0.2, 0.3], [0.9, 0.8, 0.7]], requires_grad=True)
    render, alphas, meta = rasterize(*g, viewmats, Ks, W, H, sh_degree=2, backgrounds=backgrounds, render_mode=mode, antialiased=antialiased)
    assert render.shape == (2, H, W, channels) and alphas.shape == (2, H, W, 1) and render.dtype == torch.float32
    assert meta["width"] == W and meta["n_cameras"] == 2

    exact = [t.detach().double().requires_grad_() for t in (*g, viewmats, backgrounds)]
    rgb, alpha, depth = oracle_torch.render(*exact[:6], Ks.double(), W, H, 2, antialiased=antialiased)
    alpha, depth = alpha[..., None], depth[..., None]
    rgb = rgb + (1 - alpha) * exact[6][:, None, None]
    depth = depth / alpha.clamp_min(1e-10) if "ED" in mode else depth
    want = dict(RGB=rgb, D=depth, ED=depth).get(mode, torch.cat([rgb, depth], -1))
    v = upstream(Gaussians(*(t.detach().numpy() for t in g)), viewmats.detach().numpy(), Ks.numpy(), W, H, 2, 1, antialiased=antialiased)
    use = torch.tensor(v[1] != 0)[..., None] * (alpha.detach() > 0.05)
    np.testing.assert_allclose((render * use).detach(), (want * use).detach(), atol=2e-4, rtol=1e-4)
    np.testing.assert_allclose((alphas * use).detach(), (alpha * use).detach(), atol=3e-5)
    weight = torch.tensor(np.random.default_rng(0).normal(size=want.shape)) * use
    got = torch.autograd.grad((render * weight.float()).sum(), [*g, viewmats, backgrounds], allow_unused=True)
    wanted = torch.autograd.grad((want * weight).sum(), exact, allow_unused=True)
    pairs = [(a.numpy(), b.numpy()) for a, b in zip(got, wanted) if b is not None and b.abs().max() > 0]
    assert_gradients(*zip(*pairs), tolerance=1e-3)


def test_optimising_through_torch():
    (*g, viewmats), Ks = inputs(0, n_cameras=1)
    target = rasterize(*g, viewmats, Ks, W, H, sh_degree=0)[0]
    leaf = torch.nn.Parameter(g[4] * 0)
    optimizer, losses = torch.optim.Adam([leaf], lr=0.05), []
    for _ in range(60):
        loss = (rasterize(*g[:4], leaf, viewmats, Ks, W, H, sh_degree=0)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.02 * losses[0]


def test_strided_inputs_and_rgb_colours():
    (*g, viewmats), Ks = inputs(0)
    rgb = torch.rand(50, 3)
    want = rasterize(*g[:4], rgb, viewmats, Ks, W, H)[0]
    strided = [torch.stack([t, t], -1)[..., 0] for t in (*g[:4], rgb)]
    assert not strided[0].is_contiguous() and torch.equal(rasterize(*strided, viewmats, Ks, W, H)[0], want)


def test_no_gaussians():
    (*g, viewmats), Ks = inputs(1)
    empty = [t[:0].clone().requires_grad_() for t in g]
    render, alphas, _ = rasterize(*empty, viewmats, Ks, W, H, sh_degree=1)
    (render.sum() + alphas.sum()).backward()
    assert not render.any() and not alphas.any() and empty[0].grad.shape == (0, 3)


def test_threads_have_contexts_of_their_own():
    problems = [inputs(1, seed=i) for i in range(8)]
    run = lambda p: rasterize(*p[0], p[1], W, H, sh_degree=1)[0]
    want = [run(p) for p in problems]
    with ThreadPoolExecutor(4) as pool:
        for a, b in zip(want * 5, pool.map(run, problems * 5)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("change, message", [
    (dict(means=torch.zeros(50, 2)), r"means has shape \(50, 2\)"), (dict(quats=torch.zeros(49, 4)), "quats"), (dict(opacities=torch.zeros(50, 1)), "opacities"),
    (dict(scales=torch.zeros(50, 3, dtype=torch.float64)), "scales is torch.float64"), (dict(viewmats=torch.eye(4)), "viewmats"),
    (dict(Ks=torch.zeros(1, 3, 3)), "Ks"), (dict(sh_degree=3), "sh_degree 3"), (dict(sh_degree=None), r"colors has shape .* \(RGB\)"),
    (dict(render_mode="X"), "render_mode 'X'"), (dict(backgrounds=torch.zeros(3)), "backgrounds"),
    (dict(Ks=torch.zeros(2, 3, 3, requires_grad=True)), "Ks requires")])
def test_wrong_arguments_are_named(change, message):
    tensors, Ks = inputs(2)
    named = dict(zip(("means", "quats", "scales", "opacities", "colors", "viewmats"), tensors), Ks=Ks, width=W, height=H, sh_degree=2) | change
    with pytest.raises(ValueError, match=message):
        rasterize(**named)


def test_the_engine_refuses_with_a_message():
    tensors, Ks = inputs(2)
    with pytest.raises(NativeError, match="focal"):
        rasterize(*tensors, Ks * 0, W, H, sh_degree=2)
    with pytest.raises(NativeError, match="backend 'tpu'"):
        rasterize(*tensors, Ks, W, H, sh_degree=2, backend="tpu")


def test_it_is_differentiable_once():
    (*g, viewmats), Ks = inputs(1, requires_grad=True)
    total = rasterize(*g, viewmats, Ks, W, H, sh_degree=1)[0].square().sum()
    gradient, = torch.autograd.grad(total, g[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
