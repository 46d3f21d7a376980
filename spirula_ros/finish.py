"""The end of a recording that was played to a mapper with its own thread: let it catch up, refine, write the report."""
from __future__ import annotations

import time

from spirula_gpu.mapper import Mapper

from .params import OutputConfig
from .report import write_report

CATCH_UP_LIMIT_S = 600.0
SLICE_S = 0.5  # refinement is asked for in pieces this long, between which the steps are counted


def finish(mapper: Mapper, output: OutputConfig, started: float) -> str:
    """Blocks, so not for the executor's thread. started: time.monotonic() of the first frame. -> one sentence about the
    outcome. Raises what the mapper's commands raise, InputError if the folder cannot be written, and TimeoutError."""
    wait_until_idle(mapper)
    streamed = time.monotonic()
    refine(mapper, output.refine_seconds, output.refine_steps)
    refined = time.monotonic()
    timing = {"stream_s": round(streamed - started, 3), "refine_s": round(refined - streamed, 3),
              "steps_per_s": round(mapper.status().steps / max(refined - started, 1e-9), 2)}
    return write_report(output.report_dir, mapper, seconds=round(refined - started, 3), timing=timing, mesh=output.mesh)


def wait_until_idle(mapper: Mapper) -> None:
    """Until every frame is used or dropped. Raises RuntimeError when the mapper has failed, TimeoutError."""
    deadline = time.monotonic() + CATCH_UP_LIMIT_S
    while (pending := mapper.ledger.counts().pending) > 0:
        status = mapper.status()
        if status.state == "error":
            raise RuntimeError(status.last_error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pending} frames still wait for the mapper after {CATCH_UP_LIMIT_S:.0f} s")
        time.sleep(0.05)


def refine(mapper: Mapper, seconds: float, steps: int) -> None:
    """Training until the first of both limits; 0 = no such limit, both 0 = none at all."""
    if not (seconds or steps) or not mapper.status().keyframes:
        return
    deadline, target = time.monotonic() + (seconds or float("inf")), mapper.status().steps + (steps or float("inf"))
    while (left := deadline - time.monotonic()) > 0 and mapper.status().steps < target:
        mapper.command("refine", min(left, SLICE_S)).result()
