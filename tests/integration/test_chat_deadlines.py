"""A chat with a deadline: one that cannot be met is refused, and one that passes ends it then, whoever else is at work or not."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

import pytest

from horde.kudos.prices import HUNDREDTHS, TEXT_TAX
from horde.lifecycle.words import Outcome
from tests.support.chat import ChatBroker, chat_broker, price
from tests.support.concurrency import eventually
from tests.support.sse import Stream

# The shortest there is.
SECONDS = 1
# Maintenance, which would find it too, does not run here.
LATE = 2.0


@pytest.fixture
def chat(settled_chat: ChatBroker) -> ChatBroker:
    return settled_chat


def error_of(stream: Stream) -> dict[str, Any]:
    """What an answer that is no stream fails with: its deadline, as a status that is of no use to try again."""
    error: dict[str, Any] = json.loads(stream.text())["error"]
    assert (stream.status, stream.headers["x-should-retry"]) == (504, "false")
    return error


def assert_in_time(began: float) -> None:
    assert SECONDS <= time.monotonic() - began < SECONDS + LATE


def test_one_that_passes_in_the_queue_ends_what_nobody_took(chat: ChatBroker) -> None:
    began = time.monotonic()
    streamed = chat.open(deadline_seconds=SECONDS)
    whole = chat.open(deadline_seconds=SECONDS, stream=False)
    told = chat.read(streamed)
    error = error_of(whole)
    assert_in_time(began)
    assert told.error is not None
    assert (told.error["code"], told.error["type"], told.done) == ("deadline_exceeded", "server_error", False)
    assert error == told.error
    assert chat.worker.pop(slots=2) == []
    status = chat.world.status(uuid.UUID(streamed.id))
    assert (status.outcome, status.outcome_reason, status.charged) == (Outcome.CANCELLED, "deadline", TEXT_TAX)


def test_one_that_passes_while_it_runs_ends_it_on_what_was_posted(chat: ChatBroker) -> None:
    began = time.monotonic()
    streamed = chat.open(deadline_seconds=SECONDS)
    job = chat.worker.take()
    whole = chat.open(deadline_seconds=SECONDS, stream=False)
    other = chat.worker.take()
    assert 0 < job.told["deadline"] <= SECONDS
    chat.worker.write(job, 30)
    chat.worker.write(other, 20)
    told = chat.read(streamed)
    error = error_of(whole)
    assert_in_time(began)
    assert (told.text, told.finished, told.error) == (job.text, {}, error)
    assert chat.worker.hear_stop(job).reason == chat.worker.hear_stop(other).reason == "cancelled"
    status = chat.world.status(uuid.UUID(streamed.id))
    due = price(30, job.payload["prompt_tokens"])
    assert (status.outcome_reason, status.results[0]["finish_reason"]) == ("deadline", "cancelled")
    assert status.charged == TEXT_TAX + due.price
    assert chat.worker.finish(job) == due.reward / HUNDREDTHS


def test_one_that_passes_between_two_workers_is_the_end(chat: ChatBroker) -> None:
    began = time.monotonic()
    stream = chat.open(deadline_seconds=SECONDS)
    job = chat.worker.take()
    chat.worker.write(job, 30)
    chat.worker.release(job)
    told = chat.read(stream)
    assert_in_time(began)
    assert told.error is not None
    assert (told.text, told.error["code"]) == (job.text, "deadline_exceeded")
    assert chat.another_worker("second").pop() == []


def test_who_joins_has_the_deadline_of_who_came_first(chat: ChatBroker) -> None:
    began = time.monotonic()
    key = {"Idempotency-Key": "one-deadline"}
    first = chat.open(headers=key, deadline_seconds=SECONDS)
    second = chat.open(headers=key, deadline_seconds=SECONDS)
    first.hang_up()
    told = chat.read(second)
    assert_in_time(began)
    assert told.error is not None
    assert (second.id, told.error["code"]) == (first.id, "deadline_exceeded")


def test_an_answer_in_time_is_an_answer(chat: ChatBroker) -> None:
    stream = chat.open(deadline_seconds=60)
    chat.worker.finish(chat.worker.take(), "stop")
    assert chat.read(stream).done


@pytest.mark.parametrize("streamed", [True, False])
def test_one_that_cannot_be_met_is_refused_before_anything_is_queued(database_url: str, *, streamed: bool) -> None:
    with chat_broker(database_url, worker={"threads": 1}) as chat:
        # Two thousand tokens wait ahead, which is minutes of a worker that nobody has measured yet.
        ahead = [chat.open(max_tokens=1000) for _ in range(2)]
        eventually(lambda: chat.unfinished().get("queued") == 2, "both wait")
        refused = chat.open(deadline_seconds=100, stream=streamed, await_head=False)
        error = json.loads(refused.text())["error"]
        assert (refused.status, error["code"]) == (503, "no_capacity")
        assert int(refused.headers["Retry-After".lower()]) >= 1
        assert "x-should-retry" not in refused.headers
        assert chat.unfinished()["queued"] == 2
        # There is time for it where more can wait.
        patient = chat.open(deadline_seconds=1000)
        for stream in [*ahead, patient]:
            stream.hang_up()
        chat.assert_sound()
