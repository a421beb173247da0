"""Chats that are polled read as texts do, at every step of their lives; and what whoever waits is told of a worker's refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import requests

from tests.support.chat import ChatBroker, chat_broker
from tests.support.chat_orders import HELLO
from tests.support.played_output import PlayedJob
from tests.support.played_worker import PlayedWorker
from tests.support.postgres import Server
from tests.support.tiny_tokenizer import MODEL

# What is asked for: two answers. A report is on the job that was taken first.
ASKED: dict[str, dict[str, Any]] = {
    "chat": {"messages": HELLO, "model": MODEL, "params": {"n": 2, "max_tokens": 64}},
    "text": {"prompt": "Hello", "models": [MODEL], "params": {"n": 2, "max_length": 64}},
}
LIVES: dict[str, Sequence[str]] = {
    "one by one": ["take", "store", "take", "store"],
    "a fault and a retry": ["take", "fault", "take", "store", "take", "store"],
    "two faults": ["take", "take", "fault", "fault"],
    "two faults beside a result": ["take", "store", "take", "fault", "take", "fault"],
    "handed back": ["take", "release", "take", "store", "take", "store"],
    "censored": ["take", "censor", "take", "store"],
    "cancelled while it waits": ["cancel"],
    "cancelled while one runs": ["take", "cancel", "store"],
    "cancelled, then a fault": ["take", "store", "take", "cancel", "fault"],
    "cancelled twice, then handed back": ["take", "cancel", "cancel", "release"],
    "cancelled when it is complete": ["take", "store", "take", "store", "cancel"],
}
SAME = ("finished", "processing", "waiting", "restarted", "done", "faulted", "is_possible", "queue_position")


@pytest.fixture(scope="module")
def both(server: Server) -> Iterator[ChatBroker]:
    """A broker whose worker takes texts and chats."""
    url = server.create()
    try:
        with chat_broker(url, worker={"kinds": ("text", "chat")}) as made:
            yield made
            assert made.live.unexpected_errors() == 0
    finally:
        server.drop(url)


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
def test_a_chat_that_is_polled_reads_as_a_text_does_at_every_step(both: ChatBroker, life: Sequence[str]) -> None:
    chat, text = told(both, "chat", life), told(both, "text", life)
    assert chat == text
    assert [reading["done"] for reading in chat[:-2]] == [False] * (len(chat) - 2)
    assert chat[-1]["done"] is True


def told(both: ChatBroker, kind: str, life: Sequence[str]) -> list[dict[str, Any]]:
    """What a request reads as, at first and after each step."""
    answer = both.live.call("POST", f"generate/{kind}/async", key=both.client.api_key, json=ASKED[kind])
    assert answer.status_code == 202, answer.text
    path = f"generate/{kind}/status/{answer.json()['id']}"
    jobs: list[PlayedJob] = []
    readings = [reading(both.live.call("GET", path))]
    for step in life:
        if step == "take":
            jobs.append(both.worker.take(wait=0))
        elif step == "cancel":
            cancelled = reading(both.live.call("DELETE", path))
            assert cancelled == reading(both.live.call("GET", path))
        else:
            report(both.worker, jobs.pop(0), step)
        readings.append(reading(both.live.call("GET", path)))
    return readings


def report(worker: PlayedWorker, job: PlayedJob, step: str) -> None:
    if step == "store":
        job.say("Good day")
        assert worker.finish(job) > 0
    elif step == "censor":
        assert worker.submit(job, state="censored", generation="", finish_reason="stop").status == 200
    elif step == "fault":
        worker.fault(job)
    else:
        worker.release(job)


def reading(answer: requests.Response) -> dict[str, Any]:
    """What both kinds tell; `cancelled` and `error_code` only where they are told."""
    assert answer.status_code == 200, answer.text
    status = answer.json()
    told_sometimes = {name: status[name] for name in ("cancelled", "error_code") if name in status}
    results = [(generation["state"], generation["text"]) for generation in status["generations"]]
    return {**{name: status[name] for name in SAME}, **told_sometimes, "results": results}


def test_whoever_waits_is_told_a_workers_refusal_as_if_it_were_the_brokers(database_url: str) -> None:
    with chat_broker(database_url, uploaded=False) as chat:
        streamed, whole = chat.open(), chat.open(stream=False)
        for _ in (streamed, whole):
            chat.worker.reject(chat.worker.take())
        error = json.loads(whole.text())["error"]
        assert (whole.status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
        transcript = chat.read(streamed)
        assert transcript.error is not None
        assert transcript.error["code"] == "context_length_exceeded"
        assert transcript.finish_reason is None
        chat.assert_nothing_left()
