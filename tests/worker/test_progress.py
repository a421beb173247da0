"""What the broker is told about running jobs, and what a worker does when it hears that one is not wanted any more."""

from __future__ import annotations

import threading

import pytest

from tests.worker.played_broker import PATIENCE, POP, PROGRESS, SUBMIT, Answer, Fault
from worker.engine.interface import EngineStatistics


def named(broker) -> set[str]:
    """Jobs in the newest post."""
    return set(broker.stages()[-1]) if broker.stages() else set()


def test_every_job_is_named_at_once_with_its_state(broker, start):
    broker.give_at_once("a", "b", "c")
    # One post at the start and then none for an hour: what is seen came at once.
    worker = start(max_batch=2, progress=3600.0)
    broker.wait_until(lambda: bool(broker.made(PROGRESS)))
    [stages] = broker.stages()
    assert set(stages) == {"a", "b", "c"}
    assert set(stages.values()) <= {"queued", "started", "prefill"}
    [post] = broker.made(PROGRESS)
    assert post.body["worker"] == "w"
    assert broker.made(POP)[0].body["progress"] is True
    worker.engine.writes("a")
    broker.give("d")
    broker.wait_until(lambda: len(broker.made(PROGRESS)) > 1)
    assert "d" in named(broker)


def test_states_follow_the_job(broker, start):
    broker.give_at_once("a", "b", "c")
    worker = start(max_batch=2)
    broker.wait_until(lambda: {"a": "prefill", "b": "prefill", "c": "queued"} in broker.stages())
    worker.engine.begins("a")
    broker.wait_until(lambda: {"a": "decode", "b": "prefill", "c": "queued"} in broker.stages())
    worker.engine.figures = EngineStatistics(running=1, waiting=1)
    worker.engine.writes("b")
    broker.wait_until(lambda: {"a": "decode", "c": "started"} in broker.stages())


def test_nothing_is_posted_while_nothing_is_held(broker, start):
    worker = start(shortest_round=0.1)
    broker.give("a")
    worker.engine.writes("a")
    broker.wait_until(lambda: "a" in broker.settled)
    seen = len(broker.made(POP))
    broker.wait_until(lambda: len(broker.made(POP)) >= seen + 1)
    posts = len(broker.made(PROGRESS))
    broker.wait_until(lambda: len(broker.made(POP)) >= seen + 2)
    assert len(broker.made(PROGRESS)) == posts
    assert named(broker) in (set(), {"a"})


def test_a_finished_job_is_named_until_its_result_has_arrived(broker, start):
    worker = start()
    broker.fail(SUBMIT, *[Answer(503)] * 1000)
    broker.give("a")
    worker.engine.writes("a")
    broker.wait_until(lambda: bool(broker.made(SUBMIT)))
    posts = len(broker.made(PROGRESS))
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= posts + 3)
    assert broker.stages()[-1] == {"a": "decode"}
    with broker.changed:
        broker.faults[SUBMIT].clear()
    broker.wait_until(lambda: "a" in broker.settled)
    broker.give("b")
    broker.wait_until(lambda: named(broker) == {"b"})


def test_a_stopped_job_leaves_the_engine_and_is_not_submitted(broker, start):
    worker = start(max_batch=2)
    broker.give_at_once("a", "b", "c")
    worker.engine.wait_for("b", PATIENCE)
    broker.stop_job("a", "voided")
    # Its seat is free for the one that waits.
    worker.engine.wait_for("c", PATIENCE)
    assert worker.engine.aborted == ["a"]
    broker.wait_until(lambda: named(broker) == {"b", "c"})
    worker.engine.writes("b")
    worker.engine.writes("c")
    broker.wait_until(lambda: len(broker.settled) == 2)
    worker.stop()
    assert worker.ended() is None
    assert sorted(call.body["id"] for call in broker.made(SUBMIT)) == ["b", "c"]
    now = worker.status.snapshot()
    assert (now.stopped, now.failed, now.done) == (1, 0, 2)


