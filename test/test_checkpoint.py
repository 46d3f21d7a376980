"""Checkpoints: going on is bit for bit, from any tick and every backend; what the engine and the mapper do for it."""
import tracemalloc

import numpy as np
import pytest

from conftest import skip_without_cuda
from spirula_gpu import checkpoint
from spirula_gpu.config import Config, replaced, rows
from spirula_gpu.mapper import Mapper
from spirula_gpu.native import Engine, NativeError
from spirula_gpu.refine import Refinement
from test_mapper import SMALL, frame, submit, wait_for

PRECISIONS = ("full", "compact") if any(name == "engine.precision" for name, _, _ in rows()) else ("full",)
TIGHT = {"engine.max_gaussians": 150, "prune.min_opacity": 0.15, "train.max_keyframes": 4}  # Gaussians are relocated and keyframes go


def config(precision: str = "full", **changes) -> Config:
    return replaced(SMALL, {**({"engine.precision": precision} if len(PRECISIONS) > 1 else {}), **{k.replace("__", "."): v for k, v in changes.items()}})


def save(mapper: Mapper, path="map.ckpt") -> str:
    mapper.command("save_checkpoint", str(path)).result()
    return str(path)


def everything(mapper: Mapper) -> dict:
    """What must be equal, as bytes and exact numbers."""
    raw = {}
    for name, row in mapper._engine.saved_rows().items():
        raw[name] = np.empty(row.used_bytes, np.uint8)
        mapper._engine.read_raw(name, 0, raw[name])
    mapper.command("save_map", "compared.ply").result()
    mapper._tell()
    s = mapper.status()
    return {**{name: x.tobytes() for name, x in raw.items()}, "ply": open("compared.ply", "rb").read(), "losses": [(k.id, k.loss) for k in mapper._keyframes],
            "refined": [(k.frame.T_world_cam.tobytes(), k.log_gain.tobytes()) for k in mapper._keyframes],
            "status": (s.gaussians, s.keyframes, s.held_out, s.steps, s.loss, s.hint, s.frames.frames_in, s.frames.used, s.frames.pending)}


def watch_choices(mapper: Mapper) -> list[int]:
    chosen, choose = [], mapper._keyframes.choose

    def watched(t):
        keyframe = choose(t)
        chosen.append(keyframe.id)
        return keyframe
    mapper._keyframes.choose = watched
    return chosen


def feed(mapper: Mapper, indices) -> None:
    for i in indices:
        submit(mapper, frame(i, held_out=i % 4 == 3))
        mapper.run_due()


# ---- going on -------------------------------------------------------------------------------------------------------------

def test_masks_and_given_poses_survive():
    mapper, mask = Mapper(config()), np.ones((30, 40), np.uint8)
    mask[:, :7] = 0
    for i in range(3):
        submit(mapper, frame(i, mask=None if i == 1 else mask))
        mapper.run_due()
    moved = mapper._keyframes.newest.frame.T_world_cam.copy()
    moved[2, 3] = 0.25
    mapper._keyframes.newest.place(moved)
    resumed = Mapper(config())
    resumed.resume(save(mapper))
    for a, b in zip(mapper._keyframes, resumed._keyframes):
        assert np.array_equal(a.T_given, b.T_given) and np.array_equal(a.frame.T_world_cam, b.frame.T_world_cam)
        assert b.frame.mask is None if a.frame.mask is None else np.array_equal(a.frame.mask, b.frame.mask)
    assert resumed._keyframes.newest.frame.T_world_cam[2, 3] == 0.25 and resumed._keyframes.newest.T_given[2, 3] == 0


