"""Orders at `/v1` that are refused before anything is sent or queued, whether streamed or not, and odd ones that are taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import tiny_tokenizer
from tests.support.chat import CHAT, COMPLETIONS, ChatBroker, order
from tests.support.sse import Stream

CONTEXT = tiny_tokenizer.CONTEXT_LENGTH
# What the template adds to one message of a user.
AROUND = len(
    tiny_tokenizer.render([{"role": "user", "content": ""}]).replace("<|im_start|>", "<").replace("<|im_end|>", ">")
)


def ever_queued(chat: ChatBroker) -> int:
    """Requests that were ever enqueued."""
    return int(chat.world.scalar("SELECT count(*) FROM requests"))


def refused(chat: ChatBroker, body: dict[str, Any], *, path: str = CHAT) -> tuple[int, dict[str, Any]]:
    """Status and error of an order, which are the same with and without a stream; nothing is queued and nothing streamed."""
    before = ever_queued(chat)
    told = []
    for streamed in (True, False):
        answer = chat._held.enter_context(
            Stream(chat.live.host, chat.live.port, path, {**body, "stream": streamed}, key=chat.client.api_key)
        )
        assert answer.headers["content-type"] == "application/json; charset=utf-8"
        error = json.loads(answer.text())["error"]
        # An SDK does not try these again by itself, so nothing has to keep it from it.
        assert (answer.headers.get("retry-after"), answer.headers.get("x-should-retry")) == (None, None)
        assert set(error) == {"message", "type", "param", "code"}
        told.append((answer.status, error))
    assert told[0] == told[1]
    assert ever_queued(chat) == before
    return told[0]


def parts(content: Any, role: Any = "user") -> dict[str, Any]:
    """An order of one message."""
    return order([{"role": role, "content": content}])


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    """A body that lacks a field."""
    return {key: value for key, value in body.items() if key != name}


TEXT = {"type": "text", "text": "a"}
MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("no messages", without(order(), "messages"), "messages"),
    *((f"messages {bad!r}", order() | {"messages": bad}, "messages") for bad in (None, 3, [], [None], ["hi"], {}, "hi", [[]])),
    ("2,001 messages", order([{"role": "user", "content": "x"}] * 2001), "messages"),
    ("messages and model", {"messages": [], "model": "none"}, "messages"),
    ("no model", without(order(), "model"), "model"),
    *((f"model {bad!r}", order(model=bad), "model") for bad in (None, 3, "", "x" * 256)),
    *((f"content {bad!r}", parts(bad), "messages") for bad in ([], [{"text": "x"}], ["x"], None, 5, {}, [TEXT, None])),
    *((f"text {bad!r}", parts([{"type": "text", "text": bad}]), "messages") for bad in (None, 5, ["x"])),
    *((f"role {bad!r}", parts("x", bad), "messages") for bad in ("Tool", "", None, 5, "User", ["user"])),
    *(
        (f"stop {str(bad)[:30]!r}", order(stop=bad), "stop")
        for bad in ("", [""], ["", ".\n"], [1], {}, 5, ["x"] * 17, ["x"] * 1000, "x" * 100_000, ["x" * 257], "\0", ["\0"], [["x"]])
    ),
    *((f"seed {bad!r}", order(seed=bad), "seed") for bad in (2**63, 2**64, -(2**64), 1.5, "1", True, [])),
    *((f"temperature {bad!r}", order(temperature=bad), "temperature") for bad in (2.01, -0.1, "1", True, [])),
    *((f"top_p {bad!r}", order(top_p=bad), "top_p") for bad in (0, 1.01, -1, "1")),
    *((f"top_k {bad!r}", order(top_k=bad), "top_k") for bad in (-1, 0.5, "1")),
    *((f"max_tokens {bad!r}", order(max_tokens=bad), "max_tokens") for bad in (0, -1, 1.5, "5", True, 2**31)),
    *((f"n {bad!r}", order(n=bad), "n") for bad in (0, 17, "2", 1.5)),
    *((f"logit_bias {bad!r}", order(logit_bias=bad), "logit_bias") for bad in ({"a": 1}, {"1": 101}, {"1": "1"}, {"300": 1}, [])),
    *((f"stream_options {bad!r}", order(stream_options=bad), "stream_options") for bad in (5, "x", [], {"include_usage": 1})),
    *((f"deadline {bad!r}", order(deadline_seconds=bad), "deadline_seconds") for bad in (0, 86_401, "1")),
    ("top_logprobs alone", order(top_logprobs=2), "top_logprobs"),
    ("21 top_logprobs", order(logprobs=True, top_logprobs=21), "top_logprobs"),
]  # fmt: skip
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("an image", parts([TEXT, {"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
    ("a sound", parts([{"type": "input_audio", "input_audio": {}}]), "messages"),
    ("a result of a tool", order([{"role": "tool", "content": "4", "tool_call_id": "1"}]), "messages"),
    ("tools", order(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
    ("a choice of tools", order(tool_choice="auto"), "tool_choice"),
    ("an answer in JSON", order(response_format={"type": "json_object"}), "response_format"),
]
COMPLETION: list[tuple[str, Any]] = [
    ("no prompt", None), ("empty", ""), ("no texts", []), ("a number", 5), ("an object", {}), ("half a token", [1.5]),
    ("below all tokens", [-1]), ("beyond the model's", [300]), ("mixed", [1, "a"]),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), [pytest.param(*row, id=name) for name, *row in MALFORMED])
def test_a_malformed_order_is_a_400_that_names_the_field(chat: ChatBroker, body: dict[str, Any], param: str) -> None:
    status, error = refused(chat, body)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request")
    assert error["param"] == param


@pytest.mark.parametrize(("body", "param"), [pytest.param(*row, id=name) for name, *row in UNSUPPORTED])
def test_what_no_model_here_can_do_is_a_400_that_names_it(chat: ChatBroker, body: dict[str, Any], param: str) -> None:
    status, error = refused(chat, body)
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "unsupported_parameter")
    assert error["param"] == param


@pytest.mark.parametrize("prompt", [pytest.param(prompt, id=name) for name, prompt in COMPLETION])
def test_a_malformed_prompt_is_a_400_that_names_it(chat: ChatBroker, prompt: Any) -> None:
    status, error = refused(chat, order(prompt, path=COMPLETIONS), path=COMPLETIONS)
    assert (status, error["code"], error["param"]) == (400, "invalid_request", "prompt")


BAD_JSON = [
    *((f'{{"model": "tiny", "temperature": {number}}}', "temperature") for number in ("NaN", "1e999", "-Infinity")),
    *((text, None) for text in ("{", "", "\ud800", '"x"', "[]", "null")),
]


@pytest.mark.parametrize(("text", "param"), BAD_JSON)
def test_what_is_no_json_object_is_a_400(chat: ChatBroker, text: str, param: str | None) -> None:
    content = text.encode("utf-8", "surrogatepass")
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {chat.client.api_key}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    first, _, rest = chat.live.raw(head.encode() + content).partition(b"\r\n")
    assert first.startswith(b"HTTP/1.1 400 ")
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_request", param)


@pytest.mark.parametrize(("prompt", "max_tokens"), [
    (CONTEXT - 1, CONTEXT), (CONTEXT, 1), (CONTEXT, CONTEXT), (CONTEXT + 1, 1), (CONTEXT + 1, CONTEXT), (CONTEXT, None),
])  # fmt: skip
def test_what_does_not_fit_the_context_is_a_400_with_both_numbers(
    chat: ChatBroker, prompt: int, max_tokens: int | None
) -> None:
    status, error = refused(chat, order("x" * (prompt - AROUND), max_tokens=max_tokens))
    assert (status, error["type"]) == (400, "invalid_request_error")
    param = "max_tokens" if prompt < CONTEXT else "messages"
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert str(CONTEXT) in error["message"]
    assert str(prompt) in error["message"]


def test_two_thousand_messages_are_only_too_long(chat: ChatBroker) -> None:
    status, error = refused(chat, order([{"role": "user", "content": "x"}] * 2000))
    assert (status, error["code"]) == (400, "context_length_exceeded")


MESSAGES: list[tuple[str, list[dict[str, Any]], list[tuple[str, str]]]] = [
    ("system alone", [{"role": "system", "content": "x"}], [("system", "x")]),
    ("users in a row", [{"role": "user", "content": "x"}] * 2, [("user", "x")] * 2),
    ("assistant last", [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}], [("user", "x"), ("assistant", "")]),
    ("nothing said", [{"role": "user", "content": ""}], [("user", "")]),
    ("developer", [{"role": "developer", "content": "x"}], [("system", "x")]),
    *(
        (f"parts of {role}", [{"role": role, "content": [TEXT, {"type": "text", "text": "b"}]}], [(role, "a\nb")])
        for role in ("system", "user", "assistant")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "read"), [pytest.param(*row, id=name) for name, *row in MESSAGES])
def test_odd_messages_are_read_as_they_are_meant(
    chat: ChatBroker, messages: list[dict[str, Any]], read: list[tuple[str, str]]
) -> None:
    stream = chat.open(messages)
    job = chat.worker.take()
    told = [{"role": role, "content": content} for role, content in read]
    assert job.payload["messages"] == told
    assert job.payload["prompt"] == tiny_tokenizer.render(told)
    assert job.payload["prompt_token_ids"] == tiny_tokenizer.encode(tiny_tokenizer.render(told))
    chat.worker.finish(job)
    assert chat.read(stream).finished == {0: "stop"}


TAKEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stop": None}, {"stop": []}),
    ({"stop": []}, {"stop": []}),
    ({"stop": ["w", "x", "y", "z"]}, {"stop": ["w", "x", "y", "z"]}),
    ({"stop": ["x"] * 16}, {"stop": ["x"] * 16}),
    # It ends the prompt as well, which does not count.
    ({"stop": "assistant\n"}, {"stop": ["assistant\n"]}),
    ({"seed": 0}, {"seed": 0}),
    ({"seed": -1}, {"seed": -1}),
    ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
    ({"seed": 5.0}, {"seed": 5}),
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 1e-45}, {"temperature": 1e-45}),
    ({"temperature": -0.0}, {"temperature": 0}),
    ({"temperature": 2}, {"temperature": 2}),
    ({"top_p": 1e-4}, {"top_p": 1e-4}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"max_tokens": 1e1}, {"max_new_tokens": 10}),
    ({"max_tokens": 9, "max_completion_tokens": 8}, {"max_new_tokens": 8}),
    ({"user": "me", "store": True, "metadata": {}, "tools": [], "tool_choice": "none"}, {"tools": None}),
    ({"response_format": {"type": "text"}, "logit_bias": {}, "n": None}, {"response_format": None}),
]


@pytest.mark.parametrize(("asked", "told"), TAKEN, ids=str)
def test_what_is_odd_and_within_bounds_reaches_the_worker(
    chat: ChatBroker, asked: dict[str, Any], told: dict[str, Any]
) -> None:
    stream = chat.open(**asked)
    job = chat.worker.take()
    payload = {**job.payload, **job.payload["sampling"], "seed": job.seed}
    assert {name: payload[name] for name in told} == told
    chat.worker.say(job, "assistan")
    chat.worker.finish(job)
    assert chat.read(stream).text == "assistan"
