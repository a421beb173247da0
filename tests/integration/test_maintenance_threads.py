"""Maintenance beside live work: passes, leaders that die or stand still, outages, and the timers that run it."""

from __future__ import annotations

import time
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from horde.lifecycle import rows, settle
from horde.lifecycle.terms import Terms
from horde.lifecycle.words import CancelReason, Kind, Outcome, Verdict
from horde.maintenance import leader
from horde.maintenance.folds import fold
from horde.maintenance.leader import TERM_SECONDS, Leadership
from horde.maintenance.passes import Done, run_pass
from horde.maintenance.scheduler import Maintenance
from horde.settings import Settings
from horde.usecases.context import Context
from tests.support.concurrency import Stage, eventually, together
from tests.support.invariants import check_invariants
from tests.support.world import World


@contextmanager
def open_context(url: str, **settings: object) -> Iterator[Context]:
    values = {"database_url": url, "database_pool": 12, **settings}
    context = Context.create(Settings(**values))  # type: ignore[arg-type]
    try:
        yield context
    finally:
        context.close()


@pytest.fixture
def context(database_url: str) -> Iterator[Context]:
    with open_context(database_url) as made:
        yield made


@pytest.fixture
def world(context: Context) -> Iterator[World]:
    made = World(context.database)
    # Some broker was alive until now: the age of the template is no outage.
    with context.database.transaction() as tx:
        tx.execute("UPDATE heartbeat SET beat_at = horde_now()")
    yield made
    fold(context)
    check_invariants(context.database, folded=True)


# --- passes


@pytest.mark.parametrize("end", ["store", "fault", "release"])
def test_expiry_settles_after_the_work_in_flight_and_keeps_partial_results(
    context: Context, world: World, end: str
) -> None:
    request = world.request(3)
    world.store(world.claim_one(request, world.worker()), "one")
    running = world.claim_one(request, world.worker(posts_progress=True), lease=60)
    world.pass_time(request, "expires_at")
    world.post(running, [1], "a")

    assert run_pass(context) == Done(cancelled=1)

    status = world.status(request)
    assert (status.outcome_reason, status.finished, status.processing, status.waiting) == ("expired", 1, 1, 0)
    assert not status.done
    assert run_pass(context) == Done()
    {"store": partial(world.store, running, "two"), "fault": partial(world.fault, running)}.get(
        end, partial(world.release, running)
    )()
    status = world.status(request)
    assert (status.done, status.cancelled, status.waiting) == (True, True, 0)
    assert [result["text"] for result in status.results] == (["one", "two"] if end == "store" else ["one"])
    assert world.claim(request, world.worker()) == []


def test_a_job_whose_worker_dies_each_time_ends_its_request_after_two_leases(context: Context, world: World) -> None:
    request = world.request()
    world.release(world.claim_one(request, world.worker()))
    for _ in range(2):
        job = world.claim_one(request, world.worker())
        assert run_pass(context) == Done()
        world.pass_lease(job)
        assert run_pass(context) == Done(stale=1)

    status = world.status(request)
    assert (status.outcome, status.done, status.faulted) == (Outcome.FAULTED, True, True)
    assert [(state, reason) for _, state, reason, *_ in world.jobs(request)] == [
        ("released", "handed_back"),
        ("faulted", "stale"),
        ("faulted", "stale"),
    ]
    check_invariants(context.database, swept=0)


