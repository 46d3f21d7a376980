"""The fused training step against its parts, and that training trains."""
import numpy as np
import pytest

import oracle
from coded import moments
from abi import AbiError, Context, caller, hyper_of, image_of, struct, target_of, view_of
from scenes import cameras, gaussians
from spirula_gpu.metrics import psnr

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend
RATES = dict(mean="lr_mean", quat="lr_quat", log_scale="lr_log_scale", logit_opacity="lr_logit_opacity")
RAW = ("mean", "quat", "log_scale", "logit_opacity", "sh")


def problem(width=40, height=30, n=150, degree=1, n_cameras=2, seed=0):
    rng = np.random.default_rng(seed)
    g, (viewmats, Ks) = gaussians(n, degree, seed), cameras(n_cameras, width, height, seed)
    target = rng.integers(0, 256, (n_cameras, height, width, 3), np.uint8)
    depth = np.where(rng.random(target.shape[:3]) < 0.3, 0, rng.uniform(1, 5, target.shape[:3])).astype(np.float32)
    return g, view_of(viewmats, Ks, width, height, degree), (target, depth, (rng.random(depth.shape) < 0.8).astype(np.uint8))


def raw_gradients(context, view, target, hyper):
    """Gradients of the map's raw parameters through spl_forward, spl_loss and spl_backward; and the loss."""
    raw = [context.read("map." + name) for name in RAW]
    given = caller(raw, activated=False)
    image, arrays = image_of(view)
    context.call("forward", given, view, image)
    step, *v = context.loss(view, arrays, target, hyper)
    out = [np.full(a.shape, np.nan, np.float32) for a in raw]
    grads = struct("spl_gaussian_grads", **dict(zip(("means", "quats", "log_scales", "logit_opacities", "sh"), out)))
    context.call("backward", given, view, struct("spl_image", rgb=v[0], alpha=v[1], depth=v[2]), grads)
    return dict(zip(RAW, out)), step


def seen(context, view):
    """[C,N] bool, by the oracle."""
    mean, quat, log_scale, logit, sh = (context.read("map." + name).astype(np.float64) for name in RAW)
    g = oracle.Gaussians(mean, quat, np.exp(log_scale), 1 / (1 + np.exp(-logit)), sh)
    return np.array([oracle.project(g, V, K, view.width, view.height, view.sh_degree).visible
                     for V, K in zip(view.keep["viewmats"], view.keep["Ks"])])


@pytest.mark.parametrize("with_depth, with_mask", [(False, False), (True, True)])
def test_a_step_is_forward_loss_backward_adam(with_depth, with_mask):
    g, view, (rgb, depth, mask) = problem()
    target, hyper = target_of(rgb, depth if with_depth else None, mask if with_mask else None), hyper_of(eps=1e-8)
    context = Context(sh_degree=1)
    context.append(g)
    state = {name: [context.read("map." + name).astype(np.float64), 0.0, 0.0] for name in RAW}
    for name in RAW:
        state[name][1:] = (np.zeros(context.read(row).shape) for row in moments(name))
    steps = {name: np.zeros(len(g.means), int) for name in RAW}
    for i in range(3):
        for name in RAW:
            state[name][0][:] = context.read("map." + name)
        visible = seen(context, view)
        gradients, want = raw_gradients(context, view, target, hyper)
        got = context.train_step(view, target, hyper)
        assert got.loss == pytest.approx(want.loss, rel=1e-6) and got.n_pairs == visible.sum()
        for name in RAW:
            x, m, v = state[name]
            lr = hyper.lr_sh0 if name == "sh" else getattr(hyper, RATES[name])
            rates = np.full(x.shape[1:], lr)
            if name == "sh":
                rates[1:] = hyper.lr_sh_rest
            update = oracle.adam_by_degree if name == "sh" else oracle.adam
            update(x, gradients[name].astype(np.float64), m, v, steps[name], visible.any(0), rates, eps=1e-8)
            assert np.abs(context.read("map." + name) - x).max() < 2e-3 * rates.max() + 1e-6, f"step {i}: {name}"
            for moment, row in zip((m, v), moments(name)):
                np.testing.assert_allclose(context.read(row), moment, rtol=1e-4, atol=1e-6 * np.abs(moment).max(), err_msg=row)
        np.testing.assert_array_equal(context.read("adam.steps"), steps["mean"])


