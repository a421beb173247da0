"""Guards that no rule of the lifecycle shows by itself: what each keeps apart is staged here, one guard a test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import sqlalchemy as sa

from horde.lifecycle import outages, progress, rows
from horde.lifecycle.claim import Claimant, ClaimedJob, claim
from horde.lifecycle.progress import Chunk, post_progress
from horde.lifecycle.words import Kind, Outcome, Verdict
from horde.maintenance.leader import TERM_SECONDS, Leadership
from horde.queue import candidates
from horde.queue.candidates import Popper, claim_first
from tests.support.concurrency import Stage
from tests.support.invariants import check_invariants
from tests.support.world import World, open_world


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with open_world(database_url, connections=8) as made:
        yield made
        check_invariants(made.db)


@pytest.fixture
def stage(world: World) -> Iterator[Stage]:
    with Stage(world.db) as made:
        yield made


# --- what a transition leaves alone


@pytest.mark.parametrize("kind", Kind)
def test_a_result_stored_by_the_cancel_that_a_late_fault_became_is_the_latest_to_settle(
    world: World, kind: Kind
) -> None:
    request = world.request(3, kind=kind, attached=True, deadline=100)
    late = world.claim_one(request, world.worker())
    running = world.claim_one(request, world.worker(posts_progress=True), lease=60)
    world.post(running, [1], "a")
    world.advance(101)

    assert world.fault(late).outcome is Outcome.CANCELLED

    status = world.status(request)
    assert (status.cancelled, status.faulted, status.finished, status.done) == (True, False, 1, True)


def test_a_claim_that_ended_before_it_started_is_not_released_for_not_starting(world: World) -> None:
    request = world.request(2)
    job = world.claim_one(request, world.worker(posts_progress=True), lease=60)
    world.fault(job)
    world.advance(16)

    assert world.release_unstarted(job).verdict is Verdict.ABORTED
    assert world.status(request).restarted == 1


def test_a_claim_that_gets_nothing_does_not_move_the_expiry(world: World) -> None:
    request = world.request()
    world.claim_one(request, world.worker(), lease=150)
    before = world.scalar("SELECT expires_at FROM requests WHERE id = %(id)s", id=request)

    assert world.claim(request, world.worker(), lease=3600) == []

    assert world.scalar("SELECT expires_at FROM requests WHERE id = %(id)s", id=request) == before


def test_a_result_does_not_complete_a_request_while_a_slot_waits(world: World) -> None:
    request = world.request(2)

    assert world.store(world.claim_one(request, world.worker())).outcome is None
    assert world.store(world.claim_one(request, world.worker())).outcome is Outcome.COMPLETED


def test_a_post_for_a_job_of_a_worker_that_announced_none_leaves_its_lease_alone(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(), lease=3600)
    lease = "SELECT lease_end FROM jobs WHERE id = %(id)s"
    before = world.scalar(lease, id=job)

    world.post(job, [1], "a")

    assert world.scalar(lease, id=job) == before


def test_a_post_for_a_job_of_another_owner_is_told_to_stop_and_changes_nothing(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(posts_progress=True), lease=60)
    stranger = world.user()
    chunk = Chunk(job, token_ids=[1], text="a")

    (answer,) = world.db.run(lambda tx: post_progress(tx, stranger, [chunk]))

    assert (answer.stop, answer.accepted) == ("stale", 0)
    assert world.rows("SELECT text FROM progress") == []
    assert world.scalar("SELECT started_at IS NULL FROM jobs WHERE id = %(id)s", id=job)


# --- locks


def streamed(world: World, n: int) -> tuple[uuid.UUID, Claimant, list[uuid.UUID]]:
    """An attached request, the worker that runs all its slots, and the jobs by id."""
    worker = world.worker(posts_progress=True)
    request = world.request(n, kind=Kind.CHAT, attached=True)
    jobs = world.claim(request, worker, count=n, lease=60)
    return request, worker, sorted(job.id for job in jobs)


def test_a_cancel_waits_for_a_post_under_way_and_stores_what_it_brought(world: World, stage: Stage) -> None:
    request, _, (job,) = streamed(world, 1)
    world.post(job, [1], "a")

    posted, _ = stage.in_order(
        partial(world.post, job, [2], "b", offset=1), partial(world.cancel, request), after=progress.APPEND
    )

    assert posted.accepted == 2
    assert [result["text"] for result in world.status(request).results] == ["ab"]


def test_a_post_that_has_begun_is_not_overtaken_by_the_end_of_its_job(world: World, stage: Stage) -> None:
    request, _, (job,) = streamed(world, 1)

    posted, stored = stage.in_order(
        partial(world.post, job, [1], "a"),
        partial(world.store, job, "all of it", token_ids=[1, 2]),
        after=progress.LOCK_JOBS,
    )

    assert (posted.accepted, posted.stop) == (1, None)
    assert stored.verdict is Verdict.SETTLED
    assert [result["text"] for result in world.status(request).results] == ["all of it"]


def test_a_post_and_a_cancel_take_their_jobs_in_the_same_order(world: World, stage: Stage) -> None:
    request, worker, jobs = streamed(world, 2)

    def hold_the_first() -> None:
        with world.db.transaction() as tx:
            tx.execute("SELECT FROM jobs WHERE id = %(id)s FOR UPDATE", {"id": jobs[0]})
            tx.execute("SELECT 'held'")

    def post_both() -> list[str | None]:
        chunks = [Chunk(job, token_ids=[1], text="a") for job in reversed(jobs)]
        return [answer.stop for answer in world.db.run(lambda tx: post_progress(tx, worker.owner_id, chunks))]

    holding = stage.hold(hold_the_first, before="SELECT 'held'")
    posting = stage.blocked(post_both)
    cancelling = stage.blocked(partial(world.cancel, request))
    holding.go_on()

    # A deadlock in either, even one that a retry would hide, is raised here.
    assert posting.result() == [None, None]
    cancelling.result()
    assert [result["text"] for result in world.status(request).results] == ["a", "a"]


def test_two_brokers_that_find_the_same_outage_write_it_once(world: World, stage: Stage) -> None:
    world.beat()
    count = "SELECT count(*) FROM outages"
    before = world.scalar(count)
    with world.db.transaction() as tx:
        tx.execute("UPDATE clock SET ahead = ahead + interval '40 seconds'")

    first, second = stage.in_order(world.beat, world.beat, after=outages.LOCK_HEARTBEAT)

    assert (first.outage > 0, second.outage) == (True, 0)
    assert world.scalar(count) == before + 1


def test_only_one_leads_until_its_term_is_over(world: World) -> None:
    one, other = Leadership(), Leadership()

    assert world.db.run(one.take_or_renew)
    assert not world.db.run(other.take_or_renew)
    assert (one.holds(), other.holds()) == (True, False)
    assert world.db.run(one.take_or_renew), "it may stay"
    world.advance(TERM_SECONDS + 1)
    assert world.db.run(other.take_or_renew)
    assert not world.db.run(one.take_or_renew)


# --- the pop


def popper(worker: Claimant) -> Popper:
    """What a pop of this worker offers."""
    return Popper(
        worker_id=worker.id,
        kinds=[Kind.TEXT],
        models=["m"],
        max_length=512,
        max_context_length=4096,
        trusted=False,
        speed=None,
        friends=[worker.owner_id],
    )


def pop(world: World, worker: Claimant, most: int = 1) -> Sequence[ClaimedJob]:
    """Claim a slot of the first request in the queue, or so many of the first few."""
    return claim_first(
        world.db,
        popper(worker),
        lambda tx, found, count: claim(tx, found.request_id, worker, model="m", lease=150, count=count),
        most=most,
        several=most > 1,
    )


def test_a_pop_that_finds_its_only_request_locked_waits_for_it_and_gets_its_slot(world: World, stage: Stage) -> None:
    world.request(2)
    one, other = world.worker(), world.worker()

    first, second = stage.in_order(
        partial(pop, world, one), partial(pop, world, other), after=candidates.CHOOSE_UNLOCKED
    )

    assert [job.slot for job in [*first, *second]] == [0, 1]


def test_a_pop_passes_over_a_locked_request_when_another_waits(world: World, stage: Stage) -> None:
    world.request()
    behind = world.request()
    one, other = world.worker(), world.worker()
    holding = stage.hold(partial(pop, world, one), after=candidates.CHOOSE_UNLOCKED)

    (job,) = pop(world, other)

    assert world.scalar("SELECT request_id FROM jobs WHERE id = %(id)s", id=job.id) == behind
    assert len(holding.result()) == 1


def test_a_pop_that_holds_a_request_does_not_wait_for_the_next_one(
    world: World, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the third try does; two that waited for each other's requests would never end.
    monkeypatch.setattr(candidates, "TRIES_WITHOUT_WAITING", 0)
    first, locked, last = world.request(), world.request(), world.request()
    holding = stage.hold(partial(world.cancel, locked), after=rows.LOCK_REQUEST)

    jobs = pop(world, world.worker(), most=3)

    requests = [world.scalar("SELECT request_id FROM jobs WHERE id = %(id)s", id=job.id) for job in jobs]
    assert requests == [first, last]
    holding.result()


# --- unique names


def test_two_workers_of_one_name_cannot_both_live(world: World) -> None:
    first = world.worker(name="Twin")
    with pytest.raises(sa.exc.IntegrityError, match='"uq_workers_name"'):
        world.worker(name="Twin")

    with world.db.transaction() as tx:
        tx.execute("UPDATE workers SET deleted_at = horde_now() WHERE id = %(id)s", {"id": first.id})
    assert world.worker(name="Twin").id != first.id


def test_there_is_one_mint(world: World) -> None:
    with pytest.raises(sa.exc.IntegrityError, match='"uq_accounts_system"'):
        world.db.run(lambda tx: tx.execute("INSERT INTO accounts (kind) VALUES ('mint')"))


def test_a_job_is_read_under_the_lock_of_its_request(world: World, stage: Stage) -> None:
    request = world.request(2)
    first, second = world.claim(request, world.worker(), count=2)

    one, two = stage.in_order(
        partial(world.store, first.id), partial(world.store, second.id), after=rows.LOCK_JOB_REQUEST
    )

    assert (one.outcome, two.outcome) == (None, Outcome.COMPLETED)
