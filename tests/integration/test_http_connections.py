"""Connections: who has to leave when there are too many, who reads too slowly, and who has left already."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import horde.api.horde_v2.text
from horde.api import connections
from horde.api.connections import Channel
from tests.support.concurrency import eventually
from tests.support.live_broker import LiveBroker, live_broker

LIMIT = 24
HEARTBEAT = b"GET /api/v2/status/heartbeat HTTP/1.1\r\nHost: x\r\n\r\n"
INCOMPLETE = b"POST /api/v2/generate/text/async HTTP/1.1\r\nContent-Length: 9\r\n\r\n"


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url, threads=64) as live:
        yield live
        assert live.unexpected_errors() == 0


@pytest.fixture
def worker_key(broker: LiveBroker) -> str:
    return broker.user("Owner").api_key


def open_channels(broker: LiveBroker) -> list[Channel]:
    return [channel for channel in broker.server._map.values() if isinstance(channel, Channel)]


def connect(broker: LiveBroker, address: str = "127.0.0.1") -> socket.socket:
    """A connection from one of this machine's many loopback addresses."""
    return socket.create_connection((broker.host, broker.port), timeout=20, source_address=(address, 0))


def pop_request(key: str, **fields: Any) -> bytes:
    offer = {"name": "w", "models": ["m"], "max_length": 4096, "max_context_length": 8192, **fields}
    body = json.dumps(offer).encode()
    head = f"POST /api/v2/generate/text/pop HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\napikey: {key}\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def read_answer(connection: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of the next answer."""
    head, found, body = b"", b"", b""
    while not found:
        head, found, body = (head + (connection.recv(65536) or pytest.fail("closed"))).partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(65536) or pytest.fail("cut off")
    return head, body


def answers(connection: socket.socket) -> bool:
    connection.sendall(HEARTBEAT)
    return read_answer(connection)[0].startswith(b"HTTP/1.1 200 ")


def channel_of(broker: LiveBroker, client: socket.socket) -> Channel | None:
    return next((channel for channel in open_channels(broker) if channel.addr == client.getsockname()), None)


def unread(broker: LiveBroker, client: socket.socket) -> int:
    """Bytes of an answer that the broker could not hand on to this client."""
    channel = channel_of(broker, client)
    return channel.total_outbufs_len if channel else 0


def test_unfinished_requests_of_many_addresses_make_room_for_a_newcomer(database_url: str) -> None:
    with live_broker(database_url, connection_limit=LIMIT) as broker, ExitStack() as stack:
        crowd = []
        for number in range(3 * LIMIT):
            crowd.append(stack.enter_context(connect(broker, f"127.0.1.{number + 1}")))
            crowd[-1].sendall(INCOMPLETE)
        newcomer = stack.enter_context(connect(broker, "127.0.2.1"))
        assert answers(newcomer)
        assert all(is_closed(connection) for connection in crowd[:LIMIT])
        eventually(lambda: len(open_channels(broker)) <= LIMIT)
        assert answers(newcomer)


