"""Frames on their way from the thread that receives them to the one that owns the map."""
from __future__ import annotations

import threading
import time
from collections import deque
from typing import Callable

from .camera import Frame
from .report import FrameLedger


class Inbox:
    """Bounded; the oldest frame is dropped and counted. Owns its lock."""

    def __init__(self, ledger: FrameLedger):
        self._lock, self._frames, self._ledger = threading.Lock(), deque(), ledger
        self.wake = threading.Event()   # set when there may be something to do

    def __len__(self) -> int:
        with self._lock:
            return len(self._frames)

    def put(self, frame: Frame, limit: int) -> None:
        with self._lock:
            self._frames.append((time.monotonic(), frame))
            while len(self._frames) > limit:
                self._frames.popleft()
                self._ledger.dropped("inbox_full")
        self.wake.set()

    def take(self) -> tuple[float, Frame] | None:
        """(arrival by time.monotonic(), frame), or None."""
        with self._lock:
            self.wake.clear()
            return self._frames.popleft() if self._frames else None

    def frames(self) -> list[Frame]:
        """What waits, oldest first."""
        with self._lock:
            return [frame for _, frame in self._frames]

    def replace(self, change: Callable[[Frame], Frame]) -> None:
        """Each frame that waits by change(frame)."""
        with self._lock:
            self._frames = deque((arrival, change(frame)) for arrival, frame in self._frames)

    def drop_all(self, reason: str) -> None:
        self.drop(reason, lambda frame: True)

    def drop(self, reason: str, which: Callable[[Frame], bool]) -> None:
        with self._lock:
            kept = deque(item for item in self._frames if not which(item[1]))
            self._ledger.dropped(reason, len(self._frames) - len(kept))
            self._frames = kept
