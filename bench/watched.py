"""A Mapper with a clock at its stages, and pictures of the held-out frames at chosen times."""
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from spirula_gpu import Config, Frame, Mapper
from spirula_gpu.keyframes import Keyframe
from spirula_gpu.output import HeldOut


@dataclass
class Look:
    """The held-out frames that had come, as the map showed them then."""
    phase: str        # stream | corrected | refine
    wall_s: float     # since the first frame
    steps: int
    gaussians: int
    renders: list     # as HeldOut.of takes them, at poses corrected as those of the keyframes about them
    given: list       # .. and at their poses as given, where they differ and someone asked
    aligned: list     # .. and where their own images say that they are: what the map is worth, wherever it lies

    def held_out(self) -> list[HeldOut]:
        with ThreadPoolExecutor() as pool:  # numpy and OpenCV let go of the interpreter
            return list(pool.map(lambda seen: HeldOut.of(*seen), self.renders))

    def figures(self) -> dict:
        """Means over those frames; null where there are none."""
        each = [(h.psnr, h.cc_psnr, h.ssim) for h in self.held_out()]
        means = [round(float(x), 4) for x in np.mean(each, axis=0)] if each else [None] * 3
        given = {name: round(float(np.mean([HeldOut.of(*seen).psnr for seen in renders])), 4) for name, renders in (("given_psnr", self.given), ("aligned_psnr", self.aligned)) if renders}
        return dict(phase=self.phase, wall_s=round(self.wall_s, 3), steps=self.steps, gaussians=self.gaussians, held_out=len(each),
                    **dict(zip(("psnr", "cc_psnr", "ssim"), means)), **given)


class WatchedMapper(Mapper):
    """A Mapper with a clock at its stages and renders of the held-out frames at chosen times; it maps as any other."""

    def __init__(self, config: Config):
        self.stages = {name: [0, 0.0] for name in ("gate", "align", "insert", "step", "evaluate")}  # calls, seconds
        self.looks, self.begun, self._look_at = [], time.monotonic(), []
        super().__init__(config)

    @contextmanager
    def _timed(self, stage: str, calls: int = 1):
        begin = time.perf_counter()
        yield
        entry = self.stages[stage]
        entry[0], entry[1] = entry[0] + calls, entry[1] + time.perf_counter() - begin

    def submit(self, frame: Frame) -> None:
        with self._timed("gate", not frame.held_out):
            super().submit(frame)

    def _add(self, frame: Frame) -> None:
        if frame.held_out:
            return super()._add(frame)
        align = self.stages["align"]
        before, begin = align[1], time.perf_counter()
        super()._add(frame)  # on a GPU the first of it waits for the step that runs
        insert = self.stages["insert"]
        insert[0], insert[1] = insert[0] + 1, insert[1] + time.perf_counter() - begin - (align[1] - before)

    def _begin_map(self) -> None:
        super()._begin_map()
        refine, track = self._trainer.refine, self._trainer.refinement.track

        def timed(keyframe):
            with self._timed("align"):  # pose and exposure, at arrival and again
                refine(keyframe)

        def tracked(*args):
            with self._timed("align", 0):
                track(*args)
        self._trainer.refine, self._trainer.refinement.track = timed, tracked

    def _steps(self, n: int, behind: bool = False) -> None:
        with self._timed("step", n):
            super()._steps(n, behind)

    def tick(self) -> bool:
        if self._look_at and time.monotonic() >= self._look_at[0]:
            self._look_at.pop(0)
            self.look("stream")
        return super().tick()

    def begin(self, look_after_s: list[float]) -> None:
        """Now comes the first frame; look at these times after it."""
        self.begun = time.monotonic()
        self._look_at = [self.begun + s for s in look_after_s]

    def look(self, phase: str, given: bool = False) -> None:
        """On the thread that owns the map. Rendering alone: what the pictures are worth is worked out at the end."""
        wall_s = time.monotonic() - self.begun
        with self._timed("evaluate", len(self._held_out)):
            gains = self._keyframes.log_gain_at([f.stamp_ns for f in self._held_out])
            seen = lambda frames: [(f, self._output.render(f.camera, f.T_cam_world)[0], gain) for f, gain in zip(frames, gains)]
            placed = [self._keyframes.placed(f) for f in self._held_out]
            moved = given and any(f is not p for f, p in zip(self._held_out, placed))
            renders, renders_given, aligned = seen(placed), seen(self._held_out) if moved else [], seen(map(self._aligned, placed)) if moved else []
        self.looks.append(Look(phase, wall_s, self._trainer.steps, len(self._engine), renders, renders_given, aligned))

    def _aligned(self, frame: Frame) -> Frame:
        r, keyframe = self._trainer.refinement, Keyframe(-1, frame, 0.0)
        counts = r.state()
        for _ in range(3):
            r._align(keyframe)
        r.resume(counts)
        return keyframe.frame

    def stage_ms(self) -> dict:
        """Mean wall milliseconds: of a frame through the gate, a keyframe's pose and exposure found, a keyframe inserted but for that, a step (with what is aligned on the way), a held-out frame rendered."""
        return {name: dict(calls=int(calls), ms=round(1e3 * seconds / max(calls, 1), 4), seconds=round(seconds, 3))
                for name, (calls, seconds) in self.stages.items()}

    def memory(self) -> dict:
        """Bytes: of the engine by category, of the keyframes' images on the host, of this process."""
        report = self.vram()
        resident = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))
        return dict(engine=report.total, categories={name: capacity for name, (_, capacity) in sorted(report.categories.items())},
                    device_process=report.process, pinned=report.pinned, keyframes=self._keyframes.bytes, resident=resident)
