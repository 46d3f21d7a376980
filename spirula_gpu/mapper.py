"""The mapper: frames in, a trained Gaussian map out. One thread owns the map; see docs/design.md for who owns what."""
from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from .camera import Camera, Frame
from .config import Config
from .keyframes import Gate, Keyframe, Keyframes
from .metrics import psnr, ssim
from .native import PARAMETERS, Engine, view
from .report import FrameLedger, Latest, MeshChunk, Snapshot, Status, VramReport
from .trainer import Trainer


@dataclass(frozen=True)
class Wants:
    """What has listeners: nothing else is computed."""
    render: bool = False
    mesh: bool = False
    render_period_s: float = 0.5


class HeldOut(NamedTuple):
    frame: Frame
    rgb: np.ndarray   # [H,W,3] uint8, rendered
    psnr: float       # dB
    ssim: float


class Inbox:
    """Frames on their way to the worker: bounded, the oldest is dropped. Owns its lock."""

    def __init__(self, ledger: FrameLedger):
        self._lock, self._frames, self._ledger = threading.Lock(), deque(), ledger
        self.arrived = threading.Event()

    def __len__(self) -> int:
        with self._lock:
            return len(self._frames)

    def put(self, frame: Frame, limit: int) -> None:
        with self._lock:
            self._frames.append((time.monotonic(), frame))
            while len(self._frames) > limit:
                self._frames.popleft()
                self._ledger.dropped("inbox_full")
        self.arrived.set()

    def take(self) -> tuple[float, Frame] | None:
        """(arrival time, frame), or None."""
        with self._lock:
            self.arrived.clear()
            return self._frames.popleft() if self._frames else None

    def drop_all(self, reason: str) -> None:
        with self._lock:
            self._ledger.dropped(reason, len(self._frames))
            self._frames.clear()


