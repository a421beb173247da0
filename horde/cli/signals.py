"""Ctrl-C, SIGTERM and a closed terminal (SIGHUP) as something to look at: start and end go step by step, never cut in the middle."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP are counted instead of raised; for the main thread.

    Under `nohup`, SIGHUP stays ignored.

    Attributes:
        stop: set by the first one.
        count: how many there were.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.count = 0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _count(self, _: int, __: FrameType | None) -> None:
        self.count += 1
        self.stop.set()
