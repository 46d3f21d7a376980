"""The ABI's structs, the table of buffers, the placement in the arena, and the memory that is reported and really held."""
import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from abi import CAPACITY, STRUCTS, AbiError, Context, hyper_of, struct, target_of, view_of
from scenes import cameras, gaussians
from spirula_gpu import native

pytestmark = pytest.mark.usefixtures("backend")  # every test with each backend
ALWAYS = -1


def stepped(n=2000, width=160, height=120, n_cameras=2, **params):
    """A context after a training step, so that every row has been used."""
    context = Context(**params)
    context.append(gaussians(n, min(context.sh_degree, 1)))
    view = view_of(*cameras(n_cameras, width, height), width, height, 0)
    context.train_step(view, target_of(np.zeros((n_cameras, height, width, 3))), hyper_of())
    return context


def placed(context):
    """[(row, first byte, last byte + 1)] of the rows in the arena."""
    out = []
    for name, row in context.report().items():
        pointer, size = ctypes.c_void_p(), ctypes.c_int64()
        if row.aliased:
            context._check(context.library.spl_buffer(context.ctx, name.encode(), ctypes.byref(pointer), ctypes.byref(size)))
            out.append((row, pointer.value, pointer.value + size.value))
    return out


@pytest.mark.parametrize("name", [n for n in STRUCTS])
def test_struct_sizes(name):
    assert Context().constant("sizeof " + name) == ctypes.sizeof(STRUCTS[name])


@pytest.mark.parametrize("name", [n for n in STRUCTS])
def test_native_declares_the_structs_of_the_header(name):
    ours = next(kind for kind in vars(native).values() if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
                and (kind.__name__ == name or (kind is native.Row and name == "spl_row")))
    layout = lambda kind: [(f[0], getattr(kind, f[0]).offset, getattr(kind, f[0]).size) for f in kind._fields_]
    assert layout(ours) == layout(STRUCTS[name])


def test_unknown_constant():
    context = Context()
    assert context.constant("SPL_TILE_PX") == 16 and context.constant("SPL_MASK_BLOCK") == 128
    assert context.constant("no such") == -2**63


@pytest.mark.parametrize("degree", [0, 3])
def test_the_table(degree):
    rows = stepped(sh_degree=degree).report()
    assert len(rows) == len(set(rows)) and "arena" in rows
    sh_bytes = 12 * (degree + 1)**2
    assert rows["map.sh"].item_bytes == sh_bytes and rows["adam.m.sh0"].item_bytes == 12 and rows["adam.v.sh"].item_bytes == 4 * (degree + 1)
    for name, row in rows.items():
        if name == "arena":
            continue
        assert row.aliased == (row.first_phase != ALWAYS), name
        assert row.first_phase <= row.last_phase and 0 <= row.category < 6 and row.item_bytes > 0, name
        assert row.saved == (name.split(".")[0] in ("map", "adam", "stat")), name
        assert (row.capacity_bytes == 0) if row.aliased else (row.used_bytes == 2000 * row.item_bytes <= row.capacity_bytes), name


@pytest.mark.parametrize("alias", [0, 1])
@pytest.mark.parametrize("n, n_cameras, width", [(2000, 2, 160), (10, 1, 640), (5000, 6, 33)])
def test_rows_that_are_alive_together_share_no_byte(alias, n, n_cameras, width):
    context = stepped(n, width, 48, n_cameras, arena_alias=alias)
    if context.backend == "cuda":
        pytest.skip("spl_buffer hands out copies; the placement is the same arena.h")
    rows, shared = placed(context), 0
    for i, (a, a0, a1) in enumerate(rows):
        assert a0 % 64 == 0
        for b, b0, b1 in rows[:i]:
            together = a.first_phase <= b.last_phase and b.first_phase <= a.last_phase
            overlap = a0 < b1 and b0 < a1
            assert not (overlap and (together or not alias)), f"{a.name} and {b.name}"
            shared += overlap
    low, high = min(a for _, a, _ in rows), max(b for _, _, b in rows)
    assert high - low <= context.report()["arena"].capacity_bytes
    assert bool(shared) == bool(alias)


def test_aliasing_saves_bytes():
    plain, shared = (stepped(20_000, 320, 240, arena_alias=a).report()["arena"] for a in (0, 1))
    assert shared.capacity_bytes < 0.8 * plain.capacity_bytes


def test_canaries_survive_a_training_step():
    context = stepped(arena_debug=1)
    with pytest.raises(AbiError, match="no buffer"):
        context.buffer("nothing", "u1")


MEASURE = """
import sys
sys.path[:0] = {path!r}
import numpy as np
from abi import Context, caller, hyper_of, target_of, view_of
from scenes import cameras, gaussians

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def step(context, n, width, height):
    view, target = view_of(*cameras(1, width, height), width, height, 3), target_of(np.zeros((1, height, width, 3)))
    context.train_step(view, target, hyper_of())

g = gaussians({n}, 3, size=(0.01, 0.03))
raw = caller((g.means, g.quats, np.log(g.scales), np.zeros({n}), g.sh), activated=False)
view, target = view_of(*cameras(1, 640, 480), 640, 480, 3), target_of(np.zeros((1, 480, 640, 3)))
warm = Context(max_gaussians=1000)
warm.append(gaussians(100, 3))
warm.train_step(view, target, hyper_of())
del warm
before = resident()
context = Context(max_gaussians=10_000_000)
context.call("map_append", raw, 0)
context.train_step(view, target, hyper_of())
grown = resident() - before
total = sum(r.capacity_bytes for r in context.report().values())
print(grown, total)
"""


