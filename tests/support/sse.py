"""A client of server-sent events on a bare socket: each event and comment with its time of arrival, and a hang-up at any point.

It takes nothing on trust that a library would smooth over: chunks, a cut connection, half an event and bytes that are no
UTF-8 are seen as what they are.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

PATIENCE = 20.0
DONE = "[DONE]"
_READ_BYTES = 64 << 10


class CutOffError(Exception):
    """The connection ended within a head, a chunk or an event."""


@dataclass(frozen=True)
class Event:
    """One event, or one comment.

    Attributes:
        at: `time.monotonic()` when the last byte of it was read.
        data: None for a comment.
        comment: what follows the colon; None for an event.
    """

    at: float
    data: str | None = None
    comment: str | None = None
    name: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether this is OpenAI's last event."""
        return self.data == DONE

    def json(self) -> Any:
        """The data, parsed."""
        assert self.data is not None, f"a comment has no data: {self}"
        return json.loads(self.data)


class EventParser:
    """Bytes in, events out; comments are told where they stand.

    Raises:
        UnicodeDecodeError: from `feed`, for a line that is no UTF-8.
        ValueError: from `feed`, for a field that we never send.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []
        self._name: str | None = None

    @property
    def is_between_events(self) -> bool:
        """Whether all that came in has been told."""
        return not self._rest and not self._data and self._name is None

    def feed(self, received: bytes, at: float) -> list[Event]:
        """What is complete with these bytes."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        found = (self._line(line.removesuffix(b"\r").decode(), at) for line in lines)
        return [event for event in found if event is not None]

    def _line(self, line: str, at: float) -> Event | None:
        if not line:
            return self._end(at)
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not field:
            return Event(at, comment=value)
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        else:
            raise ValueError(f"a field of no event of ours: {line[:80]!r}")
        return None

    def _end(self, at: float) -> Event | None:
        data, name = self._data, self._name
        self._data, self._name = [], None
        return Event(at, data="\n".join(data), name=name) if data else None


class Body:
    """The body of an HTTP answer as it comes in: chunked, of a known length, or up to the end of the connection.

    Attributes:
        finished: all of it is here; a body that the connection's end ends is finished by that alone.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        self._left = int(length) if length is not None else None
        self._rest = b""
        self.finished = self._left == 0

    @property
    def ends_with_connection(self) -> bool:
        """Whether the other side's hang-up is the right end of it."""
        return not self._chunked and self._left is None

    def feed(self, received: bytes) -> bytes:
        """What of these bytes is content."""
        if self._chunked:
            return self._chunks(received)
        if self._left is not None:
            received = received[: self._left]
            self._left -= len(received)
            self.finished = self._left == 0
        return received

    def _chunks(self, received: bytes) -> bytes:
        self._rest += received
        content = []
        while not self.finished:
            head, found, rest = self._rest.partition(b"\r\n")
            if not found:
                break
            size = int(head.split(b";")[0], 16)
            if len(rest) < size + 2:
                break
            assert rest[size : size + 2] == b"\r\n", f"a chunk of {size} bytes goes on: {rest[size : size + 20]!r}"
            content.append(rest[:size])
            self._rest = rest[size + 2 :]
            self.finished = size == 0
        return b"".join(content)


