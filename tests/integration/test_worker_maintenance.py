"""Maintenance of a worker: set by too many aborts within an hour, cleared by its owner, and not set again by old ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from horde.errors import HordeError
from horde.usecases.workers import list_workers, update_worker
from tests.support.broker import Broker, open_broker


def abort(broker: Broker, key: str, times: int) -> None:
    """The worker faults so many jobs, each of a request of its own."""
    for _ in range(times):
        # Its owner's: served in maintenance too.
        broker.order(key)
        broker.submit(key, broker.job(key).id, state="faulted")
        with broker.context.database.transaction() as tx:
            tx.execute("DELETE FROM requests")


@pytest.fixture
def strict(database_url: str) -> Iterator[Broker]:
    """A broker that pauses a worker after more than three aborts within an hour."""
    with open_broker(database_url, max_aborts_per_hour=3) as made:
        yield made


def test_too_many_aborts_within_an_hour_pause_a_worker_with_a_reason(strict: Broker) -> None:
    key = strict.user("owner").api_key
    abort(strict, key, 3)
    strict.fold()
    assert not strict.worker().maintenance_mode

    abort(strict, key, 1)
    strict.fold()
    (own,) = list_workers(strict.context, "text", api_key=key)
    assert own.maintenance_mode
    assert own.maintenance_message is not None
    assert "dropped more than 3 jobs within an hour" in own.maintenance_message
    assert strict.worker().maintenance_message is None
    with pytest.raises(HordeError, match="maintenance mode: It dropped more than 3 jobs") as refused:
        strict.pop(key)
    assert refused.value.rc == "WorkerMaintenance"


def test_old_aborts_are_forgotten(strict: Broker) -> None:
    key = strict.user("owner").api_key
    abort(strict, key, 3)
    strict.world.advance(3601)
    abort(strict, key, 3)
    strict.fold()
    assert not strict.worker().maintenance_mode


def test_released_and_cancelled_work_pauses_nobody(strict: Broker) -> None:
    key = strict.user("owner").api_key
    for _ in range(6):
        strict.order(key)
        strict.submit(key, strict.job(key).id, state="released")
    strict.fold()
    assert not strict.worker().maintenance_mode


def test_the_owner_clears_it_and_old_aborts_do_not_set_it_again(strict: Broker) -> None:
    key = strict.user("owner").api_key
    abort(strict, key, 4)
    strict.fold()
    worker = strict.worker().id
    assert update_worker(strict.context, key, worker, maintenance=False) == {"maintenance": False}
    assert not strict.worker().maintenance_mode

    # The next abort makes the fold look again: it counts from the moment it was forgiven.
    abort(strict, key, 3)
    strict.fold()
    assert not strict.worker().maintenance_mode
    abort(strict, key, 1)
    strict.fold()
    assert strict.worker().maintenance_mode


def test_aborts_forgiven_before_they_were_folded_stay_forgiven(strict: Broker) -> None:
    key = strict.user("owner").api_key
    abort(strict, key, 4)
    update_worker(strict.context, key, strict.worker().id, maintenance=False)
    strict.fold()
    assert not strict.worker().maintenance_mode
    # They stay on record.
    assert strict.worker().uncompleted_jobs == 4


def test_a_worker_paused_by_its_owner_keeps_the_owners_message(strict: Broker) -> None:
    key = strict.user("owner").api_key
    worker = strict.worker_id(key)
    update_worker(strict.context, key, worker, maintenance=True, maintenance_message="moving house")
    abort(strict, key, 5)
    strict.fold()
    assert strict.world.scalar("SELECT maintenance_message FROM workers") == "moving house"


def test_one_worker_of_an_owner_is_paused_and_the_others_go_on(strict: Broker) -> None:
    key = strict.user("owner").api_key
    abort(strict, key, 4)
    strict.order(key)
    strict.submit(key, strict.job(key, name="good").id)
    strict.fold()
    assert strict.worker().maintenance_mode
    assert not strict.worker("good").maintenance_mode


def test_the_message_of_a_paused_worker_can_be_changed_alone(strict: Broker) -> None:
    key = strict.user("owner").api_key
    abort(strict, key, 4)
    strict.fold()
    worker = strict.worker().id
    assert update_worker(strict.context, key, worker, maintenance_message="back at nine") == {
        "maintenance_msg": "back at nine"
    }
    (own,) = list_workers(strict.context, "text", api_key=key)
    assert (own.maintenance_mode, own.maintenance_message) == (True, "back at nine")
    with pytest.raises(HordeError, match="maintenance mode: back at nine"):
        strict.pop(key)


def test_the_message_of_a_worker_that_is_not_paused_is_nothing_to_change(strict: Broker) -> None:
    key = strict.user("owner").api_key
    worker = strict.worker_id(key)
    with pytest.raises(HordeError) as refused:
        update_worker(strict.context, key, worker, maintenance_message="back at nine")
    assert (refused.value.status, refused.value.rc) == (400, "NoWorkerModSelected")
    assert not strict.worker().maintenance_mode
    # Beside another change it is left out, not kept for later.
    assert update_worker(strict.context, key, worker, maintenance_message="later", info="hi") == {"info": "hi"}
    update_worker(strict.context, key, worker, maintenance=True)
    (own,) = list_workers(strict.context, "text", api_key=key)
    assert own.maintenance_message is None


def test_a_message_with_the_end_of_maintenance_is_not_kept(strict: Broker) -> None:
    key = strict.user("owner").api_key
    worker = strict.worker_id(key)
    changed = update_worker(strict.context, key, worker, maintenance=True, maintenance_message="moving house")
    assert changed == {"maintenance": True, "maintenance_msg": "moving house"}
    assert update_worker(strict.context, key, worker, maintenance=False, maintenance_message="done") == {
        "maintenance": False
    }
    assert strict.world.scalar("SELECT maintenance_message FROM workers") is None