def test_one_pass_deals_with_everything_that_is_due_and_with_nothing_else(context: Context, world: World) -> None:
    world.terms = Terms(retention=1200)
    worker, poster = world.worker(), world.worker(posts_progress=True)
    old = world.request()
    world.store(world.claim_one(old, worker))
    world.advance(1100)
    young = world.request()
    world.store(world.claim_one(young, worker))
    world.advance(70)
    late, lapsed, stale, unstarted = (
        world.request(deadline=100),
        world.request(attached=True),
        world.request(),
        world.request(),
    )
    world.claim_one(stale, worker, lease=30)
    world.advance(60)
    world.claim_one(unstarted, poster, lease=60)
    world.advance(41)
    waiting, running, attached = world.request(), world.request(), world.request(attached=True)
    world.claim_one(running, worker)

    assert run_pass(context) == Done(stale=1, unstarted=1, cancelled=2, deleted=1)

    assert world.rows("SELECT id FROM requests WHERE id = %(r)s", r=old) == []
    assert world.status(young).done
    assert world.status(late).outcome_reason == "deadline"
    assert world.status(lapsed).outcome_reason == "disconnect"
    assert [world.jobs(request)[0][1:3] for request in (stale, unstarted)] == [
        ("faulted", "stale"),
        ("released", "not_started"),
    ]
    assert [world.status(request).outcome for request in (waiting, running, attached)] == [None] * 3
    assert run_pass(context) == Done()


def test_retention_by_passes_keeps_events_and_ledger(context: Context, world: World) -> None:
    requests = [world.request() for _ in range(450)]
    worker = world.worker()
    for request in requests:
        world.store(world.claim_one(request, worker))
    fold(context)
    lines = world.scalar("SELECT count(*) FROM ledger")
    world.advance(1201)

    assert run_pass(context) == Done(deleted=450), "more than two batches in one pass"

    assert world.scalar("SELECT count(*) FROM requests") == 0
    assert world.scalar("SELECT count(*) FROM events") == 3 * 450
    assert world.scalar("SELECT count(*) FROM ledger") == lines > 0
    assert world.scalar("SELECT fulfilled FROM worker_totals") == 450


def test_a_row_that_cannot_be_dealt_with_does_not_keep_the_rest_waiting(context: Context, world: World) -> None:
    broken, sound = world.request(), world.request()
    worker = world.worker()
    world.claim_one(broken, worker, lease=30)
    job = world.claim_one(sound, worker)
    with context.database.transaction() as tx:
        # What no transition does: counters that say that its one slot waits, so that putting it back is refused.
        tx.execute("UPDATE requests SET waiting = 1, processing = 0 WHERE id = %(r)s", {"r": broken})
    world.pass_lease(job)

    try:
        run_pass(context)
        assert world.jobs(sound)[0][1] == "faulted"
        assert world.jobs(broken)[0][1] == "processing"
    finally:
        with context.database.transaction() as tx:
            tx.execute("UPDATE requests SET waiting = 0, processing = 1 WHERE id = %(r)s", {"r": broken})


# --- leaders


def bid(context: Context, leadership: Leadership) -> bool:
    return context.database.write_one(leadership.take_or_renew)


def stale_jobs(world: World, count: int) -> list[uuid.UUID]:
    worker = world.worker()
    jobs = [world.claim_one(world.request(), worker) for _ in range(count)]
    world.pass_lease(jobs[-1])
    return jobs


def test_when_a_leader_dies_another_takes_over_after_its_term(context: Context, world: World) -> None:
    dead, next_one = Leadership(), Leadership()
    stale_jobs(world, 3)
    assert bid(context, dead)

    assert not bid(context, next_one)
    assert not next_one.holds()
    world.advance(TERM_SECONDS + 1)
    assert bid(context, next_one)
    assert run_pass(context, may_go_on=next_one.holds) == Done(stale=3)
    assert not bid(context, dead)


def test_a_leader_that_gives_up_is_followed_at_once(context: Context) -> None:
    first, second = Leadership(), Leadership()
    assert bid(context, first)

    context.database.write_one(first.give_up)

    assert bid(context, second)
    assert not first.holds()
    context.database.write_one(first.give_up)
    assert not bid(context, Leadership()), "it gave up its own lead only"


