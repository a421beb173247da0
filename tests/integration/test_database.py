"""The session scope: what a retry mends is retried, an outage is a 503, nothing leaks or stays in a transaction."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import exc

from horde.db.database import ATTEMPTS, Database, Prepared, Transaction, sqlalchemy_url
from horde.errors import HordeError, bad_request
from tests.support.relay import Relay

OpenDatabase = Callable[..., Database]


@pytest.fixture
def open_database(database_url: str) -> Iterator[OpenDatabase]:
    """Opens the test's database with other settings; closed at the end, and by then nothing may be borrowed."""
    opened: list[Database] = []

    def opens(url: str = database_url, **options: Any) -> Database:
        opened.append(Database(url, **options))
        return opened[-1]

    yield opens
    for database in opened:
        assert borrowed(database) == 0, "a connection was not given back"
        database.close()


@pytest.fixture(autouse=True)
def counters(db: Database) -> None:
    """Two rows to fight over."""
    with db.transaction() as tx:
        tx.execute("CREATE TABLE counters (name text PRIMARY KEY, value int NOT NULL CHECK (value < 1000))")
        tx.execute("INSERT INTO counters VALUES ('a', 0), ('b', 0)")


def add(name: str) -> Callable[[Transaction], None]:
    """Work of one statement."""

    def work(tx: Transaction) -> None:
        tx.execute("UPDATE counters SET value = value + 1 WHERE name = %(name)s", {"name": name})

    return work


def values(db: Database) -> dict[str, int]:
    with db.autocommit() as tx:
        return {row.name: row.value for row in tx.execute("SELECT name, value FROM counters")}


def borrowed(database: Database) -> int:
    return int(database.engine.pool.checkedout())  # type: ignore[attr-defined]


def fail_with(code: str) -> Callable[[Transaction], None]:
    """Work that the server refuses with this SQLSTATE."""

    def work(tx: Transaction) -> None:
        tx.execute(f"DO $$ BEGIN RAISE EXCEPTION 'as asked' USING ERRCODE = '{code}'; END $$")

    return work


def backends(db: Database) -> list[Any]:
    """Other connections of the broker to this database."""
    with db.autocommit() as tx:
        return list(
            tx.execute(
                "SELECT pid, state FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'horde'"
            )
        )


def terminate_all(db: Database) -> int:
    """Kill them, and wait until they are gone."""
    count = 0
    with db.autocommit() as tx:
        for backend in backends(db):
            if backend.pid != tx.execute("SELECT pg_backend_pid()").scalar_one():
                tx.execute("SELECT pg_terminate_backend(%(pid)s, 10000)", {"pid": backend.pid})
                count += 1
    return count


# Retries


def test_the_victim_of_a_deadlock_tries_again_and_both_succeed(db: Database) -> None:
    both_hold_one = threading.Barrier(2)
    attempts = []

    def cross(first: str, second: str) -> None:
        waits = True

        def work(tx: Transaction) -> None:
            nonlocal waits
            attempts.append(first)
            add(first)(tx)
            if waits:
                waits = False
                both_hold_one.wait(timeout=10)
            add(second)(tx)

        db.run(work)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(cross, "a", "b"), pool.submit(cross, "b", "a")]:
            done.result(timeout=30)
    assert values(db) == {"a": 2, "b": 2}
    assert len(attempts) == 3, "one of the two ran twice"


def test_a_serialisation_failure_is_tried_again(db: Database, open_database: OpenDatabase) -> None:
    strict = open_database(settings={"default_transaction_isolation": "repeatable read"})
    seen = []

    def work(tx: Transaction) -> None:
        seen.append(tx.execute("SELECT value FROM counters WHERE name = 'a'").scalar_one())
        if len(seen) == 1:
            db.run(add("a"))
        add("a")(tx)

    strict.run(work)
    assert seen == [0, 1], "a fresh transaction sees the other's change"
    assert values(db)["a"] == 2


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_an_error_that_every_attempt_meets_ends_as_a_503(db: Database, code: str) -> None:
    attempts = []

    def work(tx: Transaction) -> None:
        attempts.append(1)
        add("a")(tx)
        fail_with(code)(tx)

    with pytest.raises(HordeError) as caught:
        db.run(work)
    assert (caught.value.status, caught.value.retryable) == (503, True)
    assert caught.value.retry_after
    assert len(attempts) == ATTEMPTS
    assert values(db)["a"] == 0


