"""The operations of a compact map against those of a full one, and what callers see of it."""
import ctypes

import numpy as np
import pytest

from abi import AbiError, Context, caller, hyper_of, struct, target_of, view_of
from coded import BLOCK, CODED, RAW, codes, compact, copy, flat, scene, steps, twins
from scenes import cameras, gaussians

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend


def with_history(n=1000, degree=1, seed=0, **params):
    """A full and a compact map in the same state, in which every row of every Gaussian holds something of its own."""
    full, small = twins(gaussians(n, degree, seed), degree, **params)
    rng = np.random.default_rng(seed)
    for name, rows in sorted(small.map_rows().items(), reverse=True):  # adam.v before adam.m
        if name == "map.owner" or not name.startswith("map."):
            values = rng.integers(1, 1000, rows.shape) if rows.dtype == np.int32 else rng.random(rows.shape) + 0.1
            small.write(name, values)
    return copy(small, full), small


def assert_same(full, small, codes_apart=0.51):
    """Every row; parameters to this share of a code of compact."""
    assert len(full) == len(small)
    for name, rows in full.map_rows().items():
        if name.removeprefix("map.") in CODED:
            row = name.removeprefix("map.")
            assert (np.abs(flat(full, name) - flat(small, name)) <= codes_apart * steps(small, row)).all(), name
        else:
            np.testing.assert_array_equal(rows, small.read(name), err_msg=name)


