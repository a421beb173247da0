"""The races of a generation, each staged on real connections: held at a named statement, or started at one moment.

Cancels, claims and retention have their own files beside this one; every pair of transitions is in the interleavings.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from horde.lifecycle import due, progress, rows, settle, store
from horde.lifecycle.settle import Settlement
from horde.lifecycle.words import Kind, Outcome, Verdict
from tests.support.concurrency import Stage, together
from tests.support.invariants import check_invariants
from tests.support.world import PRICE, REWARD, World, open_world

ROUNDS = 50


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with open_world(database_url, connections=36) as made:
        yield made
        check_invariants(made.db)


@pytest.fixture
def stage(world: World) -> Iterator[Stage]:
    with Stage(world.db) as made:
        yield made


def verdicts(settlements: list[Settlement]) -> Counter[Verdict]:
    return Counter(settlement.verdict for settlement in settlements)


# --- faults


def test_a_fault_reported_many_times_at_once_counts_once(world: World) -> None:
    worker = world.worker()
    for _ in range(ROUNDS):
        request = world.request(2)
        job = world.claim_one(request, worker)

        found = together(*[partial(world.fault, job)] * 8)

        assert verdicts(found) == {Verdict.SETTLED: 1, Verdict.ABORTED: 7}
        status = world.status(request)
        assert (status.waiting, status.processing, status.restarted, status.outcome) == (2, 0, 1, None)
        aborts = "SELECT count(*) FROM events WHERE job_id = %(job)s AND kind = 'faulted' AND reason <> 'release_cap'"
        assert world.scalar(aborts, job=job) == 1


def test_thirty_two_workers_report_the_second_fault_at_once_and_the_request_faults_once(world: World) -> None:
    workers = [world.worker() for _ in range(32)]
    for before in [0, 1] * 6:
        request = world.request(33)
        for _ in range(before):
            world.fault(world.claim_one(request, workers[0]))
        jobs = [world.claim_one(request, worker) for worker in workers]

        found = together(*[partial(world.fault, job) for job in jobs])

        assert verdicts(found) == {Verdict.SETTLED: 2 - before, Verdict.ABORTED: 30 + before}
        assert [settlement.outcome for settlement in found].count(Outcome.FAULTED) == 1
        status = world.status(request)
        assert (status.outcome, status.done, status.waiting, status.processing) == (Outcome.FAULTED, True, 0, 0)
        states = Counter(state for _, state, *_ in world.jobs(request))
        assert states == {"faulted": 2, "voided": 30 + before}


def test_the_second_fault_waits_for_the_first_and_ends_the_request(world: World, stage: Stage) -> None:
    request = world.request(2)
    first, second = world.claim(request, world.worker(), count=2)

    one, two = stage.in_order(partial(world.fault, first.id), partial(world.fault, second.id), after=settle.SETTLE_JOB)

    assert (one.put_back, one.outcome) == (True, None)
    assert (two.put_back, two.outcome) == (False, Outcome.FAULTED)
    assert world.slots(request) == ["dropped", "dropped"]


def test_a_fault_and_a_stale_pass_over_the_same_job_count_once(world: World) -> None:
    worker = world.worker()
    for _ in range(ROUNDS):
        request = world.request()
        job = world.claim_one(request, worker)
        world.pass_lease(job)

        found = together(partial(world.fault, job), partial(world.fault_stale, job), partial(world.fault_stale, job))

        assert verdicts(found) == {Verdict.SETTLED: 1, Verdict.ABORTED: 2}
        assert (world.status(request).restarted, world.status(request).waiting) == (1, 1)


def test_a_result_and_a_fault_of_one_job_at_once_settle_it_once(world: World) -> None:
    worker = world.worker()
    for _ in range(ROUNDS):
        request = world.request(2)
        job = world.claim_one(request, worker)

        stored, faulted = together(partial(world.store, job, "good"), partial(world.fault, job))

        status = world.status(request)
        if stored.verdict is Verdict.SETTLED:
            assert (faulted.verdict, status.finished, status.restarted) == (Verdict.DUPLICATE, 1, 0)
        else:
            assert (stored.verdict, stored.reward, faulted.verdict) == (Verdict.ABORTED, 0, Verdict.SETTLED)
            assert (status.finished, status.restarted, status.waiting) == (0, 1, 2)


def test_a_fault_that_waits_for_a_result_finds_it_stored(world: World, stage: Stage) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())

    stored, faulted = stage.in_order(partial(world.store, job), partial(world.fault, job), after=store.STORE_JOB)

    assert (stored.outcome, faulted.verdict) == (Outcome.COMPLETED, Verdict.DUPLICATE)
    assert world.status(request).restarted == 0


def test_a_result_that_waits_for_a_fault_finds_its_job_aborted(world: World, stage: Stage) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())

    faulted, stored = stage.in_order(partial(world.fault, job), partial(world.store, job), after=settle.SETTLE_JOB)

    assert (faulted.put_back, stored.verdict, stored.reward) == (True, Verdict.ABORTED, 0)
    assert world.claim(request, world.worker())


def test_a_late_fault_on_a_stored_job_changes_nothing(world: World, stage: Stage) -> None:
    request = world.request(2)
    job = world.claim_one(request, world.worker())
    late = stage.hold(partial(world.fault, job), before=rows.LOCK_JOB_REQUEST)
    world.store(job, "good")
    before = world.status(request).results, world.slots(request), world.jobs(request)

    assert late.result().verdict is Verdict.DUPLICATE

    assert (world.status(request).results, world.slots(request), world.jobs(request)) == before


# --- submits


@pytest.mark.parametrize("texts", [["text"] * 8, [f"text {number}" for number in range(8)]], ids=["same", "different"])
def test_eight_submits_of_one_job_at_once_store_and_pay_one(world: World, texts: list[str]) -> None:
    worker, acknowledged = world.worker(), {}
    for _ in range(ROUNDS):
        request = world.request(2)
        job = world.claim_one(request, worker)

        found = together(*[partial(world.store, job, text) for text in texts])

        assert verdicts(found) == {Verdict.SETTLED: 1, Verdict.DUPLICATE: 7}
        acknowledged[job] = texts[[settlement.verdict for settlement in found].index(Verdict.SETTLED)]
        status = world.status(request)
        assert [result["text"] for result in status.results] == [acknowledged[job]]
        assert (status.charged, status.finished, status.waiting) == (PRICE, 1, 1)
    check_invariants(world.db, acknowledged=acknowledged)


def test_one_submit_sent_twice_with_its_key_is_paid_once_and_answered_alike(world: World) -> None:
    worker = world.worker()
    for _ in range(ROUNDS):
        request = world.request()
        job = world.claim_one(request, worker)

        found = together(*[partial(world.store, job, key="k")] * 4)

        assert verdicts(found) == {Verdict.SETTLED: 1, Verdict.REPEATED: 3}
        assert {settlement.reward for settlement in found} == {REWARD}
        assert world.status(request).charged == PRICE


def test_the_last_results_at_once_complete_the_request_once(world: World) -> None:
    worker = world.worker()
    for _ in range(ROUNDS):
        request = world.request(4)
        jobs = world.claim(request, worker, count=4)

        found = together(*[partial(world.store, job.id) for job in jobs])

        assert verdicts(found) == {Verdict.SETTLED: 4}
        assert [settlement.outcome for settlement in found].count(Outcome.COMPLETED) == 1
        status = world.status(request)
        assert (status.done, status.finished, status.charged) == (True, 4, 4 * PRICE)


# --- a stale attempt and the next one


@pytest.mark.parametrize("same_worker", [True, False])
def test_a_stale_attempt_never_touches_the_next_one(world: World, same_worker: bool) -> None:
    worker = world.worker(posts_progress=True)
    request = world.request(kind=Kind.CHAT, attached=True)
    stale = world.claim_one(request, worker, lease=60)
    world.post(stale, [1, 2], "ab")
    world.pass_lease(stale)
    world.stay_attached(request)
    assert world.fault_stale(stale).put_back
    assert world.store(stale, "while it waits again").verdict is Verdict.ABORTED
    fresh = world.claim_one(request, worker if same_worker else world.worker(posts_progress=True), lease=60)
    world.post(fresh, [3], "c", offset=2)
    lease = world.scalar("SELECT lease_end FROM jobs WHERE id = %(job)s", job=fresh)

    assert world.post(stale, [9, 9], "zz", offset=2).stop == "stale"
    for report in (world.store, world.fault, world.release, world.reject, world.fault_stale, world.release_unstarted):
        assert report(stale).verdict is Verdict.ABORTED

    assert world.scalar("SELECT lease_end FROM jobs WHERE id = %(job)s", job=fresh) == lease
    assert world.rows("SELECT text FROM progress WHERE job_id = %(job)s", job=fresh) == [("abc",)]
    assert world.store(fresh, "abcd", tokens=4, token_ids=[1, 2, 3, 4]).outcome is Outcome.COMPLETED
    status = world.status(request)
    assert ([result["text"] for result in status.results], status.charged) == (["abcd"], PRICE)


def test_a_stale_attempts_submit_at_the_moment_of_the_next_ones(world: World) -> None:
    worker = world.worker()
    for _ in range(ROUNDS):
        request = world.request()
        stale = world.claim_one(request, worker)
        world.fault(stale)
        fresh = world.claim_one(request, worker)

        late, settled = together(partial(world.store, stale, "stale"), partial(world.store, fresh, "fresh"))

        assert (late.verdict, settled.verdict) == (Verdict.ABORTED, Verdict.SETTLED)
        assert [result["text"] for result in world.status(request).results] == ["fresh"]


# --- stale cleanup


def store_it(world: World, job: uuid.UUID) -> None:
    world.store(job, "in time")


def hand_it_to_the_next(world: World, job: uuid.UUID) -> None:
    world.release(job)
    world.claim_one(request_of(world, job), world.worker())


def extend_it(world: World, job: uuid.UUID) -> None:
    world.post(job, [1], "a")


def end_its_request(world: World, job: uuid.UUID) -> None:
    world.reject(world.claim_one(request_of(world, job), world.worker()))


def request_of(world: World, job: uuid.UUID) -> uuid.UUID:
    return uuid.UUID(str(world.scalar("SELECT request_id FROM jobs WHERE id = %(job)s", job=job)))


@pytest.mark.parametrize(
    ("meanwhile", "verdict", "state"),
    [
        (store_it, Verdict.DUPLICATE, "stored"),
        (hand_it_to_the_next, Verdict.ABORTED, "released"),
        (extend_it, Verdict.NOT_DUE, "processing"),
        (end_its_request, Verdict.ABORTED, "voided"),
    ],
)
def test_stale_cleanup_cannot_requeue_a_job_that_changed_after_it_was_loaded(
    world: World, stage: Stage, meanwhile: Callable[[World, uuid.UUID], None], verdict: Verdict, state: str
) -> None:
    request = world.request(2)
    job = world.claim_one(request, world.worker(posts_progress=True), lease=60)
    world.pass_lease(job)
    assert job in list(due.pages(world.db, due.STALE))
    cleanup = stage.hold(partial(world.fault_stale, job), before=rows.LOCK_JOB_REQUEST)
    meanwhile(world, job)
    before = world.jobs(request), world.slots(request)

    found = cleanup.result()

    assert (found.verdict, found.put_back, found.outcome) == (verdict, False, None)
    assert (world.jobs(request), world.slots(request)) == before
    assert world.scalar("SELECT state FROM jobs WHERE id = %(job)s", job=job) == state


@pytest.mark.parametrize(
    ("meanwhile", "held_after", "verdict"),
    [
        (World.store, store.STORE_JOB, Verdict.DUPLICATE),
        (World.release, settle.SETTLE_JOB, Verdict.ABORTED),
        (World.reject, settle.SETTLE_JOB, Verdict.ABORTED),
        (World.post, progress.RENEW, Verdict.NOT_DUE),
    ],
)
def test_stale_cleanup_that_waits_for_another_change_sees_it(
    world: World, stage: Stage, meanwhile: Callable[[World, uuid.UUID], object], held_after: str, verdict: Verdict
) -> None:
    job = world.claim_one(world.request(2), world.worker(posts_progress=True), lease=60)
    world.pass_lease(job)

    _, found = stage.in_order(partial(meanwhile, world, job), partial(world.fault_stale, job), after=held_after)

    assert (found.verdict, found.put_back, found.outcome) == (verdict, False, None)


def test_a_report_that_waits_for_the_stale_cleanup_finds_its_job_aborted(world: World, stage: Stage) -> None:
    request = world.request()
    job = world.claim_one(request, world.worker())
    world.pass_lease(job)

    cleaned, late = stage.in_order(
        partial(world.fault_stale, job), partial(world.store, job), after=settle.SETTLE_STALE_JOB
    )

    assert (cleaned.put_back, late.verdict) == (True, Verdict.ABORTED)
    assert world.status(request).waiting == 1


def test_a_cleanup_that_began_before_the_lease_ended_goes_by_the_moment_of_its_statement(
    world: World, stage: Stage
) -> None:
    job = world.claim_one(world.request(), world.worker())
    cleanup = stage.hold(partial(world.fault_stale, job), before=settle.SETTLE_STALE_JOB)

    world.pass_lease(job)

    assert cleanup.result().put_back, "the transaction is older than the end of the lease, its statement is not"


def test_two_leaders_over_two_thousand_stale_jobs_while_submits_arrive(world: World) -> None:
    worker = world.worker()
    jobs = [job.id for _ in range(1000) for job in world.claim(world.request(2), worker, count=2)]
    world.pass_lease(jobs[-1])
    arriving = random.Random(7).sample(jobs, 600)

    def sweep() -> list[Settlement]:
        return [world.fault_stale(job) for job in due.pages(world.db, due.STALE)]

    def submit() -> list[Settlement]:
        return [world.store(job, f"text of {job}") for job in arriving]

    one, two, submitted = together(sweep, sweep, submit, within=100)

    settled = [found for found in one + two if found.verdict is Verdict.SETTLED]
    assert verdicts(submitted).keys() <= {Verdict.SETTLED, Verdict.ABORTED}
    told = zip(arriving, submitted, strict=True)
    acknowledged = {job: f"text of {job}" for job, found in told if found.verdict is Verdict.SETTLED}
    assert acknowledged, "no submit was in time"
    states = dict(world.rows("SELECT state, count(*) FROM jobs GROUP BY state"))
    assert states == {"stored": len(acknowledged), "faulted": len(settled)}, "each settled once, by one of the three"
    assert sum(states.values()) == 2000
    check_invariants(world.db, acknowledged=acknowledged, swept=0)
