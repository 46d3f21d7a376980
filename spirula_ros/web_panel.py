"""The panel beside the scene: what the mapper says, and what can be asked of it."""
from __future__ import annotations

import html
import itertools
import math
from collections import deque
from typing import Any, Callable, Iterator

import numpy as np

from spirula_gpu import config as engine
from spirula_gpu.report import Status, VramReport

CURVE_POINTS = 400   # of a curve; beyond this every second one goes, and later ones come half as often
COLORS = dict(splat="#4c9be8", splat_x_img="#e8a33d", image="#6cc070", appearance="#b07cd8", viewer="#d87c9b", other="#8a8f98")
STATES = dict(running="#6cc070", waiting="#e8a33d", paused="#e8a33d", error="#e5534b", stopped="#8a8f98")


def status_html(s: Status, notes: list[str]) -> str:
    """notes: hints and errors of the surroundings; all text is escaped."""
    dropped = ", ".join(f"{reason} {n}" for reason, n in sorted(s.frames.dropped.items(), key=lambda item: -item[1])) or "none"
    rows = [("Gaussians", f"{s.gaussians:,}"), ("keyframes", f"{s.keyframes:,}" + (f" + {s.held_out} held out" if s.held_out else "")),
            ("steps", f"{s.steps:,}, {s.steps_per_s:.1f} /s"), ("loss", number(s.loss, ".4f")), ("held-out PSNR", number(s.heldout_psnr, ".2f", " dB")),
            ("frames", f"{s.frames.frames_in} in, {s.frames.used} used, {s.frames.pending} waiting"), ("dropped", dropped), ("latency", number(s.latency_ms, ".0f", " ms"))]
    cells = "".join(f'<tr><td style="color:#8a8f98;padding:0 10px 0 0;white-space:nowrap;vertical-align:top">{name}</td><td>{html.escape(text)}</td></tr>' for name, text in rows)
    head = f'<b style="color:{STATES.get(s.state, "inherit")}">{html.escape(s.state)}</b>'
    errors = "".join(_note(text, "#e5534b") for text in [s.last_error] if text)
    hints = "".join(_note(text, "#e8a33d") for text in [s.hint, *notes] if text)
    return f'<div style="padding:0 14px;font-size:13px;line-height:1.5">{head}{errors}{hints}<table style="border-spacing:0">{cells}</table></div>'


def _note(text: str, color: str) -> str:
    return f'<div style="border-left:3px solid {color};padding-left:8px;margin:4px 0;overflow-wrap:anywhere">{html.escape(text).replace(chr(10), "<br>")}</div>'


def number(x: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(x) else f"{x:{form}}{unit}"


def vram_html(v: VramReport) -> str:
    """A bar per category. The scale is the budget, or what the engine holds when there is none."""
    whole, rows = max(v.budget or v.total, 1), []
    for name, (used, capacity) in v.categories.items():
        if not (used or capacity):
            continue
        bar = "".join(f'<div style="position:absolute;height:9px;border-radius:3px;width:{min(100.0, 100 * n / whole):.1f}%;background:{COLORS.get(name, "#8a8f98")}{alpha}"></div>'
                      for n, alpha in ((capacity, "66"), (used, "ff")))
        rows.append(f'<div style="display:flex;align-items:center;gap:8px"><span style="width:76px">{html.escape(name)}</span>'
                    f'<div style="position:relative;flex:1;height:9px;background:#8a8f9833;border-radius:3px">{bar}</div>'
                    f'<span style="width:110px;text-align:right">{mib(used)}{f" / {mib(capacity)}" if capacity else ""}</span></div>')
    budget = f" of {mib(v.budget)} budget" if v.budget else ""
    return (f'<div style="padding:0 14px;font-size:13px;line-height:1.5"><b>{mib(v.total)}</b>{budget} held; the arena saves {mib(v.arena_saved)}'
            f'{"".join(rows)}<div style="color:#8a8f98">used / held; the arena is held under other</div></div>')


def mib(n: int) -> str:
    return f"{n / 2**20:.1f} MiB" if n < 10 * 2**20 else f"{n / 2**20:,.0f} MiB"


class Curve:
    """(seconds, value) pairs over the whole run, thinned as they become many; NaN is left out."""

    def __init__(self):
        self._points, self._every, self._seen = deque(), 1, 0

    def add(self, seconds: float, value: float) -> None:
        if math.isnan(value):
            return
        if self._seen % self._every == 0:
            self._points.append((seconds, value))
        self._seen += 1
        if len(self._points) > CURVE_POINTS:
            self._points, self._every = deque(list(self._points)[::2]), 2 * self._every

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        x, y = np.array(self._points or [(0.0, 0.0)], float).T
        return x, y


def adjustable(config: engine.Config) -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value, field) of the mapper's parameters that may change while it runs: numbers and switches."""
    return ((name, value, field) for name, value, field in engine.rows(config) if field.metadata["live"] and not isinstance(value, str))


