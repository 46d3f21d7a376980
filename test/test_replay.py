"""`spirula replay` in one process: the loop against a test double, the report's files, and the real engine end to end."""
import concurrent.futures
import errno
import io
import json
import math
import os
import re
import shutil
import signal
import threading
import time

import cv2
import numpy as np
import pytest

from spirula_gpu.camera import Camera, Frame
from spirula_gpu.config import replaced
from spirula_gpu.mapper import Mapper
from spirula_gpu.report import FrameLedger, Status, VramReport, VramRow
from spirula_ros import bags, report
from spirula_ros.errors import InputError
from spirula_ros.replay import Lossless, ReplayOptions, replay
from spirula_ros.resume import bag_source, live_source, other_source
from spirula_ros.settings import settings
from spirula_ros.synthetic import make_bag
from test_mapper import SMALL, frame

KEYS = {"frames", "keyframes", "gaussians", "steps", "seconds", "heldout_psnr", "heldout_ssim", "heldout_cc_psnr", "train_psnr", "vram", "backend", "version"}


class HeldOut:
    def __init__(self, frame, psnr):
        self.frame, self.rgb, self.psnr, self.ssim, self.cc_psnr = frame, 255 - frame.rgb, psnr, 0.5, psnr + 1


class DoubleMapper:
    """The Mapper's contract without an engine: two steps are due for every frame; with start() a thread works them off."""
    backend, resumed = "double", None
    busy_s = 0.0  # for each frame

    def __init__(self, config):
        self.config, self.ledger = config, FrameLedger()
        self.frames, self.held_out, self.inbox = [], [], []
        self.steps, self.calls, self.parts, self.closed, self.error, self.thread = 0, [], [], False, "", None

    def start(self):
        self.thread, self.stopping = threading.Thread(target=self._work), False
        self.thread.start()

    def _work(self):
        while not self.stopping:
            if not self.tick():
                time.sleep(0.005)

    def refuses(self, *image):
        return False

    def submit(self, frame):
        self.calls.append("submit")
        self.inbox.append(frame)
        while len(self.inbox) > self.config.gate.inbox_frames:
            self.inbox.pop(0)
            self.ledger.dropped("inbox_full")

    def tick(self):
        if not self.inbox or self.error:
            return False
        frame = self.inbox.pop(0)
        time.sleep(self.busy_s)
        (self.held_out if frame.held_out else self.frames).append(frame)
        self.steps += 2
        self.ledger.used()
        return True

    def run_due(self):
        self.calls.append("run_due")
        while self.tick():
            pass

    def train(self, seconds=None, steps=None, part=None):
        self.calls.append(("train", seconds, steps))
        self.parts.append(part)
        self.steps += steps
        time.sleep(0.01)

    def command(self, name, *args):
        self.calls.append((name, *args))
        future = concurrent.futures.Future()
        if name == "refine":
            self.steps += 10
            time.sleep(args[0])
        if name in ("save_map", "save_poses", "save_checkpoint", "mesh"):
            with open(args[0], "w") as file:
                file.write("ply\n")
        future.set_result([HeldOut(f, 20.0 + i) for i, f in enumerate(self.held_out)] if name == "evaluate" else None)
        return future

    def status(self):
        return Status(state="error" if self.error else "running", gaussians=100 * len(self.frames), keyframes=len(self.frames), steps=self.steps,
                      frames=self.ledger.counts(), last_error=self.error)

    def vram(self):
        return VramReport((VramRow("means", "splat", 900, 1000, False),), {"splat": (900, 1000), "image": (5, 10)}, 1010, 64, 0, 2000, 3000, 4000)

    def close(self):
        self.closed, self.stopping = True, True
        if self.thread:
            self.thread.join()


@pytest.fixture(scope="module")
def room(tmp_path_factory):
    path = tmp_path_factory.mktemp("bags") / "room"
    make_bag(path, frames=20, size=(40, 30), fps=20, say=lambda _: None)
    return path


def run(bag, out, make=DoubleMapper, holdout=4, screen=None, assignments=(), **options):
    """(the mapper, report.json, the sentence)"""
    made = []

    def make_mapper(config):
        made.append(make(config))
        return made[-1]
    options = ReplayOptions(str(bag), str(out), **{"topics": {}, "rate": None, **options})
    sentence = replay(options, settings(None, {"eval.holdout_every": holdout}, list(assignments)), make_mapper, screen or io.StringIO())
    return made[-1], read_report(out), sentence


