"""`spirula replay`: a recording through Intake and Mapper in one process, without ROS, and the report at the end.

Lossless: one thread, frame after frame, steps counted and not timed: the same recording and seed give the same map.
At a rate: the mapper's own thread, frames at the times they were recorded, dropped when it cannot keep up.
"""
from __future__ import annotations

import contextlib
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Iterator, TextIO

from spirula_gpu.config import Config, rows
from spirula_gpu.correct import PathError

from . import bags
from .bag_topics import pick_topics
from .convert import BadMessage
from .errors import InputError
from .finish import wait_until_idle
from .intake import Intake, IntakeConfig
from .lens import resolved
from .progress import Progress, StopRequest
from .report import check_out, prepare_folder, remove_results, write_report
from .resume import REMEDY, bag_source, describe, far_from_map, intake_for, refuse_other_source
from .rig import cameras_of
from .settings import Settings
from .time_jump import TimeJump

SLICE_S, SLICE_STEPS = 0.5, 20  # refinement is done in pieces this large, between which the user may interrupt
IMAGE_KINDS = ("image", "compressed")
PAUSED_S = 0.02                 # between looks at whether a paused mapper goes on


@dataclass(frozen=True)
class ReplayOptions:
    bag: str
    out: str
    topics: dict[str, str | None]   # overrides for bags.pick_topics
    rate: float | None = 1.0        # None: lossless
    max_seconds: float | None = None
    refine_seconds: float = 0.0
    refine_steps: int = 0
    mesh: bool = True


def replay(options: ReplayOptions, settings: Settings, make_mapper: Callable[[Config], Any] | None = None, screen: TextIO | None = None) -> str:
    """Runs it, writes the report and returns its sentence. Raises InputError, NativeError (the engine cannot start), and
    RuntimeError if the mapper fails on the way."""
    screen = screen or sys.stderr
    with bags.open_bag(options.bag) as bag:
        topics = pick_topics(bag, overrides_for(settings, options.topics), settings.ros)
        settings = with_source(settings, bag, topics)
        check_out(options.out, options.bag, settings.ros.output.map_file, options.mesh, settings.config)
        out = prepare_folder(options.out)
        for note in topics.notes:
            print(note, file=screen)
        if make_mapper is None:
            from spirula_gpu.mapper import Mapper as make_mapper
        mapper = make_mapper(settings.config)
        try:
            for line in describe(mapper.resumed, settings.config.checkpoint):
                print(line, file=screen)
            with StopRequest(options.max_seconds) as stop:
                run = Run(bag, topics, mapper, options, settings, stop)
                with viewer(run, settings, screen), watching(mapper, bag.count(topics), screen) as progress:
                    timing = run.train(progress)
                    outcome, failed = "", ""
                    try:
                        outcome = run.report(out, timing)
                    except InputError as error:
                        failed = str(error)
                    finally:
                        unsaved = run.save()   # also when the report has failed
        finally:
            mapper.close()
    if failed or unsaved:
        raise InputError("; ".join(filter(None, (failed, unsaved, "" if failed else f"the other results are in '{options.out}'"))))
    for text in filter(None, (run.problem, *run.intake.unused())):
        print(f"warning: {text}", file=screen)
    if mapper.ledger.counts().used == 0:
        raise InputError(f"{options.bag}: not one frame could be used{run.stopped()}; " + run.intake.describe_silence().replace("\n", "; "))
    return outcome


@contextlib.contextmanager
def viewer(run: Run, settings: Settings, screen: TextIO) -> Iterator[None]:
    """The live viewer, while the replay lasts and web.enabled says so. Raises InputError."""
    if not settings.ros.web.enabled:
        yield
        return
    from .web import Named, Viewer
    web = Viewer(run.mapper, settings.ros.web, note=lambda: run.intake.last_problem, save_to=settings.ros.output.map_path, drive=True,
                 named=Named("--set web.host", "--web PORT", "--set web.token"))
    print(f"viewer: {web.url}", file=screen, flush=True)
    try:
        yield
    finally:
        web.close()


