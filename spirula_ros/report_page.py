"""report.html: report.json and compare.png for people. One file that needs nothing else, neither scripts nor the network."""
from __future__ import annotations

import base64
import html
import math
from pathlib import Path
from typing import Any, Iterable

import cv2

from spirula_gpu.ply import write_atomically

from .web_panel import COLORS, mib

JPEG_QUALITY = 88
WIDTH, HEIGHT, LEFT, BELOW = 560, 190, 52, 34   # px, of a chart and of its margins for the numbers
BAR = 300                                       # px, of the largest category
LINE = "#4c9be8"
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1180px;margin:2em auto;padding:0 1em;color:#222;background:#fff}
h1{font-size:1.5em}h2{font-size:1.1em;margin-top:2em}img,svg{max-width:100%;height:auto}table{border-collapse:collapse}td{padding:1px 14px 1px 0;vertical-align:top}
td:first-child{color:#666}svg text{font-size:12px;fill:currentColor}.note{border-left:3px solid #e8a33d;padding-left:8px}details td{font-family:monospace;font-size:13px}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#16181c}td:first-child{color:#999}}"""


def write_page(path: Path, report: dict, sentence: str) -> None:
    """report: of a replay, a node or a training, as in report.json; sentence: about its outcome. The picture is the compare.png beside `path`, when there is
    one. Raises OSError."""
    write_atomically(path, page(report, sentence, path.with_name("compare.png")).encode())


def page(report: dict, sentence: str, picture: Path) -> str:
    title = report.get("bag") or report.get("data") or "map"
    frames = report["heldout"]
    parts = [f"<h1>{html.escape(title)}</h1><p>{html.escape(sentence)}</p>", *(f'<p class="note">{html.escape(str(report[name]))}</p>' for name in
             ("hint", "bag_problem", "last_problem") if report.get(name)), table(figures(report))]
    if picture.is_file():
        parts.append(f'<h2>Held-out frames: truth, render, error</h2><img alt="truth, render and error of held-out frames" src="data:image/jpeg;base64,{jpeg(picture)}">')
    if len(report.get("curve", [])) > 1:
        parts.append("<h2>Held-out PSNR while it trained, dB</h2>" + chart([(point["step"], point["psnr"]) for point in report["curve"]], "step"))
    if len(frames) > 1:
        at = [(h["index"], "image") if "index" in h else ((h["stamp_ns"] - min(f["stamp_ns"] for f in frames)) / 1e9, "s since the first of them") for h in frames]
        parts.append("<h2>PSNR of each held-out frame, dB</h2>" + chart(sorted(((x, h["psnr"]) for (x, _), h in zip(at, frames)), key=lambda p: p[0]), at[0][1]))
    parts.append(f"<h2>Memory of the engine: {mib(report['vram_total'])}</h2>" + bars(report["vram"]))
    for name in ("settings", "config"):
        if report.get(name):
            parts.append(f"<details><summary>{'Set by the user' if name == 'settings' else 'Every parameter'}</summary>{table(report[name].items())}</details>")
    return (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
            f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n")


def figures(report: dict) -> list[tuple[str, str]]:
    """What the table at the top says."""
    number = lambda x, form, unit="": "n/a" if x is None else f"{x:{form}}{unit}"
    rows = [("held-out PSNR", number(report["heldout_psnr"], ".2f", " dB")), (".. colour-corrected", number(report["heldout_cc_psnr"], ".2f", " dB")),
            ("held-out SSIM", number(report["heldout_ssim"], ".4f")), ("Gaussians", f"{report['gaussians']:,}"),
            ("steps", f"{report['steps']:,}" + (f" of {report['steps_due']:,} due" if report["steps"] <= report["steps_due"] else f", {report['steps_due']:,} due for the frames and the rest after them"))]
    if "frames" in report:
        dropped = ", ".join(f"{n} {reason}" for reason, n in report["frames"]["dropped"].items())
        rows.append(("mode", report.get("mode", "live")))
        rows.append(("frames", f"{report['frames']['in']} in, {report['frames']['used']} used" + (f", dropped: {dropped}" if dropped else "")))
    else:
        rows.append(("images", f"{report['images']} trained on, {len(report['heldout'])} held out, {report['width']}x{report['height']}"))
    rows += [(name.replace("_", " "), f"{value:,}") for name, value in report["timing"].items() if value is not None and name != "process_bytes"]
    return [*rows, ("engine", f"{report['backend']}, version {report['version']}")]


def table(rows: Iterable[tuple[str, Any]]) -> str:
    return "<table>" + "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in rows) + "</table>"


def jpeg(picture: Path) -> str:
    """Base64."""
    return base64.b64encode(cv2.imencode(".jpg", cv2.imread(str(picture)), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]).decode()


# ---- charts ----------------------------------------------------------------------------------------------------------

def chart(points: list[tuple[float, float | None]], unit: str) -> str:
    """A line through points (x, y), those without y left out, and a dot at each; unit: of x."""
    points = [(x, y) for x, y in points if y is not None]
    if not points:
        return "<p>none</p>"
    xs, ys = (ticks(min(v), max(v)) for v in zip(*points))
    right = lambda x: LEFT + (x - xs[0]) / (xs[-1] - xs[0]) * (WIDTH - LEFT - 24)
    down = lambda y: HEIGHT - BELOW - (y - ys[0]) / (ys[-1] - ys[0]) * (HEIGHT - BELOW - 12)
    marks = [f'<line x1="{LEFT}" x2="{WIDTH - 24}" y1="{down(y):.1f}" y2="{down(y):.1f}" stroke="#8a8f9855"/>'
             f'<text x="{LEFT - 8}" y="{down(y) + 4:.1f}" text-anchor="end">{y:g}</text>' for y in ys]
    marks += [f'<text x="{right(x):.1f}" y="{HEIGHT - BELOW + 18}" text-anchor="middle">{x:g}</text>' for x in xs]
    marks.append(f'<text x="{WIDTH - 24}" y="{HEIGHT - 3}" text-anchor="end" class="unit">{unit}</text>')
    line = " ".join(f"{right(x):.1f},{down(y):.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{right(x):.1f}" cy="{down(y):.1f}" r="3" fill="{LINE}"><title>{x:g}: {y:.2f}</title></circle>' for x, y in points)
    return (f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(marks)}'
            f'<polyline points="{line}" fill="none" stroke="{LINE}" stroke-width="1.5"/>{dots}</svg>')


def ticks(low: float, high: float) -> list[float]:
    """3 to 7 round numbers, evenly apart, that reach from below `low` to above `high`."""
    span = max(high - low, 1e-3 * max(abs(high), 1))
    step = next(s for s in (m * 10.0 ** e for e in range(math.floor(math.log10(span)) - 1, 99) for m in (1, 2, 5)) if span / s <= 5)
    first, last = math.floor(low / step + 1e-9), max(math.ceil(high / step - 1e-9), math.floor(low / step + 1e-9) + 1)
    return [round(i * step, 12) for i in range(first, last + 1)]


def bars(vram: dict[str, int]) -> str:
    """A bar for each category that holds something."""
    shown = [(name, n) for name, n in vram.items() if n]
    largest = max((n for _, n in shown), default=1)
    rows = [f'<rect x="110" y="{24 * i + 4}" width="{max(BAR * n / largest, 1):.1f}" height="15" rx="3" fill="{COLORS[name]}"/>'
            f'<text x="100" y="{24 * i + 16}" text-anchor="end">{html.escape(name)}</text>'
            f'<text x="{118 + BAR * n / largest:.1f}" y="{24 * i + 16}">{mib(n)}</text>' for i, (name, n) in enumerate(shown)]
    return f'<svg width="{BAR + 220}" height="{24 * len(shown)}" viewBox="0 0 {BAR + 220} {24 * len(shown)}">{"".join(rows)}</svg>'
