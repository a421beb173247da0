"""Polls that wait for work: woken at once, never for a client that has gone, and without holding what others need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import pytest

from horde.db.notices import APPLICATION, DatabaseNotices
from horde.lifecycle.words import Kind
from horde.queue.wakeup import WakeUps
from horde.usecases import pop as pop_module
from horde.usecases.places import Places
from horde.usecases.pop import Popped
from tests.support.broker import Broker, open_broker
from tests.support.concurrency import eventually

T = TypeVar("T")

# A poll that is not woken sits here until its time is over; a test that passes never waits that long.
WAIT = 25.0
DEADLINE = 12.0
TEXT_M = ("text", "m")


class Waiting:
    """Counts the polls that have looked, found nothing, and wait."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._changed = threading.Condition()
        self.entered = 0
        wait = pop_module._wait

        def counted(*arguments: Any) -> None:
            with self._changed:
                self.entered += 1
                self._changed.notify_all()
            wait(*arguments)

        patch.setattr(pop_module, "_wait", counted)

    def until(self, polls: int) -> None:
        """Return once so many polls have begun to wait."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.entered >= polls, DEADLINE), "the poll never waited"


class Running:
    """A call in a thread of its own."""

    def __init__(self, work: Callable[[], Popped]) -> None:
        self._work = work
        self._result: Popped | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Popped:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the poll still waits"
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 raised again where the result is asked for
            self._error = error


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Waiting:
    # Nothing but a wake-up, the end of its time or its client ends a wait in these tests.
    monkeypatch.setattr(pop_module, "LOOK_AGAIN", 1000.0)
    monkeypatch.setattr(pop_module, "CLIENT_CHECK", 0.02)
    return Waiting(monkeypatch)


@pytest.fixture
def broker(database_url: str, waiting: Waiting) -> Iterator[Broker]:
    with open_broker(database_url) as made:
        yield made


@pytest.fixture
def key(broker: Broker) -> str:
    """The key of a worker's owner."""
    return broker.user("owner").api_key


def poll(broker: Broker, key: str, **fields: Any) -> Running:
    return Running(lambda: broker.pop(key, wait=WAIT, **fields))


# --- waking


def test_a_waiting_poll_gets_what_comes_at_once(broker: Broker, key: str, waiting: Waiting) -> None:
    running = poll(broker, key)
    waiting.until(1)
    request = broker.order()
    (job,) = running.result().jobs
    assert broker.request_of(job) == request


def test_a_poll_waits_as_long_as_it_said_and_then_says_why(broker: Broker, key: str, waiting: Waiting) -> None:
    broker.order(max_length=600)
    started = time.monotonic()
    assert broker.pop(key, wait=0.2).skipped == {"max_length": 1}
    assert 0.2 <= time.monotonic() - started < DEADLINE
    assert waiting.entered == 1


def test_a_pop_that_does_not_want_to_wait_does_not(broker: Broker, key: str, waiting: Waiting) -> None:
    broker.nothing(key)
    assert waiting.entered == 0


def test_nobody_is_woken_by_work_for_another_model(broker: Broker, key: str, waiting: Waiting) -> None:
    running = poll(broker, key)
    waiting.until(1)
    broker.order(models=["other"])
    other = broker.order(models=["other", "m"])
    assert broker.request_of(running.result().jobs[0]) == other
    assert waiting.entered == 1


def test_work_for_any_model_wakes_whoever_waits(broker: Broker, key: str, waiting: Waiting) -> None:
    running = poll(broker, key)
    waiting.until(1)
    broker.order(models=[])
    assert len(running.result().jobs) == 1


@pytest.mark.parametrize("state", ["faulted", "released"])
def test_a_put_back_wakes_a_waiting_poll(broker: Broker, key: str, waiting: Waiting, state: str) -> None:
    request = broker.order()
    job = broker.job(key, name="first")
    running = poll(broker, key, name="second")
    waiting.until(1)
    broker.submit(key, job.id, state=state)
    assert broker.request_of(running.result().jobs[0]) == request


def test_as_many_polls_are_woken_as_slots_came(broker: Broker, key: str, waiting: Waiting) -> None:
    running = [poll(broker, key, name=f"worker{number}") for number in range(3)]
    waiting.until(3)
    request = broker.order(n=3)
    jobs = [job for call in running for job in call.result().jobs]
    assert sorted(job.slot for job in jobs) == [0, 1, 2]
    assert {broker.request_of(job) for job in jobs} == {request}


