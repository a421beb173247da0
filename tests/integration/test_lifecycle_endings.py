"""The table of rules, row by row, without concurrency: release, reject, cancel, late and repeated reports."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from horde.lifecycle.cancel import Cancelled
from horde.lifecycle.words import CancelReason, Kind, Outcome, Verdict
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


# --- release


@EVERY_KIND
def test_a_released_slot_is_put_back_and_nobody_is_blamed(world: World, kind: Kind) -> None:
    request = world.request(kind=kind)
    job = world.claim_one(request, world.worker())

    settled = world.release(job)

    assert (settled.verdict, settled.put_back, settled.outcome) == (Verdict.SETTLED, True, None)
    status = world.status(request)
    assert (status.waiting, status.restarted, status.faulted) == (1, 1, False)
    assert world.scalar("SELECT faulted FROM requests WHERE id = %(r)s", r=request) == 0
    assert world.store(job).verdict is Verdict.ABORTED


def test_the_sixth_release_of_a_slot_counts_as_a_fault_but_blames_nobody(world: World) -> None:
    request = world.request(2)
    other = world.claim(request, world.worker(), count=2)[1]
    world.release(other.id)
    world.claim_one(request, world.worker())
    jobs = [job for (job,) in world.rows("SELECT id FROM jobs WHERE request_id = %(r)s AND slot_idx = 0", r=request)]
    for _ in range(5):
        assert world.release(jobs[-1]).put_back
        jobs.append(world.claim_one(request, world.worker()))

    settled = world.release(jobs[-1])

    assert (settled.verdict, settled.put_back) == (Verdict.SETTLED, True), "the first fault: put back once more"
    reasons = [reason for slot, state, reason, *_ in world.jobs(request) if slot == 0 and state == "faulted"]
    assert reasons == ["release_cap"]
    assert world.scalar("SELECT releases FROM slots WHERE request_id = %(r)s AND idx = 1", r=request) == 1
    assert world.release(world.claim_one(request, world.worker())).outcome is Outcome.FAULTED


def test_a_claim_that_no_post_has_named_in_time_is_released(world: World) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker(posts_progress=True), lease=60)

    world.advance(14)
    assert world.release_unstarted(job).verdict is Verdict.NOT_DUE
    world.advance(2)
    assert world.release_unstarted(job).put_back
    assert world.jobs(request)[0][1:3] == ("released", "not_started")


def test_a_claim_that_a_post_has_named_is_not_released(world: World) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker(posts_progress=True), lease=60)
    world.post(job)
    world.advance(16)

    assert world.release_unstarted(job).verdict is Verdict.NOT_DUE


def test_a_worker_that_posts_no_progress_need_not_start_in_time(world: World) -> None:
    job = world.claim_one(world.request(), world.worker())
    world.advance(16)

    assert world.release_unstarted(job).verdict is Verdict.NOT_DUE


# --- reject


@EVERY_KIND
@pytest.mark.parametrize("code", ["context_length_exceeded", "unsupported_parameter"])
def test_a_rejection_ends_the_request_with_its_code_and_blames_nobody(world: World, kind: Kind, code: str) -> None:
    request = world.request(4, kind=kind)
    stored, other, job = (world.claim_one(request, world.worker()) for _ in range(3))
    world.store(stored)

    settled = world.reject(job, code)

    assert (settled.verdict, settled.outcome) == (Verdict.SETTLED, Outcome.REJECTED)
    status = world.status(request)
    assert (status.outcome, status.error_code, status.done, status.faulted) == (Outcome.REJECTED, code, True, True)
    assert (status.finished, status.waiting, status.processing, status.restarted) == (1, 0, 0, 0)
    assert sorted(state for _, state, *_ in world.jobs(request)) == ["rejected", "stored", "voided"]
    assert world.scalar("SELECT faulted FROM requests WHERE id = %(r)s", r=request) == 0
    assert world.store(other).verdict is Verdict.ABORTED
    assert world.store(job).verdict is Verdict.ABORTED


@pytest.mark.parametrize(("code", "known"), [("context_length_exceeded", True), ("too_boring", False)])
def test_a_rejection_that_the_broker_knows_to_be_wrong_is_a_fault(world: World, code: str, known: bool) -> None:
    request = world.request()

    settled = world.reject(world.claim_one(request, world.worker()), code, known=known)

    assert (settled.put_back, settled.outcome) == (True, None)
    assert world.jobs(request)[0][1:3] == ("faulted", "reported")


# --- cancel


@EVERY_KIND
def test_a_cancel_drops_what_waits_and_lets_finish_what_runs(world: World, kind: Kind) -> None:
    request = world.request(3, kind=kind)
    finished, running = (world.claim_one(request, world.worker()) for _ in range(2))
    world.store(finished, "one")

    assert world.cancel(request) is Cancelled.DONE

    status = world.status(request)
    assert (status.cancelled, status.outcome_reason, status.done) == (True, "client", False)
    assert (status.finished, status.processing, status.waiting) == (1, 1, 0)
    assert world.claim(request, world.worker()) == []
    settled = world.store(running, "two")
    assert (settled.verdict, settled.reward, settled.outcome) == (Verdict.SETTLED, REWARD, None)
    status = world.status(request)
    assert (status.cancelled, status.done, status.finished, status.charged) == (True, True, 2, 2 * PRICE)
    assert [result["text"] for result in status.results] == ["one", "two"]


def test_a_second_cancel_or_one_after_another_outcome_changes_nothing(world: World) -> None:
    cancelled, completed = world.request(2), world.request()
    world.claim_one(cancelled, world.worker())
    world.cancel(cancelled)
    world.store(world.claim_one(completed, world.worker()))
    before = [world.status(request) for request in (cancelled, completed)]

    for request in (cancelled, completed):
        assert world.cancel(request, CancelReason.ADMIN) is Cancelled.ALREADY_ENDED

    after = [world.status(request) for request in (cancelled, completed)]
    assert [status.outcome_reason for status in after] == [status.outcome_reason for status in before]
    assert [status.outcome for status in after] == [Outcome.CANCELLED, Outcome.COMPLETED]


def test_cancelling_what_does_not_exist_is_no_error(world: World) -> None:
    assert world.cancel(uuid.uuid4()) is Cancelled.GONE


def test_a_request_cancelled_while_it_only_waits_is_done_at_once(world: World) -> None:
    request = world.request(2)
    world.cancel(request)

    status = world.status(request)
    assert (status.done, status.cancelled, status.finished, status.charged) == (True, True, 0, 0)


@pytest.mark.parametrize("report", ["fault", "release", "reject", "stale"])
def test_after_a_cancel_a_report_settles_its_own_job_only(world: World, report: str) -> None:
    request = world.request(3)
    job, running = (world.claim_one(request, world.worker()) for _ in range(2))
    world.cancel(request)
    if report == "stale":
        world.pass_lease(job)

    settled = {
        "fault": world.fault,
        "release": world.release,
        "reject": world.reject,
        "stale": world.fault_stale,
    }[report](job)

    assert (settled.verdict, settled.put_back, settled.outcome) == (Verdict.SETTLED, False, None)
    status = world.status(request)
    assert (status.outcome, status.processing, status.waiting, status.done) == (Outcome.CANCELLED, 1, 0, False)
    assert status.error_code is None
    assert world.slots(request) == ["dropped", "processing", "dropped"]
    assert world.store(running).verdict is Verdict.SETTLED


def test_two_faults_after_a_cancel_leave_it_cancelled(world: World) -> None:
    request = world.request(3)
    jobs = world.claim(request, world.worker(), count=3)
    world.fault(jobs[0].id)
    world.cancel(request)
    world.fault(jobs[1].id)

    status = world.status(request)
    assert (status.outcome, status.faulted, status.processing, status.done) == (Outcome.CANCELLED, False, 1, False)
    world.fault(jobs[2].id)
    status = world.status(request)
    assert (status.outcome, status.faulted, status.restarted, status.done) == (Outcome.CANCELLED, False, 3, True)


def test_releases_after_a_cancel_are_not_counted_towards_the_cap(world: World) -> None:
    request = world.request()
    for _ in range(5):
        world.release(world.claim_one(request, world.worker()))
    job = world.claim_one(request, world.worker())
    world.cancel(request)

    world.release(job)

    assert world.jobs(request)[-1][1] == "released"


@pytest.mark.parametrize(
    ("reason", "column", "fields"),
    [
        (CancelReason.EXPIRED, "expires_at", {}),
        (CancelReason.DEADLINE, "deadline", {"deadline": 200}),
        (CancelReason.DISCONNECT, "attached_until", {"attached": True}),
    ],
)
def test_maintenance_cancels_only_what_is_due(
    world: World, reason: CancelReason, column: str, fields: dict[str, Any]
) -> None:
    request = world.request(2, **fields)
    job = world.claim_one(request, world.worker(), lease=100)

    assert world.cancel_if_due(request, reason) is Cancelled.NOT_DUE
    assert world.status(request).outcome is None
    world.pass_time(request, column)
    assert world.cancel_if_due(request, reason) is Cancelled.DONE
    status = world.status(request)
    assert (status.outcome_reason, status.processing, status.waiting, status.done) == (reason.value, 1, 0, False)
    assert world.store(job).verdict is Verdict.SETTLED
    assert world.status(request).done


def test_expiry_leaves_a_request_alone_that_only_runs(world: World) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())
    world.pass_time(request, "expires_at")

    assert world.cancel_if_due(request, CancelReason.EXPIRED) is Cancelled.NOT_DUE
    assert world.store(job).outcome is Outcome.COMPLETED


@pytest.mark.parametrize("reason", [CancelReason.DEADLINE, CancelReason.DISCONNECT])
def test_a_request_without_deadline_or_client_is_never_due_for_it(world: World, reason: CancelReason) -> None:
    assert world.cancel_if_due(world.request(), reason) is Cancelled.NOT_DUE


# --- late, double and repeated reports


@pytest.mark.parametrize("ended", ["fault", "release", "reject", "stale", "voided"])
@pytest.mark.parametrize("late", ["store", "fault", "release", "reject", "stale"])
def test_a_late_report_changes_nothing(world: World, ended: str, late: str) -> None:
    request = world.request(3)
    job, other = (world.claim_one(request, world.worker()) for _ in range(2))
    reports = {
        "store": world.store,
        "fault": world.fault,
        "release": world.release,
        "reject": world.reject,
        "stale": world.fault_stale,
    }
    world.pass_lease(job)
    if ended == "voided":
        world.reject(other)
    else:
        reports[ended](job)
    before, jobs = world.status(request), world.jobs(request)

    settled = reports[late](job)

    assert (settled.verdict, settled.reward, settled.put_back) == (Verdict.ABORTED, 0, False)
    assert world.jobs(request) == jobs
    after = world.status(request)
    assert (after.outcome, after.waiting, after.processing, after.charged, after.restarted) == (
        before.outcome,
        before.waiting,
        before.processing,
        before.charged,
        before.restarted,
    )


@pytest.mark.parametrize("late", ["store", "fault", "release", "reject", "stale"])
def test_any_report_about_a_stored_job_is_a_duplicate(world: World, late: str) -> None:
    request = world.request(2)
    job = world.claim_one(request, world.worker())
    world.store(job, "first")
    world.pass_lease(job)
    jobs = world.jobs(request)

    report = {"fault": world.fault, "release": world.release, "reject": world.reject, "stale": world.fault_stale}
    settled = world.store(job, "second") if late == "store" else report[late](job)

    assert settled.verdict is Verdict.DUPLICATE
    assert world.jobs(request) == jobs
    assert [result["text"] for result in world.status(request).results] == ["first"]


@pytest.mark.parametrize("report", ["store", "fault", "release", "reject"])
def test_a_report_repeated_with_its_key_is_answered_as_before(world: World, report: str) -> None:
    request = world.request(2)
    job = world.claim_one(request, world.worker())
    report_with = {"store": world.store, "fault": world.fault, "release": world.release, "reject": world.reject}[report]
    first = report_with(job, key="k")
    before, jobs = world.status(request), world.jobs(request)

    again = report_with(job, key="k")

    assert first.verdict is Verdict.SETTLED
    assert (again.verdict, again.reward) == (Verdict.REPEATED, first.reward)
    assert again.answer == {"reward": first.reward}
    assert world.jobs(request) == jobs
    assert world.status(request).outcome is before.outcome
    other = report_with(job, key="other")
    assert other.verdict is (Verdict.DUPLICATE if report == "store" else Verdict.ABORTED)


def test_reports_about_a_job_nobody_made_are_told_that_it_is_gone(world: World) -> None:
    for report in (world.store, world.fault, world.release, world.reject, world.fault_stale, world.release_unstarted):
        assert report(uuid.uuid4()).verdict is Verdict.GONE
