"""The migrations: they make what the mappings say, go back a step, and can meet a second broker doing the same."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import closing

import psycopg2
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from horde.db import migrate
from horde.db.database import Database
from horde.db.tables import Base
from tests.support.catalog import TABLES, describe

LARGEST_INT4 = 2**31 - 1
EMPTY: dict[str, list[str]] = {
    kind: [] for kind in ("columns", "indexes", "constraints", "triggers", "functions", "others")
}

# One row of each table with an identity, by the values it cannot do without.
ROWS: dict[str, Callable[[], str]] = {
    "users": lambda: f"(name, key_hash, created_at) VALUES ('x', '{uuid.uuid4().hex}', now())",
    "accounts": lambda: "(kind, user_id) SELECT 'user', max(id) FROM users",
    "ledger": lambda: (
        "(entry_id, account_id, amount, reason, created_at) "
        f"SELECT '{uuid.uuid4()}', max(id), 0, 'x', now() FROM accounts"
    ),
    "events": lambda: f"(at, kind, request_kind, request_id, user_id) VALUES (now(), 'x', 'text', '{uuid.uuid4()}', 0)",
    "outages": lambda: "(begun, ended) VALUES (now(), now())",
}

IDENTITIES = """
SELECT c.relname AS name, a.attname AS column, format_type(a.atttypid, NULL) AS type,
       pg_get_serial_sequence(c.relname, a.attname) AS sequence
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnum > 0
  AND pg_get_serial_sequence(c.relname, a.attname) IS NOT NULL
-- An account needs a user to belong to.
ORDER BY c.relname = 'accounts', c.relname
"""

# The ids of rows and everything that refers to one; `id` of a one-row table is no id.
ID_COLUMNS = """
SELECT c.relname || '.' || a.attname AS name, format_type(a.atttypid, NULL) AS type
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND (a.attname = 'id' OR a.attname ~ '_id$')
  AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = c.oid AND k.conname LIKE '%%one_row')
"""


def revisions(url: str) -> list[str]:
    """All revisions, newest first."""
    return [script.revision for script in ScriptDirectory.from_config(migrate.config(url)).walk_revisions()]


def test_upgrading_an_empty_database_gives_what_the_mappings_say(database_url: str, empty_database_url: str) -> None:
    engine = sa.create_engine(empty_database_url)
    try:
        Base.metadata.create_all(engine)
    finally:
        engine.dispose()
    assert describe(database_url, TABLES) == describe(empty_database_url, TABLES)


def test_alembic_itself_finds_nothing_left_to_migrate(database_url: str) -> None:
    engine = sa.create_engine(database_url)
    options = {"compare_type": True, "compare_server_default": True}
    try:
        with engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection, opts=options), Base.metadata) == []
    finally:
        engine.dispose()


def test_the_database_stands_at_the_newest_revision_and_an_empty_one_at_none(
    database_url: str, empty_database_url: str
) -> None:
    assert migrate.current(database_url) == revisions(database_url)[0]
    assert migrate.current(empty_database_url) is None


def test_the_last_step_can_be_taken_back_and_again(database_url: str, empty_database_url: str) -> None:
    before = describe(database_url)
    newest, *older = revisions(database_url)
    migrate.downgrade(database_url, "-1")
    assert migrate.current(database_url) == (older[0] if older else None)
    if older:
        migrate.upgrade(empty_database_url, older[0])
    assert describe(database_url) == describe(empty_database_url)
    migrate.upgrade(database_url)
    assert migrate.current(database_url) == newest
    assert describe(database_url) == before


def test_a_downgrade_of_everything_leaves_nothing_behind(database_url: str) -> None:
    migrate.downgrade(database_url, "base")
    assert describe(database_url) == EMPTY


def test_upgrading_twice_changes_nothing(database_url: str, db: Database) -> None:
    with db.transaction() as tx:
        tx.execute("UPDATE clock SET ahead = '1 hour'")
        tx.execute("INSERT INTO users (name, key_hash, created_at) VALUES ('kept', 'h', now())")
    before = describe(database_url)
    migrate.upgrade(database_url)
    assert describe(database_url) == before
    with db.autocommit() as tx:
        assert tx.execute("SELECT count(*) FROM users").scalar_one() == 2
        assert tx.execute("SELECT count(*) FROM clock WHERE ahead = '1 hour'").scalar_one() == 1


def test_two_brokers_that_upgrade_at_once_do_not_meet(empty_database_url: str, database_url: str) -> None:
    """Both are held before the first statement of the migration, then let go together."""
    dsn = sa.make_url(empty_database_url).set(drivername="postgresql").render_as_string(hide_password=False)
    program = "import sys; from horde.db import migrate; migrate.upgrade(sys.argv[1])"
    with closing(psycopg2.connect(dsn)) as gate, gate.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(70012026)")
        brokers = [
            subprocess.Popen([sys.executable, "-c", program, empty_database_url], stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        try:
            wait_until_waiting(cursor, 2, brokers)
            gate.rollback()
            errors = [broker.communicate(timeout=60)[1] for broker in brokers]
        finally:
            for broker in brokers:
                broker.kill()
    assert [broker.returncode for broker in brokers] == [0, 0], errors
    assert describe(empty_database_url) == describe(database_url)


def wait_until_waiting(cursor: psycopg2.extensions.cursor, count: int, brokers: list[subprocess.Popen[str]]) -> None:
    """Until `count` sessions wait for an advisory lock of this database; fails when a broker ends before."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        cursor.execute(
            "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
            "WHERE locktype = 'advisory' AND NOT granted AND datname = current_database()"
        )
        if cursor.fetchone() == (count,):
            return
        assert all(broker.poll() is None for broker in brokers), "a broker did not wait for the migration lock"
        time.sleep(0.02)
    raise AssertionError("nobody waits for the migration lock")


def test_every_id_is_a_bigint_or_a_uuid(db: Database) -> None:
    with db.autocommit() as tx:
        narrow = {row.name: row.type for row in tx.execute(ID_COLUMNS) if row.type not in {"bigint", "uuid"}}
        assert narrow == {}
        identities = {row.name: row.type for row in tx.execute(IDENTITIES)}
    assert set(identities.values()) == {"bigint"}
    assert identities.keys() == ROWS.keys(), "a table with an identity needs a row here"


def test_ids_go_on_past_what_four_bytes_hold(db: Database) -> None:
    with db.transaction() as tx:
        for table in list(tx.execute(IDENTITIES)):
            tx.execute("SELECT setval(%(sequence)s, %(value)s)", {"sequence": table.sequence, "value": LARGEST_INT4})
            identifier = tx.execute(
                f"INSERT INTO {table.name} {ROWS[table.name]()} RETURNING {table.column}"
            ).scalar_one()
            assert identifier == LARGEST_INT4 + 1, table.name
        account = tx.execute("SELECT user_id FROM accounts WHERE id = %(id)s", {"id": LARGEST_INT4 + 1}).scalar_one()
        assert account == LARGEST_INT4 + 1
        # What refers to an event must hold its id too.
        tx.execute("INSERT INTO events_unfolded (event_id) VALUES (%(id)s)", {"id": LARGEST_INT4 + 1})


@pytest.mark.parametrize("plain", ["postgresql://", "postgres://"])
def test_a_plain_url_is_taken_too(plain: str, empty_database_url: str, database_url: str) -> None:
    migrate.upgrade(empty_database_url.replace("postgresql+psycopg2://", plain))
    assert migrate.current(empty_database_url) == migrate.current(database_url)
