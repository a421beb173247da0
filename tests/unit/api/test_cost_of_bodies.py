"""A body is checked before its key, so no body may cost much, whatever is in it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from apiflask import APIFlask

from horde.api.horde_v2.chat_work_bodies import ChatPop, ChatSubmit
from horde.api.horde_v2.text_bodies import TextPop, TextRequest, TextSubmit
from horde.api.horde_v2.workers import WorkerChange
from horde.api.strict_json import MOST_CONTAINERS, MOST_ERRORS, BodyError, read_repaired, read_strict
from horde.api.validation import MAX_BODY_BYTES, Body

LONGEST_REFUSAL = 16 << 10
ASK, POP, SUBMIT = "text/async", "text/pop", "text/submit"
CHAT_ASK, CHAT_POP, CHAT_SUBMIT = "chat/async", "chat/pop", "chat/submit"
BODIES: list[type[Body]] = [TextRequest, TextPop, TextSubmit, ChatPop, ChatSubmit, WorkerChange]


def filled(before: bytes, item: bytes, after: bytes) -> bytes:
    """A body of the largest size that is read, with as many items as fit."""
    return before + item * ((MAX_BODY_BYTES - len(before) - len(after)) // len(item)) + after


LOGPROBS = b"[1,-0.1234567," + str([[1, -0.1234567]] * 20).replace(" ", "").encode() + b"]"
COSTLY = {
    "empty stops": (ASK, filled(b'{"prompt":"x","params":{"stop_sequence":[', b'"",', b'""]}}')),
    "empty workers": (ASK, filled(b'{"prompt":"x","workers":[', b'"",', b'""]}')),
    "wrong models": (ASK, filled(b'{"prompt":"x","models":[', b"1,", b"1]}")),
    "models of a worker": (POP, filled(b'{"name":"x","models":[', b'"",', b'""]}')),
    "wrong friends": (POP, filled(b'{"name":"x","models":["m"],"priority_usernames":[', b"1,", b"1]}")),
    "negative tokens": (SUBMIT, filled(b'{"id":"x","generation":"","token_ids":[', b"-1,", b"-1]}")),
    "good tokens": (SUBMIT, filled(b'{"id":"x","generation":"","token_ids":[', b"1,", b"1]}")),
    "numbers as messages": (CHAT_ASK, filled(b'{"model":"m","messages":[', b"1,", b"1]}")),
    "numbers as parts": (CHAT_ASK, filled(b'{"messages":[{"role":"user","content":[', b"1,", b"1]}]}")),
    "many parts and a wrong one": (
        CHAT_ASK,
        b'{"messages":[{"role":"user","content":[' + b'{"type":"text","text":""},' * 9000 + b"1]}]}",
    ),
    "wrong stops": (
        CHAT_ASK,
        filled(b'{"messages":[{"role":"user","content":""}],"params":{"stop":[', b'"",', b'""]}}'),
    ),
    "numbers as biases": (
        CHAT_ASK,
        b'{"messages":[{"role":"user","content":""}],"params":{"logit_bias":{'
        + b",".join(b'"%d":1' % number for number in range(90_000))
        + b"}}}",
    ),
    "numbers as models": (CHAT_ASK, filled(b'{"messages":[{"role":"user","content":""}],"models":[', b"1,", b"1]}")),
    "numbers as manifests": (
        CHAT_POP,
        b'{"name":"x","models":["m"],"manifests":{' + b",".join(b'"%d":1' % number for number in range(90_000)) + b"}}",
    ),
    "negative tokens of a chat": (CHAT_SUBMIT, filled(b'{"id":"x","generation":"","token_ids":[', b"-1,", b"-1]}")),
    "good tokens of a chat": (CHAT_SUBMIT, filled(b'{"id":"x","generation":"","token_ids":[', b"1,", b"1]}")),
    "numbers as logprobs": (CHAT_SUBMIT, filled(b'{"id":"x","generation":"","logprobs":[', b"1,", b"1]}")),
    "short logprobs": (CHAT_SUBMIT, filled(b'{"id":"x","generation":"","logprobs":[', b"[100000000],", b"[1]]}")),
    "good logprobs": (
        CHAT_SUBMIT,
        filled(b'{"id":"x","generation":"","logprobs":[', LOGPROBS + b",", LOGPROBS + b"]}"),
    ),
    "empty notes": (SUBMIT, filled(b'{"id":"x","generation":"","gen_metadata":[', b"{},", b"{}]}")),
    "NaN": (ASK, filled(b'{"prompt":"x","z":[', b"NaN,", b"1]}")),
    "NaN from a worker": (SUBMIT, filled(b'{"id":"x","z":[', b"NaN,", b"1]}")),
    "one NaN at the end": (ASK, filled(b'{"prompt":"x","z":[', b'"",', b"NaN]}")),
    "too large numbers": (ASK, filled(b'{"prompt":"x","z":[', b"1e999,", b"1]}")),
    "NUL everywhere": (ASK, filled(b'{"prompt":"x","z":[', rb'"\u0000",', b"1]}")),
    "NUL at the end": (ASK, filled(b'{"prompt":"x","z":[', b'"",', rb'"\u0000"]}')),
    "keys with NUL": (ASK, filled(b'{"prompt":"x","z":{', rb'"\u0000":1,', b'"b":1}}')),
    "half pairs": (ASK, filled(b'{"prompt":"x","z":[', rb'"\ud800",', b"1]}")),
    "lists": (ASK, filled(b'{"prompt":"x","z":[', b"[],", b"[]]}")),
    "objects of a worker": (SUBMIT, filled(b'{"id":"x","z":[', b"{},", b"{}]}")),
    "brackets": (ASK, filled(b"", b"[", b"")),
    "brackets that close": (ASK, filled(b"[" * (MAX_BODY_BYTES // 2), b"]", b"")),
}
FILLER = filled(b'{"id":"x","prompt":"x","z":[', b'"[",', b'""]}')


@pytest.mark.parametrize("name", COSTLY)
def test_a_body_full_of_faults_gets_a_short_refusal(app: APIFlask, name: str) -> None:
    path, body = COSTLY[name]
    answer = app.test_client().post(f"/api/v2/generate/{path}", data=body, content_type="application/json")
    assert answer.status_code == 400
    assert len(answer.data) < LONGEST_REFUSAL
    assert len(answer.json.get("errors", {})) <= MOST_ERRORS


def test_no_fault_costs_many_times_what_reading_costs(app: APIFlask) -> None:
    """Processor time against that of a legal body with as many texts, refused for its missing key; generously."""

    def cost(path: str, body: bytes) -> float:
        began = time.thread_time()
        app.test_client().post(f"/api/v2/generate/{path}", data=body, content_type="application/json")
        return time.thread_time() - began

    legal = min(cost(ASK, FILLER) for _ in range(3))
    for name, (path, body) in COSTLY.items():
        assert min(cost(path, body) for _ in range(3)) < 8 * legal, name


def lists_in(schema: dict[str, Any]) -> list[str]:
    """The fields of a body that are lists, `params.` before those of the parameters."""
    found = []
    for name, field in schema.get("properties", {}).items():
        options = [field, *field.get("anyOf", [])]
        if any(option.get("type") == "array" for option in options):
            found.append(name)
    if "TextParams" in schema.get("$defs", {}):
        found += [f"params.{name}" for name in lists_in(schema["$defs"]["TextParams"])]
    return found


@pytest.mark.parametrize("model", BODIES)
def test_every_list_of_a_body_is_bounded_and_ends_at_its_first_fault(model: type[Body]) -> None:
    required: dict[str, Any] = {"prompt": "x", "name": "x", "id": "x", "generation": ""}
    for path in lists_in(model.model_json_schema()):
        for items in ([object()] * 100_000, [None] * 100_000):
            outer, _, inner = path.partition(".")
            body = {**required, outer: {inner: items} if inner else items}
            with pytest.raises(ValueError, match="1 validation error"):
                model.model_validate(body)


def test_a_body_may_have_many_parts_and_not_any_number() -> None:
    def body(count: int) -> bytes:
        return b'{"z": [' + b",".join([b"[]", b"{}"] * (count // 2)) + b"]}"

    assert len(read_strict(body(MOST_CONTAINERS - 2))["z"]) == MOST_CONTAINERS - 2
    for read in (read_strict, read_repaired):
        with pytest.raises(BodyError, match="more than"):
            read(body(MOST_CONTAINERS))


def test_a_worker_may_offer_more_models_than_count() -> None:
    offered = [f"model{number}" for number in range(1000)]
    assert TextPop.model_validate({"name": "x", "models": offered}).models == offered[:200]


def test_of_the_workers_named_the_first_five_count() -> None:
    named = [f"5b0c2f0a-0000-4000-8000-{number:012}" for number in range(9)]
    assert [str(worker) for worker in TextRequest.model_validate({"prompt": "x", "workers": named}).workers] == named[
        :5
    ]
