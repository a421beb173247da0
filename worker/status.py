"""What the worker is doing, in numbers: written by its threads, read by the display."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from worker.engine.interface import EngineStatistics

_RATE_WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures of one moment; `tokens_per_second` over the last 10 s, `kudos` earned since the start.

    `waiting` counts jobs here and in the engine that have not begun, `stopped` those the broker took back. `engine` has
    the cache's figures; `cache_hit_rate` is the share of prompt tokens found there, None before the first prompt.
    """

    state: str
    note: str
    running: int
    waiting: int
    submitting: int
    done: int
    failed: int
    stopped: int
    tokens_per_second: float
    tokens: int
    kudos: float
    engine: EngineStatistics

    @property
    def cache_hit_rate(self) -> float | None:
        """0 to 1."""
        return self.engine.prefix_hits / self.engine.prefix_queries if self.engine.prefix_queries else None


class Status:
    """Counters behind a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state, self._note = "connecting", ""
        self._queued = self._submitting = 0
        self._done = self._failed = self._stopped = self._tokens = 0
        self._engine = EngineStatistics()
        self._kudos = 0.0
        self._recent: deque[tuple[float, int]] = deque()

    def set_state(self, state: str, note: str = "") -> None:
        """A word for the headline, and a line that explains it."""
        with self._lock:
            self._state, self._note = state, note

    def set_engine(self, figures: EngineStatistics, *, queued: int) -> None:
        """How the engine is doing, and how many jobs are here that are not in it yet."""
        with self._lock:
            self._engine, self._queued = figures, queued

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

    def add_stopped(self) -> None:
        """A job that the broker took back."""
        with self._lock:
            self._stopped += 1

    def snapshot(self) -> Snapshot:
        """All figures at once."""
        with self._lock:
            self._forget()
            rate = sum(count for _, count in self._recent) / _RATE_WINDOW_SECONDS
            return Snapshot(
                self._state,
                self._note,
                self._engine.running,
                self._engine.waiting + self._queued,
                self._submitting,
                self._done,
                self._failed,
                self._stopped,
                rate,
                self._tokens,
                self._kudos,
                self._engine,
            )

    def _forget(self) -> None:
        oldest = time.monotonic() - _RATE_WINDOW_SECONDS
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
