"""Heartbeats while hundreds of clients send a body at one byte a second: nobody's slowness is another one's."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import Callable, Iterator

from benchmarks.aside import aside
from benchmarks.cycle import load
from benchmarks.report import Report, median
from benchmarks.server import make_users, open_broker, open_postgres

SLOW_CLIENTS = 400
CONNECTIONS = 4
MOST_MILLISECONDS = 100.0
HEAD = (
    "POST /api/v2/generate/text/async HTTP/1.1\r\nHost: bench\r\napikey: {key}\r\n"
    "Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n{{"
)


def run(report: Report, *, seconds: float, rounds: int, clients: int = SLOW_CLIENTS) -> None:
    """Fill `report`."""
    quiet, slowed = [], []
    with open_postgres() as postgres:
        url = postgres.create_database()
        client, _ = make_users(url)
        with open_broker(url) as broker:
            arguments = ["--url", broker, f"--key={client.api_key}", "--mode", "get"]
            for _ in range(rounds):
                quiet.append(load(*arguments, seconds=seconds, connections=CONNECTIONS))
                with _slow_clients(broker, client.api_key, clients):
                    slowed.append(load(*arguments, seconds=seconds, connections=CONNECTIONS))
        report.raw |= {"postgres": postgres.version, "quiet": quiet, "slowed": slowed}
    before = median([each["routes"]["get"]["p99"] for each in quiet])
    after = median([each["routes"]["get"]["p99"] for each in slowed])
    report.tell("99 % of the heartbeats, alone", f"{before:.1f} ms")
    report.judge_at_most(f"99 % of the heartbeats beside {clients} slow clients", after, MOST_MILLISECONDS, " ms")


@contextlib.contextmanager
def _slow_clients(broker: str, key: str, count: int) -> Iterator[None]:
    """So many connections, each in the middle of a body that grows by a byte a second."""
    parts = urllib.parse.urlsplit(broker)

    async def one(connected: asyncio.Semaphore, ending: asyncio.Event) -> None:
        async with connected:
            _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            writer.write(HEAD.format(key=key).encode())
            await writer.drain()
        with contextlib.suppress(ConnectionError):
            while not ending.is_set():
                writer.write(b" ")
                await writer.drain()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), 1)
        writer.close()

    async def everyone(ending: asyncio.Event, ready: Callable[[], None]) -> None:
        connected = asyncio.Semaphore(50)
        tasks = [asyncio.create_task(one(connected, ending)) for _ in range(count)]
        while connected.locked():
            await asyncio.wait(tasks, timeout=0.01)
        ready()
        await asyncio.gather(*tasks)

    with aside(everyone, "slow-clients"):
        yield
