"""Chats from pop to submit: what the engine is asked for, what goes back, and what is handed back undone."""

from __future__ import annotations

import pytest

from tests.worker.played_broker import CHAT_POP, CHAT_SUBMIT, PATIENCE, POP, PROGRESS, SUBMIT, Answer, Fault
from tests.worker.started_worker import MANIFESTS
from worker.engine.interface import FinishReason


def test_a_worker_with_a_manifest_asks_for_chat_and_text_in_one_pop(broker, start):
    start(chat=True)
    broker.wait_until(lambda: bool(broker.pops()))
    [pop] = broker.pops()
    assert pop.path == CHAT_POP
    assert pop.body["kinds"] == ["text", "chat"]
    assert pop.body["progress"] is True
    assert pop.body["manifests"] == MANIFESTS
    assert MANIFESTS["m"] == {
        "model_revision": "model 1", "tokenizer_revision": "tokenizer 1", "context_length": 2048, "block_size": 16,
        "blocks": 128, "kv_bytes_per_token": 64, "capabilities": [],
    }  # fmt: skip


def test_each_kind_comes_back_by_its_own_route(broker, start):
    worker = start(chat=True, max_batch=2)
    broker.give_chat("c")
    broker.give("t")
    worker.engine.writes("c", "an answer")
    worker.engine.writes("t", "a text")
    broker.wait_until(lambda: len(broker.settled) == 2)
    assert {call.body["id"] for call in broker.made(CHAT_SUBMIT)} == {"c"}
    assert {call.body["id"] for call in broker.made(SUBMIT)} == {"t"}
    body = broker.settled["c"]
    assert (body["generation"], body["state"], body["finish_reason"]) == ("an answer", "ok", "length")
    assert body["token_ids"] == [ord(c) for c in "an answer"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "cached_tokens": 0}
    assert "logprobs" not in body


def test_the_engine_is_asked_for_what_the_payload_says(broker, start):
    worker = start(chat=True)
    sampling = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "frequency_penalty": -1, "presence_penalty": 1.5,
        "repetition_penalty": 1.1, "logit_bias": {"5": -100, "6": 2.5},
    }  # fmt: skip
    broker.give_chat(
        "c", prefix="ab", cache_salt="one", seed=9, sampling=sampling, stop=["\n", "end"], logprobs=3, max_new_tokens=50
    )
    worker.engine.wait_for("c", PATIENCE)
    request = worker.engine.requests["c"]
    assert (request.prompt, request.prefix, request.max_new_tokens) == ((1, 2, 3), (97, 98), 50)
    assert (request.seed, request.stop, request.logprobs, request.n) == (9, ("\n", "end"), 3, 1)
    assert (request.cache_salt, request.max_context) == ("tenant one", None)
    chosen = request.sampling
    assert (chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p) == (0.5, 0.9, 7, 0.1)
    assert (chosen.frequency_penalty, chosen.presence_penalty, chosen.repetition_penalty) == (-1, 1.5, 1.1)
    assert chosen.logit_bias == ((5, -100.0), (6, 2.5))


@pytest.mark.parametrize(
    ("payload", "prompt"),
    [
        ({"prompt_token_ids": None, "prompt": None, "estimated": True}, tuple(b"hello")),
        ({"prompt_token_ids": None, "messages": None, "prompt": "The sea"}, "The sea"),
        ({"prompt_token_ids": [], "messages": None, "prompt": ""}, ()),
    ],
)
def test_a_prompt_without_ids_is_rendered_or_taken_as_it_is(broker, start, payload, prompt):
    worker = start(chat=True)
    broker.give_chat("c", **payload)
    worker.engine.wait_for("c", PATIENCE)
    assert worker.engine.requests["c"].prompt == prompt


def test_a_continued_job_comes_back_whole(broker, start):
    worker = start(chat=True)
    broker.give_chat("c", prefix="Once ", logprobs=0)
    worker.engine.says("c", ("u", "u"), ("p", "p"), logprobs=True)
    worker.engine.ends("c", 7)
    broker.wait_until(lambda: "c" in broker.settled)
    body = broker.settled["c"]
    assert (body["generation"], body["finish_reason"]) == ("Once up", "stop")
    assert body["token_ids"] == [ord(c) for c in "Once up"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "cached_tokens": 2}
    assert [entry[0] for entry in body["logprobs"]] == [ord("u"), ord("p")]


def test_a_prefix_that_ends_the_text_is_submitted_as_it_is(broker, start):
    worker = start(chat=True)
    broker.give_chat("c", prefix="all", max_new_tokens=3)
    worker.engine.ends("c", 3, FinishReason.LENGTH)
    broker.wait_until(lambda: "c" in broker.settled)
    body = broker.settled["c"]
    assert (body["generation"], body["token_ids"]) == ("all", [ord(c) for c in "all"])
    assert body["finish_reason"] == "length"


def test_ids_of_a_chat_go_along_when_a_stop_string_cut_its_text(broker, start):
    worker = start(chat=True)
    broker.give_chat("c", stop=["x"])
    worker.engine.says("c", ("a", "a"), ("x", ""))
    worker.engine.ends("c", 2, stop="x")
    broker.wait_until(lambda: "c" in broker.settled)
    assert broker.settled["c"]["generation"] == "a"
    assert broker.settled["c"]["token_ids"] == [ord("a"), ord("x")]