@pytest.mark.parametrize("beta2, steps", [(0.999, 20_000), (0.99999, 20_000), (0.99999, 200_000), (0.5, 3)])
def test_bias_correction_of_old_gaussians(beta2, steps):
    """A Gaussian that has been seen many times: v is corrected by 1 - beta2^steps even where that is far from 1."""
    g, view, (rgb, _, _) = problem()
    context, hyper = Context(sh_degree=1), hyper_of(beta2=beta2, eps=1e-8)
    context.append(g)
    rng, visible = np.random.default_rng(0), seen(context, view).any(0)
    m, v = rng.normal(0, 1e-3, (150, 3)).astype(np.float32), rng.uniform(0.5, 1, (150, 3)).astype(np.float32) * 1e-5
    context.write("adam.m.mean", m), context.write("adam.v.mean", v), context.write("adam.steps", np.full(150, steps))
    gradients, _ = raw_gradients(context, view, target_of(rgb), hyper)
    x, count = g.means.astype(np.float64), np.full(150, steps)
    oracle.adam(x, gradients["mean"].astype(np.float64), m.astype(np.float64), v.astype(np.float64), count, visible, hyper.lr_mean, beta2=beta2, eps=1e-8)
    context.train_step(view, target_of(rgb), hyper)
    np.testing.assert_allclose(context.read("map.mean") - g.means, x - g.means, rtol=1e-2, atol=1e-6)


def test_what_is_not_seen_does_not_move():
    g, view, (rgb, depth, _) = problem()
    context = Context(sh_degree=1)
    context.append(g)
    names = list(context.map_rows())
    visible = seen(context, view).any(0)
    before = {n: context.read(n) for n in names}
    for _ in range(5):
        context.train_step(view, target_of(rgb, depth), hyper_of(opacity_reg=0.1, scale_reg=0.1))
    assert 0 < visible.sum() < len(visible)
    for name in names:
        np.testing.assert_array_equal(context.read(name)[~visible], before[name][~visible], err_msg=name)
    assert (context.read("map.mean")[visible] != before["map.mean"][visible]).any(1).mean() > 0.5


@pytest.mark.parametrize("weight, row", [("opacity_reg", "logit_opacity"), ("scale_reg", "log_scale")])
def test_regularisers(weight, row):
    """With every pixel masked nothing else has a gradient; after one step m = (1 - beta1) * gradient."""
    g, view, (rgb, _, _) = problem()
    context = Context(sh_degree=1)
    context.append(g)
    visible = seen(context, view)
    z = np.array([oracle.project(g, V, K, 40, 30, 1).depth for V, K in zip(view.keep["viewmats"], view.keep["Ks"])])
    nearest = np.where(visible, z, np.inf).min(0)
    want = g.opacities * (1 - g.opacities) * visible.any(0) if row == "logit_opacity" else g.scales / nearest[:, None]
    before = context.read("map." + row)
    context.train_step(view, target_of(rgb, None, np.zeros(rgb.shape[:3])), hyper_of(**{weight: 0.7}))
    np.testing.assert_allclose(context.read("adam.m." + row), 0.1 * 0.7 / visible.sum() * want, rtol=1e-4)
    assert (context.read("map." + row)[visible.any(0)] < before[visible.any(0)]).all() and not (context.read("map.mean") - g.means).any()


def test_higher_degrees_wait_for_their_turn():
    g, view, (rgb, _, _) = problem(degree=2)
    context = Context(sh_degree=2)
    context.append(g)
    view.sh_degree = 1
    before = context.read("map.sh")
    for _ in range(3):
        context.train_step(view, target_of(rgb), hyper_of())
    after = context.read("map.sh")
    assert (after[:, :4] != before[:, :4]).any() and (after[:, 4:] == before[:, 4:]).all()
    second = context.read("adam.v.sh")
    assert second[:, :2].any() and not second[:, 2].any()


def test_position_noise():
    """Nearly transparent Gaussians that are seen move by covariance * normal * rate * sigmoid(100 (0.005 - opacity)); others do not."""
    g, (viewmats, Ks) = gaussians(4000, 0, 3, size=(0.02, 0.2)), cameras(1, 40, 30, 3)
    g = g._replace(opacities=np.where(np.arange(4000) % 2, 0.006, 0.5).astype(np.float32))
    view, target = view_of(viewmats, Ks, 40, 30, 0), target_of(np.zeros((1, 30, 40, 3), np.uint8), None, np.zeros((1, 30, 40), np.uint8))

    def moved(**hyper):
        context = Context(sh_degree=0)
        context.append(g)
        context.train_step(view, target, hyper_of(lr_mean=1e-2, **hyper))
        return context.read("map.mean").astype(np.float64) - g.means, context.read("adam.steps") > 0

    (move, visible), faint = moved(noise=10.0, seed=7), g.opacities < 0.1
    assert not move[~visible].any() and not move[~faint].any() and np.isfinite(move).all()
    chosen = visible & faint
    R = np.array([oracle.rotation(q) for q in g.quats[chosen].astype(np.float64)])
    rate = 0.1 / (1 + np.exp(100 * (0.006 - 0.005)))
    normal = np.einsum("nji,nj->ni", R, move[chosen]) / (g.scales[chosen].astype(np.float64)**2 * rate)  # R^T, then each axis by its variance
    assert chosen.sum() > 300 and abs(normal.mean()) < 4 / np.sqrt(normal.size) and abs(normal.std() - 1) < 0.1
    assert np.abs(np.corrcoef(normal.T) - np.eye(3)).max() < 0.2 and 2.5 < np.abs(normal).max() < 6
    np.testing.assert_array_equal(moved(noise=10.0, seed=7)[0], move)
    assert (moved(noise=10.0, seed=8)[0][chosen] != move[chosen]).any(1).all() and not moved()[0].any()


