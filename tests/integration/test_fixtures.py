"""The fixtures themselves: a database per test, and a look for transactions left open."""

from __future__ import annotations

import pytest

from horde.db import migrate
from horde.db.database import Database
from tests.support.postgres import Server


def test_each_test_has_a_migrated_database_of_its_own(server: Server, db: Database) -> None:
    other = server.create()
    try:
        assert migrate.current(other) == migrate.current(db.url) is not None
        with db.transaction() as tx:
            tx.execute("CREATE TABLE mine (value integer)")
        neighbour = Database(other)
        with neighbour.transaction() as tx:
            assert tx.execute("SELECT to_regclass('mine')").scalar_one_or_none() is None
        neighbour.close()
    finally:
        server.drop(other)


def test_an_open_transaction_is_found_in_its_own_database_only(server: Server, db: Database, database_url: str) -> None:
    other = server.create_empty()
    with db.transaction() as tx:
        tx.execute("SELECT 'left open'")
        assert server.idle_in_transaction(other) == []
        (found,) = server.idle_in_transaction(database_url)
        assert "left open" in found
        assert found in server.idle_in_transaction()
    assert server.idle_in_transaction(database_url) == []
    server.drop(other)


def test_an_empty_database_has_no_revision(empty_database_url: str) -> None:
    assert migrate.current(empty_database_url) is None


@pytest.mark.needs("docker")
def test_the_docker_source_starts_a_server() -> None:
    from tests.support.postgres import choose_source

    with choose_source({"HORDE_TEST_POSTGRES": "docker"}).open() as url:
        database = Database(url)
        with database.autocommit() as tx:
            assert tx.execute("SELECT 1").scalar_one_or_none() == 1
        database.close()
