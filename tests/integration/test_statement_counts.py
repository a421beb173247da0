"""How many statements and round trips each call costs, pinned: whoever adds one says so here."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from horde.db import database as db_module
from horde.db.database import Rows, Transaction
from horde.lifecycle.terms import RENEW_AFTER
from horde.usecases.progress import Chunk, post_progress
from tests.support.broker import Broker, open_broker


@dataclass
class Cost:
    """What was sent: each text is one round trip and may hold several statements."""

    sent: list[str] = field(default_factory=list)

    @property
    def round_trips(self) -> int:
        return len(self.sent)

    @property
    def statements(self) -> int:
        """Statements that do something: without the BEGIN that travels with the first one, and the COMMIT."""
        parts = [part.strip() for text in self.sent for part in text.split(";")]
        return sum(part not in {"", "BEGIN", "COMMIT"} for part in parts)

    @property
    def transactions(self) -> int:
        return sum(text.startswith("BEGIN;") for text in self.sent)


@pytest.fixture
def broker(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    # Every statement is prepared once per connection, and the only connection has done so before anything is counted.
    monkeypatch.setattr(db_module, "PLAN_AGE", float("inf"))
    with open_broker(database_url, database_pool=2, rate_limits="off") as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner, whose worker has popped, submitted and seen an empty queue before."""
    owner = broker.user("owner", kudos=10).api_key
    for state in ("ok", "faulted", "released", "faulted"):
        broker.order(owner)
        broker.submit(owner, broker.job(owner).id, state=state)
    while jobs := broker.pop(owner).jobs:
        broker.submit(owner, jobs[0].id)
    broker.status(broker.order())
    broker.submit(owner, broker.job(owner).id)
    broker.nothing(owner)
    return owner


@contextmanager
def counting() -> Iterator[Cost]:
    """Everything that any transaction of this process sends meanwhile, BEGIN, COMMIT and PREPARE included."""
    cost = Cost()
    run = Transaction._run

    def counted(self: Transaction, statement: str, parameters: Mapping[str, Any] | None = None) -> Rows:
        cost.sent.append(statement)
        return run(self, statement, parameters)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "_run", counted)
        yield cost


def cost_of(call: Callable[[], Any]) -> Cost:
    with counting() as cost:
        call()
    assert not any("PREPARE" in text for text in cost.sent), "not warm"
    return cost


def assert_costs(cost: Cost, *, statements: int, round_trips: int, transactions: int) -> None:
    found = (cost.statements, cost.round_trips, cost.transactions)
    assert found == (statements, round_trips, transactions), cost.sent


def versions(broker: Broker) -> dict[str, set[tuple[Any, ...]]]:
    """Each row of these tables with the transaction that wrote it; a lock writes none."""
    tables = {
        "requests": "id",
        "slots": "(request_id, idx)",
        "jobs": "id",
        "progress": "job_id",
        "events": "id",
        "workers": "id",
    }
    return {
        table: set(broker.world.rows(f"SELECT ({key})::text, xmin::text FROM {table}")) for table, key in tables.items()
    }


def test_an_order(broker: Broker, key: str) -> None:
    # The user; its waiting slots and balance; the insert of everything; whether anybody can serve it.
    cost = cost_of(lambda: broker.order(key))
    assert_costs(cost, statements=4, round_trips=4, transactions=0)


def test_an_anonymous_order(broker: Broker, key: str) -> None:
    # As above.
    cost = cost_of(broker.order)
    assert_costs(cost, statements=4, round_trips=4, transactions=0)


def test_an_order_of_many_results_costs_no_more(broker: Broker, key: str) -> None:
    cost = cost_of(lambda: broker.order(key, n=20))
    assert_costs(cost, statements=4, round_trips=4, transactions=0)


def test_an_order_under_an_idempotency_key(broker: Broker, key: str) -> None:
    # The key is looked for, and kept with the request in one transaction.
    cost = cost_of(lambda: broker.order(key, idempotency_key="once"))
    assert_costs(cost, statements=6, round_trips=7, transactions=1)
    # The repeat reads the user and the answer.
    cost = cost_of(lambda: broker.order(key, idempotency_key="once"))
    assert_costs(cost, statements=2, round_trips=2, transactions=0)


def test_a_pop_with_a_job(broker: Broker, key: str) -> None:
    broker.order(key, n=3)
    # The user and the worker, as a read; choose, take and begin in a transaction, then its COMMIT.
    cost = cost_of(lambda: broker.job(key))
    assert_costs(cost, statements=5, round_trips=6, transactions=1)


def test_a_pop_of_many_jobs_costs_no_more(broker: Broker, key: str) -> None:
    broker.order(key, n=20)
    cost = cost_of(lambda: broker.pop(key, amount=20))
    assert_costs(cost, statements=5, round_trips=6, transactions=1)


def test_a_pop_with_slots_costs_three_statements_for_each_request(broker: Broker, key: str) -> None:
    for n in (2, 1, 3):
        broker.order(key, n=n)
    # The user and the worker; choose, take and begin for each of three requests in one transaction, then its COMMIT.
    cost = cost_of(lambda: broker.pop(key, slots=5))
    assert_costs(cost, statements=11, round_trips=12, transactions=1)
    # With room left, one choice more, which finds nothing.
    cost = cost_of(lambda: broker.pop(key, slots=5))
    assert_costs(cost, statements=6, round_trips=7, transactions=1)


