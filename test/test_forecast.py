"""The forecast of memory against what a context then holds; rows that only training needs; the mapper at its budget, and beside
others that take the memory."""
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from scenes import cameras, gaussians
from spirula_gpu import native
from spirula_gpu.camera import Frame
from spirula_gpu.checkpoint_file import CheckpointError
from spirula_gpu.config import replaced, rows
from spirula_gpu.mapper import Mapper
from spirula_gpu.native import Engine, Hyper, NativeError, forecast, largest_map
from spirula_ros import cli
from test_mapper import CAMERA, SMALL, frame, submit, wait_for

HYPER = Hyper(ssim_weight=0.2, lr_mean=1e-4, beta1=0.9, beta2=0.999, eps=1e-15)
MiB = 1 << 20


def filled(backend, n, sh_degree=3, size=(0.02, 0.4), **engine) -> Engine:
    e = Engine(backend, sh_degree=sh_degree, threads=2, **engine)
    g = gaussians(n, sh_degree, size=size)
    e.append(g.means, g.quats, np.log(g.scales), np.zeros(n), g.sh)
    return e


def view(width, height, n_cameras=1):
    return native.view_of(*cameras(n_cameras, width, height), width, height, 0)


def train(engine, width, height, n_cameras=1):
    return engine.train_step(view(width, height, n_cameras), np.full((n_cameras, height, width, 3), 90, np.uint8), HYPER)


def assert_foreseen(report, expected, backend):
    """CPU: every row to the byte. CUDA: what is held, within 3 %."""
    if backend == "cpu":
        assert [(r.name, r.used, r.capacity) for r in report.rows] == [(r.name, r.used, r.capacity) for r in expected.rows]
        assert report.arena_saved == expected.arena_saved
    assert abs(report.total - expected.total) <= 0.03 * report.total
    for category, (used, held) in report.categories.items():
        assert abs(held - expected.categories[category][1]) <= 0.03 * report.total, category


# ---- right, and from nothing but numbers

@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize("precision", ["full", "compact"])
@pytest.mark.parametrize("degree", [0, 3])
@pytest.mark.parametrize("n, width, height, n_cameras", [(300, 64, 48, 1), (30_000, 33, 50, 3), (20_000, 320, 240, 1)])
def test_it_is_what_the_context_then_holds(n, width, height, n_cameras, degree, precision, alias, backend):
    engine = dict(sh_degree=degree, precision=precision, arena_alias=alias)
    work = dict(gaussians=n, width=width, height=height, n_cameras=n_cameras, threads=2, **engine)
    with filled(backend, n, **engine) as trained, filled(backend, n, **engine) as rendered:
        stats = train(trained, width, height, n_cameras)
        rendered.render(view(width, height, n_cameras))
        found = dict(pairs=stats.n_pairs, isects=stats.n_isects)
        assert_foreseen(trained.vram(), forecast(backend, **work, **found), backend)
        assert_foreseen(rendered.vram(), forecast(backend, **work, **found, train=False), backend)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.97, 1.0, 1.2])
@pytest.mark.parametrize("n", [3000, 40_000])
def test_with_a_budget_it_is_served_as_foreseen_or_refused(n, share, backend):
    """The budget as a share of what is held without one: less than 1 costs the headroom, still less refuses."""
    size = (640, 480) if backend == "cuda" else (160, 120)
    with filled(backend, n) as engine:
        stats = train(engine, *size)
        budget = int(share * engine.vram().total)
    expected = forecast(backend, gaussians=n, width=size[0], height=size[1], pairs=stats.n_pairs, isects=stats.n_isects, budget_bytes=budget, threads=2)
    try:
        with filled(backend, n, budget_bytes=budget) as engine:
            train(engine, *size)
            assert expected.total <= budget
            assert_foreseen(engine.vram(), expected, backend)
    except NativeError as error:
        assert error.kind == "capacity" and expected.total > budget and "`spirula forecast` says what fits" in str(error)
    assert share < 1 or expected.total <= budget
    assert share > 0.6 or expected.total > budget


