"""Who gets in at `/v1` and who does not, over a live broker: refusals are told as OpenAI's clients read them, streamed or
not, and leave nothing in the queue.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support import tiny_tokenizer
from tests.support.chat import CHAT, COMPLETIONS, ChatBroker, chat_broker, order, upload_tokenizer
from tests.support.live_broker import ANONYMOUS
from tests.support.sse import Stream

CONTEXT = tiny_tokenizer.CONTEXT_LENGTH
# What the template adds to one message of a user.
AROUND = len(tiny_tokenizer.encode(tiny_tokenizer.render([{"role": "user", "content": ""}])))


@pytest.fixture
def chat(database_url: str) -> Iterator[ChatBroker]:
    with chat_broker(database_url) as broker:
        yield broker


def asked(stream: Stream) -> dict[str, Any]:
    """The JSON of an answer that is no stream."""
    text = stream.text()
    assert stream.headers["content-type"] == "application/json; charset=utf-8", text
    found: dict[str, Any] = json.loads(text)
    return found


def refusal(chat: ChatBroker, content: Any = "Hello", **body: Any) -> tuple[int | None, dict[str, Any]]:
    """Status and error of an order that is refused, the same whether streamed or not."""
    told = []
    for stream in (True, False):
        answer = chat.open(content, await_head=False, **{"stream": stream, **body})
        told.append((asked(answer)["error"], answer.status))
    assert told[0] == told[1]
    return told[0][1], told[0][0]


def queued(chat: ChatBroker) -> int:
    """Requests that were ever enqueued."""
    with chat.live.context.database.autocommit() as tx:
        return int(tx.execute("SELECT count(*) FROM requests").scalar_one())


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_key_is_a_401(chat: ChatBroker, path: str) -> None:
    status, error = refusal(chat, path=path, key="nobody's")
    assert (status, error["code"], error["type"]) == (401, "invalid_api_key", "invalid_request_error")
    assert queued(chat) == 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_model_that_was_never_announced_is_a_404(chat: ChatBroker, path: str) -> None:
    status, error = refusal(chat, path=path, model="no/such")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert queued(chat) == 0


def test_a_model_that_nobody_serves_now_is_a_503_that_says_when_to_come_back(chat: ChatBroker) -> None:
    with chat.live.context.database.transaction() as tx:
        tx.execute("UPDATE workers SET last_check_in = horde_now() - interval '1 hour'")
    answer = chat.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")
    assert int(answer.headers["Retry-After"]) >= 1
    assert "x-should-retry" not in answer.headers
    assert queued(chat) == 0


MALFORMED: list[dict[str, Any]] = [
    {},
    {"model": tiny_tokenizer.MODEL},
    *(order() | {"messages": bad} for bad in (None, 3, [], [None], ["hi"], [{"role": "user"}])),
    order() | {"model": None},
    order(stop=""),
    order(max_tokens=0),
    order(n=17),
    order(temperature=2.01),
    order(tools=[{"type": "function", "function": {"name": "f"}}]),
    order(response_format={"type": "json_object"}),
    order([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    order([{"role": "tool", "content": "4", "tool_call_id": "1"}]),
    order("Once", path=COMPLETIONS),
]


def test_what_is_malformed_never_reaches_the_queue(chat: ChatBroker) -> None:
    headers = {"Authorization": f"Bearer {chat.client.api_key}"}
    for body in MALFORMED:
        answer = chat.live.session.post(f"{chat.live.url}{CHAT}", json=body, headers=headers, timeout=30)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["param"]
    assert queued(chat) == 0
    assert chat.unfinished() == {}
    assert chat.live.unexpected_errors() == 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [(CONTEXT, 1), (CONTEXT + 1, 1), (CONTEXT, None), (AROUND, CONTEXT)])
def test_what_does_not_fit_the_context_is_a_400_with_both_numbers(
    chat: ChatBroker, prompt: int, max_tokens: int | None
) -> None:
    status, error = refusal(chat, "x" * (prompt - AROUND), max_tokens=max_tokens)
    param = "max_tokens" if max_tokens is not None and prompt < CONTEXT else "messages"
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert str(CONTEXT) in error["message"]
    assert str(prompt) in error["message"]
    assert queued(chat) == 0


@pytest.mark.parametrize("max_tokens", [1, None])
def test_what_just_fits_the_context_is_taken_and_the_rest_is_clipped(chat: ChatBroker, max_tokens: int | None) -> None:
    stream = chat.open("x" * (CONTEXT - 1 - AROUND), max_tokens=max_tokens)
    job = chat.worker.take()
    assert (job.payload["prompt_tokens"], job.max_new_tokens) == (CONTEXT - 1, 1)
    chat.worker.finish(job, "length")
    assert chat.read(stream).finish_reason == "length"


def test_a_template_that_refuses_messages_is_a_400(database_url: str) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    body = tiny_tokenizer.upload(template)
    manifest = tiny_tokenizer.manifest(tokenizer_revision=tiny_tokenizer.revision_of(body))
    with chat_broker(database_url, worker={"manifest": manifest}) as chat:
        upload_tokenizer(chat.live, chat.owner.api_key, body)
        status, error = refusal(chat)
        assert (status, error["code"], error["param"]) == (400, "invalid_request", "messages")
        assert "roles must alternate" in error["message"]
        assert queued(chat) == 0


def test_token_ids_that_the_model_does_not_have_are_a_400(chat: ChatBroker) -> None:
    status, error = refusal(chat, [72, 300], path=COMPLETIONS)
    assert (status, error["code"], error["param"]) == (400, "invalid_request", "prompt")
    status, error = refusal(chat, logit_bias={"300": 1})
    assert (status, error["code"], error["param"]) == (400, "invalid_request", "logit_bias")


def test_the_sdk_knows_each_refusal_and_tries_none_again(chat: ChatBroker) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.AuthenticationError) as unknown:
        chat.openai(key="nobody's", max_retries=2).chat.completions.create(model="tiny", messages=hello)
    assert unknown.value.code == "invalid_api_key"
    client = chat.openai(max_retries=2)
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="no/such", messages=hello)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(
            model="tiny", messages=hello, tools=[{"type": "function", "function": {"name": "f"}}], stream=True
        )
    assert (unsupported.value.code, unsupported.value.param) == ("unsupported_parameter", "tools")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="tiny", messages=hello, max_tokens=CONTEXT)
    assert long.value.code == "context_length_exceeded"
    assert queued(chat) == 0


def test_a_key_is_one_request_however_often_it_is_sent_and_another_body_a_conflict(chat: ChatBroker) -> None:
    key = {"Idempotency-Key": "again"}
    first = chat.open(headers=key)
    second = chat.open(headers=key)
    whole = chat.open(headers=key, stream=False)
    other = chat.open("Hello!", headers=key, await_head=False)
    assert (asked(other)["error"]["code"], other.status) == ("idempotency_conflict", 422)
    job = chat.worker.take()
    chat.worker.say(job, "Hello")
    chat.worker.finish(job)
    told = [chat.read(stream) for stream in (first, second)]
    assert [transcript.text for transcript in told] == ["Hello", "Hello"]
    assert asked(whole)["choices"][0]["message"]["content"] == "Hello"
    late = chat.open(headers=key)
    assert chat.read(late).text == "Hello"
    ids = {stream.headers["x-horde-request-id"] for stream in (first, second, whole, late)}
    assert len(ids) == 1
    assert {chunk["id"] for transcript in told for chunk in transcript.chunks} == {f"chatcmpl-{ids.pop()}"}
    assert queued(chat) == 1


def test_a_key_of_chats_is_free_for_completions(chat: ChatBroker) -> None:
    key = {"Idempotency-Key": "again"}
    streams = [chat.open(headers=key), chat.open(headers=key, path=COMPLETIONS)]
    assert len({stream.headers["x-horde-request-id"] for stream in streams}) == 2


def test_the_anonymous_key_may_ask_for_one_token_with_a_stop(chat: ChatBroker) -> None:
    stream = chat.open(key=ANONYMOUS, max_tokens=1, stop="\n", stream=False)
    job = chat.worker.take()
    assert (job.payload["stop"], job.max_new_tokens) == (["\n"], 1)
    chat.worker.say(job, "x")
    chat.worker.finish(job, "length")
    body = asked(stream)
    assert body["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "message": {"role": "assistant", "content": "x", "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert body["usage"]["completion_tokens"] == 1
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + 1


def test_models_are_listed_and_found_by_name(database_url: str) -> None:
    with chat_broker(database_url, worker={"model": "an/odd/name"}) as chat:
        listed = chat.openai().models.list().data
        assert [(model.id, model.object, model.owned_by) for model in listed] == [("an/odd/name", "model", "horde")]
        # The SDK escapes the slashes of a name, other clients do not.
        assert chat.openai().models.retrieve("an/odd/name") == listed[0]
        headers = {"Authorization": f"Bearer {chat.client.api_key}"}
        plain = chat.live.session.get(f"{chat.live.url}/v1/models/an/odd/name", headers=headers, timeout=30)
        assert plain.json()["id"] == "an/odd/name"
        assert plain.json()["context_length"] == CONTEXT
        with pytest.raises(openai.NotFoundError) as missing:
            chat.openai().models.retrieve("no/such")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.AuthenticationError):
            chat.openai(key="nobody's").models.list()
        with pytest.raises(openai.AuthenticationError):
            chat.openai(key="nobody's").models.retrieve("an/odd/name")