def read_report(out):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")
    return json.loads((out / "report.json").read_text(), parse_constant=refuse)


# ---- the loop ------------------------------------------------------------------------------------------------------------

def test_lossless_waits_for_every_frame(room, tmp_path):
    mapper, found, sentence = run(room, tmp_path / "out")
    assert found["frames"] == {"in": 20, "used": 20, "dropped": {}}
    assert mapper.calls[:40] == ["submit", "run_due"] * 20 and mapper.closed
    assert [f.held_out for f in mapper.frames] == [False] * 15 and len(mapper.held_out) == 5
    assert KEYS <= set(found) and found["steps"] == 40 and found["backend"] == "double" and found["stopped_early"] == ""
    assert found["vram"] == {"splat": 1000, "image": 10} and found["heldout_psnr"] == 22.0 and found["heldout_cc_psnr"] == 23.0
    assert found["train_psnr"] is None  # NaN
    assert "20 in, 20 used" in sentence and "cut short" not in sentence and "22.00 dB" in sentence


def test_steps_that_there_was_no_time_for_are_told(room, tmp_path):
    """The double makes two steps a frame."""
    _, found, sentence = run(room, tmp_path / "out", assignments=["train.steps_per_frame=5"])
    assert found["steps"] == 40 and found["steps_due"] == 100
    assert "40 steps of 100 due for the frames (train.steps_per_frame; a lower --rate, --lossless or --refine-steps 60 gives them time)" in sentence
    for assignments, options in ((["train.steps_per_frame=2"], {}), (["train.steps_per_frame=5"], {"refine_steps": 60})):
        assert "due" not in run(room, tmp_path / "out", assignments=assignments, **options)[2]


def test_files(room, tmp_path):
    out = tmp_path / "out"
    (out / "renders").mkdir(parents=True)
    for name in ("17.png", "mine.png"):
        (out / "renders" / name).touch()
    mapper, found, _ = run(room, out)
    names = {f"{h['stamp_ns']}.png" for h in found["heldout"]}
    assert len(names) == 5 and {p.name for p in (out / "renders").iterdir()} == names | {"mine.png"}  # 17.png: of an earlier run
    held = mapper.held_out[0]
    assert np.array_equal(cv2.imread(str(out / "renders" / f"{held.stamp_ns}.png"))[..., ::-1], 255 - held.rgb)
    assert {p.name for p in out.iterdir()} == {"report.json", "report.html", "renders", "map.ply", "poses.txt", "mesh.ply", "compare.png"}


def test_no_mesh_no_holdout(room, tmp_path):
    mapper, found, _ = run(room, tmp_path / "out", holdout=0, mesh=False)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"report.json", "report.html", "renders", "map.ply", "poses.txt"}
    assert found["heldout_psnr"] is None and found["heldout"] == []


def test_at_a_rate_the_recording_takes_its_time(room, tmp_path):
    begin = time.monotonic()
    mapper, found, _ = run(room, tmp_path / "out", rate=2.0)  # 19 intervals of 50 ms, twice as fast
    assert 0.47 < found["timing"]["stream_s"] < 2 and time.monotonic() - begin > 0.47
    assert found["frames"]["in"] == 20 and "run_due" not in mapper.calls and mapper.thread and mapper.closed


def test_a_slow_mapper_drops_and_says_so(room, tmp_path):
    class Slow(DoubleMapper):
        busy_s = 0.1
    _, found, _ = run(room, tmp_path / "out", Slow, rate=5.0, assignments=["gate.inbox_frames=2"])
    frames = found["frames"]
    assert frames["dropped"]["inbox_full"] > 3 and frames["in"] == 20 == frames["used"] + sum(frames["dropped"].values())


def test_max_seconds_stops_reading(room, tmp_path):
    class Slow(DoubleMapper):
        busy_s = 0.1
    _, found, sentence = run(room, tmp_path / "out", Slow, max_seconds=0.45, refine_seconds=60)
    assert f"cut short by --max-seconds after {found['images_sent']} of 20 images" in sentence and found["images_sent"] < 20
    assert found["stopped_early"] == "max_seconds" and 2 <= found["frames"]["in"] < 12 and found["seconds"] < 2
    assert found["frames"]["in"] == found["frames"]["used"]
    assert (tmp_path / "out" / "compare.png").exists()


