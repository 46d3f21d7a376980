"""Checkpoints: going on is bit for bit, whatever damages a file is found and said in one line, a kill at any moment leaves the last good one."""
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
import zlib

import numpy as np
import pytest

from spirula_gpu import checkpoint
from spirula_gpu.checkpoint_file import CRC, HEAD, HEAD_BYTES, CheckpointError, Reader, Section, write_file
from spirula_gpu.config import Config, replaced, rows
from spirula_gpu.mapper import Mapper
from spirula_gpu.native import Engine, NativeError
from test_mapper import SMALL, frame, submit

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
    assert (never._trainer.state()["random"] != drawn) == bool(changes), "Gaussians are relocated where it is tight, and only there"
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


# ---- refusals -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def good(tmp_path) -> bytes:
    mapper = Mapper(config())
    feed(mapper, range(4))
    return open(save(mapper), "rb").read()


def refused(data: bytes, settings: Config = SMALL) -> str:
    """The one line with which it is refused; the mapper is empty then and works."""
    with open("bad.ckpt", "wb") as file:
        file.write(data)
    mapper = Mapper(settings)
    with pytest.raises(CheckpointError) as error:
        mapper.resume("bad.ckpt")
    assert "\n" not in str(error.value) and str(error.value).startswith("bad.ckpt: ") and "checkpoint.resume" in str(error.value)
    assert mapper.status().gaussians == mapper.status().keyframes == len(mapper._inbox) == 0 and mapper.ledger.counts() == (0, 0, {})
    mapper.close()
    return str(error.value)


def table_of(data: bytes) -> dict:
    _, _, _, at, length = HEAD.unpack(data[:HEAD.size])
    return json.loads(data[at:at + length])


def forged(data: bytes, table: dict, version: int | None = None) -> bytes:
    """The file with another table, and all checksums as they should be."""
    magic, old, _, at, _ = HEAD.unpack(data[:HEAD.size])
    text = json.dumps(table).encode()
    head = HEAD.pack(magic, old if version is None else version, zlib.crc32(text), at, len(text))
    return head + CRC.pack(zlib.crc32(head)) + data[HEAD_BYTES:at] + text


