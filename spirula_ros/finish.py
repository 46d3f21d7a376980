"""The end of a recording that was played to the node: train what is still due, refine, measure, write the report."""
from __future__ import annotations

import time

from spirula_gpu.mapper import Mapper

from .params import OutputConfig
from .report import write_report

IDLE_LIMIT_S = 600.0


def finish(mapper: Mapper, output: OutputConfig) -> str:
    """Runs beside the mapper's thread and only asks it through commands. -> a sentence about what was written.
    Raises what the commands raise, TimeoutError when the mapper does not get through its frames."""
    wait_until_idle(mapper)
    if output.refine_seconds > 0:
        mapper.command("refine", output.refine_seconds).result()
    report = write_report(output.report_dir, mapper)
    return report


def wait_until_idle(mapper: Mapper) -> None:
    """Until every frame is accounted for."""
    deadline = time.monotonic() + IDLE_LIMIT_S
    while (pending := mapper.ledger.counts().pending) > 0:
        status = mapper.status()
        if status.state == "error":
            raise RuntimeError(status.last_error)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{pending} frames still wait for the mapper after {IDLE_LIMIT_S:.0f} s")
        time.sleep(0.05)
