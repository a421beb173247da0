"""The main loop with its threads, a scripted engine, and a broker over real HTTP."""

from __future__ import annotations

import pytest

from tests.worker.played_broker import PATIENCE, POP, SUBMIT, Answer, Fault


def test_a_job_comes_back_as_its_text(broker, start):
    worker = start()
    broker.give("j", "hello", seed=9)
    worker.engine.writes("j", "an answer")
    broker.wait_until(lambda: "j" in broker.settled)
    body = broker.settled["j"]
    assert (body["generation"], body["state"], body["finish_reason"]) == ("an answer", "ok", "length")
    assert body["token_ids"] == [ord(c) for c in "an answer"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9}
    assert worker.ready.is_set()


def test_the_next_job_is_fetched_while_one_runs_and_not_one_more(broker, start):
    broker.native = False
    worker = start()
    for name in "abc":
        broker.give(name)
    broker.wait_until(lambda: len(broker.jobs) == 1)
    worker.engine.wait_for("a", PATIENCE)
    worker.engine.writes("a")
    worker.engine.wait_for("b", PATIENCE)
    broker.wait_until(lambda: not broker.jobs)
    assert worker.engine.started == ["a", "b"]
    # One pop for each job, and none while two were here.
    assert len(broker.made(POP)) == 3
    worker.engine.writes("b")
    worker.engine.writes("c")
    broker.wait_until(lambda: len(broker.settled) == 3)


def test_as_many_run_side_by_side_as_the_engine_takes(broker, start):
    worker = start(max_batch=3)
    for name in "abcde":
        broker.give(name)
    broker.wait_until(lambda: len(broker.jobs) == 1)
    for name in "edcba"[2:]:
        worker.engine.writes(name)
    broker.wait_until(lambda: len(broker.settled) == 3)
    assert set(broker.settled) == {"a", "b", "c"}
    worker.engine.writes("d")
    worker.engine.writes("e")
    broker.wait_until(lambda: len(broker.settled) == 5)


def test_one_stop_finishes_what_runs_releases_what_waits_and_takes_nothing_new(broker, start):
    worker = start()
    for name in "abc":
        broker.give(name)
    broker.wait_until(lambda: len(broker.jobs) == 1)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 1, PATIENCE)
    worker.stop()
    broker.wait_until(lambda: "b" in broker.settled)
    assert "a" not in broker.settled
    worker.engine.writes("a", "done")
    assert worker.ended() is None
    assert broker.states() == {"a": "ok", "b": "released"}
    assert [job["id"] for job in broker.jobs] == ["c"]
    assert worker.engine.aborted == []


def test_a_job_that_a_poll_brings_after_the_stop_is_released(broker, start):
    worker = start()
    broker.wait_until(lambda: len(broker.made(POP)) == 1)
    worker.worker.stop()
    broker.give("late")
    assert worker.ended() is None
    assert broker.states() in ({"late": "released"}, {})
    assert ("late" in broker.settled) != any(job["id"] == "late" for job in broker.jobs)


def test_a_second_stop_hands_back_what_runs(broker, start):
    worker = start()
    broker.give("a")
    broker.give("b")
    broker.wait_until(lambda: not broker.jobs)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 1, PATIENCE)
    worker.stop()
    broker.wait_until(lambda: "b" in broker.settled)
    assert "once more" in worker.status.snapshot().note
    worker.stop()
    assert worker.ended() is None
    assert broker.states() == {"a": "released", "b": "released"}
    assert worker.engine.aborted == ["a"]
    assert worker.status.snapshot().note == "handing back what runs"


def test_an_idle_worker_stops_when_its_poll_ends(broker, start):
    worker = start()
    assert worker.ready.wait(PATIENCE)
    worker.stop()
    assert worker.ended() is None


def test_a_poisoned_job_is_faulted_alone(broker, start):
    worker = start(max_batch=2)
    broker.give("bad")
    broker.give("good")
    broker.wait_until(lambda: not broker.jobs)
    worker.engine.fails("bad")
    worker.engine.writes("good")
    broker.wait_until(lambda: len(broker.settled) == 2)
    assert broker.states() == {"bad": "faulted", "good": "ok"}
    assert worker.status.snapshot().failed == 1


@pytest.mark.parametrize("prompt", ["unfit", "breaks add"])
def test_a_job_the_engine_does_not_take_is_faulted_and_the_next_one_runs(broker, start, prompt):
    worker = start()
    broker.give("bad", prompt)
    broker.wait_until(lambda: "bad" in broker.settled)
    broker.give("good")
    worker.engine.writes("good")
    broker.wait_until(lambda: "good" in broker.settled)
    assert broker.states() == {"bad": "faulted", "good": "ok"}


def test_a_job_that_cannot_be_read_is_faulted_and_frees_its_seat(broker, start):
    worker = start()
    for number in range(4):
        broker.give(f"bad{number}", temperature="hot")
    broker.wait_until(lambda: len(broker.settled) == 4)
    broker.give("good")
    worker.engine.writes("good")
    broker.wait_until(lambda: "good" in broker.settled)
    assert set(broker.states().values()) == {"faulted", "ok"}


def test_a_step_that_fails_as_a_whole_faults_what_ran_and_goes_on(broker, start):
    worker = start()
    broker.give("a")
    worker.engine.breaks("out of memory")
    broker.wait_until(lambda: "a" in broker.settled)
    broker.give("b")
    worker.engine.writes("b")
    broker.wait_until(lambda: "b" in broker.settled)
    assert broker.states() == {"a": "faulted", "b": "ok"}


