"""A network between a client and PostgreSQL that can fail: connections cut, refused, or cut just after a COMMIT."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from horde.db.database import sqlalchemy_url


class Relay:
    """Listens on a port of its own and passes bytes to the server behind `url`, until told to fail."""

    def __init__(self, url: str) -> None:
        self._target = sa.make_url(sqlalchemy_url(url))
        self._listener: socket.socket | None = None
        self._port = 0
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._lose_commit = threading.Event()
        self.commits_lost = 0

    @property
    def url(self) -> str:
        """The server's URL through here; plain text, so that a COMMIT can be seen."""
        query = {key: value for key, value in self._target.query.items() if key not in {"host", "port"}}
        through = self._target.set(
            host="127.0.0.1", port=self._port, query={**query, "sslmode": "disable", "gssencmode": "disable"}
        )
        return through.render_as_string(hide_password=False)

    def __enter__(self) -> Self:
        self.restore()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        for thread in self._threads:
            thread.join(timeout=10)

    def cut(self) -> None:
        """Drop every connection and refuse new ones."""
        with self._lock:
            if self._listener is not None:
                _shut(self._listener)
                self._listener = None
            for pair in self._pairs:
                for end in pair:
                    _shut(end)

    def restore(self) -> None:
        """Take connections again, on the same port."""
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        self._listener = listener
        self._start(self._accept, listener)

    def lose_next_commit(self) -> None:
        """Let the server do the next COMMIT, and cut its connection before the answer reaches the client."""
        self._lose_commit.set()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with listener, contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                self._start(self._pass, client, self._connect())

    def _connect(self) -> socket.socket:
        host = self._target.host or str(self._target.query.get("host", "127.0.0.1"))
        port = self._target.port or int(str(self._target.query.get("port", 5432)))
        if host.startswith("/"):
            server = socket.socket(socket.AF_UNIX)
            server.connect(f"{host}/.s.PGSQL.{port}")
            return server
        return socket.create_connection((host, port))

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        pair = (client, server)
        with self._lock:
            self._pairs.add(pair)
        try:
            with client, server, selectors.DefaultSelector() as selector, contextlib.suppress(OSError):
                selector.register(client, selectors.EVENT_READ, server)
                selector.register(server, selectors.EVENT_READ, client)
                while True:
                    for ready, _ in selector.select():
                        if not self._forward(ready.fileobj, ready.data, client):
                            return
        finally:
            with self._lock:
                self._pairs.discard(pair)

    def _forward(self, source: object, sink: socket.socket, client: socket.socket) -> bool:
        assert isinstance(source, socket.socket)
        chunk = source.recv(65536)
        if not chunk:
            return False
        sink.sendall(chunk)
        if source is client and b"COMMIT\0" in chunk and self._lose_commit.is_set():
            self._lose_commit.clear()
            sink.recv(65536)
            self.commits_lost += 1
            return False
        return True


def _shut(end: socket.socket) -> None:
    # A thread that waits in accept or recv on it wakes up.
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
