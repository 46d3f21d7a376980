"""What becomes of the map when the stamps of images jump back (intake.map_on_time_jump)."""
from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any, Callable

from spirula_gpu.formats import format_of

from .params import RosConfig


class TimeJump:
    """command, status: the mapper's; say: called with a line for the log, maybe from the mapper's thread. Raises ValueError when the maps have nowhere to go."""

    def __init__(self, ros: RosConfig, command: Callable[..., Future], status: Callable[[], Any], say: Callable[[str], None]):
        self._policy, self._path, self._command, self._status, self._say = ros.intake.map_on_time_jump, ros.output.map_path, command, status, say
        if self._policy == "new_session" and not self._path:
            raise ValueError("intake.map_on_time_jump = new_session saves each map beside output.map_path, which is empty; set it, or take reset")

    def restarted(self, lap: int) -> None:
        """Lap number `lap` begins; no frame of it has been submitted. Does not wait."""
        if self._policy == "keep":
            self._say("the stamps of images jumped back: the map goes on (intake.map_on_time_jump keep)")
        elif self._policy == "reset" or not self._status().gaussians:
            self._begin(lap, "the stamps of images jumped back: the map begins anew")
        else:
            path = free_path(self._path)
            self._command("save_map", path).add_done_callback(lambda done: self._saved(done, path, lap))

    def _saved(self, done: Future, path: str, lap: int) -> None:
        """A map that could not be saved is kept."""
        if done.exception() is not None:
            self._say(f"the stamps of images jumped back, but the map was not saved to {path} and goes on: {done.exception()}")
        else:
            self._begin(lap, f"the stamps of images jumped back: {done.result()} Gaussians saved to {path}, a new map begins")

    def _begin(self, lap: int, text: str) -> None:
        self._command("reset", lap)
        self._say(text)


def free_path(path: str) -> str:
    """map.ply -> map.session1.ply, or the next number of which there is no file: that of another run is not written over."""
    suffix, n = format_of(path).suffix, 1
    while os.path.exists(numbered := f"{path[:-len(suffix)]}.session{n}{suffix}"):
        n += 1
    return numbered
