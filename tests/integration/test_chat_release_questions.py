"""What has to be so before anybody relies on chats here: when the first event comes, how a choice ends, who counts, what a cancel
leaves, and which errors to try again.
"""

from __future__ import annotations

import json
import select
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from openai import OpenAI

from horde.errors import RETRYABLE, ErrorCode
from tests.support import tiny_tokenizer
from tests.support.chat import ChatBroker, chat_broker
from tests.support.concurrency import eventually
from tests.support.engine_worker import MODEL as ENGINE_MODEL
from tests.support.engine_worker import EngineWorker
from tests.support.live_broker import ANONYMOUS
from tests.support.played_output import PlayedJob
from tests.support.transcript import Transcript

HELLO: Any = [{"role": "user", "content": "Hello"}]
PROMPT_TOKENS = len(tiny_tokenizer.encode(tiny_tokenizer.render(HELLO)))


# The first event only after admission.


def test_nothing_is_sent_before_the_request_is_on_disk(chat: ChatBroker) -> None:
    database = chat.live.context.database

    def orders_that_wait() -> int:
        waiting = "SELECT count(*) FROM pg_locks WHERE relation = 'requests'::regclass AND NOT granted"
        return int(chat.world.scalar(waiting))

    with database.transaction() as tx:
        # Whoever enqueues something waits for us, all else goes on.
        tx.execute("LOCK TABLE requests IN SHARE ROW EXCLUSIVE MODE")
        stream = chat.open(await_head=False)
        eventually(lambda: orders_that_wait() == 1, "the order has been admitted but for its last step")
        assert not select.select([stream], [], [], 0)[0], "something was sent"
    stream.await_head()
    assert chat.world.scalar("SELECT outcome IS NULL FROM requests WHERE id = %(id)s", id=stream.id) is True
    first = stream.next()
    assert first is not None
    assert (stream.status, first.comment) == (200, "keep-alive")
    chat.worker.finish(chat.worker.take())
    assert chat.read(stream).done


def test_an_order_that_is_not_admitted_is_answered_by_a_status_and_no_event(chat: ChatBroker) -> None:
    before = chat.world.scalar("SELECT count(*) FROM requests")
    for body in ({"temperature": 3}, {"model": "none"}, {"max_tokens": 5000}, {"model_revision": "another"}):
        answer = chat.open(**body)
        assert answer.status >= 400
        assert answer.headers["content-type"] == "application/json; charset=utf-8"
        assert "data:" not in answer.text()
    assert chat.world.scalar("SELECT count(*) FROM requests") == before


# One finish reason, and no doubt about it.


def test_each_choice_has_one_finish_reason_whatever_workers_say_twice_or_late(chat: ChatBroker) -> None:
    stream = chat.open(n=3)
    jobs = sorted(chat.worker.pop(wait=10, slots=3), key=lambda job: job.slot)
    for job in jobs:
        chat.worker.say(job, f"choice {job.slot}")
    # One is submitted twice, one is faulted and done again, and its first worker comes back.
    chat.worker.finish(jobs[0], "length")
    assert chat.worker.submit(jobs[0], **said(jobs[0], "stop")).status == 400
    chat.worker.fault(jobs[1])
    again = chat.worker.take()
    assert again.text == "choice 1"
    assert chat.worker.submit(jobs[1], **said(jobs[1], "length")).status == 400
    chat.worker.say(again, ", done")
    chat.worker.finish(again, "stop")
    assert chat.worker.submit(jobs[1], **said(jobs[1], "length")).status == 400
    chat.worker.finish(jobs[2], "stop")
    # What is cancelled behind its end stays as it ended.
    assert chat.live.call("DELETE", f"generate/chat/status/{stream.id}").status_code == 200
    events = stream.rest()
    reasons = Counter(
        (choice["index"], choice["finish_reason"])
        for event in events
        if event.data is not None and not event.is_done
        for choice in event.json()["choices"]
        if choice["finish_reason"] is not None
    )
    assert reasons == {(0, "length"): 1, (1, "stop"): 1, (2, "stop"): 1}
    told = Transcript().read(events)
    assert told.texts == {0: "choice 0", 1: "choice 1, done", 2: "choice 2"}
    assert told.done


def said(job: PlayedJob, reason: str) -> dict[str, Any]:
    """A result of this job."""
    return {"state": "ok", "finish_reason": reason, **job.result()}


# Usage is what the tokenizer of the admission counts.

