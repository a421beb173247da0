"""A status read beside 100 open streams and 100 long polls, against the same on the idle broker; and the database's connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator

import psycopg2

from benchmarks.aside import aside
from benchmarks.chat import PATIENCE, ChatBench, Clients, Reading, check, open_chat
from benchmarks.cycle import load
from benchmarks.load import Connection
from benchmarks.report import Report, median
from benchmarks.server import dsn
from horde.db.database import Database
from horde.settings import Settings
from horde.usecases.accounts import create_user

STREAMS, POLLS, RATE = 100, 100, 1.0
# One owner's polls may take a quarter of the places.
OWNERS, WORKERS = 4, 2
MOST_RATIO = 2.0
SAMPLE_SECONDS = 0.02
_MAX_TOKENS = 2000
# Nobody serves it and nobody asks for it: a text that waits, and workers that wait.
_NOBODYS = "bench/nobody"


def run(report: Report, *, seconds: float, rounds: int) -> None:
    """Fill `report`; idle and full are measured in turn, each round with streams and polls of its own."""
    idle, full = [], []
    with open_chat() as bench:
        keys = _owners(bench)
        path = f"/api/v2/generate/text/status/{_waiting_text(bench)}"
        arguments = ["--url", bench.broker.url, f"--key={bench.client_key}", "--mode", "get", "--path", path]
        sampled: list[tuple[int, int]] = []
        for _ in range(rounds):
            idle.append(load(*arguments, seconds=seconds, connections=1))
            with _streams(bench) as readings, _polls(bench, keys), _sampling(bench, sampled):
                full.append(load(*arguments, seconds=seconds, connections=1))
                check(readings)
        report.raw |= {"postgres": bench.postgres.version, "idle": idle, "full": full, "connections": sampled}
    before = median([each["routes"]["get"]["p95"] for each in idle])
    after = median([each["routes"]["get"]["p95"] for each in full])
    report.tell("95 % of the status reads, idle", f"{before:.2f} ms")
    report.tell(f"95 % of the status reads beside {STREAMS} streams and {POLLS} long polls", f"{after:.2f} ms")
    report.judge_at_most("95 % of the status reads, full / idle", after / before, MOST_RATIO)
    pool = Settings().database_pool
    report.tell("database connections open, at most", str(max(opened for opened, _ in sampled)))
    report.judge_at_most(
        f"database connections in use, at most, of a pool of {pool}", max(used for _, used in sampled), pool
    )


def _owners(bench: ChatBench) -> list[str]:
    database = Database(bench.database_url, pool=1)
    try:
        return [create_user(database, f"owner{number}").api_key for number in range(OWNERS)]
    finally:
        database.close()


def _waiting_text(bench: ChatBench) -> str:
    """The id of a request that stays in the queue."""
    import requests

    order = {"prompt": "Hello", "models": [_NOBODYS + "-asked"]}
    route = f"{bench.broker.url}/api/v2/generate/text/async"
    answer = requests.post(route, json=order, headers={"apikey": bench.client_key}, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["id"])


@contextlib.contextmanager
def _streams(bench: ChatBench) -> Iterator[list[Reading]]:
    """All streams, each with a little text every second."""
    with contextlib.ExitStack() as ends:
        clients = ends.enter_context(Clients())
        for number in range(WORKERS):
            worker = bench.worker(f"bench worker {number}", threads=50)
            ends.callback(worker.close)
            worker.start(jobs=STREAMS // WORKERS, rate=RATE)
        readings = [clients.add(bench.stream(max_tokens=_MAX_TOKENS)) for _ in range(STREAMS)]
        for reading in readings:
            if not reading.begun.wait(PATIENCE):
                raise RuntimeError(f"a stream has not begun: {reading.error or 'nothing came'}")
        yield readings


@contextlib.contextmanager
def _polls(bench: ChatBench, keys: list[str]) -> Iterator[None]:
    """All long polls, by workers that each ask again as soon as they are answered."""
    parts = urllib.parse.urlsplit(bench.broker.url)
    asked = 0

    async def one(number: int, ending: asyncio.Event, ready: Callable[[], None]) -> None:
        nonlocal asked
        connection = Connection(parts.hostname or "", parts.port or 80)
        try:
            await _ask(connection, parts.netloc, keys[number % OWNERS], number, wait=0)
            asked += 1
            if asked == POLLS:
                ready()
            while not ending.is_set():
                asking = asyncio.ensure_future(_ask(connection, parts.netloc, keys[number % OWNERS], number, wait=25))
                stopping = asyncio.ensure_future(ending.wait())
                began = time.monotonic()
                await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if not asking.done():
                    asking.cancel()
                elif asking.result() or time.monotonic() - began < 20:
                    raise RuntimeError("a long poll did not wait")
        finally:
            connection.close()

    async def everyone(ending: asyncio.Event, ready: Callable[[], None]) -> None:
        await asyncio.gather(*(one(number, ending, ready) for number in range(POLLS)))

    with aside(everyone, "polls"):
        yield


async def _ask(connection: Connection, host: str, key: str, number: int, *, wait: float) -> str | None:
    body = json.dumps({"name": f"bench poll {number}", "models": [_NOBODYS], "wait": wait, "threads": 1}).encode()
    head = f"POST /api/v2/generate/text/pop HTTP/1.1\r\nHost: {host}\r\napikey: {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    status, answer = await connection.ask(head.encode() + body)
    if status != 200:
        raise RuntimeError(f"a poll was answered {status}: {answer[:200]!r}")
    job: str | None = json.loads(answer)["id"]
    return job


@contextlib.contextmanager
def _sampling(bench: ChatBench, sampled: list[tuple[int, int]]) -> Iterator[None]:
    """Count the broker's connections in the background: those that are open, and those at work or in a transaction."""
    ending = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with contextlib.closing(psycopg2.connect(dsn(bench.database_url))) as connection:
                connection.autocommit = True
                cursor = connection.cursor()
                while not ending.wait(SAMPLE_SECONDS):
                    cursor.execute(
                        "SELECT count(*), count(*) FILTER (WHERE state <> 'idle') FROM pg_stat_activity "
                        "WHERE datname = current_database() AND application_name = 'horde'"
                    )
                    ((connected, busy),) = cursor.fetchall()
                    sampled.append((connected, busy))
        except BaseException as error:  # noqa: BLE001 an exception in a thread is nobody's; it is raised below
            failed.append(error)

    thread = threading.Thread(target=work, name="samples")
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
    if failed:
        raise failed[0]
