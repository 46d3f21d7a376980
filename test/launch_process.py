"""A launch file in processes of its own, for tests, and a robot of this process that feeds its node."""
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Launched:
    """Context manager: `python launch_file.py FILE arguments` in a session of its own: like a terminal, and unlike a shell's background job, it takes SIGINT."""

    def __init__(self, file: Path, arguments: list[str], environment: dict[str, str], log: Path):
        self._command, self._environment, self.log = [sys.executable, HERE / "launch_file.py", file, *arguments], environment, log

    def __enter__(self):
        with self.log.open("w") as log:
            self.process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def text(self) -> str:
        return self.log.read_text()

    def until(self, text: str, seconds: float = 60.0, times: int = 1, meanwhile=lambda: time.sleep(0.05)) -> None:
        """Waits until the log has `text` so often."""
        deadline = time.monotonic() + seconds
        while self.text.count(text) < times:
            assert self.process.poll() is None and time.monotonic() < deadline, f"waited for '{text}':\n{self.text}"
            meanwhile()

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> str:
        """The whole output after a clean end."""
        assert self.process.wait(timeout=60) == 0, self.text
        assert "Traceback" not in self.text, self.text
        return self.text
