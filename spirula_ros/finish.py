"""The end of a recording that was played to a mapper with its own thread: let it catch up, refine, write the report."""
from __future__ import annotations

import math
import time
from concurrent.futures import Future
from typing import Callable

from spirula_gpu.mapper import Mapper
from spirula_gpu.report import Status

from .errors import said
from .params import OutputConfig
from .report import write_report

CATCH_UP_LIMIT_S = 600.0
SAVE_LIMIT_S = 600.0
SLICE_S = 0.5  # refinement is asked for in pieces this long, between which the steps are counted


def finish(mapper: Mapper, command: Callable[..., Future], output: OutputConfig, started: float) -> str:
    """Blocks, so not for the executor's thread. command: the mapper's, which must refuse when the mapper has stopped instead
    of working on this thread; started: time.monotonic() of the first frame. -> one sentence about the outcome. Raises what
    the commands raise, InputError if the folder cannot be written, TimeoutError, and RuntimeError as `waitable` does."""
    wait_until_idle(mapper)
    command("drain").result()
    streamed = time.monotonic()
    refine(mapper, command, output.refine_seconds, output.refine_steps)
    refined = time.monotonic()
    timing = {"stream_s": round(streamed - started, 3), "refine_s": round(refined - streamed, 3),
              "steps_per_s": round(mapper.status().steps / max(refined - started, 1e-9), 2)}
    return write_report(output.report_dir, mapper, ask=lambda *words: command(*words).result(), seconds=round(refined - started, 3), timing=timing, mesh=output.mesh,
                        map_file=output.map_file)


def wait_until_idle(mapper: Mapper, stop=None) -> None:
    """Until every frame is used or dropped. stop: somebody may resume a paused mapper, which is waited for until stop.reason says something. Raises
    TimeoutError, and RuntimeError as `waitable` does."""
    deadline = time.monotonic() + CATCH_UP_LIMIT_S
    while (pending := mapper.ledger.counts().pending) > 0:
        if stop is not None and mapper.status().state == "paused":
            if stop.reason:
                return
            deadline = time.monotonic() + CATCH_UP_LIMIT_S
        else:
            waitable(mapper)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pending} frames still wait for the mapper after {CATCH_UP_LIMIT_S:.0f} s")
        time.sleep(0.05)


def refine(mapper: Mapper, command: Callable[..., Future], seconds: float, steps: int, told: Callable[[float, int], None] = lambda share, made: None) -> int:
    """Training until the first of both limits; 0 = no such limit, both 0, or no keyframes: none at all. told(share of it, steps made) is called
    every SLICE_S, and may raise, which ends it. Returns the steps made. Raises RuntimeError as `waitable` does."""
    if not (seconds or steps):
        return 0
    begin, limit_s, limit_steps, made = time.monotonic(), seconds or math.inf, steps or math.inf, 0
    while waitable(mapper).keyframes:
        spent = time.monotonic() - begin
        share = max(spent / limit_s, made / limit_steps)   # of the whole, over which the rates fall
        told(min(share, 1.0), made)
        if share >= 1:
            break
        made += command("refine", min(limit_s - spent, SLICE_S), (share, share), steps and steps - made).result()
    return made


def waitable(mapper: Mapper) -> Status:
    """The mapper's status. Raises RuntimeError when waiting for it is in vain: it has failed, was stopped or is paused."""
    status = mapper.status()
    if status.state in ("error", "stopped", "paused"):
        reason = {"error": status.last_error, "paused": "resume it first (~/pause with false, or, if the node is inactive, `ros2 lifecycle set` it to activate)"}.get(status.state, "")
        raise RuntimeError(f"the mapper's state is {status.state}" + (f": {reason}" if reason else ""))
    return status


def save_files(mapper: Mapper, paths: dict[str, str], logger) -> int:
    """The last thing before the mapper stops: each of `checkpoint` and `map` that has a path. The exit code: 1 when one was not saved."""
    code = 0
    for what, path in paths.items():
        status = mapper.status()
        if path and not (status.keyframes if what == "checkpoint" else status.gaussians):
            logger.warning(f"{'no frame has come' if status.gaussians else 'the map is empty'}; {path} was not touched")
        elif path:
            try:
                mapper.command(f"save_{what}", path).result(timeout=SAVE_LIMIT_S)
                logger.info(f"{what} saved to {path}")
            except Exception as e:
                logger.error(f"the {what} was not saved to {path}: {said(e)}")
                code = 1
    return code
