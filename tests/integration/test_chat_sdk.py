"""The `openai` client at `/v1`: the same chunks as on the wire, the same answer in both ways, and each error as its own class."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

from tests.support import tiny_tokenizer
from tests.support.chat import CHAT, COMPLETIONS, ChatBroker
from tests.support.chat_scenes import PROMPT, SCENES, Scene, Told, finish, say
from tests.support.live_broker import ANONYMOUS

EACH_SCENE = pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name.replace(" ", "-"))
EACH_PATH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completion"])
HELLO: Any = [{"role": "user", "content": PROMPT}]


def create(client: OpenAI, path: str, **fields: Any) -> Any:
    """Ask for a chat or for a completion."""
    model = tiny_tokenizer.MODEL
    if path == COMPLETIONS:
        return client.completions.create(model=model, prompt=PROMPT, **fields)
    return client.chat.completions.create(model=model, messages=HELLO, **fields)


def id_of(answer_id: str) -> str:
    """The request's id within that of an answer."""
    request_id = answer_id.partition("-")[2]
    assert str(uuid.UUID(request_id)) == request_id
    return request_id


@EACH_PATH
@EACH_SCENE
def test_the_sdk_hears_chunk_by_chunk_what_a_worker_posts(chat: ChatBroker, scene: Scene, path: str) -> None:
    fields = {"max_tokens": 64, "stream_options": {"include_usage": True}, **scene.fields(path)}
    stream = create(chat.openai(), path, stream=True, **fields)
    jobs = scene.take(chat.worker)
    told: Told | None = None
    for step in scene.steps:
        step.act(chat.worker, jobs)
        if not step.told:
            continue
        first = next(stream).to_dict()
        told = told or Told(scene, path, id_of(first["id"]), first["created"])
        expected = list(told.chunks(step.told))
        assert [first, *(next(stream).to_dict() for _ in expected[1:])] == expected
    assert told is not None
    assert [chunk.to_dict() for chunk in stream] == [told.last_chunk()]


@EACH_PATH
@EACH_SCENE
def test_the_sdk_has_the_same_answer_without_a_stream(chat: ChatBroker, scene: Scene, path: str) -> None:
    client = chat.openai()
    with ThreadPoolExecutor(1) as aside:
        asked = aside.submit(create, client, path, **{"max_tokens": 64, **scene.fields(path)})
        scene.play(chat.worker)
        answer = asked.result(20)
    assert isinstance(answer, Completion if path == COMPLETIONS else ChatCompletion)
    assert answer.to_dict() == Told(scene, path, id_of(answer.id), answer.created).whole()


def test_the_helper_of_the_sdk_puts_together_choices_that_begin_in_any_order(chat: ChatBroker) -> None:
    scene = Scene(
        "", 7, (say("Cat", slot=2), say("An", slot=0), *(finish("stop", slot=at) for at in (1, 2, 0))), {"n": 3}
    )
    with ThreadPoolExecutor(1) as aside:
        played = aside.submit(scene.play, chat.worker)
        with chat.openai().chat.completions.stream(model=tiny_tokenizer.MODEL, messages=HELLO, n=3) as stream:
            answer = stream.get_final_completion()
        played.result(20)
    told = [(choice.message.content, choice.finish_reason) for choice in answer.choices]
    assert told == [("An", "stop"), ("", "stop"), ("Cat", "stop")]


def test_a_client_may_stop_listening_before_the_end(chat: ChatBroker) -> None:
    with chat.openai().chat.completions.create(model=tiny_tokenizer.MODEL, messages=HELLO, stream=True) as stream:
        job = chat.worker.take()
        chat.worker.say(job, "Hel")
        assert [next(stream).choices[0].delta.content for _ in range(2)] == ["", "Hel"]
    assert chat.worker.hear_stop(job).reason == "cancelled"
    with chat.live.context.database.autocommit() as tx:
        row = tx.execute("SELECT result, tokens, finish_reason FROM jobs WHERE id = %(id)s", {"id": job.id}).one()
    assert tuple(row) == ("Hel", 3, "cancelled")


@pytest.mark.parametrize("prompt", [[72, 101], [[72, 101]], ["He"], "He"])
def test_a_prompt_may_be_token_ids(chat: ChatBroker, prompt: Any) -> None:
    pieces = chat.openai().completions.create(model=tiny_tokenizer.MODEL, prompt=prompt, stream=True)
    job = chat.worker.take()
    assert job.payload["prompt_token_ids"] == [72, 101]
    chat.worker.say(job, "llo")
    chat.worker.finish(job)
    assert [piece.choices[0].text for piece in pieces] == ["llo", ""]


def test_the_models_are_those_that_can_be_asked(chat: ChatBroker) -> None:
    listed: Any = chat.openai().models.list().to_dict()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model == {
        "id": tiny_tokenizer.MODEL,
        "object": "model",
        "created": model["created"],
        "owned_by": "horde",
        "context_length": tiny_tokenizer.CONTEXT_LENGTH,
    }
    assert chat.openai().models.retrieve(tiny_tokenizer.MODEL).to_dict() == model
    with pytest.raises(openai.NotFoundError) as missing:
        chat.openai().models.retrieve("none")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_each_refusal_is_an_exception_of_its_own(chat: ChatBroker) -> None:
    client, poor = chat.openai(), chat.openai(key=ANONYMOUS)
    refusals: list[tuple[type[openai.APIStatusError], str, str | None, OpenAI, dict[str, Any]]] = [
        (openai.BadRequestError, "invalid_request", "messages", client, {"messages": []}),
        (openai.BadRequestError, "invalid_request", "temperature", client, {"temperature": 2.5}),
        (openai.BadRequestError, "invalid_request", "stop", client, {"stop": [""]}),
        (openai.BadRequestError, "unsupported_parameter", "tools", client, {"tools": [{"type": "function"}]}),
        (openai.BadRequestError, "context_length_exceeded", "max_tokens", client, {"max_tokens": 4096}),
        (openai.AuthenticationError, "invalid_api_key", None, chat.openai(key="nobody's"), {}),
        (openai.PermissionDeniedError, "insufficient_kudos", "max_tokens", poor, {"max_tokens": 2000}),
        (openai.NotFoundError, "model_not_found", "model", client, {"model": "none"}),
        (openai.UnprocessableEntityError, "idempotency_conflict", None, client, {"user": "b", "n": 3}),
    ]
    # What the last one is in conflict with.
    key = {"Idempotency-Key": "one"}
    stream = chat.open(PROMPT, headers=key)
    for kind, code, param, by, fields in refusals:
        for streamed in (True, False):
            with pytest.raises(kind) as refused:
                by.chat.completions.create(
                    extra_headers=key if kind is openai.UnprocessableEntityError else None,
                    **{"model": tiny_tokenizer.MODEL, "messages": HELLO, "stream": streamed, **fields},
                )
            assert (refused.value.code, refused.value.param) == (code, param), refused.value
            assert type(refused.value) is kind
    job = chat.worker.take()
    chat.worker.finish(job)
    assert chat.read(stream).done
