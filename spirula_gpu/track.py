"""When and by which camera frames were taken (`Moments`), and every frame that came with its pose as given (`Track`).

A lap is what lies between two restarts of the clock of the stamps (a looped bag, a restarted simulation): a stamp says which frame is meant only together
with its lap and its camera."""
from __future__ import annotations

from typing import Iterable, NamedTuple

import numpy as np

from .camera import Frame


class Moments(NamedTuple):
    """Each [n] int64."""
    laps: np.ndarray
    stamps: np.ndarray    # ns
    sensors: np.ndarray

    @staticmethod
    def of(frames: Iterable[Frame]) -> Moments:
        return Moments.rows([f.moment for f in frames])

    @staticmethod
    def rows(rows) -> Moments:
        """From (lap, stamp in ns, sensor) of each."""
        return Moments(*np.array(rows, np.int64).reshape(-1, 3).T.copy())

    def table(self) -> np.ndarray:
        """[n,3] int64: what rows() takes."""
        return np.stack(self, 1)

    def where(self, chosen) -> Moments:
        return Moments(*(x[chosen] for x in self))

    def find(self, wanted: Moments) -> tuple[np.ndarray, np.ndarray]:
        """(index among these, whether it is one of these) of each that is wanted. These are sorted by stamp within a lap and camera."""
        at, known = np.zeros(len(wanted.stamps), np.intp), np.zeros(len(wanted.stamps), bool)
        for lap, sensor in set(zip(wanted.laps.tolist(), wanted.sensors.tolist())):
            mine, theirs = (np.flatnonzero((m.laps == lap) & (m.sensors == sensor)) for m in (self, wanted))
            if len(mine):
                near = mine[np.clip(np.searchsorted(self.stamps[mine], wanted.stamps[theirs]), 0, len(mine) - 1)]
                at[theirs], known[theirs] = near, self.stamps[near] == wanted.stamps[theirs]
        return at, known


class Track:
    """Every frame that came: when, by which camera, and its pose as given, sorted by lap, stamp and camera; 152 bytes a frame. A frame that comes again in
    its lap replaces the old pose. The owner guards it."""

    def __init__(self, stamps: np.ndarray = np.empty(0, np.int64), poses: np.ndarray = np.empty((0, 4, 4)), laps: np.ndarray | None = None, sensors: np.ndarray | None = None):
        self._n, zeros = len(stamps), np.zeros(len(stamps), np.int64)
        self._laps, self._stamps, self._sensors = (np.array(x, np.int64) for x in (zeros if laps is None else laps, stamps, zeros if sensors is None else sensors))
        self._poses = np.array(poses, np.float64)

    def __len__(self) -> int:
        return self._n

    @property
    def moments(self) -> Moments:
        """Views."""
        return Moments(*(x[:self._n] for x in (self._laps, self._stamps, self._sensors)))

    @property
    def stamps(self) -> np.ndarray:
        """[n] int64 ns, a view."""
        return self._stamps[:self._n]

    @property
    def poses(self) -> np.ndarray:
        """[n,4,4], a view: writing moves the frames."""
        return self._poses[:self._n]

    @property
    def lap(self) -> int:
        """The newest."""
        return int(self._laps[self._n - 1]) if self._n else 0

    def copy(self, from_lap: int = 0) -> Track:
        """Of the laps from this one on."""
        kept = self.moments.laps >= from_lap
        laps, stamps, sensors = self.moments.where(kept)
        return Track(stamps, self.poses[kept], laps, sensors)

    def add(self, stamp_ns: int, T_world_cam: np.ndarray, sensor: int = 0, lap: int = 0) -> None:
        laps, stamps, sensors = self.moments
        first, end = np.searchsorted(laps, [lap, lap + 1])
        at = int(first + np.searchsorted(stamps[first:end], stamp_ns))
        while at < end and stamps[at] == stamp_ns and sensors[at] < sensor:
            at += 1
        if at < end and (stamps[at], sensors[at]) == (stamp_ns, sensor):
            self._poses[at] = T_world_cam
            return
        n, columns = self._n, ("_laps", "_stamps", "_sensors", "_poses")
        for name, value in zip(columns, (lap, stamp_ns, sensor, T_world_cam)):
            x = getattr(self, name)
            if n == len(x):
                x = np.concatenate([x, np.empty_like(x, shape=(max(n, 64), *x.shape[1:]))])
                setattr(self, name, x)
            x[at + 1:n + 1] = x[at:n].copy()   # nothing, unless it comes late
            x[at] = value
        self._n = n + 1