@pytest.mark.parametrize("scope", ["transaction", "autocommit"])
def test_a_scope_without_retries_answers_a_deadlock_with_a_503(db: Database, scope: str) -> None:
    with pytest.raises(HordeError) as caught, getattr(db, scope)() as tx:
        fail_with("40P01")(tx)
    assert caught.value.status == 503


SERVER_CANNOT = {
    "lock timeout": "55P03",
    "statement timeout": "57014",
    "read only": "25006",
    "disk full": "53100",
    "too many connections": "53300",
    "starting up": "57P03",
}


@pytest.mark.parametrize("scope", ["run", "read", "transaction", "autocommit"])
def test_a_server_that_cannot_is_a_503_at_once(db: Database, scope: str) -> None:
    attempts = []
    for number, (name, code) in enumerate(SERVER_CANNOT.items(), start=1):

        def work(tx: Transaction, code: str = code) -> None:
            attempts.append(code)
            fail_with(code)(tx)

        with pytest.raises(HordeError) as caught:
            through(db, scope, work)
        assert (caught.value.status, len(attempts)) == (503, number), name


def through(db: Database, scope: str, work: Callable[[Transaction], None]) -> None:
    """Do `work` in one of the four scopes."""
    if scope in {"run", "read"}:
        getattr(db, scope)(work)
        return
    with getattr(db, scope)() as tx:
        work(tx)


# Lost connections


@pytest.mark.parametrize("scope", ["run", "read"])
def test_pooled_connections_that_died_are_replaced_unseen(
    db: Database, open_database: OpenDatabase, scope: str
) -> None:
    broker = open_database(pool=4)
    fill_pool(broker, 4)
    assert terminate_all(db) == 4
    seen = getattr(broker, scope)(lambda tx: tx.execute("SELECT value FROM counters WHERE name = 'a'").scalar_one())
    assert seen == 0


def fill_pool(database: Database, size: int) -> None:
    """Open every connection of the pool."""
    with contextlib.ExitStack() as stack:
        for _ in range(size):
            stack.enter_context(database.transaction()).execute("SELECT 1")


@pytest.mark.parametrize("statements_before", [0, 1, 3])
def test_a_connection_that_dies_before_the_commit_costs_an_attempt_and_is_done_once(
    db: Database, open_database: OpenDatabase, statements_before: int
) -> None:
    broker = open_database()
    attempts = []

    def work(tx: Transaction) -> None:
        attempts.append(1)
        for _ in range(statements_before):
            add("b")(tx)
        if len(attempts) == 1:
            terminate_all(db)
        add("a")(tx)

    broker.run(work)
    assert len(attempts) == 2
    assert values(db) == {"a": 1, "b": statements_before}


@pytest.mark.parametrize("statements", [1, 2])
def test_a_commit_whose_answer_is_lost_is_not_repeated(
    db: Database, open_database: OpenDatabase, database_url: str, statements: int
) -> None:
    def work(tx: Transaction) -> None:
        for _ in range(statements):
            add("a")(tx)

    with Relay(database_url) as relay:
        broker = open_database(relay.url)
        relay.lose_next_commit()
        with pytest.raises(HordeError) as caught:
            broker.run(work)
        assert (caught.value.status, relay.commits_lost) == (503, 1)
        assert values(db)["a"] == statements
        broker.run(add("b"))
    assert values(db)["b"] == 1


@pytest.mark.parametrize("scope", ["run", "read", "transaction", "autocommit"])
def test_a_server_out_of_reach_is_a_503_until_it_is_back(
    open_database: OpenDatabase, database_url: str, scope: str
) -> None:
    with Relay(database_url) as relay:
        broker = open_database(relay.url, pool=3)
        fill_pool(broker, 3)
        relay.cut()
        for _ in range(5):
            begun = time.monotonic()
            with pytest.raises(HordeError) as caught:
                through(broker, scope, add("a"))
            assert (caught.value.status, caught.value.rc) == (503, "Unavailable")
            assert time.monotonic() - begun < 5
        relay.restore()
        through(broker, scope, add("a"))
        assert values(broker)["a"] == 1