def test_stopped_before_the_first_frame_says_so(room, tmp_path):
    with pytest.raises(InputError, match=r"not one frame could be used \(--max-seconds 1e-09 ended it, give more, after 0 of 20 images\)"):
        run(room, tmp_path / "out", max_seconds=1e-9)


def test_only_held_out_frames_train_nothing_and_say_so(room, tmp_path):
    from spirula_gpu.mapper import Mapper
    _, found, sentence = run(room, tmp_path / "out", make=Mapper, holdout=1, mesh=False, assignments=("engine.backend=cpu",))
    assert found["steps"] == 0 < found["steps_due"] and "0 steps (every frame was held out and only measured; to train: --holdout 0, or 2 and more); frames 20 in" in sentence


def test_max_seconds_leaves_the_rest_to_refinement(room, tmp_path):
    _, found, sentence = run(room, tmp_path / "out", max_seconds=1.0, refine_seconds=60)
    assert "cut short by --max-seconds during the refinement" in sentence
    assert found["stopped_early"] == "max_seconds" and found["frames"]["in"] == 20 and found["timing"]["refine_s"] > 0.3


@pytest.mark.parametrize("rate", [None, 50.0])
def test_refine_steps(room, tmp_path, rate):
    mapper, found, _ = run(room, tmp_path / "out", refine_steps=50, rate=rate)
    assert found["steps"] == 2 * found["frames"]["used"] + 50 and found["stopped_early"] == ""  # at 50 fps a busy machine may drop one
    if rate is None:
        assert sum(c[2] for c in mapper.calls if c[0] == "train") == 50
        assert mapper.parts == [(0, 0), (0.4, 0.4), (0.8, 0.8)]   # slices of 20 steps
    else:
        assert [c[2] for c in mapper.calls if c[0] == "refine"] == [(s / 50, s / 50) for s in range(0, 50, 10)]


def test_refine_seconds(room, tmp_path):
    _, found, _ = run(room, tmp_path / "out", refine_seconds=0.3)
    assert 0.3 <= found["timing"]["refine_s"] < 1 and found["steps"] > 40


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_runs_are_reported(room, tmp_path, number):
    class Interrupts(DoubleMapper):
        def submit(self, frame):
            super().submit(frame)
            if self.calls.count("submit") == 5:
                os.kill(os.getpid(), number)
    before = signal.getsignal(number)
    mapper, found, _ = run(room, tmp_path / "out", Interrupts, refine_seconds=60)
    assert found["stopped_early"] == "interrupted" and found["frames"]["in"] == 5 == found["frames"]["used"] and mapper.closed
    assert (tmp_path / "out" / "map.ply").exists() and signal.getsignal(number) is before


def test_a_second_interrupt_gives_up(room, tmp_path):
    class Interrupts(DoubleMapper):
        def submit(self, frame):
            super().submit(frame)
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(room, tmp_path / "out", Interrupts)
    assert not (tmp_path / "out" / "report.json").exists()


@pytest.mark.parametrize("rate", [None, 20.0])
def test_a_mapper_that_fails_is_no_report(room, tmp_path, rate):
    class Fails(DoubleMapper):
        def tick(self):
            if len(self.frames) == 3:
                self.error = "ValueError: out of ideas"
                if self.thread is None:
                    raise RuntimeError(self.error)
            return super().tick()
    with pytest.raises(RuntimeError, match="out of ideas"):
        run(room, tmp_path / "out", Fails, rate=rate)
    assert not (tmp_path / "out" / "report.json").exists()


# ---- a viewer's pause ----------------------------------------------------------------------------------------------------

class Looked:
    """A stop request that is looked at while a replay waits: at the third look `then` happens, and its result is the reason from there on."""

    def __init__(self, then):
        self.looks, self._then, self._reason = 0, then, ""

    @property
    def reason(self):
        self.looks += 1
        if self.looks == 3:
            self._reason = self._then() or ""
        return self._reason


class PausedInTheMiddle(Mapper):
    """Somebody pauses it while steps of the third frame are due, and looks at it meanwhile."""
    ticks = 0

    def tick(self):
        self.ticks += 1
        if self.ticks == 8:
            assert self._due > 0
            self.post("pause", True)
        return super().tick()


