"""Memory that is refused: the call that needed it fails with a message, and nothing else has happened. The library refuses it
itself (spl_fail_allocation), at every place where a row of the map or the arena grows."""
import functools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from abi import MEMORY, AbiError, Context, hyper_of, target_of, view_of
from scenes import cameras, gaussians
from spirula_gpu import native
from spirula_gpu.camera import Camera
from spirula_gpu.config import replaced
from spirula_gpu.mapper import Mapper, Wants
from spirula_ros.errors import InputError, said
from test_mapper import SMALL, frame, submit, wait_for

W, H = 64, 48
REFUSED = r"out of memory \(a test asked for it\): \d+ MiB more is not to be had, \d+ MiB are free of \d+; .* lower engine.max_gaussians, engine.vram_budget_mb"


def view_from(n_cameras=1, width=W, height=H):
    return view_of(*cameras(n_cameras, width, height), width, height, 1)


def train(context, n_cameras=1, width=W, height=H):
    return context.train_step(view_from(n_cameras, width, height), target_of(np.full((n_cameras, height, width, 3), 90)), hyper_of())


def insert(context):
    target = target_of(np.full((1, 480, 640, 3), 200), np.full((1, 480, 640), 2.0))
    return context.insert(view_from(width=320, height=240), target, alpha_below=1.5)  # at every pixel


many = functools.cache(lambda: gaussians(300_000, 1, 1))
MAP_GROWS = dict(append=lambda c: c.append(many(), owner=4), insert=insert)
ARENA_GROWS = dict(train=lambda c: train(c, 3, 320, 240), render=lambda c: c.render(view_from(2, 400, 300)),
                   forward=lambda c: c.forward(gaussians(30_000, 1, 2), view_from(2, 320, 240)))


def filled(no_paging, n=3000):
    context = Context(sh_degree=1, max_gaussians=500_000, no_paging=no_paging)
    context.append(gaussians(n, 1), owner=3)
    return context


def refuse_each(context, run, check) -> int:
    """run(context) with the 1st, 2nd, .. growth refused, until it passes; check() after every refusal. -> how often it was."""
    for nth in range(1, 100):
        context.call("fail_allocation", nth)
        try:
            run(context)
            return nth - 1
        except AbiError as error:
            assert error.status == MEMORY
            with pytest.raises(AbiError, match=REFUSED):
                raise
        finally:
            context.call("fail_allocation", 0)
        check()
    raise AssertionError("it never passes")


def assert_rows(context, rows):
    for name, got in context.map_rows().items():
        np.testing.assert_array_equal(got, rows[name], err_msg=name)


@pytest.mark.parametrize("no_paging", [0, 1])
@pytest.mark.parametrize("what", MAP_GROWS)
def test_a_map_that_cannot_grow_is_as_it_was(what, no_paging, backend):
    context, other = filled(no_paging), filled(no_paging)
    before, small = context.map_rows(), view_from()
    picture = context.render(small)
    context.render(view_from(width=640, height=480))  # so that it is the map that grows
    held = {name: row.capacity_bytes for name, row in context.report().items()}

    def unchanged():
        assert len(context) == 3000
        assert_rows(context, before)
        for a, b in zip(context.render(small), picture):
            np.testing.assert_array_equal(a, b)

    refused = refuse_each(context, MAP_GROWS[what], unchanged)
    assert refused == sum(row.capacity_bytes > held[name] for name, row in context.report().items() if row.saved), "every row that grows"
    assert refused > (5 if backend == "cpu" else 0)  # a page of a GPU is 2 MiB: most rows have room
    MAP_GROWS[what](other)
    assert len(context) == len(other) > 16384
    assert_rows(context, other.map_rows())


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("no_paging", [0, 1])
@pytest.mark.parametrize("what", ARENA_GROWS)
def test_an_arena_that_cannot_grow_leaves_the_map(what, no_paging, warm, backend):
    """From nothing, and from an arena that holds something (without paging it is given up first)."""
    context, small = filled(no_paging), view_from()
    before = context.map_rows()
    picture = filled(no_paging).render(small)
    if warm:
        context.render(small)

    def unchanged():
        assert_rows(context, before)
        rows = context.report()
        assert all(len(context.buffer(name, "u1")) == row.used_bytes for name, row in rows.items() if row.aliased), "no row outside the arena"
        if warm:
            for a, b in zip(context.render(small), picture):
                np.testing.assert_array_equal(a, b)

    assert refuse_each(context, ARENA_GROWS[what], unchanged) >= 1
    if what != "train":
        assert_rows(context, before)
    for a, b in zip(context.render(small), filled(no_paging).render(small) if what != "train" else context.render(small)):
        np.testing.assert_array_equal(a, b)


