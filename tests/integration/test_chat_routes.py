"""Chats that are polled: asked for, looked at and cancelled as AI Horde's clients do it, over HTTP, with a worker on the other side."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from horde.api.horde_v2.chat_answers import AcceptedChatAnswer, ChatStatusAnswer
from tests.support import tiny_tokenizer
from tests.support.chat import ChatBroker, chat_broker
from tests.support.live_broker import ANONYMOUS
from tests.support.tiny_tokenizer import CONTEXT_LENGTH, MODEL, MODEL_REVISION

HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = tiny_tokenizer.render(HELLO)
PROMPT_TOKENS = len(tiny_tokenizer.encode(PROMPT))


@pytest.fixture
def chat(database_url: str) -> Iterator[ChatBroker]:
    with chat_broker(database_url) as broker:
        yield broker
        assert broker.live.unexpected_errors() == 0


def ask(
    chat: ChatBroker,
    *,
    key: str | None = None,
    headers: dict[str, str] | None = None,
    max_tokens: int | None = 64,
    params: dict[str, Any] | None = None,
    **body: Any,
) -> requests.Response:
    """`POST generate/chat/async`; a field given as `...` is left out."""
    asked = {"messages": HELLO, "model": MODEL, "params": {"max_tokens": max_tokens, **(params or {})}, **body}
    if max_tokens is None:
        del asked["params"]["max_tokens"]
    asked = {name: value for name, value in asked.items() if value is not ...}
    return chat.live.call(
        "POST", "generate/chat/async", key=key or chat.client.api_key, json=asked, headers=headers or {}
    )


def request(chat: ChatBroker, **fields: Any) -> str:
    """The id of a fresh chat."""
    answer = ask(chat, **fields)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def status(chat: ChatBroker, request_id: str) -> dict[str, Any]:
    """The status, which has to be as described."""
    found = chat.chat_status(request_id)
    ChatStatusAnswer.model_validate(found)
    return found


def cancel(chat: ChatBroker, request_id: str) -> dict[str, Any]:
    answer = chat.live.call("DELETE", f"generate/chat/status/{request_id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    ChatStatusAnswer.model_validate(found)
    return found


def requests_in_all(chat: ChatBroker) -> int:
    """Requests that were ever enqueued."""
    with chat.live.context.database.autocommit() as tx:
        return int(tx.execute("SELECT count(*) FROM requests").scalar_one())


def test_a_chat_goes_from_the_client_to_the_worker_and_back(chat: ChatBroker) -> None:
    asked = ask(chat)
    assert asked.status_code == 202
    AcceptedChatAnswer.model_validate(asked.json())
    assert set(asked.json()) == {"id", "kudos", "prompt_tokens"}
    assert asked.json()["prompt_tokens"] == PROMPT_TOKENS
    request_id = asked.json()["id"]

    waiting = status(chat, request_id)
    assert (waiting["waiting"], waiting["processing"], waiting["done"], waiting["generations"]) == (1, 0, False, [])

    job = chat.worker.take(wait=0)
    assert job.payload["messages"] == HELLO
    assert job.payload["prompt"] == PROMPT
    assert job.payload["prompt_token_ids"] == tiny_tokenizer.encode(PROMPT)
    assert job.payload["max_new_tokens"] == 64
    assert not job.attached
    assert status(chat, request_id)["processing"] == 1

    job.say("Good day, ça va?")
    assert chat.worker.finish(job) > 0
    done = status(chat, request_id)
    assert (done["done"], done["finished"], done["waiting"], done["prompt_tokens"]) == (True, 1, 0, PROMPT_TOKENS)
    assert done["kudos"] > 0
    (generation,) = done["generations"]
    worker_id = generation.pop("worker_id")
    assert uuid.UUID(worker_id)
    tokens = len(job.token_ids)
    assert generation == {
        "worker_name": "played worker",
        "model": MODEL,
        "state": "ok",
        "message": {"role": "assistant", "content": "Good day, ça va?"},
        "text": "Good day, ça va?",
        "seed": job.seed,
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": PROMPT_TOKENS,
            "completion_tokens": tokens,
            "total_tokens": PROMPT_TOKENS + tokens,
            "cached_tokens": 0,
        },
        "logprobs": None,
    }


def test_the_status_holds_the_fields_of_a_texts_and_two_more(chat: ChatBroker) -> None:
    text = chat.live.status(chat.live.request())
    found = status(chat, request(chat))
    assert set(found) == {*text, "prompt_tokens"}
    assert "message" not in found


def test_each_of_n_answers_has_its_slot_and_seed(chat: ChatBroker) -> None:
    request_id = request(chat, params={"n": 3, "seed": 7})
    jobs = chat.worker.pop(slots=3)
    assert [job.slot for job in jobs] == [0, 1, 2]
    assert jobs[0].seed == 7
    assert len({job.seed for job in jobs}) == 3
    for job in jobs:
        job.say(f"answer {job.slot}")
        chat.worker.finish(job, "length")
    done = status(chat, request_id)
    assert [generation["text"] for generation in done["generations"]] == ["answer 0", "answer 1", "answer 2"]
    assert {generation["finish_reason"] for generation in done["generations"]} == {"length"}
    again = request(chat, params={"n": 3, "seed": 7})
    assert [job.seed for job in chat.worker.pop(slots=3)] == [job.seed for job in jobs]
    assert status(chat, again)["processing"] == 3


def test_exactly_the_parameters_that_were_given_reach_the_worker(chat: ChatBroker) -> None:
    sampling = {
        "temperature": 4.5, "top_p": 0.5, "top_k": 40, "min_p": 0.1, "frequency_penalty": -2, "presence_penalty": 2,
        "repetition_penalty": 1.1, "logit_bias": {"65": -100, "66": 0.5},
    }  # fmt: skip
    request(chat, params={**sampling, "stop": ["\nUser:", "END"], "genkey": "x", "soft_prompt": "y"})
    payload = chat.worker.take(wait=0).payload
    assert payload["sampling"] == sampling
    assert payload["stop"] == ["\nUser:", "END"]
    assert (payload["tools"], payload["response_format"], payload["logprobs"]) == (None, None, None)
    request(chat, params={"stop": "\n", "logit_bias": {}})
    payload = chat.worker.take(wait=0).payload
    assert (payload["sampling"], payload["stop"]) == ({}, ["\n"])


def test_without_max_tokens_there_is_room_for_what_fits(chat: ChatBroker) -> None:
    request(chat, max_tokens=None)
    assert chat.worker.take(wait=0).max_new_tokens == 1024
    words = [{"role": "user", "content": "x" * (CONTEXT_LENGTH - PROMPT_TOKENS - 100)}]
    asked = ask(chat, messages=words, max_tokens=None)
    assert chat.worker.take(wait=0).max_new_tokens == CONTEXT_LENGTH - asked.json()["prompt_tokens"]


def test_log_probabilities_are_shown_with_the_tokens_they_are_of(chat: ChatBroker) -> None:
    request_id = request(chat, params={"logprobs": True, "top_logprobs": 2})
    job = chat.worker.take(wait=0)
    assert job.payload["logprobs"] == 2
    job.say("hi")
    h, i = b"hi"
    chat.worker.finish(job, logprobs=[[h, -0.5, [[h, -0.5], [i, -1.5]]], [i, -0.25, [[i, -0.25], [h, -2.0]]]])
    (generation,) = status(chat, request_id)["generations"]
    first, second = generation["logprobs"]["content"]
    assert first == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [h],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [h]},
            {"token": "i", "logprob": -1.5, "bytes": [i]},
        ],
    }
    assert (second["token"], second["logprob"]) == ("i", -0.25)


def test_messages_are_read_as_a_template_takes_them(chat: ChatBroker) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "", "name": "Ann"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b", "cache_control": {"type": "ephemeral"}},
    ]
    request(chat, messages=messages)
    assert chat.worker.take(wait=0).payload["messages"] == [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "", "name": "Ann"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": ...}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [None]}, "messages.0"),
    ({"messages": ..., "model": ...}, "messages"),
    ({"model": ...}, "model"),
    ({"model": None}, "model"),
    ({"model": ""}, "model"),
    ({"models": ["other"]}, "models"),
    ({"model": ..., "models": []}, "models"),
    ({"model": ..., "models": ["m", 3]}, "models.1"),
    ({"model_revision": ""}, "model_revision"),
    ({"deadline_seconds": 0.5}, "deadline_seconds"),
    ({"deadline_seconds": 86401}, "deadline_seconds"),
    ({"workers": ["none"]}, "workers.0"),
    ({"trusted_workers": "yes"}, "trusted_workers"),
    ({"params": {"top_logprobs": 2}}, "params.top_logprobs"),
    ({"params": {"logprobs": 2}}, "params.logprobs"),
    ({"params": {"top_logprobs": 21, "logprobs": True}}, "params.top_logprobs"),
    *(({"max_tokens": value}, "params.max_tokens") for value in (0, -1, "5", 5.5, True, 2**31)),
    *(({"params": {"n": value}}, "params.n") for value in (0, 17, "1", None)),
    *(({"params": {"temperature": value}}, "params.temperature") for value in (-0.1, 5.01, "1", None)),
    *(({"params": {"top_p": value}}, "params.top_p") for value in (0, 1.01)),
    *(({"params": {"stop": value}}, "params.stop") for value in ("", [""], ["x"] * 17, ["x" * 257], [1], {}, None)),
    *(({"params": {"logit_bias": value}}, "params.logit_bias") for value in ({"x": 1}, {"1": 101}, {"1": True}, [])),
    *(({"params": {"seed": value}}, "params.seed") for value in (2**63, 1.5, "1")),
    *(({"params": {"repetition_penalty": value}}, "params.repetition_penalty") for value in (0, 10.1)),
    ({"params": {"logit_bias": {"100000": 1}}}, "params.logit_bias"),
    ({"max_tokens": 2049}, "params.max_tokens"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"webhook": "http://localhost"}, "webhook"),
]  # fmt: skip


def test_what_cannot_be_taken_is_refused_by_name_and_nothing_is_queued(chat: ChatBroker) -> None:
    for body, field in REFUSED:
        answer = ask(chat, **body)
        assert answer.status_code == 400, body
        assert list(answer.json()["errors"]) == [field], body
        assert answer.json()["message"]
    assert requests_in_all(chat) == 0


def test_fields_that_ask_for_nothing_are_let_be(chat: ChatBroker) -> None:
    answer = ask(chat, tools=[], tool_choice="none", response_format={"type": "text"}, stream=True, nonsense={"a": 1})
    assert answer.status_code == 202, answer.text
    assert ask(chat, max_tokens=5.0).status_code == 202


def test_who_may_ask_and_for_what(chat: ChatBroker) -> None:
    no_key = chat.live.call("POST", "generate/chat/async", json={"messages": HELLO, "model": MODEL})
    assert (no_key.status_code, list(no_key.json()["errors"])) == (400, ["apikey"])
    unknown = ask(chat, key="nobody's")
    assert (unknown.status_code, unknown.json()["rc"]) == (401, "InvalidAPIKey")
    no_model = ask(chat, model="no/such")
    assert (no_model.status_code, no_model.json()["rc"]) == (404, "ModelNotFound")
    no_worker = ask(chat, workers=[str(uuid.uuid4())])
    assert no_worker.status_code == 404
    other_revision = ask(chat, model_revision="another")
    assert (other_revision.status_code, other_revision.json()["rc"]) == (503, "NoCapacity")
    assert int(other_revision.headers["Retry-After"]) >= 1
    too_long = ask(chat, messages=[{"role": "user", "content": "x" * CONTEXT_LENGTH}])
    assert (too_long.status_code, too_long.json()["rc"]) == (400, "TokenOverflow")
    assert str(CONTEXT_LENGTH) in too_long.json()["message"]
    assert requests_in_all(chat) == 0
    assert ask(chat, key=ANONYMOUS, max_tokens=16).status_code == 202
    assert ask(chat, model_revision=MODEL_REVISION).status_code == 202
    assert ask(chat, model=..., models=["no/such", MODEL, MODEL]).status_code == 202


def test_a_dry_run_says_what_it_would_cost_and_queues_nothing(chat: ChatBroker) -> None:
    answer = ask(chat, dry_run=True)
    assert answer.status_code == 200
    AcceptedChatAnswer.model_validate(answer.json())
    assert set(answer.json()) == {"kudos", "prompt_tokens"}
    assert answer.json()["kudos"] == ask(chat).json()["kudos"] > 0
    assert requests_in_all(chat) == 1


def test_a_repeat_with_the_same_key_is_the_same_chat(chat: ChatBroker) -> None:
    key = {"Idempotency-Key": "once"}
    first = ask(chat, headers=key)
    assert first.status_code == 202
    repeat = ask(chat, headers=key)
    assert (repeat.status_code, repeat.json()) == (202, first.json())
    other = ask(chat, headers=key, max_tokens=65)
    assert (other.status_code, bool(other.json()["message"])) == (422, True)
    assert requests_in_all(chat) == 1
    # The key of a text is another one.
    assert chat.live.ask(key=chat.client.api_key, headers=key).status_code == 202
    bad = ask(chat, headers={"Idempotency-Key": "x" * 256})
    assert (bad.status_code, list(bad.json()["errors"])) == (400, ["Idempotency-Key"])


def test_a_cancelled_chat_reaches_no_worker(chat: ChatBroker) -> None:
    request_id = request(chat, params={"n": 2})
    cancelled = cancel(chat, request_id)
    assert (cancelled["cancelled"], cancelled["done"], cancelled["waiting"]) == (True, True, 0)
    assert cancel(chat, request_id) == cancelled
    assert chat.worker.pop() == []


def test_what_runs_when_a_chat_is_cancelled_is_finished_and_shown(chat: ChatBroker) -> None:
    request_id = request(chat, params={"n": 2})
    job = chat.worker.take(wait=0)
    cancelled = cancel(chat, request_id)
    assert (cancelled["cancelled"], cancelled["done"], cancelled["processing"]) == (True, False, 1)
    job.say("late")
    assert chat.worker.finish(job) > 0
    done = status(chat, request_id)
    assert (done["done"], [generation["text"] for generation in done["generations"]]) == (True, ["late"])


def test_two_faults_end_a_chat(chat: ChatBroker) -> None:
    request_id = request(chat)
    chat.worker.fault(chat.worker.take(wait=0))
    assert status(chat, request_id)["restarted"] == 1
    chat.worker.fault(chat.worker.take(wait=0))
    found = status(chat, request_id)
    assert (found["faulted"], found["done"], found["generations"]) == (True, True, [])


def test_a_censored_answer_says_so(chat: ChatBroker) -> None:
    request_id = request(chat)
    job = chat.worker.take(wait=0)
    assert chat.worker.submit(job, state="censored", generation="", finish_reason="stop").status == 200
    (generation,) = status(chat, request_id)["generations"]
    assert (generation["state"], generation["finish_reason"], generation["text"]) == ("censored", "content_filter", "")


def test_an_id_belongs_to_its_kind(chat: ChatBroker) -> None:
    for method in ("GET", "DELETE"):
        for request_id in (chat.live.request(), str(uuid.uuid4()), "x", "1" * 36):
            answer = chat.live.call(method, f"generate/chat/status/{request_id}")
            assert (answer.status_code, answer.json()["rc"]) == (404, "RequestNotFound")
        answer = chat.live.call(method, f"generate/text/status/{request(chat)}")
        assert (answer.status_code, answer.json()["rc"]) == (404, "RequestNotFound")


def test_a_chat_on_an_open_connection_can_be_looked_at_and_cancelled_here(chat: ChatBroker) -> None:
    with chat.open() as stream:
        job = chat.worker.take()
        chat.worker.say(job, "half of")
        request_id = stream.headers["x-horde-request-id"]
        assert status(chat, request_id)["processing"] == 1
        cancelled = cancel(chat, request_id)
        assert (cancelled["done"], cancelled["cancelled"]) == (True, True)
        (generation,) = cancelled["generations"]
        assert (generation["text"], generation["finish_reason"]) == ("half of", "cancelled")
        assert generation["usage"]["completion_tokens"] == len("half of")
        told = chat.read(stream)
        assert told.error is not None
        assert told.error["code"] == "cancelled"
    assert chat.worker.hear_stop(job).reason == "cancelled"


def test_without_its_tokenizer_a_prompt_is_estimated_and_the_worker_decides(database_url: str) -> None:
    with chat_broker(database_url, uploaded=False) as chat:
        asked = ask(chat)
        assert asked.status_code == 202
        assert asked.json()["estimated"] is True
        assert asked.json()["message"]
        job = chat.worker.take(wait=0)
        assert (job.payload["prompt"], job.payload["prompt_token_ids"]) == (None, None)
        chat.worker.reject(job, "context_length_exceeded")
        found = status(chat, asked.json()["id"])
        assert (found["error_code"], found["faulted"], found["done"]) == ("context_length_exceeded", True, True)
        assert found["estimated"] is True
        refused = ask(chat, params={"logprobs": True})
        assert (refused.status_code, list(refused.json()["errors"])) == (400, ["params.logprobs"])


def test_chats_are_limited_as_texts_are(database_url: str) -> None:
    with chat_broker(database_url, rate_limits="on") as chat:
        answers = [ask(chat) for _ in range(12)]
        assert {answer.status_code for answer in answers} == {202, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["Retry-After"]) >= 1
        assert refused.json()["message"]
        looks = [chat.live.call("GET", f"generate/chat/status/{uuid.uuid4()}") for _ in range(3)]
        assert {look.status_code for look in looks} == {404}
