"""What the mapper tells the outside: frozen values, safe to hand to any thread."""
from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .camera import Camera
from .splats import Splats


class FrameLedger:
    """Every frame that arrived ends as used or dropped under one reason; the rest is still on its way.
    frames_in == used + sum(dropped) + pending, always. Owns its lock; any thread may call it."""

    def __init__(self):
        self._lock, self._in, self._used, self._dropped = threading.Lock(), 0, 0, Counter()

    def arrived(self) -> None:
        with self._lock:
            self._in += 1

    def used(self) -> None:
        with self._lock:
            self._used += 1

    def dropped(self, reason: str, n: int = 1) -> None:
        """`reason` is a short snake_case word, e.g. inbox_full, not_keyframe, blurred, no_pose, bad_depth_size."""
        with self._lock:
            if n:
                self._dropped[reason] += n

    def resume(self, counts: "FrameCounts") -> None:
        """Go on from the totals of an earlier run."""
        with self._lock:
            self._in, self._used = self._in + counts.frames_in, self._used + counts.used
            self._dropped.update(counts.dropped)

    def counts(self) -> "FrameCounts":
        with self._lock:
            return FrameCounts(self._in, self._used, dict(sorted(self._dropped.items())))


class FrameCounts(NamedTuple):
    frames_in: int
    used: int
    dropped: dict[str, int]

    @property
    def pending(self) -> int:
        return self.frames_in - self.used - sum(self.dropped.values())


class VramRow(NamedTuple):
    name: str
    category: str
    used: int      # bytes that hold something
    capacity: int  # bytes held; 0 for a row that lives in the arena
    aliased: bool


@dataclass(frozen=True)
class VramReport:
    """Bytes of the engine by category (splat, splat_x_img, image, appearance, viewer, other) and by row."""
    rows: tuple[VramRow, ...]
    categories: dict[str, tuple[int, int]]  # category -> (used, capacity); aliased rows count in `used` only, the arena in `other`
    total: int                               # bytes the engine holds: the sum of all capacities
    arena_saved: int                         # bytes that the arena saves against one buffer per row
    budget: int                              # 0 = none
    process: int                             # cpu: resident bytes of this process; cuda: what has gone from the device's free memory since the engine was made
    device_used: int                         # by all processes, on the device (cuda), of the machine's memory (cpu)
    device_total: int
    pinned: int = 0                          # cuda: host memory for copies to the device; in no row, nor in `total` or the budget


class MeshChunk(NamedTuple):
    key: tuple[int, int, int]   # chunk index; its corner is key * chunk_m in the map frame
    vertices: np.ndarray        # [V,3] float32, map frame, m; empty: the chunk is gone
    triangles: np.ndarray       # [T,3] int32
    colors: np.ndarray          # [V,3] uint8


@dataclass(frozen=True)
class Status:
    state: str = "waiting"      # waiting | running | paused | error | stopped
    gaussians: int = 0
    keyframes: int = 0
    held_out: int = 0
    steps: int = 0
    steps_per_s: float = 0.0
    loss: float = float("nan")
    train_psnr: float = float("nan")      # of recent training views
    heldout_psnr: float = float("nan")    # mean over the latest measurement of each held-out frame
    heldout_ssim: float = float("nan")
    heldout_cc_psnr: float = float("nan")  # after an affine colour fit of each render
    poses_refined: int = 0                # alignments of a keyframe with the map that were taken ..
    poses_refused: int = 0                # .. and those after which the pose stayed as it was
    keyframes_unfit: int = 0              # that the map does not come to fit (wrong pose, covered lens): trained rarely
    frames: FrameCounts = FrameCounts(0, 0, {})
    inbox_frames: int = 0
    latency_ms: float = float("nan")      # newest frame: arrival in the inbox -> part of the map
    corrections: int = 0        # corrected paths that moved something
    hint: str = ""              # what limits the map now, and the remedy
    last_error: str = ""        # why the mapper has stopped


@dataclass(frozen=True)
class Snapshot:
    """A rendered view of the map and the figures at that moment. Arrays are read-only."""
    revision: int
    stamp_ns: int
    camera: Camera
    T_world_cam: np.ndarray     # [4,4] float64
    rgb: np.ndarray             # [H,W,3] uint8
    depth_m: np.ndarray         # [H,W] float32, 0 where alpha < 0.5
    alpha: np.ndarray           # [H,W] float32
    status: Status
    vram: VramReport
    mesh: tuple[MeshChunk, ...] = ()   # every chunk; one that did not change is the same object as in the snapshot before
    map: int = 0                # how many maps there were before this one: a reset begins another


@dataclass(frozen=True)
class CameraPath:
    """Where the keyframes' cameras are, as refined. Arrays are nobody else's."""
    stamps_ns: np.ndarray       # [n] int64, sorted
    T_world_cam: np.ndarray     # [n,4,4] float64


@dataclass(frozen=True)
class SplatSnapshot:
    """The map as a viewer draws it. Arrays are nobody else's."""
    steps: int
    splats: Splats              # sh [n,1,3]: without the dependence on the view
    gaussians: int              # of the whole map; n of them are here
    poses: np.ndarray           # [K,4,4] float64 T_world_cam of keyframes, evenly over time, the newest last
    camera: Camera | None       # the newest keyframe's; None: there is none, and K is 0


class Latest:
    """A slot: one writer, any readers, the newest value wins."""

    def __init__(self):
        self._lock, self._value = threading.Lock(), None

    def set(self, value) -> None:
        with self._lock:
            self._value = value

    def get(self):
        with self._lock:
            return self._value
