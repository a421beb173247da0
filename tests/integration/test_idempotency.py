"""Calls repeated with one `Idempotency-Key`: one request, one claim, one payment, and the first answer again."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Iterator

import pytest

from horde.admission.keys import ANONYMOUS_KEY
from horde.errors import HordeError
from horde.maintenance.passes import run_pass
from tests.support.broker import Broker, open_broker
from tests.support.concurrency import together

KEY = "order-1"


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url) as made:
        yield made


@pytest.fixture
def client(broker: Broker) -> str:
    return broker.user("client").api_key


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner").api_key


def count_requests(broker: Broker) -> int:
    return int(broker.world.scalar("SELECT count(*) FROM requests"))


# --- orders


def test_the_same_order_twice_is_one_request(broker: Broker, client: str) -> None:
    first = broker.order(client, idempotency_key=KEY, body_hash="a")
    assert broker.order(client, idempotency_key=KEY, body_hash="a") == first
    assert count_requests(broker) == 1
    # The tax of one request.
    assert broker.world.scalar("SELECT sum(price) FROM events WHERE kind = 'enqueued'") == 100


@pytest.mark.parametrize("served", [True, False])
def test_a_repeat_is_answered_with_everything_that_the_first_answer_said(
    broker: Broker, client: str, key: str, served: bool
) -> None:
    if served:
        broker.nothing(key)
    first = broker.ask(client, idempotency_key=KEY, body_hash="a")
    assert (first.message is None, first.warnings == []) == (served, served)
    # What has changed since changes nothing about it.
    broker.world.advance(301) if served else broker.job(key)
    assert broker.ask(client, idempotency_key=KEY, body_hash="a") == first


def test_orders_at_once_under_one_key_get_one_answer(broker: Broker, client: str) -> None:
    ask = functools.partial(broker.ask, client, idempotency_key=KEY, body_hash="a")
    answers = together(*[ask] * 8)
    assert answers == [answers[0]] * 8
    assert [warning["code"] for warning in answers[0].warnings] == ["NoAvailableWorker"]


def test_another_body_under_the_same_key_is_refused(broker: Broker, client: str) -> None:
    broker.order(client, idempotency_key=KEY, body_hash="a")
    with pytest.raises(HordeError) as refused:
        broker.order(client, idempotency_key=KEY, body_hash="b", prompt="Another")
    assert (refused.value.status, refused.value.code) == (422, "idempotency_conflict")
    assert count_requests(broker) == 1


def test_another_key_or_none_is_another_request(broker: Broker, client: str) -> None:
    orders = [broker.order(client, idempotency_key=name, body_hash="a") for name in (KEY, "order-2", None, None)]
    assert len(set(orders)) == 4


def test_sixteen_clients_at_once_with_one_key_make_one_request(broker: Broker, client: str) -> None:
    order = functools.partial(broker.order, client, idempotency_key=KEY, body_hash="a")
    orders = together(*[order] * 16)
    assert len(set(orders)) == 1
    assert broker.world.rows("SELECT id, waiting FROM requests") == [(orders[0], 1)]
    assert broker.world.scalar("SELECT count(*) FROM queue") == 1
    assert broker.world.scalar("SELECT count(*) FROM events") == 1


def test_two_bodies_at_once_under_one_key_make_one_request_and_one_refusal(broker: Broker, client: str) -> None:
    def order(body: str) -> uuid.UUID | str:
        try:
            return broker.order(client, idempotency_key=KEY, body_hash=body)
        except HordeError as error:
            return error.code

    answers = together(*[functools.partial(order, body) for body in ("a", "b") * 4])
    made = {answer for answer in answers if isinstance(answer, uuid.UUID)}
    assert len(made) == count_requests(broker) == 1
    # Those with the body that came first got it, the others were told.
    assert answers.count("idempotency_conflict") == 4


def test_a_key_belongs_to_its_user(broker: Broker, client: str) -> None:
    other = broker.user("other").api_key
    mine = broker.order(client, idempotency_key=KEY, body_hash="a")
    theirs = broker.order(other, idempotency_key=KEY, body_hash="b")
    assert mine != theirs


def test_strangers_who_share_the_anonymous_key_are_told_apart_by_address(broker: Broker) -> None:
    def order(address: str, body: str) -> uuid.UUID:
        return broker.order(ANONYMOUS_KEY, idempotency_key=KEY, body_hash=body, address=address)

    here, there = order("192.0.2.1", "a"), order("192.0.2.2", "b")
    assert here != there
    assert order("192.0.2.1", "a") == here
    # A registered user keeps its key when its address changes.
    client = broker.user().api_key
    first = broker.order(client, idempotency_key=KEY, body_hash="a", address="192.0.2.1")
    assert broker.order(client, idempotency_key=KEY, body_hash="a", address="192.0.2.3") == first


@pytest.mark.parametrize("bad", ["", " ", "a b", "a\n", "é", "\x7f", "\0", "x" * 256])
def test_a_bad_key_is_refused_and_nothing_is_ordered(broker: Broker, client: str, bad: str) -> None:
    with pytest.raises(HordeError) as refused:
        broker.order(client, idempotency_key=bad)
    assert (refused.value.status, list(refused.value.errors or ())) == (400, ["Idempotency-Key"])
    assert count_requests(broker) == 0


@pytest.mark.parametrize("good", ["!", "~", "x" * 255, "550e8400-e29b-41d4-a716-446655440000", "%(key)s", "';--"])
def test_any_visible_ascii_is_a_key(broker: Broker, client: str, good: str) -> None:
    first = broker.order(client, idempotency_key=good)
    assert broker.order(client, idempotency_key=good) == first


def test_a_finished_request_is_answered_again_until_it_is_forgotten(broker: Broker, client: str, key: str) -> None:
    first = broker.order(client, idempotency_key=KEY, body_hash="a")
    broker.submit(key, broker.job(key).id)
    assert broker.order(client, idempotency_key=KEY, body_hash="a") == first
    assert broker.status(first).done

    broker.world.advance(1201)
    assert run_pass(broker.context).deleted == 1
    again = broker.order(client, idempotency_key=KEY, body_hash="b")
    assert again != first
    assert broker.status(again).waiting == 1


def test_a_refused_order_leaves_its_key_unused(broker: Broker, client: str) -> None:
    for _ in range(30):
        broker.order(client)
    with pytest.raises(HordeError, match="Parallel requests") as refused:
        broker.order(client, idempotency_key=KEY, body_hash="a")
    assert (refused.value.status, refused.value.rc) == (429, "TooManyPrompts")

    with broker.context.database.transaction() as tx:
        tx.execute("UPDATE users SET concurrency = 31 WHERE name = 'client'")
    assert broker.status(broker.order(client, idempotency_key=KEY, body_hash="a")).waiting == 1
    # A repeat is not a second one: it passes though the limit is reached again.
    broker.order(client, idempotency_key=KEY, body_hash="a")


def test_a_dry_run_takes_no_key(broker: Broker, client: str) -> None:
    assert broker.ask(client, dry_run=True, idempotency_key=KEY, body_hash="a").id is None
    assert broker.order(client, idempotency_key=KEY, body_hash="b")


# --- pops


def test_a_pop_whose_answer_was_lost_gets_the_same_jobs_again(broker: Broker, key: str) -> None:
    broker.order(n=3)
    broker.order(n=3)
    first = broker.pop(key, amount=2, idempotency_key="pop-1").jobs
    assert len(first) == 2
    again = broker.pop(key, amount=2, idempotency_key="pop-1").jobs
    assert [(job.id, job.model, job.ttl, job.payload, job.seed, job.slot) for job in again] == [
        (job.id, job.model, job.ttl, job.payload, job.seed, job.slot) for job in first
    ]
    assert broker.world.scalar("SELECT count(*) FROM jobs") == 2


def test_a_repeated_pop_gets_what_still_runs_and_then_fresh_work(broker: Broker, key: str) -> None:
    broker.order(n=3)
    first, second = broker.pop(key, amount=2, idempotency_key="pop-1").jobs
    broker.submit(key, first.id)
    assert [job.id for job in broker.pop(key, amount=2, idempotency_key="pop-1").jobs] == [second.id]
    broker.submit(key, second.id)
    (third,) = broker.pop(key, amount=2, idempotency_key="pop-1").jobs
    assert third.slot == 2


def test_a_pops_key_belongs_to_its_worker(broker: Broker, key: str) -> None:
    broker.order(n=2)
    one = broker.job(key, name="one", idempotency_key="pop-1")
    two = broker.job(key, name="two", idempotency_key="pop-1")
    assert one.id != two.id


def test_a_stale_job_is_not_handed_out_again_under_its_old_key(broker: Broker, key: str) -> None:
    broker.order()
    job = broker.job(key, idempotency_key="pop-1")
    broker.world.pass_lease(job.id)
    assert run_pass(broker.context).stale == 1
    # The slot waits again; what comes is a new attempt.
    assert broker.job(key, idempotency_key="pop-1").id != job.id


# --- submits


@pytest.mark.parametrize(("state", "reward"), [("ok", 0.0), ("faulted", 0.0), ("released", 0.0)])
def test_a_submit_whose_answer_was_lost_is_answered_as_before(
    broker: Broker, key: str, state: str, reward: float
) -> None:
    model = "a-70b"
    broker.order(models=[model])
    job = broker.job(key, models=[model])
    first = broker.submit(key, job.id, state=state, idempotency_key="submit-1")
    again = broker.submit(key, job.id, state=state, idempotency_key="submit-1")
    assert again == first
    assert (first > reward) is (state == "ok")
    settled = "SELECT count(*), sum(reward) FROM events WHERE kind IN ('stored', 'faulted', 'released')"
    assert broker.world.rows(settled) == [(1, round(first * 100))]


def test_another_submit_of_a_stored_job_is_a_duplicate_whatever_its_key(broker: Broker, key: str) -> None:
    request = broker.order()
    job = broker.job(key)
    broker.submit(key, job.id, "first", idempotency_key="submit-1")
    for again in (None, "submit-2"):
        with pytest.raises(HordeError, match="already submitted") as refused:
            broker.submit(key, job.id, "second", idempotency_key=again)
        assert (refused.value.status, refused.value.rc) == (400, "DuplicateGen")
    assert [generation.text for generation in broker.status(request).generations] == ["first"]


def test_a_repeated_fault_does_not_count_twice(broker: Broker, key: str) -> None:
    request = broker.order()
    job = broker.job(key)
    for _ in range(3):
        broker.submit(key, job.id, state="faulted", idempotency_key="submit-1")
    assert not broker.status(request).faulted
    assert broker.worker().uncompleted_jobs == 1
