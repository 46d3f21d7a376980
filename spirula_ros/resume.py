"""Going on with the map of an earlier run: what the frames that come must agree with, and what the user is told."""
from __future__ import annotations

import os
import zlib
from dataclasses import replace
from typing import Iterator

import numpy as np

from spirula_gpu.checkpoint import Resumed
from spirula_gpu.checkpoint_file import Reader
from spirula_gpu.config import CheckpointConfig

from .errors import InputError
from .intake import IntakeConfig

REMEDY = "if both have the same map frame: --set checkpoint.any_source=true; else start without checkpoint.resume"


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


# ---- where the frames come from ------------------------------------------------------------------------------------------

def live_source(image: str, poses: str) -> str:
    """checkpoint.source of a node on these topics; poses: a topic, or tf."""
    return f"live: images of {image}, poses of {poses}"


def bag_source(name: str, first_image: bytes, image: str, poses: str) -> str:
    """.. and of a replay: a recording is told by its first image message, whatever its file is called."""
    return live_source(image, poses).replace("live", f"{name} (first image {zlib.crc32(first_image):08x})", 1)


def other_source(then: str, now: str) -> str:
    """'' or how the frames of this run, of source `now`, are not those of the map; what either does not know makes no difference."""
    if not (then and now):
        return ""
    (what_then, _, topics_then), (what_now, _, topics_now) = then.rpartition(": "), now.rpartition(": ")
    recordings = {what.rpartition(" (")[2] for what in (what_then, what_now) if what != "live"}
    return f"its map is of {then}, this run of {now}" if topics_then != topics_now or len(recordings) > 1 else ""


def refuse_other_source(config: CheckpointConfig) -> None:
    """Before the map is read: raises InputError when the checkpoint that will be resumed is of another source, and CheckpointError."""
    if config.any_source or not (config.resume and os.path.exists(config.path)):
        return
    with Reader(config.path) as reader:
        other = other_source(str(reader.facts["config"].get("checkpoint.source", "")), config.source)
    if other:
        raise InputError(f"{config.path}: {other}; {REMEDY}")


def far_from_map(done: Resumed | None, T_world_cam: np.ndarray) -> str:
    """'' or that the first camera [4,4] after the restart can see nothing of the map."""
    if done is None:
        return ""
    nearest_m = float(np.linalg.norm(done.centers - T_world_cam[:3, 3], axis=1).min())
    return "" if nearest_m <= done.sight_m else (f"{done.path}: the first frame lies {nearest_m:.1f} m from the nearest keyframe of its map, which is seen from at most "
                                                 f"{done.sight_m:g} m (2 insert.max_depth_m): is it the same map frame?")
