"""Gradients against float64 autograd of the dense formulation. Pixels where a threshold may flip get no upstream gradient."""
import numpy as np
import pytest
import torch

import oracle
import oracle_torch
from abi import Context, caller, f32, struct, view_of
from scenes import cameras, gaussians

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend
NAMES = ("means", "quats", "scales", "opacities", "sh", "viewmats")


def upstream(g, viewmats, Ks, width, height, degree, seed, **view):
    """Random v_rgb, v_alpha, v_depth [C,H,W,..], zero at pixels near a threshold."""
    rng, shape = np.random.default_rng(seed), (len(Ks), height, width)
    edge = np.stack([oracle.render(g, v, K, width, height, degree, **view)[3] for v, K in zip(viewmats, Ks)])
    assert edge.mean() < 0.3
    return f32(rng.normal(size=(*shape, 3)) * ~edge[..., None]), f32(rng.normal(size=shape) * ~edge), f32(rng.normal(size=shape) * ~edge)


def reference(g, viewmats, Ks, width, height, degree, v, **view):
    inputs = [torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in (*g, viewmats)]
    images = oracle_torch.render(*inputs, torch.tensor(Ks, dtype=torch.float64), width, height, degree, **view)
    return [a.numpy() for a in torch.autograd.grad(sum((i * torch.tensor(u)).sum() for i, u in zip(images, v)), inputs)]


def assert_gradients(got, want, tolerance=2e-4):
    for name, a, b in zip(NAMES, got, want):
        error, size = np.abs(a - b), np.abs(b).max()
        assert size > 0 and np.isfinite(a).all(), name
        assert (error <= tolerance * size + 1e-3 * np.abs(b)).all(), f"{name}: {(error.max() / size):.2e} of the largest"


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("width, height", [(17, 13), (33, 65)])
def test_backward_is_autograd(degree, width, height, antialiased):
    seed, background = 20 + degree, (0.3, 0.1, 0.7)
    g, (viewmats, Ks) = gaussians(70, degree, seed), cameras(2, width, height, seed)
    v = upstream(g, viewmats, Ks, width, height, degree, seed, antialiased=antialiased)
    got = Context().backward(g, view_of(viewmats, Ks, width, height, degree, background=background, antialiased=antialiased), *v)
    want = reference(g, viewmats, Ks, width, height, degree, v, background=background, antialiased=antialiased)
    assert_gradients(got, want)
    unseen = ~np.any([oracle.project(g, V, K, width, height, degree, antialiased=antialiased).visible for V, K in zip(viewmats, Ks)], 0)
    assert unseen.any() and not any(a[unseen].any() for a in got[:5]), "what no camera sees has no gradient"


@pytest.mark.parametrize("size, flat", [((0.005, 0.03), 1.0), ((0.02, 0.3), 0.02)])
def test_splats_that_the_mip_filter_makes_fainter(size, flat):
    """A quarter of a pixel to a few across, and discs seen at all angles, some as lines: most of each opacity's factor is far from 1, and so is its derivative."""
    width, height = 40, 30
    g, (viewmats, Ks) = gaussians(120, 1, 36, size=size), cameras(2, width, height, 36)
    g = g._replace(scales=np.float32(g.scales * [1, 1, flat]), opacities=np.float32(0.5 + 0.5 * g.opacities))
    factors = np.concatenate([(p.opacity / g.opacities)[p.visible] for p in (oracle.project(g, V, K, width, height, 1, antialiased=True) for V, K in zip(viewmats, Ks))])
    assert len(factors) > 40 and np.median(factors) < 0.6, f"{len(factors)} splats, median factor {np.median(factors):.2f}"
    v = upstream(g, viewmats, Ks, width, height, 1, 36, antialiased=True)
    got = Context().backward(g, view_of(viewmats, Ks, width, height, 1, antialiased=True), *v)
    assert_gradients(got, reference(g, viewmats, Ks, width, height, 1, v, antialiased=True))


@pytest.mark.parametrize("only", [0, 1, 2])
def test_each_output_alone(only):
    width, height, degree = 24, 20, 2
    g, (viewmats, Ks) = gaussians(50, degree, 31), cameras(3, width, height, 31)
    v = [u if i == only else 0 * u for i, u in enumerate(upstream(g, viewmats, Ks, width, height, degree, 31))]
    got = Context().backward(g, view_of(viewmats, Ks, width, height, degree), *v)
    want = reference(g, viewmats, Ks, width, height, degree, v)
    pairs = [(n, a, b) for n, a, b in zip(NAMES, got, want) if not (n == "sh" and only)]  # colours move the colour only
    assert_gradients(*zip(*[(a, b) for _, a, b in pairs])) if not only else [
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-4 * np.abs(b).max(), err_msg=n) for n, a, b in pairs]


