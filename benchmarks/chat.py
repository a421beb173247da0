"""What the benchmarks of chat share: a broker with a played worker's model, clients whose streams one thread reads, CPU time.

All of it runs in this process except for broker and PostgreSQL; times are `time.monotonic()`, the same for every process
of a machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import selectors
import socket
import threading
import urllib.parse
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psycopg2
import requests

from benchmarks.server import Postgres, RunningBroker, dsn, open_postgres, run_broker
from horde.db.database import Database
from horde.usecases.accounts import create_user
from tests.support import tiny_tokenizer
from tests.support.played_worker import PlayedWorker
from tests.support.sse import Stream

KUDOS = 1_000_000
PATIENCE = 60.0


@dataclass(frozen=True)
class ChatBench:
    """A broker under measurement; keys of its client and of a trusted owner of workers."""

    postgres: Postgres
    database_url: str
    broker: RunningBroker
    client_key: str
    owner_key: str

    def worker(self, name: str = "bench worker", **fields: Any) -> PlayedWorker:
        """A played worker that has checked in."""
        worker = PlayedWorker(self.broker.url, self.owner_key, name, **fields)
        worker.check_in()
        return worker

    def stream(self, model: str = tiny_tokenizer.MODEL, *, max_tokens: int, **body: Any) -> Stream:
        """Open a stream; raises RuntimeError when it is refused."""
        parts = urllib.parse.urlsplit(self.broker.url)
        asked = {"model": model, "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True}
        stream = Stream(
            parts.hostname or "",
            parts.port or 80,
            "/v1/chat/completions",
            {**asked, "max_tokens": max_tokens, **body},
            key=self.client_key,
            patience=PATIENCE,
        )
        if stream.status != 200:
            raise RuntimeError(f"a stream was answered {stream.status}: {stream.text()}")
        return stream

    def requests_of_jobs(self) -> dict[str, str]:
        """Job -> the request that it is of, of all that were ever claimed."""
        with contextlib.closing(psycopg2.connect(dsn(self.database_url))) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT id::text, request_id::text FROM jobs")
            return dict(cursor.fetchall())

    def cpu(self) -> tuple[float, float]:
        """CPU seconds so far: the broker's, and those of PostgreSQL's processes that are there."""
        with contextlib.closing(psycopg2.connect(dsn(self.database_url))) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            pids = [pid for (pid,) in cursor.fetchall()]
        return cpu_seconds(self.broker.pid), sum(map(cpu_seconds, pids))


@contextlib.contextmanager
def open_chat() -> Iterator[ChatBench]:
    """A fresh server and broker; the tiny tokenizer is uploaded."""
    with open_postgres() as postgres:
        url = postgres.create_database()
        database = Database(url, pool=1)
        try:
            client = create_user(database, "client", kudos=KUDOS)
            owner = create_user(database, "owner", ("trusted",))
        finally:
            database.close()
        with run_broker(url) as broker:
            body = tiny_tokenizer.upload()
            route = f"{broker.url}/api/v2/tokenizers/{tiny_tokenizer.revision_of(body)}"
            answer = requests.put(route, json=body, headers={"apikey": owner.api_key}, timeout=60)
            answer.raise_for_status()
            yield ChatBench(postgres, url, broker, client.api_key, owner.api_key)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass
class Reading:
    """What one client has seen: when, and how many characters it had then.

    Attributes:
        request_id: of the answer's header.
        error: of an error event, or of a connection that ended too early.
    """

    stream: Stream
    request_id: str
    at: list[float] = field(default_factory=list)
    characters: list[int] = field(default_factory=list)
    finished: bool = False
    error: str | None = None
    begun: threading.Event = field(default_factory=threading.Event)

    def time_of(self, characters: int) -> float | None:
        """When the client had so many characters; None when never."""
        place = bisect_left(self.characters, characters)
        return self.at[place] if place < len(self.at) else None

    def take(self) -> None:
        """Read what is there."""
        for event in self.stream.receive():
            if event.data is None or event.is_done:
                continue
            chunk = event.json()
            if "error" in chunk:
                self.error = str(chunk["error"])
                continue
            for choice in chunk["choices"]:
                self._take_choice(choice, event.at)
        if self.stream.ended and not self.finished and self.error is None:
            self.error = "the connection ended"

    def _take_choice(self, choice: dict[str, Any], at: float) -> None:
        text = choice["delta"].get("content")
        if text:
            self.at.append(at)
            self.characters.append((self.characters[-1] if self.characters else 0) + len(text))
            self.begun.set()
        if choice["finish_reason"] is not None:
            self.finished = True


class Clients(threading.Thread):
    """Reads all streams in one thread, so that a thread's turn is not what is measured. A context manager."""

    def __init__(self) -> None:
        super().__init__(name="clients")
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._do(None)
        self.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Reading):
                key.data.stream.hang_up()
        self._selector.close()
        self._wake.close()
        self._woken.close()
        if self._failed is not None:
            raise self._failed

    def add(self, stream: Stream) -> Reading:
        """Read this one from now on."""
        reading = Reading(stream, stream.id)
        self._do(functools.partial(self._selector.register, stream, selectors.EVENT_READ, reading))
        return reading

    def hang_up(self, reading: Reading) -> None:
        """Close its connection, soon; then `stream.hung_up_at` says when."""

        def close() -> None:
            if not reading.stream.ended:
                self._selector.unregister(reading.stream)
            reading.stream.hang_up()

        self._do(close)

    def run(self) -> None:
        """The thread."""
        try:
            while True:
                for key, _ in self._selector.select():
                    if isinstance(key.data, Reading):
                        self._read(key.data)
                    elif not self._work():
                        return
        except BaseException as error:  # noqa: BLE001 an exception in a thread is nobody's; it is raised at the end
            self._failed = error

    def _read(self, reading: Reading) -> None:
        if reading.stream.hung_up_at is not None:
            return
        reading.take()
        if reading.stream.ended:
            self._selector.unregister(reading.stream)

    def _work(self) -> bool:
        self._woken.recv(4096)
        while not self._tasks.empty():
            task = self._tasks.get()
            if task is None:
                return False
            task()
        return True

    def _do(self, task: Callable[[], object] | None) -> None:
        self._tasks.put(task)
        self._wake.send(b".")


def check(readings: Sequence[Reading]) -> None:
    """Raise RuntimeError when a stream failed."""
    errors = [reading.error for reading in readings if reading.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(readings)} streams failed, the first with: {errors[0]}")