class Panel:
    """Builds the GUI of a viser server. act: asked with a name and its arguments when somebody presses something:
    pause(bool), save(), reset(), render(client), configure({name: value}), show(what, bool), follow(bool)."""

    def __init__(self, server, act: Callable[..., None], config: engine.Config, save_to: str):
        self._gui, self._act, self._curves = server.gui, act, {}
        tabs = self._gui.add_tab_group()
        with tabs.add_tab("Map"):
            self._build_map()
        with tabs.add_tab("View"):
            self._build_view()
        with tabs.add_tab("Control"):
            self._build_control(save_to)
        with tabs.add_tab("Tune"):
            self._build_tune(config)

    def _build_map(self) -> None:
        self._status, self._vram = self._gui.add_html(""), self._gui.add_html("")
        for name, color in (("held-out PSNR, dB", "#6cc070"), ("steps/s", "#4c9be8")):
            curve = Curve()
            axes = tuple({"stroke": "#8a8f98", "grid": {"stroke": "#8a8f9833"}, "size": size} for size in (30, 44))
            self._curves[name] = curve, self._gui.add_uplot(curve.data(), ({"label": "s"}, {"label": name, "stroke": color, "width": 2}), title=name, height=110,
                                                             scales={"x": {"time": False}}, axes=axes, legend={"show": False})

    def _build_view(self) -> None:
        for what, label, on in (("splats", "splats", True), ("cameras", "keyframes", True), ("mesh", "mesh", False)):
            self._gui.add_checkbox(label, on).on_update(lambda event, what=what: self._act("show", what, event.target.value))
        self._gui.add_checkbox("follow the robot", False, hint="the camera goes where the newest keyframe is").on_update(lambda event: self._act("follow", event.target.value))
        render = self._gui.add_button("Render from here", hint="one picture of our own renderer, with view-dependent colour; it goes when you move")
        render.on_click(lambda event: self._act("render", event.client))

    def _build_control(self, save_to: str) -> None:
        self._pause = self._gui.add_button("Pause")
        self._pause.on_click(lambda _: self._act("pause", self._pause.label == "Pause"))
        self._gui.add_button("Save map", hint=f"on the mapper's machine: {save_to}").on_click(lambda _: self._act("save"))
        self._gui.add_button("Reset", color="red").on_click(lambda event: self._confirm(event.client))

    def _confirm(self, client) -> None:
        with client.gui.add_modal("Throw the map away?") as modal:
            client.gui.add_markdown("All Gaussians and keyframes go. What was saved stays.")

            def yes(_) -> None:
                modal.close()
                self._act("reset")
            client.gui.add_button("Reset", color="red").on_click(yes)
            client.gui.add_button("Cancel").on_click(lambda _: modal.close())

    def _build_tune(self, config: engine.Config) -> None:
        for group, rows in itertools.groupby(adjustable(config), lambda row: row[0].split(".")[0]):
            with self._gui.add_folder(group, expand_by_default=False):
                for name, value, field in rows:
                    self._add_input(name, value, field.metadata)

    def _add_input(self, name: str, value: Any, meta: dict[str, Any]) -> None:
        kind, label = type(value), name.split(".")[1]
        hint = meta["help"] + (f" [{meta['unit']}]" if meta["unit"] else "")
        if isinstance(value, bool):
            handle = self._gui.add_checkbox(label, value, hint=hint)
        elif isinstance(value, float) and (meta["low"], meta["high"]) == (0, 1) and value >= 0.05:
            handle = self._gui.add_slider(label, 0.0, 1.0, 0.01, value, hint=hint)
        else:
            step = 1 if kind is int else 10.0 ** math.floor(math.log10(value or 0.1) - 1)
            handle = self._gui.add_number(label, value, min=kind(meta["low"]), max=kind(meta["high"]), step=step, hint=hint)
        handle.on_update(lambda event: self._act("configure", {name: kind(event.target.value)}))   # a browser has no 1.0

    def record(self, seconds: float, s: Status) -> None:
        """Also while nobody looks: who comes later sees the whole curve."""
        for (curve, _), value in zip(self._curves.values(), (s.heldout_psnr, s.steps_per_s)):
            curve.add(seconds, value)

    def show(self, s: Status, v: VramReport | None, notes: list[str]) -> None:
        self._status.content = status_html(s, notes)
        self._vram.content = vram_html(v) if v else ""
        self._pause.label = "Resume" if s.state == "paused" else "Pause"
        for curve, plot in self._curves.values():
            plot.data = curve.data()
