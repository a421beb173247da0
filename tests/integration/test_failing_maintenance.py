"""Maintenance that fails: no timer stops for it, and one event that cannot be folded does not keep the others waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog
from sqlalchemy.exc import ProgrammingError
from structlog.testing import capture_logs

from horde.maintenance import folds
from horde.maintenance.folds import fold
from horde.maintenance.scheduler import Maintenance
from tests.support.broker import Broker, open_broker
from tests.support.concurrency import together
from tests.support.invariants import check_invariants


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url, rate_limits="off") as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner", kudos=100).api_key


@pytest.fixture(autouse=True)
def every_level() -> Iterator[None]:
    """Whatever level and place of the log another test has configured."""
    before = structlog.get_config()
    structlog.reset_defaults()
    yield
    structlog.configure(**before)


@contextmanager
def away(broker: Broker, table: str) -> Iterator[None]:
    """A database without this table, for a while: every statement that names it fails."""
    with broker.context.database.transaction() as tx:
        tx.execute(f"ALTER TABLE {table} RENAME TO away")
    try:
        yield
    finally:
        with broker.context.database.transaction() as tx:
            tx.execute(f"ALTER TABLE away RENAME TO {table}")


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


@pytest.mark.parametrize(
    ("step", "table"),
    [("beat", "heartbeat"), ("renew", "leader"), ("run_pass", "jobs"), ("run_fold", "events_unfolded")],
)
def test_no_error_of_the_database_stops_a_timer_and_none_is_told_in_full(broker: Broker, step: str, table: str) -> None:
    maintenance = Maintenance(broker.context)
    maintenance.renew()
    with capture_logs() as logs, away(broker, table):
        getattr(maintenance, step)()
    assert logs == [{"event": "maintenance.step_failed", "log_level": "warning", "error": "ProgrammingError"}]
    # With the next tick it goes on.
    with capture_logs() as logs:
        getattr(maintenance, step)()
    assert logs == []


# --- an event that cannot be folded

SET_ASIDE = "SELECT event_id, error FROM events_set_aside ORDER BY event_id"

# (columns of an event that no fold can count, what PostgreSQL or Python says of it)
BAD_EVENTS = {
    "of a user who is not there": ("'enqueued', 999999, NULL, 0, 0", "IntegrityError"),
    "paid by a user who is not there": ("'enqueued', 999999, NULL, 100, 0", "KeyError"),
    "earned by nobody": ("'stored', 0, NULL, 200, 100", "TypeError"),
    "of an amount that no balance holds": (
        "'stored', 0, %(owner)s, 9223372036854775807, 9223372036854775807",
        "DataError",
    ),
}


def bad_event(broker: Broker, key: str, what: str) -> int:
    """An event that cannot be folded; its id."""
    owner = broker.world.scalar("SELECT id FROM users WHERE name = 'owner'")
    with broker.context.database.transaction() as tx:
        return int(
            tx.execute(
                f"""WITH event AS (
                INSERT INTO events (at, request_kind, request_id, model, kind, user_id, owner_id, price, reward)
                SELECT horde_now(), 'text', gen_random_uuid(), 'm', {BAD_EVENTS[what][0]} RETURNING id)
                INSERT INTO events_unfolded (event_id) SELECT id FROM event RETURNING event_id""",
                {"owner": owner},
            ).scalar_one()
        )


@pytest.mark.parametrize("what", BAD_EVENTS)
def test_an_event_that_cannot_be_folded_is_set_aside_and_the_others_are_folded(
    broker: Broker, key: str, what: str
) -> None:
    live(broker, key, rounds=3)
    bad = bad_event(broker, key, what)
    live(broker, key, rounds=3)
    waiting = unfolded(broker)

    assert fold(broker.context) == waiting - 1

    assert broker.world.rows("SELECT event_id FROM events_unfolded") == [(bad,)]
    assert broker.world.rows(SET_ASIDE) == [(bad, BAD_EVENTS[what][1])]
    assert broker.world.scalar("SELECT count(*) FROM ledger WHERE event_id = %(id)s", id=bad) == 0
    fulfilled = broker.world.scalar("SELECT count(*) FROM events WHERE kind = 'stored' AND worker_id IS NOT NULL")
    assert broker.world.scalar("SELECT sum(fulfilled) FROM worker_totals") == fulfilled == 12


def test_an_event_set_aside_is_not_tried_again_until_it_is_taken_back(broker: Broker, key: str) -> None:
    bad = bad_event(broker, key, "of a user who is not there")
    assert fold(broker.context) == 0
    live(broker, key)
    waiting = unfolded(broker)
    assert fold(broker.context) == waiting - 1
    assert fold(broker.context) == 0
    assert unfolded(broker) == 1

    # Whoever has mended the cause says so.
    with broker.context.database.transaction() as tx:
        tx.execute("INSERT INTO users (id, name, key_hash, created_at) VALUES (999999, 'late', 'h', horde_now())")
        tx.execute("DELETE FROM events_set_aside WHERE event_id = %(id)s", {"id": bad})
    assert fold(broker.context) == 1
    assert unfolded(broker) == 0
    check_invariants(broker.context.database, folded=True)


def test_many_events_that_cannot_be_folded_are_all_set_aside_by_folds_at_once(
    broker: Broker, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "BATCH", 16)
    bad = []
    for _ in range(4):
        live(broker, key)
        bad += [bad_event(broker, key, what) for what in BAD_EVENTS]
    waiting = unfolded(broker)
    folded = sum(together(*[lambda: fold(broker.context)] * 4))
    # One fold may see nothing left while another one still halves.
    folded += fold(broker.context)
    assert folded == waiting - len(bad)
    assert [event for event, _ in broker.world.rows(SET_ASIDE)] == bad
    assert [event for (event,) in broker.world.rows("SELECT event_id FROM events_unfolded ORDER BY 1")] == bad


def test_a_fold_that_fails_for_another_reason_sets_nothing_aside(broker: Broker, key: str) -> None:
    live(broker, key)
    waiting = unfolded(broker)
    with away(broker, "totals_minute"), pytest.raises(ProgrammingError):
        fold(broker.context)
    assert (unfolded(broker), broker.world.rows(SET_ASIDE)) == (waiting, [])
    assert fold(broker.context) == waiting
    check_invariants(broker.context.database, folded=True)


def test_an_event_set_aside_is_told_of_once_by_number_and_type(broker: Broker, key: str) -> None:
    maintenance = Maintenance(broker.context)
    maintenance.renew()
    bad = bad_event(broker, key, "paid by a user who is not there")
    with capture_logs() as logs:
        maintenance.run_fold()
        maintenance.run_fold()
    # The number says which row an admin has to look at.
    assert logs == [{"event": "fold.event_set_aside", "log_level": "error", "event_id": bad, "error": "KeyError"}]