class Run:
    """One recording on its way through one mapper. stopped_early: '' | max_seconds | interrupted; problem: '' or what is
    wrong with the recording's end."""

    def __init__(self, bag: bags.Bag, topics: bags.Topics, mapper: Any, options: ReplayOptions, settings: Settings, stop: StopRequest):
        self.bag, self.topics, self.mapper, self.options, self.settings, self.stop = bag, topics, mapper, options, settings, stop
        self.driver = Lossless(mapper, stop) if options.rate is None else Live(mapper, stop)
        self.intake = Intake(intake_for(mapper.resumed, intake_config_for(settings, topics)), mapper.ledger, self._take, settings.config.eval.holdout_every,
                             clock=None if options.rate is None else time.monotonic, correct=self._correct if topics.path else None,
                             cameras=cameras_of(settings.ros) if topics.rig else ("",), restarted=time_jump_of(settings, mapper).restarted,
                             refuses=self.driver.refuses)
        self.problem, self.stopped_early, self.images_sent = "", "", 0
        self._begun = False

    def train(self, progress: Progress) -> dict[str, float]:
        """The stream and the refinement after it. Returns how long they took."""
        started = time.monotonic()
        try:
            self._stream(progress)
        except bags.BagError as error:
            self.problem = str(error)
        self.intake.flush()
        self.driver.settle()
        streamed = time.monotonic()
        self._refine(progress)
        seconds = time.monotonic() - started
        return {"seconds": round(seconds, 3), "stream_s": round(streamed - started, 3), "refine_s": round(seconds - (streamed - started), 3),
                "steps_per_s": round(self.mapper.status().steps / max(seconds, 1e-9), 2)}

    def _stream(self, progress: Progress) -> None:
        """Every message to the intake, in recorded order, at the rate."""
        rate, first_ns, begin = self.options.rate, None, time.monotonic()
        for message in bags.messages(self.bag, self.topics):
            if rate is not None:
                first_ns = message.recv_ns if first_ns is None else first_ns
                self.stop.sleep_until(begin + (message.recv_ns - first_ns) / 1e9 / rate)
            if self.stop.reason:
                self.stopped_early = self.stop.reason
                return
            try:
                self.intake.on(message.kind, message.msg, camera=self.topics.camera_of(message.topic))
            except BadMessage as error:
                self.intake.refused(message.kind, error, self.topics.camera_of(message.topic))
            self.mapper.world_frame = self.intake.map_frame
            self.images_sent += message.kind in IMAGE_KINDS
            progress.show(1)

    def _take(self, frame) -> None:
        if not self._begun:
            if not self.settings.config.checkpoint.any_source and (far := far_from_map(self.mapper.resumed, frame.T_world_cam)):
                raise InputError(f"{far} {REMEDY}")
            self._begin()
        self.driver.take(frame)

    def _begin(self) -> None:
        """From here on the results are of this run; one that is refused before leaves those of an earlier one."""
        remove_results(Path(self.options.out), self.settings.ros.output.map_file, self.options.mesh)
        self._begun = True

    def _correct(self, *path) -> None:
        """A corrected path; when it is not used the mapper's hint says why."""
        self.mapper.command("correct", *path).add_done_callback(self._corrected)

    def _corrected(self, done) -> None:
        if not isinstance(done.exception(), (PathError, type(None))):
            self.problem = f"a corrected path failed: {type(done.exception()).__name__}: {done.exception()}"

    def _refine(self, progress: Progress) -> None:
        """Training after the stream, until the first of the given limits."""
        limit_s, limit_steps = self.options.refine_seconds, self.options.refine_steps
        if not (limit_s or limit_steps) or not self.mapper.status().keyframes:
            return
        begin, first = time.monotonic(), self.mapper.status().steps
        while True:
            seconds, steps = time.monotonic() - begin, self.mapper.status().steps - first
            share = max(seconds / limit_s if limit_s else 0, steps / limit_steps if limit_steps else 0)
            if share >= 1:
                return
            if self.stop.reason:
                self.stopped_early = self.stopped_early or self.stop.reason
                return
            self.driver.train(min(limit_s - seconds, SLICE_S) if limit_s else None, min(limit_steps - steps, SLICE_STEPS) if limit_steps else SLICE_STEPS, share)
            progress.show(0)

    def report(self, out: Path, timing: dict[str, float]) -> str:
        if not self._begun:   # no frame came
            self._begin()
        extra = {"bag": Path(self.options.bag).name, "mode": "lossless" if self.options.rate is None else f"rate {self.options.rate:g}",
                 "topics": self.topics.chosen(), "images_sent": self.images_sent, "images": self.bag.images(self.topics), "stopped_early": self.stopped_early, "bag_problem": self.problem,
                 "last_problem": self.intake.last_problem, "config": {name: value for name, value, _ in rows(self.settings.config)}}
        return write_report(out, self.mapper, ask=self.driver.ask, seconds=timing.pop("seconds"), timing=timing, extra=extra, mesh=self.options.mesh,
                            map_file=self.settings.ros.output.map_file)

    def stopped(self) -> str:
        """What ended the stream before the recording did, for a message; '' when nothing did."""
        if not self.stopped_early:
            return ""
        why = f"--max-seconds {self.options.max_seconds:g} ended it, give more" if self.stopped_early == "max_seconds" else self.stopped_early
        return f" ({why}, after {self.images_sent} of {self.bag.images(self.topics)} images)"

    def save(self) -> str:
        """The checkpoint, when checkpoint.path names one and there is a map: '' or why it was not saved."""
        path = self.settings.config.checkpoint.path
        if not path or not self.mapper.status().gaussians:
            return ""
        try:
            self.driver.ask("save_checkpoint", path)
        except OSError as error:
            return f"the checkpoint was not saved to {path}: {error.strerror}"
        return ""


