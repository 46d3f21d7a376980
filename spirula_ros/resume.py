"""Going on with the map of an earlier run: what the frames that come must agree with, and what the user is told."""
from __future__ import annotations

import os
from dataclasses import replace
from typing import Iterator

from spirula_gpu.checkpoint import Resumed
from spirula_gpu.config import CheckpointConfig

from .errors import InputError
from .intake import IntakeConfig


def intake_for(done: Resumed | None, config: IntakeConfig) -> IntakeConfig:
    """The map keeps its frame. Raises InputError when intake.map_frame is another."""
    if done is None or not done.world_frame:
        return config
    if config.map_frame not in ("", done.world_frame):
        raise InputError(f"{done.path}: its map is in frame '{done.world_frame}', intake.map_frame is '{config.map_frame}'; leave that empty, or start without checkpoint.resume")
    return replace(config, map_frame=done.world_frame)


def describe(done: Resumed | None, config: CheckpointConfig) -> Iterator[str]:
    """Lines for the user; none when there is nothing to say."""
    if done is not None:
        yield f"resumed {done.path}: {done.gaussians} Gaussians, {done.keyframes} keyframes, {done.steps} steps; {done.lost_frames} frames were on their way and are lost"
        yield from (f"{name} was {then}, is {now}" for name, (then, now) in done.changed.items())
    elif config.resume:
        yield f"{config.path} is not there yet: a new map begins"
    elif os.path.exists(config.path):
        yield f"{config.path} is there and will be written over: checkpoint.resume is false"
