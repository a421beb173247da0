"""The tests' own reader of server-sent events sees what came, when, and what was cut off."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from tests.support.sse import CutOffError, Event, EventParser, Stream
from tests.support.transcript import Transcript

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Horde-Request-Id: r1\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunks(*parts: bytes, end: bool = True) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + (b"0\r\n\r\n" if end else b"")


@contextmanager
def answering(play: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server of one connection, played once its request is in."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(10)

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            received = b""
            while not received.endswith(b"\r\n\r\n"):
                received += connection.recv(65536)
            play(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    with closing(listener):
        yield listener.getsockname()
        thread.join(20)
    assert not thread.is_alive()


def test_events_and_comments_come_out_whatever_pieces_the_bytes_come_in() -> None:
    whole = ': keep-alive\r\n\r\ndata: {"a": "ü"}\n\ndata: one\ndata: two\n\nevent: end\ndata:\n\n'.encode()
    wanted = [
        Event(0, comment="keep-alive"),
        Event(0, data='{"a": "ü"}'),
        Event(0, data="one\ntwo"),
        Event(0, data="", name="end"),
    ]
    for size in (1, 2, 3, 7, len(whole)):
        parser = EventParser()
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert [event for piece in pieces for event in parser.feed(piece, 0)] == wanted
        assert parser.is_between_events


def test_bytes_that_are_no_text_and_fields_that_we_never_send_fail() -> None:
    with pytest.raises(UnicodeDecodeError):
        EventParser().feed(b"data: \xf0\x9f\n\n", 0)
    with pytest.raises(ValueError, match="retry"):
        EventParser().feed(b"retry: 3\n\n", 0)


def test_an_event_is_told_when_it_comes_and_the_end_once_the_last_chunk_is_in() -> None:
    more = threading.Event()

    def play(connection: socket.socket) -> None:
        connection.sendall(CHUNKED + chunks(b"data: 1\n", b"\ndata: 2", end=False))
        assert more.wait(10)
        connection.sendall(chunks(b"\n\n"))

    with answering(play) as (host, port), Stream(host, port, "/", key="k") as stream:
        assert (stream.status, stream.id) == (200, "r1")
        first = stream.next()
        assert first is not None
        assert first.data == "1"
        with pytest.raises(TimeoutError):
            stream.next(timeout=0.05)
        more.set()
        (second,) = stream.rest()
        assert second.data == "2"
        assert second.at > first.at > stream.sent_at
        assert stream.ended_in_order


@pytest.mark.parametrize(
    "sent",
    [
        CHUNKED + chunks(b"data: 1\n\n", end=False),
        CHUNKED + b"20\r\ndata: 1",
        HEAD + b"Content-Length: 30\r\n\r\ndata: 1\n\n",
        HEAD + b"\r\ndata: 1\n\ndata: 2",
        HEAD[:40],
    ],
    ids=["between chunks", "within a chunk", "within a length", "within an event", "within the head"],
)
def test_a_connection_that_ends_too_early_is_no_end(sent: bytes) -> None:
    with (
        answering(lambda connection: connection.sendall(sent)) as (host, port),
        pytest.raises(CutOffError),
        Stream(host, port, "/") as stream,
    ):
        stream.rest()


def test_an_answer_that_is_no_stream_is_read_as_text() -> None:
    sent = b"HTTP/1.1 400 BAD REQUEST\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n[1,2,3]"
    with answering(lambda connection: connection.sendall(sent)) as (host, port), Stream(host, port, "/") as stream:
        assert (stream.status, stream.text()) == (400, "[1,2,3]")


def test_a_hang_up_reaches_the_other_side() -> None:
    for reset in (False, True):
        seen: list[object] = []

        def play(connection: socket.socket, seen: list[object] = seen) -> None:
            try:
                seen.append(connection.recv(1))
            except ConnectionResetError as error:
                seen.append(type(error))

        with answering(play) as (host, port):
            Stream(host, port, "/", await_head=False).hang_up(reset=reset)
        assert seen == [ConnectionResetError if reset else b""]


def chunk(choice: dict[str, object], **fields: object) -> Event:
    shape = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", **fields}
    return Event(0, data=json.dumps({**shape, "choices": [choice]}))


ROLE = chunk({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
TEXT = chunk({"index": 0, "delta": {"content": "a"}, "finish_reason": None})
FINISH = chunk({"index": 0, "delta": {}, "finish_reason": "stop"})
DONE = Event(0, data="[DONE]")


def test_a_transcript_holds_what_a_stream_said() -> None:
    told = Transcript().read([Event(0, comment="keep-alive"), ROLE, TEXT, TEXT, FINISH, DONE])
    assert (told.text, told.finish_reason, told.done, told.comments) == ("aa", "stop", True, ["keep-alive"])


@pytest.mark.parametrize(
    "events",
    [
        [TEXT],
        [ROLE, ROLE],
        [ROLE, FINISH, TEXT],
        [ROLE, FINISH, FINISH],
        [ROLE, FINISH, DONE, DONE],
        [ROLE, DONE],
        [ROLE, chunk({"index": 0, "delta": {}, "finish_reason": ""})],
        [ROLE, chunk({"index": 0, "delta": {}, "finish_reason": "stop"}, id="c2")],
        [Event(0, data='{"error": {}}'), DONE],
    ],
)
def test_a_transcript_takes_no_stream_that_is_out_of_shape(events: list[Event]) -> None:
    with pytest.raises(AssertionError):
        Transcript().read(events)
