"""Places for those that wait: a long poll or a stream holds a thread, and short requests must always find one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Places:
    """How many may wait in this process at once, and who holds how many of these places.

    Args:
        most: places in all, those of polls and of streams.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._taken = 0
        self._holders: Counter[object] = Counter()

    @property
    def most_polls(self) -> int:
        """Places that polls may hold together: workers that wait for work leave a quarter to clients."""
        return max(1, self.most * 3 // 4)

    @property
    def taken(self) -> int:
        """Places that are held now."""
        with self._lock:
            return self._taken

    def held_by(self, holder: object) -> int:
        """Places that one of the `shares` holds now."""
        with self._lock:
            return self._holders[holder]

    @contextmanager
    def place(self, shares: Mapping[object, int] | None = None) -> Iterator[bool]:
        """A place among those that may wait; False when all are taken.

        Args:
            shares: who takes it (a worker, its owner, polls as such) -> how many places that one may hold at once.
        """
        shares = shares or {}
        with self._lock:
            granted = self._taken < self.most and all(self._holders[holder] < most for holder, most in shares.items())
            if granted:
                self._taken += 1
                self._holders.update(shares.keys())
        try:
            yield granted
        finally:
            if granted:
                with self._lock:
                    self._taken -= 1
                    self._holders.subtract(shares.keys())
                    for holder in shares:
                        if self._holders[holder] <= 0:
                            del self._holders[holder]
