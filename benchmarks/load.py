"""Closed-loop load on a broker that speaks the AI Horde v2 text API; a program of its own that prints one JSON object.

One connection is one task with one keep-alive HTTP/1.1 connection. Modes:
  cycle    order, pop, submit, status, for ever: the queue stays as deep as it was
  get      GET a path (the floor of the framework)
  pop      pop and submit what is queued
Latencies are milliseconds, as seen by a client that waits for each answer. `cpu` is the share of one core the client used.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import time
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 60.0
PAUSE_AFTER_ERROR = 0.05
HEARTBEAT = "/api/v2/status/heartbeat"
MOST_BAD = 5


class Connection(asyncio.Protocol):
    """A keep-alive HTTP/1.1 client for one request at a time; bodies by Content-Length."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request under way."""
        self._transport = None
        if self._answer and not self._answer.done():
            self._answer.set_exception(ConnectionError(str(exc or "closed")))

    def data_received(self, data: bytes) -> None:
        """Answer the request under way once its body is complete."""
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        head = head.lower()
        _, _, length = head.partition(b"\r\ncontent-length:")
        if len(body) < int(length.split(b"\r\n", 1)[0] or 0):
            return
        self._received = b""
        if b"\r\nconnection: close" in head and self._transport:
            self._transport.close()
            self._transport = None
        if self._answer and not self._answer.done():
            self._answer.set_result((int(head[9:12]), body))

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body; connects first where there is no connection."""
        loop = asyncio.get_running_loop()
        if self._transport is None or self._transport.is_closing():
            self._received = b""
            await loop.create_connection(lambda: self, self._host, self._port)
        self._answer = loop.create_future()
        assert self._transport is not None
        self._transport.write(request)
        return await asyncio.wait_for(self._answer, TIMEOUT)

    def close(self) -> None:
        """Hang up."""
        if self._transport:
            self._transport.close()


@dataclass
class Measured:
    """What one run saw while it counted."""

    latencies: dict[str, list[float]] = field(default_factory=lambda: collections.defaultdict(list))
    codes: collections.Counter[str] = field(default_factory=collections.Counter)
    bad: list[list[Any]] = field(default_factory=list)
    jobs: int = 0
    empty: int = 0
    counting: bool = False


class Load:
    """So many connections in one mode.

    Args:
        key: the client's.
        worker_key: the key of the workers' owner.
    """

    def __init__(self, url: str, key: str, worker_key: str, *, mode: str, connections: int, path: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._key, self._worker_key = key, worker_key
        self._mode, self._connections, self._path = mode, connections, path
        self._measured = Measured()
        self._until = 0.0

    async def run(self, warm_up: float, seconds: float) -> dict[str, Any]:
        """Run for `warm_up` unmeasured and `seconds` measured seconds."""
        measured = self._measured = Measured()
        self._until = time.perf_counter() + warm_up + seconds
        tasks = [asyncio.create_task(self._one(number)) for number in range(self._connections)]
        await asyncio.sleep(warm_up)
        measured.counting = True
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(max(0.0, self._until - began))
        measured.counting = False
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        await asyncio.gather(*tasks)
        requests = sum(map(len, measured.latencies.values()))
        return {
            "seconds": round(wall, 2),
            "requests_per_s": round(requests / wall, 1),
            "jobs_per_s": round(measured.jobs / wall, 1),
            "empty_pops": measured.empty,
            "routes": {name: quantiles(found) for name, found in measured.latencies.items()},
            "codes": dict(measured.codes),
            "bad": measured.bad,
            "cpu": round(cpu / wall, 2),
        }

    async def _one(self, number: int) -> None:
        connection = Connection(self._host, self._port)
        turn = {"cycle": self._cycle, "pop": self._pop_and_submit, "get": self._get}[self._mode]
        try:
            while time.perf_counter() < self._until:
                await turn(connection, number)
        finally:
            connection.close()

    async def _get(self, connection: Connection, _number: int) -> None:
        await self._call(connection, "get", self._request("GET", self._path, self._key), 200)

    async def _cycle(self, connection: Connection, number: int) -> None:
        order = {
            "prompt": "x" * 400,
            "models": ["bench/tiny-7b"],
            "params": {"n": 1, "max_length": 80, "max_context_length": 1024},
        }
        request = self._request("POST", "/api/v2/generate/text/async", self._key, order)
        accepted = await self._call(connection, "async", request, 202)
        if accepted is None:
            return
        await self._pop_and_submit(connection, number)
        status = self._request("GET", f"/api/v2/generate/text/status/{accepted['id']}", self._key)
        await self._call(connection, "status", status, 200)

    async def _pop_and_submit(self, connection: Connection, number: int) -> None:
        offer = {
            "name": f"bench worker {number}",
            "models": ["bench/tiny-7b"],
            "bridge_agent": "KoboldCppEmbedWorker:2:bench",
            "max_length": 512,
            "max_context_length": 4096,
        }
        request = self._request("POST", "/api/v2/generate/text/pop", self._worker_key, offer)
        popped = await self._call(connection, "pop", request, 200)
        if popped is None:
            return
        if not popped["id"]:
            self._measured.empty += self._measured.counting
            return
        result = {"id": popped["id"], "generation": "y" * 1000, "state": "ok", "seed": 1}
        request = self._request("POST", "/api/v2/generate/text/submit", self._worker_key, result)
        if await self._call(connection, "submit", request, 200) is not None:
            self._measured.jobs += self._measured.counting

    def _request(self, method: str, path: str, key: str, body: Any = None) -> bytes:
        content = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            f"apikey: {key}",
            "Client-Agent: bench:1:bench",
            "Accept: application/json",
        ]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        return "\r\n".join([*lines, "", ""]).encode() + content

    async def _call(self, connection: Connection, name: str, request: bytes, wanted: int) -> Any:
        measured, began = self._measured, time.perf_counter()
        status: int | str
        try:
            status, body = await connection.ask(request)
        except (OSError, TimeoutError) as error:
            status, body = type(error).__name__, b""
        if measured.counting:
            measured.latencies[name].append(time.perf_counter() - began)
            measured.codes[f"{name}:{status}"] += 1
        if status == wanted:
            return json.loads(body)
        if len(measured.bad) < MOST_BAD:
            measured.bad.append([name, status, body[:200].decode(errors="replace")])
        await asyncio.sleep(PAUSE_AFTER_ERROR)
        return None


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Count, mean and quantiles of durations, in milliseconds."""
    ordered = sorted(seconds)
    if not ordered:
        return {"n": 0}

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2)

    mean = round(1000 * sum(ordered) / len(ordered), 2)
    return {"n": len(ordered), "mean": mean, "p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": at(1)}


def main() -> None:
    """Run as the command line says and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True, help="the client's API key")
    parser.add_argument("--worker-key", help="the API key of the workers' owner  [default: the client's]")
    parser.add_argument("--mode", choices=("cycle", "pop", "get"), default="cycle")
    parser.add_argument("--path", default=HEARTBEAT, help="what mode `get` gets")
    parser.add_argument("-c", "--connections", type=int, default=16)
    parser.add_argument("-d", "--seconds", type=float, default=10)
    parser.add_argument("--warm-up", type=float, default=2)
    given = parser.parse_args()
    load = Load(
        given.url,
        given.key,
        given.worker_key or given.key,
        mode=given.mode,
        connections=given.connections,
        path=given.path,
    )
    print(json.dumps(asyncio.run(load.run(given.warm_up, given.seconds))))


if __name__ == "__main__":
    main()