def taken(mapper, stop):
    driver = Lossless(mapper, stop)
    for i in range(6):
        mapper.ledger.arrived()
        driver.take(frame(i))
    driver.train(None, 3, 0.0)
    return {row: mapper._engine.read(f"map.{row}") for row in ("mean", "sh", "logit_opacity")}


def test_a_pause_in_a_lossless_replay_loses_no_frame_and_no_step():
    config = replaced(SMALL, {"train.steps_per_frame": 12})
    whole, paused = Mapper(config), PausedInTheMiddle(config)
    stop = Looked(lambda: paused.post("pause", False) and "")
    want, got = taken(whole, Looked(str)), taken(paused, stop)
    assert stop.looks >= 3 and paused.ledger.counts() == (6, 6, {}) and paused.status().steps == whole.status().steps == 6 * 12 + 3
    assert all(np.array_equal(got[row], want[row]) for row in want)


def test_a_paused_lossless_replay_ends_when_it_is_asked_to():
    mapper, stop = Mapper(replaced(SMALL, {"train.steps_per_frame": 12})), Looked(lambda: "interrupted")
    driver = Lossless(mapper, stop)
    mapper.post("pause", True)
    mapper.ledger.arrived()
    driver.take(frame(0))
    driver.train(None, 3, 0.0)
    assert stop.looks >= 3 and mapper.status().state == "paused" and mapper.status().steps == 0 and mapper.ledger.counts().pending == 1


# ---- recordings ------------------------------------------------------------------------------------------------------------

def test_a_recording_that_was_cut_off_is_used_as_far_as_it_goes(room, tmp_path):
    file = next(room.glob("*.mcap"))
    (tmp_path / "cut.mcap").write_bytes(file.read_bytes()[:int(0.6 * file.stat().st_size)])
    screen = io.StringIO()
    _, found, _ = run(tmp_path / "cut.mcap", tmp_path / "out", screen=screen)
    assert 5 < found["frames"]["in"] < 20 and "ended after" in found["bag_problem"] and "warning: " in screen.getvalue()


def test_no_usable_frame_says_why(tmp_path):
    with bags.BagWriter(tmp_path / "bag") as bag:
        camera = Camera(8, 6, 8, 8, 4, 3)
        for i in range(1, 4):
            bag.image("/image", i * 10**9, "camera", np.zeros((6, 8, 3), np.uint8))
            bag.info("/camera_info", i * 10**9, "camera", camera)
            bag.pose("/pose", 10**12, "map", np.eye(4))
    with pytest.raises(InputError, match="not one frame could be used.*image: 3 messages"):
        run(tmp_path / "bag", tmp_path / "out")
    frames = read_report(tmp_path / "out")["frames"]
    assert frames["in"] == 3 == sum(frames["dropped"].values()) and not (tmp_path / "out" / "map.ply").exists()


@pytest.mark.parametrize("fails", ["write_renders", "compare_picture", "write_atomically"])
def test_a_report_that_fails_loses_neither_map_nor_checkpoint(room, tmp_path, monkeypatch, fails):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("spirula_ros.replay.remove_results", lambda *_: None)   # which writes no renders
    monkeypatch.setattr(report, fails, full)
    out, path = tmp_path / "out", tmp_path / "map.ckpt"
    with pytest.raises(OSError if fails == "compare_picture" else InputError) as error:
        run(room, out, assignments=[f"checkpoint.path={path}"])
    assert (out / "map.ply").exists() and (out / "poses.txt").exists() and path.exists()
    if fails != "compare_picture":   # no matter of the disk: our bug, told as such
        assert re.search(r"cannot write .*: No space left on device; map.ply, poses.txt(, report.json)? is written there", str(error.value))


def test_results_of_an_earlier_run_do_not_stay_beside_the_new_report(room, tmp_path):
    out = tmp_path / "out"
    (out / "renders").mkdir(parents=True)
    stale, kept = ["report.json", "report.html", "compare.png", "map.ply", "mesh.ply", "renders/123.png"], ["notes.txt", "renders/mine.png", "map.ckpt"]
    for name in stale + kept:
        (out / name).write_text("of an earlier run")

    class Fails(DoubleMapper):
        def submit(self, frame):
            raise RuntimeError("it fails")
    with pytest.raises(RuntimeError, match="it fails"):
        run(room, out, make=Fails)
    assert not [name for name in stale if (out / name).exists()] and all((out / name).read_text() == "of an earlier run" for name in kept)
    (out / "mesh.ply").write_text("asked not to be written")
    run(room, out, mesh=False)
    assert (out / "mesh.ply").exists() and (out / "report.json").exists()