def test_one_address_gets_half_of_the_connections_and_takes_them_from_itself_only(database_url: str) -> None:
    with live_broker(database_url, connection_limit=LIMIT) as broker, ExitStack() as stack:
        bystander = stack.enter_context(connect(broker, "127.0.2.1"))
        assert answers(bystander)
        crowd = [stack.enter_context(connect(broker, "127.0.1.1")) for _ in range(3 * LIMIT)]
        for connection in crowd[-LIMIT // 2 :]:
            assert answers(connection)
        assert all(is_closed(connection) for connection in crowd[: 3 * LIMIT - LIMIT // 2])
        assert answers(bystander)


def test_behind_a_proxy_one_address_may_have_all_connections(database_url: str) -> None:
    with live_broker(database_url, connection_limit=LIMIT, trusted_proxies=1) as broker, ExitStack() as stack:
        crowd = [stack.enter_context(connect(broker)) for _ in range(LIMIT)]
        assert all(answers(connection) for connection in crowd)


def test_a_poll_that_waits_does_not_give_way_and_the_newcomer_is_turned_away(database_url: str) -> None:
    with live_broker(database_url, connection_limit=4) as broker, ExitStack() as stack:
        key = broker.user().api_key
        polls = [stack.enter_context(connect(broker, "127.0.1.1")) for _ in range(2)]
        for number, poll in enumerate(polls):
            poll.sendall(pop_request(key, name=f"w{number}", wait=25))
        eventually(lambda: broker.context.places.taken == 2)
        assert is_closed(stack.enter_context(connect(broker, "127.0.1.1")))
        with connect(broker, "127.0.2.1") as other:
            assert answers(other)
        broker.request()
        eventually(lambda: broker.context.places.taken == 1)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow readers are looked for ten times a second, and have half a second and 1 MiB/s."""
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(connections, "_READ_BYTES", 4096)
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(connections, "SLOWEST_BYTES_PER_SECOND", 1 << 20)


def ask_for_a_large_status(broker: LiveBroker, worker_key: str) -> socket.socket:
    """A connection with a small buffer, on which some megabytes are about to be answered."""
    request_id = broker.request(params={"n": 10, "max_length": 4096, "max_context_length": 8192})
    for _ in range(10):
        broker.submit(worker_key, broker.pop_job(worker_key)["id"], generation="x" * 800_000)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect((broker.host, broker.port))
    client.sendall(f"GET /api/v2/generate/text/status/{request_id} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return client


@pytest.mark.usefixtures("hurried")
def test_a_client_that_reads_a_byte_now_and_then_is_cut_off(broker: LiveBroker, worker_key: str) -> None:
    with ask_for_a_large_status(broker, worker_key) as client:
        eventually(lambda: unread(broker, client) > 0)

        def cut_off_while_reading() -> bool:
            client.recv(64)
            return channel_of(broker, client) is None

        eventually(cut_off_while_reading)


@pytest.mark.usefixtures("hurried")
def test_a_client_that_does_not_read_at_all_is_cut_off(broker: LiveBroker, worker_key: str) -> None:
    with ask_for_a_large_status(broker, worker_key) as client:
        eventually(lambda: unread(broker, client) > 0)
        eventually(lambda: channel_of(broker, client) is None)


def test_an_answer_that_nobody_reads_lies_in_a_file(broker: LiveBroker, worker_key: str) -> None:
    with ask_for_a_large_status(broker, worker_key) as client:
        eventually(lambda: unread(broker, client) > 1 << 20)
        channel = channel_of(broker, client)
        assert channel is not None
        assert [buffer.overflowed for buffer in channel.outbufs if len(buffer) > 1 << 20] == [True]


def test_a_large_answer_is_read_whole_by_who_reads_on(
    broker: LiveBroker, worker_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(connections, "SLOWEST_BYTES_PER_SECOND", 64 << 10)
    with ask_for_a_large_status(broker, worker_key) as client:
        assert len(json.loads(read_answer(client)[1])["generations"]) == 10


@pytest.mark.parametrize("abruptly", [False, True])
@pytest.mark.parametrize("behind", [1, 2, 2000])
def test_a_poll_with_requests_behind_it_notices_that_its_client_has_gone(
    broker: LiveBroker, worker_key: str, abruptly: bool, behind: int
) -> None:
    client = connect(broker)
    client.sendall(pop_request(worker_key, wait=25))
    eventually(lambda: broker.context.places.taken == 1)
    client.sendall(HEARTBEAT * behind)
    eventually(lambda: any(len(channel.requests) > 1 for channel in open_channels(broker)))
    if abruptly:
        reset(client)
    else:
        client.close()
    eventually(lambda: broker.context.places.taken == 0)
    request_id = broker.request()
    assert broker.status(request_id)["waiting"] == 1
    assert broker.pop(worker_key, name="other").json()["id"]


class AnswerHeldBack:
    """Holds the answer of a pop between its claim and its writing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ready, self.go_on = threading.Event(), threading.Event()
        self._body = horde.api.horde_v2.text.pop_body
        monkeypatch.setattr(horde.api.horde_v2.text, "pop_body", self.body)

    def body(self, popped: Any, **arguments: Any) -> dict[str, Any]:
        if popped.jobs:
            self.ready.set()
            assert self.go_on.wait(20)
        return self._body(popped, **arguments)


@pytest.mark.parametrize("prompt", ["short", "long" * 250_000])
def test_a_job_whose_answer_could_not_be_sent_goes_back_at_once(
    broker: LiveBroker, worker_key: str, monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    request_id = broker.request(prompt=prompt)
    with monkeypatch.context() as patched:
        held = AnswerHeldBack(patched)
        client = connect(broker)
        client.sendall(pop_request(worker_key))
        assert held.ready.wait(20)
        assert broker.status(request_id)["processing"] == 1
        reset(client)
        held.go_on.set()
        eventually(lambda: broker.status(request_id)["waiting"] == 1)
    assert broker.pop(worker_key, name="other").json()["id"]


def test_a_job_whose_answer_was_cut_in_the_middle_goes_back_at_once(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request(prompt="long" * 250_000)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((broker.host, broker.port))
    client.sendall(pop_request(worker_key))
    assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert broker.status(request_id)["processing"] == 1
    reset(client)
    eventually(lambda: broker.status(request_id)["waiting"] == 1)


def test_a_pop_that_can_be_repeated_keeps_its_job_when_the_answer_is_lost(
    broker: LiveBroker, worker_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id = broker.request()
    with monkeypatch.context() as patched:
        held = AnswerHeldBack(patched)
        client = connect(broker)
        head, _, body = pop_request(worker_key).partition(b"\r\n\r\n")
        client.sendall(head + b"\r\nIdempotency-Key: k\r\n\r\n" + body)
        assert held.ready.wait(20)
        reset(client)
        held.go_on.set()
        dispatcher = broker.server._dispatcher
        eventually(lambda: dispatcher.active_count == 0 and not dispatcher.queue)
    job = broker.pop(worker_key, name="w", headers={"Idempotency-Key": "k"}).json()
    assert job["id"]
    assert broker.status(request_id)["restarted"] == 0


def test_a_job_whose_answer_was_read_stays_with_its_worker(broker: LiveBroker, worker_key: str) -> None:
    """Also where the connection ends right after it, with further answers unread."""
    request_id = broker.request()
    with connect(broker) as client:
        client.sendall(pop_request(worker_key))
        _, answer = read_answer(client)
        client.sendall(b"GET /api/openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 20)
        reset(client)
    job = json.loads(answer)
    dispatcher = broker.server._dispatcher
    eventually(lambda: dispatcher.active_count == 0 and not dispatcher.queue)
    assert broker.submit(worker_key, job["id"]).status_code == 200
    assert broker.status(request_id)["done"]
