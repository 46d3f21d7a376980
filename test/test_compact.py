"""Compact precision: the codes, what a training step does to them and what it leaves alone, against full precision."""
import numpy as np
import pytest

from abi import ARGUMENT, AbiError, Context, hyper_of, target_of, view_of
from coded import BLOCK, CODED, RAW, codes, compact, copy, exponents, f8_step, flat, moments, rest, scene, steps, twins
from scenes import cameras, gaussians
from spirula_gpu.metrics import psnr

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend


# ---- bytes and codes

@pytest.mark.parametrize("degree, full_bytes, compact_bytes", [(0, 176, 88), (1, 216, 102), (2, 280, 120), (3, 368, 142)])
def test_bytes_a_gaussian(degree, full_bytes, compact_bytes):
    for context, want in ((Context(sh_degree=degree), full_bytes), (compact(degree), compact_bytes)):
        rows = [r for name, r in context.report().items() if not r.aliased and name not in ("arena", "map.exponents")]
        assert sum(r.item_bytes for r in rows) == want
    assert "map.exponents" not in Context().report() and compact().report()["map.exponents"].item_bytes == 4
    context = compact(degree)
    context.append(gaussians(300, degree))
    assert context.report()["map.exponents"].used_bytes == 8 and context.report()["map.mean"].used_bytes == 300 * 12


@pytest.mark.parametrize("degree", [0, 1, 2, 3])
def test_parameters_are_the_nearest_codes_of_the_finest_exponent(degree):
    context, g = compact(degree), gaussians(700, degree, degree)
    g = g._replace(sh=g.sh * np.float32(0.4))  # exponents that are not those of cleared memory
    context.append(g)
    given = dict(mean=g.means, quat=g.quats, log_scale=np.log(g.scales), logit_opacity=np.log(g.opacities / (1 - g.opacities)), sh=g.sh)
    np.testing.assert_array_equal(context.read("map.mean"), g.means)
    for row in CODED:
        x, code, step = given[row].reshape(700, -1), codes(context, "map." + row, "i2"), steps(context, row)
        for block in np.split(np.abs(code.astype(int)), range(BLOCK, 700, BLOCK)):
            assert 16383 <= block.max() <= 32767, row
        if row == "sh":
            code = np.concatenate([code, rest(context)[0]], 1)
        np.testing.assert_array_equal(flat(context, "map." + row), code * step)
        assert (np.abs(code * step - x) <= 0.5001 * step).all(), row
    for l, of_degree in enumerate(np.split(np.abs(rest(context)[0]), [3 * (l * l - 1) for l in range(2, degree + 1)], 1) if degree else [], 1):
        assert 63 <= of_degree.max(1).min() and of_degree.max() <= 127, f"degree {l}"


def test_zero_is_zero_and_what_was_read_can_be_written():
    context, g = compact(2), gaussians(600, 2, 3)
    context.append(g._replace(sh=g.sh * (np.arange(9) < 4)[:, None]))  # as at birth: no second degree
    assert not context.read("map.sh")[:, 4:].any()
    rng, order = np.random.default_rng(0), [n for n in sorted(context.map_rows(), reverse=True)]  # adam.v before adam.m
    for name in (n for n in order if n.startswith("adam.")):
        values = rng.random(context.read(name).shape) * 1e-3
        context.write(name, values * (rng.random(len(context)) < 0.5).reshape(-1, *[1] * (values.ndim - 1)) if ".m." in name else values)
    names = [n for n in context.report() if n.split(".")[0] in ("map", "adam", "stat")]
    before, rows = {n: context.buffer(n, "u1") for n in names}, context.map_rows()
    for name in order:
        context.write(name, rows[name])
    for name in names:
        np.testing.assert_array_equal(context.buffer(name, "u1"), before[name], err_msg=name)


def test_an_exponent_rises_at_once_and_falls_late():
    context, g = compact(0), gaussians(200, 0)
    context.append(g)
    exponent = lambda: context.buffer("map.exponents", "i1")[1]
    write = lambda value: context.write("map.log_scale", np.full((1, 3), value), first=7)
    context.write("map.log_scale", np.random.default_rng(0).uniform(-0.9, 0.9, (200, 3)))
    before = context.read("map.log_scale")
    assert exponent() == 0
    for value, e in ((1.0, 1), (0.5, 1), (3.9, 2), (1.5, 2), (7.0, 3), (0.99, 0), (4000.0, 6), (0.1, 0)):
        write(value)
        assert exponent() == e, value
        assert np.abs(context.read("map.log_scale", 7, 1) - min(value, 64)).max() <= 2.0**(e - 15)
        others = np.delete(context.read("map.log_scale") - before, 7, 0)
        assert np.abs(others).max() <= 2.0**-9 * 1.2, "the codes of the others follow"


