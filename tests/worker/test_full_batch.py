"""A worker that runs many jobs side by side: it asks for as many as it has seats, and stops in order."""

from __future__ import annotations

import pytest

from tests.worker.played_broker import PATIENCE, POP, Answer, Fault

NAMES = [f"j{number:02}" for number in range(40)]


def test_one_pop_fills_the_batch_and_a_few_wait_behind_it(broker, start):
    broker.give_at_once(*NAMES)
    worker = start(max_batch=32)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 4, PATIENCE)
    assert worker.status.snapshot().running == 32
    [pop] = broker.made(POP)
    assert pop.body["slots"] == 36
    assert len(broker.jobs) == 4, "more were taken than there are seats"


def test_freed_seats_are_filled_while_the_others_go_on(broker, start):
    broker.give_at_once(*NAMES)
    worker = start(max_batch=32)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 4, PATIENCE)
    for name in NAMES[:3]:
        worker.engine.writes(name)
    broker.wait_until(lambda: len(broker.jobs) == 1)
    worker.engine.wait_until(lambda: len(worker.engine.started) == 35, PATIENCE)
    assert worker.engine.running == 32
    assert all(1 <= call.body["slots"] <= 36 for call in broker.made(POP))
    for name in NAMES[3:]:
        worker.engine.writes(name)
    broker.wait_until(lambda: len(broker.settled) == 40)
    assert set(broker.states().values()) == {"ok"}


def test_an_idle_worker_waits_in_one_poll_and_asks_for_the_rest_once_a_job_has_come(broker, start):
    worker = start(max_batch=8)
    broker.wait_until(lambda: len(broker.made(POP)) == 1)
    broker.give("a")
    broker.wait_until(lambda: len(broker.made(POP)) >= 2)
    assert [call.body["slots"] for call in broker.made(POP)[:2]] == [9, 8]
    worker.engine.wait_for("a", PATIENCE)


def test_a_broker_of_ai_horde_fills_the_batch_one_job_a_pop(broker, start):
    broker.native = False
    broker.give_at_once(*NAMES)
    worker = start(max_batch=32)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 4, PATIENCE)
    assert len(broker.made(POP)) == 36
    for name in NAMES:
        worker.engine.writes(name)
    broker.wait_until(lambda: len(broker.settled) == 40)


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.LOST, Answer(503)])
def test_a_pop_that_is_sent_again_asks_for_the_same(broker, start, fault):
    broker.fail(POP, fault)
    broker.give_at_once("a", "b")
    worker = start(max_batch=4)
    worker.engine.wait_for("b", PATIENCE)
    first, second = broker.made(POP)[:2]
    assert (first.key, first.body) == (second.key, second.body)
    assert sorted(worker.engine.started) == ["a", "b"]


def test_jobs_of_one_pop_carry_their_tenants_salt(broker, start):
    broker.give_at_once("a", cache_salt="one")
    broker.give_at_once("b", cache_salt="two")
    worker = start(max_batch=4)
    worker.engine.wait_for("b", PATIENCE)
    salts = {job_id: request.cache_salt for job_id, request in worker.engine.requests.items()}
    assert salts == {"a": "tenant one", "b": "tenant two"}


def test_a_drain_finishes_all_that_run_and_releases_those_that_wait(broker, start):
    broker.give_at_once(*NAMES[:36])
    worker = start(max_batch=32)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 4, PATIENCE)
    worker.stop()
    broker.wait_until(lambda: len(broker.settled) == 4)
    for name in NAMES[:32]:
        worker.engine.writes(name)
    assert worker.ended() is None
    states = broker.states()
    assert {name for name, state in states.items() if state == "ok"} == set(NAMES[:32])
    assert {name for name, state in states.items() if state == "released"} == set(NAMES[32:36])
    assert worker.engine.aborted == []


def test_a_second_signal_hands_back_all_that_run(broker, start):
    broker.give_at_once(*NAMES[:36])
    worker = start(max_batch=32)
    worker.engine.wait_until(lambda: worker.status.snapshot().waiting == 4, PATIENCE)
    worker.stop()
    worker.stop()
    assert worker.ended() is None
    assert broker.states() == dict.fromkeys(NAMES[:36], "released")
    assert sorted(worker.engine.aborted) == NAMES[:32]
    assert worker.engine.running == 0


def test_a_step_that_fails_as_a_whole_frees_all_seats(broker, start):
    broker.give_at_once(*NAMES[:9])
    worker = start(max_batch=8)
    worker.engine.wait_until(lambda: worker.status.snapshot().running == 8, PATIENCE)
    worker.engine.breaks("out of memory")
    broker.wait_until(lambda: len(broker.settled) == 8)
    assert set(broker.states().values()) == {"faulted"}
    worker.engine.writes(NAMES[8])
    broker.give_at_once(*NAMES[10:18])
    worker.engine.wait_until(lambda: len(worker.engine.started) == 17, PATIENCE)
    broker.wait_until(lambda: broker.states().get(NAMES[8]) == "ok")
