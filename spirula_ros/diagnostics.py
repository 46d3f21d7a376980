"""/diagnostics: one status for each topic, the frames, the trainer, the memory and the map. `reports` is a pure function of the session's state.
The array is published as diagnostic_updater does; that itself is not used: its Python edition has sent only the last of several statuses in some releases."""
from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Iterator, NamedTuple

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from .publish import header
from .watch import describe_publishers, state_of

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR
CHOSEN = ("not_keyframe", "blurred", "paused", "reset", "shutdown")  # dropped because somebody wanted it so
FULL = 0.95


class Report(NamedTuple):
    name: str
    level: bytes
    message: str
    values: dict[str, object]


class Diagnostics:
    """On the node of a Session. A status is WARN for a while after something went wrong: what was dropped since the last message."""

    def __init__(self, session, stack: ExitStack):
        self._session, self._node, self._due, self._seen = session, session.node, 0.0, all_bad(session)   # what a resumed run has dropped is not new
        self._publisher = self._node.create_publisher(DiagnosticArray, "/diagnostics", 10)
        stack.callback(self._node.destroy_publisher, self._publisher)

    def publish(self, now: float) -> None:
        """now: time.monotonic()."""
        if now < self._due:
            return
        self._due = now + 1 / self._session.ros.publish.diagnostics_hz
        found = [*reports(self._session, self._seen)]
        self._seen = all_bad(self._session)
        name = self._node.get_fully_qualified_name().lstrip("/")
        self._publisher.publish(DiagnosticArray(header=header(self._node.get_clock().now().nanoseconds, ""), status=[
            DiagnosticStatus(name=f"{name}: {r.name}", level=r.level, message=r.message, hardware_id="spirula",
                             values=[KeyValue(key=k, value=text(v)) for k, v in r.values.items()]) for r in found]))


def text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def all_bad(session) -> Counter:
    """How often each thing went wrong so far, by (kind and camera, or "frames", reason)."""
    out = Counter({("frames", reason): n for reason, n in session.mapper.ledger.counts().dropped.items() if reason not in CHOSEN})
    for state in session.intake.states():
        out.update({(state.kind + state.camera, reason): n for reason, n in state.bad.items()})
    return out


def reports(session, seen: Counter) -> Iterator[Report]:
    """seen: all_bad at the message before."""
    new, status = all_bad(session) - seen, session.mapper.status()
    yield from (topic_report(session, source, new) for source in session.inputs)
    yield frames_report(status, new)
    level, message = (ERROR, status.last_error) if status.state == "error" else (WARN, session.internal_error) if session.internal_error else (OK, status.state)
    yield Report("trainer", level, message, {"state": status.state, "steps": status.steps, "steps/s": status.steps_per_s, "loss": status.loss, "train PSNR dB": status.train_psnr,
                                             "held-out PSNR dB": status.heldout_psnr, "latency ms": status.latency_ms, "lifecycle": "active" if session.active else "inactive"})
    yield memory_report(session.mapper.vram())
    most = session.config.engine.max_gaussians
    yield Report("map", *((WARN, status.hint) if status.hint else (OK, f"{status.gaussians} Gaussians")),
                 {"Gaussians": status.gaussians, "max_gaussians": most, "keyframes": status.keyframes, "held out": status.held_out, "frame": session.intake.map_frame,
                  "corrections": status.corrections, "poses refined": status.poses_refined, "poses refused": status.poses_refused, "keyframes unfit": status.keyframes_unfit})


def topic_report(session, source, new: Counter) -> Report:
    state = state_of(source, {(s.kind, s.camera): s for s in session.intake.states()})
    silent = state.age_s > session.ros.watch.silence_s and source.kind != "tf_static"
    bad = {reason: n for (kind, reason), n in new.items() if kind == state.kind + state.camera}
    if not state.count or silent:
        optional = (source.kind == "tf" and session.ros.intake.pose_source != "tf") or source.kind in ("path", "tf_static", "info", "depth_info") or (source.kind in ("depth", "mask") and getattr(session.ros.intake, source.kind) == "use_if_there")
        level, message = (WARN if optional else ERROR), f"{'nothing for ' + format(state.age_s, '.0f') + ' s' if state.count else 'nothing yet'}: {describe_publishers(session.node, session.inputs, source)}"
        level = OK if state.count and source.kind in ("info", "depth_info") else level   # latched once is enough
    elif bad:
        level, message = WARN, "unusable: " + ", ".join(f"{reason} {n}" for reason, n in bad.items())
    else:
        level, message = OK, f"{state.rate_hz:.1f} Hz"
    delay_s = (session.node.get_clock().now().nanoseconds - state.last_stamp_ns) / 1e9 if state.last_stamp_ns else float("nan")
    return Report(f"topic {source.topic}", level, message, {
        "type": source.type_name, "received": state.count, "rate Hz": state.rate_hz, "last stamp": f"{state.last_stamp_ns / 1e9:.3f}", "delay s": delay_s, "age s": state.age_s,
        "lost on the way": source.lost, "publishers with incompatible QoS": source.incompatible, **{f"unusable {reason}": n for reason, n in state.bad.items()}})


def frames_report(status, new: Counter) -> Report:
    f, dropped = status.frames, {reason: n for (kind, reason), n in new.items() if kind == "frames"}
    return Report("frames", WARN if dropped else OK, "dropped: " + ", ".join(f"{reason} {n}" for reason, n in dropped.items()) if dropped else f"{f.used} used",
                  {"in": f.frames_in, "used": f.used, "pending": f.pending, "in the inbox": status.inbox_frames, **{f"dropped {reason}": n for reason, n in f.dropped.items()}})


def memory_report(vram) -> Report:
    share = vram.total / vram.budget if vram.budget else 0.0
    message = f"{vram.total / 2**20:.0f} MiB" + (f" of {vram.budget / 2**20:.0f} MiB (engine.vram_budget_mb)" if vram.budget else "")
    return Report("memory", WARN if share > FULL else OK, message,
                  {"bytes": vram.total, "budget bytes": vram.budget, "saved by the arena bytes": vram.arena_saved, "process bytes": vram.process, "device used bytes": vram.device_used,
                   "device total bytes": vram.device_total, **{f"{name} bytes": capacity for name, (_, capacity) in vram.categories.items()}})
