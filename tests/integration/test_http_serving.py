"""The server: slow, greedy, rude and vanishing clients, odd bytes, and an orderly end."""

from __future__ import annotations

import json
import logging
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import horde.usecases.pop
from horde.app import create_app
from horde.queue.candidates import claim_first
from horde.serving import serve
from horde.settings import Settings
from tests.support.concurrency import eventually
from tests.support.live_broker import ANONYMOUS, LiveBroker, live_broker

SLOW_CLIENTS = 400


@pytest.fixture
def broker(database_url: str) -> Iterator[LiveBroker]:
    with live_broker(database_url, threads=64) as live:
        yield live
        assert live.unexpected_errors() == 0


@pytest.fixture
def worker_key(broker: LiveBroker) -> str:
    return broker.user("Owner").api_key


def post_head(path: str, length: int, *extra: str) -> bytes:
    lines = [
        f"POST /api/v2/{path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *extra,
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def status_and_body(answer: bytes) -> tuple[int, bytes, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), head, body


def test_hundreds_of_clients_that_send_a_byte_at_a_time_hold_nobody_up(broker: LiveBroker) -> None:
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection((broker.host, broker.port))) for _ in range(SLOW_CLIENTS)
        ]
        for client in clients:
            client.sendall(post_head("generate/text/async", 1000, f"apikey: {ANONYMOUS}"))
        times = []
        for number in range(60):
            for client in clients[number % 10 :: 10]:
                client.sendall(b" ")
            began = time.perf_counter()
            assert broker.call("GET", "status/heartbeat").status_code == 200
            times.append(time.perf_counter() - began)
    assert statistics.median(times) < 0.1, times
    assert max(times) < 3, times


def test_clients_that_do_not_read_hold_nobody_up(broker: LiveBroker, worker_key: str) -> None:
    request_id = broker.request()
    broker.submit(worker_key, broker.pop_job(worker_key)["id"], generation="x" * 900_000)
    ask = f"GET /api/v2/generate/text/status/{request_id} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((broker.host, broker.port))
            client.sendall(ask)
        assert broker.call("GET", "status/heartbeat").status_code == 200
        assert broker.status(request_id)["finished"] == 1


