"""What a checkpoint holds of a mapper: the saved rows of the map by the table of buffers, the frames, the gate, and facts. The file
itself is checkpoint_file.py's; who saves what when: docs/design.md, "Checkpoint"."""
from __future__ import annotations

import math
import os
from typing import Any, Iterator, NamedTuple

import numpy as np

from .camera import Camera, Frame
from .checkpoint_file import BYTES, OTHER_PROGRAM, Reader, Section, write_file
from .config import Config, EngineConfig, rows
from .gate import Gated
from .native import GAUSSIANS, Engine, NativeError, forecast
from .report import FrameCounts
from .track import Moments, Track

CHUNK_BYTES = 1 << 26  # of a row of the map that are in host memory at once
FLOATS, DOUBLES, STAMPS = np.dtype("<f4"), np.dtype("<f8"), np.dtype("<i8")
KEYFRAME, HELD_OUT, WAITING = range(3)  # what a frame is to the map; waiting: in the inbox
FRAME = np.dtype([("kind", "u1"), ("held_out", "u1"), ("has_depth", "u1"), ("has_mask", "u1"), ("frame_id", "<u4"), ("id", "<i8"), ("loss", "<f8"), ("stamp_ns", "<i8"),
                  ("size", "<i4", (2,)), ("intrinsics", "<f8", (4,)), ("T_world_cam", "<f8", (4, 4)), ("T_given", "<f8", (4, 4)),
                  ("log_gain", "<f8", (3,)), ("steps", "<i8"), ("sensor", "<i8"), ("lap", "<i8")])


class Stored(NamedTuple):
    kind: int
    frame: Frame
    id: int = -1             # of a keyframe
    loss: float = math.inf   # of a keyframe: Keyframe.loss
    T_given: np.ndarray | None = None   # of a keyframe: Keyframe.T_given
    log_gain: np.ndarray = np.zeros(3)  # of a keyframe: Keyframe.log_gain
    steps: int = 0           # of a keyframe: Keyframe.steps


class Past(NamedTuple):
    """What a corrected path needs to know of frames that are not kept."""
    track: Track
    owners: Moments   # [ids]: when each keyframe there has been was taken, by its id, which is the owner of its Gaussians


class Resumed(NamedTuple):
    """What a mapper goes on with."""
    path: str
    gaussians: int
    keyframes: int
    steps: int
    lost_frames: int     # that had arrived, but were not yet with the mapper: counted as dropped, `lost_at_restart`
    world_frame: str     # '' when the writer did not say
    last_stamp_ns: int | None               # of the newest frame that became a keyframe
    changed: dict[str, tuple[Any, Any]]     # parameters: (then, now); the run's own are used
    source: str          # checkpoint.source of the run that wrote it; '' when it did not say
    centers: np.ndarray  # [keyframes,3] of their cameras, map frame
    sight_m: float       # a camera farther than this from all of them sees nothing of the map


def write_map(path: str | os.PathLike, engine: Engine, frames: list[Stored], gated: Gated, past: Past, config: Config, facts: dict) -> int:
    """The checkpoint of a mapper; `facts`: its counters and random states. Returns the bytes of the file."""
    saved, ids = engine.saved_rows(), sorted({s.frame.frame_id for s in frames})
    facts = {**facts, "gaussians": len(engine), "rows": {name: row.item_bytes for name, row in saved.items()}, "frame_ids": ids,
             "last_stamp_ns": gated.last_stamp_ns, "config": {name: value for name, value, _ in rows(config)}}
    table = np.array([_record(s, ids) for s in frames], FRAME)
    depths = [s.frame.depth_m for s in frames if s.frame.depth_m is not None]
    masks = [s.frame.mask for s in frames if s.frame.mask is not None]
    sections = [Section(name, BYTES, _row_shape(row), _row_pieces(engine, name, row.used_bytes)) for name, row in saved.items()]
    sections += [_whole("frames", table), _whole("gate.poses", np.ascontiguousarray(gated.poses, DOUBLES)), _whole("gate.moments", gated.moments.table().astype(STAMPS)),
                 _whole("gate.sharpness", np.array(gated.sharpness, DOUBLES).reshape(-1, 2)), _whole("track.moments", past.track.moments.table().astype(STAMPS)),
                 _whole("track.poses", past.track.poses.astype(DOUBLES)), _whole("owners", past.owners.table().astype(STAMPS)),
                 Section("frames.rgb", BYTES, (sum(s.frame.rgb.size for s in frames),), (np.ascontiguousarray(s.frame.rgb) for s in frames)),
                 Section("frames.depth_m", FLOATS, (sum(d.size for d in depths),), (np.ascontiguousarray(d) for d in depths)),
                 Section("frames.mask", BYTES, (sum(m.size for m in masks),), (np.ascontiguousarray(m) for m in masks))]
    return write_file(path, facts, sections)


def _whole(name: str, array: np.ndarray) -> Section:
    return Section(name, array.dtype, array.shape, (array.view(BYTES),) if array.size else ())


def _record(s: Stored, frame_ids: list[str]) -> tuple:
    f, c = s.frame, s.frame.camera
    return (s.kind, f.held_out, f.depth_m is not None, f.mask is not None, frame_ids.index(f.frame_id), s.id, s.loss, f.stamp_ns, (c.width, c.height), (c.fx, c.fy, c.cx, c.cy), f.T_world_cam,
            f.T_world_cam if s.T_given is None else s.T_given, s.log_gain, s.steps, f.sensor, f.lap)


def _row_shape(row) -> tuple[int, int]:
    return row.used_bytes // row.item_bytes, row.item_bytes


