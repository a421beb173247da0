"""Wakes polls that wait for work: in this process at once, in others by NOTIFY.

One thread per process holds the one connection that listens. NOTIFY takes a database-wide lock at commit, so new work is
announced by a tick at most every 50 ms and not by each enqueue. A waiting poll holds a thread but no database connection.
"""

from __future__ import annotations

import hashlib
import select
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import psycopg2
import sqlalchemy as sa
import structlog

from horde.lifecycle.enqueue import ANY_MODEL

CHANNEL = "horde_queue"
TICK = 0.05
# A payload holds at most 8,000 bytes.
DIGESTS_PER_NOTICE = 400
log = structlog.get_logger(__name__)


def _digest(kind: str, model: str) -> str:
    """A (kind, model) in 16 characters: a model's name may be longer than a notification."""
    return hashlib.blake2b(f"{kind}:{model}".encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


class Waiter(threading.Event):
    """One poll and the models it could run; set when work for one of them came."""

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
    """Who waits for which models.

    Args:
        url: SQLAlchemy URL of the database.
        most_waiting: polls that may wait at once; a further one is answered without waiting.
    """

    def __init__(self, url: str, *, most_waiting: int) -> None:
        self._url = url
        self._most_waiting = most_waiting
        self._lock = threading.Lock()
        self._waiters: list[Waiter] = []
        self._places: set[object] = set()
        self._holders: Counter[object] = Counter()
        self._fresh: set[str] = set()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that listens and announces."""
        self._thread = threading.Thread(target=self._run, name="wakeup", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wake everybody and end the thread."""
        self._closed.set()
        with self._lock:
            for waiter in self._waiters:
                waiter.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    @property
    def closed(self) -> bool:
        """Whether the process is shutting down."""
        return self._closed.is_set()

    @contextmanager
    def place(self, shares: Mapping[object, int] | None = None) -> Iterator[bool]:
        """A place among those that may wait; False when all are taken.

        Args:
            shares: who takes it (a worker, its owner) -> how many places that one may hold at once.
        """
        shares = shares or {}
        with self._lock:
            granted = len(self._places) < self._most_waiting and all(
                self._holders[holder] < most for holder, most in shares.items()
            )
            place = object()
            if granted:
                self._places.add(place)
                self._holders.update(shares.keys())
        try:
            yield granted
        finally:
            if granted:
                with self._lock:
                    self._places.discard(place)
                    self._holders.subtract(shares.keys())
                    for holder in shares:
                        if self._holders[holder] <= 0:
                            del self._holders[holder]

    @contextmanager
    def waiting(self, kind: str, models: Iterable[str]) -> Iterator[Waiter]:
        """Be woken when work for one of these models comes.

        Look for work after entering and after each wake-up, so that nothing comes unseen in between. A poll that leaves passes
        a wake-up it did not use on to the next one.
        """
        waiter = Waiter(frozenset(_digest(kind, model) for model in (*models, ANY_MODEL)))
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
        with self._lock:
            self._fresh |= digests

    def _wake(self, keys: frozenset[str], count: int, *, start: int = 0) -> None:
        with self._lock:
            for waiter in self._waiters[start:]:
                if count <= 0:
                    return
                # A poll waits for its models and for `*`; work that names no model comes as `*` and suits everyone.
                if not waiter.is_set() and waiter.keys & keys:
                    waiter.tell(keys)
                    count -= 1

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except (psycopg2.Error, OSError) as error:
                # Polls look again by themselves every few seconds; a lost listener only makes them slower.
                log.warning("wakeup.listener_lost", error=type(error).__name__)
                self._closed.wait(1.0)

    def _listen(self) -> None:
        connection = psycopg2.connect(
            sa.make_url(self._url).set(drivername="postgresql").render_as_string(hide_password=False)
        )
        try:
            connection.autocommit = True
            cursor = connection.cursor()
            cursor.execute(f"LISTEN {CHANNEL}")
            own = connection.info.backend_pid
            last_tick = 0.0
            while not self._closed.is_set():
                readable, _, _ = select.select([connection], [], [], TICK)
                if readable:
                    connection.poll()
                while connection.notifies:
                    notice = connection.notifies.pop(0)
                    if notice.pid != own:
                        self._wake(frozenset(notice.payload.split(",")), 1_000)
                if time.monotonic() - last_tick >= TICK:
                    last_tick = time.monotonic()
                    self._tell_others(cursor)
        finally:
            connection.close()

    def _tell_others(self, cursor: psycopg2.extensions.cursor) -> None:
        with self._lock:
            fresh, self._fresh = sorted(self._fresh), set()
        try:
            for start in range(0, len(fresh), DIGESTS_PER_NOTICE):
                payload = ",".join(fresh[start : start + DIGESTS_PER_NOTICE])
                cursor.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload))
        except psycopg2.Error:
            with self._lock:
                self._fresh.update(fresh)
            raise