def test_a_body_that_is_too_large_is_a_413_that_the_client_gets_to_read(broker: LiveBroker) -> None:
    for size in ((1 << 20) + 1, 3 << 20, 20 << 20):
        body = b'{"prompt": "' + b"x" * (size - 14) + b'"}'
        for _ in range(3):
            answer = broker.call(
                "POST", "generate/text/async", key=ANONYMOUS, data=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code == 413
            assert answer.json()["message"]
            assert answer.headers["Access-Control-Allow-Origin"] == "*"


def test_a_body_of_just_a_mebibyte_is_read_also_in_chunks(broker: LiveBroker) -> None:
    body = b'{"prompt": "' + b"x" * ((1 << 20) - 14) + b'"}'
    assert len(body) == 1 << 20
    headers = {"Content-Type": "application/json"}
    for data in (body, iter([body[:1000], body[1000:]])):
        assert broker.call("POST", "generate/text/async", key=ANONYMOUS, data=data, headers=headers).status_code == 202
    chunks = iter([body, b" "])
    assert broker.call("POST", "generate/text/async", key=ANONYMOUS, data=chunks, headers=headers).status_code == 413


def test_a_client_that_asks_first_is_told_no_or_go_on(broker: LiveBroker) -> None:
    body = b'{"prompt": "x"}'
    answer = broker.raw(
        post_head("generate/text/async", len(body), f"apikey: {ANONYMOUS}", "Expect: 100-continue", "Connection: close")
        + body
    )
    assert answer.startswith(b"HTTP/1.1 100 Continue")
    assert b" 202 " in answer


ODD_REQUESTS = [
    b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
    b"GET / HTTP/1.1\r\nX y: a\r\n\r\n",
    b"GET  /  HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /api/v2/workers/name/%00%ff%0d%0a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /api/v2/workers?name=%00 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    b"GET /api/v2/find_user HTTP/1.1\r\nHost: \xff\xff\r\napikey: \xff\xfe\r\nConnection: close\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a b@c:99999\r\nConnection: close\r\n\r\n",
    b"POST /api/v2/generate/text/async HTTP/1.1\r\nContent-Length: 5, 6\r\n\r\n",
    b"POST /api/v2/generate/text/async HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /api/v2/generate/text/async HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\ntransfer-encoding:chunked\r\ncontent-length:0\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding:\r\nContent-Length: 0\r\n\r\n",
    b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\nConnection: keep-alive\r\n\r\n0\r\n\r\n",
    b"POST /api/v2/generate/text/async HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
]


def test_odd_bytes_get_a_refusal_in_json(broker: LiveBroker) -> None:
    for request_line in ODD_REQUESTS:
        status, head, body = status_and_body(broker.raw(request_line))
        assert 400 <= status < 500 or status == 501, request_line[:60]
        assert b"application/json" in head
        assert b"Access-Control-Allow-Origin: *" in head
        assert json.loads(body)["message"]
        assert broker.call("GET", "status/heartbeat").status_code == 200


def test_nothing_of_a_request_becomes_a_header_of_the_answer(broker: LiveBroker) -> None:
    for header in (
        b"X-Request-Id: a%0d%0aSet-Cookie: s=1",
        b"X-Request-Id: a b",
        b"Origin: https://x%0aSet-Cookie: s=1",
    ):
        status, head, _ = status_and_body(
            broker.raw(
                b"GET /api/v2/status/heartbeat HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + header + b"\r\n\r\n"
            )
        )
        assert status == 200
        assert b"Set-Cookie" not in head
    injected = b"GET / HTTP/1.1\r\nHost: x\r\nX-Request-Id: a\r\nSet-Cookie: s=1\r\nConnection: close\r\n\r\n"
    _, head, _ = status_and_body(broker.raw(injected))
    assert b"Set-Cookie" not in head


def waiting_poll(broker: LiveBroker, key: str) -> socket.socket:
    """A connection whose poll waits for work."""
    body = json.dumps(
        {"name": "gone", "models": ["m"], "max_length": 4096, "max_context_length": 8192, "wait": 25}
    ).encode()
    client = socket.create_connection((broker.host, broker.port))
    client.sendall(post_head("generate/text/pop", len(body), f"apikey: {key}") + body)
    return client


def until_waiting(broker: LiveBroker, count: int) -> None:
    eventually(lambda: broker.context.places.taken == count)


@pytest.mark.parametrize("abruptly", [False, True])
def test_a_poll_whose_client_has_gone_takes_no_job(broker: LiveBroker, worker_key: str, abruptly: bool) -> None:
    client = waiting_poll(broker, worker_key)
    until_waiting(broker, 1)
    if abruptly:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    client.close()
    until_waiting(broker, 0)
    request_id = broker.request()
    assert broker.status(request_id)["waiting"] == 1
    assert broker.pop(worker_key, name="other").json()["id"]


def test_a_job_claimed_for_a_client_that_hung_up_meanwhile_goes_back_at_once(
    broker: LiveBroker, worker_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged between the commit of the claim and the answer: the poll stands there until its client has gone."""
    claimed, gone = threading.Event(), threading.Event()

    def claim_and_stand(*arguments: Any, **options: Any) -> Any:
        jobs = claim_first(*arguments, **options)
        if jobs:
            claimed.set()
            assert gone.wait(20)
        return jobs

    with monkeypatch.context() as patched:
        patched.setattr(horde.usecases.pop, "claim_first", claim_and_stand)
        with waiting_poll(broker, worker_key):
            until_waiting(broker, 1)
            request_id = broker.request()
            assert claimed.wait(20)
            assert broker.status(request_id)["processing"] == 1
            connections = broker.server.connections
        eventually(lambda: broker.server.connections < connections)
        gone.set()
        until_waiting(broker, 0)
    assert broker.status(request_id)["waiting"] == 1
    assert broker.pop(worker_key, name="other").json()["id"]


def test_polls_beyond_the_places_are_answered_at_once_and_short_requests_find_a_thread(database_url: str) -> None:
    with live_broker(database_url, threads=19) as broker, ExitStack() as stack:
        key = broker.user().api_key
        for _ in range(2):
            stack.enter_context(waiting_poll(broker, key))
        until_waiting(broker, 2)
        began = time.monotonic()
        answer = broker.pop(key, wait=25)
        assert answer.status_code == 200
        assert time.monotonic() - began < 10
        assert broker.call("GET", "status/heartbeat").status_code == 200


def test_the_end_answers_waiting_polls_and_takes_nothing_new(database_url: str) -> None:
    with live_broker(database_url) as broker:
        key = broker.user().api_key
        client = waiting_poll(broker, key)
        until_waiting(broker, 1)
        broker.stop.set()
        broker.thread.join(10)
        assert not broker.thread.is_alive()
        with client:
            client.settimeout(10)
            answer = b"".join(iter(lambda: client.recv(65536), b""))
        status, _, body = status_and_body(answer)
        assert status == 200
        assert json.loads(body)["id"] is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((broker.host, broker.port), timeout=5)


def test_an_address_in_use_is_said_at_once(broker: LiveBroker, database_url: str) -> None:
    settings = Settings(database_url=database_url, port=broker.port)
    with pytest.raises(OSError, match="in use"):
        serve(create_app(settings), settings, maintenance=False)


def test_no_key_and_no_prompt_gets_into_the_log(
    database_url: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    canary = "canary-prompt-7c1d"
    caplog.set_level(logging.DEBUG)
    with live_broker(database_url, log_level="DEBUG", log_format="json", rate_limits="on") as broker:
        key = broker.user().api_key
        broker.ask({"prompt": canary}, key=key)
        job = broker.pop_job(key)
        broker.submit(key, job["id"], generation=canary)
        broker.submit(key, job["id"], generation=canary)
        broker.ask({"prompt": canary, "params": {"n": 99}}, key=key)
        broker.ask({"prompt": canary}, key=f"{key}x")
        broker.call("GET", f"workers/name/{canary}", key=key)
        figures = broker.session.get(f"{broker.url}/metrics", timeout=30).text
    shown = capsys.readouterr()
    # The test's own client logs the paths that it calls.
    records = [record.getMessage() for record in caplog.records if not record.name.startswith("urllib3")]
    written = shown.out + shown.err + "\n".join(records)
    assert "/api/v2/generate/text/submit" in written
    for secret in (canary, key):
        assert secret not in written
        assert secret not in figures


def test_a_database_that_is_gone_is_a_503_and_the_heartbeat_goes_on(broker: LiveBroker) -> None:
    broker.context.database.engine.dispose()
    broken = broker.context.database.engine.url.set(host="127.0.0.1", port=1, query={})
    with live_broker(broken.render_as_string(hide_password=False)) as cut_off:
        for answer in (
            cut_off.ask(),
            cut_off.call("GET", "workers"),
            cut_off.call("GET", "find_user", key=ANONYMOUS),
            cut_off.pop("key"),
        ):
            assert answer.status_code == 503
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["rc"] == "Unavailable"
        assert cut_off.call("GET", "status/heartbeat").status_code == 200
        assert cut_off.unexpected_errors() == 0
