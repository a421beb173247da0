"""`Idempotency-Key` at `/v1`: one key and one body is one request, joined while it runs and told again once it has ended.

Only the last of those that wait for it gives it up by hanging up; and what was given up so is no answer to a repeat.
"""

from __future__ import annotations

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from typing import Any

import openai
import pytest

from horde.lifecycle.words import Outcome
from tests.support.chat import COMPLETIONS, ChatBroker, chat_broker
from tests.support.concurrency import DEADLINE, eventually
from tests.support.played_output import PlayedJob
from tests.support.sse import Stream

ROUNDS = 40
_numbers = count()


@pytest.fixture
def chat(settled_chat: ChatBroker) -> ChatBroker:
    return settled_chat


@pytest.fixture
def key() -> dict[str, str]:
    return fresh_key()


def fresh_key() -> dict[str, str]:
    """A header that no call has had before."""
    return {"Idempotency-Key": f"key-{next(_numbers)}"}


def whole(stream: Stream) -> dict[str, Any]:
    """The body of an answer that is no stream."""
    found: dict[str, Any] = json.loads(stream.text())
    return found


def text_of(chat: ChatBroker, stream: Stream, *, streamed: bool) -> str:
    if not streamed:
        content = whole(stream)["choices"][0]["message"]["content"]
        assert isinstance(content, str)
        return content
    told = chat.read(stream)
    assert told.done
    return told.text


def served(chat: ChatBroker, job: PlayedJob) -> str:
    """Go on with a job to its end; its text."""
    chat.worker.write(job, job.max_new_tokens - len(job.token_ids))
    chat.worker.finish(job, "length")
    text = job.result()["generation"]
    assert isinstance(text, str)
    return text


def wait_for(chat: ChatBroker, streams: int) -> None:
    eventually(lambda: chat.unfinished().get("streams", 0) == streams, f"{streams} wait")


def attached(chat: ChatBroker, request: str) -> int:
    found = chat.world.scalar("SELECT attached_by FROM requests WHERE id = %(id)s", id=uuid.UUID(request))
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize("first_streamed", [True, False])
@pytest.mark.parametrize("second_streamed", [True, False])
def test_whoever_joins_what_runs_gets_all_of_it(
    chat: ChatBroker, key: dict[str, str], *, first_streamed: bool, second_streamed: bool
) -> None:
    first = chat.open(headers=key, stream=first_streamed)
    job = chat.worker.take()
    chat.worker.write(job, 30)
    second = chat.open(headers=key, stream=second_streamed)
    wait_for(chat, 2)
    text = served(chat, job)
    assert text_of(chat, first, streamed=first_streamed) == text
    assert text_of(chat, second, streamed=second_streamed) == text
    assert chat.worker.pop() == []


def test_who_leaves_first_leaves_it_to_the_others_and_the_last_one_gives_it_up(
    chat: ChatBroker, key: dict[str, str]
) -> None:
    streams = [chat.open(headers=key) for _ in range(3)]
    job = chat.worker.take()
    assert len({stream.id for stream in streams}) == 1
    for left, stream in enumerate(reversed(streams)):
        assert attached(chat, stream.id) == 3 - left
        chat.worker.write(job, 10)
        assert job.stopped is None
        stream.hang_up()
        wait_for(chat, 2 - left)
        eventually(lambda left=left: attached(chat, streams[0].id) == 2 - left, "it is noted")  # type: ignore[misc]
    assert chat.worker.hear_stop(job).reason == "cancelled"
    status = chat.world.status(uuid.UUID(streams[0].id))
    assert (status.outcome_reason, status.results[0]["token_ids"]) == ("disconnect", job.token_ids)


@pytest.mark.parametrize("streamed", [True, False])
def test_what_has_its_end_is_told_again_as_it_was_and_charged_once(
    chat: ChatBroker, key: dict[str, str], *, streamed: bool
) -> None:
    asked: dict[str, Any] = {"headers": key, "n": 2, "logprobs": True, "top_logprobs": 1, "stream": streamed, "seed": 5}
    if streamed:
        asked["stream_options"] = {"include_usage": True}
    first = chat.open(**asked)
    for _ in range(2):
        served(chat, chat.worker.take())
    bodies: list[Any] = []
    for stream in (first, chat.open(**asked), chat.open(**asked)):
        if streamed:
            told = chat.read(stream)
            bodies.append((dict(told.texts), told.finished, told.usage, dict(told.logprobs), told.chunks[0]["id"]))
        else:
            bodies.append(whole(stream))
    assert bodies[1:] == bodies[:1] * 2
    assert chat.worker.pop() == []


def test_what_failed_is_told_again_as_it_failed(chat: ChatBroker, key: dict[str, str]) -> None:
    first = chat.open(headers=key, stream=False)
    for _ in range(2):
        chat.worker.fault(chat.worker.take())
    error = whole(first)
    again = chat.open(headers=key, stream=False)
    assert whole(again) == error
    assert (first.status, again.status, error["error"]["code"]) == (502, 502, "generation_faulted")
    told = chat.read(chat.open(headers=key))
    assert told.error == error["error"]


