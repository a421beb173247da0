"""A broker as it runs in production: waitress on a free port, over a real database; and short calls to it."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import requests

from horde.api.broker import broker_of
from horde.app import create_app
from horde.serving import Server, serve
from horde.settings import Settings
from horde.usecases.accounts import CreatedUser, create_user
from horde.usecases.context import Context

ANONYMOUS = "0000000000"
START_SECONDS = 30.0


@dataclass
class LiveBroker:
    """A running broker, and a client of it."""

    server: Server
    context: Context
    stop: threading.Event
    thread: threading.Thread
    session: requests.Session = field(default_factory=requests.Session)
    _names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def host(self) -> str:
        """The address it listens on."""
        return self.server.host

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self.server.port

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"

    def user(self, name: str | None = None, *roles: str, kudos: float = 0) -> CreatedUser:
        """A fresh account with its key."""
        return create_user(self.context.database, name or f"user{next(self._names)}", roles, kudos)

    def call(self, method: str, path: str, *, key: str | None = None, **arguments: Any) -> requests.Response:
        """A call to `/api/v2/{path}`."""
        headers = {**({"apikey": key} if key is not None else {}), **arguments.pop("headers", {})}
        return self.session.request(method, f"{self.url}/api/v2/{path}", headers=headers, timeout=60, **arguments)

    def ask(self, body: Any = None, *, key: str | None = ANONYMOUS, **arguments: Any) -> requests.Response:
        """`POST generate/text/async`."""
        return self.call("POST", "generate/text/async", key=key, json=body or {"prompt": "Hello"}, **arguments)

    def request(self, *, key: str = ANONYMOUS, **body: Any) -> str:
        """The id of a fresh request."""
        answer = self.ask({"prompt": "Hello", **body}, key=key)
        assert answer.status_code == 202, answer.text
        return str(answer.json()["id"])

    def status(self, request_id: str) -> dict[str, Any]:
        """`GET generate/text/status/{id}`."""
        answer = self.call("GET", f"generate/text/status/{request_id}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def pop(self, key: str, *, headers: dict[str, str] | None = None, **body: Any) -> requests.Response:
        """`POST generate/text/pop` by a worker that can do anything with model `m`."""
        given = {"name": "worker", "models": ["m"], "max_length": 4096, "max_context_length": 8192, **body}
        return self.call("POST", "generate/text/pop", key=key, json=given, headers=headers or {})

    def pop_job(self, key: str, **body: Any) -> dict[str, Any]:
        """A pop that gets a job."""
        answer = self.pop(key, **body)
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        assert job["id"], job
        return job

    def submit(self, key: str, job_id: str, **body: Any) -> requests.Response:
        """`POST generate/text/submit`."""
        given = {"id": job_id, "generation": "text", "seed": 1, **body}
        return self.call("POST", "generate/text/submit", key=key, json=given)

    def raw(self, data: bytes, *, half_close: bool = False) -> bytes:
        """Everything that comes back for these bytes on a connection of their own."""
        with socket.create_connection((self.host, self.port), timeout=30) as connection:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    def unexpected_errors(self) -> int:
        """Requests answered 500 so far, by the broker's own count."""
        figures = self.session.get(f"{self.url}/metrics", timeout=30).text
        return sum(
            int(float(line.rpartition(" ")[2]))
            for line in figures.splitlines()
            if line.startswith("horde_http_requests_total") and 'status="500"' in line
        )


@contextmanager
def live_broker(database_url: str, *, maintenance: bool = False, **settings: Any) -> Iterator[LiveBroker]:
    """A broker on `database_url`, ended in order afterwards. Without rate limits unless they are asked for."""
    chosen = Settings(
        **{
            "database_url": database_url,
            "host": "127.0.0.1",
            "port": 0,
            "threads": 32,
            "rate_limits": "off",
            "log_level": "WARNING",
            **settings,
        }
    )
    app = create_app(chosen)
    stop, ready, failed = threading.Event(), threading.Event(), []
    servers: list[Server] = []

    def run() -> None:
        def on_ready(server: Server) -> None:
            servers.append(server)
            ready.set()

        try:
            serve(app, chosen, stop=stop, on_ready=on_ready, maintenance=maintenance)
        except BaseException as error:  # noqa: BLE001 the test's thread reports it
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=run, name="live-broker")
    thread.start()
    try:
        assert ready.wait(START_SECONDS), "the broker does not start"
        assert not failed, failed
        live = LiveBroker(servers[0], broker_of(app).context, stop, thread)
        with live.session:
            yield live
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive(), "the broker does not end"
