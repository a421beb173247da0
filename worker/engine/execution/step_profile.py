"""Where the time of the steps goes, as sums by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepProfile:
    """Seconds spent in each phase since the start; phases do not overlap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens within it under `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
