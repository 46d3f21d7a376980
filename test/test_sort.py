"""The order of the map: all rows of a Gaussian move together, along a Morton curve that numpy finds on its own, and nothing else changes."""
import ctypes

import numpy as np
import pytest

from abi import ARGUMENT, CAPACITY, MEMORY, AbiError, Context, hyper_of, view_of
from coded import BLOCK, CODED, codes, compact, exponents, flat, scene, steps
from scenes import gaussians, look
from spirula_gpu.config import replaced
from spirula_gpu.mapper import Mapper
from spirula_gpu.native import Engine, NativeError
from spirula_gpu.trainer import SORT_STEPS
from test_compact_map import with_history
from test_mapper import SMALL, frame, run, submit

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend


def morton_order(mean) -> np.ndarray:
    """Bit by bit: cells of the smallest power of two with which 2^20 each way hold 99 % of the finite means."""
    there = np.isfinite(mean).all(1)
    largest = np.sort(np.abs(mean[there].astype(np.float64)).max(1, initial=0))
    inside = largest[len(largest) - len(largest) // 100 - 1] if len(largest) else 0.0
    exponent = max(np.frexp(inside)[1], -100) if inside else -100
    with np.errstate(over="ignore"):
        cell = np.floor(np.where(there[:, None], mean, 0).astype(np.float64) * 2.0**(20 - exponent))
    cell = np.clip(cell, -2**20, 2**20 - 1).astype(np.int64) + 2**20
    key = np.zeros(len(mean), np.uint64)
    for bit in range(21):
        for axis in range(3):  # x counts most
            key |= (cell[:, axis] >> bit & 1).astype(np.uint64) << np.uint64(3 * bit + 2 - axis)
    key[~there] = 2**63
    return np.argsort(key, kind="stable")


def sort(context) -> int:
    moved = ctypes.c_int64(-1)
    context.call("map_sort", moved)
    return moved.value


def assert_sorted(context, before: dict, codes_apart=0.51) -> np.ndarray:
    """`before`: map_rows() of the context that has been sorted. Returns the order."""
    order = morton_order(before["map.mean"])
    for name, rows in context.map_rows().items():
        row = name.removeprefix("map.")
        if context.precision and row in CODED:
            there = before[name][order].astype(np.float64).reshape(len(order), -1)
            assert (np.abs(flat(context, name) - there) <= codes_apart * steps(context, row)).all(), name
        else:
            np.testing.assert_array_equal(rows, before[name][order], err_msg=name)
    return order


def map_of(precision: int, n=1000, degree=1, mean=None, **params) -> Context:
    """Every row of every Gaussian holds something of its own; the owner is its index."""
    context = with_history(n, degree, **params)[precision]
    context.precision = precision
    context.write("map.owner", np.arange(n))
    if mean is not None:
        context.write("map.mean", mean)
    return context


both = pytest.mark.parametrize("precision", [0, 1])


@both
@pytest.mark.parametrize("n, degree", [(3000, 0), (3000, 3), (1000, 1), (257, 2), (256, 1), (255, 1), (2, 1)])
def test_all_rows_move_together(precision, n, degree):
    context = map_of(precision, n, degree)
    before = context.map_rows()
    moved = sort(context)
    order = assert_sorted(context, before)
    assert moved == (order != np.arange(n)).sum() and len(context) == n
    np.testing.assert_array_equal(context.read("map.owner"), order)
    if precision:  # moments are not coded anew
        assert len(np.unique(context.buffer("map.exponents", "i1"))) > 1


@both
@pytest.mark.parametrize("n", [0, 1])
def test_nothing_to_sort(precision, n):
    context = Context(sh_degree=1, precision=precision)
    context.append(gaussians(n, 1))
    assert sort(context) == 0 and len(context) == n


def places(kind: str, n: int, rng) -> np.ndarray:
    mean = rng.normal(0, 3, (n, 3)).astype(np.float32)
    if kind == "equal":
        mean = mean[rng.integers(0, 5, n)]
    elif kind == "in one place":
        mean[:] = mean[0]
    elif kind == "at the origin":
        mean[:] = 0
    elif kind == "not finite":
        mean[::7, 1], mean[::11, 0], mean[::13, 2] = np.nan, np.inf, -np.inf
    elif kind == "none finite":
        mean[:] = np.nan
    elif kind == "outliers":
        mean[rng.choice(n, n // 100, replace=False)] *= np.float32(1e30)
    elif kind == "tiny":
        mean *= np.float32(1e-33)
    elif kind == "huge":
        mean *= np.float32(1e37)
    elif kind == "far away":
        mean += np.float32([1000, -2000, 500])
    elif kind == "planes":
        mean[:, 2] = np.float32(0.0) * rng.choice([-1, 1], n)
    return mean


@both
@pytest.mark.parametrize("kind", ["equal", "in one place", "at the origin", "not finite", "none finite", "outliers", "tiny", "huge", "far away", "planes"])
def test_any_means(precision, kind):
    context = map_of(precision, mean=places(kind, 1000, np.random.default_rng(5)))
    before = context.map_rows()
    sort(context)
    assert_sorted(context, before)


def test_far_outliers_do_not_coarsen_the_others():
    """1 % of the means at 1e6 m: the others are in the order that they have alone."""
    rng = np.random.default_rng(0)
    mean = rng.normal(0, 2, (3000, 3)).astype(np.float32)
    far = np.zeros(3000, bool)
    far[rng.choice(3000, 30, replace=False)] = True
    with_far = np.where(far[:, None], np.float32(1e6), mean)
    context = map_of(0, 3000, 0, with_far)
    sort(context)
    owner = context.read("map.owner")
    others = np.flatnonzero(~far)
    np.testing.assert_array_equal(owner[~far[owner]], others[morton_order(mean[others])])


@both
def test_a_map_that_grows_keeps_the_order_it_had(precision):
    """Gaussians of a larger extent come: those that were there stay in their order."""
    context = map_of(precision, 2000, 0, places("", 2000, np.random.default_rng(1)))
    sort(context)
    context.write("map.owner", np.arange(2000))
    wide = gaussians(500, 0, 3)
    context.append(wide._replace(means=wide.means * 40), owner=-1)
    sort(context)
    owner = context.read("map.owner")
    np.testing.assert_array_equal(owner[owner >= 0], np.arange(2000))


@both
def test_sorting_twice_touches_nothing(precision):
    context = map_of(precision)
    assert sort(context) > 0
    names = [name for name, row in context.report().items() if not row.aliased and name != "arena"]
    before = {name: context.buffer(name, "u1") for name in names}
    assert sort(context) == 0
    for name in names:
        np.testing.assert_array_equal(context.buffer(name, "u1"), before[name], err_msg=name)


def test_blocks_in_which_nothing_moves_keep_their_codes():
    context = map_of(1, 1000)
    sort(context)
    before = {name: codes(context, name, "i2") for name in ("map.quat", "map.sh")}
    exponent = exponents(context)
    mean = context.read("map.mean")
    mean[[600, 601]] = mean[[601, 600]]
    context.write("map.mean", mean)
    assert sort(context) == 2
    outside = np.arange(1000) // BLOCK != 600 // BLOCK
    for name in before:
        np.testing.assert_array_equal(codes(context, name, "i2")[outside], before[name][outside])
    np.testing.assert_array_equal(np.delete(exponents(context), 600 // BLOCK, 0), np.delete(exponent, 600 // BLOCK, 0))


def test_exponents_follow_what_a_block_holds():
    """Large and small Gaussians, interleaved, part: the blocks of the small ones get small exponents."""
    n, rng = 2048, np.random.default_rng(2)
    g = gaussians(n, 1)
    large = rng.random(n) < 0.5
    g.means[:] = np.where(large[:, None], 3, -3) + rng.normal(0, 0.1, (n, 3))
    g.sh[:] = np.where(large, 2.0, 0.01)[:, None, None] * rng.uniform(-1, 1, g.sh.shape)
    context = compact(1)
    context.append(g)
    context.precision = 1
    before = context.map_rows()
    assert (exponents(context)[:, 3] >= 1).all()
    sort(context)
    assert_sorted(context, before, 0.5)
    whole = (n - large.sum()) // BLOCK  # small ones come first: x < 0
    after = exponents(context)[:, 3]
    assert (after[:whole] <= -6).all() and (after[whole + 1:] >= 0).all()


@both
@pytest.mark.parametrize("n_cameras", [1, 2])
def test_a_render_is_the_same(precision, n_cameras):
    g, view, _ = scene(3000, 2, n_cameras)
    context = Context(sh_degree=2, precision=precision)
    context.append(g)
    before = context.render(view)
    assert sort(context) > 0
    for a, b in zip(context.render(view), before):
        worst = 1e-4 if not precision else 5e-3
        assert (np.abs(a - b) > worst).mean() < 1e-3 and np.abs(a - b).mean() < worst / 10


@both
def test_training_goes_on(precision):
    """A sorted and an unsorted map learn the same, and each Gaussian has had as many steps in both."""
    g, view, target = scene(2000, 1)
    losses, maps = [], [Context(sh_degree=1, precision=precision) for _ in range(2)]
    for context in maps:
        context.append(g)
        context.write("map.owner", np.arange(2000))
        losses.append([])
        for step in range(20):
            if step == 10 and context is maps[1]:
                assert sort(context) > 0
            losses[-1].append(context.train_step(view, target, hyper_of()).loss)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-2 if precision else 1e-3)
    assert losses[0][-1] < 0.98 * losses[0][0]
    steps_of = [context.read("adam.steps")[np.argsort(context.read("map.owner"))] for context in maps]
    assert (steps_of[0] != steps_of[1]).mean() < 0.01 and steps_of[0].max() == 20


@both
@pytest.mark.parametrize("arena", ["none", "small", "large"])
def test_scratch_of_any_size(precision, arena):
    """Rows go through it in pieces of 3 words, or at once."""
    context = map_of(precision, 20_000, 3)
    size = dict(none=0, small=64, large=1024)[arena]
    if size:
        context.render(view_of([np.eye(4)], [[[size, 0, size / 2], [0, size, size / 2], [0, 0, 1]]], size, size, 3))
    before, held = context.map_rows(), context.report()["arena"].capacity_bytes
    sort(context)
    assert_sorted(context, before)
    assert context.report()["arena"].capacity_bytes <= held + (2 << 20), "what it took is given back, but for a page"


@pytest.mark.parametrize("no_paging", [0, 1])
def test_sorted_between_other_calls(no_paging):
    """Arena debugging, a deferred step before it, and appending, keeping and training after it."""
    context = map_of(1, 3000, 1, arena_debug=1, no_paging=no_paging)
    view, target = scene(1)[1:]
    for _ in range(3):
        context.train_step(view, target, hyper_of(), deferred=1)
        sort(context)
    np.testing.assert_array_equal(np.sort(context.read("map.owner")), np.arange(3000))
    context.append(gaussians(100, 1, 7), owner=-1)
    kept = ctypes.c_int64()
    context.call("map_keep", (context.read("map.owner") % 2 == 0).astype(np.uint8), kept)
    before = context.map_rows()
    sort(context)
    assert_sorted(context, before)
    assert np.isfinite(context.train_step(view, target, hyper_of()).loss)


def grown(precision: int, **params) -> Context:
    """200k Gaussians that came by thousands, so that the arena is small."""
    context, g = Context(sh_degree=0, max_gaussians=200_000, precision=precision, **params), gaussians(1000, 0)
    for i in range(200):
        context.append(g._replace(means=np.roll(g.means, i, 0) + np.float32(0.001 * i)))
    context.precision = precision
    return context


@both
def test_refusals_leave_everything_as_it_was(precision):
    held = sum(r.capacity_bytes for r in grown(precision).report().values())
    tight = grown(precision, budget_bytes=held + (1 << 20))
    roomy = grown(precision)
    roomy.call("fail_allocation", 1)
    for context, status, text in ((tight, CAPACITY, r"sorting 200000 Gaussians needs [1-9]\d* MiB of scratch beside [1-9]\d* MiB of map > budget \d+ MiB; raise engine.vram_budget_mb"),
                                  (roomy, MEMORY, r"out of memory \(a test asked for it\)")):
        before = context.map_rows()
        with pytest.raises(AbiError, match=text) as error:
            sort(context)
        assert error.value.status == status
        for name, rows in context.map_rows().items():
            np.testing.assert_array_equal(rows, before[name], err_msg=name)
        assert sum(r.capacity_bytes for r in context.report().values()) <= held
    roomy.call("fail_allocation", 0)
    assert sort(roomy) > 0
    assert_sorted(roomy, before)


@both
def test_it_takes_16_bytes_a_gaussian(precision):
    """With that much more below the budget it works."""
    held = sum(r.capacity_bytes for r in grown(precision).report().values())
    context = grown(precision, budget_bytes=held + 16 * 200_000 + (4 << 20))
    before = context.map_rows()
    assert sort(context) > 0
    assert_sorted(context, before)


def test_blocks_that_a_view_sees_become_dense():
    """A narrow view: the same Gaussians are visible, in a fifth of the blocks."""
    rng, n = np.random.default_rng(0), 64 * BLOCK
    g = gaussians(n, 0, size=(0.005, 0.01))
    g.means[:] = rng.uniform(-3, 3, (n, 3))
    g.opacities[:] = 0.5
    view = view_of([look(0.3, 0.1, (0, 0, -8))], [[[600, 0, 64], [0, 600, 64], [0, 0, 1]]], 128, 128, 0)
    context = Context(sh_degree=0)
    context.append(g)

    def seen():
        context.render(view)
        bits = context.buffer("proj.mask", "u4")[:n // 32].reshape(-1, BLOCK // 32)  # two mask blocks of 128 a block
        return int(np.unpackbits(bits.view("u1")).sum()), int(bits.any(1).sum())
    pairs, blocks = seen()
    sort(context)
    assert 0.01 * n < pairs < 0.1 * n and blocks == 64
    assert seen()[0] == pairs and seen()[1] <= 0.3 * blocks


def test_wrong_calls_are_refused():
    context = Context()
    assert context.library.spl_map_sort(context.ctx, None) == ARGUMENT and b"n_moved is NULL" in context.library.spl_error(context.ctx)


# ---- the mapper ----------------------------------------------------------------------------------------------------------------------
def config_of(backend, **changes):
    return replaced(SMALL, {"engine.backend": backend, "train.lr_mean": 0, "train.lr_decay_steps": 0} | changes)


def test_the_mapper_sorts_what_has_come(backend):
    mapper = run(config_of(backend), 1)
    assert mapper._trainer.steps == 4 and mapper._engine.sort() == 0
    assert run(config_of(backend, **{"train.sort_growth": 0}), 1)._engine.sort() > 0


def test_the_mapper_sorts_when_enough_has_come_and_not_too_often(backend, monkeypatch):
    steps, sizes = [], []
    monkeypatch.setattr(Engine, "sort", lambda engine: (steps.append(mapper._trainer.steps), sizes.append(len(engine))))
    mapper = Mapper(config_of(backend, **{"train.steps_per_frame": 50, "train.sort_growth": 0.02, "prune.interval_steps": 0}))
    for i in range(8):
        submit(mapper, frame(2 * i))
        mapper.run_due()
    assert steps[0] == 1 and len(steps) >= 3 and (np.diff(steps) >= SORT_STEPS).all()
    assert (np.diff(sizes) > 0.02 * np.array(sizes[1:])).all()


@pytest.mark.parametrize("kind", ["capacity", "memory"])
def test_the_mapper_goes_on_where_scratch_is_not_to_be_had(backend, monkeypatch, kind):
    def refuse(engine):
        raise NativeError(kind, "sorting needs more than there is")
    monkeypatch.setattr(Engine, "sort", refuse)
    mapper = run(config_of(backend), 1)
    assert mapper._trainer.steps == 4 and mapper._trainer.hint == "sorting needs more than there is"
    monkeypatch.setattr(Engine, "sort", lambda engine: (_ for _ in ()).throw(NativeError("device", "broken")))
    with pytest.raises(NativeError, match="broken"):
        run(config_of(backend), 1)
