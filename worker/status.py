"""What the worker is doing, in numbers: written by its threads, read by the display."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

_RATE_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of one moment; `tokens_per_second` over the last 10 s, `kudos` earned since the start."""

    state: str
    note: str
    running: int
    waiting: int
    submitting: int
    done: int
    failed: int
    tokens_per_second: float
    tokens: int
    kudos: float


class Status:
    """Counters behind a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state, self._note = "connecting", ""
        self._running = self._waiting = self._submitting = 0
        self._done = self._failed = self._tokens = 0
        self._kudos = 0.0
        self._recent: deque[tuple[float, int]] = deque()

    def set_state(self, state: str, note: str = "") -> None:
        """A word for the headline, and a line that explains it."""
        with self._lock:
            self._state, self._note = state, note

    def set_load(self, running: int, waiting: int) -> None:
        """Jobs in the engine, and jobs here that are not in it yet."""
        with self._lock:
            self._running, self._waiting = running, waiting

    def set_submitting(self, count: int) -> None:
        """Results on their way to the broker."""
        with self._lock:
            self._submitting = count

    def add_tokens(self, count: int) -> None:
        """Tokens just generated."""
        with self._lock:
            self._tokens += count
            self._recent.append((time.monotonic(), count))
            self._forget()

    def add_done(self, kudos: float) -> None:
        """A result the broker took."""
        with self._lock:
            self._done += 1
            self._kudos += kudos

    def add_failed(self) -> None:
        """A job that failed here, or whose result nobody wanted."""
        with self._lock:
            self._failed += 1

    def snapshot(self) -> Snapshot:
        """All figures at once."""
        with self._lock:
            self._forget()
            rate = sum(count for _, count in self._recent) / _RATE_WINDOW_SECONDS
            return Snapshot(
                self._state,
                self._note,
                self._running,
                self._waiting,
                self._submitting,
                self._done,
                self._failed,
                rate,
                self._tokens,
                self._kudos,
            )

    def _forget(self) -> None:
        oldest = time.monotonic() - _RATE_WINDOW_SECONDS
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
