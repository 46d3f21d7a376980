"""Rendered values against the float64 oracle. Where a threshold (alpha 1/255, transmittance, depth order) lies within
float32 reach the oracle marks the pixel: there a splat may come or go, everywhere else the images agree tightly."""
import numpy as np
import pytest

import oracle
from abi import AbiError, Context, view_of
from scenes import cameras, gaussians

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend
SIZES = [(1, 1), (17, 13), (33, 65), (48, 32)]


def assert_images(got, g, viewmats, Ks, width, height, degree, tolerance=3e-5, **view):
    """got: rgb, alpha, depth [C,H,W,..] of the engine."""
    for c, (viewmat, K) in enumerate(zip(viewmats, Ks)):
        *want, edge = oracle.render(g, viewmat, K, width, height, degree, **view)
        deepest = max(1.0, want[2].max())
        for name, a, b, unit in zip(("rgb", "alpha", "depth"), (x[c] for x in got), want, (1.0, 1.0, deepest)):
            error = np.abs(a - b).reshape(height, width, -1).max(2) / unit
            assert error[~edge].max(initial=0) < tolerance, f"camera {c} {name}: {error[~edge].max():.2e}"
            assert error.max() < 0.05, f"camera {c} {name}, edge pixels: {error.max():.2e}"
        assert edge.mean() < 0.3 or width * height == 1


@pytest.mark.parametrize("antialiased", [False, True])
@pytest.mark.parametrize("degree", [0, 1, 2, 3])
@pytest.mark.parametrize("width, height", SIZES)
def test_forward_is_the_oracle(degree, width, height, antialiased):
    seed = 10 * degree + width
    g, (viewmats, Ks) = gaussians(120, degree, seed), cameras(2, width, height, seed)
    background = (0.2, 0.4, 0.6)
    got = Context().forward(g, view_of(viewmats, Ks, width, height, degree, background=background, antialiased=antialiased))
    assert_images(got, g, viewmats, Ks, width, height, degree, background=background, antialiased=antialiased)


def test_many_cameras_rgb_colours_and_blur():
    width, height = 20, 28
    g, (viewmats, Ks) = gaussians(90, 0, 7), cameras(9, width, height, 7)
    g = g._replace(sh=np.random.default_rng(0).uniform(-0.2, 1.5, (90, 3)).astype(np.float32))
    got = Context().forward(g, view_of(viewmats, Ks, width, height, 0, blur=0.1, near=2.0))
    assert_images(got, g, viewmats, Ks, width, height, 0, blur=0.1, near=2.0)


def test_the_mip_filter_keeps_the_light_of_a_far_splat():
    """Sum of alpha over the image of a sphere ever farther away, times its distance squared: constant with the filter; without it the blur adds light."""
    K = np.array([[[60, 0, 10.5], [0, 60, 10.5], [0, 0, 1]]])
    def light(z, antialiased):
        g = oracle.Gaussians(np.array([[0, 0, z]]), np.array([[1.0, 0, 0, 0]]), np.full((1, 3), 0.05), np.array([0.9]), np.array([[1.0, 1, 1]]))
        return Context().forward(g, view_of(np.eye(4)[None], K, 21, 21, 0, antialiased=antialiased))[1].sum() * z**2
    exact = 0.9 * 2 * np.pi * (60 * 0.05)**2
    for z in (2.0, 4.0, 8.0):  # sigma 1.5, 0.75, 0.375 px
        assert light(z, True) == pytest.approx(exact, rel=0.05)
    assert light(8.0, False) > 2 * exact


@pytest.mark.parametrize("blur, size, flat", [(0.0, (0.3, 3.0), 1e-4), (1e-3, (3, 30), 1e-4), (1e-3, (0.3, 3.0), 1e-2)])
def test_the_mip_filter_makes_no_splat_brighter(blur, size, flat):
    """Lines, of whose determinants rounding leaves little; without blur there is nothing to filter, in the image as in the gradients."""
    g, (viewmats, Ks) = gaussians(300, 0, 1, size=size), cameras(1, 64, 48)
    g = g._replace(scales=np.float32(g.scales * [1, flat, flat]))
    context, views = Context(), [view_of(viewmats, Ks, 64, 48, 0, blur=blur, antialiased=a) for a in (False, True)]
    (_, plain, _), (_, filtered, _) = (context.forward(g, v) for v in views)
    opacity, of = context.buffer("proj.screen", "f4").reshape(-1, 10)[:-1, 5], context.buffer("proj.gaussian", "u4")[:-1]
    assert len(of) > 20 and (opacity <= g.opacities[of] * (1 + 1e-6)).all()
    if blur == 0:
        np.testing.assert_array_equal(plain, filtered)
        v = np.ones((1, 48, 64, 3)), np.ones((1, 48, 64)), np.zeros((1, 48, 64))
        for a, b in zip(*(context.backward(g, view, *v) for view in views)):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(a).max())


def test_a_lower_degree_is_evaluated_than_is_stored():
    width, height = 24, 24
    g, (viewmats, Ks) = gaussians(60, 3, 8), cameras(1, width, height, 8)
    got = Context().forward(g, view_of(viewmats, Ks, width, height, 1))
    assert_images(got, g, viewmats, Ks, width, height, 1)


