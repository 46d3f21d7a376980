"""`spirula train`: posed images on the disk -> map, without ROS: read, trained offline on the engine, reported. spirula_gpu/offline.py is what trains."""
from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from spirula_gpu.config import replaced, rows
from spirula_gpu.dataset import HOLDOUT_EVERY, Scene, SceneError
from spirula_gpu.native import NativeError
from spirula_gpu.offline import Figures, OfflineConfig, OfflineRun, TrainingSet, check_words
from spirula_gpu.output import HeldOut
from spirula_gpu.ply import write_atomically
from spirula_gpu.trajectory import write_poses

from .arguments import EXPORTS
from .errors import InputError
from .progress import Progress, StopRequest
from .report import Written, compare_picture, described, prepare_folder, without_nan, write_png, write_renders
from .report_page import write_page
from .scenes import read_scene
from .settings import read_assignments
from .share import version

SLICE_S = 0.2  # training is done in pieces about so long, between which the user may interrupt


@dataclass(frozen=True)
class TrainOptions:
    data: str
    out: str
    size: tuple[int, int] | None = None     # None: as the images are
    hold_out: int = HOLDOUT_EVERY           # every so many-th image only measures; 0: none
    measure_at: tuple[int, ...] = ()        # steps, beside the last one
    export: str = "ply"
    rig: dict[str, Any] = field(default_factory=dict)   # as of scenes.read_rgbd

    @property
    def map_file(self) -> str:
        return f"map.{self.export}"


def train_config(options: dict[str, Any], assignments: list[str]) -> OfflineConfig:
    """options: {dotted name: value or None}, None = not given; assignments: 'name=value', which count more. Raises InputError."""
    values = {name: value for name, value in options.items() if value is not None}
    values.update(read_assignments(assignments, rows(OfflineConfig()), "spirula train --list"))
    try:
        config = replaced(OfflineConfig(), values)
        check_words(config)
    except ValueError as error:
        raise InputError(str(error)) from None
    return config


def list_parameters() -> str:
    """A line for each row of OfflineConfig."""
    return "\n".join(f"{name} = {value} {f.metadata['unit']}  [{f.metadata['low']}, {f.metadata['high']}]  {f.metadata['help']}" for name, value, f in rows(OfflineConfig()))


def train(options: TrainOptions, config: OfflineConfig, screen: TextIO | None = None) -> str:
    """Runs it, writes the results and returns one sentence about them. Raises InputError, and NativeError when the engine cannot start; when it
    refuses on the way, what is there is written first."""
    screen, last = screen or sys.stderr, config.schedule.max_steps
    if beyond := [mark for mark in options.measure_at if mark > last]:
        raise InputError(f"--eval {beyond[0]} is beyond the last step: 0..{last} (--steps)")
    check_out(options)
    started = time.monotonic()
    scene = read_scene(options.data, say=lambda line: print(line, file=screen), **options.rig)
    try:
        note = hold_out_note(options.hold_out, len(scene.names))
        data = TrainingSet(scene.frames(options.size, options.hold_out), scene.extent, scene.points, scene.colors)
        out, camera = prepare_folder(options.out), data.train[0].camera
        print(f"{len(data.train)} images and {len(data.held_out)} held out, {camera.width}x{camera.height}, {len(scene.points):,} sparse points, "
              f"depth {'yes' if scene.depths else 'no'}" + note, file=screen, flush=True)
        read_s = time.monotonic() - started
        with OfflineRun(data, config) as run, StopRequest(None) as stop:
            remove_earlier(out)
            begun_with = len(run.engine)
            figures, stopped = steps(run, {*options.measure_at, last}, stop, screen)
            held_out = list(run.held_out())
            figures.append(run.figures([(h.psnr, h.cc_psnr, h.ssim) for h in held_out]))
            report = compose(options, run, figures, held_out, begun_with, stopped, read_s)
            write_results(out, options, run, scene, report, held_out)
    except SceneError as error:
        raise InputError(f"{options.data}: {error}") from None
    said = sentence(report, out)
    if stopped not in ("", "interrupted"):
        raise InputError(f"{stopped}; what was there after step {run.step} of {last} is written: {said}")
    return said


def check_out(options: TrainOptions) -> None:
    """That the results do not mix with the images. Raises InputError."""
    out, data = Path(options.out).resolve(), Path(options.data).resolve()
    if out == data:
        raise InputError(f"OUT {options.out} is DATA itself: its files and the results would mix; choose another OUT")
    if data in out.parents and out.is_dir() and not (out / "report.json").exists() and any(out.iterdir()):
        raise InputError(f"OUT {options.out} is a folder of DATA that holds other files: they and the results would mix; choose another OUT")


def hold_out_note(every: int, images: int) -> str:
    """That no image measures though one should; '' when one does. Raises InputError when none trains."""
    if every == 1:
        raise InputError(f"--hold-out 1 leaves none of {images} images to train with: give 2 or more, or 0 to hold out none")
    most = 2 * images - 1   # held out is index % every == every // 2
    return f"; --hold-out {every} holds out none of {images} images, so nothing is measured; 2 to {most} would" if every > most else ""


def remove_earlier(out: Path) -> None:
    """What an earlier run left there: beside this one's report it would be taken for its own."""
    for name in ("report.json", "compare.png", "report.html", "poses.txt", *(f"map.{suffix}" for suffix in EXPORTS)):
        (out / name).unlink(missing_ok=True)
    write_renders(out / "renders", [])