@pytest.mark.parametrize("precision", ["full", "compact"])
def test_the_largest_map_fits_and_a_larger_one_does_not(precision, backend):
    budget, size = (30 if backend == "cpu" else 300) * MiB, (160, 120)
    e = dict(sh_degree=1, precision=precision, max_gaussians=10_000_000)
    with filled(backend, 20_000, **e) as engine:
        stats = train(engine, *size)
    per = (stats.n_pairs / 20_000, stats.n_isects / 20_000)
    def fits(n):
        try:
            with filled(backend, n, budget_bytes=budget, **e) as engine:
                train(engine, *size)
            return True
        except NativeError as error:
            assert error.kind == "capacity"
            return False
    def foreseen(n):
        return forecast(backend, gaussians=n, width=160, height=120, pairs=int(per[0] * n), isects=int(per[1] * n), budget_bytes=budget, threads=2, **e).total <= budget
    n = 1000
    while foreseen(n + n // 50):
        n += n // 50
    assert n > 20_000 and fits(int(0.97 * n)) and not fits(int(1.05 * n))
    estimated = largest_map(budget, backend, width=160, height=120, threads=2, **e)
    assert forecast(backend, gaussians=estimated, width=160, height=120, threads=2, budget_bytes=budget, **e).total <= budget
    assert forecast(backend, gaussians=int(1.02 * estimated) + 16384, width=160, height=120, threads=2, budget_bytes=budget, **e).total > budget
    assert largest_map(1000, backend, width=160, height=120) == 0 and largest_map(budget, backend, most=500, width=160, height=120) == 500


def test_it_takes_no_memory_and_no_device(backend):
    work = dict(gaussians=100_000_000, width=3840, height=2160, n_cameras=4, pairs=10**8, isects=10**9, precision="compact", threads=2)
    expected = forecast(backend, **work)
    assert expected.total > 40e9
    code = f"""import json, resource, sys
sys.path[:] = {sys.path!r}
from spirula_gpu.native import forecast, load
load({backend!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
f = forecast({backend!r}, **{work!r})
print(json.dumps([f.total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, [r[:4] for r in f.rows]]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    total, taken, rows = json.loads(done.stdout)
    assert total == expected.total and taken < 50e6
    assert [tuple(r) for r in rows] == [r[:4] for r in expected.rows]


def test_state_bytes_a_gaussian_are_those_of_the_parameter_docs(backend):
    """What config.py says of engine.precision and max_gaussians."""
    for precision, degree, per in (("full", 0, 176), ("full", 2, 280), ("full", 3, 368), ("compact", 0, 88), ("compact", 2, 120), ("compact", 3, 142)):
        f = forecast(backend, gaussians=10_000_000, width=64, height=48, sh_degree=degree, precision=precision, threads=2)
        assert f.categories["splat"][0] / 1e7 == pytest.approx(per, abs=0.1) and f.categories["splat"][1] / 1e7 == pytest.approx(per, rel=0.02 if backend == "cpu" else 0.04)  # pages of 2 MiB a row
        assert f" {per}" in {name: field.metadata["help"] for name, _, field in rows()}["engine.max_gaussians"]


@pytest.mark.parametrize("changes, kind, message", [
    (dict(width=0), "argument", "image 0x48"), (dict(n_cameras=2000), "argument", "n_cameras 2000"), (dict(gaussians=-1), "argument", "gaussians -1"),
    (dict(pairs=-1), "argument", "pairs -1"), (dict(isects=2**32), "argument", "isects"), (dict(sh_degree=4), "argument", "sh_degree 4"),
    (dict(precision="half"), "argument", "full or compact"), (dict(backend="tpu"), "argument", "auto, cpu or cuda"),
    (dict(gaussians=4 * 10**9, n_cameras=9), "capacity", "visible pairs")])
def test_what_no_engine_takes_is_refused(changes, kind, message, backend):
    with pytest.raises(NativeError, match=message) as error:
        forecast(**dict(backend=backend, gaussians=10, width=64, height=48) | changes)
    assert error.value.kind == kind


def test_the_estimates_in_the_synthetic_room(backend):
    """A map of the room, grown frame after frame: pairs and intersections that nobody knew before, and the total."""
    from spirula_ros.room import Room
    from spirula_ros.synthetic import render, room_camera, trajectory
    room, camera, found = Room(), room_camera(80, 60), []
    mapper = Mapper(replaced(SMALL, {"engine.backend": backend, "engine.threads": 2}))
    step = mapper._engine.train_step
    mapper._engine.train_step = lambda *a, **k: found.append(step(*a, **{**k, "wait": True})) or found[-1]
    for i, T in enumerate(trajectory(8)):
        seen = render(room, camera, T, 1)
        submit(mapper, Frame(i * 10**8, camera, T, seen.rgb, seen.depth_m))
        mapper.run_due()
    n, e = len(mapper._engine), SMALL.engine
    share = [s.n_pairs / n for s in found[-10:]]
    assert 0.25 < min(share) and max(share) < 0.55, "VISIBLE_SHARE of forecast.h"
    expected = forecast(backend, gaussians=n, width=80, height=60, sh_degree=e.sh_degree, threads=2)
    estimated = {r.name: r.used for r in expected.rows}["isect.pair"] / 4
    assert 0.6 < estimated / max(s.n_isects for s in found[-10:]) < 1.7, "COVERAGE of forecast.h"
    scratch = 32 << 20 if backend == "cuda" else 0  # map edits keep an arena of that
    assert 0.85 < max(expected.total, expected.categories["splat"][1] + scratch) / mapper.vram().total < 1.15
    mapper.close()


# ---- what only training needs

def test_a_render_pays_for_no_training(backend):
    n, width, height, small = 20_000, 640, 480, (0.002, 0.005)  # pixels count, not pairs
    with filled(backend, n, size=small) as engine, filled(backend, n, size=small) as trained:
        engine.render(view(width, height))
        rows, arena = {r.name: r for r in engine.vram().rows}, engine.vram().categories["other"][1]
        train(trained, width, height)
        assert arena < 0.6 * trained.vram().categories["other"][1]
        for name, row in rows.items():
            assert (row.used == 0) == name.startswith(("loss.", "raster_bwd.", "target.", "caller.", "view.v_", "proj.heads")) or row.category == "splat" or name == "map.exponents", name
            if row.aliased and not row.used:
                assert len(engine.buffer(name)) == 0
    big = dict(gaussians=1_000_000, width=1920, height=1080, pairs=621_277, isects=2_589_775, threads=2)  # 1M light of bench/
    rendering, training = (forecast(backend, **big, train=t).categories["other"][1] for t in (False, True))
    assert rendering < (0.5 if backend == "cpu" else 0.8) * training


@pytest.mark.parametrize("alias", [True, False])
@pytest.mark.parametrize("calls", ["render train render", "train render train", "insert render train insert", "render backward render"])
def test_calls_in_any_order_are_what_each_is_alone(calls, alias, backend):
    """In a poisoned arena with canaries; the arena only grows."""
    options = dict(arena_alias=alias, arena_debug=True, sh_degree=1)
    width, height, n = 64, 48, 2000
    def run(engine, call):
        g = gaussians(n, 1, 7)
        if call == "render":
            return engine.render(view(width, height))
        if call == "backward":
            zeros = np.zeros((1, height, width), np.float32)
            return engine.backward(g.means, g.quats, g.scales, g.opacities, g.sh, view(width, height), np.ones((1, height, width, 3)), zeros, zeros)["means"],
        if call == "train":
            train(engine, width, height)
            return engine.read("map.mean"), engine.read("map.logit_opacity")
        insertion = native.InsertParams(alpha_below=1.5, depth_error=0.05, min_depth_m=0.1, max_depth_m=20, hole_spacing_px=4, size=0.7, opacity=0.5, owner=1, seed=1)
        engine.insert(view(width, height), np.full((1, height, width, 3), 200, np.uint8), np.full((1, height, width), 2.0), insertion)
        return engine.read("map.mean"),
    with filled(backend, n, **options) as engine:
        held, before = 0, []
        for call in calls.split():
            before.append(call)
            got = run(engine, call)
            arena = engine.vram().categories["other"][1]
            assert arena >= held
            held = arena
            with filled(backend, n, arena_alias=alias, sh_degree=1) as other:  # in an arena that is laid out for training from the start
                train(other, width, height)
                other.keep(np.zeros(len(other), bool))
                g = gaussians(n, 1)
                other.append(g.means, g.quats, np.log(g.scales), np.zeros(n), g.sh)
                for c in before:
                    expected = run(other, c)
            for a, b in zip(got, expected):
                np.testing.assert_allclose(a, b, rtol=0 if backend == "cpu" else 1e-3, atol=0 if backend == "cpu" else 1e-3, equal_nan=False)  # CUDA: sums of atomics


# ---- the mapper at its budget

def textured(i, width, height) -> Frame:
    rng = np.random.default_rng(i)
    return replace(frame(i * 10), camera=CAMERA.resized(width, height), rgb=rng.integers(0, 256, (height, width, 3), np.uint8), depth_m=np.full((height, width), 2, np.float32))


@pytest.mark.parametrize("precision", ["full", "compact"])
@pytest.mark.parametrize("budget_mb", [1, 2, 4, 6, 7, 8, 9, 11, 14, 100])
def test_no_budget_ends_the_mapper(budget_mb, precision):
    """From one in which no image fits to one that is never reached: every frame is used, every due step made once there is a map, never more is held."""
    mapper = Mapper(replaced(SMALL, {"engine.vram_budget_mb": budget_mb, "engine.precision": precision, "engine.sh_degree": 1, "engine.max_gaussians": 100_000,
                                     "insert.hole_spacing_px": 1.0, "train.steps_per_frame": 5}))
    for i in range(8):
        submit(mapper, replace(textured(i, 120, 90), held_out=i == 5))
        mapper.run_due()
        assert mapper.vram().total <= budget_mb << 20 and mapper.status().state == "running"
    results, status = mapper.evaluate(), mapper.status()
    assert status.frames.used == 8 and status.steps == (40 if status.gaussians else 0) and status.last_error == ""
    if budget_mb >= 9:
        assert status.gaussians > 3000 and np.isfinite(status.loss) and results
    assert budget_mb > 9 or "vram_budget_mb" in status.hint
    assert budget_mb < 100 or status.hint == ""
    mapper.close()


def test_a_budget_that_ends_the_growth_is_named_once_with_what_fits():
    config = replaced(SMALL, {"engine.vram_budget_mb": 20, "engine.max_gaussians": 1_000_000})
    mapper = Mapper(config)
    submit(mapper, frame(0))
    mapper.run_due()
    n = largest_map(20 * MiB, "cpu", most=1_000_000, width=40, height=30, sh_degree=config.engine.sh_degree, threads=1)
    assert 30_000 < n < 60_000
    assert f"about {n} Gaussians" in mapper.status().hint and "engine.max_gaussians 1000000" in mapper.status().hint
    assert mapper.status().state == "running" and mapper.status().gaussians > 100
    roomy = Mapper(replaced(config, {"engine.max_gaussians": n // 2}))
    submit(roomy, frame(0))
    roomy.run_due()
    assert roomy.status().hint == ""
    tiny = Mapper(replaced(config, {"engine.vram_budget_mb": 1}))
    submit(tiny, frame(0))
    tiny.run_due()
    assert "about 0 Gaussians" in tiny.status().hint and "raise the budget or use smaller images" in tiny.status().hint


@pytest.mark.parametrize("since", [0, 1, 3])
def test_memory_that_others_take_meanwhile_is_waited_for(since):
    """Every growth is refused from frame `since` on, and served again from frame 6 on: the map lives, says why, and grows again."""
    mapper = Mapper(replaced(SMALL, {"engine.sh_degree": 1, "insert.hole_spacing_px": 1.0, "train.steps_per_frame": 5}))
    for i in range(9):
        if i == since:
            mapper._engine.fail_allocation(1)
        if i == 6:
            mapper._engine.fail_allocation(0)
            held, n = mapper.vram().total, len(mapper._engine)
            assert "out of memory" in mapper.status().hint and "a test asked for it" in mapper.status().hint
            assert (n > 1000) == (since > 0)
        submit(mapper, textured(i, 160 + 40 * i, 120 + 30 * i))  # each larger than the one before: none fits into what is there
        mapper.run_due()
        assert mapper.status().state == "running"
    status = mapper.status()
    assert status.frames.used == 9 and status.steps == (45 if since else 15) and status.last_error == ""   # none while there is no map
    assert status.gaussians > max(n, 10_000) and mapper.vram().total > held and np.isfinite(status.loss) and "out of memory" not in status.hint
    mapper.close()


def test_a_starved_worker_rests_and_recovers():
    """Refused whatever the map gives up: it neither loses the whole map nor stops, and trains as soon as there is memory."""
    mapper = Mapper(replaced(SMALL, {"train.steps_per_frame": 2}))
    for i in range(3):
        submit(mapper, frame(i))
        mapper.run_due()
    n = len(mapper._engine)
    mapper._engine.fail_allocation(1)
    mapper.start()
    submit(mapper, textured(3, 320, 240))
    submit(mapper, textured(4, 320, 240))
    wait_for(lambda: "out of memory" in mapper.status().hint and mapper.status().keyframes == 5)
    mapper.stop()
    mapper._stopping = False
    assert len(mapper._engine) > 0.2 * n and mapper.status().state == "stopped"
    mapper._engine.fail_allocation(0)
    steps = mapper.train(steps=30)
    assert steps == 30 and not mapper._trainer.starved and np.isfinite(mapper.status().loss)
    mapper.close()


# ---- the command

def test_the_command(capsys):
    assert cli.main("forecast --backend cpu --gaussians 10e6 --size 1920x1080 --sh 3 --precision compact --pairs 6e6 --isects 20e6 --vram-mb 8192".split()) == 0
    out = capsys.readouterr().out
    f = forecast("cpu", gaussians=10_000_000, width=1920, height=1080, pairs=6_000_000, isects=20_000_000, precision="compact")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert float(lines["splat"].split()[1]) == pytest.approx(f.categories["splat"][1] / MiB, abs=0.06)
    assert float(lines["total"].split()[1]) == pytest.approx(f.total / MiB, abs=0.06) and "142 bytes a Gaussian" in lines["splat"]
    assert "6,000,000 visible pairs, 20,000,000 intersections (given)" in out
    n = largest_map(8192 * MiB, "cpu", width=1920, height=1080, precision="compact")
    assert f"8192 MiB: about {n:,} Gaussians fit" in out and 35_000_000 < n < 45_000_000
    assert cli.main("forecast --backend cpu --size 64x48 --gaussians 1000 --render".split()) == 0
    assert "assumed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main("forecast --size 64x48 --gaussians 1.5".split())


def test_the_command_takes_units_and_says_the_least_budget(capsys):
    def said(words: str) -> str:
        assert cli.main(f"forecast --backend cpu {words}".split()) == 0
        return capsys.readouterr().out

    assert "10,000,000 Gaussians" in said("--gaussians 10M --size 64x48") and "500,000 Gaussians" in said("--gaussians 500k --size 64x48")
    for text, mib in (("1e4", 10_000), ("8GiB", 8192), ("8GB", 7629), ("512MiB", 512), ("100mb", 95)):
        assert f"\n{mib} MiB: about " in said(f"--size 64x48 --vram-mb {text}"), text
    out = said("--size 1920x1080 --vram-mb 5 --sh 3")
    least = int(re.search(r"5 MiB: no map fits; these images need ([0-9,]+) MiB or more", out)[1].replace(",", ""))
    image = dict(width=1920, height=1080, sh_degree=3)
    assert largest_map(least * MiB, "cpu", **image) > 0 == largest_map((least - 1) * MiB, "cpu", **image)
    assert f"{least} MiB: about" in said(f"--size 1920x1080 --vram-mb {least} --sh 3")
    assert cli.main("forecast --backend cpu --size 64x48 --gaussians 1M --pairs 3M --cameras 2".split()) == 2
    assert "--pairs 3,000,000 > 2,000,000" in capsys.readouterr().err


def test_a_refusal_rounds_up_what_is_needed():
    with Engine("cpu", sh_degree=0, threads=1, budget_bytes=5 * MiB) as engine, pytest.raises(NativeError, match=r"hold \d+ MiB > budget 5 MiB") as refusal:
        for n in range(1000):
            engine.append(np.zeros((500, 3)), np.tile([1, 0, 0, 0], (500, 1)), np.zeros((500, 3)), np.zeros(500), np.zeros((500, 1, 3)))
    assert int(re.search(r"hold (\d+) MiB", str(refusal.value))[1]) > 5


def test_resuming_under_a_budget_that_no_step_fits_is_refused_with_the_one_that_does(tmp_path):
    """It would prune the map to nothing to make room for its own scratch."""
    camera, rng, path = CAMERA.resized(160, 120), np.random.default_rng(0), str(tmp_path / "map.ckpt")
    settings = replaced(SMALL, {"insert.hole_spacing_px": 1.0, "engine.sh_degree": 0})
    mapper = Mapper(settings)
    for i in range(3):
        submit(mapper, replace(frame(i * 10), camera=camera, rgb=rng.integers(0, 256, (120, 160, 3), np.uint8), depth_m=np.full((120, 160), 2, np.float32)))
        mapper.run_due()
    mapper.command("save_checkpoint", path).result()
    with pytest.raises(CheckpointError, match=r"\d+ Gaussians and a step on 160x120 images take \d+ MiB > engine.vram_budget_mb 6; raise that to \d+ or more") as refusal:
        Mapper(replaced(settings, {"engine.vram_budget_mb": 6})).resume(path)
    least = int(re.search(r"raise that to (\d+)", str(refusal.value))[1])
    resumed = Mapper(replaced(settings, {"engine.vram_budget_mb": least}))
    n = resumed.resume(path).gaussians
    resumed.train(steps=5)
    assert resumed.status().gaussians == n == mapper.status().gaussians > 10_000 and resumed.vram().total <= least << 20
    resumed.command("save_checkpoint", path).result()   # under the same budget it is resumed whatever it says
    assert Mapper(resumed.config).resume(path).gaussians == n
