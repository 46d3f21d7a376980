"""Growth under a cap, as MCMC sampling (Kheradmand et al. 2024): the dead move onto the living, then the map grows by a share.

Both go through the engine's relocation: k Gaussians at one place share its opacity and shrink so that the rendered sum stays.
Those that arrive start with zero moments and a step count of zero; the one they came from keeps its own. gsplat 1.5.3 does the same
when it adds; when it relocates it clears the source instead, and leaves the arrival with the moments of its former life.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .config import param
from .native import Engine


TRANSPARENT = -20.0  # logit of an opacity of 2e-9


@dataclass(frozen=True)
class GrowConfig:
    start: int = param(500, "steps", "first relocation and growth", 0, 10_000_000)
    stop: float = param(0.85, "", "share of the run's steps after which nothing is relocated or added", 0, 1)
    every: int = param(100, "steps", "between them", 1, 1_000_000)
    rate: float = param(0.05, "", "growth each time, as a share of the Gaussians", 0, 1)
    dead_opacity: float = param(0.005, "", "a Gaussian at or below this opacity moves; also the least that a division leaves", 0.0001, 0.5)
    error_power: float = param(0.0, "", "places are drawn by opacity * error^this (error: stat.error); 0: by opacity alone", 0, 4)


class Growth:
    """`cap`: the map never holds more Gaussians; the engine's own limit must not be lower."""

    def __init__(self, engine: Engine, config: GrowConfig, cap: int, seed: int = 0):
        self._engine, self._config, self._cap = engine, config, cap
        self._rng = np.random.default_rng(seed)
        self.relocated = self.added = 0

    def apply(self) -> None:
        """Move the dead, then add up to the cap."""
        if not len(self._engine):
            return
        weight, dead = self._weight()
        total = weight.sum()
        if not total > 0:
            return  # nothing is alive that could be divided
        moves, room = np.flatnonzero(dead), self._cap - len(self._engine)
        self._place(moves, weight)
        self.relocated += len(moves)
        n_new = max(min(room, int(self._config.rate * len(self._engine))), 0)
        if n_new:
            weight = self._weight()[0]  # divided ones are worth less now
            first = len(self._engine)
            append_transparent(self._engine, n_new)
            self._place(np.arange(first, first + n_new), weight)
            self.added += n_new

    def _weight(self) -> tuple[np.ndarray, np.ndarray]:
        """What places are drawn by [n] float64, zero for the dead; and who is dead [n]."""
        opacity = 1 / (1 + np.exp(-self._engine.read("map.logit_opacity").astype(np.float64)))
        dead = ~(opacity > self._config.dead_opacity)  # NaN is dead too
        weight = opacity
        if self._config.error_power:
            weight = opacity * np.nan_to_num(self._engine.read("stat.error"), posinf=0).astype(np.float64) ** self._config.error_power
        return np.where(dead, 0, weight), dead

    def _place(self, dst: np.ndarray, weight: np.ndarray) -> None:
        """Move `dst` onto living ones, drawn with replacement."""
        if len(dst):
            ladder = np.cumsum(weight)
            src = np.searchsorted(ladder, self._rng.random(len(dst)) * ladder[-1], side="right")
            self._engine.relocate(dst, np.minimum(src, np.flatnonzero(weight)[-1]), self._config.dead_opacity)


def append_transparent(engine: Engine, n: int) -> None:
    """n more Gaussians, which relocation fills at once; where it cannot, they are not seen and pruning removes them."""
    if n:
        coefficients = (engine.sh_degree + 1) ** 2
        engine.append(np.zeros((n, 3)), np.tile([1, 0, 0, 0], (n, 1)), np.zeros((n, 3)), np.full(n, TRANSPARENT), np.zeros((n, coefficients, 3)))