LIMITED = """
import resource, sys
sys.path[:0] = {path!r}
from abi import AbiError, Context, view_of
from scenes import cameras, gaussians

def data_bytes():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))

g, view = gaussians(200_000, 0, size=(0.01, 0.02)), view_of(*cameras(1, 64, 64), 64, 64, 0)
def arena(context):
    context.forward(g, view)
    return context.report()["arena"].capacity_bytes
roomy = arena(Context())
base = data_bytes()
for limit in range(0, 2 * roomy, roomy // 24):
    resource.setrlimit(resource.RLIMIT_DATA, (base + limit, resource.RLIM_INFINITY))
    context = Context()
    try:
        print(roomy, arena(context), "served")
        break
    except AbiError as error:
        print(roomy, limit, error.status, error)
    del context
"""


def test_memory_that_the_system_refuses():
    """A limit on the data of a process that is raised step by step: refusals with a message first, then what fits without headroom."""
    code = LIMITED.format(path=[str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    *refused, served = done.stdout.splitlines()
    roomy, capacity, word = served.split()
    assert word == "served" and int(capacity) < int(roomy), "a step below the limit it was served without headroom"
    assert len(refused) > 3
    for line in refused:
        assert f" {MEMORY} " in line and "Cannot allocate memory" in line and "MiB more is not to be had" in line


def test_the_worker_ends_with_the_message(monkeypatch):
    """What the mapper cannot remedy stops it, and says why."""
    mapper = Mapper(replaced(SMALL, {"engine.max_gaussians": 100_000}))
    def broken(*_, **__):
        raise native.NativeError("device", "raster_kernel: an illegal memory access was encountered (CUDA error 700); start it again")
    monkeypatch.setattr(mapper._engine, "train_step", broken)
    mapper.start()
    submit(mapper, frame(0))
    wait_for(lambda: mapper.status().state == "error")
    assert "CUDA error 700" in mapper.status().last_error
    mapper.stop()
    mapper.close()


def test_memory_that_is_refused_to_a_picture_is_a_hint():
    mapper = Mapper(SMALL)
    submit(mapper, frame(0))
    mapper.run_due()
    mapper.wants = Wants(render=True)
    mapper._engine.fail_allocation(1)
    mapper._view = (None, Camera(400, 300, 360.0, 360.0, 200.0, 150.0))
    mapper._last["render"] = 0.0
    mapper.tick()
    mapper._tell()
    assert "out of memory" in mapper.status().hint and mapper.status().state == "running"
    mapper._engine.fail_allocation(0)
    mapper._last["render"] = 0.0
    mapper.tick()
    assert mapper.latest.get().rgb.shape == (300, 400, 3)


@pytest.mark.parametrize("error, text", [
    (FileNotFoundError(2, "No such file or directory", "/a/b.ply"), "/a/b.ply: No such file or directory"), (InputError("a.ply: cut; copy it"), "a.ply: cut; copy it"),
    (RuntimeError("paused"), "paused"), (ValueError(), "ValueError: "), (KeyError("x"), "KeyError: 'x'"), (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero")])
def test_what_is_said_of_an_error(error, text):
    assert said(error) == text
