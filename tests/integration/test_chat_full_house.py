"""A broker whose places for those that wait are all taken by chats: one more is refused at once, and short calls work as ever."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from tests.support.chat import ChatBroker, chat_broker, order
from tests.support.concurrency import eventually
from tests.support.played_output import PlayedJob
from tests.support.sse import Stream

# 16 threads are kept for what does not wait.
PLACES, KEPT = 8, 16
THREADS = PLACES + KEPT
# A short call takes milliseconds; one that had to wait for a place or a thread would take a poll's 25 s.
QUICK = 3.0


@pytest.fixture
def chat(database_url: str) -> Iterator[ChatBroker]:
    with chat_broker(database_url, threads=THREADS, database_pool=4) as broker:
        yield broker
        broker.assert_sound()


@pytest.fixture
def keys(chat: ChatBroker) -> list[str]:
    """Of two clients: one alone may not have all the places."""
    return [chat.live.user(kudos=100_000).api_key for _ in range(2)]


@contextmanager
def quick(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < QUICK, f"{what} took {took:.1f} s"


def fill(chat: ChatBroker, keys: Sequence[str], *, running: int) -> tuple[list[Stream], list[PlayedJob]]:
    """Take every place, by streams and by answers that come whole; so many of them run."""
    streams = [chat.open(stream=number % 3 > 0, key=keys[number % 2], max_tokens=64) for number in range(PLACES)]
    eventually(lambda: chat.live.context.places.taken == PLACES, "every place is taken")
    eventually(lambda: chat.unfinished().get("queued") == PLACES, "all wait")
    return streams, chat.worker.pop(slots=running)


def refused(chat: ChatBroker, **asked: Any) -> Stream:
    with quick("a refusal"):
        stream = chat.open(await_head=False, **asked)
        error = json.loads(stream.text())["error"]
    assert (stream.status, error["code"], error["type"]) == (503, "broker_unavailable", "server_error")
    assert int(stream.headers["retry-after"]) >= 1
    assert "x-should-retry" not in stream.headers
    return stream


def wait_for_a_place(chat: ChatBroker) -> None:
    eventually(lambda: chat.live.context.places.taken < PLACES, "a place is free")


def test_one_more_is_refused_and_gets_in_once_somebody_has_left(chat: ChatBroker, keys: list[str]) -> None:
    streams, jobs = fill(chat, keys, running=2)
    for streamed in (True, False):
        refused(chat, stream=streamed)
    assert chat.world.scalar("SELECT count(*) FROM requests") == PLACES
    chat.worker.finish(jobs[0], "stop")
    wait_for_a_place(chat)
    streams.append(chat.open())
    assert streams[-1].status == 200
    refused(chat)
    streams[-1].hang_up()
    wait_for_a_place(chat)
    streams.append(chat.open())
    assert streams[-1].status == 200
    for stream in streams:
        stream.hang_up()
    chat.worker.hear_stop(jobs[1])


def test_one_key_leaves_places_to_others(chat: ChatBroker) -> None:
    streams = [chat.open() for _ in range(PLACES * 3 // 4)]
    refused(chat)
    other = chat.open(key=chat.live.user(kudos=1000).api_key)
    assert other.status == 200
    for stream in [*streams, other]:
        stream.hang_up()


def test_a_poll_is_answered_at_once(chat: ChatBroker, keys: list[str]) -> None:
    streams, running = fill(chat, keys, running=1)
    with quick("a poll for chats"):
        assert chat.another_worker("idle", model="another", checked_in=False).pop(wait=25) == []
    with quick("a poll for texts"):
        assert chat.live.pop(chat.owner.api_key, name="texts", wait=25).json()["id"] is None
    # What is there is handed out all the same.
    assert len(chat.worker.pop(wait=25, slots=50)) == PLACES - len(running)
    for stream in streams:
        stream.hang_up()


def test_polls_leave_places_to_streams(chat: ChatBroker) -> None:
    with ThreadPoolExecutor(PLACES + 4) as others:
        owners = [chat.live.user().api_key for _ in range(6)]
        polls = [
            others.submit(chat.live.pop, owners[number % 6], name=f"poll {number}", wait=25)
            for number in range(PLACES + 4)
        ]
        eventually(lambda: sum(poll.done() for poll in polls) == len(polls) - PLACES * 3 // 4, "no more polls wait")
        streams = [chat.open(key=chat.live.user(kudos=1000).api_key) for _ in range(PLACES // 4)]
        assert [stream.status for stream in streams] == [200] * (PLACES // 4)
        refused(chat)
        chat.live.context.wakeups.close()
        for stream in streams:
            stream.hang_up()


def test_short_calls_work_many_at_once(chat: ChatBroker, keys: list[str]) -> None:
    streams, jobs = fill(chat, keys, running=4)
    ids = [str(row[0]) for row in chat.world.rows("SELECT id FROM requests ORDER BY created_at")]
    url, key = chat.live.url, {"apikey": chat.client.api_key}

    def call(method: str, path: str, body: Any = None) -> int:
        with quick(f"{method} {path}"):
            return requests.request(method, f"{url}{path}", json=body, headers=key, timeout=30).status_code

    texts = {"prompt": "Hello", "params": {"max_length": 16}}
    polled = {name: value for name, value in order().items() if name != "stream"} | {"params": {"max_tokens": 16}}
    calls: list[Callable[[], int]] = [
        lambda: call("GET", f"/api/v2/generate/chat/status/{ids[0]}"),
        lambda: call("GET", f"/api/v2/generate/chat/status/{ids[-1]}"),
        lambda: call("POST", "/api/v2/generate/text/async", texts),
        lambda: call("POST", "/api/v2/generate/chat/async", polled),
        lambda: call("GET", "/api/v2/status/performance"),
        lambda: call("GET", "/api/v2/workers"),
        lambda: call("GET", "/v1/models"),
        lambda: call("GET", "/metrics"),
    ]
    for round_ in range(4):
        with ThreadPoolExecutor(KEPT) as others:
            answers = [others.submit(one) for one in (*calls, *calls)]
            with quick("a post of all jobs"):
                for job in jobs:
                    job.write(5)
                chat.worker.post(*jobs)
            assert {answer.result() for answer in answers} == {200, 202}
        assert all(job.accepted == 5 * (round_ + 1) for job in jobs)
    with quick("a submit"):
        chat.worker.finish(jobs[0], "stop")
    with quick("a release"):
        chat.worker.release(jobs[1])
    with quick("a DELETE"):
        assert call("DELETE", f"/api/v2/generate/chat/status/{ids[-1]}") == 200
    for stream in streams:
        stream.hang_up()
    for request in chat.world.rows("SELECT id FROM requests WHERE attached_until IS NULL"):
        chat.world.cancel(request[0])


def test_those_that_wait_hold_no_database_connection(database_url: str) -> None:
    waiting = 40
    with chat_broker(database_url, threads=waiting + KEPT + 16, database_pool=2) as chat:
        keys = [chat.live.user(kudos=100_000).api_key for _ in range(2)]
        streams = [chat.open(stream=number % 2 == 0, key=keys[number % 2]) for number in range(waiting)]
        eventually(lambda: chat.unfinished().get("queued") == waiting, "all wait in the queue")
        eventually(lambda: "connections" not in chat.unfinished(), "none is held")
        jobs = chat.worker.pop(slots=waiting)
        for job in jobs:
            job.write(8)
        chat.worker.post(*jobs)
        told = [stream.data() for stream in streams if stream.status]
        assert all(chunk["choices"][0]["delta"]["role"] == "assistant" for chunk in told)
        eventually(lambda: "connections" not in chat.unfinished(), "none is held")
        for stream in streams:
            stream.hang_up()
        chat.assert_sound()
