"""train_node as a process of its own, for `spirula replay --via-ros` and for tests."""
from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from .dds import fastdds_profile
from .params import yaml_text
from .share import share_directory

STOP_LIMIT_S = 60
PARENT = "SPIRULA_PARENT"  # environment: the node ends as on SIGTERM when its parent is no longer this process (which may have been killed)


class NodeError(RuntimeError):
    """The node has ended, failed or does not answer. The message says what was waited for and shows the node's log."""


class NodeProcess:
    """Starts the installed train_node in a session of its own, so that a Ctrl-C at the terminal is not also its Ctrl-C.
    parameters: {dotted name: value}. `folder` gets its parameters, node.yaml, and what it says, node.log."""

    def __init__(self, folder: Path, parameters: dict[str, Any], remap: dict[str, str] | None = None):
        self.log = folder / "node.log"
        (folder / "node.yaml").write_text(yaml_text(parameters))
        environment = {**os.environ, **fastdds_profile(os.environ), PARENT: str(os.getpid())}
        remaps = [word for old, new in (remap or {}).items() for word in ("-r", f"{old}:={new}")]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([share_directory().parents[1] / "lib" / "spirula_ros" / "train_node", "--ros-args",
                                             "--params-file", folder / "node.yaml", *remaps], stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, env=environment, start_new_session=True)

    def check(self, waiting_for: str = "") -> None:
        """Raises NodeError when it has ended."""
        if (code := self.process.poll()) is not None:
            raise NodeError(f"train_node ended with exit code {code}" + (f" while waiting for {waiting_for}" if waiting_for else "") + f":\n{self.tail()}")

    def tail(self, lines: int = 20) -> str:
        return "\n".join("  " + line for line in self.log.read_text(errors="replace").splitlines()[-lines:]) or "  (it said nothing)"

    def stop(self, number: int = signal.SIGINT) -> int:
        """Asks it to end, waits, and insists after a minute. Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()

    def __enter__(self) -> "NodeProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
