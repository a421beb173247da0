"""An order's answer when something breaks behind it: what is on disk is answered as on disk."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy.exc import ProgrammingError

from horde.queue.estimate import IS_POSSIBLE
from tests.support.broker import Broker, open_broker
from tests.support.concurrency import Stage


@pytest.fixture
def broker(database_url: str) -> Iterator[Broker]:
    with open_broker(database_url) as made:
        yield made


def hide_workers(broker: Broker) -> None:
    """From now on nobody can say who could serve a request."""
    with broker.context.database.transaction() as tx:
        tx.execute("ALTER VIEW worker_offers RENAME TO away")


def test_an_order_that_is_on_disk_is_accepted_though_nobody_can_say_who_could_serve_it(broker: Broker) -> None:
    hide_workers(broker)
    accepted = broker.ask()
    assert (accepted.message, accepted.warnings) == (None, [])
    assert broker.world.rows("SELECT id, waiting FROM requests") == [(accepted.id, 1)]


def test_an_order_whose_connection_is_cut_once_it_is_on_disk_is_accepted(broker: Broker) -> None:
    with Stage(broker.context.database) as stage:
        asking = stage.hold(broker.ask, before=IS_POSSIBLE)
        assert broker.world.scalar("SELECT pg_terminate_backend(%(pid)s)", pid=asking.backend)
        asking.go_on()
        accepted = asking.result()
    assert broker.world.rows("SELECT id, waiting FROM requests") == [(accepted.id, 1)]
    assert broker.ask().id != accepted.id


def test_an_order_under_a_key_is_on_disk_exactly_when_it_was_accepted(broker: Broker) -> None:
    hide_workers(broker)
    with pytest.raises(ProgrammingError):
        broker.ask(idempotency_key="once")
    assert broker.world.scalar("SELECT count(*) FROM requests") == 0
    with broker.context.database.transaction() as tx:
        tx.execute("ALTER VIEW away RENAME TO worker_offers")
    assert broker.ask(idempotency_key="once") == broker.ask(idempotency_key="once")
    assert broker.world.scalar("SELECT count(*) FROM requests") == 1
