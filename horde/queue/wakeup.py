"""Wakes polls that wait for work: in this process at once, in others by NOTIFY.

One thread per process holds the one connection that listens. NOTIFY takes a database-wide lock at commit, so new work is
announced by a tick at most every 50 ms and not by each enqueue. A waiting poll holds a thread but no database connection.
"""

from __future__ import annotations

import json
import select
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psycopg2
import sqlalchemy as sa
import structlog

from horde.lifecycle.enqueue import ANY_MODEL

CHANNEL = "horde_queue"
TICK = 0.05
log = structlog.get_logger(__name__)


class _Waiter:
    """One poll and the models it could run."""

    def __init__(self, keys: frozenset[tuple[str, str]]) -> None:
        self.keys = keys
        self.event = threading.Event()


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
        self._waiters: list[_Waiter] = []
        self._places = 0
        self._fresh: set[tuple[str, str]] = set()
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
                waiter.event.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    @property
    def closed(self) -> bool:
        """Whether the process is shutting down."""
        return self._closed.is_set()

    @contextmanager
    def place(self) -> Iterator[bool]:
        """A place among those that may wait; False when all are taken."""
        with self._lock:
            granted = self._places < self._most_waiting
            self._places += granted
        try:
            yield granted
        finally:
            with self._lock:
                self._places -= granted

    @contextmanager
    def waiting(self, kind: str, models: Iterable[str]) -> Iterator[threading.Event]:
        """Be woken when work for one of these models comes.

        Look for work after entering and after each wake-up, so that nothing comes unseen in between. A poll that leaves passes
        a wake-up it did not use on to the next one.
        """
        waiter = _Waiter(frozenset((kind, model) for model in (*models, ANY_MODEL)))
        with self._lock:
            self._waiters.append(waiter)
        try:
            yield waiter.event
        finally:
            with self._lock:
                self._waiters.remove(waiter)
                unused = waiter.event.is_set()
            if unused:
                self._wake(waiter.keys)

    def announce(self, keys: Iterable[tuple[str, str]], slots: int = 1) -> None:
        """Work came under these (kind, model): wake up to `slots` polls here now, and those of other processes soon."""
        keys = frozenset(keys)
        self._wake(keys, slots)
        with self._lock:
            self._fresh |= keys

    def _wake(self, keys: frozenset[tuple[str, str]], count: int = 1) -> None:
        with self._lock:
            for waiter in self._waiters:
                if count <= 0:
                    return
                # Somebody who runs any model waits for `*` only, a request for any model suits everyone.
                if not waiter.event.is_set() and waiter.keys & keys:
                    waiter.event.set()
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
                        self._wake(frozenset((kind, model) for kind, model in json.loads(notice.payload)), count=1_000)
                if time.monotonic() - last_tick >= TICK:
                    last_tick = time.monotonic()
                    self._tell_others(cursor)
        finally:
            connection.close()

    def _tell_others(self, cursor: psycopg2.extensions.cursor) -> None:
        with self._lock:
            fresh, self._fresh = sorted(self._fresh), set()
        # A payload holds at most 8,000 bytes.
        for start in range(0, len(fresh), 20):
            cursor.execute("SELECT pg_notify(%s, %s)", (CHANNEL, json.dumps(fresh[start : start + 20])))