def test_moments_are_stored_relative_to_each_other():
    context, n, rng = compact(1), 900, np.random.default_rng(1)
    context.append(gaussians(n, 1))
    for row in ("mean", "sh"):
        firsts, seconds = moments(row)
        v = np.exp(rng.uniform(-40, 10, (n, 2 if row == "sh" else 3)))
        root = np.sqrt(v)[:, :1] if row == "sh" else np.sqrt(v)
        u = np.exp(rng.uniform(-9, 5.5, (n, 3))) * rng.choice([-1, 1], (n, 3))
        u[::10] = 0
        context.write(seconds, v)
        context.write(firsts, u * root)
        np.testing.assert_allclose(context.read(seconds), v, rtol=2.0**-8)
        got, inside = context.read(firsts) / root, np.abs(u) < 115
        assert (np.abs(got - u) <= 0.5 * f8_step(u) + 2.0**-8 * np.abs(u))[inside].all() and not got[u == 0].any()
        np.testing.assert_allclose(np.abs(got[np.abs(u) > 125]), 120, rtol=2.0**-8)
        code = codes(context, firsts, "u1").astype(np.uint32)
        value = (((code & 127) + 1024 << 20).view("f4") - 2) / 1024 * np.where(code >> 7, -1, 1)
        roots = (codes(context, seconds, "u2").astype(np.uint32) << 15).view("f4")
        np.testing.assert_array_equal(context.read(firsts), value.astype(np.float32) * (roots[:, :1] if row == "sh" else roots))


@pytest.mark.parametrize("row, value, message", [("adam.m.quat", 0.5, "Gaussian 3 has 0.5, but no second moment .* write adam.v.quat first"),
                                                 ("map.sh", np.nan, "Gaussian 0 has -?nan"), ("adam.v.mean", -1.0, "Gaussian 0 has -1.* >= 0"),
                                                 ("map.exponents", 1.0, "in fp32")])
def test_what_no_code_can_hold_is_refused(row, value, message):
    context = compact(0)
    context.append(gaussians(5, 0))
    before = context.map_rows()
    values = np.full((5, *context.row_shape(row)[0]), value, np.float32)
    if row == "adam.m.quat":
        values[:3] = 0
    with pytest.raises(AbiError, match=message) as error:
        context.call("map_write", row, 0, 5, values)
    assert error.value.status == ARGUMENT
    for name, rows in context.map_rows().items():
        np.testing.assert_array_equal(rows, before[name])


# ---- training

@pytest.mark.parametrize("degree, n_cameras, evaluated", [(0, 1, 0), (1, 3, 1), (2, 1, 1), (3, 2, 3), (3, 1, 2), (3, 2, 1), (3, 1, 0)])
def test_a_step_is_that_of_full_precision_to_one_code(degree, n_cameras, evaluated):
    g, view, target = scene(degree=degree, n_cameras=n_cameras)
    view.sh_degree = evaluated
    full, small = twins(g, degree)
    hyper = hyper_of(eps=1e-10, opacity_reg=0.01, scale_reg=0.01)
    for i in range(4):
        before = small.map_rows()
        a, b = full.train_step(view, target, hyper), small.train_step(view, target, hyper)
        assert b.loss == pytest.approx(a.loss, rel=1e-5) and a.n_pairs == b.n_pairs
        for name in ("adam.steps", "map.owner"):
            np.testing.assert_array_equal(full.read(name), small.read(name))
        for name in ("stat.weight", "stat.error"):
            np.testing.assert_allclose(full.read(name), small.read(name), rtol=1e-4, atol=1e-6)
        moved = 0
        for row in RAW:
            x, y = flat(full, "map." + row), flat(small, "map." + row)
            allowed = 1e-6 if row == "mean" else 1.01 * steps(small, row) + 1e-6
            assert (np.abs(x - y) <= allowed).all(), f"step {i}: {row}"
            moved += (y != before["map." + row].reshape(y.shape)).mean()
            firsts, seconds = moments(row)
            v, root = flat(full, seconds), np.sqrt(flat(small, seconds))
            np.testing.assert_allclose(root, np.sqrt(v), rtol=2.0**-8 * 1.01, atol=1e-20)
            scale = root[:, :1] if row == "sh" else root
            m, got = flat(full, firsts), flat(small, firsts)
            assert (np.abs(got - m) <= (1.01 * f8_step(m / np.maximum(scale, 1e-30)) + 1e-6) * scale + 2.0**-8 * np.abs(m)).all(), f"step {i}: {row}"
        assert moved > 1
        if evaluated < degree:
            np.testing.assert_array_equal(small.read("map.sh")[:, (evaluated + 1)**2:], before["map.sh"][:, (evaluated + 1)**2:])
        copy(small, full)


