"""Long work at a terminal: a bar or lines that say how far it is, and Ctrl-C that ends it with what is there."""
from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any, Callable, TextIO

from tqdm import tqdm


class StopRequest:
    """Time is up, or the user pressed Ctrl-C: `reason` says which ('' = neither). A second Ctrl-C interrupts for real."""

    def __init__(self, max_seconds: float | None):
        self._deadline = time.monotonic() + (max_seconds or float("inf"))
        self._interrupted = False

    @property
    def reason(self) -> str:
        return "interrupted" if self._interrupted else "max_seconds" if time.monotonic() >= self._deadline else ""

    def sleep_until(self, when: float) -> None:
        while not self.reason and (left := min(when, self._deadline) - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def __enter__(self) -> "StopRequest":
        here = threading.current_thread() is threading.main_thread()  # only there can signals be taken
        self._before = {s: signal.signal(s, self._signalled) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if here}
        return self

    def __exit__(self, *_: Any) -> None:
        for s, handler in self._before.items():
            signal.signal(s, handler)

    def _signalled(self, number: int, frame: Any) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True
        print("\ninterrupted: finishing with what is there (again to give up)", file=sys.stderr)


class Progress:
    """A bar on a terminal, otherwise a line every few seconds. figures: what stands behind the percentage; hint: '' or a remark, told once."""
    BAR_S, LINE_S = 0.2, 3.0

    def __init__(self, total: int, screen: TextIO, figures: Callable[[], str], hint: Callable[[], str] = str):
        self._figures, self._hint, self._screen, self._done, self._total, self._shown, self._told = figures, hint, screen, 0, total, time.monotonic(), set()
        self._bar = tqdm(total=total, file=screen, dynamic_ncols=True, bar_format="{percentage:3.0f}% |{bar:20}| {elapsed} {postfix}") \
            if screen.isatty() else None

    def show(self, more: int) -> None:
        """So much more of the total is done."""
        self._done += more
        if time.monotonic() - self._shown < (self.LINE_S if self._bar is None else self.BAR_S):
            return
        self._shown = time.monotonic()
        if (hint := self._hint()) and hint[:40] not in self._told:   # numbers in it change
            self._told.add(hint[:40])
            tqdm.write(f"note: {hint}", file=self._screen)
        if self._bar is None:
            print(f"{100 * self._done // max(self._total, 1):3d}%  {self._figures()}", file=self._screen, flush=True)
        else:
            self._bar.n = self._done
            self._bar.set_postfix_str(self._figures())

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.close()