def test_a_lost_connection_in_a_plain_transaction_is_a_503_and_leaves_nothing(
    db: Database, open_database: OpenDatabase
) -> None:
    def work(tx: Transaction) -> None:
        add("a")(tx)
        terminate_all(db)
        add("b")(tx)

    with pytest.raises(HordeError) as caught:
        through(open_database(), "transaction", work)
    assert caught.value.status == 503
    assert values(db) == {"a": 0, "b": 0}


# The pool


def test_a_pool_in_use_is_a_503_within_the_wait_and_recovers_at_once(open_database: OpenDatabase) -> None:
    broker = open_database(pool=2, pool_wait=0.3)
    with broker.transaction(), broker.transaction():
        for scope in ("run", "read", "transaction", "autocommit"):
            begun = time.monotonic()
            with pytest.raises(HordeError) as caught:
                through(broker, scope, add("a"))
            waited = time.monotonic() - begun
            assert (caught.value.status, caught.value.retryable) == (503, True)
            assert 0.25 < waited < 2, "it waits once, not once an attempt"
    broker.run(add("a"))
    assert values(broker)["a"] == 1


def test_many_threads_share_a_small_pool_and_nobody_is_turned_away(open_database: OpenDatabase) -> None:
    broker = open_database(pool=3, pool_wait=20)
    with ThreadPoolExecutor(32) as threads:
        for done in [threads.submit(broker.run, add("a")) for _ in range(200)]:
            done.result(timeout=30)
    assert values(broker)["a"] == 200


class Stopped(BaseException):
    """Like the exit of a thread that was told to stop."""


FAILURES: dict[str, Callable[[Transaction], Any]] = {
    "an answer": lambda _tx: (_ for _ in ()).throw(bad_request("no")),
    "a bug": lambda _tx: dict[str, int]()["missing"],
    "an exit": lambda _tx: (_ for _ in ()).throw(Stopped()),
    "a violated check": lambda tx: tx.execute("UPDATE counters SET value = 1000"),
    "wrong SQL": lambda tx: tx.execute("SELEC 1"),
    "a wrong parameter": lambda tx: tx.execute("SELECT %(missing)s"),
    "an outage": fail_with("53100"),
    "a deadlock": fail_with("40P01"),
}


@pytest.mark.parametrize("scope", ["run", "read", "transaction", "autocommit"])
def test_an_error_gives_the_connection_back_and_undoes_its_transaction(
    db: Database, open_database: OpenDatabase, scope: str
) -> None:
    broker = open_database(pool=1, pool_wait=0.5)
    for name, failure in FAILURES.items():

        def work(tx: Transaction, failure: Callable[[Transaction], Any] = failure) -> None:
            if scope in {"run", "transaction"}:
                add("a")(tx)
            failure(tx)

        for _ in range(3):
            with pytest.raises(BaseException) as caught:
                through(broker, scope, work)
            assert not isinstance(caught.value.__cause__, exc.TimeoutError), name
            assert borrowed(broker) == 0, name
        assert values(db) == {"a": 0, "b": 0}, name
        assert [backend.state for backend in backends(db)] in ([], ["idle"]), name
    broker.run(add("a"))
    assert values(db)["a"] == 1


def test_what_is_no_outage_is_not_dressed_up_as_one(db: Database) -> None:
    with pytest.raises(exc.IntegrityError):
        db.run(FAILURES["a violated check"])
    with pytest.raises(exc.ProgrammingError):
        db.run(FAILURES["wrong SQL"])


# What a connection is set to


def test_a_read_only_server_is_a_503_that_still_reads(db: Database, open_database: OpenDatabase) -> None:
    standby = open_database(settings={"default_transaction_read_only": "on"})
    for scope in ("run", "transaction", "autocommit"):
        with pytest.raises(HordeError) as caught:
            through(standby, scope, add("a"))
        assert caught.value.status == 503
    assert values(standby) == {"a": 0, "b": 0}


