"""waitress with the settings that keep slow clients away from threads, and an orderly end.

waitress reads requests whole before a thread sees them. On top of it, here: its own errors are JSON with CORS headers; a
client that is told "too large" gets to read that; a request that does not arrive within a minute, an answer that is not
read for half a minute and a connection that is idle for two minutes are closed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import orjson
import structlog
from flask import Flask
from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import TcpWSGIServer
from waitress.task import ErrorTask, ThreadedTaskDispatcher

from horde import __version__
from horde.api.answers import JSON_TYPE
from horde.api.broker import broker_of
from horde.api.edge import CORS, SAFETY
from horde.maintenance.scheduler import Maintenance
from horde.settings import Settings

# Bodies up to this size are read, so that the route can answer a clean 413; beyond it waitress refuses by the header.
LARGEST_READ_BYTES = 2 << 20
LARGEST_HEADER_BYTES = 64 << 10
WATERMARK_BYTES = 64 << 10
RECEIVE_SECONDS, STALL_SECONDS, IDLE_SECONDS = 60.0, 30.0, 120.0
LINGER_SECONDS, LINGER_BYTES = 5.0, 64 << 20
DRAIN_SECONDS = 30.0
_LOOP_SECONDS = 1.0
log = structlog.get_logger("horde.serving")


class _JsonError(ErrorTask):  # type: ignore[misc]
    """What waitress refuses before the application sees it."""

    def execute(self) -> None:
        error = self.request.error
        self.status = f"{error.code} {error.reason}"
        body = orjson.dumps({"message": error.reason})
        self.response_headers.extend([("Content-Type", JSON_TYPE), *CORS, *SAFETY])
        self.set_close_on_finish()
        self.content_length = len(body)
        self.write(body)


class _Channel(HTTPChannel):  # type: ignore[misc]
    """One connection. Runs in the server's loop, except for what waitress documents as synchronous."""

    error_task_class = _JsonError
    request_since: float | None = None
    _refused = False
    _lingers_until: float | None = None
    _discarded = 0

    def received(self, data: bytes) -> bool:
        """Take input; notes when the current request began to arrive."""
        if self.request is None:
            self.request_since = time.time()
        taken = bool(super().received(data))
        if self.request is None:
            self.request_since = None
        if any(request.error for request in self.requests):
            self._refused = True
        return taken

    def handle_close(self) -> None:
        """Close. After a refusal read on for a moment first: closing with input unread would reset the connection,
        and the client would never see why."""
        if not self._refused or self._lingers_until is not None or not self.connected:
            super().handle_close()
            return
        self._lingers_until = time.time() + LINGER_SECONDS
        self.will_close = False
        try:
            self.socket.shutdown(1)
        except OSError:
            super().handle_close()

    def readable(self) -> bool:
        """Whether the loop should read."""
        return self._lingers_until is not None or bool(super().readable())

    def writable(self) -> bool:
        """Whether the loop should call `handle_write`."""
        if self._lingers_until is not None:
            return time.time() > self._lingers_until
        return bool(super().writable())

    def handle_write(self) -> None:
        """Write, or end the lingering."""
        if self._lingers_until is not None:
            self.handle_close()
        else:
            super().handle_write()

    def handle_read(self) -> None:
        """Read, or discard while lingering."""
        if self._lingers_until is None:
            super().handle_read()
            return
        try:
            self._discarded += len(self.recv(WATERMARK_BYTES))
        except OSError:
            self.handle_close()
            return
        if self._discarded > LINGER_BYTES:
            self.handle_close()

    def overdue(self, now: float) -> bool:
        """Whether this connection has had its time."""
        if self._lingers_until is not None:
            return now > self._lingers_until
        if self.total_outbufs_len:
            return bool(now - self.last_activity > STALL_SECONDS)
        if self.requests:
            return False
        if self.request_since is not None:
            return now - self.request_since > RECEIVE_SECONDS
        return bool(now - self.last_activity > IDLE_SECONDS)

    @property
    def at_rest(self) -> bool:
        """Whether nothing runs here and nothing is left to write."""
        return not self.requests and not self.total_outbufs_len


class _Listener(TcpWSGIServer):  # type: ignore[misc]
    """One listening socket."""

    channel_class = _Channel

    def maintenance(self, now: float) -> None:
        """Close what is overdue."""
        for channel in list(self.active_channels.values()):
            if channel.overdue(now):
                channel.will_close = True


