"""Answers of unknown length: each piece leaves at once, who reads slowly holds back only its own writer, and within bounds."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from flask import Flask, Response

from horde.api import connections
from horde.api.connections import Channel
from horde.api.undelivered import if_gone
from horde.serving import WATERMARK_BYTES
from tests.support.bare_server import PATIENCE, BareServer, bare_server
from tests.support.concurrency import eventually

MOST_BEHIND = 256 << 10
PIECE = 2048


class Streams:
    """An application that streams what a test gives it, or without end."""

    def __init__(self) -> None:
        self.given: queue.Queue[bytes | None] = queue.Queue()
        self.written: list[int] = []
        self.closed: list[int] = []
        self.gone = threading.Event()
        self.app = Flask("streams")
        self.app.add_url_rule("/given", view_func=self.give)
        self.app.add_url_rule("/endless", view_func=self.endless)
        self.app.add_url_rule("/counted/<int:pieces>", view_func=self.count)
        self.app.add_url_rule("/brief", view_func=lambda: "brief")

    def give(self) -> Response:
        return Response(iter(lambda: self.given.get(timeout=PATIENCE), None))

    def endless(self) -> Response:
        if_gone(self.gone.set)
        return self._answer(itertools.count())

    def count(self, pieces: int) -> Response:
        return self._answer(range(pieces))

    def _answer(self, numbers: Any) -> Response:
        mine = len(self.written)
        self.written.append(0)

        def pieces() -> Iterator[bytes]:
            try:
                for number in numbers:
                    self.written[mine] += PIECE
                    yield str(number).encode().ljust(PIECE, b".")
            finally:
                self.closed.append(mine)

        return Response(pieces())


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def server(streams: Streams) -> Iterator[BareServer]:
    with bare_server(streams.app) as running:
        yield running
        eventually(lambda: running.threads_at_work == 0)
        eventually(lambda: not running.channels())


def get(path: str, version: str = "1.1", method: str = "GET", *extra: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: x", *extra, "", ""]).encode()


def read_until(client: socket.socket, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        received += client.recv(65536) or pytest.fail(f"cut off after {received[-100:]!r}")
    return received


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def head_of(client: socket.socket) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1) or pytest.fail("cut off")
    return head


def unchunked(body: bytes) -> bytes:
    """What these chunks hold; they have to be whole."""
    found = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        found, end, body = found + body[:length], body[length : length + 2], body[length + 2 :]
        assert end == b"\r\n"
        if not length:
            assert not body
            return found


def is_held_back(server: BareServer, client: socket.socket) -> bool:
    channel = server.channel_of(client)
    return channel is not None and channel.total_outbufs_len > WATERMARK_BYTES


def look_often(server: BareServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow readers are looked for in every round of the loop."""
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.0)
    for listener in server.server._listeners:
        listener.next_channel_cleanup = 0.0
        listener.pull_trigger()


def test_each_piece_is_there_before_the_next_is_made(server: BareServer, streams: Streams) -> None:
    with server.send(get("/given")) as client:
        streams.given.put(b"first")
        head = head_of(client)
        assert b"\r\nTransfer-Encoding: chunked\r\n" in head
        assert b"Content-Length" not in head
        assert read_until(client, b"first\r\n") == b"5\r\nfirst\r\n"
        for piece in (b"s", b"t" * 17_000, "ä".encode()):
            streams.given.put(piece)
            whole = f"{len(piece):X}\r\n".encode() + piece + b"\r\n"
            assert read_until(client, whole) == whole
        streams.given.put(None)
        assert read_all(client) == b"0\r\n\r\n"


def test_an_empty_piece_does_not_end_the_stream(server: BareServer, streams: Streams) -> None:
    with server.send(get("/given")) as client:
        for piece in (b"", b"a", b"", b"b", None):
            streams.given.put(piece)
        head_of(client)
        assert unchunked(read_all(client)) == b"ab"


@pytest.mark.parametrize("extra", [(), ("Connection: keep-alive",)])
def test_an_old_client_reads_until_the_connection_ends(
    server: BareServer, streams: Streams, extra: tuple[str, ...]
) -> None:
    with server.send(get("/given", "1.0", "GET", *extra)) as client:
        streams.given.put(b"first")
        head = head_of(client)
        assert head.startswith(b"HTTP/1.0 200 ")
        assert b"Transfer-Encoding" not in head
        assert b"\r\nConnection: close\r\n" in head
        assert read_until(client, b"first") == b"first"
        streams.given.put(b"second")
        assert read_until(client, b"second") == b"second"
        streams.given.put(None)
        assert client.recv(1) == b""


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_head_has_no_body(server: BareServer, streams: Streams, version: str) -> None:
    for path in ("/given", "/counted/3"):
        streams.given.put(None)
        with server.send(get(path, version, "HEAD")) as client:
            head, end, rest = read_all(client).partition(b"\r\n\r\n")
            assert (head[:13], end, rest) == (f"HTTP/{version} 200 ".encode(), b"\r\n\r\n", b"")
    with server.send(get("/brief", version, "HEAD")) as client:
        assert b"\r\nContent-Length: 5\r\n" in head_of(client)
        if version == "1.1":
            client.sendall(get("/brief"))
            assert read_until(client, b"\r\n\r\nbrief")