def test_opaque_scene_closes_pixels():
    """Hundreds of layers: the early stop decides nearly everywhere."""
    width, height = 40, 24
    g, (viewmats, Ks) = gaussians(400, 0, 9, size=(0.4, 0.9)), cameras(1, width, height, 9)
    g = g._replace(opacities=np.clip(g.opacities * 3, 0, 0.9995).astype(np.float32))
    got = Context().forward(g, view_of(viewmats, Ks, width, height, 0))
    assert got[1].min() > 0.99
    assert_images(got, g, viewmats, Ks, width, height, 0)


def test_alpha_is_capped_and_the_layer_that_closes_is_not_added():
    g = oracle.Gaussians(np.array([[0, 0, 2.0], [0, 0, 3], [0, 0, 4]]), np.tile([1.0, 0, 0, 0], (3, 1)), np.full((3, 3), 900.0), np.ones(3), np.eye(3))
    K = np.array([[[10, 0, 2.5], [0, 10, 2.5], [0, 0, 1]]], np.float32)
    rgb, alpha, depth = Context().forward(g, view_of(np.eye(4)[None], K, 5, 5, 0))
    np.testing.assert_allclose(rgb[0], np.broadcast_to([0.999, 0, 0], (5, 5, 3)), rtol=1e-6)
    np.testing.assert_allclose(alpha[0], 0.999, rtol=1e-6)
    np.testing.assert_allclose(depth[0], 1.998, rtol=1e-6)


def test_needles_and_near_giants():
    """Badly conditioned covariances: float32 keeps fewer digits, but no splat is lost or misplaced."""
    width, height, rng = 48, 40, np.random.default_rng(11)
    g, (viewmats, Ks) = gaussians(40, 0, 11), cameras(1, width, height, 11)
    g = g._replace(scales=np.exp(rng.uniform(np.log(1e-3), np.log(2.0), (40, 3))).astype(np.float32))
    g.means[:10, 2] = rng.uniform(0.05, 0.5, 10)
    got = Context().forward(g, view_of(viewmats, Ks, width, height, 0))
    assert_images(got, g, viewmats, Ks, width, height, 0, tolerance=5e-3, band=5e-2)


def test_the_map_renders_like_the_same_gaussians_given():
    width, height = 33, 17
    g, (viewmats, Ks) = gaussians(80, 2, 12), cameras(2, width, height, 12)
    context, view = Context(sh_degree=2), view_of(viewmats, Ks, width, height, 2)
    context.append(g)
    assert len(context) == 80
    assert_images(context.render(view), g, viewmats, Ks, width, height, 2)


def test_ties_in_depth_are_drawn_in_order():
    """Equal Gaussians of different colours: the first of the list is in front."""
    n, K = 5, np.array([[[20, 0, 8], [0, 20, 8], [0, 0, 1]]], np.float32)
    g = oracle.Gaussians(np.tile([0, 0, 2.0], (n, 1)), np.tile([1.0, 0, 0, 0], (n, 1)), np.full((n, 3), 0.3), np.full(n, 0.6), np.eye(n, 3))
    rgb, alpha, _ = Context().forward(g, view_of(np.eye(4)[None], K, 16, 16, 0))
    want = oracle.render(g, np.eye(4), K[0], 16, 16, 0)
    np.testing.assert_allclose(rgb[0], want[0], atol=1e-5)
    np.testing.assert_allclose(alpha[0], want[1], atol=1e-5)
    assert rgb[0, 7, 7, 0] > rgb[0, 7, 7, 1] > rgb[0, 7, 7, 2] > 0


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_visible_is_background(n):
    g = gaussians(n, 1, 13)
    g.means[:] = [0, 0, -5]
    viewmats, Ks = np.eye(4, dtype=np.float32)[None], cameras(1, 19, 18)[1]
    rgb, alpha, depth = Context().forward(g, view_of(viewmats, Ks, 19, 18, 1, background=(0.1, 0.2, 0.3)))
    np.testing.assert_array_equal(rgb, np.broadcast_to(np.float32([0.1, 0.2, 0.3]), rgb.shape))
    assert not alpha.any() and not depth.any()


@pytest.mark.parametrize("change, message", [
    (dict(width=0), "image 0x"), (dict(width=40000), "32767"), (dict(n_cameras=0), "n_cameras 0"), (dict(sh_degree=3), "sh_degree 3"),
    (dict(blur_px2=-1.0), "blur_px2"), (dict(antialiased=2), "antialiased 2"), (dict(near_m=0.0), "near_m"), (dict(struct_size=8), "struct_size")])
def test_a_wrong_view_is_refused(change, message):
    viewmats, Ks = cameras(1, 16, 16)
    view = view_of(viewmats, Ks, 16, 16, 1)
    context, g, out = Context(), gaussians(4, 1), view_of(viewmats, Ks, 16, 16, 1)
    for name, value in change.items():
        setattr(view, name, value)
    from abi import caller, image_of
    image, arrays = image_of(out)
    with pytest.raises(AbiError, match=message):
        context.call("forward", caller(g), view, image)
    assert all(np.isnan(a).all() for a in arrays), "outputs must stay untouched"


def test_a_wrong_camera_is_refused():
    viewmats, Ks = cameras(2, 16, 16)
    g = gaussians(4, 1)
    for array, index, value, message in ((Ks, (1, 0, 0), 0, r"Ks\[1\]"), (viewmats, (0, 1, 3), np.nan, r"viewmats\[0\]")):
        bad = array.copy()
        bad[index] = value
        arguments = (bad, Ks) if array is viewmats else (viewmats, bad)
        with pytest.raises(AbiError, match=message):
            Context().forward(g, view_of(*arguments, 16, 16, 1))
