"""waitress with the settings that keep slow clients away from threads, and an orderly end.

waitress reads requests whole before a thread sees them, and answers lie in files until they are read. How long a
connection may stay is in `horde.api.connections`.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import structlog
from flask import Flask
from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.task import ThreadedTaskDispatcher

from horde import __version__
from horde.api.broker import broker_of
from horde.api.connections import Listener, Rounds
from horde.maintenance.scheduler import Maintenance
from horde.settings import Settings

# Bodies up to this size are read, so that the route can answer a clean 413; beyond it waitress refuses by the header.
LARGEST_READ_BYTES = 2 << 20
LARGEST_HEADER_BYTES = 64 << 10
WATERMARK_BYTES = 64 << 10
# More of a body or of an answer than this lies in a file, so that a thousand clients that do not read or send on cost disk.
IN_MEMORY_BYTES = 128 << 10
# A connection has a file for what it sends and one for what it is sent; the rest is for database and libraries.
DESCRIPTORS_PER_CONNECTION, OTHER_DESCRIPTORS = 3, 256
DRAIN_SECONDS = 30.0
_LOOP_SECONDS = 1.0
log = structlog.get_logger("horde.serving")


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
            "inbuf_overflow": IN_MEMORY_BYTES,
            "outbuf_overflow": IN_MEMORY_BYTES,
            "asyncore_use_poll": True,
            "channel_request_lookahead": 1,
            "max_request_body_size": LARGEST_READ_BYTES,
            "max_request_header_size": LARGEST_HEADER_BYTES,
            "outbuf_high_watermark": WATERMARK_BYTES,
            "clear_untrusted_proxy_headers": settings.trusted_proxies == 0,
            "log_socket_errors": False,
            "backlog": 2048,
            "ident": "horde",
        }
        share = max(1, settings.connection_limit // 2)
        self._map: dict[int, Any] = {}
        self._rounds = Rounds(self._map)
        self._listeners: list[Listener] = []
        adjustments = Adjustments(**options)
        self._dispatcher = ThreadedTaskDispatcher()
        try:
            for family, kind, protocol, address in adjustments.listen:
                # With port 0 the further addresses of a name take the port that the first one got.
                wanted = (address[0], self.port, *address[2:]) if self._listeners else address
                self._listeners.append(
                    Listener(
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
        for listener in self._listeners:
            listener.most = settings.connection_limit
            # Behind a proxy all connections have one address.
            listener.most_of_one_site = settings.connection_limit if settings.trusted_proxies else share
        _allow_descriptors(DESCRIPTORS_PER_CONNECTION * settings.connection_limit + OTHER_DESCRIPTORS)
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
            before_drain: called once `stop` is set, to have waiting polls and streams answered.
        """
        waker = threading.Thread(target=self._wake_when, args=(stop,), name="server-stop", daemon=True)
        waker.start()
        try:
            while not stop.is_set():
                self._rounds.run_once(_LOOP_SECONDS)
            self._stop_listening()
            before_drain()
            self._drain()
        finally:
            self._ended.set()
            # It writes to what `close` closes.
            waker.join()
            self.close()

    def close(self) -> None:
        """Close everything at once; harmless when it is closed."""
        self._ended.set()
        for listener in self._listeners:
            for channel in list(listener.active_channels.values()):
                # First, so that a thread that waits for its client, or to write to it, ends too.
                channel.cut_off()
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
            self._rounds.run_once(_LOOP_SECONDS / 10)
        log.warning("requests_cut_off", connections=len(self._map))


def _allow_descriptors(wanted: int) -> None:
    """Raise this process's limit of open files as far as it is allowed to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning("few_file_descriptors", wanted=wanted, allowed=allowed)


def serve(
    app: Flask,
    settings: Settings,
    *,
    stop: threading.Event | None = None,
    on_ready: Callable[[Server], None] = lambda _: None,
    maintenance: bool = True,
) -> None:
    """Run a broker until `stop` is set; then polls and streams are ended, running requests finished, connections closed.

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
        broker.context.stop_waiting()

    with ExitStack() as ends:
        ends.callback(broker.context.close)
        ends.callback(begin_to_stop)
        server = Server(app, settings)
        ends.callback(server.close)
        broker.node = f"{server.host}:{server.port}:{__version__}"
        broker.context.start()
        if timers is not None:
            timers.start()
            ends.callback(timers.stop)
        log.info("listening", host=server.host, port=server.port, pid=os.getpid())
        on_ready(server)
        server.run(stop or threading.Event(), before_drain=begin_to_stop)
    log.info("stopped")