def test_rounding_is_unbiased():
    """The same step with many seeds: on average that of full precision."""
    g, view, target = scene(400, 1, 1)
    full, small = twins(g, 1)
    for _ in range(3):
        small.train_step(view, target, hyper_of())
    state = small.map_rows()
    copy(small, full).train_step(view, target, hyper_of())
    order = [n for n in sorted(state, reverse=True)]
    names = [name for row in CODED for name in ("map." + row, *moments(row))]
    runs = {n: [] for n in names}
    for seed in range(300):
        for name in order:
            small.write(name, state[name])
        small.train_step(view, target, hyper_of(seed=seed))
        for name in names:
            runs[name].append(flat(small, name))
    values = {n: np.array(runs[n]) for n in names}
    for row in CODED:
        firsts, seconds = moments(row)
        root = np.sqrt(values[seconds])
        of_element = root[..., :1] if row == "sh" else root
        u = values[firsts] / np.where(of_element > 0, of_element, 1)
        for name, stored, want, rounded in (("x", values["map." + row], flat(full, "map." + row), values["map." + row]),
                                            ("m", values[firsts], flat(full, firsts), u),
                                            ("root", root, np.sqrt(flat(full, seconds)), root)):
            often = rounded.std(0) > 0.2 * np.maximum(np.ptp(rounded, 0), 1e-30)  # both codes came up more than a few times
            z = (stored.mean(0) - want)[often] / stored.std(0)[often] * np.sqrt(len(stored))
            assert len(z) > 100 and abs(z.mean()) < 4 / np.sqrt(len(z)) and 0.8 < z.std() < 1.2, f"{row} {name}: {z.mean():.3f} +- {z.std():.3f} of {len(z)}"


def test_blocks_without_a_visible_gaussian_stay_as_they_are():
    """Bit for bit, over many steps, with noise and regularisers; and in the others, what is not seen as long as the exponents stay."""
    g, view, target = scene(4 * BLOCK + 100, 1, 2, seed=4)
    hidden = np.zeros(len(g.means), bool)
    hidden[BLOCK:3 * BLOCK] = hidden[::3] = True
    g = g._replace(means=np.where(hidden[:, None], [50.0, 50, -50], g.means).astype(np.float32))
    context = compact()
    context.append(g)
    names = [n for n in context.report() if n.split(".")[0] in ("map", "adam", "stat")]
    before, rows = {n: context.buffer(n, "u1") for n in names}, context.map_rows()
    exponent = exponents(context)
    for i in range(300):
        context.train_step(view, target, hyper_of(noise=10.0, opacity_reg=0.1, scale_reg=0.1, seed=i, lr_sh0=1e-2))
    for name in names:
        after, was = context.buffer(name, "u1"), before[name]
        block = context.report()[name].item_bytes * (1 if name == "map.exponents" else BLOCK)
        assert (after[block:3 * block] == was[block:3 * block]).all(), name
        assert (after != was).any() or name == "map.owner"
    for row in CODED:
        unseen = hidden & np.repeat((exponents(context) == exponent)[:, CODED.index(row)], BLOCK)[:len(g.means)]
        np.testing.assert_array_equal(flat(context, "map." + row)[unseen], rows["map." + row].reshape(len(unseen), -1)[unseen])
    item = context.report()["map.sh_rest"].item_bytes
    stored, was = (x.reshape(-1, item) for x in (context.buffer("map.sh_rest", "u1"), before["map.sh_rest"]))
    np.testing.assert_array_equal(stored[hidden], was[hidden])


@pytest.mark.parametrize("switch", [dict(threads=1), dict(arena_alias=0), dict(arena_debug=1)])
def test_training_does_not_depend_on_switches(switch, backend):
    if backend == "cuda":
        pytest.skip("sums of atomics, in no fixed order")
    g, view, target = scene(2000, 2, 2)
    runs = []
    for params in (dict(threads=2), dict(threads=2) | switch):
        context = compact(2, **params)
        context.append(g)
        losses = [context.train_step(view, target, hyper_of()).loss for _ in range(10)]
        runs.append((losses, {n: context.buffer(n, "u1") for n in context.report() if n.split(".")[0] in ("map", "adam", "stat")}))
    assert runs[0][0] == runs[1][0]
    for name, rows in runs[0][1].items():
        np.testing.assert_array_equal(rows, runs[1][1][name], err_msg=name)


def test_training_reaches_the_quality_of_full_precision():
    """Rounding is random, and now and then one run in ten ends a dB lower: the median of five."""
    truth, (viewmats, Ks) = gaussians(400, 1, 5), cameras(3, 64, 48, 5)
    rng, view = np.random.default_rng(0), view_of(viewmats, Ks, 64, 48, 1)
    image = (Context().forward(truth, view)[0].clip(0, 1) * 255 + 0.5).astype(np.uint8)
    start = truth._replace(means=truth.means + rng.normal(0, 0.05, truth.means.shape), sh=truth.sh + rng.normal(0, 0.8, truth.sh.shape))
    reached = []
    for seed, context in enumerate((Context(sh_degree=1), *(compact() for _ in range(5)))):
        context.append(start)
        for i in range(400):
            one = view_of(viewmats[i % 3:i % 3 + 1], Ks[i % 3:i % 3 + 1], 64, 48, 1)
            context.train_step(one, target_of(image[i % 3:i % 3 + 1]), hyper_of(lr_mean=2e-3, lr_sh0=1e-2, seed=seed))
        reached.append(np.mean([psnr(np.clip(a, 0, 1), b / 255.0) for a, b in zip(context.render(view)[0].astype(float), image)]))
    assert reached[0] > 30 and np.median(reached[1:]) > reached[0] - 0.3, reached