TEXT, TOKENS = "Hé, wörld", 11
LIES: dict[str, dict[str, Any]] = {
    "no lie": {},
    "usage": {"usage": {"prompt_tokens": 1, "completion_tokens": 9999, "cached_tokens": 9999}},
    "no usage": {"usage": None},
    "no tokens": {"token_ids": []},
    "no ids": {"token_ids": None},
    "other tokens": {"token_ids": [65] * TOKENS},
    "more tokens": {"token_ids": [*TEXT.encode(), *b"and more"]},
    "tokens that show nothing": {"token_ids": [*TEXT.encode(), *[tiny_tokenizer.END] * 20]},
    "tokens that there are not": {"token_ids": [*range(1000, 1040)]},
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("streamed", [True, False])
def test_usage_is_counted_by_the_tokenizer_of_the_admission(chat: ChatBroker, lie: str, *, streamed: bool) -> None:
    answer = chat.open(stream=streamed, stream_options={"include_usage": True} if streamed else None)
    job = chat.worker.take()
    job.say(TEXT)
    fields = {key: value for key, value in (said(job, "stop") | LIES[lie]).items() if value is not None}
    assert chat.worker.submit(job, **fields).status == 200
    usage = chat.read(answer).usage if streamed else json.loads(answer.text())["usage"]
    cached = PROMPT_TOKENS if lie == "usage" else 0
    assert usage == {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": TOKENS,
        "total_tokens": PROMPT_TOKENS + TOKENS,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_posts_of_tokens_that_the_text_is_not_made_of_are_not_counted(chat: ChatBroker) -> None:
    stream = chat.open(stream_options={"include_usage": True})
    job = chat.worker.take()
    ids = [65] * 40
    chat.worker.send({"id": job.id, "state": "decode", "offset": 0, "token_ids": ids, "text": TEXT, "text_offset": 0})
    reply = chat.worker.submit(job, **said(job, "stop") | {"generation": TEXT, "token_ids": ids})
    assert reply.status == 200
    told = chat.read(stream)
    assert (told.text, told.usage and told.usage["completion_tokens"]) == (TEXT, TOKENS)


# A cancel leaves nothing with the broker and nothing in the engine.


@pytest.fixture(scope="module")
def engine(running: ChatBroker) -> Iterator[EngineWorker]:
    with EngineWorker(running.live.url, running.owner.api_key) as worker:
        yield worker


@pytest.mark.parametrize("way", ["hang-up", "hang-up without a stream", "cancel from elsewhere", "deadline"])
def test_a_cancel_frees_the_sequences_and_blocks_of_the_engine(
    chat: ChatBroker, engine: EngineWorker, way: str
) -> None:
    asked: dict[str, Any] = {"model": ENGINE_MODEL, "n": 3, "max_tokens": 200, "temperature": 0, "seed": 1}
    eventually(lambda: is_idle(engine), "the engine is idle")
    engine.engine.hold_after(15)
    if way == "deadline":
        asked["deadline_seconds"] = 3
    answer = chat.open(stream="without" not in way, **asked)
    eventually(lambda: engine.engine.is_held, "the engine has made its tokens")
    figures = engine.engine.statistics()
    assert figures.running == 3
    assert figures.blocks_free < figures.blocks_total
    request = chat.world.scalar("SELECT id FROM requests WHERE outcome IS NULL")
    posted = "SELECT count(*) FROM progress JOIN jobs ON jobs.id = job_id WHERE request_id = %(id)s"
    eventually(lambda: chat.world.scalar(posted, id=request) == 3, "the broker has some of each")
    if way.startswith("hang-up"):
        answer.hang_up()
    elif way == "cancel from elsewhere":
        chat.live.call("DELETE", f"generate/chat/status/{request}")
    eventually(lambda: is_idle(engine), "the engine is idle again")
    engine.engine.hold_after(None)
    chat.assert_nothing_left()
    rows = chat.world.rows(
        "SELECT state, finish_reason, tokens = cardinality(token_ids) AND tokens > 0 FROM jobs WHERE request_id = %(id)s",
        id=request,
    )
    assert rows == [("stored", "cancelled", True)] * 3
    if not way.startswith("hang-up"):
        told = chat.read(answer)
        assert told.error is not None
        assert told.error["code"] == ("deadline_exceeded" if way == "deadline" else "cancelled")


def is_idle(worker: EngineWorker) -> bool:
    """Whether the engine has nothing to do, and all its blocks."""
    figures = worker.engine.statistics()
    return (figures.running, figures.waiting) == (0, 0) and figures.blocks_free == figures.blocks_total


# Errors that may pass, and those that will not.


class Impatient(OpenAI):
    """OpenAI's client, which notes how long it should wait before another try, and does not."""

    waits: list[float]

    def _calculate_retry_timeout(self, *given: Any, **named: Any) -> float:
        self.waits.append(super()._calculate_retry_timeout(*given, **named))
        return 0.0


def tried(chat: ChatBroker, **asked: Any) -> tuple[openai.APIStatusError, int, list[float]]:
    """What the SDK raises, how often it asked, and how long it would have waited before each further try."""
    sent: list[Any] = []
    with (
        openai.DefaultHttpxClient(event_hooks={"request": [sent.append]}) as http,
        Impatient(
            base_url=f"{chat.live.url}/v1", api_key=chat.client.api_key, max_retries=2, http_client=http
        ) as client,
    ):
        client.waits = []
        with pytest.raises(openai.APIStatusError) as raised:
            client.chat.completions.create(
                **{"model": tiny_tokenizer.MODEL, "messages": HELLO, "max_tokens": 64, "stream": True, **asked}
            )
        return raised.value, len(sent), client.waits


@pytest.mark.parametrize("streamed", [True, False])
def test_errors_that_may_pass_are_tried_again_when_the_broker_says(database_url: str, *, streamed: bool) -> None:
    with chat_broker(database_url, rate_limits="on", threads=18) as chat:
        told: dict[ErrorCode, tuple[openai.APIStatusError, int, list[float]]] = {}
        told[ErrorCode.NO_CAPACITY] = tried(chat, stream=streamed, extra_body={"model_revision": "another"})
        with chat.live.context.database.transaction() as tx:
            tx.execute("UPDATE users SET concurrency = 2 WHERE id = %(id)s", {"id": chat.client.id})
        told[ErrorCode.CONCURRENCY_EXCEEDED] = tried(chat, stream=streamed, n=3)
        with ExitStack() as held:
            while held.enter_context(chat.live.context.places.place()):
                pass
            told[ErrorCode.BROKER_UNAVAILABLE] = tried(chat, stream=streamed)
    assert set(told) == RETRYABLE - {ErrorCode.RATE_LIMIT_EXCEEDED}
    for code, (error, times, waits) in told.items():
        assert error.code == code
        after = float(error.response.headers["retry-after"])
        assert (times, waits) == (3, [after, after]), code
        assert "x-should-retry" not in error.response.headers
        assert isinstance(error, openai.RateLimitError if error.status_code == 429 else openai.InternalServerError)


def test_who_asks_too_often_is_told_when_to_ask_again(database_url: str) -> None:
    with chat_broker(database_url, rate_limits="on") as chat:
        answers = (chat.open(key=ANONYMOUS, temperature=3) for _ in range(100))
        answer = next(answer for answer in answers if answer.status == 429)
        error = json.loads(answer.text())["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert 0 <= int(answer.headers["retry-after"]) <= 60
    assert "x-should-retry" not in answer.headers


def fault_twice(chat: ChatBroker) -> None:
    for _ in range(2):
        chat.worker.fault(chat.worker.take())


def cancel(chat: ChatBroker) -> None:
    chat.worker.take()
    request = chat.world.scalar("SELECT id FROM requests WHERE outcome IS NULL")
    chat.live.call("DELETE", f"generate/chat/status/{request}")


TERMINAL: list[tuple[ErrorCode, dict[str, Any], Callable[[ChatBroker], None] | None]] = [
    (ErrorCode.INVALID_REQUEST, {"temperature": 3}, None),
    (ErrorCode.UNSUPPORTED_PARAMETER, {"tools": [{"type": "function"}]}, None),
    (ErrorCode.CONTEXT_LENGTH_EXCEEDED, {"max_tokens": 4096}, None),
    (ErrorCode.INVALID_API_KEY, {"extra_headers": {"Authorization": "Bearer nobody's"}}, None),
    (ErrorCode.MODEL_NOT_FOUND, {"model": "none"}, None),
    (ErrorCode.DEADLINE_EXCEEDED, {"extra_body": {"deadline_seconds": 1}}, lambda chat: None),
    (ErrorCode.GENERATION_FAULTED, {}, fault_twice),
    (ErrorCode.CANCELLED, {}, cancel),
]


@pytest.mark.parametrize(("code", "asked", "act"), TERMINAL)
def test_errors_that_will_not_pass_are_tried_once(
    chat: ChatBroker, code: ErrorCode, asked: dict[str, Any], act: Callable[[ChatBroker], None] | None
) -> None:
    with ThreadPoolExecutor(1) as aside:
        # Without a stream, so that what happens to the request later is a status as well.
        asking = aside.submit(tried, chat, stream=False, **asked)
        if act is not None:
            act(chat)
        error, times, waits = asking.result(20)
    assert (error.code, times, waits) == (code, 1, [])
    assert code not in RETRYABLE
    assert "retry-after" not in error.response.headers
    if error.status_code >= 409 and error.status_code != 422:
        assert error.response.headers["x-should-retry"] == "false"
