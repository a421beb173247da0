"""The races of a cancel, by the client, by expiry or by a lost connection, with everything else, and of retention."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from horde.lifecycle import claim, due, retention, rows, settle, store
from horde.lifecycle.cancel import Cancelled
from horde.lifecycle.terms import Terms
from horde.lifecycle.words import CancelReason, Outcome, Verdict
from tests.support.concurrency import Stage, together
from tests.support.invariants import check_invariants
from tests.support.world import REWARD, World, open_world

ROUNDS = 50


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with open_world(database_url, connections=8) as made:
        yield made
        check_invariants(made.db)


@pytest.fixture
def stage(world: World) -> Iterator[Stage]:
    with Stage(world.db) as made:
        yield made


def test_a_claim_that_waits_for_a_cancel_gets_nothing(world: World, stage: Stage) -> None:
    request, worker = world.request(2), world.worker()

    _, claimed = stage.in_order(
        partial(world.cancel, request), partial(world.claim, request, worker), after=settle.UPDATE_REQUEST
    )

    assert claimed == [], "it had found the request before the cancel"
    assert world.status(request).done


def test_a_cancel_that_waits_for_a_claim_lets_the_job_run(world: World, stage: Stage) -> None:
    request, worker = world.request(2), world.worker()

    (job,), cancelled = stage.in_order(
        partial(world.claim, request, worker), partial(world.cancel, request), after=claim.TAKE_FROM_REQUEST
    )

    assert cancelled is Cancelled.DONE
    status = world.status(request)
    assert (status.processing, status.waiting, status.done) == (1, 0, False)
    assert world.store(job.id).reward == REWARD
    assert world.status(request).done


def test_a_submit_that_waits_for_a_cancel_is_stored_and_paid(world: World, stage: Stage) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())

    cancelled, stored = stage.in_order(
        partial(world.cancel, request), partial(world.store, job, "kept"), after=settle.UPDATE_REQUEST
    )

    assert (cancelled, stored.verdict, stored.reward) == (Cancelled.DONE, Verdict.SETTLED, REWARD)
    status = world.status(request)
    assert (status.outcome, status.done) == (Outcome.CANCELLED, True)
    assert [result["text"] for result in status.results] == ["kept"]


def test_a_cancel_that_waits_for_the_last_result_comes_too_late(world: World, stage: Stage) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())

    stored, cancelled = stage.in_order(
        partial(world.store, job, "kept"), partial(world.cancel, request), after=store.STORE_JOB
    )

    assert (stored.outcome, cancelled) == (Outcome.COMPLETED, Cancelled.ALREADY_ENDED)
    assert world.status(request).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("cancel_first", [True, False])
def test_a_second_fault_and_a_cancel_in_either_order_put_nothing_back(
    world: World, stage: Stage, cancel_first: bool
) -> None:
    request = world.request(3)
    world.fault(world.claim_one(request, world.worker()))
    job, other = (world.claim_one(request, world.worker()) for _ in range(2))

    if cancel_first:
        _, faulted = stage.in_order(
            partial(world.cancel, request), partial(world.fault, job), after=settle.UPDATE_REQUEST
        )
    else:
        faulted, _ = stage.in_order(partial(world.fault, job), partial(world.cancel, request), after=settle.SETTLE_JOB)

    assert (faulted.verdict, faulted.put_back) == (Verdict.SETTLED, False)
    status = world.status(request)
    assert status.outcome is (Outcome.CANCELLED if cancel_first else Outcome.FAULTED)
    assert (status.waiting, status.processing) == (0, 1 if cancel_first else 0)
    assert world.claim(request, world.worker()) == []
    assert world.store(other).verdict is (Verdict.SETTLED if cancel_first else Verdict.ABORTED)
    assert world.status(request).done


MOVES: dict[str, Callable[[World, uuid.UUID, uuid.UUID], Any]] = {
    "claim": lambda world, request, job: world.claim(request, world.worker()),
    "submit": lambda world, request, job: world.store(job),
    "fault": lambda world, request, job: world.fault(job),
    "release": lambda world, request, job: world.release(job),
    "reject": lambda world, request, job: world.reject(job),
    "stale": lambda world, request, job: world.fault_stale(job),
    "a second cancel": lambda world, request, job: world.cancel(request),
    "expiry": lambda world, request, job: world.cancel_if_due(request, CancelReason.EXPIRED),
    "retention": lambda world, request, job: world.delete_old(),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_cancel_at_the_very_moment_of(world: World, move: str) -> None:
    world.terms = Terms(retention=0)
    worker = world.worker()
    for _ in range(ROUNDS):
        request = world.request(3)
        finished, job = (world.claim_one(request, worker) for _ in range(2))
        world.store(finished, "one")
        if move == "expiry":
            world.pass_time(request, "expires_at")
        elif move == "stale":
            world.pass_lease(job)

        together(partial(MOVES[move], world, request, job), partial(world.cancel, request))

        status = world.status(request)
        assert status.outcome is (Outcome.REJECTED if status.error_code else Outcome.CANCELLED)
        assert status.waiting == 0
        assert status.finished == (2 if move == "submit" else 1)
        assert world.claim(request, worker) == []
        world.cancel(request)
        assert world.status(request).outcome_reason == status.outcome_reason, "the second answer is the first"


@pytest.mark.parametrize("order", ["cancel, fault", "fault, cancel", "at once"])
def test_a_cancelled_request_never_comes_back_to_life(world: World, order: str) -> None:
    first, second = world.worker(), world.worker()
    for _ in range(ROUNDS):
        request = world.request()
        job = world.claim_one(request, first)
        steps: dict[str, Callable[[], Any]] = {
            "cancel": partial(world.cancel, request),
            "fault": partial(world.fault, job),
        }
        if order == "at once":
            together(*steps.values())
        else:
            for step in order.split(", "):
                steps[step]()

        assert world.claim(request, second) == []
        status = world.status(request)
        assert (status.waiting, status.processing, status.done, status.cancelled) == (0, 0, True, True)
        assert status.charged == 0


# --- expiry and lost connections


@pytest.mark.parametrize("move", ["store", "fault", "release", "cancel", "claim"])
def test_what_waits_for_an_expiry_puts_nothing_back(world: World, stage: Stage, move: str) -> None:
    request, worker = world.request(2), world.worker()
    job = world.claim_one(request, worker, lease=100)
    world.pass_time(request, "expires_at")
    second: dict[str, Callable[[], Any]] = {
        "store": partial(world.store, job, "kept"),
        "fault": partial(world.fault, job),
        "release": partial(world.release, job),
        "cancel": partial(world.cancel, request),
    }
    expire = partial(world.cancel_if_due, request, CancelReason.EXPIRED)

    if move == "claim":
        # No lock to wait for: its condition on the expiry is false in every version of the row.
        expiring = stage.hold(expire, after=settle.UPDATE_REQUEST)
        assert world.claim(request, worker) == []
        expired = expiring.result()
    else:
        expired, _ = stage.in_order(expire, second[move], after=settle.UPDATE_REQUEST)

    assert expired is Cancelled.DONE
    status = world.status(request)
    assert (status.outcome_reason, status.waiting) == ("expired", 0)
    assert [result["text"] for result in status.results] == (["kept"] if move == "store" else [])
    assert world.claim(request, worker) == []


def test_an_expiry_that_waits_for_a_result_leaves_the_request_alone(world: World, stage: Stage) -> None:
    request, worker = world.request(2), world.worker()
    job = world.claim_one(request, worker)
    world.pass_time(request, "expires_at")

    _, expired = stage.in_order(
        partial(world.store, job),
        partial(world.cancel_if_due, request, CancelReason.EXPIRED),
        after=store.STORE_JOB,
    )

    assert expired is Cancelled.NOT_DUE, "the result has moved the expiry ahead"
    assert world.claim(request, worker)


@pytest.mark.parametrize("move", ["fault", "release", "cancel"])
def test_an_expiry_that_waits_for_another_cancel_changes_nothing(world: World, stage: Stage, move: str) -> None:
    request = world.request(2)
    job = world.claim_one(request, world.worker())
    world.pass_time(request, "expires_at")
    moves: dict[str, tuple[Callable[[], Any], str]] = {
        "fault": (partial(world.fault, job), settle.SETTLE_JOB),
        "release": (partial(world.release, job), settle.SETTLE_JOB),
        "cancel": (partial(world.cancel, request), settle.UPDATE_REQUEST),
    }
    first, after = moves[move]

    _, expired = stage.in_order(first, partial(world.cancel_if_due, request, CancelReason.EXPIRED), after=after)

    assert expired is Cancelled.ALREADY_ENDED
    assert world.status(request).outcome_reason == ("client" if move == "cancel" else "expired")


def test_an_expiry_found_before_a_result_came_leaves_the_request_alone(world: World, stage: Stage) -> None:
    request = world.request(2)
    job = world.claim_one(request, world.worker())
    world.pass_time(request, "expires_at")
    assert request in list(due.pages(world.db, due.EXPIRED))
    expiring = stage.hold(partial(world.cancel_if_due, request, CancelReason.EXPIRED), before=rows.LOCK_REQUEST)

    world.store(job)

    assert expiring.result() is Cancelled.NOT_DUE
    assert world.status(request).waiting == 1


def test_a_lapse_found_before_the_handler_spoke_leaves_the_request_alone(world: World, stage: Stage) -> None:
    request = world.request(attached=True)
    world.pass_time(request, "attached_until")
    assert request in list(due.pages(world.db, due.LAPSED))
    lapsing = stage.hold(partial(world.cancel_if_due, request, CancelReason.DISCONNECT), before=rows.LOCK_REQUEST)

    world.stay_attached(request)

    assert lapsing.result() is Cancelled.NOT_DUE
    assert world.claim(request, world.worker())


# --- retention


@pytest.mark.parametrize("end", ["cancel", "fault", "nothing"])
def test_a_worker_whose_lease_runs_is_never_told_that_its_job_does_not_exist(world: World, end: str) -> None:
    world.terms = Terms(expiry=20, retention=0)
    worker = world.worker()
    for _ in range(10):
        request = world.request(3)
        job, failing, failing_too = (found.id for found in world.claim(request, worker, count=3, lease=300))
        if end == "cancel":
            world.cancel(request)
        elif end == "fault":
            world.fault(failing)
            world.fault(failing_too)
        world.advance(250)

        *deleted, settled = together(*[world.delete_old] * 3, partial(world.store, job, "real text"))

        assert deleted == [0, 0, 0]
        if end == "fault":
            assert (settled.verdict, settled.reward, world.status(request).finished) == (Verdict.ABORTED, 0, 0)
        else:
            assert (settled.verdict, settled.reward) == (Verdict.SETTLED, REWARD)
            assert [result["text"] for result in world.status(request).results] == ["real text"]
        assert world.store(job, "again").verdict in {Verdict.DUPLICATE, Verdict.ABORTED}
        world.pass_lease(job)
        world.delete_old()


def done_and_old(world: World) -> tuple[uuid.UUID, uuid.UUID]:
    world.terms = Terms(retention=0)
    request = world.request()
    job = world.claim_one(request, world.worker(), lease=5)
    world.store(job)
    world.advance(6)
    return request, job


def test_retention_and_a_late_report_at_the_same_moment(world: World) -> None:
    for _ in range(ROUNDS):
        _, job = done_and_old(world)

        late, deleted = together(partial(world.store, job, "late"), world.delete_old)

        assert late.verdict in {Verdict.DUPLICATE, Verdict.GONE}
        assert deleted + world.delete_old() == 1
        assert world.store(job).verdict is Verdict.GONE


def test_what_waits_for_retention_finds_its_request_gone(world: World, stage: Stage) -> None:
    request, job = done_and_old(world)
    deleting = stage.hold(world.delete_old, after=retention.DELETE_OLD)
    late = stage.blocked(partial(world.fault, job))
    cancelling = stage.blocked(partial(world.cancel, request))

    deleting.go_on()

    assert (deleting.result(), late.result().verdict, cancelling.result()) == (1, Verdict.GONE, Cancelled.GONE)


def test_retention_steps_over_a_request_that_is_being_looked_at(world: World, stage: Stage) -> None:
    _, job = done_and_old(world)
    looking = stage.hold(partial(world.fault, job), after=rows.LOCK_JOB_REQUEST)

    assert world.delete_old() == 0
    assert looking.result().verdict is Verdict.DUPLICATE
    assert world.delete_old() == 1