def test_an_engine_that_fails_again_and_again_ends_the_worker(broker, start):
    worker = start()
    for name in "abc":
        broker.give(name)
        worker.engine.breaks()
    assert worker.ended() == "the engine failed 3 times in a row"
    assert broker.states() == dict.fromkeys("abc", "faulted")


def test_a_job_the_broker_no_longer_knows_is_dropped(broker, start):
    worker = start()
    broker.forgotten.add("gone")
    broker.give("gone")
    worker.engine.writes("gone")
    broker.give("next")
    worker.engine.writes("next")
    broker.wait_until(lambda: "next" in broker.settled)
    assert len([call for call in broker.made(SUBMIT) if call.body["id"] == "gone"]) == 1
    assert worker.status.snapshot().failed == 1


@pytest.mark.parametrize("fault", [Answer(503), Fault.RESET, Fault.LOST], ids=["503", "reset", "lost answer"])
def test_a_result_is_delivered_once_whatever_happens_on_the_way(broker, start, fault):
    worker = start()
    broker.fail(SUBMIT, fault, fault)
    broker.give("j")
    worker.engine.writes("j", "text")
    broker.wait_until(lambda: len(broker.made(SUBMIT)) == 3)
    worker.stop()
    assert worker.ended() is None
    assert len({call.key for call in broker.made(SUBMIT)}) == 1
    assert broker.settled["j"]["generation"] == "text"
    assert worker.status.snapshot().done == 1
    assert worker.status.snapshot().kudos == 1.5


def test_a_lost_pop_answer_is_asked_for_again_with_its_key(broker, start):
    broker.fail(POP, Fault.LOST)
    broker.give("j")
    worker = start()
    worker.engine.writes("j")
    broker.wait_until(lambda: "j" in broker.settled and len(broker.made(POP)) > 2)
    first, second, third = (call.key for call in broker.made(POP)[:3])
    assert first == second != third


def test_a_broker_restart_is_survived_with_the_job_and_its_key(broker, start):
    worker = start()
    broker.give("j")
    worker.engine.wait_for("j", PATIENCE)
    broker.stop()
    worker.engine.writes("j", "kept")
    broker.start()
    broker.wait_until(lambda: "j" in broker.settled)
    broker.give("after")
    worker.engine.writes("after")
    broker.wait_until(lambda: "after" in broker.settled)
    assert broker.settled["j"]["generation"] == "kept"


def test_a_result_that_cannot_be_delivered_does_not_hold_up_others(broker, start):
    worker = start()
    broker.fail(SUBMIT, Answer(503, {"message": "not this one"}, {"Retry-After": "3600"}))
    broker.give("stuck")
    worker.engine.writes("stuck")
    broker.wait_until(lambda: len(broker.made(SUBMIT)) == 1)
    broker.give("next")
    worker.engine.writes("next")
    broker.wait_until(lambda: "next" in broker.settled)
    assert "stuck" not in broker.settled
    worker.stop()
    assert worker.ended() is None
    assert "stuck" in broker.settled, "a drain tries everything once more, at once"


def test_maintenance_pauses_the_worker_and_shows_the_message(broker, start):
    paused = Answer(403, {"message": "Too many dropped jobs", "rc": "WorkerMaintenance"})
    broker.fail(POP, *([paused] * 100))
    worker = start()
    broker.wait_until(lambda: len(broker.made(POP)) == 2)
    assert (worker.status.snapshot().state, worker.status.snapshot().note) == ("paused", "Too many dropped jobs")
    with broker.changed:
        broker.faults[POP].clear()
    broker.give("j")
    worker.engine.writes("j")
    broker.wait_until(lambda: "j" in broker.settled)
    assert worker.status.snapshot().state == "working"


def test_a_worker_that_is_turned_away_finishes_its_job_and_says_why(broker, start):
    worker = start()
    broker.give("j")
    worker.engine.wait_for("j", PATIENCE)
    broker.fail(POP, Answer(401, {"message": "No user matches", "rc": "InvalidAPIKey"}))
    broker.wait_until(lambda: not broker.faults[POP])
    worker.engine.writes("j")
    assert "does not know this API key" in str(worker.ended())
    assert broker.states() == {"j": "ok"}


def test_a_job_that_is_handed_out_twice_runs_once(broker, start):
    worker = start(max_batch=2)
    broker.give("j")
    worker.engine.wait_for("j", PATIENCE)
    broker.give("j")
    broker.give("other")
    worker.engine.wait_for("other", PATIENCE)
    worker.engine.writes("j")
    worker.engine.writes("other")
    broker.wait_until(lambda: len(broker.settled) == 2)
    assert worker.engine.started == ["j", "other"]
    assert broker.states() == {"j": "ok", "other": "ok"}


def test_a_batch_larger_than_asked_for_is_worked_off(broker, start):
    broker.native = False
    worker = start()
    jobs = [{"id": name, "payload": {"prompt": name}} for name in "abcd"]
    with broker.changed:
        broker.jobs.append({"id": "a", "payload": {"prompt": "a"}, "jobs": jobs})
        broker.changed.notify_all()
    worker.engine.writes("a")
    worker.engine.writes("b")
    broker.wait_until(lambda: len(broker.settled) == 2)
    worker.engine.wait_for("c", PATIENCE)
    assert len(broker.made(POP)) == 1, "asked for more with two jobs in hand"
    worker.engine.writes("c")
    broker.wait_until(lambda: len(broker.made(POP)) == 2)
    worker.engine.writes("d")
    broker.wait_until(lambda: len(broker.settled) == 4)
    broker.give("e")
    worker.engine.writes("e")
    broker.wait_until(lambda: "e" in broker.settled)