def test_a_pop_that_gets_nothing(broker: Broker, key: str) -> None:
    # The user and the worker; choose, which finds nothing; the look that confirms it; why.
    cost = cost_of(lambda: broker.nothing(key))
    assert_costs(cost, statements=5, round_trips=6, transactions=1)


def test_a_pop_of_a_worker_that_changed_writes_it_once(broker: Broker, key: str) -> None:
    broker.order(key)
    cost = cost_of(lambda: broker.job(key, threads=2))
    assert_costs(cost, statements=6, round_trips=7, transactions=1)


def test_a_submit(broker: Broker, key: str) -> None:
    broker.order(key, n=2)
    job = broker.job(key)
    # Whose job it is; lock, store and conclude in a transaction, then its COMMIT.
    cost = cost_of(lambda: broker.submit(key, job.id))
    assert_costs(cost, statements=4, round_trips=5, transactions=1)


def test_a_submit_that_somebody_waits_for(broker: Broker, key: str) -> None:
    for _ in range(2):
        broker.world.request(attached=True)
        job = broker.job(key, progress=True, slots=1)
        with counting() as cost:
            broker.submit(key, job.id)
    # As any other, and between the locks the one on the job and what was posted of it.
    assert_costs(cost, statements=6, round_trips=7, transactions=1)


def test_the_submit_that_completes_a_request_costs_no_more(broker: Broker, key: str) -> None:
    broker.order(key)
    job = broker.job(key)
    cost = cost_of(lambda: broker.submit(key, job.id))
    assert_costs(cost, statements=4, round_trips=5, transactions=1)


def test_a_post_costs_as_much_for_one_job_as_for_many(broker: Broker, key: str) -> None:
    broker.order(key, n=20)
    broker.order(key, n=20)
    jobs = [job.id for job in broker.pop(key, slots=40, progress=True).jobs]
    assert len(jobs) == 40
    warm, first, *others = jobs

    def post(some: list[uuid.UUID], count: int = 0) -> Cost:
        chunks = [Chunk(job, token_ids=range(count), text="x" * count) for job in some]
        return cost_of(lambda: post_progress(broker.context, key, "worker", chunks))

    post_progress(broker.context, key, "worker", [Chunk(warm, token_ids=[1], text="x")])
    # The user and the worker; lock, read and start in a transaction, then its COMMIT.
    for some in ([first], others):
        assert_costs(post(some), statements=5, round_trips=6, transactions=1)
    # Their leases are young now.
    for some in ([first], others):
        assert_costs(post(some), statements=4, round_trips=5, transactions=1)
    # What is kept costs one more, however many jobs brought something.
    for some in ([first], others):
        assert_costs(post(some, 3), statements=5, round_trips=6, transactions=1)


def test_a_post_writes_no_row_that_it_need_not(broker: Broker, key: str) -> None:
    broker.order(key, n=20)
    jobs = [job.id for job in broker.pop(key, slots=20, progress=True).jobs]

    def written(*chunks: Chunk) -> dict[str, int]:
        before = versions(broker)
        post_progress(broker.context, key, "worker", chunks)
        return {table: len(rows - before[table]) for table, rows in versions(broker).items()}

    nothing = {"requests": 0, "slots": 0, "jobs": 0, "progress": 0, "events": 0, "workers": 0}
    alive = [Chunk(job) for job in jobs]
    assert written(*alive) == {**nothing, "jobs": 20}, "all begin"
    assert written(*alive) == nothing
    assert written(Chunk(jobs[0], token_ids=[1], text="x"), *alive[1:]) == {**nothing, "progress": 1}
    assert written(Chunk(jobs[0], token_ids=[1], text="x"), *alive[1:]) == nothing, "a repeat"
    broker.world.advance(RENEW_AFTER + 1)
    assert written(*alive[:3]) == {**nothing, "jobs": 3, "workers": 1}


def test_a_post_without_jobs(broker: Broker, key: str) -> None:
    post_progress(broker.context, key, "worker", [])
    # The user and the worker.
    cost = cost_of(lambda: post_progress(broker.context, key, "worker", []))
    assert_costs(cost, statements=2, round_trips=2, transactions=0)


def test_a_fault_that_puts_back(broker: Broker, key: str) -> None:
    broker.order(key)
    job = broker.job(key)
    # Whose job it is; lock request and jobs, settle, overdue, conclude, enter the queue; COMMIT.
    cost = cost_of(lambda: broker.submit(key, job.id, state="faulted"))
    assert_costs(cost, statements=7, round_trips=8, transactions=1)


def test_a_status_of_what_waits(broker: Broker, key: str) -> None:
    request = broker.order(key)
    # The request with its results in one; its place in the queue; whether anybody can serve it.
    cost = cost_of(lambda: broker.status(request))
    assert_costs(cost, statements=3, round_trips=3, transactions=0)


def test_a_status_of_what_runs(broker: Broker, key: str) -> None:
    request = broker.order(key)
    broker.job(key)
    cost = cost_of(lambda: broker.status(request))
    assert_costs(cost, statements=2, round_trips=2, transactions=0)


def test_a_status_of_what_is_done(broker: Broker, key: str) -> None:
    request = broker.order(key, n=3)
    for job in broker.pop(key, amount=3).jobs:
        broker.submit(key, job.id)
    assert broker.status(request).done
    cost = cost_of(lambda: broker.status(request))
    assert_costs(cost, statements=1, round_trips=1, transactions=0)