@pytest.mark.parametrize("changes", [{}, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_200_steps_are_100_and_a_checkpoint_and_100(precision, changes):
    settings = replaced(config(precision), changes)

    def first(mapper):
        feed(mapper, range(6))
        mapper.train(steps=100 - mapper._trainer.steps)

    def second(mapper):
        chosen = watch_choices(mapper)
        feed(mapper, range(6, 10))
        mapper.train(steps=200 - mapper._trainer.steps)
        return everything(mapper), chosen

    never, saving = Mapper(settings), Mapper(settings)
    first(never)
    first(saving)
    drawn = never._trainer.state()["random"]
    path = save(saving)
    resumed = Mapper(replaced(settings, {"checkpoint.path": path, "checkpoint.resume": True}))
    assert resumed.resumed.steps == 100 and resumed.resumed.changed == {} and resumed.status().state == "running"
    expected, chosen = second(never)
    assert expected["status"][3] == 200 and len(set(chosen)) > 2
    assert never._trainer.state()["random"] != drawn, "Gaussians are divided; where it is tight, in place of those that went"
    for name, mapper in {"goes on after saving": saving, "resumed": resumed}.items():
        got, its_chosen = second(mapper)
        assert its_chosen == chosen, name
        for key in expected:
            assert got[key] == expected[key], (name, key)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_goes_on_from_any_tick(precision):
    """With frames that wait and steps that are due, and with the keyframe of the last step gone."""
    settings = replaced(config(precision), {**TIGHT, "train.max_keyframes": 2, "train.steps_per_frame": 7, "prune.interval_steps": 5})

    def started():
        mapper = Mapper(settings)
        for i in range(7):
            submit(mapper, frame(i, held_out=i == 4))
        return mapper

    whole = started()
    whole.run_due()
    expected = everything(whole)
    for ticks in range(1, 11):
        mapper = started()
        for _ in range(ticks):
            mapper.tick()
        resumed = Mapper(settings)
        resumed.resume(save(mapper))
        assert resumed.ledger.counts() == mapper.ledger.counts() and len(resumed._inbox) == len(mapper._inbox)
        resumed.run_due()
        assert everything(resumed) == expected, ticks


@pytest.mark.parametrize("there, here", [("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_backend_resumes_from_every_other(precision, there, here):
    if "cuda" in (there, here):
        skip_without_cuda()
    mapper, resumed = Mapper(config(precision, engine__backend=there)), Mapper(config(precision, engine__backend=here))
    feed(mapper, range(6))
    resumed.resume(save(mapper))
    assert everything(resumed) == everything(mapper) and resumed._trainer.state() == mapper._trainer.state()
    for m in (mapper, resumed):
        m.train(steps=100)
    assert resumed.status().loss == pytest.approx(mapper.status().loss, rel=0.2) and resumed.status().loss < 0.1


def test_the_last_step_counts_though_its_keyframe_has_gone():
    mappers = [Mapper(config(train__steps_per_frame=0, train__max_keyframes=2)) for _ in range(2)]
    for mapper in mappers:
        feed(mapper, range(3))
        mapper.train(steps=5)
        feed(mapper, range(4, 7))
    assert mapper._trainer.state()["running"]["id"] not in [k.id for k in mapper._keyframes]
    resumed = Mapper(mapper.config)
    resumed.resume(save(mappers[1]))
    for mapper in (mappers[0], resumed):
        mapper.train(steps=20)
    assert everything(resumed) == everything(mappers[0])


def test_a_second_checkpoint_right_after_resuming_is_the_first():
    mapper = Mapper(config())
    feed(mapper, range(5))
    mapper.world_frame, resumed = "odom", Mapper(config())
    resumed.resume(save(mapper))
    assert open(save(resumed, "second.ckpt"), "rb").read() == open("map.ckpt", "rb").read()


def test_the_gate_goes_on_and_lost_frames_are_counted():
    mapper = Mapper(config())
    feed(mapper, range(3))
    mapper.ledger.arrived()                 # with the intake, not with the mapper
    mapper.world_frame = "odom"
    resumed = Mapper(config())
    done = resumed.resume(save(mapper))
    assert (done.world_frame, done.lost_frames, done.last_stamp_ns) == ("odom", 1, frame(2).stamp_ns)
    submit(resumed, frame(1))               # seen before
    assert resumed.ledger.counts() == (5, 3, {"lost_at_restart": 1, "not_keyframe": 1})


def test_parameters_of_the_new_run_count_and_are_told():
    mapper = Mapper(config())
    feed(mapper, range(3))
    resumed = Mapper(config(train__lr_mean=1e-5))
    assert resumed.resume(save(mapper)).changed == {"train.lr_mean": (4e-4, 1e-5)} and resumed.config.train.lr_mean == 1e-5


def test_a_running_mapper_saves_while_frames_come(tmp_path):
    mapper = Mapper(config())
    mapper.start()
    try:
        for i in range(20):
            submit(mapper, frame(i))
            if i > 10:
                wait_for(lambda: mapper.status().gaussians)
                done = mapper.command("save_checkpoint", "live.ckpt")
        done.result(timeout=20)
    finally:
        mapper.stop()
    resumed = Mapper(config())
    resumed.resume("live.ckpt")
    resumed.run_due()
    counts = resumed.ledger.counts()
    assert counts.pending == 0 and counts.used >= 1 and not mapper.status().last_error


def test_one_chunk_of_the_map_is_in_memory_at_once(monkeypatch):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1 << 18)
    mapper = Mapper(config())
    feed(mapper, range(3))
    n, K = 60_000, (mapper._engine.sh_degree + 1) ** 2
    mapper._engine.append(np.random.default_rng(0).normal(size=(n, 3)), np.tile([1, 0, 0, 0], (n, 1)), np.full((n, 3), -4.0), np.zeros(n), np.zeros((n, K, 3)))
    size = sum(row.used_bytes for row in mapper._engine.saved_rows().values())
    resumed = Mapper(config())
    for name, work in {"save": lambda: save(mapper), "resume": lambda: resumed.resume("map.ckpt")}.items():
        tracemalloc.start()
        work()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.5e6 < size / 8, (name, peak, size)
    assert everything(resumed) == everything(mapper)


# ---- the engine's part ----------------------------------------------------------------------------------------------------

def test_raw_rows_are_the_rows():
    with Engine("cpu", sh_degree=1, threads=1, max_gaussians=1000) as engine:
        assert engine.last_step().n_pairs == -1
        engine.make(300)
        with pytest.raises(NativeError, match="it must be empty"):
            engine.make(1)
        with pytest.raises(NativeError, match="no saved buffer is called 'proj.mask'"):
            engine.read_raw("proj.mask", 0, np.empty(1, np.uint8))
        with pytest.raises(NativeError, match="map.mean: 2 bytes from 3599 on, of 3600"):
            engine.read_raw("map.mean", 3599, np.empty(2, np.uint8))
        rng = np.random.default_rng(0)
        for name, row in engine.saved_rows().items():
            values, out = rng.integers(0, 100, row.used_bytes, np.uint8), np.empty(row.used_bytes - 5, np.uint8)
            engine.write_raw(name, 0, values[:7])
            engine.write_raw(name, 7, values[7:])
            engine.read_raw(name, 5, out)
            assert np.array_equal(out, values[5:]) and engine.read(name).tobytes() == values.tobytes(), name
        assert {row.name.decode() for row in engine.rows()[:-1] if not row.aliased} == set(engine.saved_rows())


def test_refinement_goes_on_bit_for_bit(monkeypatch):
    """Gains, poses and the map that was moved with them; both are seen to have changed. (Such small images have too few corners to tell how far poses are off.)"""
    monkeypatch.setattr(Refinement, "noise_rad", 0.02)
    settings = config(refine__pose=True, refine__exposure=True, refine__interval_steps=3)
    never, saving = Mapper(settings), Mapper(settings)
    for mapper in (never, saving):
        feed(mapper, range(5))
    resumed = Mapper(settings)
    resumed.resume(save(saving))
    assert resumed._trainer.refinement.state() == never._trainer.refinement.state()
    for mapper in (never, resumed):
        feed(mapper, range(5, 9))
        mapper.train(steps=20)
    assert everything(resumed) == everything(never)
    keyframes = list(never._keyframes)
    assert any(k.log_gain.any() for k in keyframes) and any((k.frame.T_world_cam != k.T_given).any() for k in keyframes)
