"""How large the body of a tokenizer may be, for whom, and how long it may take; all other routes take much less."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator

import pytest

from horde.api import connections, exchange
from horde.registry.tokenizers import MAX_TOKENIZER_BYTES
from tests.support.live_broker import LiveBroker, live_broker
from tests.support.uploads import MEBIBYTE, REVISION, TINY, canonical, large, put


def test_a_tokenizer_of_many_mebibytes_is_taken_in_one_piece_and_in_chunks(broker: LiveBroker, key: str) -> None:
    for size in (4 * MEBIBYTE, 8 * MEBIBYTE):
        body = canonical(large(size))
        assert len(body) > size * 3 // 4
        revision = hashlib.sha256(body).hexdigest()
        pieces = iter([body[start : start + 100_000] for start in range(0, len(body), 100_000)])
        assert put(broker, pieces if size == 4 * MEBIBYTE else body, key, revision=revision).status_code == 201
        assert broker.call("GET", f"tokenizers/{revision}").content == body
        assert put(broker, body, key).status_code == 200


def test_one_that_is_too_large_is_a_413_that_the_client_gets_to_read(broker: LiveBroker, key: str) -> None:
    def pieces(size: int) -> Iterator[bytes]:
        for start in range(0, size, MEBIBYTE):
            yield b" " * min(MEBIBYTE, size - start)

    for size in (MAX_TOKENIZER_BYTES + 1, MAX_TOKENIZER_BYTES + 2 * MEBIBYTE):
        for body in (b" " * size, pieces(size)):
            answer = put(broker, body, key)
            assert answer.status_code == 413
            assert answer.json()["message"]
    # Of the largest size that may be, it is read and looked at.
    assert put(broker, b" " * MAX_TOKENIZER_BYTES, key).status_code == 400


def head(method: str, path: str, *headers: str) -> bytes:
    lines = [f"{method} /api/v2/{path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


def first_line(broker: LiveBroker, request: bytes) -> bytes:
    """How the answer begins to a request whose body never comes, or not whole."""
    with socket.create_connection((broker.host, broker.port), timeout=20) as connection:
        connection.sendall(request)
        return connection.recv(65536).partition(b"\r\n")[0]


OTHERS = [
    ("POST", "generate/text/async"),
    ("POST", f"tokenizers/{REVISION}"),
    ("PUT", "models/a/revisions/b"),
    ("PUT", "workers/x"),
    ("PUT", "tokenizers"),
]


def test_every_other_route_is_refused_at_two_mebibytes(broker: LiveBroker) -> None:
    length = f"Content-Length: {2 * MEBIBYTE}"
    chunk = b"%x\r\n" % MEBIBYTE + b" " * MEBIBYTE + b"\r\n"
    for method, path in OTHERS:
        assert first_line(broker, head(method, path, length)) == b"HTTP/1.1 413 Request Entity Too Large"
        in_chunks = head(method, path, "Transfer-Encoding: chunked") + chunk * 2
        assert first_line(broker, in_chunks) == b"HTTP/1.1 413 Request Entity Too Large"


def test_a_length_beyond_the_limit_is_refused_before_the_body_comes(broker: LiveBroker, key: str) -> None:
    length = f"Content-Length: {MAX_TOKENIZER_BYTES + 2 * MEBIBYTE}"
    request = head("PUT", f"tokenizers/{REVISION}", length, f"apikey: {key}")
    assert first_line(broker, request) == b"HTTP/1.1 413 Request Entity Too Large"


def test_only_so_many_large_bodies_arrive_at_once(
    broker: LiveBroker, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MOST_LARGE_BODIES", 2)
    begun = head("PUT", f"tokenizers/{REVISION}", f"Content-Length: {3 * MEBIBYTE}", "Expect: 100-continue")
    chunked = head("PUT", f"tokenizers/{REVISION}", "Transfer-Encoding: chunked", "Expect: 100-continue")
    with socket.create_connection((broker.host, broker.port), timeout=20) as one:
        one.sendall(begun)
        assert one.recv(65536).startswith(b"HTTP/1.1 100")
        with socket.create_connection((broker.host, broker.port), timeout=20) as two:
            two.sendall(chunked)
            assert two.recv(65536).startswith(b"HTTP/1.1 100")
            answer = put(broker, canonical(large(3 * MEBIBYTE)), key)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
            # One of an ordinary size is no matter.
            assert put(broker, TINY, key).status_code == 201
        # The other end is told of a hang-up some time.
        body = canonical(large(3 * MEBIBYTE))
        statuses = iter(lambda: put(broker, body, key).status_code, 201)
        assert set(statuses) <= {503}


def test_a_slow_upload_is_waited_for_while_it_arrives_at_a_decent_pace(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "RECEIVE_SECONDS", 0.1)
    monkeypatch.setattr(connections, "SLOWEST_UPLOAD", 1000)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)
    body = canonical(large(3 * MEBIBYTE))
    revision = hashlib.sha256(body).hexdigest()
    with live_broker(database_url) as broker:
        key = broker.user("Trusted", "trusted").api_key
        request = head("PUT", f"tokenizers/{revision}", f"Content-Length: {len(body)}", f"apikey: {key}")
        with (
            socket.create_connection((broker.host, broker.port), timeout=20) as slow,
            socket.create_connection((broker.host, broker.port), timeout=20) as idle,
        ):
            slow.sendall(request + body[:MEBIBYTE])
            idle.sendall(request)
            assert idle.recv(65536) == b""
            slow.sendall(body[MEBIBYTE:])
            assert slow.recv(65536).startswith(b"HTTP/1.1 201")