def test_a_stopped_job_that_has_not_begun_is_forgotten(broker, start):
    worker = start()
    broker.give_at_once("a", "b")
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 1, PATIENCE)
    broker.stop_job("b", "stale")
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 0, PATIENCE)
    broker.give("c")
    worker.engine.writes("a")
    worker.engine.wait_for("c", PATIENCE)
    assert worker.engine.started == ["a", "c"]
    assert worker.engine.aborted == []
    assert worker.status.snapshot().stopped == 1


def test_every_seat_comes_back_when_all_are_stopped(broker, start):
    first, second = [f"a{n}" for n in range(36)], [f"b{n}" for n in range(36)]
    broker.give_at_once(*first)
    worker = start(max_batch=32)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 4, PATIENCE)
    for job_id in first:
        broker.stop_job(job_id, "cancelled")
    broker.wait_until(lambda: len(broker.made(POP)) > 1 and broker.made(POP)[-1].body["slots"] == 36)
    assert worker.status.snapshot().stopped == 36
    broker.give_at_once(*second)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 4, PATIENCE)
    assert sorted(worker.engine.aborted) == sorted(first[:32])
    for job_id in second:
        worker.engine.writes(job_id)
    broker.wait_until(lambda: len(broker.settled) == 36)
    assert set(broker.settled) == set(second)


def test_a_stop_for_a_job_that_is_unknown_or_has_just_ended_is_harmless(broker, start):
    worker = start()
    broker.fail(SUBMIT, *[Answer(503)] * 1000)
    broker.give("a")
    worker.engine.writes("a")
    broker.wait_until(lambda: bool(broker.made(SUBMIT)))
    stops = [{"id": "a", "reason": "stale"}, {"id": "never heard of", "reason": "stale"}, {"id": None}, "nonsense"]
    broker.fail(PROGRESS, Answer(200, {"jobs": "nonsense", "stop": stops}))
    broker.wait_until(lambda: not broker.faults[PROGRESS])
    with broker.changed:
        broker.faults[SUBMIT].clear()
    broker.wait_until(lambda: "a" in broker.settled)
    broker.give("b")
    worker.engine.writes("b")
    broker.wait_until(lambda: "b" in broker.settled)
    now = worker.status.snapshot()
    assert (now.stopped, worker.engine.aborted) == (0, [])


def test_a_broker_without_the_route_is_asked_once_and_then_popped_without_the_promise(broker, start):
    broker.native = False
    worker = start(max_batch=2)
    broker.give_at_once("a", "b")
    broker.wait_until(lambda: bool(broker.made(PROGRESS)))
    broker.wait_until(lambda: "progress" not in broker.made(POP)[-1].body)
    for name in "ab":
        worker.engine.writes(name)
    broker.wait_until(lambda: len(broker.settled) == 2)
    broker.give("c")
    worker.engine.writes("c")
    broker.wait_until(lambda: "c" in broker.settled)
    assert len(broker.made(PROGRESS)) == 1
    asked = ["progress" in call.body for call in broker.made(POP)]
    assert asked == sorted(asked, reverse=True), "the promise came back"


def test_a_404_of_a_proxy_during_a_restart_does_not_end_the_posts(broker, start):
    worker = start()
    broker.give("a")
    broker.wait_until(lambda: len(broker.made(PROGRESS)) == 1)
    broker.fail(PROGRESS, Answer(404, b"<html>no backend</html>"), Answer(502))
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= 5)
    worker.engine.writes("a")
    broker.wait_until(lambda: "a" in broker.settled)
    assert all(call.body["progress"] for call in broker.made(POP))


@pytest.mark.parametrize("fault", [Answer(400, {"message": "bad", "rc": "BadRequest"}), Answer(413), Fault.RESET])
def test_a_post_that_is_not_taken_is_followed_by_others(broker, start, fault):
    broker.fail(PROGRESS, fault, fault)
    start()
    broker.give("a")
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= 4)
    assert named(broker) == {"a"}


