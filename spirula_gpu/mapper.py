"""The mapper: frames in, a trained Gaussian map out. One thread owns the map; see docs/design.md for who owns what."""
from __future__ import annotations

import math
import os
import queue
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from . import checkpoint
from .camera import Camera, Frame
from .checkpoint import HELD_OUT, KEYFRAME, WAITING, Past, Resumed, Stored
from .checkpoint_file import CheckpointError, Reader
from .config import Config, replaced
from .correct import Corrected, PathError, as_one, motions
from .formats import read_start_map
from .gate import Gate
from .inbox import Inbox
from .keyframes import Keyframe, Keyframes, correct
from .mesh import MeshError
from .multiview import MultiView
from .native import Engine, NativeError, largest_map
from .output import MESH_FRAMES, HeldOut, Output, Progress, nothing_told
from .ply import check_path
from .points import fill
from .report import CameraPath, FrameLedger, Latest, Snapshot, SplatSnapshot, Status, VramReport
from .splats import FormatError, Splats
from .track import Moments, Track
from .trainer import Trainer, refused
from .trajectory import write_poses_of

HURRY_FRAMES = 2  # while so many wait for a worker, a keyframe's pose and exposure are taken from those before it and found when it is trained
ENDED_S = 3.0   # a worker that has got no frame for so long does not let keyframes wait for better neighbours any more


COMMANDS = ("save_map", "load_map", "save_poses", "save_checkpoint", "mesh", "reset", "pause", "view", "render", "configure", "evaluate", "refine", "drain", "correct")


def same(a: Frame, b: Frame) -> bool:
    """One frame that came twice: in one lap, or with the same image in another (a looped recording)."""
    return (a.sensor, a.stamp_ns) == (b.sensor, b.stamp_ns) and (a.lap == b.lap or np.array_equal(a.rgb, b.rgb))


Part = tuple[float, float]   # from which share of a refinement to which
WHOLE: Part = (0.0, 1.0)


def between(part: Part, share: float) -> float:
    return part[0] + min(share, 1.0) * (part[1] - part[0])


class Refining(NamedTuple):
    """A refinement that somebody asked for."""
    begin: float   # time.monotonic()
    end: float
    first_step: int    # Trainer.steps
    steps: float       # infinite: no such limit
    part: Part
    future: Future

    def over(self, now: float, steps: int) -> bool:
        return now >= self.end or steps >= self.first_step + self.steps or self.future.cancelled()


@dataclass(frozen=True)
class Wants:
    """What has listeners: nothing else is computed."""
    render: bool = False
    mesh: bool = False
    path: bool = False
    render_period_s: float = 0.5
    splats: int = 0             # a viewer takes so many Gaussians at most
    splats_period_s: float = 2.0


def settle(future: Future, outcome) -> None:
    """Answer a future, whose holder may have cancelled it and which may have been answered already."""
    try:
        future.set_exception(outcome) if isinstance(outcome, BaseException) else future.set_result(outcome)
    except InvalidStateError:
        pass


