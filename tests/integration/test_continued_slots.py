"""A stream that fails over: the next attempt gets what its client has, goes on from there, and nothing is taken back."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from horde.lifecycle import progress, rows
from horde.lifecycle.claim import Claimant, Served, claim, fetch_again
from horde.lifecycle.settle import Settlement
from horde.lifecycle.words import CancelReason, Kind, Outcome, ResultState, Verdict
from tests.support.concurrency import Stage, together
from tests.support.invariants import check_invariants
from tests.support.world import World, open_world, price_by_tokens

ROUNDS = 25
ONE = Served("weights-1", "tokenizer-1", "key-1")
OTHER = Served("weights-2", "tokenizer-1", "key-2")


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


@pytest.fixture
def worker(world: World) -> Claimant:
    """One that posts and serves `m` in the revision `key-1`."""
    return world.worker(posts_progress=True, served={"m": ONE})


def chat(world: World, n: int = 1, **fields: Any) -> uuid.UUID:
    values = {"kind": Kind.CHAT, "attached": True, "needs_progress": True, "revision": ONE.key, **fields}
    return world.request(n, **values)


def logprob(token: int) -> list[Any]:
    return [token, -0.5, [[token, -0.5], [token + 1, -1.5]]]


def held(world: World, job: uuid.UUID) -> tuple[Any, ...]:
    """(token ids, text, logprobs) of what the broker has of a job."""
    (row,) = world.rows("SELECT token_ids, text, logprobs FROM progress WHERE job_id = %(job)s", job=job)
    return row


# --- who may take it


def test_only_who_serves_the_revision_a_request_is_pinned_to_takes_it(world: World, worker: Claimant) -> None:
    request = chat(world)

    others = [
        world.worker(posts_progress=True),
        world.worker(posts_progress=True, served={"m": OTHER}),
        world.worker(posts_progress=True, served={"o": ONE}),
        world.worker(served={"m": ONE}),
    ]
    assert [world.claim(request, other) for other in others] == [[], [], [], []]

    (job,) = world.claim(request, worker)
    assert (job.model_revision, job.tokenizer_revision) == ("weights-1", "tokenizer-1")
    assert world.rows("SELECT model_revision, tokenizer_revision, revision FROM jobs WHERE id = %(id)s", id=job.id) == [
        ("weights-1", "tokenizer-1", "key-1")
    ]


def test_a_request_that_is_not_pinned_is_anybodys_and_its_job_remembers_the_revision(
    world: World, worker: Claimant
) -> None:
    request = world.request(2)
    (plain,) = world.claim(request, world.worker())
    (told,) = world.claim(request, worker)
    assert (plain.model_revision, told.model_revision, told.tokenizer_revision) == (None, "weights-1", "tokenizer-1")


def test_a_claim_tells_how_long_its_result_is_wanted(world: World, worker: Claimant) -> None:
    (job,) = world.claim(chat(world, deadline=100), worker)
    assert job.deadline_in == pytest.approx(100, abs=2)
    (job,) = world.claim(chat(world), worker)
    assert job.deadline_in is None


def test_a_stream_that_was_begun_is_pinned_to_who_can_go_on_with_it(world: World, worker: Claimant) -> None:
    request = chat(world, 2, revision=None, needs_progress=False, models=["m", "o"])
    begun = world.claim_one(request, worker)
    world.post(begun, [1], "a")
    world.fault(begun)

    assert world.rows("SELECT needs_progress, revision FROM requests WHERE id = %(id)s", id=request) == [
        (True, "key-1")
    ]
    assert world.claim(request, world.worker(served={"m": ONE})) == []
    assert world.claim(request, world.worker(posts_progress=True, served={"m": OTHER})) == []
    assert len(world.claim(request, world.worker(posts_progress=True, served={"m": ONE}), count=2)) == 2


def test_an_attempt_that_posted_nothing_pins_nothing(world: World, worker: Claimant) -> None:
    request = chat(world, revision=None, needs_progress=False)
    job = world.claim_one(request, worker)
    world.post(job)
    world.release(job)
    assert world.rows("SELECT needs_progress, revision FROM requests WHERE id = %(id)s", id=request) == [(False, None)]
    assert world.claim(request, world.worker())


# --- what it goes on from


def test_a_continued_job_has_text_tokens_and_logprobs_of_all_before_it(world: World, worker: Claimant) -> None:
    request = chat(world, payload={"logprobs": 2, "prompt_tokens": 3})
    first = world.claim_one(request, worker)
    world.post(first, [1, 2], "ab", logprobs=[logprob(1), logprob(2)])
    world.fault(first)

    (second,) = world.claim(request, worker)
    assert (second.prefix_token_ids, second.prefix_text) == ([1, 2], "ab")
    assert world.post(second.id).accepted == 2
    world.post(second.id, [2, 3], "bc", offset=1, logprobs=[logprob(2), logprob(3)])
    assert held(world, second.id) == ([1, 2, 3], "abc", [logprob(1), logprob(2), logprob(3)])
    world.release(second.id)

    (third,) = world.claim(request, worker)
    assert (third.prefix_token_ids, third.prefix_text) == ([1, 2, 3], "abc")
    stored = world.store(third.id, "abcd", tokens=4, token_ids=[1, 2, 3, 4], logprobs=[logprob(4)])
    assert (stored.verdict, stored.reward, stored.outcome) == (Verdict.SETTLED, 9, Outcome.COMPLETED)
    status = world.status(request)
    (result,) = status.results
    assert (result["token_ids"], result["tokens"]) == ([1, 2, 3, 4], 4)
    assert result["logprobs"] == [logprob(token) for token in (1, 2, 3, 4)]
    assert status.charged == 40, "the client pays all that it got, the worker earns for its own"
    assert world.scalar("SELECT tokens FROM events WHERE job_id = %(job)s AND kind = 'stored'", job=third.id) == 1


def test_a_prefix_that_ends_the_text_is_submitted_at_once_and_earns_nothing(world: World, worker: Claimant) -> None:
    request = chat(world)
    begun = world.claim_one(request, worker)
    world.post(begun, [1, 2], "ab")
    world.fault(begun)

    stored = world.store(world.claim_one(request, worker), "ab", tokens=2, token_ids=[1, 2])

    assert (stored.verdict, stored.reward, world.status(request).charged) == (Verdict.SETTLED, 0, 20)


def test_a_cancel_stores_the_prefix_too_and_pays_for_what_was_added_to_it(world: World, worker: Claimant) -> None:
    for added, reward in ((0, 0), (2, 18)):
        request = chat(world, payload={"logprobs": 1})
        begun = world.claim_one(request, worker)
        world.post(begun, [1, 2], "ab", logprobs=[logprob(1), logprob(2)])
        world.fault(begun)
        job = world.claim_one(request, worker)
        more = [3, 4][:added]
        world.post(job, more, "cd"[:added], offset=2, logprobs=[logprob(token) for token in more])

        world.cancel(request, CancelReason.DISCONNECT)

        status = world.status(request)
        (result,) = status.results
        assert (result["text"], result["token_ids"]) == ("abcd"[: 2 + added], [1, 2, *more])
        assert result["logprobs"] == [logprob(token) for token in [1, 2, *more]]
        assert (result["tokens"], result["finish_reason"]) == (2 + added, "cancelled")
        assert status.charged == 10 * (2 + added)
        assert world.store(job, "whatever it says").reward == reward
        assert world.scalar("SELECT tokens FROM events WHERE job_id = %(job)s AND kind = 'stored'", job=job) == added


def test_a_lost_answer_is_given_again_with_the_prefix(world: World, worker: Claimant) -> None:
    request = chat(world, deadline=100)
    begun = world.claim_one(request, worker)
    world.post(begun, [1, 2], "ab")
    world.fault(begun)
    keyed = dataclasses.replace(worker, claim_key="k")
    (job,) = world.db.run(lambda tx: claim(tx, request, keyed, model="m", lease=60))

    (again,) = world.db.run(lambda tx: fetch_again(tx, worker.id, "k"))

    assert again.deadline_in == pytest.approx(100, abs=2)
    assert (again.id, again.prefix_token_ids, again.prefix_text, again.model_revision, again.tokenizer_revision) == (
        job.id, [1, 2], "ab", "weights-1", "tokenizer-1",
    )  # fmt: skip


# --- log-probabilities in step


def test_logprobs_stay_one_a_token_whatever_of_a_chunk_is_dropped(world: World, worker: Claimant) -> None:
    job = world.claim_one(chat(world, payload={"logprobs": 2}, max_length=5), worker)

    def post(first: int, count: int) -> int:
        tokens = range(first, first + count)
        told = [logprob(token) for token in tokens]
        return world.post(job, tokens, "x" * count, offset=first, logprobs=told).accepted

    assert [post(0, 2), post(0, 2), post(3, 1), post(1, 3), post(2, 9)] == [2, 2, 2, 4, 5]
    tokens, _, logprobs = held(world, job)
    assert (tokens, logprobs) == ([0, 1, 2, 3, 4], [logprob(token) for token in range(5)])


def test_tokens_without_the_logprobs_that_were_asked_for_are_not_taken(world: World, worker: Claimant) -> None:
    job = world.claim_one(chat(world, payload={"logprobs": 0}), worker)
    assert world.post(job, [1], "a").accepted == 0
    assert world.post(job, [1, 2], "ab", logprobs=[logprob(1)]).accepted == 0
    assert world.post(job, [1], "a", logprobs=[logprob(1)]).accepted == 1
    assert world.post(job, [2], "b", offset=1).accepted == 1
    assert held(world, job) == ([1], "a", [logprob(1)])


@pytest.mark.parametrize("payload", [{}, {"logprobs": None}])
def test_logprobs_that_nobody_asked_for_are_not_kept(world: World, worker: Claimant, payload: dict[str, Any]) -> None:
    job = world.claim_one(chat(world, payload=payload), worker)
    assert world.post(job, [1], "a", logprobs=[logprob(1)]).accepted == 1
    assert world.post(job, [2], "b", offset=1).accepted == 2
    assert held(world, job) == ([1, 2], "ab", None)


def test_a_long_output_is_written_less_often_and_nothing_of_it_is_lost(world: World, worker: Claimant) -> None:
    request = chat(world, payload={"logprobs": 1}, max_length=2000)
    job = world.claim_one(request, worker)

    def post(first: int, count: int) -> int:
        tokens = range(first, first + count)
        told = [logprob(token) for token in tokens]
        return world.post(job, tokens, "x" * count, offset=first, logprobs=told).accepted

    assert [post(0, 500), post(500, 500)] == [500, 1000]
    assert post(1000, 1) == 1000, "a thousand with their logprobs were written this very moment"
    world.advance(1000 * progress.PAUSE_WITH_LOGPROBS)
    assert [post(1001, 1), post(1000, 3)] == [1000, 1003]
    world.store(job, "x" * 1005, token_ids=list(range(1005)), logprobs=[logprob(token) for token in range(1005)])
    (result,) = world.status(request).results
    assert result["logprobs"] == [logprob(token) for token in range(1005)]


# --- what contradicts it


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "another text": {"text": "axc"},
    "a shorter text": {"text": "a"},
    "other tokens": {"token_ids": [1, 9, 3]},
    "fewer tokens": {"token_ids": [1]},
    "a logprob too few": {"logprobs": []},
    "a logprob too many": {"logprobs": [logprob(2), logprob(3), logprob(4)]},
    "no logprobs": {"logprobs": None},
    "no tokens for the logprobs": {"token_ids": None},
}


@pytest.mark.parametrize("wrong", CONTRADICTIONS)
def test_a_result_that_does_not_go_on_from_what_was_posted_changes_nothing(
    world: World, worker: Claimant, wrong: str
) -> None:
    request = chat(world, payload={"logprobs": 1})
    begun = world.claim_one(request, worker)
    world.post(begun, [1], "a", logprobs=[logprob(1)])
    world.fault(begun)
    job = world.claim_one(request, worker)
    world.post(job, [2], "b", offset=1, logprobs=[logprob(2)])
    right = {"text": "abc", "token_ids": [1, 2, 3], "logprobs": [logprob(2), logprob(3)]}
    before = world.jobs(request), world.slots(request), held(world, job)

    assert world.store(job, **{**right, **CONTRADICTIONS[wrong]}).verdict is Verdict.CONTRADICTED

    assert (world.jobs(request), world.slots(request), held(world, job)) == before
    assert world.store(job, **right, key="k").verdict is Verdict.SETTLED
    again = world.store(job, **{**right, **CONTRADICTIONS[wrong]}, key="k")
    assert (again.verdict, again.reward) == (Verdict.REPEATED, 18), "what has settled is told what it was told before"


def test_ids_that_were_posted_are_told_again_by_the_result(world: World, worker: Claimant) -> None:
    job = world.claim_one(chat(world), worker)
    world.post(job, [1], "a")
    assert world.store(job, "ab").verdict is Verdict.CONTRADICTED
    assert world.store(job, "ab", token_ids=[1, 2]).verdict is Verdict.SETTLED


def test_a_cancel_counts_no_more_than_the_text_and_no_more_than_the_ids(world: World, worker: Claimant) -> None:
    for ids, text, tokens in (([1, 2, 3], "a", 1), ([1], "abc", 1), ([1, 2], "", 0)):
        request = chat(world)
        world.post(world.claim_one(request, worker), ids, text)
        world.cancel(request)
        assert (world.status(request).results[0]["tokens"], world.status(request).charged) == (tokens, 10 * tokens)


def test_what_was_posted_of_logprobs_stays_as_it_was(world: World, worker: Claimant) -> None:
    request = chat(world, payload={"logprobs": 1})
    job = world.claim_one(request, worker)
    world.post(job, [1], "a", logprobs=[logprob(1)])
    world.store(job, "ab", token_ids=[1, 2], logprobs=[[1, -9.0, []], logprob(2)])
    (result,) = world.status(request).results
    assert result["logprobs"] == [logprob(1), logprob(2)]


@pytest.mark.parametrize("state", [ResultState.CENSORED, ResultState.CSAM])
def test_a_censored_result_may_take_back_its_text(world: World, worker: Claimant, state: ResultState) -> None:
    request = chat(world, payload={"logprobs": 1})
    job = world.claim_one(request, worker)
    world.post(job, [1, 2], "ab", logprobs=[logprob(1), logprob(2)])
    assert world.store(job, "", tokens=0, state=state).verdict is Verdict.SETTLED
    assert [(result["text"], result["state"]) for result in world.status(request).results] == [("", state)]


def test_nobody_who_polls_was_sent_anything(world: World) -> None:
    job = world.claim_one(world.request(), world.worker(posts_progress=True))
    world.post(job, [1], "a")
    assert world.store(job, "some text").verdict is Verdict.SETTLED


# --- races


def test_a_result_that_waits_for_a_post_has_to_go_on_from_it(world: World, worker: Claimant, stage: Stage) -> None:
    job = world.claim_one(chat(world), worker, lease=60)
    world.post(job, [1, 2], "ab")

    posted, submitted = stage.in_order(
        partial(world.post, job, [3], "c", offset=2),
        partial(world.store, job, "abx", token_ids=[1, 2, 9]),
        after=progress.APPEND,
    )

    assert (posted.accepted, submitted.verdict) == (3, Verdict.CONTRADICTED)
    assert world.store(job, "abcd", token_ids=[1, 2, 3, 4]).verdict is Verdict.SETTLED


def test_a_post_that_waits_for_the_result_is_told_to_stop(world: World, worker: Claimant, stage: Stage) -> None:
    job = world.claim_one(chat(world), worker, lease=60)
    world.post(job, [1, 2], "ab")

    submitted, posted = stage.in_order(
        partial(world.store, job, "abx", token_ids=[1, 2, 9]),
        partial(world.post, job, [3], "c", offset=2),
        after=rows.LOCK_JOB,
    )

    assert (submitted.verdict, posted.stop) == (Verdict.SETTLED, "stale")
    assert held(world, job)[:2] == ([1, 2], "ab")


def test_a_stream_at_the_mercy_of_everybody_is_settled_once_with_what_was_accepted(
    world: World, worker: Claimant
) -> None:
    verdicts = set()
    for round_ in range(ROUNDS):
        request = chat(world)
        job = world.claim_one(request, worker, lease=60)
        world.post(job, [1, 2], "ab")
        if round_ % 2:
            world.pass_lease(job)
            world.stay_attached(request)

        posted, settled, cancelled, stale = together(
            partial(world.post, job, [3, 4], "cd", offset=2),
            partial(world.store, job, "abc", tokens=3, token_ids=[1, 2, 3]),
            partial(world.cancel, request),
            partial(world.fault_stale, job),
        )

        assert_settled_once(world, request, job, posted.accepted, settled)
        assert stale.verdict in {Verdict.SETTLED, Verdict.NOT_DUE, Verdict.DUPLICATE, Verdict.ABORTED}
        assert cancelled in {"done", "already_ended"}
        verdicts.add(settled.verdict)
        world.cancel(request)
        assert world.status(request).done or settled.verdict is Verdict.CONTRADICTED
    assert verdicts <= {Verdict.SETTLED, Verdict.ACKNOWLEDGED, Verdict.ABORTED, Verdict.CONTRADICTED, Verdict.DUPLICATE}


def assert_settled_once(world: World, request: uuid.UUID, job: uuid.UUID, accepted: int, settled: Settlement) -> None:
    ((state, text, ids),) = world.rows("SELECT state, result, token_ids FROM jobs WHERE id = %(job)s", job=job)
    settlements = world.scalar("SELECT count(*) FROM events WHERE job_id = %(job)s AND kind <> 'claimed'", job=job)
    kept = held(world, job)
    assert kept[1] == ("abcd" if accepted == 4 else "ab")
    if settled.verdict is Verdict.CONTRADICTED:
        assert (state, accepted) in {("processing", 4), ("stored", 4), ("faulted", 4)}
    assert settlements == (state != "processing")
    if settled.verdict is Verdict.SETTLED:
        assert (state, text, ids, accepted) == ("stored", "abc", [1, 2, 3], 0)
    elif state == "stored":
        assert (text, ids) == (kept[1], kept[0]), "what was accepted, and nothing else"
    elif state == "faulted":
        assert world.rows("SELECT prefix_text FROM slots WHERE request_id = %(id)s", id=request) in (
            [(kept[1],)],
            [(None,)],
        )


def test_a_worker_that_comes_back_after_its_job_was_given_away_changes_nothing(world: World, worker: Claimant) -> None:
    other = world.worker(posts_progress=True, served={"m": ONE})
    for _ in range(ROUNDS):
        request = chat(world)
        lost = world.claim_one(request, worker, lease=60)
        world.post(lost, [1, 2], "ab")
        world.pass_lease(lost)
        world.stay_attached(request)
        assert world.fault_stale(lost).put_back
        job = world.claim_one(request, other, lease=60)

        late, posted, submitted = together(
            partial(world.post, lost, [7, 8], "xy", offset=2),
            partial(world.post, job, [3], "c", offset=2),
            partial(world.store, lost, "abxy", token_ids=[1, 2, 7, 8]),
        )

        assert (late.stop, late.accepted, submitted.verdict) == ("stale", 0, Verdict.ABORTED)
        assert (posted.accepted, held(world, job)) == (3, ([1, 2, 3], "abc", None))
        assert held(world, lost) == ([1, 2], "ab", None)
        assert world.store(job, "abcd", token_ids=[1, 2, 3, 4]).outcome is Outcome.COMPLETED
