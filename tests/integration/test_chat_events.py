"""What a stream of `/v1` says, event by event on a bare socket, and what the same answer is without a stream."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.chat import CHAT, COMPLETIONS, ChatBroker
from tests.support.chat_scenes import PROMPT, SCENES, Scene, Told
from tests.support.concurrency import eventually
from tests.support.sse import Event, Stream

EACH_SCENE = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name.replace(" ", "-"))
EACH_PATH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completion"])


def told_of(scene: Scene, path: str, stream: Stream, first: dict[str, Any]) -> Told:
    """What is told in this stream or answer, of which `first` says when it was ordered."""
    assert abs(first["created"] - time.time()) < 60
    return Told(scene, path, stream.id, first["created"])


@EACH_PATH
@EACH_SCENE
def test_a_stream_tells_each_step_of_a_worker_and_ends(chat: ChatBroker, scene: Scene, path: str) -> None:
    stream = chat.open(PROMPT, path=path, stream_options={"include_usage": True}, **scene.fields(path))
    assert stream.status == 200
    assert _comment(stream.next()) == "keep-alive"
    jobs = scene.take(chat.worker)
    told: Told | None = None
    for step in scene.steps:
        step.act(chat.worker, jobs)
        if not step.told:
            continue
        first = stream.data()
        told = told or told_of(scene, path, stream, first)
        expected = list(told.chunks(step.told))
        assert [first, *(stream.data() for _ in expected[1:])] == expected
    assert told is not None
    assert stream.data() == told.last_chunk()
    last = stream.next()
    assert last is not None
    assert last.is_done
    assert stream.next() is None
    assert stream.ended_in_order


@EACH_PATH
@EACH_SCENE
def test_an_answer_without_a_stream_is_what_a_stream_tells(chat: ChatBroker, scene: Scene, path: str) -> None:
    answer = chat.open(PROMPT, path=path, stream=False, **scene.fields(path))
    scene.play(chat.worker)
    body = json.loads(answer.text())
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json; charset=utf-8"
    assert body == told_of(scene, path, answer, body).whole()


def test_what_was_posted_of_a_withheld_answer_stays_told_in_a_stream_and_is_not_told_without_one(
    chat: ChatBroker,
) -> None:
    stream = chat.open()
    job = chat.worker.take()
    chat.worker.say(job, "Hel")
    assert [stream.data()["choices"][0]["delta"].get("content") for _ in range(2)] == ["", "Hel"]
    chat.worker.submit(job, **job.result() | {"state": "censored", "finish_reason": "stop", "generation": "Hello"})
    finish, done = stream.rest()
    assert finish.json()["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "content_filter",
    }
    assert done.is_done
    answer = chat.open(stream=False)
    job = chat.worker.take()
    chat.worker.say(job, "Hel")
    (follower,) = chat.live.context.streams._all()
    eventually(lambda: follower.reader.slots[0].characters == 3 and follower.output is None, "the post is handed out")
    chat.worker.submit(job, **job.result() | {"state": "csam", "finish_reason": "stop"})
    (choice,) = json.loads(answer.text())["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "content_filter")


def _comment(event: Event | None) -> str | None:
    assert event is not None
    return event.comment
