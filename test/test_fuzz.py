"""Whatever goes in: finite images and gradients, or a status with a message; never a crash, and no byte outside its row
(arena_debug checks canaries behind every row and poisons rows outside their phases)."""
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import oracle
from abi import AbiError, Context, caller, hyper_of, struct, target_of, view_of
from scenes import cameras, gaussians

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 1e-30, 1e30, -1e30, 3e38, -3e38, 1e-8, 1e6, -1e6, 1.0, -1.0]
fuzz = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def broken_gaussians(draw, degree):
    """A sane scene with special values at random places."""
    n = draw(st.sampled_from([0, 1, 2, 5, 127, 128, 129, 300]))
    g = gaussians(n, degree, draw(st.integers(0, 50)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    chosen = draw(st.lists(st.sampled_from(range(5)), max_size=5, unique=True))
    arrays = list(g)
    for i in chosen:
        hit = rng.random(arrays[i].shape) < share
        arrays[i] = np.where(hit, rng.choice(SPECIAL, arrays[i].shape), arrays[i]).astype(np.float32)
    if draw(st.booleans()) and n:
        arrays[1][rng.integers(n)] = 0  # no direction at all
    return oracle.Gaussians(*arrays)


@st.composite
def any_view(draw, degree):
    width, height = draw(st.sampled_from([(1, 1), (16, 16), (17, 33), (64, 5), (3, 100)]))
    viewmats, Ks = cameras(draw(st.sampled_from([1, 1, 2, 5])), width, height, draw(st.integers(0, 20)))
    Ks[:, :2, :2] *= np.float32(draw(st.sampled_from([1, 1, 1, 1e-3, 1e3, 1e8])))
    return view_of(viewmats, Ks, width, height, draw(st.integers(0, degree)), blur=draw(st.sampled_from([0.3, 0.0, 10.0])), antialiased=draw(st.booleans()),
                   near=draw(st.sampled_from([0.01, 1e-6, 100.0])))


def assert_finite(arrays):
    for name, a in zip(("rgb/means", "alpha/quats", "depth/scales", "opacities", "sh", "viewmats"), arrays):
        assert np.isfinite(a).all(), f"{name}: {a[~np.isfinite(a)][:3]}"


@fuzz
@given(st.data())
def test_forward(data):
    degree = data.draw(st.integers(0, 3))
    g, view = data.draw(broken_gaussians(degree)), data.draw(any_view(degree))
    images = Context(arena_debug=1, max_gaussians=1).forward(g, view)
    assert_finite(images)
    assert (images[1] >= 0).all() and (images[1] <= 1).all() and (images[2] >= 0).all()


@fuzz
@given(st.data())
def test_backward(data):
    degree = data.draw(st.integers(0, 3))
    g, view = data.draw(broken_gaussians(degree)), data.draw(any_view(degree))
    rng, shape = np.random.default_rng(0), (view.n_cameras, view.height, view.width)
    v = rng.normal(size=(*shape, 3)), rng.normal(size=shape), rng.normal(size=shape)
    assert_finite(Context(arena_debug=1, max_gaussians=1).backward(g, view, *v))


@fuzz
@given(st.data())
def test_training_keeps_the_map_finite(data):
    """What is finite stays finite, whatever else is in the map."""
    g, view = data.draw(broken_gaussians(1)), data.draw(any_view(1))
    context = Context(arena_debug=1, sh_degree=1)
    with np.errstate(all="ignore"):
        context.append(g)
    before = context.map_rows()
    shape, rng = (view.n_cameras, view.height, view.width), np.random.default_rng(data.draw(st.integers(0, 99)))
    depth = np.where(rng.random(shape) < 0.3, rng.choice(SPECIAL, shape), rng.uniform(0.5, 5, shape)) if data.draw(st.booleans()) else None
    mask = rng.integers(0, 2, shape) if data.draw(st.booleans()) else None
    for _ in range(2):
        step = context.train_step(view, target_of(rng.integers(0, 256, (*shape, 3)), depth, mask), hyper_of(opacity_reg=0.01, scale_reg=0.01))
        assert np.isfinite([step.loss, step.l1, step.ssim, step.depth]).all()
    for name, rows in context.map_rows().items():
        was = np.isfinite(before[name])
        assert np.isfinite(rows[was]).all(), f"{name}: {rows[was & ~np.isfinite(rows)][:3]}"


@fuzz
@given(st.data())
def test_insertion(data):
    g, view = data.draw(broken_gaussians(1)), data.draw(any_view(1))
    if view.n_cameras > 1:
        view.n_cameras = 1
    context, rng = Context(arena_debug=1, sh_degree=1), np.random.default_rng(data.draw(st.integers(0, 99)))
    with np.errstate(all="ignore"):
        context.append(g)
    depth = np.where(rng.random((view.height, view.width)) < 0.5, rng.choice(SPECIAL, (view.height, view.width)), 2.0)
    n = context.insert(view, target_of(rng.integers(0, 256, (view.height, view.width, 3)), depth), detail_gain=1.0)
    assert 0 <= n <= (depth == 2.0).sum() + (depth == 1.0).sum()
    for name in ("map.mean", "map.log_scale", "map.sh", "map.quat", "map.logit_opacity"):
        assert np.isfinite(context.read(name, len(g.means))).all()


@fuzz
@given(st.data())
def test_loss_of_any_image(data):
    rng, (height, width) = np.random.default_rng(data.draw(st.integers(0, 999))), data.draw(st.sampled_from([(1, 1), (17, 5), (20, 33)]))
    view = view_of(*cameras(1, width, height), width, height, 0)
    images = [rng.random((1, height, width, 3)) * 1e3, rng.random((1, height, width)), rng.random((1, height, width)) * 1e6]
    depth = rng.choice(SPECIAL, (1, height, width))
    step, *v = Context(arena_debug=1).loss(view, images, target_of(rng.integers(0, 256, (1, height, width, 3)), depth), hyper_of())
    assert np.isfinite(step.loss)
    assert_finite(v)


# ---- single cases worth a name

@pytest.mark.parametrize("change", [
    dict(means=[[np.nan, 0, 3]]), dict(means=[[0, np.inf, 3]]), dict(quats=[[0, 0, 0, 0]]), dict(quats=[[np.nan, 0, 0, 1]]), dict(scales=[[np.nan, 1, 1]]),
    dict(scales=[[np.inf, 1, 1]]), dict(scales=[[1e30, 1e30, 1e30]]), dict(opacities=[np.nan]), dict(opacities=[np.inf]), dict(sh=[[[np.nan, 0, 0]]]),
    dict(sh=[[[np.inf, 0, 0]]]), dict(sh=[[[-np.inf, 0, 0]]]), dict(means=[[0, 0, 0.0]]), dict(means=[[0, 0, -3]])])
def test_a_broken_gaussian_is_not_drawn(change):
    """And the sane one behind it is drawn as if it were alone."""
    sane = oracle.Gaussians([[0, 0, 4.0]], [[1.0, 0, 0, 0]], [[0.5, 0.5, 0.5]], [0.7], [[[1.0, 0.5, 0.2]]])
    broken = oracle.Gaussians([[0, 0, 3.0]], [[1.0, 0, 0, 0]], [[0.5, 0.5, 0.5]], [0.7], [[[1.0, 0.5, 0.2]]])._replace(**change)
    view = view_of(*cameras(1, 24, 24), 24, 24, 0)
    both = oracle.Gaussians(*(np.concatenate([a, b]) for a, b in zip(broken, sane)))
    for a, b in zip(Context(arena_debug=1).forward(both, view), Context().forward(oracle.Gaussians(*map(np.array, sane)), view)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e3, 1e9, 1e14])
def test_any_scale(scale):
    g = gaussians(50, 1, 1)
    g.scales[:] = scale
    view = view_of(*cameras(1, 30, 20), 30, 20, 1)
    assert_finite(Context(arena_debug=1).forward(g, view))
    rng = np.random.default_rng(0)
    assert_finite(Context(arena_debug=1).backward(g, view, rng.normal(size=(1, 20, 30, 3)), rng.normal(size=(1, 20, 30)), rng.normal(size=(1, 20, 30))))


def test_a_camera_inside_a_gaussian():
    g = oracle.Gaussians(np.zeros((3, 3)) + [[0, 0, 0.011], [0, 0, 0.02], [0.001, 0, 0.5]], np.tile([1.0, 0, 0, 0], (3, 1)), np.full((3, 3), 5.0),
                         np.full(3, 0.9), np.zeros((3, 4, 3)))
    view = view_of(np.eye(4)[None], cameras(1, 16, 16)[1], 16, 16, 1)
    context = Context(arena_debug=1)
    assert_finite(context.forward(g, view))
    assert_finite(context.backward(g, view, np.ones((1, 16, 16, 3)), np.ones((1, 16, 16)), np.ones((1, 16, 16))))


def test_an_image_beyond_the_budget_is_refused():
    """32767 x 32767 pixels need more than 30 GiB of scratch."""
    viewmats, Ks = cameras(1, 32767, 32767)
    with pytest.raises(AbiError, match="budget 1024 MiB"):
        Context(budget_bytes=1 << 30).call("forward", caller(gaussians(3, 0)), view_of(viewmats, Ks, 32767, 32767, 0), struct("spl_image"))