def test_what_an_application_writes_to_a_head_is_left_out(server: BareServer) -> None:
    def stubborn(_: Any, start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return [b"body", b"body"]

    for listener in server.server._listeners:
        listener.application = stubborn
    with server.send(get("/", method="HEAD")) as client:
        assert read_all(client).endswith(b"\r\n\r\n")


def test_what_a_reader_may_be_behind_is_bounded(server: BareServer, streams: Streams) -> None:
    with server.send(get("/endless"), window=4096) as client:
        eventually(lambda: is_held_back(server, client))
        behind = streams.written[0]
        assert WATERMARK_BYTES < behind <= MOST_BEHIND
        channel = server.channel_of(client)
        assert channel is not None
        assert channel.total_outbufs_len <= WATERMARK_BYTES + 2 * PIECE
        assert not any(buffer.overflowed for buffer in channel.outbufs)
        # It goes on for who reads on, and gets no further ahead than that.
        read = 0
        while read < 4 * MOST_BEHIND:
            read += len(client.recv(8192))
            assert streams.written[0] <= read + MOST_BEHIND
        assert streams.written[0] > 3 * MOST_BEHIND


def test_a_slow_reader_gets_every_piece_in_order(server: BareServer, streams: Streams) -> None:
    pieces = 500
    with server.send(get(f"/counted/{pieces}"), window=4096) as client:
        eventually(lambda: is_held_back(server, client))
        head_of(client)
        text = unchunked(read_all(client))
    assert text == b"".join(str(number).encode().ljust(PIECE, b".") for number in range(pieces))
    assert len(streams.closed) == 1


def test_who_does_not_read_for_its_time_is_cut_off_and_its_writer_ends(
    server: BareServer, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.send(get("/endless"), window=4096) as client, server.send(get("/given")) as other:
        streams.given.put(b"other")
        eventually(lambda: is_held_back(server, client))
        assert not streams.gone.is_set()
        assert not streams.closed
        look_often(server, monkeypatch)
        monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
        monkeypatch.setattr(connections, "SLOWEST_BYTES_PER_SECOND", 1 << 30)
        assert streams.gone.wait(PATIENCE), "nobody was told"
        eventually(lambda: len(streams.closed) == 1)
        assert server.channel_of(client) is None
        # Who is not behind is as it was.
        head_of(other)
        streams.given.put(None)
        assert unchunked(read_all(other)) == b"other"


def test_a_reader_that_keeps_up_is_never_cut_off(
    server: BareServer, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each look at it, minutes apart, finds a piece that is just being handed over."""
    monkeypatch.setattr(connections, "LOOK_SECONDS", 1000.0)
    for listener in server.server._listeners:
        listener.next_channel_cleanup = time.time() + 1000
    looks = []
    send = Channel.send

    def look_and_send(channel: Channel, data: bytes, do_close: bool = True) -> int:
        assert channel.total_outbufs_len
        looks.append(channel.overdue(time.time() + 1000 * len(looks)))
        return send(channel, data, do_close=do_close)

    monkeypatch.setattr(Channel, "send", look_and_send)
    with server.send(get("/given")) as client:
        for number in range(5):
            streams.given.put(b"<%d>" % number)
            read_until(client, b"<%d>\r\n" % number)
        streams.given.put(None)
        assert read_all(client) == b"0\r\n\r\n"
    assert len(looks) >= 5
    assert not any(looks)


def test_many_slow_readers_hold_nobody_up(streams: Streams) -> None:
    crowd = 40
    with bare_server(streams.app, threads=crowd + 18) as server, ExitStack() as stack:
        clients = [stack.enter_context(server.send(get("/endless"), window=4096)) for _ in range(crowd)]
        eventually(lambda: all(is_held_back(server, client) for client in clients))
        assert max(streams.written) <= MOST_BEHIND
        with server.send(get("/brief")) as client:
            assert read_until(client, b"\r\n\r\nbrief")
        for client in clients:
            client.close()
        eventually(lambda: len(streams.closed) == crowd)
        eventually(lambda: server.threads_at_work == 0)
