"""Our server around any small application, for what concerns connections alone: no database, no routes of the broker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flask import Flask

from horde.api.connections import Channel
from horde.serving import Server
from horde.settings import Settings

PATIENCE = 20.0


@dataclass(frozen=True)
class BareServer:
    """A running server.

    Attributes:
        thread: its loop.
    """

    server: Server
    thread: threading.Thread

    def connect(self, *, window: int | None = None) -> socket.socket:
        """A connection; with `window` the client's side buffers hardly more bytes than that."""
        client = socket.socket()
        client.settimeout(PATIENCE)
        if window is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        client.connect((self.server.host, self.server.port))
        return client

    def send(self, request: bytes, **options: Any) -> socket.socket:
        """A connection that has sent this."""
        client = self.connect(**options)
        client.sendall(request)
        return client

    def channels(self) -> list[Channel]:
        """The open connections, as the server knows them."""
        return [channel for channel in list(self.server._map.values()) if isinstance(channel, Channel)]

    def channel_of(self, client: socket.socket) -> Channel | None:
        """The other side of this connection; None once it is closed there."""
        address = client.getsockname()
        return next((channel for channel in self.channels() if channel.addr == address), None)

    @property
    def threads_at_work(self) -> int:
        """Threads that answer a request."""
        return int(self.server._dispatcher.active_count)


@contextmanager
def bare_server(app: Flask, *, threads: int = 32) -> Iterator[BareServer]:
    """`app` served on a free port; ended in order afterwards."""
    server = Server(app, Settings(host="127.0.0.1", port=0, threads=threads))
    stop = threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,), name="bare-server")
    thread.start()
    try:
        yield BareServer(server, thread)
    finally:
        stop.set()
        thread.join(PATIENCE)
        assert not thread.is_alive(), "the server does not end"