def test_a_poll_in_another_process_is_woken_too(broker: Broker, key: str, waiting: Waiting) -> None:
    # Two brokers on one database; what tells one of the other is the database alone.
    with open_broker(broker.context.database.url) as elsewhere:
        for process in (broker, elsewhere):
            process.context.start()
            assert process.context.notices.listening.wait(DEADLINE)
        running = poll(elsewhere, key)
        waiting.until(1)
        request = broker.order()
        (job,) = running.result().jobs
        assert broker.request_of(job) == request


def listeners(broker: Broker) -> set[int]:
    """The connections that listen for announcements."""
    of_all = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %(name)s"
    return {pid for (pid,) in broker.world.rows(of_all, name=APPLICATION)}


def test_a_lost_listener_comes_back(broker: Broker, key: str, waiting: Waiting) -> None:
    with open_broker(broker.context.database.url) as elsewhere:
        for process in (broker, elsewhere):
            process.context.start()
            assert process.context.notices.listening.wait(DEADLINE)
        lost = listeners(broker)
        assert len(lost) == 2
        broker.world.rows("SELECT pg_terminate_backend(pid) FROM unnest(%(pids)s) AS pid", pids=sorted(lost))
        eventually(lambda: len(listeners(broker) - lost) == 2, "both listen again")
        for process in (broker, elsewhere):
            assert process.context.notices.listening.wait(DEADLINE)
        running = poll(elsewhere, key)
        waiting.until(1)
        broker.order()
        assert len(running.result().jobs) == 1


# --- the hub by itself


@pytest.fixture
def hub() -> WakeUps:
    """Never started: nothing here needs another process."""
    return WakeUps(DatabaseNotices("postgresql://nowhere/none"))


@contextmanager
def waiters(hub: WakeUps, *models: str) -> Iterator[list[threading.Event]]:
    with ExitStack() as stack:
        yield [stack.enter_context(hub.waiting([(Kind.TEXT, model)])) for model in models]


def test_a_poll_that_leaves_passes_an_unused_wake_up_on(hub: WakeUps) -> None:
    with waiters(hub, "m") as (stays,):
        hub.announce([TEXT_M], slots=1)
        with waiters(hub, "m") as (leaves,):
            # The other one has been woken already, so this is for the one that leaves.
            hub.announce([TEXT_M], slots=1)
            assert leaves.is_set()
            stays.clear()
        assert stays.is_set()


def test_a_used_wake_up_is_not_passed_on(hub: WakeUps) -> None:
    with waiters(hub, "m") as (stays,):
        with waiters(hub, "m") as (leaves,):
            hub.announce([TEXT_M], slots=2)
            stays.clear()
            leaves.clear()
        assert not stays.is_set()


def test_one_slot_wakes_one_poll_and_two_wake_two(hub: WakeUps) -> None:
    with waiters(hub, "other", "m", "m", "m") as events:
        hub.announce([TEXT_M], slots=1)
        assert [event.is_set() for event in events] == [False, True, False, False]
        hub.announce([TEXT_M], slots=2)
        assert [event.is_set() for event in events] == [False, True, True, True]


def test_a_kind_wakes_its_own_polls_only(hub: WakeUps) -> None:
    with waiters(hub, "m") as (event,):
        hub.announce([("image", "m")])
        assert not event.is_set()


def test_places_are_given_up_again() -> None:
    places = Places(2)
    with places.place() as first, places.place() as second, places.place() as third:
        assert (first, second, third) == (True, True, False)
        assert places.taken == 2
    with places.place() as again:
        assert again
    assert places.taken == 0


def test_nobody_holds_more_places_than_his_share() -> None:
    places = Places(4)
    shares = {"polls": places.most_polls, "worker": 1}
    with places.place(shares) as first, places.place(shares) as second, places.place({"polls": 3}) as another:
        assert (first, second, another) == (True, False, True)
    with places.place(shares) as again:
        assert again


@pytest.mark.parametrize("most", [2, 3, 4, 240])
def test_polls_leave_places_to_streams(most: int) -> None:
    places = Places(most)
    with ExitStack() as stack:
        polls = [stack.enter_context(places.place({"polls": places.most_polls})) for _ in range(most)]
        assert sum(polls) == most * 3 // 4
        streams = [stack.enter_context(places.place()) for _ in range(most)]
        assert sum(streams) == most - most * 3 // 4


# --- limits and ends