def _row_pieces(engine: Engine, name: str, used: int) -> Iterator[np.ndarray]:
    buffer = np.empty(min(used, CHUNK_BYTES), BYTES)
    for first in range(0, used, CHUNK_BYTES):
        piece = buffer[:min(CHUNK_BYTES, used - first)]
        engine.read_raw(name, first, piece)
        yield piece


def changed(reader: Reader, config: Config) -> dict[str, tuple[Any, Any]]:
    """Parameters that are not what they were, but may be. Raises CheckpointError for those that may not."""
    then = {**{name: value for name, value, _ in rows(Config())}, "engine.antialiased": False, **reader.facts["config"]}  # there was no filter before that row
    differ = {name: (then[name], now) for name, now, _ in rows(config) if then[name] != now and not name.startswith("checkpoint.")}
    for name in ("engine.sh_degree", "engine.precision", "engine.antialiased"):
        if name in differ:
            reader.refuse(f"it was written with {name} {differ[name][0]}, and this run has {differ[name][1]}", f"set {name} to {differ[name][0]}, or start without checkpoint.resume")
    return differ


def check_budget(reader: Reader, e: EngineConfig, backend: str) -> None:
    """That a step on the largest keyframe takes no more than engine.vram_budget_mb beside the map: else the map would be pruned away to make room for it."""
    table, (pairs, isects) = reader.array("frames", FRAME, (-1,)), (int(n) for n in reader.facts["trainer"]["seen"])
    sizes = table["size"][table["kind"] == KEYFRAME]
    if not e.vram_budget_mb or not len(sizes):
        return
    width, height = map(int, sizes[sizes.prod(axis=1).argmax()])
    need = forecast(backend, gaussians=int(reader.facts["gaussians"]), width=width, height=height, pairs=pairs, isects=isects, sh_degree=e.sh_degree, precision=e.precision,
                    max_gaussians=e.max_gaussians, budget_bytes=e.vram_budget_mb << 20, threads=e.threads, arena_alias=e.arena_alias).total
    if need > e.vram_budget_mb << 20:
        least = -(-need // 2**20)
        reader.refuse(f"its {reader.facts['gaussians']} Gaussians and a step on {width}x{height} images take {least} MiB > engine.vram_budget_mb {e.vram_budget_mb}",
                      f"raise that to {least} or more, or start without checkpoint.resume")


def read_rows(reader: Reader, engine: Engine) -> None:
    """The Gaussians into an empty engine."""
    n, theirs, saved = reader.facts["gaussians"], reader.facts["rows"], engine.saved_rows()
    ours = {name: row.item_bytes for name, row in saved.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            reader.refuse(f"row {name} has {theirs.get(name, 'no')} bytes an item there and {ours.get(name, 'no')} here", OTHER_PROGRAM)
    if type(n) is not int or not 0 <= n <= min(reader.shape(name)[0] for name, row in saved.items() if row.count == GAUSSIANS):
        reader.refuse(f"{n} Gaussians, but the rows hold fewer")
    try:
        engine.make(n)
    except NativeError as e:
        if e.kind != "capacity":
            raise
        reader.refuse(f"it does not fit: {e}")
    for name, row in engine.saved_rows().items():
        with reader.section(name, BYTES, _row_shape(row)) as take:
            for first in range(0, row.used_bytes, CHUNK_BYTES):
                engine.write_raw(name, first, take((min(CHUNK_BYTES, row.used_bytes - first),)))


def read_frames(reader: Reader) -> Iterator[Stored]:
    table, ids = reader.array("frames", FRAME, (-1,)), reader.facts["frame_ids"]
    with reader.section("frames.rgb", BYTES, (-1,)) as take_rgb, reader.section("frames.depth_m", FLOATS, (-1,)) as take_depth, \
            reader.section("frames.mask", BYTES, (-1,)) as take_mask:
        for r in table:
            camera = Camera(*map(int, r["size"]), *map(float, r["intrinsics"]))
            rgb = take_rgb((camera.height, camera.width, 3))
            depth_m = take_depth((camera.height, camera.width)) if r["has_depth"] else None
            mask = take_mask((camera.height, camera.width)) if r["has_mask"] else None
            yield Stored(int(r["kind"]), Frame(int(r["stamp_ns"]), camera, r["T_world_cam"].copy(), rgb, depth_m, bool(r["held_out"]), ids[r["frame_id"]], mask, int(r["sensor"]), int(r["lap"])),
                         int(r["id"]), float(r["loss"]), r["T_given"].copy(), r["log_gain"].copy(), int(r["steps"]))


def read_gate(reader: Reader) -> Gated:
    poses, sharpness = reader.array("gate.poses", DOUBLES, (-1, 4, 4)), reader.array("gate.sharpness", DOUBLES, (-1, 2))
    return Gated(poses, _moments(reader, "gate.moments", len(poses)), [(int(sensor), float(value)) for sensor, value in sharpness])


def read_past(reader: Reader) -> Past:
    moments = _moments(reader, "track.moments")
    rows = list(map(tuple, moments.table().tolist()))
    if any(a >= b for a, b in zip(rows, rows[1:])):
        reader.refuse("the stamps of the track do not increase")
    laps, stamps, sensors = moments
    return Past(Track(stamps, reader.array("track.poses", DOUBLES, (len(stamps), 4, 4)), laps, sensors), _moments(reader, "owners"))


def _moments(reader: Reader, name: str, n: int = -1) -> Moments:
    return Moments.rows(reader.array(name, STAMPS, (n, 3)))


def read_counts(reader: Reader) -> FrameCounts:
    seen = reader.facts["frames_seen"]
    return FrameCounts(int(seen["frames_in"]), int(seen["used"]), {str(reason): int(n) for reason, n in seen["dropped"].items()})