def test_saturated_pixels_keep_their_gradient():
    """Nearly opaque scenes: transmittance must not be recovered from 1 - alpha in float32."""
    width, height = 24, 20
    g, (viewmats, Ks) = gaussians(150, 0, 32, size=(0.3, 0.6)), cameras(1, width, height, 32)
    v = upstream(g, viewmats, Ks, width, height, 0, 32, band=1e-3)
    got = Context().backward(g, view_of(viewmats, Ks, width, height, 0), *v)
    assert_gradients(got, reference(g, viewmats, Ks, width, height, 0, v))


def test_no_gradient_flows_through_the_cap_of_alpha():
    """At the centre alpha is capped at 0.999: the colour has a gradient, the opacity and the shape have none."""
    g = oracle.Gaussians(np.array([[0, 0, 2.0]]), np.array([[1.0, 0, 0, 0]]), np.full((1, 3), 9.0), np.array([1.0]), np.array([[0.5, 0.5, 0.5]]))
    view = view_of(np.eye(4)[None], np.array([[[10, 0, 2.5], [0, 10, 2.5], [0, 0, 1]]]), 5, 5, 0)
    v_rgb = np.zeros((1, 5, 5, 3))
    v_rgb[0, 2, 2] = 1
    means, quats, scales, opacities, colors, _ = Context().backward(g, view, v_rgb, np.zeros((1, 5, 5)), np.zeros((1, 5, 5)))
    np.testing.assert_allclose(colors, 0.999, rtol=1e-6)
    assert not (means.any() or quats.any() or scales.any() or opacities.any())


def test_rgb_colours():
    width, height = 20, 20
    g, (viewmats, Ks) = gaussians(40, 0, 33), cameras(1, width, height, 33)
    g = g._replace(sh=g.sh[:, 0])
    v = upstream(g, viewmats, Ks, width, height, 0, 33)
    assert_gradients(Context().backward(g, view_of(viewmats, Ks, width, height, 0), *v), reference(g, viewmats, Ks, width, height, 0, v))


def test_raw_parameters_follow_the_chain_rule():
    width, height, degree = 20, 16, 1
    g, (viewmats, Ks) = gaussians(40, degree, 34), cameras(1, width, height, 34)
    view, v = view_of(viewmats, Ks, width, height, degree), upstream(g, viewmats, Ks, width, height, degree, 34)
    activated = Context().backward(g, view, *v)
    raw = (g.means, g.quats, np.log(g.scales), np.log(g.opacities / (1 - g.opacities)), g.sh)
    out = [np.full(np.shape(a), np.nan, np.float32) for a in raw]
    grads = struct("spl_gaussian_grads", **dict(zip(("means", "quats", "log_scales", "logit_opacities", "sh"), out)))
    Context().call("backward", caller(raw, activated=False), view, struct("spl_image", rgb=v[0], alpha=v[1], depth=v[2]), grads)
    chain = (1, 1, g.scales, g.opacities * (1 - g.opacities), 1)
    for name, a, b, factor in zip(NAMES, out, activated, chain):
        np.testing.assert_allclose(a, b * factor, rtol=1e-3, atol=1e-4 * np.abs(b * factor).max(), err_msg=name)


def test_no_gradient_is_lost_when_an_image_is_not_given():
    width, height = 20, 16
    g, (viewmats, Ks) = gaussians(30, 0, 35), cameras(1, width, height, 35)
    view, v = view_of(viewmats, Ks, width, height, 0), upstream(g, viewmats, Ks, width, height, 0, 35)
    want = Context().backward(g, view, v[0], 0 * v[1], 0 * v[2])
    out = [np.full(np.shape(a), np.nan, np.float32) for a in g]
    grads = struct("spl_gaussian_grads", **dict(zip(("means", "quats", "log_scales", "logit_opacities", "sh"), out)))
    Context().call("backward", caller(g), view, struct("spl_image", rgb=v[0]), grads)
    for a, b in zip(out, want):
        np.testing.assert_array_equal(a, b)