def test_what_its_client_gave_up_is_no_answer_and_the_repeat_an_order_of_its_own(
    chat: ChatBroker, key: dict[str, str]
) -> None:
    first = chat.open(headers=key)
    job = chat.worker.take()
    chat.worker.write(job, 20)
    first.hang_up()
    chat.worker.hear_stop(job)
    second = chat.open(headers=key)
    assert second.id != first.id
    text = served(chat, chat.worker.take())
    assert text_of(chat, second, streamed=True) == text
    # The key is the second one's from here on.
    assert chat.open(headers=key).id == second.id


def test_a_key_is_one_bodys_and_one_users_and_one_routes(chat: ChatBroker, key: dict[str, str]) -> None:
    first = chat.open(headers=key)
    conflicting = chat.open("something else", headers=key, await_head=False)
    error = whole(conflicting)["error"]
    assert (conflicting.status, error["code"]) == (422, "idempotency_conflict")
    others = [
        chat.open(headers=key, key=chat.live.user(kudos=1000).api_key),
        chat.open(headers=key, path=COMPLETIONS),
    ]
    assert len({stream.id for stream in (first, *others)}) == 3
    for stream in (first, *others):
        stream.hang_up()


@pytest.mark.parametrize("bad", ["", "x" * 256, "two words", "schlüssel", "\t"])
def test_what_is_no_key_is_refused_and_nothing_is_queued(chat: ChatBroker, bad: str) -> None:
    for streamed in (True, False):
        refused = chat.open(headers={"Idempotency-Key": bad}, stream=streamed, await_head=False)
        error = whole(refused)["error"]
        assert (refused.status, error["code"], error["param"]) == (400, "invalid_request", "Idempotency-Key")
    assert chat.unfinished() == {}


def test_a_key_is_free_again_once_its_request_is_removed(chat: ChatBroker, key: dict[str, str]) -> None:
    first = chat.open(headers=key)
    served(chat, chat.worker.take())
    chat.read(first)
    chat.world.advance(chat.world.terms.retention + 1)
    while chat.world.delete_old():
        pass
    chat.worker.check_in()
    second = chat.open("another body", headers=key)
    assert second.id != first.id
    second.hang_up()


def test_those_that_come_at_the_same_moment_are_one_request(chat: ChatBroker) -> None:
    clients = 4
    gate = threading.Barrier(clients)

    def ask(headers: dict[str, str]) -> Stream:
        gate.wait(DEADLINE)
        return chat.open(headers=headers)

    with ThreadPoolExecutor(clients) as pool:
        for _ in range(ROUNDS):
            streams = list(pool.map(ask, [fresh_key()] * clients))
            (request,) = {stream.id for stream in streams}
            assert attached(chat, request) == clients
            assert chat.unfinished()["queued"] == 1
            # They leave at the same moment too, and the last of them takes it along.
            list(pool.map(Stream.hang_up, streams))
            chat.assert_nothing_left()
            status = chat.world.status(uuid.UUID(request))
            assert (status.outcome, status.outcome_reason) == (Outcome.CANCELLED, "disconnect")


def test_who_comes_as_the_last_one_leaves_gets_an_answer(chat: ChatBroker) -> None:
    """It joins in time, or it has a request of its own; never the one that has just been given up."""
    gate = threading.Barrier(2)
    joined = 0

    def hang_up(stream: Stream) -> None:
        gate.wait(DEADLINE)
        stream.hang_up()

    def ask(headers: dict[str, str]) -> Stream:
        gate.wait(DEADLINE)
        return chat.open(headers=headers)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(ROUNDS):
            headers = fresh_key()
            first = chat.open(headers=headers)
            leaving, coming = pool.submit(hang_up, first), pool.submit(ask, headers)
            leaving.result()
            second = coming.result()
            joined += second.id == first.id
            job = chat.worker.take()
            chat.worker.finish(job)
            assert chat.read(second).done
            chat.assert_nothing_left()
    assert joined < ROUNDS, "nobody came late"


def test_an_sdk_that_loses_patience_and_tries_again_has_one_job_at_a_time(database_url: str) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    with chat_broker(database_url) as chat:
        chat.worker.start(jobs=4, rate=20)
        client = chat.openai(timeout=1.0, max_retries=1)
        for headers in ({}, fresh_key()):
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(model="tiny", messages=hello, max_tokens=400, extra_headers=headers)
            chat.assert_nothing_left()
        chat.worker.wait_until(lambda: not chat.worker.held)
        chat.assert_sound()
        jobs = chat.world.rows("SELECT claimed_at, settled_at, stored_by_cancel FROM jobs ORDER BY claimed_at")
        assert [by_cancel for *_, by_cancel in jobs] == [True] * 4
        for (_, ended, _), (claimed, _, _) in pairwise(jobs):
            assert ended <= claimed
