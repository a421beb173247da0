"""The fold: each event counted once, whatever dies or runs at the same time; figures equal to a count of the events."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from horde.db.database import Transaction
from horde.kudos.ledger import APPEND_LINES
from horde.maintenance import folds
from horde.maintenance.folds import BATCH, fold, fold_batch
from horde.statistics.fold import ADD_ABORT_HOURS, ADD_USER_TOTALS, ADD_WORKER_TOTALS, CLAIM_UNFOLDED
from tests.support.broker import Broker, open_broker
from tests.support.concurrency import Stage, together
from tests.support.invariants import check_invariants


class Died(Exception):  # noqa: N818 not an error of ours
    """What ends a process in the middle of its transaction."""


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url, rate_limits="off") as made:
        yield made


@pytest.fixture
def stage(broker: Broker) -> Iterator[Stage]:
    with Stage(broker.context.database) as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner", kudos=100).api_key


def live(broker: Broker, key: str, rounds: int = 1) -> None:
    """Orders of every kind of ending: stored, faulted twice, released, cancelled by nobody."""
    client = broker.user(kudos=100).api_key
    for _ in range(rounds):
        broker.order(client, n=2)
        for job in broker.pop(key, amount=2).jobs:
            broker.submit(key, job.id, "x" * 100)
        broker.order(client)
        broker.submit(key, broker.job(key).id, state="released")
        for _ in range(2):
            broker.submit(key, broker.job(key).id, state="faulted")


def unfolded(broker: Broker) -> int:
    return int(broker.world.scalar("SELECT count(*) FROM events_unfolded"))


def figures(broker: Broker) -> dict[str, list[tuple[object, ...]]]:
    """Every folded figure."""
    queries = {
        "balances": "SELECT id, balance FROM accounts ORDER BY id",
        "lines": "SELECT event_id, account_id, amount FROM ledger WHERE event_id IS NOT NULL ORDER BY event_id, account_id, amount",
        "workers": "SELECT worker_id, claimed, fulfilled, aborted, tokens, earned FROM worker_totals ORDER BY worker_id",
        "users": "SELECT * FROM user_totals ORDER BY user_id",
        "hours": "SELECT * FROM abort_hours ORDER BY worker_id, model, reason",
        "minutes": """SELECT request_kind, model, sum(results) AS results, sum(tokens) AS tokens FROM totals_minute
            GROUP BY 1, 2 ORDER BY 1, 2""",
    }
    return {name: broker.world.rows(query) for name, query in queries.items()}


def counted(broker: Broker) -> dict[str, list[tuple[object, ...]]]:
    """The same figures counted from the events, as far as they are plain sums."""
    aborted = "kind = 'faulted' AND reason <> 'release_cap'"
    queries = {
        "workers": f"""SELECT worker_id, count(*) FILTER (WHERE kind = 'claimed') AS claimed,
            count(*) FILTER (WHERE kind = 'stored') AS fulfilled, count(*) FILTER (WHERE {aborted}) AS aborted,
            sum(tokens) AS tokens, sum(reward) AS earned
            FROM events WHERE worker_id IS NOT NULL GROUP BY worker_id ORDER BY worker_id""",
        "users": """SELECT u.id, count(*) FILTER (WHERE e.kind = 'enqueued' AND e.user_id = u.id) AS requests,
            count(*) FILTER (WHERE e.kind = 'stored' AND e.user_id = u.id) AS results,
            coalesce(sum(e.tokens) FILTER (WHERE e.kind = 'stored' AND e.user_id = u.id), 0) AS tokens,
            coalesce(sum(e.price) FILTER (WHERE e.user_id = u.id), 0) AS spent,
            count(*) FILTER (WHERE e.kind = 'stored' AND e.owner_id = u.id) AS fulfilled,
            coalesce(sum(e.tokens) FILTER (WHERE e.kind = 'stored' AND e.owner_id = u.id), 0) AS tokens_generated,
            coalesce(sum(e.reward) FILTER (WHERE e.owner_id = u.id), 0) AS earned
            FROM users u JOIN events e ON u.id = e.user_id OR (u.id = e.owner_id AND e.kind = 'stored')
            GROUP BY u.id ORDER BY u.id""",
        "minutes": """SELECT request_kind, model, count(*) AS results, sum(tokens) AS tokens FROM events WHERE kind = 'stored'
            GROUP BY 1, 2 ORDER BY 1, 2""",
    }
    return {name: broker.world.rows(query) for name, query in queries.items()}


def assert_folded_once(broker: Broker) -> None:
    check_invariants(broker.context.database, folded=True)
    found, wanted = figures(broker), counted(broker)
    for name, rows in wanted.items():
        assert found[name] == rows, name


def test_a_fold_counts_every_event_into_every_figure(broker: Broker, key: str) -> None:
    live(broker, key, rounds=2)
    assert fold(broker.context) > 0
    assert unfolded(broker) == 0
    assert_folded_once(broker)
    hours = broker.world.rows("SELECT reason, sum(count)::int FROM abort_hours GROUP BY reason ORDER BY reason")
    assert hours == [("reported", 4), ("taken", 10)]


def test_a_second_fold_finds_nothing_and_changes_nothing(broker: Broker, key: str) -> None:
    live(broker, key)
    fold(broker.context)
    before = figures(broker)
    assert fold(broker.context) == 0
    assert figures(broker) == before


def test_figures_grow_by_what_came_since_the_last_fold(broker: Broker, key: str) -> None:
    for _ in range(3):
        live(broker, key)
        fold(broker.context)
        assert_folded_once(broker)


def test_a_backlog_of_several_batches_is_folded_in_one_go(
    broker: Broker, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "BATCH", 7)
    live(broker, key, rounds=3)
    waiting = unfolded(broker)
    assert fold(broker.context) == waiting > 3 * 7
    assert_folded_once(broker)


def test_a_fold_takes_no_more_than_a_batch_at_a_time(broker: Broker, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "BATCH", 5)
    live(broker, key)
    waiting = unfolded(broker)
    assert broker.context.database.run(functools.partial(fold_batch, max_aborts=BATCH)) == 5
    assert unfolded(broker) == waiting - 5


def test_two_folds_at_once_take_different_events(broker: Broker, key: str, stage: Stage) -> None:
    live(broker, key)
    waiting = unfolded(broker)
    first = stage.hold(lambda: fold(broker.context), after=CLAIM_UNFOLDED)
    # The other one finds nothing that is not taken, and need not wait to know.
    assert stage.start(lambda: fold(broker.context)).result() == 0
    # What comes meanwhile is for whoever looks next.
    broker.order(key)
    assert stage.start(lambda: fold(broker.context)).result() == 1
    first.go_on()
    assert first.result() == waiting
    assert_folded_once(broker)


def test_many_folds_at_once_count_everything_once(broker: Broker, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folds, "BATCH", 3)
    for _ in range(3):
        live(broker, key, rounds=2)
        waiting = unfolded(broker)
        assert sum(together(*[lambda: fold(broker.context)] * 6)) == waiting
        assert_folded_once(broker)


@pytest.mark.parametrize(
    "moment",
    [CLAIM_UNFOLDED, APPEND_LINES, ADD_WORKER_TOTALS, ADD_USER_TOTALS, ADD_ABORT_HOURS],
    ids=["claimed", "ledger", "workers", "users", "hours"],
)
def test_a_fold_that_dies_half_way_counts_nothing_and_the_next_one_all(
    broker: Broker, key: str, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    live(broker, key)
    before, waiting = figures(broker), unfolded(broker)
    execute = Transaction.execute

    def dies(self: Transaction, statement: str, parameters: object = None) -> object:
        result = execute(self, statement, parameters)  # type: ignore[arg-type]
        if statement == moment:
            raise Died
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "execute", dies)
        with pytest.raises(Died):
            fold(broker.context)
    assert (figures(broker), unfolded(broker)) == (before, waiting)
    assert fold(broker.context) == waiting
    assert_folded_once(broker)


def test_a_fold_whose_connection_is_cut_is_done_again_and_counts_once(broker: Broker, key: str, stage: Stage) -> None:
    live(broker, key)
    waiting = unfolded(broker)
    folding = stage.hold(lambda: fold(broker.context), after=APPEND_LINES)
    assert broker.world.scalar("SELECT pg_terminate_backend(%(pid)s)", pid=folding.backend)
    folding.go_on()
    assert folding.result() == waiting
    assert_folded_once(broker)


def test_an_event_committed_late_with_an_early_id_is_folded_all_the_same(broker: Broker, key: str) -> None:
    # Ids are given before the commit: this order's event comes to light after later ones have been folded.
    slow = broker.context.database.engine.connect()
    try:
        slow.exec_driver_sql("BEGIN")
        late = slow.exec_driver_sql(
            "INSERT INTO events (at, kind, request_kind, request_id, user_id, price) "
            "VALUES (horde_now(), 'enqueued', 'text', gen_random_uuid(), 0, 100) RETURNING id"
        ).scalar_one()
        slow.exec_driver_sql(f"INSERT INTO events_unfolded VALUES ({late})")
        broker.order(key)
        assert fold(broker.context) == 1
        slow.exec_driver_sql("COMMIT")
    finally:
        slow.close()
    assert fold(broker.context) == 1
    assert broker.world.scalar("SELECT count(*) FROM ledger WHERE event_id = %(id)s AND amount < 0", id=late) == 1


# --- what is not folded yet is shown all the same


def test_a_workers_figures_show_a_settlement_at_once_and_the_fold_changes_nothing_about_them(
    broker: Broker, key: str
) -> None:
    live(broker, key)
    fresh = broker.worker()
    assert (fresh.requests_fulfilled, fresh.uncompleted_jobs, fresh.tokens_generated) == (2, 2, 50)
    assert fresh.kudos_rewards > 0
    fold(broker.context)
    folded = broker.worker()
    for name in ("requests_fulfilled", "uncompleted_jobs", "tokens_generated", "kudos_rewards", "kudos_details"):
        assert getattr(folded, name) == getattr(fresh, name), name

    live(broker, key)
    both = broker.worker()
    assert (both.requests_fulfilled, both.uncompleted_jobs, both.tokens_generated) == (4, 4, 100)


def test_a_users_figures_show_a_settlement_at_once_and_the_fold_changes_nothing_about_them(
    broker: Broker, key: str
) -> None:
    live(broker, key)
    client = "SELECT id FROM users WHERE name <> 'owner' AND id <> 0"
    fresh = broker.find_user(key)
    assert fresh.contributions["fulfillments"] == 2
    assert fresh.records["contribution"]["tokens"] == 50
    assert broker.world.scalar(f"SELECT count(*) FROM user_totals WHERE user_id IN ({client})") == 0
    fold(broker.context)
    folded = broker.find_user(key)
    for name in ("kudos", "kudos_details", "usage", "contributions", "records"):
        assert getattr(folded, name) == getattr(fresh, name), name


def test_a_worker_that_was_deleted_leaves_its_payments_and_no_figures_of_nobody(broker: Broker, key: str) -> None:
    live(broker, key)
    with broker.context.database.transaction() as tx:
        tx.execute("DELETE FROM workers")
    fold(broker.context)
    assert broker.world.scalar("SELECT count(*) FROM worker_totals") == 0
    check_invariants(broker.context.database, folded=True)