def test_a_transaction_rolls_back_on_a_connection_that_was_in_autocommit_before(open_database: OpenDatabase) -> None:
    def work(tx: Transaction) -> None:
        add("a")(tx)
        FAILURES["a bug"](tx)

    broker = open_database(pool=1)
    for _ in range(2):
        assert values(broker) == {"a": 0, "b": 0}
        with pytest.raises(KeyError):
            through(broker, "transaction", work)


def test_a_handler_stuck_inside_a_transaction_loses_its_locks(db: Database, open_database: OpenDatabase) -> None:
    def work(tx: Transaction) -> None:
        add("a")(tx)
        # Gets the row only when the server has ended the session of the line above.
        db.run(add("a"))
        add("b")(tx)

    stuck = open_database(settings={"idle_in_transaction_session_timeout": "100ms"})
    with pytest.raises(HordeError) as caught:
        through(stuck, "transaction", work)
    assert caught.value.status == 503
    assert values(db) == {"a": 1, "b": 0}


def test_every_connection_has_the_limits_that_keep_one_handler_from_blocking_the_rest(db: Database) -> None:
    names = ("idle_in_transaction_session_timeout", "statement_timeout", "TimeZone", "transaction_isolation")
    with db.transaction() as tx:
        found = {name: tx.execute(f"SHOW {name}").scalar_one() for name in names}
    assert found == {
        "idle_in_transaction_session_timeout": "15s",
        "statement_timeout": "30s",
        "TimeZone": "UTC",
        "transaction_isolation": "read committed",
    }


def test_nothing_is_idle_in_transaction_after_a_storm(db: Database, open_database: OpenDatabase) -> None:
    broker = open_database(pool=4, pool_wait=0.2)

    def storm(number: int) -> None:
        scope = ("run", "read", "transaction", "autocommit")[number % 4]
        with contextlib.suppress(HordeError, KeyError, exc.DBAPIError, Stopped):
            through(broker, scope, list(FAILURES.values())[number % len(FAILURES)])

    with ThreadPoolExecutor(16) as threads:
        for done in [threads.submit(storm, number) for number in range(200)]:
            done.result(timeout=30)
    assert borrowed(broker) == 0
    assert {backend.state for backend in backends(db)} <= {"idle"}


@pytest.mark.parametrize("url", ["postgres://h/d", "postgresql://h/d", "postgresql+psycopg2://h/d"])
def test_any_spelling_of_a_postgresql_url_is_taken(url: str) -> None:
    assert sqlalchemy_url(url) == "postgresql+psycopg2://h/d"


# Prepared statements


def test_a_statement_that_could_not_be_planned_again_is_planned_by_the_next_call(
    db: Database, open_database: OpenDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = open_database(pool=1, settings={"lock_timeout": "50ms"})
    count = Prepared("SELECT count(*) FROM counters WHERE value = %(value)s")

    def work(tx: Transaction) -> int:
        return int(tx.execute(count, {"value": 0}).scalar_one())

    assert broker.run(work) == 2
    monkeypatch.setattr("horde.db.database.PLAN_AGE", 0)
    with db.transaction() as tx:
        tx.execute("LOCK TABLE counters IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(HordeError):
            broker.run(work)
    assert [broker.run(work) for _ in range(3)] == [2, 2, 2]


def test_a_prepared_statement_survives_the_rollback_of_the_transaction_that_first_ran_it(
    open_database: OpenDatabase,
) -> None:
    broker = open_database(pool=1)
    count = Prepared("SELECT count(*) FROM counters WHERE value = %(value)s")

    def fails(tx: Transaction) -> None:
        tx.execute(count, {"value": 0})
        FAILURES["a bug"](tx)

    for _ in range(2):
        with pytest.raises(KeyError):
            broker.run(fails)
    assert broker.run(lambda tx: tx.execute(count, {"value": 0}).scalar_one()) == 2
