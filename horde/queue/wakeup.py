"""Wakes polls that wait for work: in this process at once, in others by `horde.db.notices`.

A waiting poll holds a thread but no database connection.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from horde.db.notices import Notices

CHANNEL = "horde_queue"
# Of another process it is not known how many slots came: everybody there looks.
EVERYBODY = 1_000


def _digest(kind: str, model: str) -> str:
    """A (kind, model) in 16 characters: a model's name may be longer than a notification."""
    return hashlib.blake2b(f"{kind}:{model}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Waiter(threading.Event):
    """One poll and what it could take; set when work for one of them came."""

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__()
        self.keys = keys
        self._told: frozenset[str] = frozenset()

    def tell(self, keys: frozenset[str]) -> None:
        """Wake it, for these keys."""
        self._told = keys
        self.set()

    def take(self) -> frozenset[str]:
        """Clear it; what it was told, if it was."""
        told = self._told if self.is_set() else frozenset()
        self.clear()
        return told


class WakeUps:
    """Who waits for which models; closed before the notices it lives on."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []
        self._closed = threading.Event()
        notices.subscribe(CHANNEL, lambda keys: self._wake(keys, EVERYBODY))

    def close(self) -> None:
        """Wake everybody: there will be no more work from here."""
        self._closed.set()
        with self._lock:
            for waiter in self._waiters:
                waiter.set()

    @property
    def closed(self) -> bool:
        """Whether the process is shutting down."""
        return self._closed.is_set()

    @contextmanager
    def waiting(self, keys: Iterable[tuple[str, str]]) -> Iterator[Waiter]:
        """Be woken when work under one of these (kind, model) comes; `*` as a model is work for any.

        Look for work after entering and after each wake-up, so that nothing comes unseen in between. A poll that leaves passes
        a wake-up it did not use on to the next one.
        """
        waiter = Waiter(frozenset(_digest(kind, model) for kind, model in keys))
        with self._lock:
            self._waiters.append(waiter)
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters.remove(waiter)
            if told := waiter.take():
                self._wake(told, 1)

    def pass_on(self, waiter: Waiter, told: frozenset[str]) -> None:
        """What this poll was woken for is not for it: wake the next in line, so that the work finds whom it suits."""
        if not told:
            return
        with self._lock:
            place = self._waiters.index(waiter) + 1
        self._wake(told, 1, start=place)

    def announce(self, keys: Iterable[tuple[str, str]], slots: int = 1) -> None:
        """Work came under these (kind, model): wake up to `slots` polls here now, and those of other processes soon."""
        digests = frozenset(_digest(kind, model) for kind, model in keys)
        self._wake(digests, slots)
        self._notices.tell(CHANNEL, digests)

    def _wake(self, keys: frozenset[str], count: int, *, start: int = 0) -> None:
        with self._lock:
            for waiter in self._waiters[start:]:
                if count <= 0:
                    return
                # A poll waits for `*` beside its models; work that names no model comes as `*` and suits everyone.
                if not waiter.is_set() and waiter.keys & keys:
                    waiter.tell(keys)
                    count -= 1
