"""Hands what workers post to the clients that wait for it.

Posted output lies in the database. One thread a process reads what is new of every request that somebody follows and that was
announced, all in one statement, and hands it out; who waits holds no database connection. An announcement only says that a
look is worth while: one that comes twice, late or never changes nothing but the time, for each request is looked at now and
then anyway. A follower that has not taken what it was given is not read for, so that a slow client costs no memory.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from horde.db.database import Database
from horde.db.notices import Notices
from horde.errors import HordeError
from horde.streams.output import Output, Reader, read_output

CHANNEL = "horde_streams"
# From one read to the next at least this long: announcements that come one by one are read together.
GATHER = 0.005
LOOK_AGAIN = 5.0
RENEW_EVERY = 5.0
RETRY = 1.0
log = structlog.get_logger(__name__)

Renew = Callable[[Sequence[uuid.UUID]], object]


class Follower:
    """One client of a request; `next` is for one thread, `wake` for any."""

    def __init__(self, hub: Streams, lock: threading.Lock, request_id: uuid.UUID, n: int) -> None:
        self.request_id = request_id
        self.reader = Reader(request_id, n)
        # All under the hub's lock. `stale`: there may be more than was read for it.
        self.changed = threading.Condition(lock)
        self.output: Output | None = None
        self.stale = False
        self.ended = False
        self._hub = hub
        self._woken = False

    def next(self, timeout: float) -> Output | None:
        """What is new since the last call, waited for up to `timeout` seconds.

        None: the time is over, or it was woken, or (at once, and ever after) the process is shutting down. Nothing follows an
        output that is done or gone.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.output is not None or self._woken or self._hub.closed, timeout)
            output, self.output = self.output, None
            if output is None:
                self._woken = False
            elif self.stale and not self.ended:
                self._hub.want(self)
        return output

    def wake(self) -> None:
        """Have `next` return at once, this one or the one to come."""
        with self.changed:
            self._woken = True
            self.changed.notify_all()


class Streams:
    """Who follows which request, in one process.

    Args:
        renew: called every few seconds with the requests that are followed, to say that somebody waits for them.
    """

    def __init__(self, database: Database, notices: Notices, *, renew: Renew) -> None:
        self._database = database
        self._notices = notices
        self._renew = renew
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._followers: dict[str, list[Follower]] = {}
        # Stale followers that have taken what they were given: to read for now.
        self._wanted: dict[Follower, None] = {}
        self._look_again = 0.0
        self._threads: list[threading.Thread] = []
        notices.subscribe(CHANNEL, self._mark)

    def start(self) -> None:
        """Start reading and renewing."""
        for name, work in (("streams", self._read_on), ("stream-renewal", self._renew_on)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Wake every follower, and hand out nothing more."""
        self._closed.set()
        with self._lock:
            self._work.notify_all()
            for follower in self._all():
                follower.changed.notify_all()

    def close(self) -> None:
        """Stop, and wait for the threads."""
        self.stop()
        for thread in self._threads:
            thread.join(timeout=5)

    @property
    def closed(self) -> bool:
        """Whether the process is shutting down."""
        return self._closed.is_set()

    @property
    def following(self) -> int:
        """How many clients follow a request now."""
        with self._lock:
            return len(self._all())

    def announce(self, request_ids: Iterable[uuid.UUID]) -> None:
        """These requests have changed, and the change is committed: whoever follows them, in any process, is to be told."""
        keys = frozenset(request_id.hex for request_id in request_ids)
        self._mark(keys)
        self._notices.tell(CHANNEL, keys)

    @contextmanager
    def follow(self, request_id: uuid.UUID, n: int) -> Iterator[Follower]:
        """Be handed the output of a request with n slots, from its first token on.

        Several may follow one request: each is handed everything.
        """
        follower = Follower(self, self._lock, request_id, n)
        key = request_id.hex
        with self._lock:
            self._followers.setdefault(key, []).append(follower)
            self._mark_one(follower)
        try:
            yield follower
        finally:
            with self._lock:
                self._wanted.pop(follower, None)
                others = self._followers[key]
                others.remove(follower)
                if not others:
                    del self._followers[key]

    def want(self, follower: Follower) -> None:
        """Read for this follower; under the lock."""
        first = not self._wanted
        self._wanted[follower] = None
        if first:
            self._work.notify()

    def _all(self) -> list[Follower]:
        return [follower for followers in self._followers.values() for follower in followers]

    def _mark(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                for follower in self._followers.get(key, ()):
                    self._mark_one(follower)

    def _mark_one(self, follower: Follower) -> None:
        if follower.ended:
            return
        follower.stale = True
        if follower.output is None:
            self.want(follower)

    # --- the thread that reads

    def _read_on(self) -> None:
        last, failing = -GATHER, False
        while not self._closed.wait(max(0.0, last + GATHER - time.monotonic())):
            followers = self._next_wanted()
            last = time.monotonic()
            failing = not self._read_for(followers, failing=failing)

    def _next_wanted(self) -> list[Follower]:
        """Whom to read for, once there is somebody; nobody at the end."""
        with self._lock:
            while not self._closed.is_set():
                now = time.monotonic()
                if now >= self._look_again:
                    self._look_again = now + LOOK_AGAIN
                    for follower in self._all():
                        self._mark_one(follower)
                if self._wanted:
                    followers, self._wanted = list(self._wanted), {}
                    for follower in followers:
                        # Before the read: what is announced meanwhile may not be in it.
                        follower.stale = False
                    return followers
                self._work.wait(self._look_again - now)
        return []

    def _read_for(self, followers: Sequence[Follower], *, failing: bool) -> bool:
        """Read and hand out; False when the database does not let it: then once more, a little later."""
        if not followers:
            return True
        readers = [follower.reader for follower in followers]
        try:
            found = self._database.read(lambda tx: read_output(tx, readers))
        except Exception as error:  # noqa: BLE001 while this thread lives, every stream may yet go on
            if not failing:
                _log_failure("streams.not_read", error)
            with self._lock:
                for follower in followers:
                    self._mark_one(follower)
            self._closed.wait(RETRY)
            return False
        if failing:
            log.info("streams.read_again")
        for follower, rows in zip(followers, found, strict=True):
            self._hand(follower, follower.reader.take(rows))
        return True

    def _hand(self, follower: Follower, output: Output | None) -> None:
        if output is None:
            return
        with self._lock:
            follower.output = output
            follower.ended = output.done
            # What was announced during the read is read for when this has been taken.
            self._wanted.pop(follower, None)
            follower.changed.notify_all()

    # --- the thread that renews, on its own so that a slow read does not let go of anybody

    def _renew_on(self) -> None:
        failing = False
        while not self._closed.wait(RETRY if failing else RENEW_EVERY):
            with self._lock:
                followed = sorted({follower.request_id for follower in self._all() if not follower.ended})
            if not followed:
                continue
            try:
                self._renew(followed)
            except Exception as error:  # noqa: BLE001 the next one may succeed, and an attachment outlives a few
                if not failing:
                    _log_failure("streams.not_renewed", error)
                failing = True
            else:
                failing = False


def _log_failure(event: str, error: Exception) -> None:
    # The type only: what PostgreSQL says of a row may hold somebody's prompt.
    log.warning(event, error=error.message if isinstance(error, HordeError) else type(error).__name__)
