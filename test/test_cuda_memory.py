"""The CUDA backend's memory against the driver's figures, and what happens when the device has none left or breaks."""
import ctypes
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import abi
from abi import CAPACITY, DEVICE, MEMORY, AbiError, Context, hyper_of, struct, target_of, view_of
from conftest import skip_without_cuda
from scenes import cameras, gaussians

skip_without_cuda(module=True)
MiB, GiB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def cuda(monkeypatch):
    monkeypatch.setattr(abi, "BACKEND", "cuda")


def info(context):
    memory = struct("spl_memory")
    context.call("memory_info", memory)
    return memory


def held(context) -> int:
    return sum(row.capacity_bytes for row in context.report().values())


def blank(n, degree):
    """n Gaussians that nothing shows, cheap to make: raw for degree >= 0, with RGB for -1."""
    shape = (n, 3) if degree < 0 else (n, (degree + 1)**2, 3)
    return struct("spl_gaussians", n=n, sh_degree=degree, means=np.zeros((n, 3), np.float32), quats=np.zeros((n, 4), np.float32),
                  log_scales=np.zeros((n, 3), np.float32), logit_opacities=np.zeros(n, np.float32), sh=np.zeros(shape, np.float32))


def train(context, width, height):
    view, image = view_of(*cameras(1, width, height), width, height, 3), np.zeros((1, height, width, 3), np.uint8)
    context.train_step(view, target_of(image), hyper_of())


@pytest.fixture
def warm():
    """A context that has run the kernels: their code takes device memory when it is first used."""
    gc.collect()  # what an exception of an earlier test still holds must not come back in the middle of this one
    context = Context()
    context.append(gaussians(1000, 3))
    train(context, 64, 48)
    context.render(view_of(*cameras(1, 64, 48), 64, 48, 3))
    if info(context).free_bytes < 16 * GiB:
        pytest.skip(f"needs 16 GiB of free device memory, there are {info(context).free_bytes / GiB:.1f}")
    return context


def keep(context, n: int) -> None:
    """The first n Gaussians."""
    n_kept = ctypes.c_int64()
    context.call("map_keep", (np.arange(len(context)) < n).astype(np.uint8), n_kept)
    assert n_kept.value == len(context) == n


@pytest.mark.parametrize("no_paging", [0, 1])
@pytest.mark.parametrize("alias", [0, 1])
def test_the_report_is_what_the_driver_says(alias, no_paging, warm):
    """Map and arena of several GiB: free memory of the device before and after, within 2 % of the rows; and back again."""
    before = info(warm).free_bytes
    context = Context(max_gaussians=20_000_000, arena_alias=alias, no_paging=no_paging)
    context.append(gaussians(20_000, 3))
    for n in (1_000_000, 3_000_000):  # grows twice
        context.call("map_append", blank(n, 3), 0)
    train(context, 1024, 1024)
    train(context, 8192, 7168)
    memory, rows = info(context), held(context)
    taken = before - memory.free_bytes
    assert rows > 4 * GiB and memory.total_bytes > memory.free_bytes
    assert abs(taken - rows) < 0.02 * rows, f"driver {taken / MiB:.0f} MiB, rows {rows / MiB:.0f} MiB"
    assert abs(memory.process_bytes - rows) < 0.02 * rows, f"process {memory.process_bytes / MiB:.0f} MiB, rows {rows / MiB:.0f} MiB"
    assert 2 * 8192 * 7168 * 3 <= memory.pinned_bytes < 3 * 8192 * 7168 * 3, "staging of the images, on the host"
    context.library.spl_destroy(context.ctx)
    context.ctx.value = None
    assert abs(before - info(warm).free_bytes) < 64 * MiB


@pytest.mark.parametrize("no_paging", [0, 1])
def test_the_budget_is_obeyed_by_the_drivers_figure(no_paging, warm):
    before, budget = info(warm).free_bytes, 2 * GiB
    context = Context(max_gaussians=50_000_000, budget_bytes=budget, no_paging=no_paging)
    context.append(gaussians(20_000, 3))
    piece = blank(400_000, 3)
    with pytest.raises(AbiError, match="> budget 2048 MiB; raise engine.vram_budget_mb") as error:
        for i in range(100):
            context.call("map_append", piece, 0)
            train(context, 512, 512)
            assert held(context) <= budget and before - info(context).free_bytes < budget + 32 * MiB
    assert error.value.status == CAPACITY and len(context) > 1_000_000
    with pytest.raises(AbiError, match="this view needs .* > budget 2048 MiB"):
        train(context, 8192, 8192)
    assert before - info(context).free_bytes < budget + 32 * MiB
    keep(context, 500_000)  # room again
    train(context, 2048, 2048)
    assert before - info(context).free_bytes < budget + 32 * MiB


