"""What `/v1` takes and refuses, and what it makes of it; whoever is let through here meets a database that is not there."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from apiflask import APIFlask

from horde.api.chat_messages import MOST_MESSAGES
from horde.api.openai_v1.bodies import ChatCompletionRequest, CompletionRequest
from horde.api.openai_v1.orders import chat_order, completion_order
from horde.api.openai_v1.unsupported import HARMLESS
from horde.api.validation import MAX_BODY_BYTES
from horde.usecases.chat import ChatOrder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
KEY = {"Authorization": "Bearer 0000000000"}
INT64 = 1 << 63


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": HELLO, **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Once", **fields}


def refusal(app: APIFlask, body: Any, path: str = CHAT) -> dict[str, Any]:
    """The error that a body is refused with, which is a 400."""
    answer = app.test_client().post(path, json=body, headers=KEY)
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def refused_param(app: APIFlask, body: Any, path: str = CHAT) -> tuple[str, str | None]:
    error = refusal(app, body, path)
    return error["code"], error["param"]


def is_let_through(app: APIFlask, body: Any, path: str = CHAT) -> bool:
    answer = app.test_client().post(path, json=body, headers=KEY)
    return answer.status_code == 503 and answer.json["error"]["code"] == "broker_unavailable"


def asked(app: APIFlask, **fields: Any) -> ChatOrder:
    """The order that a chat becomes."""
    with app.test_request_context(CHAT, method="POST", headers=fields.pop("headers", {})):
        return chat_order(ChatCompletionRequest.model_validate(chat(**fields)))


@pytest.mark.parametrize(
    "given",
    [{}, {"messages": None}, *({"messages": bad} for bad in ([], 3, "hi", {}, True, [None], ["hi"], [[]], [3]))],
)
def test_bad_messages_are_named_even_where_no_model_is(app: APIFlask, given: dict[str, Any]) -> None:
    assert refused_param(app, given) == ("invalid_request", "messages")
    assert refused_param(app, {"model": "no such model", **given}) == ("invalid_request", "messages")


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "system", "content": None},
        {"role": "user", "content": 5},
        {"role": "user", "content": {}},
        {"role": "user", "content": []},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [None]},
        {"role": "user", "content": [{"text": "x"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": None}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "poem", "text": "x"}]},
        {"role": "User", "content": "x"},
        {"role": "Tool", "content": "x"},
        {"role": "", "content": "x"},
        {"role": None, "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "user", "content": "x", "name": 5},
    ],
)
def test_a_malformed_message_is_refused_and_its_place_is_told(app: APIFlask, message: Any) -> None:
    error = refusal(app, chat(messages=[*HELLO, message]))
    assert (error["code"], error["param"]) == ("invalid_request", "messages")
    assert "messages.1" in error["message"]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "image_url"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "input_audio"}]}, "input_audio"),
        ({"role": "user", "content": [{"type": "file", "file": {}}]}, "file"),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "role"),
        ({"role": "function", "content": "4", "name": "f"}, "role"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "tool_calls"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_what_no_model_here_can_read_is_refused_by_name(app: APIFlask, message: Any, named: str) -> None:
    error = refusal(app, chat(messages=[message]))
    assert (error["code"], error["param"]) == ("unsupported_parameter", "messages")
    assert named in error["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "x"}],
        [{"role": "developer", "content": "x"}],
        [*HELLO, *HELLO],
        [*HELLO, {"role": "assistant", "content": "x"}],
        [*HELLO, {"role": "assistant", "content": None}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": "x", "name": "Ann"}],
        [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}],
        HELLO * MOST_MESSAGES,
    ],
)
def test_odd_but_sound_messages_are_let_through(app: APIFlask, messages: Any) -> None:
    assert is_let_through(app, chat(messages=messages))


def test_more_messages_than_any_chat_has_are_refused(app: APIFlask) -> None:
    assert refused_param(app, chat(messages=HELLO * (MOST_MESSAGES + 1))) == ("invalid_request", "messages")


def test_messages_reach_a_template_as_roles_and_text(app: APIFlask) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answered = {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": []}
    given = [{"role": "developer", "content": parts}, {"role": "user", "content": "c", "name": "Ann"}, answered]
    assert asked(app, messages=given).messages == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "c", "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize("model", [None, "", 5, [], "x" * 256])
def test_a_model_has_a_name(app: APIFlask, model: Any) -> None:
    assert refused_param(app, chat(model=model)) == ("invalid_request", "model")
    without = {"messages": HELLO}
    assert refused_param(app, without) == ("invalid_request", "model")


OUT_OF_BOUNDS: list[tuple[str, list[Any]]] = [
    ("max_tokens", [0, -1, 5.5, "5", True, 1 << 31, [5]]),
    ("max_completion_tokens", [0, -1, 5.5, "5", True]),
    ("temperature", [-0.1, 2.01, "1", True, [1]]),
    ("top_p", [0, -0.1, 1.01, "1", True]),
    ("top_k", [-1, 1.5, "1", True]),
    ("min_p", [-0.1, 1.1, "0"]),
    ("frequency_penalty", [-2.1, 2.1, "0"]),
    ("presence_penalty", [-2.1, 2.1, True]),
    ("repetition_penalty", [0, -1, 10.1, "1"]),
    ("seed", [INT64, -2 * INT64, 1 << 64, 1.5, "1", True]),
    ("n", [0, 17, -1, 1.5, "1", True]),
    ("stop", ["", [""], ["", ".\n"], [1], {}, 5, True, ["x"] * 17, "x" * 257, ["x" * 257], "\u0000", ["a\u0000"]]),
    (
        "logit_bias",
        [
            [],
            "x",
            {"x": 1},
            {"-1": 1},
            {"1.0": 1},
            {"01": 1},
            {"4294967296": 1},
            {"1": "1"},
            {"1": True},
            {"1": 101},
            {"1": -100.5},
            {"1": None},
            {str(token): 1 for token in range(1025)},
        ],
    ),
    ("stream", ["true", 1, []]),
    ("stream_options", [5, [], "x", {"include_usage": "yes"}]),
    ("deadline_seconds", [0, 86401, "60", True]),
    ("trusted_workers", ["yes", 1]),
    ("workers", ["x", ["x"], [5]]),
    ("model_revision", ["", 5, "x" * 129]),
]


@pytest.mark.parametrize(("field", "values"), OUT_OF_BOUNDS)
def test_a_value_out_of_bounds_is_a_400_that_names_its_field(app: APIFlask, field: str, values: list[Any]) -> None:
    for value in values:
        for path, body in ((CHAT, chat(**{field: value})), (COMPLETIONS, completion(**{field: value}))):
            error = refusal(app, body, path)
            assert (error["code"], error["param"]) == ("invalid_request", field), value
            assert field in error["message"]


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_number_in_json_is_refused(app: APIFlask, literal: str) -> None:
    data = f'{{"model":"m","messages":[{{"role":"user","content":"x"}}],"temperature":{literal}}}'
    answer = app.test_client().post(CHAT, data=data, content_type="application/json", headers=KEY)
    assert (answer.status_code, answer.json["error"]["param"]) == (400, "temperature")


WITHIN_BOUNDS: list[tuple[str, list[Any]]] = [
    ("max_tokens", [1, 5.0, 1e2, (1 << 31) - 1]),
    ("temperature", [0, -0.0, 1e-4, 1e-45, 2, 2.0]),
    ("top_p", [1e-4, 1, 0.5]),
    ("top_k", [0, 40]),
    ("min_p", [0, 1]),
    ("frequency_penalty", [-2, 2]),
    ("repetition_penalty", [0.1, 10]),
    ("seed", [0, -1, INT64 - 1, -INT64, 5.0]),
    ("n", [1, 16, 2.0]),
    ("stop", ["\n", "x" * 256, [], ["a"], ["a"] * 16, ["👩‍👩‍👧‍👦"]]),
    ("logit_bias", [{}, {"0": -100, "50256": 100.0, "7": 0.5}, {str(token): 1 for token in range(1024)}]),
    ("stream_options", [{}, {"include_usage": False}, {"include_usage": True, "continuous_usage_stats": True}]),
    ("deadline_seconds", [1, 86400, 0.5e2]),
    ("workers", [[], [str(uuid.uuid4())]]),
]


@pytest.mark.parametrize(("field", "values"), WITHIN_BOUNDS)
def test_a_value_within_bounds_is_let_through(app: APIFlask, field: str, values: list[Any]) -> None:
    for value in values:
        assert is_let_through(app, chat(**{field: value})), value
        assert is_let_through(app, completion(**{field: value}), COMPLETIONS), value


def test_null_is_as_good_as_absent(app: APIFlask) -> None:
    optional = {name: None for name in ChatCompletionRequest.model_fields if name not in {"model", "messages"}}
    others = dict.fromkeys(HARMLESS)
    assert is_let_through(app, chat(**optional, **others))
    assert asked(app, **optional, **others) == asked(app)
    of_completions = {name: None for name in CompletionRequest.model_fields if name not in {"model", "prompt"}}
    assert is_let_through(app, completion(**of_completions, **others), COMPLETIONS)


CHANGES_THE_ANSWER: list[tuple[str, Any]] = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "auto"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {}}),
    ("response_format", {"type": "text", "schema": {}}),
    ("response_format", 5),
    ("audio", {"voice": "x"}),
    ("modalities", ["text", "audio"]),
    ("modalities", ["audio"]),
    ("prediction", {"type": "content", "content": "x"}),
    ("web_search_options", {}),
    ("best_of", 2),
    ("best_of", True),
    ("suffix", "the end"),
    ("echo", True),
    ("reasoning_effort", "low"),
    ("guided_json", {}),
    ("min_tokens", 5),
    ("ignore_eos", True),
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", {"enable_thinking": False}),
    ("continue_final_message", True),
]


@pytest.mark.parametrize(("field", "value"), CHANGES_THE_ANSWER)
def test_what_would_change_the_answer_is_refused_and_not_ignored(app: APIFlask, field: str, value: Any) -> None:
    for path, body in ((CHAT, chat(**{field: value})), (COMPLETIONS, completion(**{field: value}))):
        error = refusal(app, body, path)
        assert (error["code"], error["param"]) == ("unsupported_parameter", field)
        assert field in error["message"]


def test_what_asks_for_nothing_is_let_through(app: APIFlask) -> None:
    harmless = {
        "store": True,
        "metadata": {"a": "b"},
        "user": "someone",
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "anything else": {"nested": [1]},
        "tools": [],
        "tool_choice": "none",
        "functions": [],
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "best_of": 1,
        "suffix": "",
        "echo": False,
    }
    assert is_let_through(app, chat(**harmless))
    assert is_let_through(app, completion(**harmless), COMPLETIONS)


@pytest.mark.parametrize("logprobs", [1, "true", 0])
def test_logprobs_of_a_chat_are_asked_for_by_yes_or_no(app: APIFlask, logprobs: Any) -> None:
    assert refused_param(app, chat(logprobs=logprobs)) == ("invalid_request", "logprobs")


@pytest.mark.parametrize("fields", [{"top_logprobs": 21}, {"top_logprobs": -1}, {"top_logprobs": 1.5}])
def test_top_logprobs_have_bounds(app: APIFlask, fields: dict[str, Any]) -> None:
    assert refused_param(app, chat(logprobs=True, **fields)) == ("invalid_request", "top_logprobs")


def test_top_logprobs_need_logprobs(app: APIFlask) -> None:
    assert refused_param(app, chat(top_logprobs=5)) == ("invalid_request", "top_logprobs")
    assert refused_param(app, chat(logprobs=False, top_logprobs=5)) == ("invalid_request", "top_logprobs")
    assert is_let_through(app, chat(logprobs=False, top_logprobs=0))
    assert asked(app).logprobs is None
    assert asked(app, logprobs=False).logprobs is None
    assert asked(app, logprobs=True).logprobs == 0
    assert asked(app, logprobs=True, top_logprobs=20).logprobs == 20


@pytest.mark.parametrize("logprobs", [6, -1, True, 1.5, "1"])
def test_logprobs_of_completions_are_a_number_up_to_five(app: APIFlask, logprobs: Any) -> None:
    assert refused_param(app, completion(logprobs=logprobs), COMPLETIONS) == ("invalid_request", "logprobs")


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], 5, {}, True, [[]], [True], [1, "a"], [1, -1], [1.5], [1 << 31], [None]]
)
def test_a_prompt_is_one_text_or_token_ids(app: APIFlask, prompt: Any) -> None:
    assert refused_param(app, completion(prompt=prompt), COMPLETIONS) == ("invalid_request", "prompt")


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], ["a", [1]]])
def test_several_prompts_in_one_call_are_not_served(app: APIFlask, prompt: Any) -> None:
    assert refused_param(app, completion(prompt=prompt), COMPLETIONS) == ("unsupported_parameter", "prompt")


def test_a_completion_without_a_prompt_says_so(app: APIFlask) -> None:
    assert refused_param(app, {"model": "m"}, COMPLETIONS) == ("invalid_request", "prompt")


@pytest.mark.parametrize(
    ("given", "read"), [("a", "a"), (["a"], "a"), ([1, 2.0], [1, 2]), ([[1, 2]], [1, 2]), (" \n", " \n")]
)
def test_a_prompt_in_a_list_of_its_own_is_that_prompt(app: APIFlask, given: Any, read: Any) -> None:
    with app.test_request_context(COMPLETIONS, method="POST"):
        order = completion_order(CompletionRequest.model_validate(completion(prompt=given)))
    assert (order.prompt, order.messages, order.route) == (read, None, "v1/completions")


def test_an_order_says_what_the_body_did(app: APIFlask) -> None:
    worker = str(uuid.uuid4())
    order = asked(
        app,
        max_tokens=7.0,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"5": -100},
        seed=-1,
        stop="\n",
        n=2,
        deadline_seconds=60,
        model_revision="r1",
        trusted_workers=True,
        workers=[worker],
        headers={"Client-Agent": "test:1:x"},
    )
    assert (order.models, order.model_revision, order.n, order.max_tokens, order.seed) == (["m"], "r1", 2, 7, -1)
    assert order.sampling == {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100.0},
    }
    assert (order.stop, order.deadline_seconds, order.trusted_workers) == (["\n"], 60, True)
    assert ([str(found) for found in order.worker_ids], order.client_agent) == ([worker], "test:1:x")
    assert (order.route, order.dry_run, order.slow_workers) == ("v1/chat/completions", False, True)


def test_an_order_names_only_what_was_given(app: APIFlask) -> None:
    order = asked(app)
    assert (order.sampling, order.stop, order.seed, order.max_tokens, order.n) == ({}, [], None, None, 1)


def test_the_newer_name_of_max_tokens_counts(app: APIFlask) -> None:
    assert asked(app, max_tokens=5).max_tokens == 5
    assert asked(app, max_completion_tokens=6).max_tokens == 6
    assert asked(app, max_tokens=5, max_completion_tokens=6).max_tokens == 6


def hash_of(app: APIFlask, **fields: Any) -> str:
    return asked(app, headers={"Idempotency-Key": "k"}, **fields).body_hash


def test_a_repeat_may_be_sent_another_way_and_ask_for_nothing_else(app: APIFlask) -> None:
    plain = hash_of(app)
    assert plain
    for same in ({"stream": True, "stream_options": {"include_usage": True}}, {"user": "x"}, {"n": None}):
        assert hash_of(app, **same) == plain
    for other in ({"n": 2}, {"seed": 1}, {"temperature": 1}, {"stop": "x"}, {"model": "other"}, {"logprobs": True}):
        assert hash_of(app, **other) != plain
    assert hash_of(app, messages=[{"role": "user", "content": "Hello!"}]) != plain
    assert asked(app).body_hash == ""


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """A body of the largest size that is read, with as many items as fit."""
    return before + item * ((MAX_BODY_BYTES - len(before) - len(after)) // len(item)) + after


_SOUND = b'{"model":"m","prompt":"x","messages":[{"role":"user","content":"x"}],'
COSTLY = {
    "messages": filled(b'{"model":"m","messages":[', b"1,", b"1]}"),
    "parts": filled(b'{"model":"m","messages":[{"role":"user","content":[', b"1,", b"1]}]}"),
    "stops": filled(_SOUND + b'"stop":[', b'"",', b'""]}'),
    "workers": filled(_SOUND + b'"workers":[', b"1,", b"1]}"),
    "modalities": filled(_SOUND + b'"modalities":[', b"1,", b"1]}"),
    "prompts": filled(b'{"model":"m","prompt":[', b'"",', b'""]}'),
    "token ids": filled(b'{"model":"m","prompt":[', b"-1,", b"-1]}"),
    "biases": _SOUND + b'"logit_bias":{' + b",".join(b'"x%d":""' % number for number in range(80_000)) + b"}}",
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_body_full_of_faults_gets_a_short_refusal(app: APIFlask, name: str) -> None:
    for path in (CHAT, COMPLETIONS):
        answer = app.test_client().post(path, data=COSTLY[name], content_type="application/json", headers=KEY)
        assert answer.status_code == 400, answer.text
        assert len(answer.data) < 1000
