"""What a run leaves behind: report.json, renders/<stamp_ns>.png of the held-out frames, compare.png, report.html, the map, poses.txt, mesh.ply.

The same for `spirula replay`, in one process or through topics. Every file appears whole or not at all. report.json holds wall-clock
values (and the process's own memory) under `seconds` and `timing` only, so that two runs that did the same are equal elsewhere.
"""
from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable

import cv2
import numpy as np

from spirula_gpu.config import Config
from spirula_gpu.ply import write_atomically

from .errors import InputError
from .report_page import write_page
from .share import version

COMPARE_FRAMES = 4
ERROR_FULL_SCALE = 0.25  # mean absolute difference of the channels that gets the brightest colour
PANEL_WIDTH = 480

Ask = Callable[..., Any]  # (command name, *arguments) -> its result


def prepare_folder(out: str | Path) -> Path:
    """The folder, made and proved writable before any work. Raises InputError."""
    out = Path(out)
    try:
        (out / "renders").mkdir(parents=True, exist_ok=True)
        probe = out / "renders" / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write into '{out}': {error.strerror}; choose another folder (--out; of a node output.report_dir)") from None
    return out


def results(out: str | Path, map_file: str, mesh: bool) -> list[Path]:
    """The files that a run writes there, but renders/."""
    return [Path(out) / name for name in ("report.json", "compare.png", "report.html", "poses.txt", map_file, *(["mesh.ply"] if mesh else []))]


def check_out(out: str | Path, bag: str | Path, map_file: str, mesh: bool, config: Config) -> None:
    """That the results do not take the place of what the run begins with, nor lie among the files of the recording. Raises InputError."""
    bag = Path(bag).resolve()
    if Path(out).resolve() in (bag, bag.parent if (bag.parent / "metadata.yaml").exists() else bag):
        raise InputError(f"--out {out} is the recording itself: its files and the results would mix; choose another --out")
    written = {path.resolve() for path in results(out, map_file, mesh)}
    for name, path in (("train.start_map", config.train.start_map), ("checkpoint.path", config.checkpoint.path)):
        if path and Path(path).resolve() in written:
            raise InputError(f"{name} {path} is one of the files that this run would write over in '{out}': choose another --out")


def remove_results(out: Path, map_file: str, mesh: bool = True) -> None:
    """What an earlier run left there, of the files that this one would write: beside its report they would be taken for its own."""
    for path in results(out, map_file, mesh):
        path.unlink(missing_ok=True)
    write_renders(out / "renders", [])


def write_report(out: str | Path, mapper, *, ask: Ask | None = None, seconds: float | None = None, timing: dict | None = None,
                 extra: dict | None = None, mesh: bool = True, map_file: str = "map.ply") -> str:
    """Saves the map, measures the held-out frames and writes everything else. Returns one sentence about the outcome. Raises InputError that says what
    is written when something cannot be, and what the mapper's commands raise. ask: how to have a command done; default: by the mapper's thread."""
    out = prepare_folder(out)
    ask, write = ask or (lambda name, *args: mapper.command(name, *args).result()), Written(out).write
    saved = lambda command: lambda path: _through_temporary(path, lambda temporary: ask(command, temporary))
    if mapper.status().gaussians:   # first what cannot be made again
        write(map_file, saved("save_map"))
    if mapper.status().keyframes:
        write("poses.txt", saved("save_poses"))
    started = time.monotonic()
    held_out = ask("evaluate")
    timing = {**(timing or {}), "evaluate_s": round(time.monotonic() - started, 3), "process_bytes": mapper.vram().process}
    report = compose(mapper, held_out, seconds, timing, extra or {})
    write("report.json", write_atomically, (json.dumps(report, indent=2) + "\n").encode())
    write("renders", write_renders, held_out)
    if held_out:
        write("compare.png", write_png, compare_picture(held_out))
    if report["gaussians"] and mesh:
        write("mesh.ply", saved("mesh"))
    write("report.html", write_page, report, said := sentence(report, out))
    return said