class Server:
    """A bound server.

    Args:
        app: as `horde.app.create_app` makes it.
        settings: `host`, `port` (0 takes a free one), `threads`, `connection_limit`, `trusted_proxies`.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, app: Flask, settings: Settings) -> None:
        options: dict[str, Any] = {
            "host": settings.host,
            "port": settings.port,
            "threads": settings.threads,
            "connection_limit": settings.connection_limit,
            "asyncore_use_poll": True,
            "channel_request_lookahead": 1,
            "max_request_body_size": LARGEST_READ_BYTES,
            "max_request_header_size": LARGEST_HEADER_BYTES,
            "outbuf_high_watermark": WATERMARK_BYTES,
            "clear_untrusted_proxy_headers": settings.trusted_proxies == 0,
            "log_socket_errors": False,
            "cleanup_interval": 5,
            "backlog": 2048,
            "ident": "horde",
        }
        self._map: dict[int, Any] = {}
        self._listeners: list[_Listener] = []
        adjustments = Adjustments(**options)
        self._dispatcher = ThreadedTaskDispatcher()
        try:
            for family, kind, protocol, address in adjustments.listen:
                # With port 0 the further addresses of a name take the port that the first one got.
                wanted = (address[0], self.port, *address[2:]) if self._listeners else address
                self._listeners.append(
                    _Listener(
                        app.wsgi_app,
                        map=self._map,
                        dispatcher=self._dispatcher,
                        adj=adjustments,
                        sockinfo=(family, kind, protocol, wanted),
                    )
                )
        except OSError:
            wasyncore.close_all(self._map)
            raise
        self._dispatcher.set_thread_count(adjustments.threads)
        self._ended = threading.Event()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._listeners[0].effective_port)

    @property
    def host(self) -> str:
        """The address it listens on."""
        return str(self._listeners[0].effective_host)

    @property
    def connections(self) -> int:
        """Open connections, idle ones included."""
        return sum(len(listener.active_channels) for listener in self._listeners)

    def run(self, stop: threading.Event, *, before_drain: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop` is set, then take nothing new and finish what runs.

        Args:
            before_drain: called once `stop` is set, to have waiting polls answered.
        """
        waker = threading.Thread(target=self._wake_when, args=(stop,), name="server-stop", daemon=True)
        waker.start()
        try:
            while not stop.is_set():
                wasyncore.poll2(_LOOP_SECONDS, self._map)
            self._stop_listening()
            before_drain()
            self._drain()
        finally:
            self.close()

    def close(self) -> None:
        """Close everything at once; harmless when it is closed."""
        self._ended.set()
        self._dispatcher.shutdown(timeout=5)
        wasyncore.close_all(self._map)

    def _wake_when(self, stop: threading.Event) -> None:
        while not stop.wait(_LOOP_SECONDS):
            if self._ended.is_set():
                return
        self._listeners[0].pull_trigger()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            # Not `listener.close()`, which would close the trigger that the threads wake this loop with.
            wasyncore.dispatcher.close(listener)

    def _drain(self) -> None:
        deadline = time.monotonic() + DRAIN_SECONDS
        while time.monotonic() < deadline:
            channels = [channel for listener in self._listeners for channel in listener.active_channels.values()]
            if not channels:
                return
            for channel in channels:
                if channel.at_rest:
                    channel.will_close = True
            wasyncore.poll2(_LOOP_SECONDS / 10, self._map)
        log.warning("requests_cut_off", connections=len(self._map))


def serve(
    app: Flask,
    settings: Settings,
    *,
    stop: threading.Event | None = None,
    on_ready: Callable[[Server], None] = lambda _: None,
    maintenance: bool = True,
) -> None:
    """Run a broker until `stop` is set; then polls are answered, running requests finished, connections closed.

    Args:
        on_ready: called when it serves, with the server (its `port`, where settings ask for any).
        maintenance: whether this process beats, folds and bids for the passes, as a broker should.

    Raises:
        OSError: the address cannot be bound.
    """
    broker = broker_of(app)
    timers = Maintenance(broker.context) if maintenance else None

    def begin_to_stop() -> None:
        broker.stopping.set()
        broker.context.wakeups.close()

    with ExitStack() as ends:
        ends.callback(broker.context.close)
        ends.callback(begin_to_stop)
        server = Server(app, settings)
        ends.callback(server.close)
        broker.node = f"{server.host}:{server.port}:{__version__}"
        broker.context.wakeups.start()
        if timers is not None:
            timers.start()
            ends.callback(timers.stop)
        log.info("listening", host=server.host, port=server.port, pid=os.getpid())
        on_ready(server)
        server.run(stop or threading.Event(), before_drain=begin_to_stop)
    log.info("stopped")