@pytest.mark.parametrize("keep", ["half", "few", "all", "none", "last", "blocks", "not the first"])
@pytest.mark.parametrize("degree", [0, 3])
def test_keep(keep, degree):
    full, small = with_history(degree=degree)
    n, rng = len(full), np.random.default_rng(1)
    flags = dict(half=rng.random(n) < 0.5, few=rng.random(n) < 0.02, all=np.ones(n, bool), none=np.zeros(n, bool), last=np.arange(n) == n - 1,
                 blocks=np.arange(n) // BLOCK % 2 == 1)
    flags["not the first"] = np.arange(n) > 0
    before = small.buffer("map.sh", "i2")
    for context in (full, small):
        kept = ctypes.c_int64(-1)
        context.call("map_keep", flags[keep].astype(np.uint8), kept)
        assert kept.value == len(context) == flags[keep].sum()
    assert_same(full, small)
    if keep == "all":
        np.testing.assert_array_equal(small.buffer("map.sh", "i2"), before)
    for context in (full, small):
        context.append(gaussians(3, degree), owner=8)
    assert_same(full, small)


def test_append_in_pieces_is_append_at_once():
    """A block that was partly filled is encoded again where the new ones are larger."""
    g = gaussians(700, 2, 3)
    g = g._replace(sh=g.sh * np.linspace(0.1, 3, 700)[:, None, None].astype(np.float32))
    once, pieces, full = compact(2), compact(2), Context(sh_degree=2)
    for context, ends in ((once, [700]), (full, [700]), (pieces, [1, 130, 256, 300, 640, 700])):
        for begin, end in zip([0, *ends], ends):
            context.append(type(g)(*(a[begin:end] for a in g)))
    assert_same(full, once)
    assert_same(full, pieces, 1.01)  # rounded when it came, and again for a larger exponent
    for name in ("map.mean", "map.exponents"):
        np.testing.assert_array_equal(once.buffer(name, "u1"), pieces.buffer(name, "u1"))


def test_memory_of_removed_gaussians_leaves_nothing_behind():
    """Codes, moments and exponents of what was there before do not show in what comes."""
    _, small = with_history(1000, 2)
    small.write("map.sh", 1.7 * small.read("map.sh"))
    kept, g, h = ctypes.c_int64(), gaussians(600, 2, 9, size=(1e-4, 1e-3)), gaussians(44, 2)
    small.call("map_keep", (np.arange(1000) < 44).astype(np.uint8), kept)
    fresh = compact(2)
    fresh.append(h)
    for context in (small, fresh):
        context.append(g)
    for name in fresh.map_rows():
        np.testing.assert_array_equal(small.read(name)[BLOCK:], fresh.read(name)[BLOCK:], err_msg=name)
        assert name.startswith("map.") or not small.read(name)[44:].any()


@pytest.mark.parametrize("degree", [0, 2])
def test_relocation(degree):
    full, small = with_history(1000, degree)
    rng = np.random.default_rng(2)
    dst = np.sort(rng.choice(500, 120, replace=False)).astype(np.int64)[rng.permutation(120)]
    src = rng.integers(500, 560, 120).astype(np.int64)  # several copies of some
    for context in (full, small):
        context.call("map_relocate", 120, dst, src, 0.005)
    assert_same(full, small, 1.6)  # a source is rounded, its copy again
    for name in (n for n in small.map_rows() if n.startswith("adam.")):
        assert not small.read(name)[dst].any(), name
    np.testing.assert_array_equal(small.read("map.owner")[dst], small.read("map.owner")[src])


def test_rows_of_a_large_map():
    """More than one piece of what goes through the host at once (262,144 Gaussians)."""
    context, n, rng = compact(0, max_gaussians=600_000), 600_000, np.random.default_rng(3)
    x = rng.uniform(-0.999, 0.999, (n, 3)).astype(np.float32)
    context.append(gaussians(n, 0)._replace(sh=x[:, None]))
    np.testing.assert_allclose(context.read("map.sh")[:, 0], x, rtol=0, atol=2.0**-16)
    for row in ("map.sh", "adam.v.mean", "adam.m.mean"):
        before = context.read(row)
        values = np.abs(x[:400_000]) if "v" in row else x[:400_000] * (context.read("adam.v.mean", 100_000, 400_000) > 0)
        context.write(row, values.reshape(-1, *before.shape[1:]), first=100_000)
        after = context.read(row).reshape(n, 3)
        np.testing.assert_allclose(after[100_000:500_000], values, rtol=0.07, atol=2.0**-12)
        np.testing.assert_array_equal(np.delete(after, np.s_[100_000:500_000], 0), np.delete(before.reshape(n, 3), np.s_[100_000:500_000], 0))
    np.testing.assert_array_equal(context.read("map.sh", 262_000, 300)[:, 0], context.read("map.sh")[262_000:262_300, 0])


def test_sh_beyond_degree_0_of_a_large_map():
    """As above: map.sh_rest, which does not lie in blocks."""
    n, context = 263_000, compact(1, max_gaussians=263_000)
    context.append(gaussians(n, 0))
    values = np.random.default_rng(4).normal(size=(n, 4, 3)).astype(np.float32)
    context.write("map.sh", values[:-200], first=100)
    got = context.read("map.sh")
    np.testing.assert_allclose(got[100:-100, 1:], values[:-200, 1:], rtol=0, atol=0.5001 * 2.0**-4)  # below 8
    assert not got[:100, 1:].any() and not got[-100:, 1:].any()
    np.testing.assert_array_equal(context.read("map.sh", 262_100, 300), got[262_100:262_400])


@pytest.mark.parametrize("spacing", [1.0, 3.0])
def test_insertion(spacing):
    rng, maps = np.random.default_rng(4), (Context(sh_degree=1), compact(1))
    view = view_of(*cameras(1, 64, 48), 64, 48, 1)
    target = target_of(rng.integers(0, 256, (1, 48, 64, 3)), rng.uniform(1, 3, (1, 48, 64)))
    for context in maps:
        context.append(gaussians(100, 1))
    counts = [context.insert(view, target, hole_spacing_px=spacing, owner=5) for context in maps]
    assert counts[0] == counts[1] > 100
    assert_same(*maps)


def test_a_render_is_that_of_full_precision():
    for degree in range(4):
        g, view, _ = scene(2000, degree, 2, degree)
        images = []
        for context in (Context(sh_degree=degree), compact(degree)):
            context.append(g)
            images.append(context.render(view))
        for a, b in zip(*images):
            assert np.abs(a - b).mean() < (1e-3 if degree else 2e-4) and (np.abs(a - b) > 5e-3).mean() < 2e-3, degree  # 8 bits of SH beyond degree 0


@pytest.mark.parametrize("field, value", [("means", np.nan), ("quats", np.nan), ("quats", 0), ("scales", np.inf), ("scales", np.nan), ("scales", 1e20),
                                          ("opacities", np.nan), ("sh", np.inf), ("sh", np.nan)])
def test_what_is_not_finite_is_never_drawn_and_spoils_no_other(field, value):
    g, view, target = scene(300, 1)
    bad = g._replace(**{field: getattr(g, field).copy()})
    getattr(bad, field)[7] = value
    raw = lambda g: caller((g.means, g.quats, np.log(g.scales), np.log(g.opacities / (1 - g.opacities)), g.sh), activated=False)
    without = compact(1)
    without.append(g)
    kept = ctypes.c_int64()
    without.call("map_keep", (np.arange(300) != 7).astype(np.uint8), kept)
    context = compact(1)
    context.call("map_append", raw(bad), 0)
    for a, b in zip(context.render(view), without.render(view)):
        assert np.isfinite(a).all() and np.abs(a - b).max() < 2e-2 and np.abs(a - b).mean() < 1e-3
    for _ in range(3):
        assert np.isfinite(context.train_step(view, target, hyper_of(noise=1.0)).loss)
    assert not context.read("adam.steps")[7] and all(np.isfinite(np.delete(rows, 7, 0)).all() for rows in context.map_rows().values())


def test_opaque_and_tiny_gaussians_and_any_norm_of_a_quaternion():
    """Opacity 1, a scale of 0 and quaternions of norm 1e-6 and 1e6 are drawn as in full precision."""
    g, view, _ = scene(600, 1)
    g.opacities[::5], g.scales[1::5], g.quats[2::5], g.quats[3::5] = 1, 0, g.quats[2::5] * 1e-6, g.quats[3::5] * 1e6
    images = []
    for context in (Context(sh_degree=1), compact(1)):
        with np.errstate(divide="ignore"):
            context.call("map_append", caller(g), 0)
        images.append(context.render(view))
    for a, b in zip(*images):
        assert np.abs(a - b).mean() < 1e-3 and (np.abs(a - b) > 0.02).mean() < 5e-3


def test_limits_need_not_be_whole_blocks():
    context, g = compact(1, max_gaussians=500), gaussians(500, 1)
    context.append(g)
    with pytest.raises(AbiError, match="501 Gaussians > engine.max_gaussians 500"):
        context.append(gaussians(1, 1))
    view, target = scene(1)[1:]
    context.train_step(view, target, hyper_of())
    assert len(codes(context, "map.sh", "i2")) == 500


def test_the_budget_counts_codes():
    """More Gaussians fit below the same budget, and the bytes never exceed it."""
    grown = []
    for precision in (0, 1):
        context = Context(max_gaussians=10_000_000, budget_bytes=256 << 20, sh_degree=3, precision=precision)
        g = gaussians(20_000, 3)
        with pytest.raises(AbiError, match="> budget 256 MiB"):
            for _ in range(1000):
                context.append(g)
        assert sum(r.capacity_bytes for r in context.report().values()) <= 256 << 20
        grown.append(len(context))
    assert grown[1] > 2 * grown[0]


def test_wrong_precisions_are_refused():
    from spirula_gpu.native import Engine, NativeError
    with pytest.raises(NativeError, match="precision 'half': must be full or compact"):
        Engine("cpu", precision="half")
    library, out = Context().library, ctypes.c_void_p()
    assert library.spl_create(ctypes.byref(struct("spl_create_params", max_gaussians=10, precision=2)), ctypes.byref(out)) == -1
    assert b"precision 2" in library.spl_error(None) and not out.value


def test_engine_and_mapper_speak_fp32(backend, tmp_path):
    from spirula_gpu import Config, Mapper
    from spirula_gpu.config import replaced
    from spirula_gpu.native import Engine
    with Engine(backend, sh_degree=1, precision="compact") as engine:
        g = gaussians(300, 1)
        engine.append(g.means, g.quats, np.log(g.scales), np.zeros(300), g.sh)
        np.testing.assert_allclose(engine.read("map.sh"), g.sh, atol=np.abs(g.sh).max() / 250)  # 8 bits beyond degree 0
        assert {engine.read("map." + name).dtype for name in RAW} == {np.dtype(np.float32)}
    mapper = Mapper(replaced(Config(), {"engine.backend": backend, "engine.precision": "compact", "engine.threads": 1}))
    assert {r.name: r for r in mapper.vram().rows}["map.exponents"].used == 0
    mapper.stop()
