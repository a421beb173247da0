"""A worker with a real engine is lost within its streams: what another one makes of them is what it would have made itself."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support import engine_worker
from tests.support.chat import ChatBroker, chat_broker
from tests.support.concurrency import eventually
from tests.support.engine_worker import EngineWorker
from tests.support.postgres import Server
from tests.support.sse import Stream

ROUNDS = 3
LENGTH = 60
PATIENCE = 30.0
# Token ids of the tiny model below this are visible ASCII, a character each.
PRINTABLE = 94
# The tiny model ends a text by chance; with this it does not.
ENDLESS = {"logit_bias": {"256": -100}}
_numbers = itertools.count()
# Greedy and by chance, with and without what looks back at the text so far.
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.9, "seed": 12, "top_p": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {"70": 2.5}},
]


@dataclass(frozen=True)
class Answer:
    """What a client was told, and the tokens that the broker counted."""

    text: str
    finish_reason: str | None
    token_ids: list[int]
    completion_tokens: int


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[ChatBroker]:
    url = server.create()
    with chat_broker(url) as broker:
        yield broker
        broker.assert_sound()
    server.drop(url)


@pytest.fixture
def chat(shared: ChatBroker) -> Iterator[ChatBroker]:
    with shared.of_one_test() as broker:
        yield broker


@pytest.fixture
def workers(chat: ChatBroker) -> Iterator[Workers]:
    with ExitStack() as held:
        yield Workers(chat, held)


@dataclass
class Workers:
    """Starts one after another, each as good as the last."""

    chat: ChatBroker
    held: ExitStack
    key: str | None = None

    def start(self, **options: Any) -> EngineWorker:
        """One more."""
        key = self.key or self.chat.owner.api_key
        worker = EngineWorker(self.chat.live.url, key, f"engine {next(_numbers)}", **options)
        return self.held.enter_context(worker)


def ask(chat: ChatBroker, number: int, **fields: Any) -> Stream:
    options = {"max_tokens": LENGTH, "model": engine_worker.MODEL, "stream_options": {"include_usage": True}}
    return chat.open(f"Tell me story {number} of the sea.", **{**options, **fields})


def begin(chat: ChatBroker, worker: EngineWorker, orders: list[dict[str, Any]], tokens: int) -> list[Stream]:
    """Streams that the worker has all of before it makes the first of so many tokens, so that none is far ahead of another."""
    worker.engine.hold_after(0)
    streams = [ask(chat, number, **fields) for number, fields in enumerate(orders)]
    eventually(lambda: worker.engine.running == len(streams), "it has them all", within=PATIENCE)
    worker.engine.hold_after(tokens)
    return streams


def answers(chat: ChatBroker, streams: list[Stream]) -> list[Answer]:
    """All of these, read to their end."""
    return [answer(chat, stream) for stream in streams]


def answer(chat: ChatBroker, stream: Stream) -> Answer:
    told = chat.read(stream)
    assert (told.error, told.done) == (None, True)
    assert told.usage is not None
    ids = "SELECT token_ids FROM jobs WHERE request_id = %(id)s AND state = 'stored'"
    return Answer(
        text=told.text,
        finish_reason=told.finish_reason,
        token_ids=chat.world.scalar(ids, id=uuid.UUID(stream.id)),
        completion_tokens=told.usage["completion_tokens"],
    )


def written(chat: ChatBroker, streams: list[Stream]) -> int:
    """Tokens that the broker holds of these."""
    held = """SELECT coalesce(sum(cardinality(coalesce(j.token_ids, p.token_ids))), 0)
    FROM jobs j LEFT JOIN progress p ON p.job_id = j.id
    WHERE j.request_id = ANY (%(ids)s::uuid[]) AND j.state IN ('processing', 'stored')"""
    return int(chat.world.scalar(held, ids=[uuid.UUID(stream.id) for stream in streams]))


def lose(
    chat: ChatBroker, worker: EngineWorker, streams: list[Stream], tokens: int, *, then_goes_on: bool = True
) -> None:
    """Cut the worker of these off once the broker holds so many tokens, and let its leases pass.

    Args:
        then_goes_on: what it makes from there on nobody hears of.
    """
    eventually(lambda: worker.engine.is_held and written(chat, streams) >= tokens, "all is posted", within=PATIENCE)
    worker.cut_off()
    if then_goes_on:
        worker.engine.hold_after(None)
    assert chat.pass_leases().stale > 0


def begun(chat: ChatBroker, streams: list[Stream]) -> list[tuple[list[int], str]]:
    """(token ids, text) of what the slots of these were put back with."""
    prefix = "SELECT coalesce(prefix_token_ids, '{}'), coalesce(prefix_text, '') FROM slots WHERE request_id = %(id)s"
    rows = [row for stream in streams for row in chat.world.rows(prefix, id=uuid.UUID(stream.id))]
    return [(ids, text) for ids, text in rows]


# --- lost without a word


def test_what_another_worker_goes_on_with_is_what_the_first_would_have_made(chat: ChatBroker, workers: Workers) -> None:
    chance = random.Random()
    worker = workers.start()
    for _ in range(ROUNDS):
        undisturbed = answers(chat, [ask(chat, number, **fields) for number, fields in enumerate(SAMPLINGS)])
        kept = chance.randrange(1, sum(len(one.token_ids) for one in undisturbed) - len(SAMPLINGS))
        streams = begin(chat, worker, SAMPLINGS, kept)
        lose(chat, worker, streams, kept)
        following = workers.start()
        assert answers(chat, streams) == undisturbed, f"lost after {kept} tokens"
        worker.close()
        worker = following
        assert any(0 < len(ids) < LENGTH for ids, _ in begun(chat, streams))
    assert all(one.completion_tokens == len(one.token_ids) for one in undisturbed)


def test_in_bfloat16_nothing_is_left_out_or_said_twice(chat: ChatBroker, workers: Workers) -> None:
    worker = workers.start(dtype=torch.bfloat16)
    streams = begin(chat, worker, [fields | ENDLESS for fields in SAMPLINGS], 100)
    lose(chat, worker, streams, 100)
    workers.start(dtype=torch.bfloat16)
    prefixes = begun(chat, streams)
    assert sum(len(ids) for ids, _ in prefixes) >= 100
    for (ids, text), whole in zip(prefixes, answers(chat, streams), strict=True):
        assert whole.token_ids[: len(ids)] == ids
        assert whole.text.startswith(text)
        assert (len(whole.token_ids), whole.completion_tokens, whole.finish_reason) == (LENGTH, LENGTH, "length")


def test_log_probabilities_are_those_of_the_undisturbed_run(chat: ChatBroker, workers: Workers) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, **SAMPLINGS[1], **ENDLESS}
    worker = workers.start()
    undisturbed = chat.read(ask(chat, 0, **asked))
    worker.engine.hold_after(23)
    stream = ask(chat, 0, **asked)
    lose(chat, worker, [stream], 23)
    workers.start()
    told = chat.read(stream)
    assert told.text == undisturbed.text
    entries, expected = told.logprobs[0], undisturbed.logprobs[0]
    assert len(entries) == LENGTH
    assert [entry["bytes"] for entry in entries] == [entry["bytes"] for entry in expected]
    for entry, wanted in zip(entries, expected, strict=True):
        assert entry["logprob"] == pytest.approx(wanted["logprob"], abs=1e-4)
        assert [one["logprob"] for one in entry["top_logprobs"]] == [
            pytest.approx(one["logprob"], abs=1e-4) for one in wanted["top_logprobs"]
        ]


def test_a_stop_string_is_found_and_not_found_across_the_border(chat: ChatBroker, workers: Workers) -> None:
    worker = workers.start()
    plain = {"temperature": 0, "logit_bias": {str(token_id): -100 for token_id in range(PRINTABLE, 257)}}
    (whole,) = answers(chat, [ask(chat, 0, **plain)])
    assert len(whole.text) == LENGTH
    stop = whole.text[20:24]
    assert whole.text.index(stop) == 20
    for kept, string, text in [
        (21, stop, whole.text[:20]),
        (23, stop, whole.text[:20]),
        (22, stop[:3] + "\n", whole.text),
    ]:
        worker.engine.hold_after(kept)
        stream = ask(chat, 0, stop=[string], **plain)
        lose(chat, worker, [stream], kept)
        following = workers.start()
        told = answer(chat, stream)
        assert (told.text, told.finish_reason) == (text, "length" if text == whole.text else "stop")
        assert told.completion_tokens == len(told.token_ids) == (LENGTH if text == whole.text else 24)
        assert [len(text) for _, text in begun(chat, [stream])] == [20]
        worker.close()
        worker = following


def test_where_the_broker_knows_no_tokenizer_the_workers_read_the_chat_themselves(database_url: str) -> None:
    with chat_broker(database_url) as chat, ExitStack() as held:
        # Nobody's tokenizer is taken but a trusted user's.
        workers = Workers(chat, held, key=chat.live.user("stranger").api_key)
        worker = workers.start()
        undisturbed = chat.read(ask(chat, 0, **SAMPLINGS[1]))
        assert undisturbed.usage is not None
        assert undisturbed.usage["estimated"]
        worker.engine.hold_after(23)
        stream = ask(chat, 0, **SAMPLINGS[1])
        lose(chat, worker, [stream], 23)
        workers.start()
        told = chat.read(stream)
        assert (told.text, told.finished, told.usage) == (undisturbed.text, undisturbed.finished, undisturbed.usage)
        chat.assert_sound()


# --- handed back, and come back


def test_a_worker_that_leaves_hands_its_streams_on(chat: ChatBroker, workers: Workers) -> None:
    worker = workers.start()
    undisturbed = answers(chat, [ask(chat, number, **fields) for number, fields in enumerate(SAMPLINGS)])
    streams = begin(chat, worker, SAMPLINGS, 90)
    eventually(lambda: worker.engine.is_held and written(chat, streams) >= 90, "all is posted", within=PATIENCE)
    following = workers.start()
    worker.close()
    assert answers(chat, streams) == undisturbed
    eventually(lambda: following.status.snapshot().done == len(SAMPLINGS), "its results are taken", within=PATIENCE)
    reasons = "SELECT state, reason FROM jobs WHERE request_id = %(id)s ORDER BY claimed_at"
    for stream in streams:
        assert chat.world.rows(reasons, id=uuid.UUID(stream.id)) == [("released", "handed_back"), ("stored", None)]


@pytest.mark.parametrize("at_work", [True, False], ids=["within its text", "with its text done"])
def test_a_worker_that_comes_back_is_told_to_stop_and_changes_nothing(
    chat: ChatBroker, workers: Workers, at_work: bool
) -> None:
    worker = workers.start()
    undisturbed = answers(chat, [ask(chat, number, **SAMPLINGS[number]) for number in range(2)])
    streams = begin(chat, worker, SAMPLINGS[:2], 50)
    lose(chat, worker, streams, 50, then_goes_on=not at_work)
    second = workers.start()
    assert answers(chat, streams) == undisturbed
    if not at_work:
        eventually(lambda: worker.figures.running == 0, "its texts are done", within=PATIENCE)
    rows = "SELECT to_jsonb(j), to_jsonb(p) FROM jobs j LEFT JOIN progress p ON p.job_id = j.id ORDER BY j.id"
    before = chat.world.rows(rows)

    worker.mend()
    if at_work:
        eventually(lambda: worker.status.snapshot().stopped == 2, "it is told to stop", within=PATIENCE)
    else:
        eventually(lambda: worker.status.snapshot().failed == 2, "its results are refused", within=PATIENCE)
    eventually(lambda: worker.figures.running == 0, "it holds nothing more", within=PATIENCE)
    assert worker.figures.blocks_free == worker.figures.blocks_total
    assert chat.world.rows(rows) == before

    # And it is as good as before.
    second.close()
    worker.engine.hold_after(None)
    assert answers(chat, [ask(chat, number, **SAMPLINGS[number]) for number in range(2)]) == undisturbed