class Stream:
    """One request on a connection of its own, and its answer as it arrives.

    Sent at once. `status` and `headers` (names in lower case) are there when the constructor returns; with `await_head` off
    they come with the first call that reads. As a context manager it hangs up at the end.

    Raises:
        CutOffError: the connection ended before the head.
        TimeoutError: nothing came for `patience` seconds.
    """

    def __init__(
        self,
        host: str,
        port: int,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        version: str = "1.1",
        await_head: bool = True,
        receive_buffer: int | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.patience = patience
        self.sent_at = 0.0
        self.hung_up_at: float | None = None
        self._head = b""
        self._body: Body | None = None
        self._parser = EventParser()
        self._events: deque[Event] = deque()
        self._text: list[bytes] = []
        self._ended = False
        self._socket = socket.socket()
        try:
            if receive_buffer is not None:
                # Before the connection, or the window is large already.
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            self._socket.settimeout(patience)
            self._socket.connect((host, port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._send(_request(f"{method} {path} HTTP/{version}", f"{host}:{port}", key, dict(headers or {}), body))
            if await_head:
                self.await_head()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()

    def __iter__(self) -> Iterator[Event]:
        give_up = time.monotonic() + self.patience
        while (event := self.next(give_up - time.monotonic())) is not None:
            if event.data is not None:
                # Comments may come for ever, and say nothing.
                give_up = time.monotonic() + self.patience
            yield event

    @property
    def id(self) -> str:
        """The request's id, of its header."""
        return self.headers["x-horde-request-id"]

    @property
    def ended_in_order(self) -> bool:
        """Whether the answer is here whole."""
        return self._body is not None and self._body.finished and self._parser.is_between_events

    def fileno(self) -> int:
        """For a selector; then `receive` what is there."""
        return self._socket.fileno()

    def await_head(self) -> None:
        """Wait for status and headers."""
        while not self.status and not self._ended:
            self._receive(self.patience)
        if not self.status:
            raise CutOffError(f"the connection ended before the head: {self._head[:200]!r}")

    def next(self, timeout: float | None = None) -> Event | None:
        """The next event or comment; None once the answer has ended as it should.

        Raises:
            CutOffError: the connection ended, and the answer had not.
            TimeoutError: nothing came for so long (default: the stream's patience).
        """
        give_up = time.monotonic() + (self.patience if timeout is None else timeout)
        while not self._events and not self._ended:
            self._receive(give_up - time.monotonic())
        if self._events:
            return self._events.popleft()
        if not self.ended_in_order:
            raise CutOffError("the connection ended within the answer")
        return None

    def data(self, timeout: float | None = None) -> Any:
        """The data of the next event, parsed; comments are passed over. The stream must not end before."""
        give_up = time.monotonic() + (self.patience if timeout is None else timeout)
        while True:
            event = self.next(give_up - time.monotonic())
            assert event is not None, "the stream ended"
            if event.data is not None:
                assert not event.is_done, "the stream is done"
                return event.json()

    def rest(self) -> list[Event]:
        """All that comes until the answer ends."""
        return list(self)

    def receive(self) -> list[Event]:
        """What is there already, for a caller that knows from a selector that something is; see `ended`."""
        self._receive(0.0)
        events = list(self._events)
        self._events.clear()
        return events

    @property
    def ended(self) -> bool:
        """Whether nothing more will come, in order or not."""
        return self._ended

    def text(self) -> str:
        """Everything the answer says, read to its end: of an answer that is no stream, and has to be here in time."""
        give_up = time.monotonic() + self.patience
        while not self._ended:
            self._receive(give_up - time.monotonic())
        return b"".join(self._text).decode()

    def hang_up(self, *, reset: bool = False) -> float:
        """Close the connection, by a reset if asked; the time of it. Again: nothing."""
        if self.hung_up_at is None:
            if reset:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.hung_up_at = time.monotonic()
            self._socket.close()
        return self.hung_up_at

    def half_close(self) -> None:
        """Send nothing more, and go on reading."""
        self._socket.shutdown(socket.SHUT_WR)

    def _send(self, request: bytes) -> None:
        self.sent_at = time.monotonic()
        self._socket.sendall(request)

    def _receive(self, timeout: float) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        if timeout < 0 or not poller.poll(1000 * timeout):
            raise TimeoutError(f"nothing came; status {self.status}")
        try:
            received = self._socket.recv(_READ_BYTES)
        except ConnectionResetError:
            received = b""
        at = time.monotonic()
        if not received:
            self._ended = True
            if self._body is not None and self._body.ends_with_connection:
                self._body.finished = True
            return
        if self._body is None:
            received = self._take_head(received)
        if self._body is None:
            return
        content = self._body.feed(received)
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            self._events.extend(self._parser.feed(content, at))
        else:
            self._text.append(content)
        self._ended = self._body.finished

    def _take_head(self, received: bytes) -> bytes:
        self._head += received
        head, found, rest = self._head.partition(b"\r\n\r\n")
        if not found:
            return b""
        first, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(first.split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._body = Body(self.headers)
        return rest


def _request(first: str, host: str, key: str | None, headers: dict[str, str], body: Any) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    given = {"Host": host, "Accept": "text/event-stream"}
    if key is not None:
        given["Authorization"] = f"Bearer {key}"
    if body is not None:
        given |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
    lines = [first, *(f"{name}: {value}" for name, value in {**given, **headers}.items())]
    return "\r\n".join([*lines, "", ""]).encode() + content
