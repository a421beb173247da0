"""Short words between broker processes on one database: what came in one may be waited for in another.

One connection and one thread a process, for every channel. NOTIFY takes a database-wide lock at commit, so what is told goes
out in a tick at most every 50 ms and not with each transaction. A word may be lost with a connection: whoever waits for one
has to look again by itself now and then.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import closing

import psycopg2
import sqlalchemy as sa
import structlog

TICK = 0.05
# A notification's payload stays below 8,000 bytes.
PAYLOAD_BYTES = 7_900
# Words kept of one channel while the connection is lost; who would have heard more looks again before they matter.
MOST_KEPT = 20_000
RETRY_SECONDS = 1.0
APPLICATION = "horde notices"
log = structlog.get_logger(__name__)

Heard = Callable[[frozenset[str]], None]


class Notices(ABC):
    """What every way of telling has: who hears what, and the words that have not gone out yet.

    Attributes:
        listening: set while this process hears what others tell.
    """

    def __init__(self) -> None:
        self.listening = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._heard: dict[str, Heard] = {}
        self._fresh: dict[str, dict[str, None]] = {}
        self._threads: list[threading.Thread] = []

    def subscribe(self, channel: str, heard: Heard) -> None:
        """Have `heard` called with the words that other processes tell on `channel`. Before `start`; it must not block."""
        self._heard[channel] = heard

    def tell(self, channel: str, words: Iterable[str]) -> None:
        """Tell every other process these words, within a tick: ASCII, without commas or blanks. Never blocks."""
        with self._lock:
            fresh = self._fresh.setdefault(channel, {})
            for word in words:
                if len(fresh) >= MOST_KEPT:
                    break
                fresh[word] = None
            if not fresh:
                return
        self._ring()

    @abstractmethod
    def start(self) -> None:
        """Begin to listen and to tell."""

    def close(self) -> None:
        """Tell what is left and end; harmless when it never began."""
        self._closed.set()
        self._ring()
        for thread in self._threads:
            thread.join(timeout=5)

    @abstractmethod
    def _ring(self) -> None:
        """There is something to tell, or the end has come."""

    def _begin(self, *works: Callable[[], None]) -> None:
        for work in works:
            thread = threading.Thread(target=work, name="notices", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _take(self) -> list[tuple[str, str]]:
        """(channel, payload) of everything that has not gone out."""
        with self._lock:
            fresh, self._fresh = self._fresh, {}
        return [(channel, payload) for channel, words in fresh.items() for payload in payloads(words)]

    def _give_back(self, notices: Iterable[tuple[str, str]]) -> None:
        """These did not go out; they do with the next tick that works."""
        with self._lock:
            for channel, payload in notices:
                fresh = self._fresh.setdefault(channel, {})
                fresh.update(dict.fromkeys(payload.split(",")[: max(0, MOST_KEPT - len(fresh))]))

    def _waiting(self) -> bool:
        with self._lock:
            return any(self._fresh.values())

    def _hear(self, channel: str, payload: str) -> None:
        heard = self._heard.get(channel)
        if heard is None or not payload:
            return
        try:
            heard(frozenset(payload.split(",")))
        except Exception:
            # One channel's mistake must not make the others deaf.
            log.exception("notices.not_heard", channel=channel)


def payloads(words: Iterable[str]) -> list[str]:
    """The words joined by commas, in as few payloads as their size allows."""
    made: list[str] = []
    batch: list[str] = []
    size = 0
    for word in words:
        if batch and size + len(word) + 1 > PAYLOAD_BYTES:
            made.append(",".join(batch))
            batch, size = [], 0
        batch.append(word)
        size += len(word) + 1
    return [*made, ",".join(batch)] if batch else made


class DatabaseNotices(Notices):
    """By LISTEN and NOTIFY.

    Args:
        url: SQLAlchemy URL of the database.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._dsn = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._bell: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> None:
        """Start the thread that listens and tells."""
        self._bell = socket.socketpair()
        for end in self._bell:
            end.settimeout(0)
        self._begin(self._run)

    def close(self) -> None:
        """Tell what is left and end the thread."""
        super().close()
        with self._lock:
            bell, self._bell = self._bell, None
        for end in bell or ():
            end.close()

    def _ring(self) -> None:
        with self._lock:
            # A bell that is full has been rung.
            if self._bell is not None:
                with contextlib.suppress(BlockingIOError):
                    self._bell[0].send(b"!")

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except (psycopg2.Error, OSError) as error:
                log.warning("notices.listener_lost", error=type(error).__name__)
                self._closed.wait(RETRY_SECONDS)

    def _listen(self) -> None:
        with closing(self._connect()) as connection, selectors.DefaultSelector() as selector:
            bell = self._bell
            if bell is None:
                # Whoever closed this did not wait for a server that takes so long.
                return
            cursor = connection.cursor()
            # A word says to look at what is durable already; it need not be durable itself.
            cursor.execute("SET synchronous_commit = off")
            cursor.execute("; ".join(f"LISTEN {channel}" for channel in self._heard) or "SELECT")
            selector.register(connection, selectors.EVENT_READ)
            selector.register(bell[1], selectors.EVENT_READ)
            self.listening.set()
            try:
                self._listen_and_tell(connection, selector)
            finally:
                self.listening.clear()

    def _connect(self) -> psycopg2.extensions.connection:
        connection = psycopg2.connect(
            self._dsn,
            application_name=APPLICATION,
            connect_timeout=5,
            # A server that vanished without a word is noticed although nothing is sent.
            keepalives_idle=30,
            keepalives_interval=10,
            keepalives_count=3,
        )
        connection.autocommit = True
        return connection

    def _listen_and_tell(self, connection: psycopg2.extensions.connection, selector: selectors.DefaultSelector) -> None:
        due = 0.0
        while True:
            ends = self._closed.is_set()
            if (ends or time.monotonic() >= due) and self._send(connection):
                due = time.monotonic() + TICK
            # What came along with the answer to a statement makes nothing readable any more: look before the wait.
            while connection.notifies:
                notice = connection.notifies.pop(0)
                if notice.pid != connection.info.backend_pid:
                    self._hear(notice.channel, notice.payload)
            if ends:
                return
            for key, _ in selector.select(max(0.0, due - time.monotonic()) if self._waiting() else None):
                if key.fileobj is connection:
                    connection.poll()
                elif isinstance(key.fileobj, socket.socket):
                    with contextlib.suppress(BlockingIOError):
                        key.fileobj.recv(4096)

    def _send(self, connection: psycopg2.extensions.connection) -> bool:
        """Tell what is fresh, all in one transaction; whether there was anything."""
        notices = self._take()
        if not notices:
            return False
        channels, texts = (list(part) for part in zip(*notices, strict=True))
        try:
            connection.cursor().execute(
                "SELECT pg_notify(channel, payload) FROM unnest(%s::text[], %s::text[]) AS told (channel, payload)",
                (channels, texts),
            )
        except psycopg2.Error:
            self._give_back(notices)
            raise
        return True