@pytest.mark.parametrize("revision", [{"model_revision": "another"}, {"tokenizer_revision": "another"}])
def test_a_chat_for_another_revision_is_handed_back(broker, start, revision):
    worker = start(chat=True)
    broker.give_chat("c", **revision)
    broker.give_chat("same", **{name: MANIFESTS["m"][name] for name in ("model_revision", "tokenizer_revision")})
    worker.engine.writes("same")
    broker.wait_until(lambda: len(broker.settled) == 2)
    assert broker.states() == {"c": "released", "same": "ok"}
    assert worker.engine.started == ["same"]
    # Its seat is free again: another two jobs find room.
    broker.give_chat("d")
    broker.give_chat("e")
    worker.engine.writes("d")
    worker.engine.writes("e")
    broker.wait_until(lambda: len(broker.settled) == 4)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        ({"prompt_token_ids": None, "messages": None, "prompt": "too long"}, "context_length_exceeded"),
        ({"prompt_token_ids": None, "messages": None, "prompt": "unfit"}, "unsupported_parameter"),
        ({"prompt_token_ids": None, "messages": [{"role": "system", "content": "s"}]}, "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter"),
    ],
)
def test_a_chat_that_cannot_run_is_rejected_with_its_code(broker, start, payload, code):
    worker = start(chat=True)
    broker.give_chat("c", **payload)
    broker.give_chat("next")
    worker.engine.writes("next")
    broker.wait_until(lambda: len(broker.settled) == 2)
    assert broker.states() == {"c": "rejected", "next": "ok"}
    assert broker.settled["c"]["error_code"] == code
    assert worker.status.snapshot().failed == 0


@pytest.mark.parametrize("prompt", ["too long", "unfit"])
def test_a_chat_that_another_worker_began_and_that_cannot_go_on_here_is_a_fault(broker, start, prompt):
    start(chat=True)
    broker.give_chat("c", prefix="ab", prompt_token_ids=None, messages=None, prompt=prompt)
    broker.give_chat("next")
    broker.wait_until(lambda: "c" in broker.settled)
    assert broker.states()["c"] == "faulted"
    assert "error_code" not in broker.settled["c"]


@pytest.mark.parametrize(
    "payload",
    [
        {"max_new_tokens": 0}, {"max_new_tokens": True}, {"prompt_token_ids": ["1"]}, {"prompt_token_ids": {}},
        {"stop": "x"}, {"stop": [1]}, {"sampling": []}, {"sampling": {"temperature": "hot"}},
        {"sampling": {"logit_bias": {"x": 1}}}, {"sampling": {"logit_bias": {"1": None}}}, {"sampling": {"top_k": 1.5}},
        {"logprobs": -1}, {"sampling": {"temperature": 10**400}},
        {"prompt_token_ids": None, "messages": ["hi"]}, {"prompt_token_ids": None, "messages": None, "prompt": None},
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_read_is_a_fault(broker, start, payload):
    worker = start(chat=True)
    broker.give_chat("c", **payload)
    broker.wait_until(lambda: "c" in broker.settled)
    assert broker.states() == {"c": "faulted"}
    assert worker.engine.started == []


def test_a_text_that_is_refused_is_a_fault_as_before(broker, start):
    start(chat=True)
    broker.give("t", "too long")
    broker.wait_until(lambda: "t" in broker.settled)
    assert broker.states() == {"t": "faulted"}


def test_a_broker_without_chat_is_asked_for_text(broker, start):
    broker.serves_chat = False
    worker = start(chat=True)
    broker.give("t")
    worker.engine.writes("t")
    broker.wait_until(lambda: "t" in broker.settled)
    broker.wait_until(lambda: len(broker.made(POP)) > 1)
    assert len(broker.made(CHAT_POP)) == 1
    assert not {"kinds", "manifests"} & set(broker.made(POP)[0].body)


def test_a_broker_that_restarts_behind_a_proxy_is_asked_for_chat_again(broker, start):
    worker = start(chat=True, shortest_round=0.1)
    broker.wait_until(lambda: len(broker.made(CHAT_POP)) > 1)
    broker.fail(CHAT_POP, Answer(404, b"<html>no backend</html>"), Answer(502), Fault.RESET)
    broker.wait_until(lambda: not broker.faults[CHAT_POP])
    broker.give_chat("c")
    worker.engine.writes("c")
    broker.wait_until(lambda: "c" in broker.settled)
    assert not broker.made(POP)


def test_chat_is_asked_for_only_while_progress_is_taken(broker, start):
    broker.fail(PROGRESS, Answer(404, {"message": "no such route"}))
    worker = start(chat=True)
    broker.give("t")
    worker.engine.writes("t")
    broker.wait_until(lambda: bool(broker.made(POP)))
    assert not {"progress", "manifests", "kinds"} & set(broker.made(POP)[0].body)
    broker.wait_until(lambda: "t" in broker.settled)


def test_a_drain_hands_back_chats_that_have_not_begun(broker, start):
    worker = start(chat=True)
    broker.give_chat("a")
    broker.give_chat("b")
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 1, PATIENCE)
    worker.stop()
    worker.engine.writes("a")
    assert worker.ended() is None
    assert broker.states() == {"a": "ok", "b": "released"}
    assert {call.body["id"] for call in broker.made(CHAT_SUBMIT)} == {"a", "b"}
