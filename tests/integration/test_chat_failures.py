"""How a chat fails once it is admitted: in a stream by one last event, without one by a status; and what the `openai` client
makes of it. Never `[DONE]`, never a finish reason, and nothing is left behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests.support import tiny_tokenizer
from tests.support.chat import COMPLETIONS, ChatBroker, chat_broker
from tests.support.played_output import PlayedJob
from tests.support.postgres import Server

MODEL, CONTEXT = tiny_tokenizer.MODEL, tiny_tokenizer.CONTEXT_LENGTH
HELLO: Any = [{"role": "user", "content": "Hello"}]
PIECES = ["The", " be", "e s", "ees", " 😀."]


@pytest.fixture(scope="module")
def guessing(server: Server) -> Iterator[ChatBroker]:
    """One that does not know the model's tokenizer."""
    url = server.create()
    try:
        with chat_broker(url, uploaded=False) as broker:
            yield broker
            assert broker.live.unexpected_errors() == 0
    finally:
        server.drop(url)


@dataclass(frozen=True)
class Failure:
    """One way to fail, behind five pieces of text.

    Attributes:
        act: brings it about.
        retried: what the header `x-should-retry` says.
    """

    name: str
    code: str
    status: int
    kind: str
    raised: type[openai.APIStatusError]
    retried: str | None
    act: Callable[[ChatBroker, PlayedJob], object]
    asked: dict[str, Any] = field(default_factory=dict)


def fault_twice(chat: ChatBroker, job: PlayedJob) -> None:
    chat.worker.fault(job)
    second = chat.worker.take()
    assert second.text == "".join(PIECES)
    chat.worker.fault(second)


def say_something_else_twice(chat: ChatBroker, job: PlayedJob) -> None:
    takes: list[Callable[[], PlayedJob]] = [lambda: job, chat.worker.take]
    for take in takes:
        told = {"generation": "No bee", "token_ids": [*b"No bee"], "state": "ok", "finish_reason": "stop"}
        lying = take()
        reply = chat.worker.submit(lying, **lying.result() | told)
        assert (reply.status, reply.body["rc"]) == (400, "ContradictsProgress")


def reject_twice_what_was_counted(chat: ChatBroker, job: PlayedJob) -> None:
    chat.worker.reject(job)
    chat.worker.reject(chat.worker.take())


def delete(chat: ChatBroker, job: PlayedJob) -> None:
    request = chat.world.scalar("SELECT request_id FROM jobs WHERE id = %(id)s", id=job.id)
    answer = chat.live.call("DELETE", f"generate/chat/status/{request}")
    assert answer.json()["cancelled"] is True
    assert chat.worker.hear_stop(job).reason == "cancelled"


FAILURES = [
    Failure("two faults", "generation_faulted", 502, "server_error", openai.InternalServerError, "false", fault_twice),
    Failure(
        "results that contradict the stream", "generation_faulted", 502, "server_error", openai.InternalServerError,
        "false", say_something_else_twice,
    ),
    Failure(
        "refusals of what the broker has counted", "generation_faulted", 502, "server_error", openai.InternalServerError,
        "false", reject_twice_what_was_counted,
    ),
    Failure("a cancel", "cancelled", 409, "invalid_request_error", openai.ConflictError, "false", delete),
    Failure(
        "its deadline", "deadline_exceeded", 504, "server_error", openai.InternalServerError, "false",
        lambda chat, job: chat.worker.hear_stop(job), {"deadline_seconds": 1},
    ),
]  # fmt: skip
EACH_FAILURE = pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name.replace(" ", "-"))


@EACH_FAILURE
def test_a_stream_that_fails_ends_with_an_error_behind_what_was_told(chat: ChatBroker, failure: Failure) -> None:
    stream = chat.open(**failure.asked)
    job = chat.worker.take()
    heard: list[str] = []
    for piece in PIECES:
        chat.worker.say(job, piece)
        if not heard:
            assert stream.data()["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        heard.append(stream.data()["choices"][0]["delta"]["content"])
    assert heard == PIECES
    failure.act(chat, job)
    (last,) = [event for event in stream.rest() if event.comment is None]
    assert stream.ended_in_order
    error = last.json()
    assert list(error) == ["error"]
    assert error["error"].pop("message")
    assert error["error"] == {"type": failure.kind, "param": None, "code": failure.code}


@EACH_FAILURE
def test_an_answer_that_fails_is_its_status(chat: ChatBroker, failure: Failure) -> None:
    answer = chat.open(stream=False, **failure.asked)
    job = chat.worker.take()
    chat.worker.say(job, "".join(PIECES))
    failure.act(chat, job)
    error = json.loads(answer.text())["error"]
    assert (answer.status, error["code"], error["type"]) == (failure.status, failure.code, failure.kind)
    assert (answer.headers.get("x-should-retry"), answer.headers.get("retry-after")) == (failure.retried, None)


@EACH_FAILURE
def test_the_sdk_raises_behind_what_it_was_told(chat: ChatBroker, failure: Failure) -> None:
    stream = chat.openai(max_retries=2).chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, extra_body=failure.asked
    )
    job = chat.worker.take()
    for piece in PIECES:
        chat.worker.say(job, piece)
    heard = ""
    while heard != "".join(PIECES):
        (choice,) = next(stream).choices
        heard += choice.delta.content or ""
        assert choice.finish_reason is None
    failure.act(chat, job)
    with pytest.raises(openai.APIError) as failed:
        next(stream)
    assert (failed.value.code, failed.value.type) == (failure.code, failure.kind)