def overrides_for(settings: Settings, overrides: dict[str, str | None]) -> dict[str, str | None]:
    """For bags.pick_topics: options first, then the topics that parameters name; with the depth that the user wants from points, depth images are
    not looked for."""
    topics, named = settings.ros.topics, {}
    for row, kind in {"image": "compressed" if topics.image.endswith("/compressed") else "image", "camera_info": "info", "depth": "depth", "points": "points",
                      "mask": "mask", "path": "path", "pose": "odom" if settings.ros.intake.pose_source == "odom" else "pose"}.items():
        if f"topics.{row}" in settings.given and overrides.get(kind) is None:
            named[kind] = getattr(topics, row)
    if "intake.depth_source" in settings.given and settings.ros.intake.depth_source == "points":
        named["depth"] = ""
    return {**overrides, **named}


def with_source(settings: Settings, bag: bags.Bag, topics: bags.Topics) -> Settings:
    """The same, with checkpoint.source of this recording. Raises InputError when a checkpoint of another would be resumed."""
    pose_source, image = intake_config_for(settings, topics).pose_source, topics.image or topics.compressed
    first = next(bags.messages(bag, bags.Topics(image=image))).raw
    source = bag_source(bag.path.resolve().name, first, ", ".join(topics.images), "tf" if pose_source == "tf" else getattr(topics, pose_source))
    checkpoint = replace(settings.config.checkpoint, source=source)
    refuse_other_source(checkpoint)
    return settings._replace(config=replace(settings.config, checkpoint=checkpoint))


def intake_config_for(settings: Settings, topics: bags.Topics) -> IntakeConfig:
    """The intake's rows, with the source of poses, and the use of depth and masks that the recording allows, unless the user said so."""
    config = settings.ros.intake
    if "intake.depth_source" not in settings.given and topics.points and not topics.depth:
        config = replace(config, depth_source="points")
    if "intake.mask" not in settings.given and topics.mask:
        config = replace(config, mask="require")
    if "intake.pose_source" not in settings.given:
        config = replace(config, pose_source=topics.pose_source)
    if "intake.depth" not in settings.given and not (topics.points if config.depth_source == "points" else topics.depth):
        config = replace(config, depth="ignore")
    return resolved(config, topics.image or topics.compressed)


def time_jump_of(settings: Settings, mapper: Any) -> TimeJump:
    """Raises InputError."""
    try:
        return TimeJump(settings.ros, mapper.command, mapper.status, lambda text: print(text, file=sys.stderr))
    except ValueError as error:
        raise InputError(str(error)) from None


class Lossless:
    """Drives a mapper without a thread: whatever a frame is due is done before the next one is read. When a viewer pauses it all wait, until it is resumed or
    `stop` has a reason, and no frame is lost."""
    def __init__(self, mapper: Any, stop: StopRequest):
        self.mapper, self.stop = mapper, stop

    def take(self, frame) -> None:
        self.mapper.submit(frame)
        self._work_off()

    def refuses(self, *image) -> bool:
        if not self.mapper.refuses(*image):
            return False
        self._work_off()   # as after a frame that is taken
        return True

    def _work_off(self) -> None:
        self.mapper.run_due()
        while self.mapper.status().state == "paused" and not self.stop.reason:
            time.sleep(PAUSED_S)
            self.mapper.run_due()

    def settle(self) -> None:
        self._work_off()
        self.ask("drain")

    def train(self, seconds: float | None, steps: int, share: float) -> None:
        self._work_off()   # what a viewer asks for; no frame waits and no step is due
        if not self.stop.reason:
            self.mapper.train(seconds=seconds, steps=steps, part=(share, share))

    def ask(self, name: str, *args: Any) -> Any:
        future = self.mapper.command(name, *args)
        while not future.done():
            self.mapper.tick()
        return future.result()


class Live:
    """Drives a mapper that has its own thread."""
    def __init__(self, mapper: Any, stop: StopRequest):
        self.mapper, self.stop = mapper, stop
        mapper.start()

    def take(self, frame) -> None:
        self._check()
        self.mapper.submit(frame)

    def refuses(self, *image) -> bool:
        self._check()
        return self.mapper.refuses(*image)

    def _check(self) -> None:
        if self.mapper.status().state == "error":
            raise RuntimeError(self.mapper.status().last_error)

    def settle(self) -> None:
        wait_until_idle(self.mapper, self.stop)
        self.ask("drain")

    def train(self, seconds: float | None, steps: int, share: float) -> None:
        self.ask("refine", min(seconds or SLICE_S, SLICE_S), (share, share))

    def ask(self, name: str, *args: Any) -> Any:
        return self.mapper.command(name, *args).result()


def watching(mapper: Any, messages: int, screen: TextIO) -> Progress:
    """The progress of a mapper, or of what has its `status()` and `vram()`, through so many messages."""
    def figures() -> str:
        s = mapper.status()
        measured = "" if math.isnan(s.heldout_psnr) else f"held-out {s.heldout_psnr:.2f} dB, "
        return (f"{s.frames.used}/{s.frames.frames_in} frames, {s.gaussians} Gaussians, {s.steps} steps ({s.steps_per_s:.1f}/s), loss {s.loss:.4f}, "
                f"{measured}{mapper.vram().total / 2**20:.0f} MiB")
    return Progress(messages, screen, figures, lambda: mapper.status().hint)
