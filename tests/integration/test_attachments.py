"""Clients that wait on open connections: they come, stay and go, and the last one to go cancels what nobody wants any more."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial

import pytest

from horde.lifecycle import attach, settle
from horde.lifecycle.cancel import Cancelled
from horde.lifecycle.words import CancelReason, Kind, Outcome, Verdict
from tests.support.concurrency import Stage, together
from tests.support.invariants import check_invariants
from tests.support.world import World, open_world, price_by_tokens

ROUNDS = 40


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with open_world(database_url, connections=8) as made:
        made.pricing = price_by_tokens
        yield made
        check_invariants(made.db)


@pytest.fixture
def stage(world: World) -> Iterator[Stage]:
    with Stage(world.db) as made:
        yield made


def chat(world: World, n: int = 1, **fields: object) -> uuid.UUID:
    return world.request(n, kind=Kind.CHAT, attached=True, needs_progress=True, **fields)


def attached(world: World, request: uuid.UUID) -> tuple[int, float]:
    """How many wait, and for how many seconds it is held that they do."""
    ((waiting, ahead),) = world.rows(
        "SELECT attached_by, extract(epoch FROM attached_until - horde_now())::float FROM requests WHERE id = %(id)s",
        id=request,
    )
    return waiting, ahead


# --- coming and staying


def test_who_orders_is_the_first_to_wait_and_others_may_join(world: World) -> None:
    request = chat(world)
    assert attached(world, request) == (1, pytest.approx(30, abs=2))

    assert world.join(request)
    assert world.join(request)

    assert attached(world, request)[0] == 3


def test_a_request_that_is_joined_at_the_last_moment_is_held_again(world: World) -> None:
    request = chat(world)
    world.pass_time(request, "attached_until")

    assert world.join(request)

    assert attached(world, request) == (2, pytest.approx(30, abs=2))
    assert world.cancel_if_due(request, CancelReason.DISCONNECT) is Cancelled.NOT_DUE
    assert world.claim(request, world.worker(posts_progress=True), lease=60)


def test_what_has_ended_or_was_never_attached_is_not_joined(world: World) -> None:
    ended, polled = chat(world), world.request()
    world.cancel(ended)

    assert [world.join(request) for request in (ended, polled, uuid.uuid4())] == [False, False, False]
    assert world.rows("SELECT attached_by FROM requests WHERE id = %(id)s", id=polled) == [(0,)]


def test_a_stream_that_runs_longer_than_it_might_have_waited_goes_on_elsewhere_when_its_worker_fails(
    world: World,
) -> None:
    request, waiting, ending = chat(world), chat(world), chat(world, deadline=90)
    worker = world.worker(posts_progress=True)
    (job,) = world.claim(request, worker, lease=60)
    world.claim(ending, worker, lease=60)
    # As if a minute's lease had been claimed long ago.
    with world.db.transaction() as tx:
        tx.execute("UPDATE requests SET expires_at = horde_now() + interval '1 second' WHERE processing > 0")

    world.stay_attached(request, waiting, ending)

    left = dict(world.rows("SELECT id, extract(epoch FROM expires_at - horde_now())::float FROM requests"))
    assert left[request] == pytest.approx(120, abs=2)
    assert left[ending] == pytest.approx(90, abs=2), "never beyond its deadline"
    assert left[waiting] > 1000, "what waits keeps its term"
    world.advance(10)
    assert world.fault(job.id).put_back


def test_all_that_a_process_follows_is_renewed_by_one_statement_and_the_rest_left_alone(world: World) -> None:
    followed, ended, others, polled = chat(world), chat(world), chat(world), world.request()
    world.cancel(ended)
    world.advance(20)

    world.stay_attached(followed, ended, polled, uuid.uuid4())

    assert [round(attached(world, request)[1]) for request in (followed, ended, others)] == [30, 10, 10]
    assert world.rows("SELECT attached_until FROM requests WHERE id = %(id)s", id=polled) == [(None,)]


def test_processes_that_follow_the_same_requests_renew_them_in_one_order(world: World, stage: Stage) -> None:
    first, second = sorted([chat(world), chat(world)])

    def hold(request: uuid.UUID) -> None:
        with world.db.transaction() as tx:
            tx.execute("SELECT FROM requests WHERE id = %(id)s FOR UPDATE", {"id": request})
            tx.execute("SELECT 'held'")

    holding = stage.hold(partial(hold, first), before="SELECT 'held'")
    renewing = [stage.blocked(partial(world.stay_attached, *some)) for some in ((second, first), (first, second))]
    holding.go_on()

    # A deadlock, even one that a retry would hide, is raised here.
    for renewal in renewing:
        renewal.result()


# --- going


def test_the_last_to_leave_cancels_and_whoever_is_left_goes_on(world: World) -> None:
    request = chat(world)
    world.join(request)

    assert world.leave(request) is False
    assert world.status(request).outcome is None
    assert world.leave(request) is True

    status = world.status(request)
    assert (status.outcome, status.outcome_reason, status.done) == (Outcome.CANCELLED, "disconnect", True)
    assert world.claim(request, world.worker(posts_progress=True)) == []


def test_leaving_settles_what_runs_by_what_was_posted_and_stops_its_worker(world: World) -> None:
    request = chat(world, 3)
    running, silent = (world.claim_one(request, world.worker(posts_progress=True), lease=60) for _ in range(2))
    world.post(running, [1, 2, 3], "abc")

    assert world.leave(request)

    status = world.status(request)
    assert (status.done, status.finished, status.charged) == (True, 2, 30)
    assert [(result["text"], result["token_ids"], result["finish_reason"]) for result in status.results] == [
        ("abc", [1, 2, 3], "cancelled"),
        ("", [], "cancelled"),
    ]
    assert (world.post(running).stop, world.post(silent).stop) == ("cancelled", "cancelled")


def test_leaving_twice_or_after_the_end_changes_nothing(world: World) -> None:
    cancelled, completed, polled = chat(world), chat(world), world.request()
    world.leave(cancelled)
    world.store(world.claim_one(completed, world.worker(posts_progress=True)))
    before = {request: world.status(request) for request in (cancelled, completed, polled)}

    for request in before:
        assert world.leave(request) is False
    assert world.leave(uuid.uuid4()) is False

    assert {request: world.status(request) for request in before} == before
    assert world.rows("SELECT attached_by FROM requests WHERE id = %(id)s", id=polled) == [(0,)]


def test_whom_a_broker_lets_go_of_has_the_whole_term_to_come_back_and_is_not_waited_for(world: World) -> None:
    request = chat(world)
    world.join(request)
    world.advance(20)

    for _ in range(3):
        world.let_go(request)

    assert attached(world, request) == (0, pytest.approx(30, abs=2))
    assert world.status(request).outcome is None
    assert world.claim(request, world.worker(posts_progress=True), lease=60)
    assert world.join(request)
    assert world.leave(request) is True


def test_letting_go_after_the_end_changes_nothing(world: World) -> None:
    ended, polled = chat(world), world.request()
    world.cancel(ended)
    before = attached(world, ended)

    for request in (ended, polled, uuid.uuid4()):
        world.let_go(request)

    assert attached(world, ended) == (before[0], pytest.approx(before[1], abs=2))
    assert world.rows("SELECT attached_by, attached_until FROM requests WHERE id = %(id)s", id=polled) == [(0, None)]


# --- races


def test_who_joins_as_the_last_one_leaves_finds_it_live_or_finds_it_ended(world: World) -> None:
    found = set()
    for _ in range(ROUNDS):
        request = chat(world)
        world.claim_one(request, world.worker(posts_progress=True), lease=60)

        left, joined = together(partial(world.leave, request), partial(world.join, request))

        assert left is not joined
        status = world.status(request)
        assert status.done is left
        assert attached(world, request)[0] == int(joined)
        if joined:
            assert world.leave(request), "it is the last one now"
        found.add(joined)
    assert found <= {True, False}


@pytest.mark.parametrize("joins_first", [True, False])
def test_who_waits_for_the_other_sees_what_it_did(world: World, stage: Stage, joins_first: bool) -> None:
    request = chat(world)
    join, leave = partial(world.join, request), partial(world.leave, request)

    if joins_first:
        joined, left = stage.in_order(join, leave, after=attach.JOIN)
    else:
        left, joined = stage.in_order(leave, join, after=settle.UPDATE_REQUEST)

    assert (joined, left) == (joins_first, not joins_first)
    assert world.status(request).done is not joins_first


def test_two_that_leave_at_once_cancel_once(world: World) -> None:
    for _ in range(ROUNDS):
        request = chat(world)
        world.join(request)
        job = world.claim_one(request, world.worker(posts_progress=True), lease=60)
        world.post(job, [1], "a")

        assert sorted(together(partial(world.leave, request), partial(world.leave, request))) == [False, True]

        assert [row[1:] for row in world.jobs(request)] == [("stored", None, "a", 10, 9)]
        assert (
            world.scalar("SELECT count(*) FROM events WHERE request_id = %(id)s AND kind = 'cancelled'", id=request)
            == 1
        )


def test_leaving_at_the_moment_of_the_result_settles_once(world: World) -> None:
    worker = world.worker(posts_progress=True)
    for _ in range(ROUNDS):
        request = chat(world)
        job = world.claim_one(request, worker, lease=60)
        world.post(job, [1, 2], "ab")

        left, stored = together(
            partial(world.leave, request), partial(world.store, job, "abc", tokens=3, token_ids=[1, 2, 3])
        )

        status = world.status(request)
        (result,) = status.results
        if left:
            assert (stored.verdict, stored.reward) == (Verdict.ACKNOWLEDGED, 18)
            assert (status.outcome, result["text"], status.charged) == (Outcome.CANCELLED, "ab", 20)
        else:
            assert (stored.verdict, stored.reward) == (Verdict.SETTLED, 27)
            assert (status.outcome, result["text"], status.charged) == (Outcome.COMPLETED, "abc", 30)
        assert status.done


def test_leaving_as_maintenance_finds_the_attachment_lapsed_cancels_once(world: World) -> None:
    for _ in range(ROUNDS):
        request = chat(world)
        world.pass_time(request, "attached_until")

        left, lapsed = together(
            partial(world.leave, request), partial(world.cancel_if_due, request, CancelReason.DISCONNECT)
        )

        assert (left, lapsed) in {(True, Cancelled.ALREADY_ENDED), (False, Cancelled.DONE)}
        assert world.status(request).outcome_reason == "disconnect"


def test_joining_as_maintenance_finds_the_attachment_lapsed_wins_or_comes_too_late(world: World) -> None:
    for _ in range(ROUNDS):
        request = chat(world)
        world.pass_time(request, "attached_until")

        joined, lapsed = together(
            partial(world.join, request), partial(world.cancel_if_due, request, CancelReason.DISCONNECT)
        )

        assert (joined, lapsed) in {(True, Cancelled.NOT_DUE), (False, Cancelled.DONE)}
        assert world.status(request).cancelled is not joined