@EACH_FAILURE
def test_the_sdk_raises_by_the_status(chat: ChatBroker, failure: Failure) -> None:
    before = chat.world.scalar("SELECT count(*) FROM requests")
    client = chat.openai(max_retries=2)
    with ThreadPoolExecutor(1) as aside:
        asked = aside.submit(client.completions.create, model=MODEL, prompt="Hello", extra_body=failure.asked)
        job = chat.worker.take()
        chat.worker.say(job, "".join(PIECES))
        failure.act(chat, job)
        with pytest.raises(failure.raised) as failed:
            asked.result(20)
    assert (failed.value.code, failed.value.status_code) == (failure.code, failure.status)
    # None of these is worth another try, and none is made.
    assert chat.world.scalar("SELECT count(*) FROM requests") == before + 1


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a_deadline_that_passes_in_the_queue_ends_it_in_both_ways(chat: ChatBroker, path: str) -> None:
    streamed = chat.open(path=path, deadline_seconds=1)
    whole = chat.open(path=path, deadline_seconds=1, stream=False)
    *comments, last = streamed.rest()
    assert all(event.comment is not None for event in comments)
    assert last.json()["error"]["code"] == json.loads(whole.text())["error"]["code"] == "deadline_exceeded"
    assert (whole.status, whole.headers["x-should-retry"]) == (504, "false")
    assert chat.worker.pop() == []


@pytest.mark.parametrize("streamed", [True, False])
def test_what_nobody_serves_now_is_a_503_before_anything_is_sent(chat: ChatBroker, *, streamed: bool) -> None:
    answer = chat.open(model_revision="another", stream=streamed, await_head=True)
    assert (answer.status, json.loads(answer.text())["error"]["code"]) == (503, "no_capacity")
    assert int(answer.headers["retry-after"]) > 0
    assert "x-should-retry" not in answer.headers


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("max_tokens", [1, CONTEXT])
@pytest.mark.parametrize("prompt", [CONTEXT - 1, CONTEXT, CONTEXT + 1])
def test_where_the_tokenizer_is_not_known_a_worker_says_what_does_not_fit(
    guessing: ChatBroker, prompt: int, max_tokens: int, *, streamed: bool
) -> None:
    around = len(tiny_tokenizer.encode(tiny_tokenizer.render([{"role": "user", "content": ""}])))
    with guessing.of_one_test() as chat:
        worker = chat.another_worker("long-winded", max_length=CONTEXT)
        answer = chat.open("x" * (prompt - around), max_tokens=max_tokens, stream=streamed)
        job = worker.take()
        assert (job.payload["prompt"], job.payload["prompt_token_ids"]) == (None, None)
        counted = len(tiny_tokenizer.encode(tiny_tokenizer.render(job.payload["messages"])))
        assert counted == prompt
        if counted + job.max_new_tokens <= CONTEXT:
            job.say("x")
            worker.finish(job, "length")
            told = chat.read(answer).text if streamed else json.loads(answer.text())["choices"][0]["message"]["content"]
            assert told == "x"
            return
        worker.reject(job)
        error = chat.read(answer).error if streamed else json.loads(answer.text())["error"]
        assert error is not None
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert str(CONTEXT) in error["message"]
        assert str(max_tokens) in error["message"]
        assert streamed or answer.status == 400
        # Nobody else is asked, and nobody is blamed.
        assert worker.pop() == chat.worker.pop() == []
        state, faulted = chat.world.rows(
            "SELECT jobs.state, requests.faulted FROM jobs JOIN requests ON requests.id = request_id WHERE jobs.id = %(id)s",
            id=job.id,
        )[0]
        assert (state, faulted) == ("rejected", 0)


@pytest.mark.parametrize("streamed", [True, False])
def test_what_only_a_worker_can_know_it_may_refuse(guessing: ChatBroker, *, streamed: bool) -> None:
    with guessing.of_one_test() as chat:
        answer = chat.open("Hello", stream=streamed)
        chat.worker.reject(chat.worker.take(), "unsupported_parameter")
        if streamed:
            error = chat.read(answer).error
        else:
            error = json.loads(answer.text())["error"]
            assert answer.status == 400
        assert error is not None
        assert error["code"] == "unsupported_parameter"


def test_what_the_broker_has_checked_itself_is_no_reason_to_refuse(chat: ChatBroker) -> None:
    stream = chat.open("Hello")
    chat.worker.reject(chat.worker.take(), "unsupported_parameter")
    job = chat.worker.take()
    chat.worker.say(job, "Hi")
    chat.worker.finish(job, "stop")
    told = chat.read(stream)
    assert (told.text, told.finish_reason, told.done) == ("Hi", "stop", True)
