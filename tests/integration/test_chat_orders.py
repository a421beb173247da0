"""Orders of chats on their way into the queue: how much at once, for what kudos, by when, and what is enqueued."""

from __future__ import annotations

import dataclasses
import math
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from horde.admission.keys import ANONYMOUS_KEY
from horde.errors import ErrorCode, HordeError
from horde.kudos.prices import TEXT_TAX, most_per_text
from horde.lifecycle.enqueue import queue_keys
from horde.lifecycle.words import CancelReason, Kind
from horde.maintenance.scheduler import Maintenance
from horde.usecases.chat import AcceptedChat
from horde.usecases.chat_admission import LONGEST_WAIT_ATTACHED, admit_chat
from tests.support.broker import Broker
from tests.support.chat_orders import RICH, TOKENS, ChatOrders, order_broker
from tests.support.concurrency import together
from tests.support.postgres import Server


@pytest.fixture(scope="module")
def broker(server: Server) -> Iterator[Broker]:
    with order_broker(server) as made:
        yield made


@pytest.fixture
def chats(broker: Broker) -> Iterator[ChatOrders]:
    """For a model of this test's own."""
    yield ChatOrders.of(broker)
    broker.context.vitals.queue = broker.context.vitals.threads = 0


# --- how much at once, and for what


def test_nobody_has_more_waiting_than_its_concurrency(chats: ChatOrders) -> None:
    chats.serve()
    key = chats.broker.user(kudos=RICH, concurrency=3).api_key
    chats.ask(key, n=2)
    error = chats.refusal(key, n=2)
    assert (error.code, error.status, error.rc) == (ErrorCode.CONCURRENCY_EXCEEDED, 429, "TooManyPrompts")
    assert error.retry_after
    # What would be queued, not what is only asked about.
    assert chats.ask(key, n=2, dry_run=True).id is None
    chats.ask(key)
    assert chats.refusal(key).code is ErrorCode.CONCURRENCY_EXCEEDED
    # What runs waits no more, and texts count as well.
    chats.take()
    chats.broker.order(key, models=["a text's"])
    assert chats.refusal(key).code is ErrorCode.CONCURRENCY_EXCEEDED


