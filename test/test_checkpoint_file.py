"""Files of checkpoints: whatever damages one is found and said in one line, and a full disk, a second writer or a kill at any moment leaves the last good one."""
import fcntl
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest

from spirula_gpu import checkpoint
from spirula_gpu.checkpoint_file import CRC, HEAD, HEAD_BYTES, VERSION, CheckpointError, Reader, Section, write_file
from spirula_gpu.config import Config, replaced
from spirula_gpu.mapper import Mapper
from test_checkpoint import PRECISIONS, config, feed, save
from test_mapper import SMALL, frame, submit


# ---- refusals -------------------------------------------------------------------------------------------------------------

@pytest.fixture
def good(tmp_path) -> bytes:
    mapper = Mapper(config())
    feed(mapper, range(3))
    submit(mapper, frame(3, mask=np.ones((30, 40), np.uint8)))
    mapper.run_due()
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
    assert f"version 9 of the format, and this program reads version {VERSION}; resume it with the program that wrote it" in refused(forged(good, table_of(good), 9))
    for degree in (1, 3):
        assert f"engine.sh_degree 2, and this run has {degree}; set engine.sh_degree to 2" in refused(good, config(engine__sh_degree=degree))
    n = table_of(good)["gaussians"]
    assert f"{n} Gaussians > engine.max_gaussians 100; raise it" in refused(good, config(engine__max_gaussians=100))
    if len(PRECISIONS) > 1:
        assert "set engine.precision to full" in refused(good, config("compact"))
    drawn = Config().engine.antialiased
    assert f"set engine.antialiased to {drawn}" in refused(good, config(engine__antialiased=not drawn))


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


def test_a_section_that_comes_short_is_an_error():
    with pytest.raises(CheckpointError, match="came as 3 bytes, its shape"):
        write_file("x.ckpt", {}, [Section("x", np.dtype("u1"), (4,), [np.zeros(3, np.uint8)])])
    assert os.listdir() == []