@pytest.mark.parametrize("name, file", [("train.start_map", "map.ply"), ("checkpoint.path", "map.ply"), ("train.start_map", "mesh.ply"), ("checkpoint.path", "start.spz")])
def test_what_a_run_begins_with_is_not_written_over(name, file, room, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / file).write_text("good")
    wanted = [f"{name}={out}/../out/{file}", *(["output.map_file=start.spz"] if file == "start.spz" else [])]
    with pytest.raises(InputError, match=f"{name} .*{file} .*another --out") as error:
        run(room, out, make=lambda config: pytest.fail("work was done"), assignments=wanted)
    assert "\n" not in str(error.value) and (out / file).read_text() == "good" and not (out / "renders").exists()
    run(room, tmp_path / "more", assignments=wanted)
    assert (out / file).read_text() == ("ply\n" if name == "checkpoint.path" else "good")   # where it goes on, there it is saved


def test_the_recording_is_no_place_for_results_but_the_folder_around_it_is(room, tmp_path, monkeypatch):
    bag = tmp_path / "bag"
    shutil.copytree(room, bag)
    before, file = sorted(p.name for p in bag.iterdir()), next(bag.glob("*.mcap"))
    monkeypatch.chdir(bag)
    for recording, out in ((bag, bag), (bag, "."), (file, bag), (file, file), (file.name, "../bag/")):
        with pytest.raises(InputError, match="--out .* is the recording itself.*choose another --out"):
            run(recording, out)
    assert sorted(p.name for p in bag.iterdir()) == before
    run(bag, tmp_path)   # as `make demo` has it
    shutil.copy(file, tmp_path / "alone.mcap")
    run(tmp_path / "alone.mcap", tmp_path)


def test_a_mesh_that_is_not_written_may_be_the_start(room, tmp_path):
    (tmp_path / "mesh.ply").write_text("good")
    run(room, tmp_path, mesh=False, assignments=[f"train.start_map={tmp_path}/mesh.ply"])
    assert (tmp_path / "mesh.ply").read_text() == "good"