# ---- training --------------------------------------------------------------------------------------------------------

def steps(run: OfflineRun, marks: set[int], stop: StopRequest, screen: TextIO) -> tuple[list[Figures], str]:
    """Up to the last mark. The figures of the marks before it that were reached, and why it ended early: '' | interrupted | what the engine refused."""
    figures, last, pace = [], max(marks), Pace(run)

    def line() -> str:
        measured = f"held-out {figures[-1].psnr:.2f} dB, " if figures and run.data.held_out else ""
        return (f"step {run.step}/{last} ({pace.steps_per_s:.1f}/s, {left(last - run.step, pace.steps_per_s)} left), loss {run.loss:.4f}, {measured}"
                f"{len(run.engine)} Gaussians, {run.engine.vram().total / 2**20:.0f} MiB")
    with Progress(last, screen, line) as progress:
        for mark in sorted(marks):
            while run.step < mark:
                if stop.reason:
                    return figures, stop.reason
                before = run.step
                try:
                    run.train(until=min(mark, before + pace.piece))
                except NativeError as error:
                    if not run.step:
                        raise
                    return figures, str(error)
                pace.went(run.step - before)
                progress.show(run.step - before)
            if mark != last:
                figures.append(run.evaluate())
    return figures, ""


class Pace:
    """How fast steps are made now, and how many take SLICE_S. Growth makes them slower, so what is long past does not count."""

    def __init__(self, run: OfflineRun):
        self._run, self._trained_s, self.steps_per_s, self.piece = run, 0.0, float("nan"), 1

    def went(self, n: int) -> None:
        now = n / max(self._run.train_s - self._trained_s, 1e-6)
        self.steps_per_s = now if self._run.step == n else 0.9 * self.steps_per_s + 0.1 * now
        self._trained_s, self.piece = self._run.train_s, max(1, min(2 * n, int(now * SLICE_S)))


def left(n: int, steps_per_s: float) -> str:
    seconds = round(n / steps_per_s)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}" if seconds >= 3600 else f"{seconds // 60}:{seconds % 60:02d}"


# ---- results ---------------------------------------------------------------------------------------------------------

def compose(options: TrainOptions, run: OfflineRun, figures: list[Figures], held_out: list[HeldOut], begun_with: int, stopped: str, read_s: float) -> dict:
    """The content of report.json; wall-clock values are under `timing`, and ms_per_step in `curve`."""
    f, vram, camera, defaults = figures[-1], run.engine.vram(), run.data.train[0].camera, dict((name, value) for name, value, _ in rows(OfflineConfig()))
    return without_nan({
        "data": Path(options.data).resolve().name, "images": len(run.data.train), "width": camera.width, "height": camera.height, "extent": run.data.extent,
        "begun_with": begun_with, "gaussians": f.gaussians, "relocated": run.growth.relocated, "added": run.growth.added,
        "steps": run.step, "steps_due": run.config.schedule.max_steps, "stopped_early": stopped,
        "heldout_psnr": f.psnr, "heldout_ssim": f.ssim, "heldout_cc_psnr": f.cc_psnr,
        "heldout": [{"index": h.frame.stamp_ns, "name": h.frame.frame_id, "psnr": h.psnr, "ssim": h.ssim, "cc_psnr": h.cc_psnr} for h in held_out],
        "curve": [point._asdict() for point in figures],
        "map_file": options.map_file, "vram": {category: capacity for category, (_, capacity) in sorted(vram.categories.items())}, "vram_total": vram.total,
        "image_bytes": f.image_bytes, "backend": run.engine.backend, "version": version(),
        "timing": {"read_s": round(read_s, 3), "train_s": round(run.train_s, 3), "ms_per_step": round(f.ms_per_step, 3), "process_bytes": vram.process},
        "settings": {name: value for name, value, _ in rows(run.config) if value != defaults[name]}, "config": {name: value for name, value, _ in rows(run.config)}})


def write_results(out: Path, options: TrainOptions, run: OfflineRun, scene: Scene, report: dict, held_out: list[HeldOut]) -> None:
    """Every file, the map first: it cannot be made again. Cameras are those of the images in the files. Raises InputError that says what is written."""
    files = Written(out)
    files.write(options.map_file, lambda path: run.save(str(path)))
    posed = [(i * 10**9, camera, T) for i, (camera, T) in enumerate(zip(scene.cameras, scene.T_world_cam))]
    files.write("poses.txt", write_poses, posed)
    files.write("cameras", write_poses, posed, scene.names)
    files.write("report.json", write_atomically, (json.dumps(report, indent=2) + "\n").encode())
    files.write("renders", write_renders, held_out)
    if held_out:
        files.write("compare.png", write_png, compare_picture(held_out))
    files.write("report.html", write_page, report, sentence(report, out))


def sentence(report: dict, out: Path) -> str:
    """One line about a report of `compose`."""
    timing, due = report["timing"], report["steps_due"]
    of, why = "" if report["steps"] == due else f" of {due}", f"; {report['stopped_early']}" if report["stopped_early"] == "interrupted" else ""
    return (f"{report['gaussians']} Gaussians, {report['steps']} steps{of} in {timing['train_s']:.0f} s ({timing['ms_per_step']:.2f} ms each) "
            f"on {report['images']} images; {described(report)}{why}; {out}/report.json")
