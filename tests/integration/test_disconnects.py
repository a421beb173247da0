"""A client that hangs up is noticed by the server's loop at once, whatever is still to be read or written."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from flask import Flask, Response

from horde import serving
from horde.api import connections
from horde.api.undelivered import if_gone
from tests.support.bare_server import PATIENCE, BareServer, bare_server
from tests.support.concurrency import eventually

WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
BRIEF = b"GET /brief HTTP/1.1\r\nHost: x\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
HANG_UPS = 200


@dataclass
class Call:
    """One request that waits: when it began, and what it heard of its client."""

    began: threading.Event = field(default_factory=threading.Event)
    may_register: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    told: list[tuple[float, str]] = field(default_factory=list)

    def hear(self) -> None:
        self.told.append((time.monotonic(), threading.current_thread().name))
        self.gone.set()


class Waiting:
    """An application whose requests wait until their client has gone."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.served: list[str] = []
        self.app = Flask("waiting")
        self.app.add_url_rule("/wait", view_func=self.wait)
        self.app.add_url_rule("/late", view_func=self.late)
        self.app.add_url_rule("/brief", view_func=self.brief)
        self.app.add_url_rule("/stream", view_func=self.stream)
        self.app.add_url_rule("/flood", view_func=self.flood)

    def _call(self) -> Call:
        call = Call()
        self.calls.append(call)
        return call

    def wait(self) -> str:
        call = self._call()
        if_gone(call.hear)
        call.began.set()
        assert call.gone.wait(PATIENCE)
        return "nobody reads this"

    def late(self) -> str:
        call = self._call()
        call.began.set()
        assert call.may_register.wait(PATIENCE)
        if_gone(call.hear)
        call.ended.set()
        return "nobody reads this"

    def brief(self) -> str:
        self.served.append("brief")
        if_gone(self._call().hear)
        return "read"

    def stream(self) -> Response:
        call = self._call()
        if_gone(call.hear)

        def pieces() -> Iterator[bytes]:
            try:
                yield b"first"
                call.began.set()
                assert call.gone.wait(PATIENCE)
                yield b"second"
            finally:
                call.ended.set()

        return Response(pieces())

    def flood(self) -> Response:
        call = self._call()
        if_gone(call.hear)

        def pieces() -> Iterator[bytes]:
            try:
                while True:
                    yield b"x" * 4096
            finally:
                call.ended.set()

        return Response(pieces())

    def the(self, number: int = 0) -> Call:
        eventually(lambda: len(self.calls) > number)
        return self.calls[number]

    def running(self, number: int = 0) -> Call:
        call = self.the(number)
        assert call.began.wait(PATIENCE)
        return call


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


@pytest.fixture
def server(waiting: Waiting) -> Iterator[BareServer]:
    with bare_server(waiting.app) as running:
        yield running
        eventually(lambda: running.threads_at_work == 0)
        eventually(lambda: not running.channels())


def close(client: socket.socket) -> None:
    client.close()


def half_close(client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)


def reset(client: socket.socket) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def answer_to(client: socket.socket) -> bytes:
    """The answer to `BRIEF`."""
    received = b""
    while not received.endswith(b"\r\n\r\nread"):
        received += client.recv(4096) or pytest.fail("cut off")
    return received


WAYS = [close, half_close, reset]
Way = Callable[[socket.socket], None]