def test_a_recording_that_is_not_there_leaves_no_folder_and_no_result_goes(room, tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        run(tmp_path / "nope", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "map.ply").write_text("good")
    with pytest.raises(InputError, match="--depth-topic /nope"):
        run(room, tmp_path, topics={"depth": "/nope"})
    assert (tmp_path / "map.ply").read_text() == "good" and not (tmp_path / "renders").exists()


def test_without_depth_and_with_odometry(tmp_path):
    """Inputs follow what the recording has."""
    with bags.BagWriter(tmp_path / "bag", "sqlite3") as bag:
        for i in range(1, 4):
            bag.odom("/odom", i * 10**9, "map", "camera", np.eye(4))
            bag.info("/cam/camera_info", i * 10**9, "camera", Camera(8, 6, 8, 8, 4, 3))
            bag.image("/cam/image_raw", i * 10**9, "camera", np.zeros((6, 8, 3), np.uint8))
    mapper, found, _ = run(tmp_path / "bag", tmp_path / "out")
    assert found["frames"]["used"] == 3 and all(f.depth_m is None for f in mapper.frames) and found["topics"]["/odom"] == "odom"


def test_unwritable_folder_is_found_before_any_work(room, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot write into .*choose another folder"):
        run(room, tmp_path / "file" / "out", make=lambda config: pytest.fail("work was done"))


# ---- the pictures ------------------------------------------------------------------------------------------------------------

def held_out_frame(stamp, size=(40, 30)):
    rgb = np.full((size[1], size[0], 3), 100, np.uint8)
    return HeldOut(Frame(stamp, Camera(*size, 30, 30, size[0] / 2, size[1] / 2), np.eye(4), rgb), 20.0)


def test_compare_picture():
    picture = report.compare_picture([held_out_frame(i) for i in range(9)])
    assert picture.dtype == np.uint8 and picture.shape[1] == 3 * 480 and picture.shape[0] == 4 * 360 + 34
    assert (picture[200, 240] == 100).all() and (picture[200, 720] == 155).all()  # truth and render, unchanged
    assert picture[200, 1200].astype(int).sum() > 250  # error 55 / 255: bright
    assert report.compare_picture([held_out_frame(0, (800, 600))]).shape == (634, 2400, 3)
    assert report.compare_picture([held_out_frame(0), held_out_frame(1, (20, 30))]).shape[1] == 1440  # cameras of two sizes


def test_false_color_is_black_without_error_and_saturates():
    a = np.zeros((2, 2, 3), np.uint8)
    assert report.false_color(a, a).max() < 8
    b = np.full_like(a, 70)
    assert np.array_equal(report.false_color(a, b), report.false_color(a, np.full_like(a, 255)))
    assert not np.array_equal(report.false_color(a, b), report.false_color(a, np.full_like(a, 30)))


def test_json_has_no_nan():
    assert report.without_nan({"a": [math.nan, math.inf, np.float32(1.5)], "b": (np.int64(3), True, "x")}) == {"a": [None, None, 1.5], "b": [3, True, "x"]}


# ---- progress ------------------------------------------------------------------------------------------------------------

def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(room, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True
    monkeypatch.setattr("spirula_ros.progress.Progress.LINE_S", 0.0)
    monkeypatch.setattr("spirula_ros.progress.Progress.BAR_S", 0.0)
    lines, bar = io.StringIO(), Terminal()
    run(room, tmp_path / "a", screen=lines)
    run(room, tmp_path / "b", screen=bar)
    assert lines.getvalue().splitlines()[-1].startswith("100%") and "20/20 frames, 1500 Gaussians" in lines.getvalue() and "\r" not in lines.getvalue()
    assert "\r" in bar.getvalue() and "20/20 frames" in bar.getvalue()


# ---- the real engine ------------------------------------------------------------------------------------------------------------

def real(room, out, seed=0):
    found = settings(None, {"eval.holdout_every": 5, "engine.threads": 1, "engine.seed": seed, "engine.backend": "cpu"}, ["train.steps_per_frame=8"])
    replay(ReplayOptions(str(room), str(out), {}, rate=None, refine_steps=30), found, screen=io.StringIO())
    return read_report(out)


def test_real_mapper_repeats_itself(room, tmp_path):
    """The same recording and seed: the same report but for wall-clock values, and the same map to the last bit."""
    a, b = real(room, tmp_path / "a"), real(room, tmp_path / "b")
    for found in (a, b):
        assert set(found["timing"]) >= {"stream_s", "refine_s", "steps_per_s", "evaluate_s", "process_bytes"}
        del found["seconds"], found["timing"]
    assert a == b
    assert (tmp_path / "a" / "map.ply").read_bytes() == (tmp_path / "b" / "map.ply").read_bytes()
    assert a["frames"]["in"] == 20 == a["frames"]["used"] + sum(a["frames"]["dropped"].values())
    assert a["gaussians"] > 500 and a["heldout_psnr"] > 15 and len(a["heldout"]) == 4 and a["train_psnr"] > a["heldout_psnr"] - 5
    assert a["vram_total"] == sum(a["vram"].values()) and a["backend"] == "cpu"


def test_a_second_recording_goes_on_with_the_map_of_the_first(room, tmp_path):
    from spirula_gpu.mapper import Mapper
    path, screen = tmp_path / "map.ckpt", io.StringIO()
    assign = (f"checkpoint.path={path}", "checkpoint.resume=true", "engine.threads=1", "engine.backend=cpu", "train.steps_per_frame=2")
    first, found, _ = run(room, tmp_path / "a", make=Mapper, assignments=assign, mesh=False, screen=screen)
    assert "is not there yet: a new map begins" in screen.getvalue() and first.world_frame
    second, again, _ = run(room, tmp_path / "b", make=Mapper, assignments=assign, mesh=False, screen=screen)
    assert f"resumed {path}: {found['gaussians']} Gaussians" in screen.getvalue() and second.world_frame == first.world_frame
    assert again["frames"]["in"] == 40 and again["steps"] > found["steps"]
    with pytest.raises(InputError, match=f"its map is in frame '{first.world_frame}', intake.map_frame is 'moon'"):
        run(room, tmp_path / "c", make=Mapper, assignments=(*assign, "intake.map_frame=moon"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        run(room, tmp_path / "c", make=Mapper, assignments=assign)


@pytest.mark.parametrize("rate", [None, 20.0])
def test_the_map_of_another_recording_is_not_gone_on_with_unless_told(room, tmp_path, rate):
    other, moved, renamed, path = tmp_path / "other", tmp_path / "moved", tmp_path / "renamed", tmp_path / "map.ckpt"
    make_bag(other, frames=20, size=(40, 30), fps=20, seed=1, say=lambda _: None)   # as many images, the same stamps
    shutil.copytree(room, renamed)
    with bags.open_bag(room) as bag, bags.BagWriter(moved) as copy:
        for message in bags.messages(bag, bags.pick_topics(bag)):
            if message.kind == "pose":
                (msg := message.msg).pose.position.x += 100
                copy.message(message.topic, message.type, msg, message.recv_ns)
            else:
                copy.message(message.topic, message.type, message.msg, message.recv_ns)

    def again(bag, *more):
        assign = (f"checkpoint.path={path}", "checkpoint.resume=true", "engine.threads=1", "engine.backend=cpu", "train.steps_per_frame=1", *more)
        return run(bag, tmp_path / "out", make=Mapper, assignments=assign, mesh=False, rate=rate)
    again(room)
    kept, results = path.read_bytes(), {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    with pytest.raises(InputError, match=r"map.ckpt: its map is of room \(first image [0-9a-f]{8}\): images of /camera/color/image_raw, poses of /camera/pose, this run of other .* --set checkpoint.any_source=true"):
        again(other)
    with pytest.raises(InputError, match=r"the first frame lies 100.0 m from the nearest keyframe of its map, which is seen from at most 40 m .* --set checkpoint.any_source=true"):
        again(moved)
    assert path.read_bytes() == kept and {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == results
    first, *_ = again(renamed)
    second, *_ = again(other, "checkpoint.any_source=true")
    third, *_ = again(moved, "checkpoint.any_source=true")
    assert all(mapper.resumed for mapper in (first, second, third))


def test_what_either_does_not_know_of_its_source_makes_no_difference():
    live, room, other = live_source("/a", "/p"), bag_source("room", b"1", "/a", "/p"), bag_source("x: (y) ", b"2", "/a", "/p")
    assert not any(other_source(*pair) for pair in ((live, room), (room, live), ("", room), (room, ""), (live, live), (room, bag_source("renamed", b"1", "/a", "/p"))))
    assert all(other_source(*pair) for pair in ((room, other), (live, live_source("/a", "/q")), (room, bag_source("room", b"1", "/b", "/p"))))


# ---------------------------------------------------------------------------------------------------------- points

@pytest.fixture(scope="module")
def lidar_room(tmp_path_factory):
    path = tmp_path_factory.mktemp("bags") / "lidar_room"
    make_bag(path, frames=20, size=(80, 60), fps=20, lines=32, say=lambda _: None)
    return path


def test_points_are_the_depth_where_there_are_no_depth_images(lidar_room, tmp_path):
    mapper, found, _ = run(lidar_room, tmp_path, rate=None)
    assert found["topics"]["/lidar/points"] == "points" and found["frames"]["dropped"] == {}
    assert len(mapper.frames) == 15 and all(0.2 < (f.depth_m > 0).mean() < 0.9 for f in mapper.frames)


def test_depth_may_be_ignored_or_asked_for_from_points(lidar_room, room, tmp_path):
    mapper, _, _ = run(lidar_room, tmp_path / "a", rate=None, assignments=["intake.depth=ignore"])
    assert all(f.depth_m is None for f in mapper.frames)
    mapper, found, _ = run(room, tmp_path / "b", rate=None, assignments=["intake.depth_source=points"])
    assert "/camera/depth/image_raw" not in found["topics"] and all(f.depth_m is None for f in mapper.frames), "there are none in this recording"


def test_the_room_is_mapped_from_points(lidar_room, tmp_path):
    """The real engine on real messages: about as good as from depth images."""
    from spirula_gpu.mapper import Mapper
    assignments = ["engine.backend=cpu", "engine.threads=1", "train.steps_per_frame=15"]
    dense = tmp_path / "dense_room"
    make_bag(dense, frames=20, size=(80, 60), fps=20, say=lambda _: None)
    psnr = {}
    for name, bag in (("points", lidar_room), ("image", dense)):
        _, found, _ = run(bag, tmp_path / name, Mapper, rate=None, mesh=False, assignments=assignments)
        assert found["frames"]["dropped"] == {} and found["gaussians"] > 1000
        psnr[name] = found["heldout_psnr"]
    assert psnr["points"] > psnr["image"] - 1.5 and psnr["points"] > 16, psnr
