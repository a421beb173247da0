"""The speed of a worker: what it remembers, and that no figure, however odd, stops a read or the fold."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from horde.maintenance.folds import fold
from horde.usecases.horde_status import list_models
from tests.support.broker import Broker, open_broker

STORED = """WITH event AS (
    INSERT INTO events (at, kind, request_kind, request_id, job_id, user_id, worker_id, worker_name, owner_id, model, tokens,
                        timings)
    SELECT horde_now(), 'stored', 'text', gen_random_uuid(), gen_random_uuid(), 0, w.id, 'worker', w.owner_id, 'm', %(tokens)s,
           %(timings)s
    FROM workers w, generate_series(1, %(jobs)s) WHERE w.id = %(worker)s RETURNING id)
INSERT INTO events_unfolded (event_id) SELECT id FROM event"""

SPEED = "SELECT speed FROM worker_offers WHERE id = %(id)s"


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url, rate_limits="off") as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner", kudos=100).api_key


def unfolded(broker: Broker) -> int:
    return int(broker.world.scalar("SELECT count(*) FROM events_unfolded"))


def ran(broker: Broker, worker: uuid.UUID, *, seconds: float, jobs: int, tokens: int = 100) -> None:
    """The worker has stored so many results of `tokens` tokens, each in `seconds`."""
    ran_with(broker, worker, f'{{"run_ms": {round(1000 * seconds)}}}', jobs=jobs, tokens=tokens)


def ran_with(broker: Broker, worker: uuid.UUID, timings: str | None, *, jobs: int = 1, tokens: int = 100) -> None:
    with broker.context.database.transaction() as tx:
        tx.execute(STORED, {"worker": worker, "timings": timings, "jobs": jobs, "tokens": tokens})


def assert_everything_is_shown(broker: Broker, key: str) -> None:
    """Every read that a worker's speed goes into answers."""
    request = broker.order()
    broker.status(request)
    broker.find_user(key)
    list_models(broker.context, "text")
    broker.worker()
    broker.submit(key, broker.job(key).id)


def test_a_speed_remembers_the_last_jobs_more_than_the_first(broker: Broker, key: str) -> None:
    worker = broker.worker_id(key)
    ran(broker, worker, seconds=10, jobs=10)
    fold(broker.context)
    assert broker.world.scalar(SPEED, id=worker) == pytest.approx(10)
    # Ten times faster from now on: after ten such jobs the old ones weigh a third, however the folds cut them.
    ran(broker, worker, seconds=1, jobs=4)
    fold(broker.context)
    ran(broker, worker, seconds=1, jobs=6)
    fold(broker.context)
    kept = 0.9**10
    seconds = sum(0.9**i for i in range(10)) * (10 * kept + 1)
    tokens = 100 * sum(0.9**i for i in range(10)) * (kept + 1)
    assert broker.world.scalar(SPEED, id=worker) == pytest.approx(tokens / seconds)


def test_empty_results_say_nothing_about_a_speed(broker: Broker, key: str) -> None:
    worker = broker.worker_id(key)
    ran(broker, worker, seconds=10, jobs=5)
    ran(broker, worker, seconds=300, jobs=5, tokens=0)
    assert broker.worker().performance == "10.0 tokens per second"
    fold(broker.context)
    ran(broker, worker, seconds=300, jobs=5, tokens=0)
    fold(broker.context)
    assert broker.world.scalar(SPEED, id=worker) == pytest.approx(10)
    assert broker.worker().performance == "10.0 tokens per second"
    assert broker.worker().requests_fulfilled == 15


def test_ten_thousand_empty_results_of_one_worker_stop_no_fold(broker: Broker, key: str) -> None:
    worker = broker.worker_id(key)
    ran(broker, worker, seconds=10, jobs=1)
    for _ in range(2):
        ran(broker, worker, seconds=0.2, jobs=5000, tokens=0)
        fold(broker.context)
        assert unfolded(broker) == 0
    assert broker.world.scalar("SELECT fulfilled FROM worker_totals") == 10_001
    assert broker.world.scalar(SPEED, id=worker) == pytest.approx(10)
    assert_everything_is_shown(broker, key)


def test_ten_thousand_results_of_one_worker_make_a_speed(broker: Broker, key: str) -> None:
    worker = broker.worker_id(key)
    for seconds in (4, 2):
        ran(broker, worker, seconds=seconds, jobs=5000)
        fold(broker.context)
        assert broker.world.scalar(SPEED, id=worker) == pytest.approx(100 / seconds)
    assert_everything_is_shown(broker, key)


FIGURES = ("5e-324", "1e-310", "1e-7", "0", "-1", "1e308", "'Infinity'", "'NaN'")


@pytest.mark.parametrize("tokens", FIGURES)
def test_no_figure_of_a_worker_makes_a_read_or_the_fold_fail(broker: Broker, key: str, tokens: str) -> None:
    worker = broker.worker_id(key)
    for seconds in FIGURES:
        with broker.context.database.transaction() as tx:
            tx.execute("DELETE FROM worker_totals")
            tx.execute(
                "INSERT INTO worker_totals (worker_id, recent_tokens, recent_seconds) "
                f"VALUES (%(worker)s, {tokens}, {seconds})",
                {"worker": worker},
            )
        assert broker.world.scalar(SPEED, id=worker) is None
        assert_everything_is_shown(broker, key)
        # What such a row remembers is forgotten with the next job.
        ran(broker, worker, seconds=10, jobs=100)
        fold(broker.context)
        assert unfolded(broker) == 0
        assert broker.world.scalar(SPEED, id=worker) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    "timings",
    [
        None,
        "{}",
        "[]",
        "7",
        '{"run_ms": "soon"}',
        '{"run_ms": null}',
        '{"run_ms": -5}',
        '{"run_ms": [1]}',
        '{"run_ms": 1e400}',
    ],
)
def test_no_timings_of_a_job_make_a_read_or_the_fold_fail(broker: Broker, key: str, timings: str | None) -> None:
    worker = broker.worker_id(key)
    ran_with(broker, worker, timings)
    assert_everything_is_shown(broker, key)
    fold(broker.context)
    assert unfolded(broker) == 0
    assert_everything_is_shown(broker, key)