class Written:
    """What has been written into a run's folder so far."""

    def __init__(self, out: Path):
        self._out, self._names = out, []

    def write(self, name: str, make: Callable[..., Any], *args: Any) -> None:
        """make(path, *args). Raises InputError that says what is written when this cannot be."""
        try:
            make(self._out / name, *args)
        except OSError as error:
            raise InputError(f"cannot write {self._out / name}: {error.strerror}; {', '.join(self._names) or 'nothing'} is written there") from None
        self._names.append(name)


def compose(mapper, held_out: list, seconds: float | None, timing: dict, extra: dict) -> dict:
    """The content of report.json."""
    status, vram = mapper.status(), mapper.vram()
    counts = mapper.ledger.counts()
    report = {
        "frames": {"in": counts.frames_in, "used": counts.used, "dropped": counts.dropped},
        "keyframes": status.keyframes,
        "gaussians": status.gaussians,
        "steps": status.steps,
        "steps_due": counts.used * mapper.config.train.steps_per_frame,
        "corrections": status.corrections,
        "hint": status.hint,
        "seconds": seconds,
        "heldout_psnr": _mean([h.psnr for h in held_out]),
        "heldout_ssim": _mean([h.ssim for h in held_out]),
        "heldout_cc_psnr": _mean([h.cc_psnr for h in held_out]),
        "train_psnr": status.train_psnr,
        "poses": {"refined": status.poses_refined, "refused": status.poses_refused},
        "keyframes_unfit": status.keyframes_unfit,
        "vram": {category: capacity for category, (_, capacity) in sorted(vram.categories.items())},
        "backend": mapper.backend,
        "version": version(),
        "vram_total": vram.total,
        "arena_saved": vram.arena_saved,
        "heldout": [{"stamp_ns": h.frame.stamp_ns, "psnr": h.psnr, "ssim": h.ssim, "cc_psnr": h.cc_psnr, **({"camera": h.frame.sensor} if h.frame.sensor else {})} for h in held_out],
        **by_camera(held_out),
        "timing": timing,
        **extra,
    }
    return without_nan(report)


def sentence(report: dict, out: Path) -> str:
    frames = report["frames"]
    why = f" ({report['hint']})" if report["hint"] else ""
    return (f"{report['gaussians']} Gaussians{why}, {report['keyframes']} keyframes, {report['steps']} steps{too_few(report)}; frames {frames['in']} in, {frames['used']} used, "
            f"{sum(frames['dropped'].values())} dropped; {described(report)}{cut_short(report)}; {out}/report.json")


def described(report: dict) -> str:
    """The held-out figures."""
    psnr, ssim = (f"{v:.{n}f}" if v is not None else "n/a" for v, n in ((report["heldout_psnr"], 2), (report["heldout_ssim"], 3)))
    return f"held-out PSNR {psnr} dB, SSIM {ssim} over {len(report['heldout'])} frames"


def too_few(report: dict) -> str:
    """That there was no time for the steps that are due for the frames, or no frame to train with; '' when there was."""
    due = report.get("steps_due", 0)
    if due and not report["keyframes"] and report["frames"]["used"]:
        return " (every frame was held out and only measured; to train: --holdout 0, or 2 and more)"
    return "" if report["steps"] >= due else f" of {due} due for the frames (train.steps_per_frame; a lower --rate, --lossless or --refine-steps {due - report['steps']} gives them time)"


def cut_short(report: dict) -> str:
    """That the replay ended before the recording or its refinement did; '' when it did not, or the report does not know."""
    why = {"max_seconds": "cut short by --max-seconds", "interrupted": "interrupted"}.get(report.get("stopped_early", ""))
    if not why:
        return ""
    sent, images = report.get("images_sent", 0), report.get("images", 0)
    return f"; {why}" + (f" after {sent} of {images} images" if sent < images else " during the refinement" if images else "")


def write_renders(folder: Path, held_out: list) -> None:
    """<stamp_ns>.png of every held-out frame at its full size (of a second camera <stamp_ns>.camera1.png); those of an earlier run go."""
    names = {render_name(h.frame) for h in held_out}
    for old in folder.glob("*.png"):
        if old.name.partition(".")[0].isdigit() and old.name not in names:
            old.unlink()
    for h in held_out:
        write_png(folder / render_name(h.frame), h.rgb)


