"""A Redis server of a test's own, which can go away and come back."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.support import needs

START_SECONDS = 20.0


@dataclass
class RedisServer:
    """A server on a port that it keeps when it is stopped and started again; it holds nothing on disk."""

    directory: Path
    port: int
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = needs.redis_server()
        assert program is not None, "asked by @pytest.mark.needs"
        options = ["--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([program, *options], cwd=self.directory, stdout=subprocess.DEVNULL)
        with self.client() as client:
            give_up = time.monotonic() + START_SECONDS
            while True:
                try:
                    client.ping()
                except (redis.ConnectionError, redis.BusyLoadingError):
                    assert self._process.poll() is None, "the server ended"
                    assert time.monotonic() < give_up, "the server does not answer"
                    time.sleep(0.01)
                else:
                    return

    def stop(self) -> None:
        """Let it go, with every connection to it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @contextmanager
    def client(self) -> Iterator[redis.Redis]:
        """A client of it, closed at the end."""
        with closing(redis.Redis(port=self.port, decode_responses=True)) as client:
            yield client


@contextmanager
def redis_server(directory: Path) -> Iterator[RedisServer]:
    """A running server on a free port, with `directory` to work in."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = RedisServer(directory, port)
    server.start()
    try:
        yield server
    finally:
        server.stop()