def test_memory_that_the_map_no_longer_needs_goes_back(warm):
    before = info(warm).free_bytes
    context = Context(max_gaussians=20_000_000)
    context.call("map_append", blank(4_000_000, 3), 0)
    full = before - info(context).free_bytes
    keep(context, 1_000_000)
    left = before - info(context).free_bytes - context.report()["arena"].capacity_bytes
    assert left < 0.4 * full, f"{left / MiB:.0f} of {full / MiB:.0f} MiB are still held"


@pytest.mark.parametrize("no_paging", [0, 1])
def test_a_device_without_free_memory(no_paging, warm):
    """Another allocation leaves 400 MiB: the map and the arena are refused with figures, stay as they were, and grow later."""
    from driver import Allocation
    context, small = Context(max_gaussians=20_000_000, no_paging=no_paging), view_of(*cameras(1, 64, 48), 64, 48, 3)
    context.append(gaussians(3000, 3))
    before, picture, rows = context.map_rows(), context.render(small), held(context)
    other = Allocation(info(context).free_bytes - 400 * MiB)
    try:
        for refused in (lambda: context.call("map_append", blank(2_000_000, 3), 0), lambda: train(context, 8192, 8192)):
            with pytest.raises(AbiError, match=r"out of memory \(growing\): \d+ MiB more is not to be had, \d+ MiB are free of \d+; .*engine.max_gaussians") as error:
                refused()
            assert error.value.status == MEMORY and len(context) == 3000 and held(context) <= rows
            for name, values in context.map_rows().items():
                np.testing.assert_array_equal(values, before[name], err_msg=name)
            for a, b in zip(context.render(small), picture):
                np.testing.assert_array_equal(a, b)
    finally:
        other.free()
    context.call("map_append", blank(2_000_000, 3), 0)
    train(context, 8192, 8192)
    assert len(context) == 2_003_000


BROKEN = """
import sys
sys.path[:0] = {path!r}
import abi
from abi import AbiError, Context, struct, view_of
from driver import Allocation
from scenes import cameras, gaussians
abi.BACKEND = "cuda"
view = view_of(*cameras(1, 64, 48), 64, 48, 0)
context, image = Context(sh_degree=0), abi.image_of(view)[0]
context.append(gaussians(1000, 0))
context.render(view)
p, n = Allocation(2 << 20).pointer, 8_000_000  # far too short
short = struct("spl_gaussians", flags=1, n=n, sh_degree=-1, means=p, quats=p, log_scales=p, logit_opacities=p, sh=p)
for call in (lambda: context.call("forward", short, view, image), lambda: context.render(view), Context):
    try:
        call()
        print("no error")
    except AbiError as error:
        print(error.status, error)
context.library.spl_destroy(context.ctx)
context.ctx.value = None
print("destroyed", flush=True)
"""


def test_a_broken_device_says_that_the_process_must_start_again():
    code = BROKEN.format(path=[str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *errors, last = done.stdout.splitlines()
    assert last == "destroyed" and len(errors) == 3
    for line in errors:
        assert line.startswith(f"{DEVICE} ") and "CUDA error" in line and "start it again, or use engine.backend cpu" in line, line


def test_no_device_is_visible():
    code = "import sys\nsys.path[:0] = {path!r}\nfrom spirula_gpu import native\nprint(native.Engine('auto').backend)\nnative.Engine('cuda')".format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout.strip() == "cpu" and "no CUDA device is visible" in done.stderr and "CUDA_VISIBLE_DEVICES, or use engine.backend cpu" in done.stderr


def test_a_call_leaves_the_current_context_as_it_was():
    """In a thread of its own, where nothing is current."""
    from driver import current_context
    seen = []
    def use():
        context = Context(sh_degree=0)
        context.append(gaussians(100, 0))
        seen.append(current_context())
        context.render(view_of(*cameras(1, 64, 48), 64, 48, 0))
        with pytest.raises(AbiError):
            context.render(view_of(*cameras(1, 64, 48), 0, 48, 0))
        seen.append(current_context())
    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [None, None]


def test_mask_and_scan_of_five_cameras_and_15_million_gaussians():
    """0.1875 bytes a camera-Gaussian pair: one bit, and one sum per 128 pairs."""
    n, n_cameras = 15_000_000, 5
    context, view = Context(sh_degree=0), view_of(*cameras(n_cameras, 160, 120), 160, 120, 0)
    context.call("forward", blank(n, -1), view, abi.image_of(view)[0])
    rows = context.report()
    used = rows["proj.mask"].used_bytes + rows["proj.scan"].used_bytes
    assert used == 24 * (-(-n * n_cameras // 128) + 1) < 13.5 * MiB
