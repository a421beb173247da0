"""What `/v1` sends, held against recordings: each event of a stream, each answer and each error as a client had it once.

A recording is changed by hand and on purpose: clients that exist read these fields. In it `<id>` stands for the request's id,
0 for the moment of its order, and `<words>` for what an error says to people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support import tiny_tokenizer
from tests.support.chat import CHAT, COMPLETIONS, ChatBroker
from tests.support.chat_scenes import Scene, finish, say
from tests.support.sse import Event, Stream

HEADERS = ("content-type", "retry-after", "x-should-retry")
RECORDED = Path(__file__).parent / "recorded"
PLAIN = Scene(
    "two choices", 8, (say("Hé"), say('"\n', slot=1), say("llo"), finish("stop"), finish("length", slot=1)), {"n": 2}
)
TOKENS = Scene(
    "logprobs", 3, (say("é", logprobs=True), say("!", logprobs=True), finish("length")), {"max_tokens": 3}, logprobs=2
)
SCENES = [
    ("chat", CHAT, PLAIN), ("chat_with_logprobs", CHAT, TOKENS),
    ("completion", COMPLETIONS, PLAIN), ("completion_with_logprobs", COMPLETIONS, TOKENS),
]  # fmt: skip
EACH_SCENE = pytest.mark.parametrize(("name", "path", "scene"), SCENES, ids=[name for name, *_ in SCENES])


def nameless(text: str, stream: Stream | None = None) -> str:
    """A text without what is different each time."""
    if stream is not None:
        text = text.replace(stream.id, "<id>")
    text = re.sub(r'"message":"[^"]+"', '"message":"<words>"', text)
    return re.sub(r'"created":[0-9]+', '"created":0', text)


def readable(body: Any) -> str:
    """JSON as it stands in a recording: fields in the order they were sent."""
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def recording(name: str) -> str:
    """A recording's text."""
    return (RECORDED / name).read_text("utf-8")


def as_sent(event: Event) -> str:
    """The lines of an event."""
    return f": {event.comment}\n\n" if event.comment is not None else f"data: {event.data}\n\n"


def told_of(chat: ChatBroker, path: str, scene: Scene) -> tuple[Stream, str]:
    """A stream, and all it says of a scene."""
    stream = chat.open(path=path, stream_options={"include_usage": True}, **scene.fields(path))
    said = [stream.next()]
    jobs = scene.take(chat.worker)
    for at, step in enumerate(scene.steps):
        step.act(chat.worker, jobs)
        # With the first step come the roles.
        roles = scene.n if at == 0 and path == CHAT else 0
        said += [stream.next() for _ in range(roles + len(step.told))]
    said += stream.rest()
    return stream, "".join(as_sent(event) for event in said if event is not None)


@EACH_SCENE
def test_a_stream_is_event_by_event_as_it_was_recorded(chat: ChatBroker, name: str, path: str, scene: Scene) -> None:
    stream, said = told_of(chat, path, scene)
    assert nameless(said, stream) == recording(f"{name}_stream.sse")


@EACH_SCENE
def test_an_answer_is_field_by_field_as_it_was_recorded(chat: ChatBroker, name: str, path: str, scene: Scene) -> None:
    answer = chat.open(path=path, stream=False, **scene.fields(path))
    scene.play(chat.worker)
    body = json.loads(nameless(answer.text(), answer))
    assert readable(body) == recording(f"{name}.json")


@EACH_SCENE
def test_the_types_of_the_sdk_read_what_was_recorded(name: str, path: str, scene: Scene) -> None:
    chunk_type, whole_type = (Completion, Completion) if path == COMPLETIONS else (ChatCompletionChunk, ChatCompletion)
    # What OpenAI's description of its older kind leaves out: it streams these like any other.
    unset: dict[str, Any] = {"finish_reason": "stop"} if path == COMPLETIONS else {}
    lines = re.findall(r"^data: (\{.*)$", recording(f"{name}_stream.sse"), re.MULTILINE)
    assert len(lines) == len(scene.told) + 1 + (scene.n if path == CHAT else 0)
    for line in lines:
        chunk = json.loads(line)
        for choice in chunk["choices"]:
            choice.update({key: value for key, value in unset.items() if choice[key] is None})
        chunk_type.model_validate(chunk, strict=True)
    whole_type.model_validate_json(recording(f"{name}.json"), strict=True)


def test_a_stream_that_fails_is_as_it_was_recorded(chat: ChatBroker) -> None:
    stream = chat.open()
    job = chat.worker.take()
    chat.worker.say(job, "Hé")
    said = [stream.next() for _ in range(3)]
    chat.worker.fault(job)
    chat.worker.fault(chat.worker.take())
    said += stream.rest()
    text = "".join(as_sent(event) for event in said if event is not None)
    assert nameless(text, stream) == recording("failed_stream.sse")


def test_the_list_of_models_and_a_model_are_as_they_were_recorded(chat: ChatBroker) -> None:
    headers = {"Authorization": f"Bearer {chat.client.api_key}"}
    told = [
        chat.live.session.get(f"{chat.live.url}/v1/models{name}", headers=headers, timeout=30).text
        for name in ("", f"/{tiny_tokenizer.MODEL}")
    ]
    assert [readable(json.loads(nameless(text))) for text in told] == [
        recording("models.json"),
        recording("model.json"),
    ]
    Model.model_validate_json(told[1], strict=True)


def refusals(chat: ChatBroker) -> Iterator[tuple[str, Stream]]:
    """An answer with each error that an order can be refused with."""
    yield "invalid_request", chat.open(temperature=3)
    yield "unsupported_parameter", chat.open(tools=[{"type": "function", "function": {"name": "f"}}])
    yield "context_length_exceeded", chat.open(max_tokens=tiny_tokenizer.CONTEXT_LENGTH)
    yield "invalid_api_key", chat.open(key="nobody's")
    yield "insufficient_kudos", chat.open(key=chat.live.user().api_key, max_tokens=2000)
    yield "model_not_found", chat.open(model="none")
    yield "no_capacity", chat.open(model_revision="another")
    first = chat.open(headers={"Idempotency-Key": "recorded"})
    yield "idempotency_conflict", chat.open("Hello!", headers={"Idempotency-Key": "recorded"})
    first.hang_up()
    late = chat.open(stream=False, deadline_seconds=1)
    late.await_head()
    yield "deadline_exceeded", late
    deleted = chat.open(stream=False)
    job = chat.worker.take()
    request = chat.world.scalar("SELECT request_id FROM jobs WHERE id = %(id)s", id=job.id)
    chat.live.call("DELETE", f"generate/chat/status/{request}")
    deleted.await_head()
    yield "cancelled", deleted
    faulted = chat.open(stream=False)
    for _ in range(2):
        chat.worker.fault(chat.worker.take())
    faulted.await_head()
    yield "generation_faulted", faulted


def test_errors_are_as_they_were_recorded(chat: ChatBroker) -> None:
    told = {
        code: {
            "status": answer.status,
            "headers": {name: answer.headers[name] for name in HEADERS if name in answer.headers},
            "body": json.loads(nameless(answer.text())),
        }
        for code, answer in refusals(chat)
    }
    assert readable(told) == recording("errors.json")
    assert all(code == error["body"]["error"]["code"] for code, error in told.items())