def render_name(frame) -> str:
    return f"{frame.stamp_ns}" + (f".camera{frame.sensor}" if frame.sensor else "") + (f".lap{frame.lap}" if frame.lap else "") + ".png"


def by_camera(held_out: list) -> dict:
    """The mean PSNR of each camera, where there are several."""
    psnr = defaultdict(list)
    for h in held_out:
        psnr[str(h.frame.sensor)].append(h.psnr)
    return {"heldout_psnr_by_camera": {sensor: _mean(values) for sensor, values in sorted(psnr.items())}} if len(psnr) > 1 else {}


def write_png(path: Path, rgb: np.ndarray) -> None:
    write_atomically(path, cv2.imencode(".png", np.ascontiguousarray(rgb[..., ::-1]))[1].tobytes())


# ---- compare.png -----------------------------------------------------------------------------------------------------

def compare_picture(held_out: list) -> np.ndarray:
    """[H,W,3] uint8: truth | render | error of a few held-out frames, evenly over the run, with a scale for the error."""
    picked = [held_out[round(i)] for i in np.linspace(0, len(held_out) - 1, min(COMPARE_FRAMES, len(held_out)))]
    widest = max(h.rgb.shape[1] for h in picked)
    width = widest * max(1, round(PANEL_WIDTH / widest))
    rows = [np.hstack([_label(_scaled(h.frame.rgb, width, cv2.INTER_CUBIC), "truth"),
                       _label(_scaled(h.rgb, width, cv2.INTER_CUBIC), f"render  {h.psnr:.2f} dB"),
                       _label(_scaled(false_color(h.rgb, h.frame.rgb), width, cv2.INTER_NEAREST), "error")]) for h in picked]
    return np.vstack([*rows, _error_scale(3 * width, 2 * width)])


def false_color(rgb: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """[H,W,3] uint8: mean absolute difference of the channels, black = 0 to yellow-white = ERROR_FULL_SCALE."""
    error = np.abs(rgb.astype(np.float32) - truth).mean(-1) / 255
    return _inferno(error / ERROR_FULL_SCALE)


def _inferno(share: np.ndarray) -> np.ndarray:
    return cv2.applyColorMap((np.clip(share, 0, 1) * 255).astype(np.uint8), cv2.COLORMAP_INFERNO)[..., ::-1]


def _scaled(image: np.ndarray, width: int, interpolation: int) -> np.ndarray:
    height = round(image.shape[0] * width / image.shape[1])
    return cv2.resize(np.ascontiguousarray(image), (width, height), interpolation=interpolation)


def _label(image: np.ndarray, text: str) -> np.ndarray:
    image = np.ascontiguousarray(image)
    (w, h), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.6, 1)
    image[:h + 16, :w + 16] //= 3
    cv2.putText(image, text, (8, h + 8), cv2.FONT_HERSHEY_SIMPLEX, 0.6, (255, 255, 255), 1, cv2.LINE_AA)
    return image


def _error_scale(width: int, left: int) -> np.ndarray:
    """A strip with the colours of the error and what they mean, under the error column."""
    strip = np.zeros((34, width, 3), np.uint8)
    bar = np.broadcast_to(np.linspace(0, 1, width - left - 130)[None], (14, width - left - 130))
    strip[10:24, left + 50:width - 80] = _inferno(bar)
    for x, text in ((left + 30, "0"), (width - 72, f"{ERROR_FULL_SCALE:g} of 1")):
        cv2.putText(strip, text, (x, 23), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (220, 220, 220), 1, cv2.LINE_AA)
    return strip


# ---- details ---------------------------------------------------------------------------------------------------------

def _through_temporary(path: Path, write: Callable[[str], Any]) -> None:
    temporary = path.with_name(f".unfinished.{path.name}")  # the suffix says the format
    try:
        write(str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {k: without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value
