"""The table of rules, row by row, without concurrency: enqueue, claim, submit and fault."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator

import pytest

from horde.lifecycle.cancel import Cancelled
from horde.lifecycle.store import Result, store
from horde.lifecycle.words import CancelReason, Kind, Outcome, ResultState, Verdict
from tests.support.invariants import check_invariants
from tests.support.postgres import Server
from tests.support.world import PRICE, REWARD, World, open_world

EVERY_KIND = pytest.mark.parametrize("kind", list(Kind))
STREAMED_KINDS = pytest.mark.parametrize("kind", [Kind.TEXT, Kind.CHAT])


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[World]:
    # One database for all of this file: each test has requests of its own.
    url = server.create()
    try:
        with open_world(url, connections=4) as made:
            yield made
    finally:
        server.drop(url)


@pytest.fixture
def world(shared: World) -> Iterator[World]:
    yield shared
    check_invariants(shared.db)


def seconds_ahead(world: World, request: uuid.UUID, column: str) -> float:
    return float(
        world.scalar(f"SELECT extract(epoch FROM {column} - horde_now()) FROM requests WHERE id = %(r)s", r=request)
    )


# --- enqueue and claim


@EVERY_KIND
def test_a_new_request_waits_with_all_its_slots_and_a_seed_for_each(world: World, kind: Kind) -> None:
    request = world.request(3, kind=kind)

    status = world.status(request)
    assert (status.waiting, status.processing, status.finished, status.n) == (3, 0, 0, 3)
    assert (status.outcome, status.done, status.faulted, status.cancelled) == (None, False, False, False)
    assert world.rows("SELECT idx, seed FROM slots WHERE request_id = %(r)s ORDER BY idx", r=request) == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert seconds_ahead(world, request, "expires_at") == pytest.approx(1200, abs=5)


def test_a_request_expires_no_later_than_its_deadline(world: World) -> None:
    request = world.request(deadline=100)

    assert world.scalar("SELECT expires_at = deadline FROM requests WHERE id = %(r)s", r=request)
    world.claim_one(request, world.worker(), lease=300)
    assert world.scalar("SELECT expires_at = deadline FROM requests WHERE id = %(r)s", r=request)


def test_a_request_queues_under_each_of_its_models_once_or_under_a_star(world: World) -> None:
    named, free = world.request(models=["b", "a", "b"]), world.request(models=[])

    queued = "SELECT model FROM queue WHERE request_id = %(r)s ORDER BY model"
    assert world.rows(queued, r=named) == [("a",), ("b",)]
    assert world.rows(queued, r=free) == [("*",)]
    worker = world.worker()
    for request in (named, free):
        job = world.claim_one(request, worker)
        assert world.rows(queued, r=request) == []
        world.fault(job)
    assert world.rows(queued, r=named) == [("a",), ("b",)]
    assert world.rows(queued, r=free) == [("*",)]


@EVERY_KIND
def test_a_claim_takes_the_lowest_waiting_slot_and_remembers_its_worker(world: World, kind: Kind) -> None:
    request, worker = world.request(3, kind=kind), world.worker()
    world.claim_one(request, world.worker())

    (job,) = world.claim(request, worker, lease=200)

    assert (job.slot, job.seed, job.lease) == (1, 1, 200)
    with world.db.transaction() as tx:
        tx.execute(
            "UPDATE workers SET name = name || ' renamed', deleted_at = horde_now() WHERE id = %(w)s", {"w": worker.id}
        )
    facts = "SELECT worker_name, owner_id, model, ttl, lease_end - claimed_at FROM jobs WHERE id = %(j)s"
    assert world.rows(facts, j=job.id) == [(worker.name, worker.owner_id, "m", 200, dt.timedelta(seconds=200))]
    assert world.store(job.id).verdict is Verdict.SETTLED


def test_a_claim_takes_no_more_slots_than_wait(world: World) -> None:
    request, worker = world.request(3), world.worker()

    assert [job.slot for job in world.claim(request, worker, count=2)] == [0, 1]
    assert [job.slot for job in world.claim(request, worker, count=2)] == [2]
    assert world.claim(request, worker, count=2) == []


def test_a_claim_moves_the_expiry_behind_its_lease_and_never_back(world: World) -> None:
    short, long = world.request(), world.request()
    before = world.scalar("SELECT expires_at FROM requests WHERE id = %(r)s", r=short)

    world.claim_one(short, world.worker(), lease=150)
    world.claim_one(long, world.worker(), lease=2000)

    assert world.scalar("SELECT expires_at FROM requests WHERE id = %(r)s", r=short) == before
    behind = "SELECT r.expires_at - j.lease_end FROM requests r JOIN jobs j ON j.request_id = r.id WHERE r.id = %(r)s"
    assert world.scalar(behind, r=long).total_seconds() == pytest.approx(60, abs=1)


@pytest.mark.parametrize("column", ["expires_at", "deadline", "attached_until"])
def test_nothing_is_claimed_of_a_request_whose_time_is_over(world: World, column: str) -> None:
    fields = {"deadline": 100} if column == "deadline" else {"attached": True} if column == "attached_until" else {}
    request = world.request(**fields)
    world.pass_time(request, column)

    assert world.claim(request, world.worker()) == []
    assert world.status(request).waiting == 1


def test_a_handler_that_waits_keeps_its_request_attached(world: World) -> None:
    request = world.request(attached=True)
    world.advance(25)

    nobodys = world.request()
    world.stay_attached(request, nobodys)

    assert seconds_ahead(world, request, "attached_until") == pytest.approx(30, abs=2)
    world.advance(10)
    assert world.cancel_if_due(request, CancelReason.DISCONNECT) is Cancelled.NOT_DUE
    assert world.claim(request, world.worker())
    assert not world.status(nobodys).attached


def test_an_ended_request_has_nobody_attached(world: World) -> None:
    request = world.request(attached=True)
    world.cancel(request)
    world.advance(10)

    world.stay_attached(request)

    assert seconds_ahead(world, request, "attached_until") == pytest.approx(20, abs=2)


# --- submit


@EVERY_KIND
def test_a_result_is_stored_charged_and_paid(world: World, kind: Kind) -> None:
    request, worker = world.request(kind=kind), world.worker()
    job = world.claim_one(request, worker)

    settled = world.store(job, "answer")

    assert (settled.verdict, settled.reward, settled.outcome) == (Verdict.SETTLED, REWARD, Outcome.COMPLETED)
    status = world.status(request)
    assert (status.finished, status.processing, status.waiting, status.charged) == (1, 0, 0, PRICE)
    assert (status.done, status.outcome, status.faulted, status.cancelled) == (True, Outcome.COMPLETED, False, False)
    (result,) = status.results
    assert (result["text"], result["worker_name"], result["model"], result["seed"]) == ("answer", worker.name, "m", 0)


@EVERY_KIND
def test_a_request_completes_with_its_last_result_only(world: World, kind: Kind) -> None:
    request, worker = world.request(3, kind=kind), world.worker()
    jobs = [world.claim_one(request, worker) for _ in range(3)]

    assert world.store(jobs[2]).outcome is None
    assert world.store(jobs[0]).outcome is None
    assert not world.status(request).done
    assert world.store(jobs[1]).outcome is Outcome.COMPLETED
    assert [result["slot"] for result in world.status(request).results] == [0, 1, 2]


@pytest.mark.parametrize("state", [ResultState.CENSORED, ResultState.CSAM])
def test_a_censored_result_is_stored_and_shown_as_such(world: World, state: ResultState) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())

    world.db.run(
        lambda tx: store(tx, job, Result("", 0, seed=7, state=state), pricing=world.pricing, terms=world.terms)
    )

    status = world.status(request)
    assert status.outcome is Outcome.COMPLETED
    assert [(result["state"], result["seed"]) for result in status.results] == [(state.value, 7)]


def test_a_result_moves_the_expiry_ahead_but_not_behind_the_deadline(world: World) -> None:
    free, bounded = world.request(2), world.request(2, deadline=1300)
    jobs = [world.claim_one(request, world.worker()) for request in (free, bounded)]
    world.advance(140)

    for job in jobs:
        world.store(job)

    assert seconds_ahead(world, free, "expires_at") == pytest.approx(1200, abs=5)
    assert world.scalar("SELECT expires_at = deadline FROM requests WHERE id = %(r)s", r=bounded)


def test_a_result_in_time_for_nobody_else_is_stored_after_the_lease(world: World) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())
    world.pass_lease(job)

    assert world.store(job).verdict is Verdict.SETTLED, "late, but no pass has taken it away"


# --- fault


@STREAMED_KINDS
def test_a_faulted_slot_is_put_back_with_its_index_and_seed(world: World, kind: Kind) -> None:
    request = world.request(2, kind=kind)
    rank = world.scalar("SELECT rank FROM requests WHERE id = %(r)s", r=request)
    first, _ = world.claim(request, world.worker(), count=2)

    settled = world.fault(first.id)

    assert (settled.verdict, settled.put_back, settled.outcome) == (Verdict.SETTLED, True, None)
    status = world.status(request)
    assert (status.waiting, status.processing, status.restarted, status.faulted) == (1, 1, 1, False)
    assert world.rows("SELECT rank FROM queue WHERE request_id = %(r)s", r=request) == [(rank,)]
    (again,) = world.claim(request, world.worker())
    assert (again.slot, again.seed) == (first.slot, first.seed)
    assert again.id != first.id


@STREAMED_KINDS
def test_the_second_faulted_job_ends_the_request_and_voids_the_others(world: World, kind: Kind) -> None:
    request = world.request(4, kind=kind)
    stored, running = (world.claim_one(request, world.worker()) for _ in range(2))
    world.store(stored, "kept")
    world.fault(world.claim_one(request, world.worker()))
    second = world.claim_one(request, world.worker())

    settled = world.fault(second)

    assert (settled.verdict, settled.put_back, settled.outcome) == (Verdict.SETTLED, False, Outcome.FAULTED)
    status = world.status(request)
    assert (status.done, status.faulted, status.cancelled, status.finished) == (True, True, False, 1)
    assert (status.waiting, status.processing, status.charged) == (0, 0, PRICE)
    assert [result["text"] for result in status.results] == ["kept"]
    assert sorted(world.slots(request)) == ["dropped", "dropped", "dropped", "stored"]
    assert ("voided", None) in [(state, reason) for _, state, reason, *_ in world.jobs(request)]
    late = world.store(running, "late")
    assert (late.verdict, late.reward) == (Verdict.ABORTED, 0)
    assert world.status(request) == status


def test_two_faults_of_different_slots_reach_the_limit_too(world: World) -> None:
    request = world.request(5)
    jobs = world.claim(request, world.worker(), count=5)

    world.fault(jobs[0].id)
    world.fault(jobs[4].id)

    assert world.status(request).outcome is Outcome.FAULTED


def test_workers_that_faulted_or_released_a_request_are_remembered_once(world: World) -> None:
    request, first, second = world.request(3), world.worker(), world.worker()
    world.release(world.claim_one(request, first))
    world.release(world.claim_one(request, first))
    world.fault(world.claim_one(request, second))

    assert world.scalar("SELECT tried_workers FROM requests WHERE id = %(r)s", r=request) == [first.id, second.id]


def test_a_silent_death_is_a_fault_with_reason_stale(world: World) -> None:
    request = world.request()
    for outcome in (None, Outcome.FAULTED):
        job = world.claim_one(request, world.worker())
        assert world.fault_stale(job).verdict is Verdict.NOT_DUE
        world.pass_lease(job)
        assert world.fault_stale(job).outcome is outcome

    assert [(state, reason) for _, state, reason, *_ in world.jobs(request)] == [("faulted", "stale")] * 2
    assert world.claim(request, world.worker()) == []


def test_a_job_that_settled_is_not_stale_however_old_its_lease(world: World) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())
    world.store(job)
    world.pass_lease(job)

    assert world.fault_stale(job).verdict is Verdict.DUPLICATE
    assert world.status(request).outcome is Outcome.COMPLETED


@pytest.mark.parametrize(("column", "reason"), [("expires_at", "expired"), ("deadline", "deadline")])
@pytest.mark.parametrize("report", ["fault", "release"])
def test_a_put_back_past_expiry_or_deadline_is_a_cancel(world: World, column: str, reason: str, report: str) -> None:
    request = world.request(2, deadline=100 if column == "deadline" else None)
    failing, running = (world.claim_one(request, world.worker(), lease=50) for _ in range(2))
    world.pass_time(request, column)

    settled = world.fault(failing) if report == "fault" else world.release(failing)

    assert (settled.put_back, settled.outcome) == (False, Outcome.CANCELLED)
    status = world.status(request)
    assert (status.waiting, status.processing, status.cancelled, status.outcome_reason) == (0, 1, True, reason)
    assert not status.done
    world.store(running, "in flight")
    status = world.status(request)
    assert (status.done, status.finished, status.restarted) == (True, 1, 1)


def test_the_second_fault_past_expiry_is_a_fault(world: World) -> None:
    request = world.request()
    world.fault(world.claim_one(request, world.worker()))
    job = world.claim_one(request, world.worker())
    world.pass_time(request, "expires_at")

    assert world.fault(job).outcome is Outcome.FAULTED


# --- image faults


def test_an_image_request_for_one_faults_at_its_first_fault(world: World) -> None:
    request = world.request(kind=Kind.IMAGE)

    settled = world.fault(world.claim_one(request, world.worker()))

    assert (settled.put_back, settled.outcome) == (False, Outcome.FAULTED)
    status = world.status(request)
    assert (status.done, status.faulted, status.finished) == (True, True, 0)


def test_an_image_request_for_two_with_one_stored_faults_with_one_result(world: World) -> None:
    request = world.request(2, kind=Kind.IMAGE)
    first, second = world.claim(request, world.worker(), count=2)
    world.store(first.id, "picture")

    settled = world.fault(second.id)

    assert (settled.put_back, settled.outcome) == (False, Outcome.FAULTED)
    status = world.status(request)
    assert (status.done, status.faulted, status.cancelled, status.finished) == (True, True, False, 1)


def test_an_image_slot_is_put_back_while_fewer_attempts_than_slots_have_ended(world: World) -> None:
    request = world.request(2, kind=Kind.IMAGE)
    first, second = world.claim(request, world.worker(), count=2)

    assert world.fault(first.id).put_back
    assert not world.status(request).faulted
    world.store(second.id)
    world.store(world.claim_one(request, world.worker()))

    status = world.status(request)
    assert (status.outcome, status.faulted, status.finished, status.restarted) == (Outcome.COMPLETED, False, 2, 1)


def test_an_image_request_faults_at_its_second_fault_like_any_other(world: World) -> None:
    request = world.request(4, kind=Kind.IMAGE)
    jobs = world.claim(request, world.worker(), count=3)

    assert world.fault(jobs[0].id).put_back
    assert world.fault(jobs[1].id).outcome is Outcome.FAULTED
    assert world.status(request).processing == 0


def test_a_cancelled_image_request_whose_last_job_faults_reads_both(world: World) -> None:
    request = world.request(kind=Kind.IMAGE)
    job = world.claim_one(request, world.worker())
    world.cancel(request)
    assert not world.status(request).faulted

    world.fault(job)

    status = world.status(request)
    assert (status.outcome, status.cancelled, status.faulted, status.done) == (Outcome.CANCELLED, True, True, True)


@STREAMED_KINDS
def test_a_cancelled_text_request_whose_last_job_faults_reads_cancelled_only(world: World, kind: Kind) -> None:
    request = world.request(kind=kind)
    job = world.claim_one(request, world.worker())
    world.cancel(request)
    world.fault(job)

    status = world.status(request)
    assert (status.cancelled, status.faulted, status.done, status.restarted) == (True, False, True, 1)