class Mapper:
    """See docs/design.md, "The Mapper, as callers see it". T0: the thread that submits. T1: the worker, or, without
    start(), the caller itself (inline mode: every choice then depends only on the frames and the seed)."""

    STEPS_PER_TICK = 5
    SAVING_SHARE = 0.05   # of the time, at most, goes into periodic checkpoints
    SHOWING_SHARE = 0.05  # .. and into copies of the map for a viewer
    PATH_PERIOD_S = 1.0   # between messages of the keyframes' poses, at least
    VIEWER_POSES = 100    # keyframes that a viewer gets

    def __init__(self, config: Config = Config()):
        try:
            check_path("checkpoint.path", config.checkpoint.path)
        except ValueError as e:
            raise CheckpointError(str(e)) from None
        self.config = config
        self.ledger = FrameLedger()
        self.latest, self.splats, self.path = Latest(), Latest(), Latest()   # Snapshot, SplatSnapshot, CameraPath
        self.wants = Wants()
        self._inbox = Inbox(self.ledger)
        self._gate, self._track, self._submitting = Gate(), Track(), threading.Lock()  # a frame is through the gate and in the inbox, or neither
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._status, self._vram = Latest(), Latest()
        self._thread: threading.Thread | None = None
        self._stopping, self._revision, self._maps = False, 0, 0
        self.world_frame = ""                     # T0 may say: the name of the map's frame, for the checkpoint
        self.resumed: Resumed | None = None
        self._first_lap = 0                       # of the frames that come, lap 0: what was resumed may have had some before
        self._begin_map()
        if config.checkpoint.resume and not config.checkpoint.path:
            raise CheckpointError("checkpoint.resume is true, but checkpoint.path is empty: it must name the file")
        if config.checkpoint.resume and os.path.exists(config.checkpoint.path):
            self.resume(config.checkpoint.path)
        elif config.train.start_map:
            try:
                self._start_from(config.train.start_map)
            except BaseException:
                self._engine.close()
                raise

    # ---- T0 -------------------------------------------------------------------------------------------------------
    def refuses(self, stamp_ns: int, T_world_cam: np.ndarray, sensor: int = 0, lap: int = 0) -> bool:
        """Before the pixels of a frame that is not held out are made: True, and it is counted under its reason, if by its pose [4,4] alone submit() would drop it."""
        state = self._status.get().state
        if state in ("error", "paused"):
            self.ledger.dropped(state)
            return True
        lap += self._first_lap
        with self._submitting:
            if self._gate.is_new(stamp_ns, T_world_cam, sensor, lap, self.config.gate):
                return False
            self._track.add(stamp_ns, T_world_cam, sensor, lap)
        self.ledger.dropped("not_keyframe")
        return True

    def submit(self, frame: Frame) -> None:
        """Through the gate into the inbox. The receiver of the image has called ledger.arrived() before."""
        status = self._status.get()
        if status.state in ("error", "paused"):
            return self.ledger.dropped(status.state)
        if self._first_lap:
            frame = replace(frame, lap=frame.lap + self._first_lap)
        with self._submitting:
            self._track.add(frame.stamp_ns, frame.T_world_cam, frame.sensor, frame.lap)
            reason = None if frame.held_out else self._gate.refuses(frame, self.config.gate)
            if reason:
                return self.ledger.dropped(reason)
            self._inbox.put(frame, self.config.gate.inbox_frames)
        if self._status.get().state == "error":   # it failed meanwhile
            self._inbox.drop_all("error")

    def command(self, name: str, *args) -> Future:
        """Queue a command for T1 (inline mode: run it now): save_map(path), load_map(path), save_poses(path), save_checkpoint(path), mesh(path, voxel_m, progress), reset(lap), pause(bool),
        view(T_world_cam|None, camera|None), render(T_world_cam, camera), configure({dotted name: value}), evaluate(), refine(seconds, part, steps), drain(), correct(stamps, poses, sensors)."""
        if self._thread is not None or name not in COMMANDS:
            return self.post(name, *args)
        future: Future = Future()
        self._run_command(name, args, future)
        return future

    def post(self, name: str, *args) -> Future:
        """As command, but never on the caller's thread: in inline mode it waits for the next tick(). For a viewer's threads."""
        future: Future = Future()
        if name not in COMMANDS:
            settle(future, ValueError(f"unknown command '{name}'"))
            return future
        self._commands.put((name, args, future))
        self._inbox.wake.set()
        if self._stopping or self._status.get().state == "error":   # it stopped meanwhile
            self._refuse_commands()
        return future

    def status(self) -> Status:
        return replace(self._status.get(), frames=self.ledger.counts(), inbox_frames=len(self._inbox))

    def vram(self) -> VramReport:
        return self._vram.get()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="spirula-mapper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the worker; afterwards the caller may work inline (evaluate, save_map, ...)."""
        self._stopping = True
        self._inbox.wake.set()
        if self._thread:
            self._thread.join()
            self._thread = None
        self._inbox.drop_all("shutdown")
        self._refuse_commands()
        if self._status.get().state != "error":
            self._state = "stopped"
            self._tell()

    def _refuse_commands(self) -> None:
        """Nobody will run what is still queued: say so to those who wait."""
        why = RuntimeError(f"the mapper has stopped{': ' + self._error if self._error else ''}")
        self._end_refining(why)
        while True:
            try:
                settle(self._commands.get_nowait()[2], why)
            except queue.Empty:
                return

    def _end_refining(self, why: Exception) -> None:
        for refining in self._refining:
            settle(refining.future, why)
        self._refining.clear()

    def close(self) -> None:
        self.stop()
        self._engine.close()

    # ---- T1 -------------------------------------------------------------------------------------------------------
    def _begin_map(self) -> None:
        e = self.config.engine
        self._engine = Engine(e.backend, sh_degree=e.sh_degree, max_gaussians=e.max_gaussians, budget_bytes=e.vram_budget_mb << 20,
                              threads=e.threads, device=e.device, arena_alias=e.arena_alias, arena_debug=e.arena_debug, precision=e.precision, antialiased=e.antialiased)
        self.backend = self._engine.backend
        self._trainer, self._output = Trainer(self._engine, self.config), Output(self._engine, self.config)
        self._keyframes, self._multiview = Keyframes(e.seed), MultiView(self._engine)
        self._held_out: list[Frame] = []
        self._view: tuple[np.ndarray | None, Camera | None] = (None, None)   # None: the newest keyframe's
        self._due = self._next_id = self._evaluated = self._corrections = 0
        self._owners: list[tuple[int, int, int]] = []   # moment of each keyframe there has been, by its id
        self._refining: list[Refining] = []   # the one that ends last is the last
        self._problem, self._unsaved, self._budget_hint, self._path_hint, self._can_mesh, self._saved, self._saving_s = "", "", "", "", True, None, 0.0
        self._state, self._error, self._latency_ms, self._train_psnr = "waiting", "", float("nan"), float("nan")
        self._rate = deque(maxlen=20)
        self._shown, self._showing_s, self._path_shown = None, 0.0, None
        self._last = dict(frame=time.monotonic(), render=0.0, mesh=0.0, splats=0.0, path=0.0, evaluate=0.0, tell=0.0, checkpoint=time.monotonic())
        self._tell()

    def _work(self) -> None:
        try:
            while not self._stopping:
                if not self.tick():
                    self._inbox.wake.wait(0.05)
        except Exception as e:  # a worker that dies must be seen everywhere
            self._state, self._error = "error", f"{type(e).__name__}: {e}"
            traceback.print_exc()
            self._tell_status()
            self._inbox.drop_all("error")
            self._refuse_commands()

    def tick(self) -> bool:
        """One unit of work: commands, one frame, a few steps, housekeeping, a snapshot. False: nothing was to do."""
        busy = self._run_commands()
        busy |= self._take_frame()
        busy |= self._triangulate(self._ended())
        busy |= self._train()
        busy |= self._publish()
        self._save_if_due()
        return busy

    def run_due(self) -> None:
        """Inline mode: one tick, and more until the inbox and the due steps are empty; while it is paused they stay as they are. Idle training is left out."""
        self.tick()
        while self._state != "paused" and (len(self._inbox) or self._due > 0):
            self.tick()
        while self._state != "paused" and self._triangulate():
            pass
        self._tell()   # the caller counts steps

    def train(self, seconds: float | None = None, steps: int | None = None, progress=None, part: Part = WHOLE) -> int:
        """Inline mode: refine for so long or so many steps; returns the steps made. part: from which share of the whole refinement
        to which this call is; the rates fall over the whole (refine.lr_final)."""
        begin, made = time.monotonic(), 0
        over = lambda: max(made / steps if steps else steps is not None, (time.monotonic() - begin) / seconds if seconds else seconds is not None)
        self._do_drain()
        while self._keyframes and (share := over()) < 1:
            self._trainer.refined = between(part, share)
            self._steps(1)
            made += 1
            if progress:
                progress(self)
        self._trainer.refined = 0.0
        self._tell()
        return made

    def _run_commands(self) -> bool:
        ran = False
        while not self._commands.empty():
            self._run_command(*self._commands.get())
            ran = True
        now = time.monotonic()
        if self._refining:
            last = self._refining[-1]
            self._trainer.refined = between(last.part, (now - last.begin) / (last.end - last.begin))
        for refining in [r for r in self._refining if r.over(now, self._trainer.steps)]:
            self._refining.remove(refining)
            self._tell_status()
            settle(refining.future, self._trainer.steps - refining.first_step)
        return ran

    def _run_command(self, name: str, args: tuple, future: Future) -> None:
        try:
            if name == "refine":
                return self._begin_refining(future, *args)
            settle(future, getattr(self, f"_do_{name}")(*args))
        except Exception as e:  # the caller gets it; the map is still good
            settle(future, e)

    def _begin_refining(self, future: Future, seconds: float, part: Part = WHOLE, steps: int = 0) -> None:
        """The future is answered after so many seconds or, if not 0, steps: with the number of steps made."""
        if self._thread is None:
            return settle(future, self.train(seconds=seconds, steps=steps or None, part=part))
        now = time.monotonic()
        self._refining.append(Refining(now, now + max(seconds, 1e-3), self._trainer.steps, steps or math.inf, part, future))
        self._refining.sort(key=lambda r: r.end)

    def _take_frame(self) -> bool:
        item = self._inbox.take() if self._state != "paused" else None
        if item is None:
            return False
        arrival, frame = item
        self._state = "running"
        if not self._refining:
            self._trainer.refined = 0.0   # idle training after a refinement went on at the rates that it had come to: whole ones would undo it
        try:
            self._add(frame)
        except Exception:
            self.ledger.dropped("error")
            raise
        self._last["frame"] = time.monotonic()
        self._latency_ms = 1e3 * (self._last["frame"] - arrival)
        self._due += self.config.train.steps_per_frame
        self.ledger.used()
        self._tell()
        return True

    def _add(self, frame: Frame) -> None:
        if frame.held_out:
            if frame.mask is not None and not frame.mask.any():
                return  # nothing of it can be measured
            # A resumed replay plays its recording from the start again, and so does a looped one: a frame that is there already counts once.
            gone = [f for f in self._held_out if same(f, frame)]
            held_out = [f for f in self._held_out if not same(f, frame)] + [replace(frame, depth_m=None)]
            excess = max(len(held_out) - self.config.eval.max_held_out, 0)
            for old in gone + held_out[:excess]:
                self._output.forget(old)
            self._held_out = held_out[excess:]
            return
        keyframe = Keyframe(self._next_id, frame, self.config.train.blur_px2)
        if not self._keyframes:
            self._budget_hint = self._hint_of_budget(frame.camera)
        else:
            if self.config.refine.exposure and (before := self._keyframes.newest_of(frame.sensor)):
                keyframe.expose(before.log_gain)   # until the map says, as the next
            if (placed := self._keyframes.placed(frame)) is not frame:
                keyframe.place(placed.T_world_cam)
        self._next_id += 1
        self._owners.append(frame.moment)
        self._trainer.refinement.track(keyframe, self._keyframes)
        if self._thread is None or len(self._inbox) < HURRY_FRAMES:   # else when it is trained
            self._trainer.refine(keyframe)
        if frame.depth_m is None:
            self._multiview.wait(keyframe)
        else:
            self._multiview.measured(keyframe)
            self._trainer.insert(keyframe, fill(frame.depth_m))
        self._keyframes.add(keyframe, self.config.train)
        self._trainer.refinement.centre(self._keyframes)

    def _ended(self) -> bool:
        """No frame has come for long. Without a worker the clock says nothing: frames come when the caller is ready; it says drain()."""
        return self._thread is not None and not len(self._inbox) and time.monotonic() - self._last["frame"] > ENDED_S

    def _triangulate(self, ended: bool = False) -> bool:
        """Depth from several views, and Gaussians from that, where keyframes wait for it: at most one sweep."""
        if self._state == "paused" or not self._multiview.waiting:
            return False
        found = self._multiview.step(self._keyframes, ended)
        for keyframe, depth_m in found or ():
            self._trainer.refine(keyframe)   # the map knows its exposure better than at its arrival
            self._trainer.insert(keyframe, depth_m)
        if found:
            self._trainer.refinement.centre(self._keyframes)
        return found is not None

    def _hint_of_budget(self, camera: Camera) -> str:
        """That the budget will end the map's growth before engine.max_gaussians does; empty: it will not."""
        e = self.config.engine
        if not e.vram_budget_mb:
            return ""
        n = largest_map(e.vram_budget_mb << 20, self.backend, most=e.max_gaussians, width=camera.width, height=camera.height, max_gaussians=e.max_gaussians,
                        sh_degree=e.sh_degree, precision=e.precision, threads=e.threads, arena_alias=e.arena_alias)
        if n == e.max_gaussians:
            return ""
        return (f"about {n} Gaussians and what training on {camera.width}x{camera.height} images takes fit into engine.vram_budget_mb {e.vram_budget_mb}, not "
                f"engine.max_gaussians {e.max_gaussians}" + (": the map will stay below that" if n else "; raise the budget or use smaller images"))

    def _train(self) -> bool:
        if self._state == "paused":   # what is due stays due
            return False
        if not self._keyframes or not len(self._engine):
            self._due = 0
            return False
        behind, idle = self._thread is not None and len(self._inbox) > 0, self._thread is not None and not len(self._inbox)
        most = 1 if behind else self.STEPS_PER_TICK  # a frame that waits comes first: dropping it loses more than a few steps
        n = min(self._due, most) if self._due > 0 else most if idle else 0
        self._steps(n, self._behind())
        self._due -= min(n, self._due)
        return n > 0 and not self._trainer.starved

    def _behind(self) -> bool:
        """Frames come faster than their steps are made. What is still due when the stream has ended is trained at full size."""
        t = self.config.train
        return self._thread is not None and 0 < t.half_behind * t.steps_per_frame < self._due and not self._ended()

    def _steps(self, n: int, behind: bool = False) -> None:
        self._trainer.refinement.timed = self._thread is not None
        for _ in range(n):
            self._trainer.step(self._keyframes, behind)
        if n:
            self._output.moved(self._trainer.refinement.level(self._keyframes))
            self._rate.append((time.monotonic(), self._trainer.steps))

    # ---- what goes out ---------------------------------------------------------------------------------------------
    def _publish(self) -> bool:
        """What listeners want. That it cannot be made is no reason to stop mapping; `hint` says why."""
        try:
            return self._publish_due()
        except NativeError as e:
            if not refused(e):
                raise
            self._problem = str(e)
        except MeshError as e:
            self._problem, self._can_mesh = str(e), False
        return False

    def _publish_due(self) -> bool:
        now, e = time.monotonic(), self.config.eval
        if self._thread is not None and e.period_s and self._held_out and self._due_at("evaluate", now, e.period_s):
            self._evaluated += 1
            frame = self._held_out[self._evaluated % len(self._held_out)]
            self._output.measure(self._keyframes.placed(frame), self._log_gain(frame))
        if now - self._last["tell"] > 0.2:
            self._tell()
        self._show_splats(now)
        self._show_path(now)
        if not self._keyframes:
            return False
        mesh = self.wants.mesh and self._can_mesh and self.config.mesh.period_s > 0 and self._due_at("mesh", now, self.config.mesh.period_s)
        render = self.wants.render and self._due_at("render", now, self.wants.render_period_s)
        if mesh:
            self._output.update_mesh(self._keyframes)
        if mesh or render:
            self.latest.set(self._snapshot())
        return bool(mesh or render)

    def _show_splats(self, now: float) -> None:
        """The map for a viewer, when it has changed."""
        w, state = self.wants, (self._trainer.steps, self._next_id, len(self._engine))
        if not w.splats or not len(self._engine) or state == self._shown:
            return
        if not self._due_at("splats", now, max(w.splats_period_s, self._showing_s / self.SHOWING_SHARE)):
            return
        begin, keyframes = time.monotonic(), self._keyframes.spread(self.VIEWER_POSES)   # now: before the measurement of this call
        poses = np.array([k.frame.T_world_cam for k in keyframes]).reshape(-1, 4, 4)
        self.splats.set(SplatSnapshot(self._trainer.steps, self._output.splats(w.splats), len(self._engine), poses, keyframes[-1].frame.camera if keyframes else None))
        self._shown, self._showing_s = state, time.monotonic() - begin

    def _show_path(self, now: float) -> None:
        """The keyframes' poses, when some came or moved."""
        state = self._next_id, self._trainer.refinement.aligned, self._corrections
        if not self.wants.path or not self._keyframes or state == self._path_shown or not self._due_at("path", now, self.PATH_PERIOD_S):
            return
        sensor = self._keyframes.shown.frame.sensor   # of one camera: a path that goes to and fro between several is none
        known = sorted((k.frame for k in self._keyframes if k.frame.sensor == sensor), key=lambda frame: frame.moment)
        self.path.set(CameraPath(np.array([f.stamp_ns for f in known], np.int64), np.stack([f.T_world_cam for f in known])))
        self._path_shown = state

    def _due_at(self, what: str, now: float, period_s: float) -> bool:
        if now - self._last[what] < period_s:
            return False
        self._last[what] = now
        return True

    def _snapshot(self) -> Snapshot:
        newest = self._keyframes.shown.frame
        T_world_cam, camera = self._view[0], self._view[1] or newest.camera
        T_world_cam = newest.T_world_cam if T_world_cam is None else T_world_cam
        images = self._output.render(camera, np.linalg.inv(T_world_cam).astype(np.float32))
        for a in images:
            a.flags.writeable = False
        self._revision += 1
        return Snapshot(self._revision, newest.stamp_ns, camera, T_world_cam, *images, self.status(), self.vram(), self._output.mesh(), self._maps)

    def _tell(self) -> None:
        """Publish status and memory to the other threads."""
        self._tell_status()
        self._vram.set(self._engine.vram())

    def _tell_status(self) -> None:
        self._last["tell"] = time.monotonic()
        heldout_psnr, heldout_ssim, heldout_cc_psnr = self._output.heldout_means()
        rate = 0.0
        if len(self._rate) > 1 and self._rate[-1][0] > self._rate[0][0]:
            rate = (self._rate[-1][1] - self._rate[0][1]) / (self._rate[-1][0] - self._rate[0][0])
        self._status.set(Status(
            state=self._state, gaussians=len(self._engine), keyframes=len(self._keyframes), held_out=len(self._held_out),
            steps=self._trainer.steps, steps_per_s=rate, loss=self._trainer.loss, train_psnr=self._train_psnr,
            heldout_psnr=heldout_psnr, heldout_ssim=heldout_ssim, heldout_cc_psnr=heldout_cc_psnr, latency_ms=self._latency_ms, last_error=self._error,
            corrections=self._corrections, poses_refined=self._trainer.refinement.aligned, poses_refused=self._trainer.refinement.refused, keyframes_unfit=self._keyframes.unfit,
            hint="; ".join(text for text in (self._trainer.hint, self._multiview.hint, self._problem, self._unsaved, self._budget_hint, self._path_hint) if text)))

    def evaluate(self) -> list[HeldOut]:
        """Inline mode: measure every held-out frame that there is memory to render, and 32 training frames for Status.train_psnr."""
        results = [self._unless_refused(self._output.measure, self._keyframes.placed(frame), self._log_gain(frame)) for frame in self._held_out]
        train_psnr = self._unless_refused(self._output.train_psnr, self._keyframes.spread(32))
        self._train_psnr = float("nan") if train_psnr is None else train_psnr
        self._tell()
        return [r for r in results if r]

    def _log_gain(self, frame: Frame) -> np.ndarray:
        return self._keyframes.log_gain_at(frame.stamp_ns, frame.sensor, frame.lap)

    def _unless_refused(self, make, *args):
        """make(*args), or None where there is no memory for it; `hint` says so."""
        try:
            return make(*args)
        except NativeError as e:
            if not refused(e):
                raise
            self._problem = str(e)
            return None

    def _start_from(self, path: str) -> None:
        """The Gaussians of a file, before the first frame. Raises FormatError, one line, and NativeError."""
        try:
            self._begin_with(read_start_map(path, self.config.engine), path)
        except FormatError as e:
            raise FormatError(f"train.start_map {e}") from None

    def _begin_with(self, splats: Splats, path: str) -> None:
        """The Gaussians of the file, into the empty map. Raises FormatError, one line, and NativeError."""
        try:
            self._trainer.begin_with(splats)
        except NativeError as e:
            if not refused(e):
                raise
            raise FormatError(f"{path}: {len(splats.means)} Gaussians do not fit: {e}; thin the map with `spirula convert --min-opacity`") from None
        if splats.antialiased != self.config.engine.antialiased:
            self._trainer.hint = (f"{path} was trained {'with' if splats.antialiased else 'without'} the 2D mip filter, as far as it says, and is drawn "
                                  f"{'without' if splats.antialiased else 'with'} it until training has adapted it; engine.antialiased={splats.antialiased} draws it as it was")
        self._tell()

    # ---- checkpoints ---------------------------------------------------------------------------------------------------
    def resume(self, path: str) -> Resumed:
        """Before start() and the first frame: go on with the map of a checkpoint, under the parameters of this run. Raises
        CheckpointError, one line, and NativeError; the map is empty then."""
        if self._thread is not None or self._keyframes or len(self._engine):
            raise RuntimeError("resume() comes before start() and before the first frame")
        try:
            with Reader(path) as reader:
                self.resumed = self._take_over(reader)
        except BaseException:
            self._engine.close()
            self._begin_map()
            raise
        self._state, self._last["frame"] = "running", time.monotonic()
        self._tell()
        return self.resumed

    def _take_over(self, reader: Reader) -> Resumed:
        facts, changed, waiting = reader.facts, checkpoint.changed(reader, self.config), []
        if "engine.vram_budget_mb" in changed:
            checkpoint.check_budget(reader, self.config.engine, self.backend)
        checkpoint.read_rows(reader, self._engine)
        for kind, frame, id, loss, T_given, log_gain, steps in checkpoint.read_frames(reader):
            if kind == KEYFRAME:
                keyframe = Keyframe(id, frame, self.config.train.blur_px2)
                keyframe.loss, keyframe.T_given, keyframe.steps = loss, T_given, steps
                if self.config.refine.exposure:
                    keyframe.expose(log_gain)
                self._keyframes.add(keyframe, self.config.train)
            else:
                {HELD_OUT: self._held_out, WAITING: waiting}[kind].append(frame)
        self._trainer.resume(facts["trainer"], self._keyframes)
        if any(name.startswith("engine.") for name in changed):
            self._trainer.new_limits()
        self._keyframes.resume(facts["keyframes"])
        self._due, self._next_id, self._evaluated, self._corrections = (int(facts["counters"][name]) for name in ("due", "next_id", "evaluated", "corrections"))
        gated, past, counts = checkpoint.read_gate(reader), checkpoint.read_past(reader), checkpoint.read_counts(reader)
        self._owners = list(map(tuple, past.owners.table().tolist()))
        lost, frame_name = counts.pending - len(waiting), str(facts["world_frame"])
        if lost < 0 or not self._keyframes:
            reader.refuse(f"{counts} frames, {len(waiting)} of them waiting, {len(self._keyframes)} keyframes: that does not add up")
        if len(self._owners) != self._next_id:
            reader.refuse(f"{len(self._owners)} owners for {self._next_id} keyframes")
        self._gate.resume(gated)   # from here on nothing is refused
        self._multiview.resume(facts["multiview"], self._keyframes)
        self._track, self._first_lap = past.track, past.track.lap
        self.world_frame = frame_name
        self.ledger.resume(counts)
        self.ledger.dropped("lost_at_restart", lost)
        for frame in waiting:
            self._inbox.put(frame, self.config.gate.inbox_frames)
        centers = np.array([k.frame.T_world_cam[:3, 3] for k in self._keyframes])
        return Resumed(reader.path, len(self._engine), len(self._keyframes), self._trainer.steps, lost, frame_name, gated.last_stamp_ns, changed,
                       str(facts["config"].get("checkpoint.source", "")), centers, 2 * self.config.insert.max_depth_m * self._trainer.unit_m)

    def _do_save_checkpoint(self, path: str) -> int:
        if not (len(self._engine) and self._keyframes):
            raise ValueError(f"the map is empty; {path} was not touched" if not len(self._engine) else f"no frame has come yet, the map is as its file; {path} was not touched")
        with self._submitting:
            gated, waiting, seen, track = self._gate.state(), self._inbox.frames(), self.ledger.counts(), self._track.copy()
        frames = [Stored(KEYFRAME, k.frame, k.id, k.loss, k.T_given, k.log_gain, k.steps) for k in self._keyframes]
        frames += [Stored(HELD_OUT, frame) for frame in self._held_out] + [Stored(WAITING, frame) for frame in waiting]
        facts = dict(world_frame=self.world_frame, trainer=self._trainer.state(), keyframes=self._keyframes.state(), multiview=self._multiview.state(), frames_seen=seen._asdict(),
                     counters=dict(due=self._due, next_id=self._next_id, evaluated=self._evaluated, corrections=self._corrections))
        return checkpoint.write_map(path, self._engine, frames, gated, Past(track, Moments.rows(self._owners)), self.config, facts)

    def _save_if_due(self) -> None:
        """That it cannot be written is no reason to stop mapping; `hint` says why."""
        c, begin, now = self.config.checkpoint, time.monotonic(), (self._trainer.steps, self._next_id)
        if not (c.path and c.period_s and len(self._engine) and self._keyframes) or now == self._saved:
            return
        if not self._due_at("checkpoint", begin, max(c.period_s, self._saving_s / self.SAVING_SHARE)):
            return
        try:
            self._do_save_checkpoint(c.path)
            self._saved, self._unsaved, self._saving_s = now, "", time.monotonic() - begin
        except (OSError, CheckpointError) as e:
            self._unsaved = f"the checkpoint could not be written: {e}"

    # ---- commands ----------------------------------------------------------------------------------------------------
    def _do_save_map(self, path: str) -> int:
        return self._output.save_map(path)

    def _do_save_poses(self, path: str) -> int:
        """Of the keyframes, as they are now (refined), in the order in which they came; returns how many."""
        return write_poses_of(path, [k.frame for k in self._keyframes])

    def _do_load_map(self, path: str) -> int:
        """The Gaussians of a file instead of the map; returns how many. Raises FormatError: the map is as it was, or, when they do not fit into memory, empty."""
        splats = read_start_map(path, self.config.engine)
        self._do_reset()
        try:
            self._begin_with(splats, path)
        except FormatError as e:
            raise FormatError(f"{e}; the map is empty") from None
        return len(splats.means)

    def _do_mesh(self, path: str, voxel_m: float = 0.0, progress: Progress = nothing_told) -> tuple[int, int]:
        """Writes it; voxel_m 0: as configured. progress(keyframes fused, of how many) is called on this thread; what it raises ends the work and leaves the file
        as it was. Returns how many vertices and triangles it has. Raises ValueError when there is no Gaussian or no keyframe yet."""
        keyframes = self._keyframes.spread(MESH_FRAMES)
        if not (len(self._engine) and keyframes):
            raise ValueError(f"{len(self._engine)} Gaussians, {len(keyframes)} keyframes: there is nothing to make a mesh of; {path} was not touched")
        return self._output.write_mesh(path, keyframes, voxel_m, progress)

    def _do_reset(self, lap: int | None = None) -> None:
        """Begin anew; lap: frames of that lap (as they were submitted), which may wait already, are of the new map."""
        old, paused, view = self._engine, self._state == "paused", self._view
        self._end_refining(RuntimeError("the map was reset"))
        self._begin_map()
        self._view, self._maps = view, self._maps + 1
        old.close()
        with self._submitting:
            self._gate.clear()
            self._track = Track() if lap is None else self._track.copy(lap + self._first_lap)
            self._inbox.drop("reset", lambda frame: lap is None or frame.lap < lap + self._first_lap)
        self.latest.set(None)
        self.splats.set(None)
        self.path.set(CameraPath(np.empty(0, np.int64), np.empty((0, 4, 4))))   # for who has the old one
        if paused:
            self._do_pause(True)

    def _do_pause(self, paused: bool) -> None:
        self._state = "paused" if paused else "running" if self._keyframes else "waiting"
        self._last["frame"] = time.monotonic()
        self._tell()

    def _do_drain(self) -> None:
        """The stream has ended, for now: keyframes that wait for depth get it from what there is, or are given up. Not while paused."""
        while self._triangulate(ended=True):
            pass
        self._tell()

    def _do_view(self, T_world_cam=None, camera: Camera | None = None) -> None:
        self._view = (None if T_world_cam is None else np.asarray(T_world_cam, float), camera)

    def _do_render(self, T_world_cam: np.ndarray, camera: Camera) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The map from there, once: rgb [H,W,3] uint8, depth_m [H,W] float32 (0 where alpha < 0.5), alpha [H,W] float32."""
        return self._output.render(camera, np.linalg.inv(T_world_cam).astype(np.float32))

    def _do_configure(self, values: dict[str, Any]) -> None:
        """By name, so that two who change different parameters do not undo each other. Raises ValueError, and changes nothing."""
        config = replaced(self.config, values)
        if not config.refine.exposure:   # nothing would keep the gains up
            for keyframe in self._keyframes:
                keyframe.expose(np.zeros(3))
        if config.refine.pose and not self.config.refine.pose:
            self._trainer.refinement.track_again(self._keyframes)
        self.config = self._trainer.config = self._trainer.refinement.config = config

    def _do_correct(self, stamps: np.ndarray, poses: np.ndarray, sensors: np.ndarray | None = None) -> Corrected:
        """A corrected path of the cameras, stamps [n] int64 ns, poses [n,4,4] T_world_cam and sensors [n] (None: all of camera 0): every frame of the newest lap, of any
        camera, that it moves visibly moves, each Gaussian with the keyframe that made it; what moved is trained anew. Raises PathError when the path cannot be meant, and changes nothing; nor does it when the Gaussians cannot be moved."""
        if not self._keyframes:   # the path of what was before
            return Corrected(0, 0, 0)
        scale = self._output.image_scale(self._keyframes)
        try:
            with self._submitting:
                track = self._track.copy()
            if not motions(track, stamps, poses, scale, sensors).moved.any():   # a long path takes a while: frames come in meanwhile
                return self._nothing_moved()
            with self._submitting:
                found, given = motions(self._track, stamps, poses, scale, sensors), self._track.poses.copy()
        except PathError as e:
            self._path_hint = f"the corrected path was not used: {e}"
            self._tell_status()
            raise
        self._path_hint = ""
        G = self._keyframes.settled(found, scale, fixed=self._trainer.refinement.given)
        moves = found if G is None else as_one(found, G, given, scale)
        gaussians = self._trainer.correct(moves, Moments.rows(self._owners), as_one=G is not None)   # first: it is what may fail, and takes so long that frames come in meanwhile
        with self._submitting:
            found.apply(self._track)
            self._gate.correct(found)
            self._inbox.replace(found.place)
        keyframes = correct(list(self._keyframes), found, moves, as_one=G is not None)
        self._multiview.correct(found, moves, self._keyframes)
        self._held_out = [found.place(frame) for frame in self._held_out]
        self._output.restart_mesh()
        self._corrections += 1
        self._tell()
        return Corrected(int(found.moved.sum()), keyframes, gaussians)

    def _nothing_moved(self) -> Corrected:
        self._path_hint = ""
        self._tell_status()
        return Corrected(0, 0, 0)

    def _do_evaluate(self) -> list[HeldOut]:
        return self.evaluate()