def test_strangers_who_share_the_anonymous_key_have_a_limit_for_each_model(chats: ChatOrders) -> None:
    chats.serve()
    other = ChatOrders.of(chats.broker)
    other.serve()
    limit = int(chats.broker.world.scalar("SELECT concurrency FROM users WHERE id = 0"))
    for n in [16] * (limit // 16) + [limit % 16] * bool(limit % 16):
        chats.ask(ANONYMOUS_KEY, n=n)
    assert chats.refusal(ANONYMOUS_KEY).code is ErrorCode.CONCURRENCY_EXCEEDED
    other.ask(ANONYMOUS_KEY)


@pytest.fixture
def sized(chats: ChatOrders) -> ChatOrders:
    """For a model whose name tells of 7 billion parameters: 1,024 tokens of it need 341.34 kudos beforehand."""
    return dataclasses.replace(chats, model=f"{chats.model}-7b")


@pytest.mark.parametrize(("kudos", "enough"), [(341.34, True), (341.33, False), (0, False)])
def test_a_long_answer_needs_kudos_beforehand(sized: ChatOrders, kudos: float, *, enough: bool) -> None:
    sized.serve()
    key = sized.broker.user(kudos=kudos).api_key
    if enough:
        assert sized.longest(key, max_tokens=1024) == 1024
        assert sized.longest(key, max_tokens=None) == 1024
    else:
        error = sized.refusal(key, max_tokens=1024)
        assert (error.code, error.status, error.rc) == (ErrorCode.INSUFFICIENT_KUDOS, 403, "KudosUpfront")
        assert error.param == "max_tokens"
        assert "341.34" in error.message
        assert sized.longest(key, max_tokens=None) == 512
    assert sized.longest(key, max_tokens=512) == 512
    # Each of n answers needs as much.
    assert sized.refusal(key, max_tokens=1024, n=2).code is ErrorCode.INSUFFICIENT_KUDOS


def test_whoever_has_none_gets_shorter_answers_as_the_queue_grows(chats: ChatOrders) -> None:
    chats.serve()
    key = chats.broker.user(concurrency=1000).api_key
    for queued, tokens in ((0, 512), (100, 422), (1000, 256)):
        chats.broker.context.vitals.queue = queued
        assert chats.longest(key, max_tokens=None) == tokens
        assert chats.longest(key, max_tokens=tokens) == tokens
        error = chats.refusal(key, max_tokens=tokens + 1)
        assert error.code is ErrorCode.INSUFFICIENT_KUDOS
        assert f"more than {tokens} tokens" in error.message
    # All the horde's threads share its queue.
    chats.broker.context.vitals.threads = 200
    assert chats.longest(key, max_tokens=None) == 512


def test_the_length_of_the_queue_is_what_the_heart_of_the_broker_saw(chats: ChatOrders) -> None:
    chats.serve()
    key = chats.broker.user(concurrency=1000).api_key
    waiting = [chats.ask(key) for _ in range(30)]
    Maintenance(chats.broker.context).beat()
    vitals = chats.broker.context.vitals
    assert vitals.queue >= len(waiting)
    assert vitals.threads >= 1
    free = max(256, min(512, math.floor(512 + 5 * vitals.threads - 0.9 * vitals.queue)))
    assert chats.longest(key, max_tokens=None) == free


@pytest.mark.parametrize("role", ["trusted", "moderator", "admin"])
def test_the_trusted_need_no_kudos(chats: ChatOrders, role: str) -> None:
    chats.serve()
    chats.broker.context.vitals.queue = 100_000
    columns: dict[str, Any] = {role: True}
    key = chats.broker.user(**columns).api_key
    assert chats.longest(key, max_tokens=2048) == 2048
    assert chats.longest(key, max_tokens=None) == 1024


def test_the_anonymous_get_what_anybody_gets(chats: ChatOrders) -> None:
    chats.serve()
    assert chats.refusal(ANONYMOUS_KEY, max_tokens=513).code is ErrorCode.INSUFFICIENT_KUDOS
    assert chats.longest(ANONYMOUS_KEY, max_tokens=None) == 512


def test_the_price_told_is_that_of_full_answers(sized: ChatOrders) -> None:
    sized.serve()
    each = most_per_text(max_length=64, prompt_tokens=TOKENS, models=[sized.model])
    for n in (1, 3):
        assert sized.ask(n=n).kudos == (TEXT_TAX + n * each) / 100


# --- deadlines


def test_a_deadline_that_cannot_be_met_is_refused_at_once(chats: ChatOrders) -> None:
    chats.serve()
    # 10 tokens a second is what an unmeasured worker is taken to do: 30 seconds of work.
    for _ in range(3):
        chats.ask(max_tokens=100)
    error = chats.refusal(deadline_seconds=20)
    assert (error.code, error.status, error.rc) == (ErrorCode.NO_CAPACITY, 503, "NoCapacity")
    assert "30 s" in error.message
    assert error.retry_after == 10
    row = chats.asked(deadline_seconds=31)
    assert (row.deadline - row.created_at).total_seconds() == 31


def test_whoever_comes_first_by_its_kudos_waits_for_nobody_behind(chats: ChatOrders) -> None:
    chats.serve()
    poor, rich = chats.broker.user().api_key, chats.broker.user(kudos=RICH).api_key
    for _ in range(3):
        chats.ask(poor, max_tokens=100)
    assert chats.refusal(poor, deadline_seconds=20).code is ErrorCode.NO_CAPACITY
    assert chats.ask(rich, deadline_seconds=1).id is not None


def test_an_open_connection_waits_for_ten_minutes_at_most(chats: ChatOrders) -> None:
    chats.serve()

    def expires_in(**fields: Any) -> float:
        admitted = admit_chat(chats.broker.context, chats.client, chats.order(**fields), attached=True)
        seconds = "SELECT extract(epoch FROM expires_at - created_at) FROM requests WHERE id = %(id)s"
        return float(chats.broker.world.scalar(seconds, id=admitted.id))

    assert expires_in() == LONGEST_WAIT_ATTACHED
    assert expires_in(deadline_seconds=90) == 90
    assert expires_in(deadline_seconds=86_400) == LONGEST_WAIT_ATTACHED


# --- what is enqueued


def test_a_dry_run_is_judged_and_priced_as_the_order_itself_and_queues_nothing(chats: ChatOrders) -> None:
    chats.serve()
    before = chats.in_all()
    dry = chats.ask(n=2, dry_run=True)
    assert chats.in_all() == before
    assert dataclasses.replace(chats.ask(n=2), id=None) == dry
    assert chats.refusal(max_tokens=5000, dry_run=True).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert chats.refusal(models=["no/such"], dry_run=True).code is ErrorCode.MODEL_NOT_FOUND
    poor = chats.broker.user().api_key
    assert chats.refusal(poor, max_tokens=513, dry_run=True).code is ErrorCode.INSUFFICIENT_KUDOS


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_each_answer_has_a_seed_that_follows_from_the_orders(chats: ChatOrders, seed: int) -> None:
    chats.serve()

    def seeds(**fields: Any) -> list[int]:
        asked = chats.ask(**fields).id
        rows = chats.broker.world.rows("SELECT seed FROM slots WHERE request_id = %(id)s ORDER BY idx", id=asked)
        return [seed for (seed,) in rows]

    first = seeds(n=3, seed=seed)
    assert first[0] == seed
    assert len(set(first)) == 3
    assert seeds(n=2, seed=seed) == first[:2]
    assert seeds(n=3) != first


def test_workers_that_wait_are_woken_by_what_is_enqueued_and_by_nothing_else(chats: ChatOrders) -> None:
    chats.serve()
    with chats.broker.context.wakeups.waiting(queue_keys(Kind.CHAT, [chats.model])) as waiter:
        chats.refusal(max_tokens=5000)
        chats.ask(dry_run=True)
        assert not waiter.is_set()
        chats.ask()
        assert waiter.is_set()


def test_orders_at_once_under_one_key_are_one_chat(chats: ChatOrders) -> None:
    chats.serve()

    def once(seed: int = 1, body: str = "a") -> AcceptedChat:
        return chats.ask(seed=seed, idempotency_key="once", body_hash=body)

    answers = together(*[once] * 8)
    assert len({answer.id for answer in answers}) == 1
    assert all(answer == answers[0] for answer in answers)
    assert chats.broker.world.scalar("SELECT count(*) FROM requests WHERE models = %(m)s", m=[chats.model]) == 1
    with pytest.raises(HordeError) as conflict:
        once(body="b")
    assert conflict.value.code is ErrorCode.IDEMPOTENCY_CONFLICT
    # It needs no worker any more, nor a place in the queue.
    chats.broker.world.advance(600)
    assert once() == answers[0]


def test_the_key_of_a_chat_whose_client_hung_up_is_free_again(chats: ChatOrders) -> None:
    chats.serve()

    def once(key: str) -> uuid.UUID:
        keyed = chats.order(idempotency_key=key, body_hash="a", deadline_seconds=1000)
        admitted = admit_chat(chats.broker.context, chats.client, keyed, attached=True)
        assert admitted.id is not None
        assert admitted.seconds_left is not None
        assert 900 < admitted.seconds_left <= 1000
        return admitted.id

    # Whoever cancels has had its answer.
    cancelled = once("cancelled")
    chats.broker.world.cancel(cancelled, CancelReason.CLIENT)
    assert once("cancelled") == cancelled
    abandoned = once("abandoned")
    assert once("abandoned") == abandoned
    chats.broker.world.cancel(abandoned, CancelReason.DISCONNECT)
    another = once("abandoned")
    assert another != abandoned
    assert once("abandoned") == another