def test_without_a_place_left_a_poll_is_answered_without_waiting(
    database_url: str, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_broker(database_url, threads=19) as broker:
        key = broker.user("owner").api_key
        running = [poll(broker, key, name=f"worker{number}") for number in range(2)]
        waiting.until(2)
        started = time.monotonic()
        assert broker.pop(key, name="third", wait=WAIT).jobs == []
        assert time.monotonic() - started < DEADLINE
        assert waiting.entered == 2
        # It is still served what there is.
        request = broker.order(n=3)
        assert [broker.request_of(job) for call in running for job in call.result().jobs] == [request] * 2
        assert broker.request_of(broker.job(key, name="third", wait=WAIT)) == request


def test_a_shutdown_answers_every_waiting_poll(broker: Broker, key: str, waiting: Waiting) -> None:
    running = [poll(broker, key, name=f"worker{number}") for number in range(3)]
    waiting.until(3)
    broker.context.wakeups.close()
    assert [call.result().jobs for call in running] == [[], [], []]
    # Later ones do not begin to wait, and take nothing that nobody would run.
    broker.order()
    assert broker.pop(key, name="worker0", wait=WAIT).jobs == []


def test_a_waiting_poll_holds_no_database_connection(database_url: str, waiting: Waiting) -> None:
    with open_broker(database_url, database_pool=2, rate_limits="off") as broker:
        key = broker.user("owner").api_key
        running = [poll(broker, key, name=f"worker{number}") for number in range(20)]
        waiting.until(20)
        pool = broker.context.database.engine.pool
        assert pool.checkedout() == 0  # type: ignore[attr-defined]
        # Short requests are served as if nobody waited.
        request = broker.order()
        broker.status(request)
        broker.context.wakeups.close()
        served = [job for call in running for job in call.result().jobs]
        assert len(served) <= 1


# --- clients that have gone


def test_a_poll_whose_client_has_gone_takes_nothing(broker: Broker, key: str, waiting: Waiting) -> None:
    broker.worker_id(key)
    request = broker.order()
    assert broker.pop(key, wait=WAIT, client_gone=lambda: True).jobs == []
    assert broker.world.slots(request) == ["waiting"]
    assert broker.world.jobs(request) == []


def test_a_client_that_goes_while_it_waits_never_takes_a_job(broker: Broker, key: str, waiting: Waiting) -> None:
    gone = threading.Event()
    dead = poll(broker, key, name="dead", client_gone=gone.is_set)
    waiting.until(1)
    alive = poll(broker, key, name="alive")
    waiting.until(2)
    gone.set()
    request = broker.order()

    assert dead.result().jobs == []
    (job,) = alive.result().jobs
    assert broker.request_of(job) == request
    # Not even for a moment: the only attempt is the living one's.
    assert [state for _, state, *_ in broker.world.jobs(request)] == ["processing"]


def hangs_up_at(call: int) -> Callable[[], bool]:
    """Answers whether its client has gone: not yet, until it is asked for the `call`th time."""
    asked = iter(range(1, 1000))
    return lambda: next(asked) >= call


def test_a_claim_that_raced_with_a_hang_up_is_released_without_blame(
    broker: Broker, key: str, waiting: Waiting
) -> None:
    request = broker.order(n=2)
    # There when the claim begins, gone when it has been made.
    assert broker.pop(key, amount=2, client_gone=hangs_up_at(2)).jobs == []

    assert [row[:3] for row in broker.world.jobs(request)] == [
        (0, "released", "not_delivered"),
        (1, "released", "not_delivered"),
    ]
    assert broker.world.slots(request) == ["waiting", "waiting"]
    assert broker.worker().uncompleted_jobs == 0
    assert (broker.status(request).waiting, broker.status(request).faulted) == (2, False)
    assert broker.request_of(broker.job(key, name="second")) == request


def test_what_a_hang_up_gives_back_wakes_the_next_poll(broker: Broker, key: str, waiting: Waiting) -> None:
    running = poll(broker, key, name="alive", models=["late"])
    waiting.until(1)
    request = broker.world.request(models=["late", "m"])
    assert broker.pop(key, name="dead", client_gone=hangs_up_at(2)).jobs == []
    assert broker.request_of(running.result().jobs[0]) == request


def test_hang_ups_of_one_slot_have_a_cap_and_then_end_as_faults_nobody_is_blamed_for(
    broker: Broker, key: str, waiting: Waiting
) -> None:
    request = broker.order()
    for attempt in range(7):
        assert broker.pop(key, client_gone=hangs_up_at(2)).jobs == [], attempt
    states = [row[1:3] for row in broker.world.jobs(request)]
    assert states == [("released", "not_delivered")] * 5 + [("faulted", "release_cap")] * 2
    assert broker.status(request).faulted
    assert broker.worker().uncompleted_jobs == 0


# --- work that does not suit whoever is first in line


def test_a_wake_up_goes_on_to_the_poll_that_can_do_it(broker: Broker, key: str, waiting: Waiting) -> None:
    small = [poll(broker, key, name=f"small{number}", max_length=20) for number in range(2)]
    waiting.until(2)
    able = poll(broker, key, name="able")
    waiting.until(3)
    request = broker.order(max_length=200)
    (job,) = able.result().jobs
    assert broker.request_of(job) == request
    broker.context.wakeups.close()
    assert [call.result().jobs for call in small] == [[], []]


def test_a_wake_up_is_passed_on_in_line_and_ends_with_the_last(hub: WakeUps) -> None:
    with waiters(hub, "m", "other", "m") as (first, other, last):
        hub.announce([TEXT_M], slots=1)
        hub.pass_on(first, first.take())
        assert [event.is_set() for event in (first, other, last)] == [False, False, True]
        hub.pass_on(last, last.take())
        assert [event.is_set() for event in (first, other, last)] == [False, False, False]


def test_names_longer_than_a_notification_wake_other_processes_too(
    broker: Broker, database_url: str, waiting: Waiting
) -> None:
    models = [f"{number}{'🙂' * 250}" for number in range(20)]
    with open_broker(database_url) as other:
        for context in (broker.context, other.context):
            context.start()
            assert context.notices.listening.wait(DEADLINE)
        key = other.user("far").api_key
        running = poll(other, key, models=models[-1:])
        waiting.until(1)
        request = broker.order(models=models)
        (job,) = running.result().jobs
        assert broker.request_of(job) == request


@pytest.mark.parametrize("deleted", [False, True], ids=["paused", "deleted"])
def test_a_worker_that_is_stopped_while_it_polls_gets_nothing_of_strangers(
    broker: Broker, key: str, waiting: Waiting, deleted: bool
) -> None:
    running = poll(broker, key)
    waiting.until(1)
    change = "deleted_at = horde_now()" if deleted else "maintenance = true"
    with broker.context.database.transaction() as tx:
        tx.execute(f"UPDATE workers SET {change}")
    request = broker.order()
    waiting.until(2)
    assert broker.world.slots(request) == ["waiting"]
    broker.context.wakeups.close()
    assert running.result().jobs == []


def test_one_worker_leaves_places_to_others(broker: Broker, key: str, waiting: Waiting) -> None:
    mine = [poll(broker, key, threads=1) for _ in range(3)]
    waiting.until(3)
    # A fourth of the same worker has no use for a place; another worker gets one.
    assert broker.pop(key, threads=1, wait=WAIT).jobs == []
    another = poll(broker, key, name="another")
    waiting.until(4)
    broker.order(n=4)
    assert sum(len(call.result().jobs) for call in [*mine, another]) == 4


def test_a_retry_that_was_given_the_job_keeps_it_when_the_first_call_finds_its_client_gone(
    broker: Broker, key: str, waiting: Waiting
) -> None:
    request = broker.order()
    retried: list[Popped] = []

    def gone() -> bool:
        # The first call has claimed when it is asked the second time: that is when the retry comes.
        if broker.world.jobs(request) and not retried:
            retried.append(broker.pop(key, idempotency_key="k"))
        return bool(retried)

    broker.pop(key, idempotency_key="k", client_gone=gone)  # whatever it answers, nobody reads it
    (job,) = retried[0].jobs
    assert [state for _, state, *_ in broker.world.jobs(request)] == ["processing"]
    assert broker.submit(key, job.id) > 0


def test_a_retry_after_the_job_went_back_claims_anew(broker: Broker, key: str, waiting: Waiting) -> None:
    request = broker.order()
    assert broker.pop(key, idempotency_key="k", client_gone=hangs_up_at(2)).jobs == []
    job = broker.job(key, idempotency_key="k")
    assert broker.request_of(job) == request
    assert broker.submit(key, job.id) > 0


def test_a_request_for_several_models_is_skipped_once(broker: Broker, key: str, waiting: Waiting) -> None:
    models = ["m", "n", "o", "p"]
    for _ in range(3):
        broker.order(models=models, max_length=600)
    assert broker.nothing(key, models=models) == {"max_length": 3}