BEHIND = {
    "nothing": b"",
    "another request": BRIEF,
    "many requests": BRIEF * 3000,
    "half a request": b"POST /brief HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf",
    "no request at all": b"\x16\x03\x01\x02\x00\r\n\r\n",
    "a request and no request": BRIEF + b"\x16\x03\x01\x02\x00\r\n\r\n" + b"x" * 100_000,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("behind", BEHIND)
def test_a_hang_up_is_told_once_and_in_the_loop_whatever_is_unread(
    server: BareServer, waiting: Waiting, way: Way, behind: str
) -> None:
    client = server.send(WAIT + BEHIND[behind])
    call = waiting.running()
    way(client)
    assert call.gone.wait(PATIENCE)
    eventually(lambda: not server.channels())
    eventually(lambda: server.threads_at_work == 0)
    assert [thread for _, thread in call.told] == [server.thread.name]
    assert not waiting.served, "a request behind the one that was given up ran"
    client.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_hang_up_is_told_while_an_answer_is_unread(server: BareServer, waiting: Waiting, way: Way) -> None:
    client = server.send(b"GET /flood HTTP/1.1\r\nHost: x\r\n\r\n", window=4096)
    call = waiting.the()

    def writer_is_held_back() -> bool:
        channel = server.channel_of(client)
        return channel is not None and channel.total_outbufs_len > server.server._listeners[0].adj.outbuf_high_watermark

    eventually(writer_is_held_back)
    way(client)
    assert call.gone.wait(PATIENCE)
    assert call.ended.wait(PATIENCE), "the answer's iterator was not closed"
    assert [thread for _, thread in call.told] == [server.thread.name]
    client.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_whose_client_hung_up_between_two_pieces_is_closed(
    server: BareServer, waiting: Waiting, way: Way
) -> None:
    client = server.send(STREAM)
    call = waiting.running()
    way(client)
    assert call.ended.wait(PATIENCE)
    assert len(call.told) == 1
    client.close()


@pytest.mark.parametrize("way", WAYS)
def test_who_asks_after_the_hang_up_is_told_at_once(server: BareServer, waiting: Waiting, way: Way) -> None:
    client = server.send(b"GET /late HTTP/1.1\r\nHost: x\r\n\r\n")
    call = waiting.running()
    way(client)
    eventually(lambda: not server.channels())
    call.may_register.set()
    assert call.ended.wait(PATIENCE)
    assert [thread.startswith("waitress") for _, thread in call.told] == [True]
    client.close()


def test_after_its_answer_nobody_is_told(server: BareServer, waiting: Waiting) -> None:
    with server.send(BRIEF) as client:
        assert answer_to(client)
        client.sendall(WAIT)
        running = waiting.running(1)
    assert running.gone.wait(PATIENCE)
    eventually(lambda: not server.channels())
    assert not waiting.calls[0].told
    assert len(running.told) == 1


def test_one_callback_that_fails_keeps_nothing_from_the_others(server: BareServer, waiting: Waiting) -> None:
    heard: list[str] = []
    gone = threading.Event()
    began = threading.Event()

    @waiting.app.get("/several")
    def several() -> str:
        def fail() -> None:
            heard.append("failed")
            raise ValueError

        if_gone(lambda: heard.append("first"))
        if_gone(fail)
        if_gone(lambda: heard.append("last"))
        if_gone(gone.set)
        began.set()
        assert gone.wait(PATIENCE)
        return ""

    client = server.send(b"GET /several HTTP/1.1\r\nHost: x\r\n\r\n")
    assert began.wait(PATIENCE)
    client.close()
    assert gone.wait(PATIENCE)
    assert heard == ["first", "failed", "last"]
    with server.send(BRIEF) as other:
        assert answer_to(other)


def test_the_request_of_a_client_that_left_before_it_had_a_thread_never_runs(waiting: Waiting) -> None:
    with bare_server(waiting.app, threads=18) as server:
        waiters = [server.send(WAIT) for _ in range(18)]
        for number in range(18):
            waiting.running(number)
        client = server.send(BRIEF)
        eventually(lambda: len(server.server._dispatcher.queue) == 1)
        client.close()
        eventually(lambda: len(server.channels()) == 18)
        for waiter in waiters:
            waiter.close()
        eventually(lambda: server.threads_at_work == 0)
        assert not waiting.served


@pytest.mark.parametrize("told", [True, False])
def test_a_refused_client_that_left_before_it_was_told_leaves_no_connection_behind(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Also where the system tells of no hang-up, and only the end of the input is seen."""
    if not told:
        monkeypatch.setattr(connections, "_HUNG_UP", 0)
    with bare_server(waiting.app, threads=18) as server:
        waiters = [server.send(WAIT) for _ in range(18)]
        for number in range(18):
            waiting.running(number)
        client = server.send(b"\x16\x03\x01\x02\x00\r\n\r\n")
        eventually(lambda: len(server.server._dispatcher.queue) == 1)
        client.shutdown(socket.SHUT_WR)
        eventually(lambda: len(server.channels()) == 18)
        for waiter in waiters:
            waiter.close()
        eventually(lambda: server.threads_at_work == 0)
        client.close()


def test_a_server_that_gives_up_on_running_requests_tells_them(
    waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "DRAIN_SECONDS", 0.0)
    with bare_server(waiting.app) as server:
        client = server.send(WAIT)
        call = waiting.running()
    assert len(call.told) == 1
    assert client.recv(1) == b""
    client.close()


def test_hundreds_of_hang_ups_at_once_are_each_told(waiting: Waiting) -> None:
    with bare_server(waiting.app, threads=HANG_UPS) as server:
        clients = [server.send(WAIT) for _ in range(HANG_UPS)]
        for number in range(HANG_UPS):
            waiting.running(number)
        for client in clients:
            client.close()
        assert all(call.gone.wait(PATIENCE) for call in waiting.calls)
        eventually(lambda: not server.channels())
        assert [len(call.told) for call in waiting.calls] == [1] * HANG_UPS


def test_a_hang_up_is_told_within_milliseconds(server: BareServer, waiting: Waiting) -> None:
    took = []
    for number in range(HANG_UPS):
        client = server.send(WAIT)
        call = waiting.running(number)
        closed = time.monotonic()
        client.close()
        assert call.gone.wait(PATIENCE)
        took.append(call.told[0][0] - closed)
    took.sort()
    # It takes a fraction of one. The loop's own round is a second, and what only that noticed would take half of it.
    assert took[HANG_UPS // 2] < 0.1
