"""Leases, posts, attachment, outages and retention: what a transition does as time goes by."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from horde.lifecycle.cancel import Cancelled
from horde.lifecycle.progress import Chunk, post_progress
from horde.lifecycle.terms import Terms
from horde.lifecycle.words import CancelReason, Kind, Verdict
from tests.support.invariants import check_invariants
from tests.support.world import World, open_world, price_by_tokens

EVERY_KIND = pytest.mark.parametrize("kind", list(Kind))


@pytest.fixture
def world(database_url: str) -> Iterator[World]:
    with open_world(database_url, connections=4) as made:
        yield made
        check_invariants(made.db)


def seconds_ahead(world: World, request: uuid.UUID, column: str) -> float:
    return float(
        world.scalar(f"SELECT extract(epoch FROM {column} - horde_now()) FROM requests WHERE id = %(r)s", r=request)
    )


# --- cancel of an attached request


@pytest.fixture
def streams(world: World) -> World:
    world.pricing = price_by_tokens
    return world


@pytest.mark.parametrize("kind", [Kind.CHAT, Kind.TEXT])
@pytest.mark.parametrize("reason", [CancelReason.DISCONNECT, CancelReason.CLIENT, CancelReason.DEADLINE])
def test_cancelling_an_attached_request_stores_what_was_posted(
    streams: World, kind: Kind, reason: CancelReason
) -> None:
    request = streams.request(4, kind=kind, attached=True, deadline=600)
    posting, silent = (streams.claim_one(request, streams.worker(posts_progress=True), lease=60) for _ in range(2))
    other = streams.claim_one(request, streams.worker())
    streams.post(posting, [1, 2, 3], "abc")
    streams.post(posting, [4], "d", offset=3)

    streams.cancel(request, reason)

    status = streams.status(request)
    assert (status.outcome_reason, status.finished, status.processing, status.done) == (reason.value, 2, 1, False)
    assert streams.jobs(request) == [
        (0, "stored", None, "abcd", 40, 36),
        (1, "stored", None, "", 0, 0),
        (2, "processing", None, None, None, None),
    ]
    assert {result["finish_reason"] for result in status.results} == {"cancelled"}
    assert streams.slots(request) == ["stored", "stored", "processing", "dropped"]
    streams.store(other, "whole", tokens=5)
    status = streams.status(request)
    assert (status.done, status.finished, status.charged) == (True, 3, 40 + 50)
    assert streams.store(silent).reward == 0


def test_expiry_of_an_attached_request_lets_its_jobs_run_on(streams: World) -> None:
    request = streams.request(2, attached=True)
    job = streams.claim_one(request, streams.worker(posts_progress=True), lease=60)
    streams.post(job, [1, 2], "ab")
    streams.pass_time(request, "expires_at")

    assert streams.cancel_if_due(request, CancelReason.EXPIRED) is Cancelled.DONE

    assert streams.jobs(request)[0][1] == "processing"
    assert streams.store(job, "ab and the rest", token_ids=[1, 2, 3]).verdict is Verdict.SETTLED


def test_the_workers_own_submit_after_a_cancel_is_answered_once_with_the_reward(streams: World) -> None:
    request = streams.request(kind=Kind.CHAT, attached=True)
    job = streams.claim_one(request, streams.worker(posts_progress=True))
    streams.post(job, [1, 2], "ab")
    streams.cancel(request, CancelReason.DISCONNECT)
    before = streams.status(request)

    assert streams.fault(job).verdict is Verdict.DUPLICATE, "a fault reported for a stored job has no effect"
    first = streams.store(job, "abcdef", tokens=6, key="k")
    again = streams.store(job, "abcdef", tokens=6, key="k")
    other = streams.store(job, "abcdef", tokens=6, key="other")

    assert (first.verdict, first.reward) == (Verdict.ACKNOWLEDGED, 18)
    assert (again.verdict, again.reward, again.answer) == (Verdict.REPEATED, 18, {"reward": 18})
    assert other.verdict is Verdict.DUPLICATE
    assert streams.status(request) == before, "its text is discarded"


def test_progress_of_a_job_that_a_cancel_stored_is_told_so(streams: World) -> None:
    request = streams.request(attached=True)
    job = streams.claim_one(request, streams.worker(posts_progress=True))
    streams.post(job, [1], "a")
    streams.cancel(request, CancelReason.DISCONNECT)

    assert streams.post(job, [2], "b", offset=1).stop == "cancelled"
    assert streams.jobs(request)[0][3] == "a"


# --- progress and prefix


def test_a_post_renews_the_lease_and_the_first_one_starts_the_job(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(posts_progress=True), lease=60)
    world.advance(50)

    posted = world.post(job, [1, 2], "ab")

    assert (posted.accepted, posted.ttl, posted.stop) == (2, 60, None)
    world.advance(50)
    assert world.fault_stale(job).verdict is Verdict.NOT_DUE
    world.pass_lease(job)
    assert world.fault_stale(job).verdict is Verdict.SETTLED


def test_repeats_gaps_and_overlaps_leave_one_text(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(posts_progress=True))

    assert world.post(job, [1, 2, 3], "abc").accepted == 3
    assert world.post(job, [1, 2, 3], "abc").accepted == 3
    assert world.post(job, [9], "z", offset=7).accepted == 3, "a gap"
    assert world.post(job, [2, 3, 4, 5], "bcde", offset=1).accepted == 5

    assert world.rows("SELECT token_ids, text FROM progress WHERE job_id = %(j)s", j=job) == [
        ([1, 2, 3, 4, 5], "abcde")
    ]


def test_the_next_attempt_goes_on_after_what_the_client_has(world: World) -> None:
    request = world.request(kind=Kind.CHAT, attached=True)
    job = world.claim_one(request, world.worker(posts_progress=True))
    world.post(job, [1, 2, 3], "abc")
    world.fault(job)

    (again,) = world.claim(request, world.worker(posts_progress=True))

    assert (again.prefix_token_ids, again.prefix_text) == ([1, 2, 3], "abc")
    assert world.post(again.id, [4], "d", offset=3).accepted == 4
    assert world.post(job, [7], "x", offset=3).stop == "stale"
    world.fault(again.id)
    assert world.rows("SELECT prefix_text FROM slots WHERE request_id = %(r)s", r=request) == [("abc",)]


@EVERY_KIND
def test_without_an_attached_client_nobody_has_a_beginning_and_a_retry_begins_anew(world: World, kind: Kind) -> None:
    request = world.request(2, kind=kind)
    job = world.claim_one(request, world.worker(posts_progress=True))
    world.post(job, [1, 2, 3], "abc")
    world.release(job)

    again, _ = world.claim(request, world.worker(posts_progress=True), count=2)

    assert (again.slot, again.prefix_token_ids, again.prefix_text) == (0, None, None)
    assert world.post(again.id, [7], "x").accepted == 1
    assert world.rows("SELECT token_ids, text FROM progress WHERE job_id = %(j)s", j=again.id) == [([7], "x")]


def test_a_sign_of_life_keeps_nothing_and_says_what_is_held(world: World) -> None:
    job = world.claim_one(world.request(kind=Kind.CHAT, attached=True), world.worker(posts_progress=True))
    assert world.post(job).accepted == 0
    assert world.scalar("SELECT count(*) FROM progress") == 0
    world.post(job, [1, 2], "ab")
    assert world.post(job).accepted == 2


def test_what_is_behind_a_gap_of_tokens_or_of_text_is_not_taken(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(posts_progress=True))
    owner = world.scalar("SELECT owner_id FROM jobs WHERE id = %(j)s", j=job)

    def post(**fields: Any) -> int:
        (answer,) = world.db.run(lambda tx: post_progress(tx, owner, [Chunk(job, **fields)]))
        return answer.accepted

    # A token may have no text yet: half a character, or what may become a stop string.
    assert post(token_ids=[1, 2], text="a") == 2
    assert post(offset=2, token_ids=[3], text="d", text_offset=3) == 2
    assert post(offset=3, token_ids=[4], text="b", text_offset=1) == 2
    assert post(offset=2, token_ids=[3], text="bcd", text_offset=1) == 3
    assert world.rows("SELECT token_ids, text FROM progress") == [([1, 2, 3], "abcd")]


def test_no_more_is_kept_than_the_order_asked_for(world: World) -> None:
    job = world.claim_one(world.request(max_length=20), world.worker(posts_progress=True))

    assert world.post(job, range(15), "x" * 15).accepted == 15
    assert world.post(job, range(15, 40), "y" * 5000, offset=15).accepted == 20
    assert world.post(job, range(20, 40), "z" * 20, offset=20).accepted == 20

    (posted,) = world.rows("SELECT token_ids, text FROM progress")
    assert posted == (list(range(20)), "x" * 15 + "y" * 1985)


# --- outages


def test_an_outage_makes_the_leases_that_it_cuts_longer(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(), lease=150)
    world.advance(100)
    world.outage(1000)

    assert world.fault_stale(job).verdict is Verdict.NOT_DUE
    world.advance(61)
    assert world.fault_stale(job).verdict is Verdict.SETTLED


def test_a_lease_lasts_at_least_a_minute_after_an_outage(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(), lease=150)
    world.advance(140)
    world.outage(20)

    world.advance(50)
    assert world.fault_stale(job).verdict is Verdict.NOT_DUE
    world.advance(11)
    assert world.fault_stale(job).verdict is Verdict.SETTLED


def test_an_outage_after_a_lease_was_over_saves_nobody(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(), lease=150)
    world.advance(151)
    world.outage(100)

    assert world.fault_stale(job).verdict is Verdict.SETTLED


def test_a_client_is_not_taken_for_gone_because_of_an_outage(world: World) -> None:
    request = world.request(attached=True)
    world.advance(20)
    world.outage(100)

    assert world.cancel_if_due(request, CancelReason.DISCONNECT) is Cancelled.NOT_DUE
    world.advance(61)
    assert world.cancel_if_due(request, CancelReason.DISCONNECT) is Cancelled.DONE


def test_a_claim_is_not_taken_for_unstarted_because_of_an_outage(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(posts_progress=True), lease=60)
    world.advance(10)
    world.outage(100)

    assert world.release_unstarted(job).verdict is Verdict.NOT_DUE
    world.advance(61)
    assert world.release_unstarted(job).verdict is Verdict.SETTLED


def test_a_pause_shorter_than_fifteen_seconds_is_no_outage(world: World) -> None:
    world.beat()
    with world.db.transaction() as tx:
        tx.execute("UPDATE clock SET ahead = ahead + interval '14 seconds'")

    assert world.beat().outage == 0
    assert world.scalar("SELECT count(*) FROM outages") == 0


def test_the_beat_that_ends_an_outage_writes_it_once(world: World) -> None:
    world.outage(16)

    assert world.beat().outage == 0
    (length,) = world.rows("SELECT extract(epoch FROM ended - begun)::float FROM outages")
    assert length[0] == pytest.approx(16, abs=2)


# --- retention


@EVERY_KIND
def test_retention_deletes_what_has_been_done_long_enough_and_keeps_the_events(world: World, kind: Kind) -> None:
    request, young = world.request(kind=kind), world.request(kind=kind)
    job = world.claim_one(request, world.worker(posts_progress=True))
    world.post(job, [1], "a")
    world.store(job)
    world.advance(1100)
    world.store(world.claim_one(young, world.worker()))
    assert world.delete_old() == 0
    world.advance(101)

    assert world.delete_old() == 1

    for table, column in (("requests", "id"), ("slots", "request_id"), ("jobs", "request_id")):
        assert world.scalar(f"SELECT count(*) FROM {table} WHERE {column} = %(r)s", r=request) == 0
    assert world.scalar("SELECT count(*) FROM progress") == 0
    assert world.scalar("SELECT count(*) FROM events WHERE request_id = %(r)s", r=request) == 3
    assert world.store(job).verdict is Verdict.GONE
    assert world.status(young).finished == 1


def test_retention_waits_for_the_lease_of_every_job(world: World) -> None:
    world.terms = Terms(retention=10)
    request = world.request(attached=True)
    job = world.claim_one(request, world.worker(posts_progress=True), lease=300)
    world.cancel(request, CancelReason.DISCONNECT)
    assert world.status(request).done
    world.advance(200)

    assert world.delete_old() == 0
    assert world.store(job).verdict is Verdict.ACKNOWLEDGED, "a worker in time is never told that there is no such job"
    world.pass_lease(job)
    assert world.delete_old() == 1


def test_retention_never_takes_a_request_that_is_not_done(world: World) -> None:
    world.terms = Terms(retention=0)
    running, waiting = world.request(), world.request()
    world.claim_one(running, world.worker())
    world.cancel(running)
    world.advance(5000)

    assert world.delete_old() == 0
    assert world.status(waiting).waiting == 1