def test_deferred_steps_do_the_same_and_report_one_step_late():
    g, view, (rgb, depth, mask) = problem()
    figures = lambda s: (s.n_pairs, s.n_isects, s.loss, s.l1, s.ssim, s.depth)
    runs = []
    for deferred in (0, 1):
        context = Context(sh_degree=1)
        context.append(g)
        steps = [context.train_step(view, target_of(rgb, depth, mask), hyper_of(), deferred) for _ in range(5)]
        runs.append((steps, context.train_step(view, target_of(rgb, depth, mask), hyper_of()), context.map_rows()))
    (waited, last, rows), (late, late_last, late_rows) = runs
    assert late[0].n_pairs == -1 and sum(late[2].ms) > 0
    for a, b in zip(waited, late[1:]):
        assert figures(a) == pytest.approx(figures(b), rel=1e-5)
    assert figures(last) == pytest.approx(figures(late_last), rel=1e-5)
    for name in rows:
        np.testing.assert_allclose(rows[name], late_rows[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("switch", [dict(threads=1), dict(arena_alias=0), dict(arena_debug=1)])
def test_training_does_not_depend_on_switches(switch, backend):
    g, view, (rgb, depth, mask) = problem(70, 50, 600, 2, 1, 3)
    runs = []
    for params in (dict(threads=2), dict(threads=2) | switch):
        context = Context(sh_degree=2, **params)
        context.append(g)
        losses = [context.train_step(view, target_of(rgb, depth, mask), hyper_of()).loss for _ in range(10)]
        runs.append((losses, context.map_rows()))
    if backend == "cuda":  # sums of atomics, in no fixed order
        np.testing.assert_allclose(runs[0][0], runs[1][0], rtol=1e-3)
        return
    assert runs[0][0] == runs[1][0]
    for name, rows in runs[0][1].items():
        np.testing.assert_array_equal(rows, runs[1][1][name], err_msg=name)


def test_overfit():
    """200 steps on three views of a scene from a disturbed copy of it."""
    width, height = 64, 48
    truth, (viewmats, Ks) = gaussians(400, 0, 5), cameras(3, width, height, 5)
    rng, view = np.random.default_rng(0), view_of(viewmats, Ks, width, height, 0)
    rgb, alpha, depth = Context().forward(truth, view)
    image = (rgb.clip(0, 1) * 255 + 0.5).astype(np.uint8)
    measured = np.where(alpha > 0.9, depth / np.maximum(alpha, 1e-6), 0)
    start = truth._replace(means=truth.means + rng.normal(0, 0.05, truth.means.shape), sh=truth.sh + rng.normal(0, 0.8, truth.sh.shape),
                           scales=truth.scales * np.exp(rng.normal(0, 0.2, truth.scales.shape)))
    context = Context(sh_degree=0)
    context.append(start)
    quality = lambda: np.mean([psnr(np.clip(a, 0, 1), b / 255.0) for a, b in zip(context.render(view)[0].astype(float), image)])
    first = quality()
    hyper = hyper_of(lr_mean=2e-3, lr_sh0=1e-2)
    for i in range(200):
        c = i % 3
        one = view_of(viewmats[c:c + 1], Ks[c:c + 1], width, height, 0)
        step = context.train_step(one, target_of(image[c:c + 1], measured[c:c + 1]), hyper)
    assert first < 22 and quality() > 38, f"PSNR {first:.2f} -> {quality():.2f} dB, loss {step.loss:.4f}"


def test_step_figures():
    g, view, (rgb, depth, mask) = problem()
    context = Context(sh_degree=1)
    context.append(g)
    step = context.train_step(view, target_of(rgb, depth, mask), hyper_of(ssim_weight=0.3))
    images = context.render(view)
    assert step.n_isects >= step.n_pairs > 0 and sum(step.ms) > 0
    assert step.loss == pytest.approx(0.7 * step.l1 + 0.3 * (1 - step.ssim) + 0.1 * step.depth, rel=1e-6)
    assert oracle.loss(*[i.astype(float) for i in images], rgb, depth, mask, 0.3)["l1"] < step.l1 * 1.05


@pytest.mark.parametrize("change, message", [(dict(lr_mean=-1.0), "-1"), (dict(beta1=1.0), "beta1 1"), (dict(ssim_weight=1.5), "ssim_weight 1.5"),
                                             (dict(eps=np.nan), "nan"), (dict(eps=0.0), "eps 0: must be > 0"), (dict(struct_size=4), "struct_size")])
def test_wrong_hyper_parameters_are_refused(change, message):
    g, view, (rgb, _, _) = problem()
    context = Context(sh_degree=1)
    context.append(g)
    before = context.map_rows()
    with pytest.raises(AbiError, match=message):
        context.train_step(view, target_of(rgb), hyper_of(**change))
    assert all((rows == before[name]).all() for name, rows in context.map_rows().items())