class Mapper:
    """See docs/design.md, "The Mapper, as callers see it". T0: the thread that submits. T1: the worker, or, without
    start(), the caller itself (inline mode: every choice then depends only on the frames and the seed)."""

    STEPS_PER_TICK = 5

    def __init__(self, config: Config = Config()):
        self.config = config
        self.ledger = FrameLedger()
        self.latest = Latest()
        self.wants = Wants()
        self._inbox = Inbox(self.ledger)
        self._gate = Gate()
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._status, self._vram = Latest(), Latest()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._begin_map()

    # ---- T0 -------------------------------------------------------------------------------------------------------
    def submit(self, frame: Frame) -> None:
        """Through the gate into the inbox. The receiver of the image has called ledger.arrived() before."""
        status = self._status.get()
        if status.state in ("error", "paused"):
            return self.ledger.dropped(status.state)
        reason = None if frame.held_out else self._gate.refuses(frame, self.config.gate)
        if reason:
            return self.ledger.dropped(reason)
        self._inbox.put(frame, self.config.gate.inbox_frames)

    def command(self, name: str, *args) -> Future:
        """Queue a command for T1 (inline mode: run it now): save_map(path), mesh(path), reset(), pause(bool),
        view(T_world_cam|None, camera|None), configure(Config), evaluate(), refine(seconds)."""
        future: Future = Future()
        if name not in ("save_map", "mesh", "reset", "pause", "view", "configure", "evaluate", "refine"):
            future.set_exception(ValueError(f"unknown command '{name}'"))
        elif self._thread is None:
            self._run_command(name, args, future)
        else:
            self._commands.put((name, args, future))
            self._inbox.arrived.set()
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
        self._inbox.arrived.set()
        if self._thread:
            self._thread.join()
            self._thread = None
        self._inbox.drop_all("shutdown")
        while not self._commands.empty():
            self._commands.get()[2].set_exception(RuntimeError("the mapper has stopped"))
        if self._status.get().state != "error":
            self._state = "stopped"
            self._tell()

    def close(self) -> None:
        self.stop()
        self._engine.close()

    # ---- T1 -------------------------------------------------------------------------------------------------------
    def _begin_map(self) -> None:
        e = self.config.engine
        self._engine = Engine(e.backend, sh_degree=e.sh_degree, max_gaussians=e.max_gaussians, budget_bytes=e.vram_budget_mb << 20,
                              threads=e.threads, device=e.device, arena_alias=e.arena_alias, arena_debug=e.arena_debug)
        self.backend = self._engine.backend
        self._trainer = Trainer(self._engine, self.config)
        self._keyframes = Keyframes(e.seed)
        self._held_out: list[Frame] = []
        self._measured: dict[int, tuple[float, float]] = {}
        self._view: tuple | None = None
        self._mesher, self._meshed = None, set()
        self._due, self._revision, self._next_id = 0, 0, 0
        self._refining: list[tuple[float, Future]] = []
        self._state, self._error, self._latency_ms, self._train_psnr = "waiting", "", float("nan"), float("nan")
        self._rate = deque(maxlen=20)
        self._last = dict(render=0.0, mesh=0.0, evaluate=0.0, tell=0.0)
        self._tell()

    def _work(self) -> None:
        try:
            while not self._stopping:
                if not self.tick():
                    self._inbox.arrived.wait(0.05)
        except Exception as e:  # a worker that dies must be seen everywhere
            self._state, self._error = "error", f"{type(e).__name__}: {e}"
            traceback.print_exc()
            self._tell()
            self._inbox.drop_all("error")

    def tick(self) -> bool:
        """One unit of work: commands, one frame, a few steps, housekeeping, a snapshot. False: nothing was to do."""
        busy = self._run_commands()
        busy |= self._take_frame()
        busy |= self._train()
        busy |= self._publish()
        return busy

    def run_due(self) -> None:
        """Inline mode: until the inbox and the due steps are empty. Idle training is left out."""
        while len(self._inbox) or self._due > 0:
            self.tick()

    def train(self, seconds: float | None = None, steps: int | None = None, progress=None) -> int:
        """Inline mode: refine for so long or so many steps; returns the steps made."""
        begin, made = time.monotonic(), 0
        while self._keyframes and (steps is None or made < steps) and (seconds is None or time.monotonic() - begin < seconds):
            self._steps(1)
            made += 1
            if progress:
                progress(self)
        self._tell()
        return made

    def _run_commands(self) -> bool:
        ran = False
        while not self._commands.empty():
            self._run_command(*self._commands.get())
            ran = True
        while self._refining and time.monotonic() >= self._refining[0][0]:
            self._refining.pop(0)[1].set_result(None)
        return ran

    def _run_command(self, name: str, args: tuple, future: Future) -> None:
        try:
            if name == "refine":
                if self._thread is None:
                    self.train(seconds=args[0])
                    return future.set_result(None)
                self._refining.append((time.monotonic() + args[0], future))
                return self._refining.sort(key=lambda r: r[0])
            future.set_result(getattr(self, f"_do_{name}")(*args))
        except Exception as e:  # the caller gets it; the map is still good
            future.set_exception(e)

    def _take_frame(self) -> bool:
        item = self._inbox.take() if self._state != "paused" else None
        if item is None:
            return False
        arrival, frame = item
        self._state = "running"
        if frame.held_out:
            self._held_out = [*self._held_out, frame][-self.config.eval.max_held_out:]
        else:
            keyframe = Keyframe(self._next_id, frame, self.config.train.blur_px2)
            self._next_id += 1
            self._trainer.insert(keyframe)
            self._keyframes.add(keyframe, self.config.train.max_keyframes)
            self._latency_ms = 1e3 * (time.monotonic() - arrival)
        self._due += self.config.train.steps_per_frame
        self.ledger.used()
        self._tell()
        return True

    def _train(self) -> bool:
        if self._state == "paused" or not self._keyframes:
            self._due = 0
            return False
        behind, idle = self._thread is not None and len(self._inbox) > 0, self._thread is not None and not len(self._inbox)
        most = 1 if behind else self.STEPS_PER_TICK  # a frame that waits comes first: dropping it loses more than a few steps
        n = min(self._due, most) if self._due > 0 else most if idle else 0
        self._steps(n)
        self._due -= min(n, self._due)
        return n > 0

    def _steps(self, n: int) -> None:
        for _ in range(n):
            self._trainer.step(self._keyframes)
        if n:
            self._rate.append((time.monotonic(), self._trainer.steps))

    # ---- what goes out ---------------------------------------------------------------------------------------------
    def _publish(self) -> bool:
        now, e = time.monotonic(), self.config.eval
        if self._thread is not None and e.period_s and self._held_out and self._due_at("evaluate", now, e.period_s):
            self._measure(self._held_out[self._revision % len(self._held_out)])
            self._revision += 1
        if now - self._last["tell"] > 0.2:
            self._tell()
        if not self._keyframes:
            return False
        if self.wants.render and self._due_at("render", now, self.wants.render_period_s):
            mesh = self.wants.mesh and self.config.mesh.period_s and self._due_at("mesh", now, self.config.mesh.period_s)
            self.latest.set(self._snapshot(self._update_mesh() if mesh else ()))
            return True
        if self.wants.mesh and self.config.mesh.period_s and self._due_at("mesh", now, self.config.mesh.period_s):
            self.latest.set(self._snapshot(self._update_mesh()))
            return True
        return False

    def _due_at(self, what: str, now: float, period_s: float) -> bool:
        if now - self._last[what] < period_s:
            return False
        self._last[what] = now
        return True

    def _render(self, camera: Camera, T_cam_world: np.ndarray):
        """rgb [H,W,3] uint8, depth_m [H,W] (0 where alpha < 0.5), alpha [H,W]."""
        v = view(camera, T_cam_world, self._engine.sh_degree, blur_px2=self.config.train.blur_px2)
        rgb, alpha, depth = (x[0] for x in self._engine.render(v))
        depth_m = np.where(alpha >= 0.5, depth / np.maximum(alpha, 1e-6), 0).astype(np.float32)
        return (np.clip(rgb, 0, 1) * 255 + 0.5).astype(np.uint8), depth_m, alpha

    def _snapshot(self, mesh: tuple[MeshChunk, ...]) -> Snapshot:
        newest = list(self._keyframes)[-1].frame
        T_world_cam, camera = self._view or (newest.T_world_cam, newest.camera)
        rgb, depth_m, alpha = self._render(camera, np.linalg.inv(T_world_cam).astype(np.float32))
        for a in (rgb, depth_m, alpha):
            a.flags.writeable = False
        self._revision += 1
        return Snapshot(self._revision, newest.stamp_ns, camera, T_world_cam, rgb, depth_m, alpha, self.status(), self.vram(), mesh)

    def _tell(self) -> None:
        """Publish status and memory to the other threads."""
        self._last["tell"] = time.monotonic()
        known = list(self._measured.values())
        mean = np.mean(known, axis=0) if known else (float("nan"), float("nan"))
        rate = 0.0
        if len(self._rate) > 1 and self._rate[-1][0] > self._rate[0][0]:
            rate = (self._rate[-1][1] - self._rate[0][1]) / (self._rate[-1][0] - self._rate[0][0])
        self._status.set(Status(
            state=self._state, gaussians=len(self._engine), keyframes=len(self._keyframes), held_out=len(self._held_out),
            steps=self._trainer.steps, steps_per_s=rate, loss=self._trainer.loss, train_psnr=self._train_psnr,
            heldout_psnr=float(mean[0]), heldout_ssim=float(mean[1]), latency_ms=self._latency_ms, last_error=self._error or self._trainer.problem))
        self._vram.set(self._engine.vram())

    def _measure(self, frame: Frame) -> HeldOut:
        rgb, _, _ = self._render(frame.camera, frame.T_cam_world)
        result = HeldOut(frame, rgb, psnr(frame.rgb, rgb), ssim(frame.rgb, rgb))
        self._measured[frame.stamp_ns] = (result.psnr, result.ssim)
        return result

    def evaluate(self) -> list[HeldOut]:
        """Inline mode: measure every held-out frame, and 32 training frames for Status.train_psnr."""
        results = [self._measure(frame) for frame in self._held_out]
        trained = [psnr(k.frame.rgb, self._render(k.frame.camera, k.frame.T_cam_world)[0]) for k in self._keyframes.spread(32)]
        self._train_psnr = float(np.mean(trained)) if trained else float("nan")
        self._tell()
        return results

    def _update_mesh(self) -> tuple[MeshChunk, ...]:
        """Fuse the rendered depth of keyframes that were not fused yet; chunks that changed."""
        from .mesh import TsdfMesher
        self._mesher = self._mesher or TsdfMesher(self.config.mesh)
        for k in [k for k in self._keyframes if k.id not in self._meshed][:8]:
            rgb, depth_m, _ = self._render(k.frame.camera, k.frame.T_cam_world)
            self._mesher.integrate(depth_m, rgb, k.frame.camera, k.frame.T_world_cam)
            self._meshed.add(k.id)
        return self._mesher.changed_chunks()

    # ---- commands ----------------------------------------------------------------------------------------------------
    def _do_save_map(self, path: str) -> int:
        from .ply import Splats, write_ply
        splats = Splats(*(self._engine.read(f"map.{name}") for name in PARAMETERS))
        write_ply(path, splats)
        return len(splats.means)

    def _do_mesh(self, path: str) -> None:
        """A fresh TSDF of the rendered depth of up to 300 keyframes."""
        from .mesh import TsdfMesher
        mesher = TsdfMesher(self.config.mesh)
        for k in self._keyframes.spread(300):
            rgb, depth_m, _ = self._render(k.frame.camera, k.frame.T_cam_world)
            mesher.integrate(depth_m, rgb, k.frame.camera, k.frame.T_world_cam)
        mesher.write_ply(path)

    def _do_reset(self) -> None:
        self._engine.close()
        self._inbox.drop_all("reset")
        self._gate.clear()
        self._begin_map()

    def _do_pause(self, paused: bool) -> None:
        self._state = "paused" if paused else "running" if self._keyframes else "waiting"
        self._tell()

    def _do_view(self, T_world_cam=None, camera=None) -> None:
        newest = list(self._keyframes)[-1].frame if self._keyframes else None
        if T_world_cam is not None and camera is None and newest is None:
            raise ValueError("view: no camera is known yet; give one or wait for the first frame")
        self._view = None if T_world_cam is None else (np.asarray(T_world_cam, float), camera or newest.camera)

    def _do_configure(self, config: Config) -> None:
        self.config = self._trainer.config = config

    def _do_evaluate(self) -> list[HeldOut]:
        return self.evaluate()