def test_work_goes_on_while_the_broker_is_away_and_posts_come_again_after_it(broker, start):
    worker = start(max_batch=2)
    broker.give_at_once("a", "b")
    broker.wait_until(lambda: bool(broker.made(PROGRESS)))
    broker.stop()
    worker.engine.writes("a", "made meanwhile")
    worker.engine.wait_until(lambda: "a" not in worker.engine.requests, PATIENCE)
    posts = len(broker.made(PROGRESS))
    broker.start()
    broker.wait_until(lambda: len(broker.made(PROGRESS)) > posts and "a" in broker.settled)
    assert broker.settled["a"]["generation"] == "made meanwhile"
    worker.engine.writes("b")
    broker.wait_until(lambda: "b" in broker.settled)


def test_short_leases_are_renewed_in_time(broker, start):
    broker.ttl = 1
    start(progress=3600.0)
    broker.give("a")
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= 4)


def test_jobs_are_named_while_the_engine_is_within_a_step_but_not_for_ever(broker, start, caplog):
    worker = start(stalled=1.0, shortest_round=0.1)
    going_on = threading.Event()
    broker.give("a")
    worker.engine.wait_for("a", PATIENCE)
    posts = len(broker.made(PROGRESS))
    worker.engine.hangs_until(going_on)
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= posts + 5)
    try:
        broker.wait_until(lambda: "has not come back" in caplog.text)
        posts = len(broker.made(PROGRESS))
        seen = len(broker.made(POP))
        broker.wait_until(lambda: len(broker.made(POP)) > seen)
        assert len(broker.made(PROGRESS)) <= posts + 1
    finally:
        going_on.set()
    posts = len(broker.made(PROGRESS))
    broker.wait_until(lambda: len(broker.made(PROGRESS)) > posts)


def test_a_drain_keeps_naming_what_still_runs(broker, start):
    worker = start()
    broker.give_at_once("a", "b")
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 1, PATIENCE)
    worker.stop()
    broker.wait_until(lambda: "b" in broker.settled)
    posts = len(broker.made(PROGRESS))
    broker.wait_until(lambda: len(broker.made(PROGRESS)) >= posts + 3)
    assert named(broker) == {"a"}
    broker.stop_job("a", "voided")
    assert worker.ended() is None
    assert "a" not in broker.settled


def left(broker) -> list[bool]:
    """Of each post: whether it says that the worker leaves."""
    return [call.body.get("leaving", False) for call in broker.made(PROGRESS)]


@pytest.mark.parametrize("stops", [1, 2])
def test_the_last_that_a_worker_says_is_that_it_leaves(broker, start, stops):
    worker = start()
    broker.give("a")
    worker.engine.wait_for("a", PATIENCE)
    worker.stop()
    if stops == 1:
        worker.engine.writes("a")
    else:
        worker.stop()
    assert worker.ended() is None
    assert broker.states() == {"a": "ok" if stops == 1 else "released"}
    assert left(broker)[-1]
    assert left(broker).count(True) == 1
    assert broker.calls[-1].body == {"worker": "w", "jobs": [], "leaving": True}


def test_one_that_never_had_a_job_says_that_it_leaves_too(broker, start):
    worker = start()
    broker.wait_until(lambda: bool(broker.pops()))
    worker.stop()
    assert worker.ended() is None
    assert left(broker) == [True]


@pytest.mark.parametrize("fault", [Answer(503), Answer(404), Answer(403, {"rc": "WrongCredentials"}), Fault.RESET])
def test_a_worker_ends_whatever_the_broker_says_to_that(broker, start, fault):
    worker = start()
    broker.wait_until(lambda: bool(broker.pops()))
    broker.fail(PROGRESS, fault)
    worker.stop()
    assert worker.ended() is None
    assert left(broker) == [True]