def test_a_leader_paused_past_its_lease_stops_where_it_was(
    context: Context, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    paused, next_one = Leadership(), Leadership()
    jobs = stale_jobs(world, 4)
    assert bid(context, paused)
    with Stage(context.database) as stage:
        # It has settled one, and stands before the lock for the next.
        passing = stage.hold(partial(run_pass, context, may_go_on=paused.holds), before=rows.LOCK_JOB_REQUEST, skip=1)
        world.advance(TERM_SECONDS + 1)
        assert bid(context, next_one)
        assert run_pass(context, may_go_on=next_one.holds) == Done(stale=3)
        after = time.monotonic() + TERM_SECONDS + 1
        monkeypatch.setattr(leader, "time", types.SimpleNamespace(monotonic=lambda: after))

        assert passing.result() == Done(stale=1)

    assert passing.statements.count(rows.LOCK_JOB_REQUEST) == 2, "after the one it stood before it asks, and stops"
    assert [world.scalar("SELECT state FROM jobs WHERE id = %(j)s", j=job) for job in jobs] == ["faulted"] * 4
    assert world.scalar("SELECT max(faulted) FROM requests") == 1


def test_a_leader_that_does_not_know_that_it_has_been_replaced_does_no_harm(context: Context, world: World) -> None:
    jobs = stale_jobs(world, 6)
    with Stage(context.database) as stage:
        passing = stage.hold(partial(run_pass, context), before=rows.LOCK_JOB_REQUEST, skip=2)
        assert run_pass(context) == Done(stale=4)

        assert passing.result() == Done(stale=2)

    assert world.scalar("SELECT count(*) FROM events WHERE kind = 'faulted'") == len(jobs)
    assert world.scalar("SELECT sum(waiting) FROM requests") == len(jobs)


def test_two_leaders_at_once_beside_workers_settle_everything_once(
    database_url: str, context: Context, world: World
) -> None:
    worker = world.worker()
    jobs = [job.id for _ in range(100) for job in world.claim(world.request(2), worker, count=2)]
    expiring = [world.request(deadline=140) for _ in range(50)]
    world.pass_lease(jobs[-1])

    def submit() -> list[Verdict]:
        return [world.store(job, "in time").verdict for job in reversed(jobs)]

    with open_context(database_url) as other:
        one, two, submitted = together(partial(run_pass, context), partial(run_pass, other), submit, within=60)

    stored = submitted.count(Verdict.SETTLED)
    assert one.stale + two.stale + stored == len(jobs)
    assert one.cancelled + two.cancelled == len(expiring)
    assert set(submitted) <= {Verdict.SETTLED, Verdict.ABORTED}
    assert world.scalar("SELECT count(*) FROM jobs WHERE state = 'stored'") == stored
    check_invariants(context.database, swept=0)


# --- outages


def no_broker_for(world: World, seconds: float) -> None:
    """Time without a beat; the next pass is the first sign of a broker."""
    with world.db.transaction() as tx:
        tx.execute("UPDATE clock SET ahead = ahead + make_interval(secs => %(s)s)", {"s": seconds})


def test_nobody_is_blamed_for_an_outage(context: Context, world: World) -> None:
    request, attached, unstarted = world.request(), world.request(attached=True), world.request()
    job = world.claim_one(request, world.worker())
    fresh = world.claim_one(unstarted, world.worker(posts_progress=True), lease=60)
    world.beat()
    no_broker_for(world, 1500)

    done = run_pass(context)

    assert (done.stale, done.unstarted) == (0, 0)
    assert world.scalar("SELECT count(*) FROM outages") == 1
    assert world.status(attached).outcome_reason != CancelReason.DISCONNECT
    assert world.post(fresh, [1], "a").stop is None
    assert world.store(job, "brought when the broker was back").outcome is Outcome.COMPLETED


def test_a_claim_made_after_the_last_beat_before_an_outage_is_not_blamed_either(context: Context, world: World) -> None:
    # An outage is on record from the last beat on, and brokers live on for up to five seconds after that.
    with context.database.transaction() as tx:
        tx.execute("UPDATE heartbeat SET beat_at = horde_now() - interval '3 seconds'")
    job = world.claim_one(world.request(), world.worker())
    no_broker_for(world, 1500)

    assert run_pass(context).stale == 0
    assert world.store(job).verdict is Verdict.SETTLED


def test_the_minute_after_an_outage_is_long_enough_and_not_longer(context: Context, world: World) -> None:
    job = world.claim_one(world.request(), world.worker(), lease=150)
    world.advance(149)
    world.outage(100)

    world.advance(59)
    assert run_pass(context) == Done()
    world.advance(42)
    assert run_pass(context) == Done(stale=1)
    assert world.store(job).verdict is Verdict.ABORTED


# --- the abort statistic


def test_a_fault_reaches_the_abort_statistic_once(context: Context, world: World) -> None:
    worker = world.worker()
    job = world.claim_one(world.request(2), worker)
    world.pass_lease(job)

    together(*[partial(world.fault, job)] * 3, *[partial(world.fault_stale, job)] * 3, partial(run_pass, context))
    together(*[partial(fold, context)] * 3)

    assert world.rows("SELECT reason, count FROM abort_hours ORDER BY reason")[-1][1] == 1
    assert world.scalar("SELECT sum(count) FROM abort_hours WHERE reason <> 'taken'") == 1
    assert world.rows("SELECT claimed, fulfilled, aborted FROM worker_totals") == [(1, 0, 1)]


# --- the timers


def test_a_broker_looks_after_its_requests_by_itself_until_it_stops(database_url: str, world: World) -> None:
    expiring, dying = world.request(2, deadline=150), world.request(kind=Kind.CHAT)
    job = world.claim_one(dying, world.worker())
    world.pass_lease(job)
    quick = {"maintenance_interval_seconds": 0.05, "fold_interval_seconds": 0.05}
    with open_context(database_url, **quick) as one, open_context(database_url, **quick) as two:
        leading, following = Maintenance(one), Maintenance(two)
        leading.start()
        following.start()
        try:
            eventually(lambda: world.status(expiring).done, "the request past its deadline is cancelled")
            eventually(lambda: world.jobs(dying)[0][1] == "faulted", "the stale job is aborted")
            eventually(lambda: world.scalar("SELECT count(*) FROM events_unfolded") == 0, "every event is folded")
        finally:
            leading.stop()
        assert world.scalar("SELECT holder IS NULL FROM leader"), "whoever stops lets the next one lead at once"
        following.renew()
        world.claim_one(dying, world.worker())
        world.advance(200)
        try:
            eventually(lambda: world.status(dying).outcome is Outcome.FAULTED, "the other one has taken over")
        finally:
            following.stop()
    assert world.store(job).verdict is Verdict.ABORTED
    assert world.scalar("SELECT did IS NOT NULL FROM maintenance_runs WHERE job = 'pass'")


def test_a_broker_that_does_not_lead_beats_but_runs_no_pass(database_url: str, context: Context, world: World) -> None:
    stale_jobs(world, 1)
    assert bid(context, Leadership())
    with open_context(database_url) as other:
        maintenance = Maintenance(other)
        before = world.scalar("SELECT beat_at FROM heartbeat")
        maintenance.renew()

        maintenance.beat()
        maintenance.run_pass()
        maintenance.run_fold()

        assert world.scalar("SELECT beat_at FROM heartbeat") > before
        assert other.vitals.database_answers
        assert world.scalar("SELECT count(*) FROM jobs WHERE state = 'processing'") == 1
        assert world.scalar("SELECT count(*) FROM events_unfolded") > 0


def test_a_pass_that_meets_a_settlement_under_way_waits_for_it_and_changes_nothing(
    context: Context, world: World
) -> None:
    (job,) = stale_jobs(world, 1)
    with Stage(context.database) as stage:
        releasing = stage.hold(partial(world.release, job), after=settle.SETTLE_JOB)
        passing = stage.blocked(partial(run_pass, context))

        assert releasing.result().put_back
        assert passing.result() == Done()