def test_any_byte_that_is_another_is_found_and_placed(good):
    rng, table, end = random.Random(4), table_of(good), len(good)
    table_at = HEAD.unpack(good[:HEAD.size])[3]
    places = {i: "head" if i >= 8 else "not a checkpoint" for i in range(HEAD_BYTES)}
    places |= {i: "the table" for i in [table_at, *rng.sample(range(table_at, end), 40), end - 1]}
    for s in table["sections"]:
        assert s["bytes"], s["name"]
        places |= {i: f"section {s['name']} " for i in {s["offset"], s["offset"] + s["bytes"] // 2, s["offset"] + s["bytes"] - 1}}
    for at, where in places.items():
        bad = bytearray(good)
        bad[at] ^= rng.randrange(1, 256)
        assert where in refused(bytes(bad)), at


def test_a_file_that_was_cut_short_or_grew_is_refused(good):
    rng = random.Random(5)
    for length in [0, 1, HEAD_BYTES - 1, HEAD_BYTES, len(good) - 1, *(rng.randrange(len(good)) for _ in range(60))]:
        assert "cut short" in refused(good[:length]), length
    assert "something was added" in refused(good + b"\0")


def test_other_files_are_refused():
    assert "not a checkpoint" in refused(b"ply\nformat binary_little_endian 1.0\n" * 10)
    with pytest.raises(CheckpointError, match="^gone.ckpt: it cannot be read: No such file"):
        Mapper(SMALL).resume("gone.ckpt")
    with pytest.raises(CheckpointError, match="Is a directory"):
        Mapper(SMALL).resume(".")
    with pytest.raises(ValueError, match="checkpoint.path is empty"):
        Mapper(replaced(SMALL, {"checkpoint.resume": True}))


def test_what_this_run_cannot_hold_is_refused_with_the_remedy(good):
    assert "version 2 of the format, and this program reads version 1; resume it with the program that wrote it" in refused(forged(good, table_of(good), 2))
    for degree in (1, 3):
        assert f"engine.sh_degree 2, and this run has {degree}; set engine.sh_degree to 2" in refused(good, config(engine__sh_degree=degree))
    n = table_of(good)["gaussians"]
    assert f"{n} Gaussians > engine.max_gaussians 100; raise it" in refused(good, config(engine__max_gaussians=100))
    if len(PRECISIONS) > 1:
        assert "set engine.precision to full" in refused(good, config("compact"))


def test_contents_that_make_no_sense_are_refused_before_memory_is_taken(good):
    def changed(change) -> bytes:
        table = table_of(good)
        change(table, {s["name"]: s for s in table["sections"]})
        return forged(good, table)

    huge = lambda t, s: (t.update(gaussians=10**6), [row.update(shape=[10**6, *row["shape"][1:]]) for name, row in s.items() if name in t["rows"]])

    def shorter_images(_, s):  # by 12 bytes, which go to the depths
        rgb, depth = s["frames.rgb"], s["frames.depth_m"]
        rgb.update(bytes=rgb["bytes"] - 12, shape=[rgb["bytes"] - 12])
        depth.update(offset=depth["offset"] - 12, bytes=depth["bytes"] + 12, shape=[depth["bytes"] // 4 + 3])

    assert "must be" in refused(changed(huge), config(engine__max_gaussians=10**6))
    assert "the rows hold fewer" in refused(changed(lambda t, s: t.update(gaussians=10**15)))
    assert "frames.rgb ends at byte" in refused(changed(shorter_images))
    assert "row map.new" in refused(changed(lambda t, s: t["rows"].update({"map.new": 4})))
    assert "does not lie where" in refused(changed(lambda t, s: s["map.mean"].update(offset=0)))
    assert "section gate.poses is missing" in refused(changed(lambda t, s: s["gate.poses"].update(name="other")))
    assert "does not add up" in refused(changed(lambda t, s: t["frames_seen"].update(frames_in=1)))


def test_any_table_is_refused_or_resumed(good):
    """Any value of any kind anywhere in it: nothing but CheckpointError comes out."""
    rng, kept = random.Random(6), 0

    def leaves(tree, path=()):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield (*path, key)
            if isinstance(value, (dict, list)):
                yield from leaves(value, (*path, key))

    places = list(leaves(table_of(good)))
    for path in rng.sample(places, 250):
        table = table_of(good)
        node = table
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = rng.choice([None, True, -1, 2**31, 2**64, 1.5, float("nan"), "x", "", [], [1], {}, {"x": -1}])
        with open("any.ckpt", "wb") as file:
            file.write(forged(good, table))
        mapper = Mapper(SMALL)
        try:
            mapper.resume("any.ckpt")
            kept += 1
        except CheckpointError as e:
            assert "\n" not in str(e)
        mapper.close()
    assert 0 < kept < 150


def test_resuming_comes_first(good):
    mapper = Mapper(SMALL)
    feed(mapper, range(1))
    with pytest.raises(RuntimeError, match="before the first frame"):
        mapper.resume("map.ckpt")


# ---- writing --------------------------------------------------------------------------------------------------------------

def test_an_empty_map_touches_nothing(good):
    with pytest.raises(ValueError, match="the map is empty; map.ckpt was not touched"):
        save(Mapper(SMALL))
    assert open("map.ckpt", "rb").read() == good


def test_a_full_disk_leaves_the_old_file_and_is_told_until_it_is_over(monkeypatch):
    monkeypatch.setattr(Mapper, "SAVING_SHARE", 1e9)
    mapper = Mapper(config(checkpoint__path="map.ckpt", checkpoint__period_s=1e-3))
    feed(mapper, range(3))
    old, limits = open("map.ckpt", "rb").read(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        feed(mapper, range(4, 6))
        with pytest.raises(OSError):
            save(mapper)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the checkpoint could not be written" in mapper.status().hint and mapper.status().state == "running"
    assert open("map.ckpt", "rb").read() == old and not os.path.exists("map.ckpt.part")
    time.sleep(0.002)
    feed(mapper, range(6, 7))
    mapper._tell()
    assert mapper.status().hint == "" and open("map.ckpt", "rb").read() != old


def test_a_slow_disk_is_not_written_to_all_the_time(monkeypatch):
    mapper, saves, write = Mapper(config(checkpoint__path="map.ckpt", checkpoint__period_s=1e-3)), [], checkpoint.write_map

    def slow(*args):
        saves.append(time.monotonic())
        time.sleep(0.02)
        return write(*args)
    monkeypatch.setattr(checkpoint, "write_map", slow)
    for i in range(1000):
        feed(mapper, [i])
        if len(saves) == 3:
            break
    assert len(saves) == 3 and min(np.diff(saves)) >= 20 * 0.02


def test_it_is_saved_once_a_period_and_only_after_a_change(monkeypatch):
    monkeypatch.setattr(Mapper, "SAVING_SHARE", 1e9)
    mapper = Mapper(config(checkpoint__path="map.ckpt", checkpoint__period_s=1e-3))
    mapper.tick()
    time.sleep(0.002)
    assert not mapper.tick() and not os.path.exists("map.ckpt")   # there is no map yet
    feed(mapper, range(2))
    time.sleep(0.002)
    mapper.tick()
    saved_at = os.stat("map.ckpt").st_mtime_ns
    time.sleep(0.002)
    mapper.tick()
    assert os.stat("map.ckpt").st_mtime_ns == saved_at
    feed(mapper, range(2, 3))
    assert os.stat("map.ckpt").st_mtime_ns != saved_at
    seldom = Mapper(config(checkpoint__path="seldom.ckpt"))
    feed(seldom, range(3))
    assert not os.path.exists("seldom.ckpt")                        # 60 s


def test_two_writers_do_not_mix(good):
    with open("map.ckpt.part", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        mapper = Mapper(SMALL)
        feed(mapper, range(3))
        with pytest.raises(CheckpointError, match="another process is writing there"):
            save(mapper)
    assert open("map.ckpt", "rb").read() == good
    save(mapper)
    assert open("map.ckpt", "rb").read() != good


def test_a_running_mapper_saves_while_frames_come(tmp_path):
    mapper = Mapper(config())
    mapper.start()
    try:
        for i in range(20):
            submit(mapper, frame(i))
            if i > 10:
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
    n, K = 40_000, (mapper._engine.sh_degree + 1) ** 2
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


# ---- kill -9 --------------------------------------------------------------------------------------------------------------

SAVER = """
import itertools, sys
import numpy as np
from spirula_gpu.checkpoint_file import BYTES, Section, write_file
pieces = [np.full(1 << 18, k, np.uint8) for k in range(8)]
for round in itertools.count(int(sys.argv[2])):
    for piece in pieces:
        piece[:8] = np.frombuffer(round.to_bytes(8, "little"), np.uint8)
    write_file(sys.argv[1], {"round": round}, [Section("a", BYTES, (1 << 21,), pieces), Section("b", BYTES, (1 << 18,), pieces[:1])])
    print(round, flush=True)
"""


def test_a_kill_at_any_moment_leaves_the_last_good_one(tmp_path):
    rng, path, last, halfway = random.Random(7), str(tmp_path / "killed.ckpt"), -1, 0
    for _ in range(25):
        saver = subprocess.Popen([sys.executable, "-c", SAVER, path, str(last + 1)], stdout=subprocess.PIPE, text=True)
        told = [int(saver.stdout.readline())]
        time.sleep(rng.uniform(0, 0.05))
        saver.send_signal(signal.SIGKILL)
        told += [int(line) for line in saver.communicate()[0].splitlines() if line]
        halfway += os.path.exists(path + ".part")
        with Reader(path) as reader:
            a, b = reader.array("a", np.dtype("u1"), (1 << 21,)), reader.array("b", np.dtype("u1"), (1 << 18,))
            round = reader.facts["round"]
        assert told[-1] <= round <= told[-1] + 1 and told[0] == last + 1
        assert all(int.from_bytes(x[:8].tobytes(), "little") == round for x in (a, b))
        last = round
    assert halfway > 5, "no kill came while a file was being written: the test shows nothing"


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


def test_a_section_that_comes_short_is_an_error():
    with pytest.raises(CheckpointError, match="came as 3 bytes, its shape"):
        write_file("x.ckpt", {}, [Section("x", np.dtype("u1"), (4,), [np.zeros(3, np.uint8)])])
    assert os.listdir() == []