def test_the_report_is_what_the_process_holds(backend):
    """Resident bytes of a process of its own, before and after; the address range that is only reserved must not count."""
    if backend == "cuda":
        pytest.skip("test_parity asks the driver")
    code = MEASURE.format(path=[str(Path(__file__).parent), *sys.path], n=400_000)
    grown, total = map(int, subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert total > 200e6 and abs(grown - total) < 0.02 * total, f"resident +{grown / 1e6:.1f} MB, reported {total / 1e6:.1f} MB"


# ---- limits

def test_more_than_max_gaussians_is_refused_and_the_map_stays():
    context = Context(max_gaussians=500)
    context.append(gaussians(400, 1))
    before = context.map_rows()
    with pytest.raises(AbiError, match="501 Gaussians > engine.max_gaussians 500") as error:
        context.append(gaussians(101, 1))
    assert error.value.status == CAPACITY and len(context) == 400
    for name, rows in context.map_rows().items():
        np.testing.assert_array_equal(rows, before[name], err_msg=name)
    context.append(gaussians(100, 1))
    assert len(context) == 500


@pytest.mark.parametrize("budget_mb", [40, 60])
def test_the_budget_holds(budget_mb, backend):
    """Grow until the budget refuses; then the map is intact, small views still work and the bytes never exceed it."""
    budget = budget_mb << 20 if backend == "cpu" else budget_mb << 22  # a device page is 2 MiB, and every row has its own
    context = Context(max_gaussians=10_000_000, budget_bytes=budget, sh_degree=1)
    held = lambda: sum(r.capacity_bytes for r in context.report().values())
    view = lambda size: view_of(*cameras(1, size, size), size, size, 0)
    for i in range(1000):
        before = len(context)
        try:
            context.append(gaussians(5000, 1, i, size=(0.005, 0.01)), owner=i)
            context.render(view(64))
        except AbiError as error:
            assert error.status == CAPACITY and "budget" in str(error) and "raise engine.vram_budget_mb" in str(error)
            break
        assert held() <= budget
    assert before > 5000 and held() <= budget
    assert (context.read("map.owner")[::5000] == np.arange(len(context.read("map.owner")[::5000]))).all()
    with pytest.raises(AbiError, match="budget"):
        context.render(view(4000))
    assert held() <= budget and np.isfinite(context.read("map.mean")).all()
    keep = np.arange(len(context)) % 2 == 0
    n_kept = ctypes.c_int64()
    context.call("map_keep", keep.astype(np.uint8), n_kept)
    rgb, alpha, _ = context.render(view(32))
    assert np.isfinite(rgb).all() and alpha.max() > 0


def test_appending_alone_obeys_the_budget(backend):
    budget_mb = 32 if backend == "cpu" else 128
    context = Context(max_gaussians=10_000_000, budget_bytes=budget_mb << 20, sh_degree=1)
    with pytest.raises(AbiError, match=f"> budget {budget_mb} MiB; raise engine.vram_budget_mb") as error:
        for i in range(1000):
            context.append(gaussians(3000, 1, i), owner=i)
    assert error.value.status == CAPACITY and i > 5 and len(context) == 3000 * i
    assert sum(r.capacity_bytes for r in context.report().values()) <= budget_mb << 20
    np.testing.assert_array_equal(context.read("map.owner"), np.repeat(np.arange(i), 3000))
    np.testing.assert_array_equal(context.read("map.mean", 3000 * (i - 1)), gaussians(3000, 1, i - 1).means)


@pytest.mark.parametrize("params, message", [(dict(sh_degree=4), "sh_degree 4"), (dict(max_gaussians=0), "max_gaussians 0"),
                                             (dict(threads=-1), "threads -1"), (dict(struct_size=4), "struct_size")])
def test_a_wrong_create_is_refused(params, message):
    library = Context().library
    out = ctypes.c_void_p()
    status = library.spl_create(ctypes.byref(struct("spl_create_params", **dict(max_gaussians=10) | params)), ctypes.byref(out))
    assert status < 0 and message in library.spl_error(None).decode() and not out.value


def test_contexts_do_not_share_anything():
    a, b = Context(), Context()
    a.append(gaussians(10, 1))
    assert len(a) == 10 and len(b) == 0
    with pytest.raises(AbiError):
        a.read("map.owner", 0, 11)
    assert b.library.spl_error(b.ctx) == b""


def test_the_memory_report_of_an_engine(backend):
    gc.collect()  # contexts of earlier tests would give back memory meanwhile
    with native.Engine(backend, sh_degree=1, max_gaussians=100_000, threads=2) as engine:
        engine.append(*gaussians(5000, 1))
        rgb = np.zeros((1, 60, 80, 3), np.uint8)
        engine.train_step(native.view_of(*cameras(1, 80, 60), 80, 60, 1), rgb, native.Hyper(ssim_weight=0.2, eps=1e-15))
        report = engine.vram()
        assert 0 < report.device_used < report.device_total and report.total == sum(row.capacity for row in report.rows)
        alone = backend == "cpu" or "PYTEST_XDIST_WORKER" not in os.environ  # what goes from a GPU goes to all of its processes
        assert report.process > 0.5 * report.total or not alone
        assert report.pinned == 0 if backend == "cpu" else 2 * rgb.size <= report.pinned < 3 * rgb.size
        assert report.total == sum(capacity for _, capacity in report.categories.values())
