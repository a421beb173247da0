"""Who runs in which step, in small scenes with exact plans."""

from __future__ import annotations

import time

import pytest

from tests.worker.engine.scheduling.played_model import make_sequence, text_of
from tests.worker.engine.scheduling.scenes import add, make_engine, shown
from worker.engine.scheduling.sequence import SequenceState


def test_decodes_come_before_prompts_and_share_the_budget_with_them():
    engine = make_engine(token_budget=8)
    add(engine, "a", 3)
    assert shown(engine.step()) == [("a", 0, 3)]
    add(engine, "b", 10)
    add(engine, "c", 10)
    assert shown(engine.step()) == [("a", 3, 1), ("b", 0, 7)]
    assert shown(engine.step()) == [("a", 4, 1), ("b", 7, 3), ("c", 0, 4)]
    assert shown(engine.step()) == [("a", 5, 1), ("b", 10, 1), ("c", 4, 6)]
    engine.drain()


@pytest.mark.parametrize("chunk", [1, 7, 8, 64])
def test_a_prompt_gives_no_token_before_its_last_chunk(chunk):
    engine = make_engine(token_budget=100, chunk_limit=chunk)
    lengths = (7, 8, 9, 16, 17, 100)
    sequences = [add(engine, f"{number}", length) for number, length in enumerate(lengths)]
    while engine.scheduler.running + engine.scheduler.waiting:
        plan = engine.scheduler.schedule()
        assert plan.tokens <= 100
        assert all(entry.count <= chunk for entry in plan.entries)
        assert all(
            entry.samples == (entry.start + entry.count >= entry.sequence.prompt_length) for entry in plan.entries
        )
        engine.model.run(plan)
        engine.scheduler.complete(plan)
        engine.give_tokens([entry.sequence for entry in plan.entries if entry.samples])
    for sequence in sequences:
        assert sequence.token_ids == text_of(sequence.token_ids[: sequence.prompt_length], 4)


def test_a_budget_of_one_token_serves_everyone_in_turn():
    engine = make_engine(token_budget=1)
    sequences = [add(engine, name, 5) for name in "abc"]
    engine.drain()
    assert list(engine.texts) == [("a", 0), ("b", 0), ("c", 0)]
    assert [sequence.preemptions for sequence in sequences] == [0, 0, 0]


def test_lower_priorities_come_first_and_equals_in_their_order():
    engine = make_engine(max_running=1)
    for name, priority in (("a", 1), ("b", 1), ("c", 0), ("d", 1)):
        add(engine, name, 3, priority=priority)
    engine.drain()
    assert [name for name, _ in engine.texts] == ["c", "a", "b", "d"]


def test_nobody_is_overtaken_by_a_smaller_one_behind():
    engine = make_engine(blocks=10, block_size=1, max_running=4)
    add(engine, "a", 5, 2)
    engine.step()
    add(engine, "big", 6, 2)
    add(engine, "small", 1, 1)
    assert shown(engine.step()) == [("a", 5, 1)]
    assert [engine.scheduler.running, engine.scheduler.waiting] == [0, 2]
    assert shown(engine.step()) == [("big", 0, 6), ("small", 0, 1)]
    engine.drain()


def test_a_request_waits_for_as_many_seats_as_it_has_samples():
    engine = make_engine(max_running=4)
    add(engine, "a", 3, 2)
    add(engine, "b", 3, samples=4)
    add(engine, "c", 3)
    assert shown(engine.step()) == [("a", 0, 3)]
    assert (engine.scheduler.running, engine.scheduler.waiting) == (1, 5)
    engine.step()
    assert shown(engine.step()) == [("b", 0, 3)]
    assert (engine.scheduler.running, engine.scheduler.waiting) == (4, 1)
    engine.drain()


def test_admission_keeps_a_block_for_each_running_one_to_grow_into():
    engine = make_engine(blocks=5, block_size=4)
    add(engine, "a", 4)
    engine.step()
    add(engine, "b", 12)
    # Four blocks are free, "a" takes one of them now; three for "b" would leave none for "a" to grow into.
    assert shown(engine.step()) == [("a", 4, 1)]
    assert engine.scheduler.waiting == 1
    engine.drain()
    assert engine.scheduler.preemptions == 0


def test_what_runs_alone_may_take_the_whole_cache():
    engine = make_engine(blocks=4, block_size=4)
    add(engine, "a", 15, 1)
    add(engine, "b", 15, 1)
    assert shown(engine.step()) == [("a", 0, 15)]
    assert shown(engine.step()) == [("b", 0, 15)]
    engine.drain()


def test_what_can_never_run_is_refused_and_blocks_nobody():
    engine = make_engine(blocks=4, block_size=4, max_running=2)
    with pytest.raises(ValueError, match="17 tokens do not fit in a cache of 16"):
        add(engine, "a", 13, 4)
    with pytest.raises(ValueError, match="3 samples cannot run side by side, at most 2"):
        add(engine, "b", 1, samples=3)
    with pytest.raises(ValueError, match="0 tokens"):
        engine.scheduler.add(make_sequence("c", []))
    assert engine.scheduler.waiting == 0
    for number in range(10):
        add(engine, f"{number}", 12, 4)
    engine.drain()
    assert len(engine.texts) == 10
    with pytest.raises(ValueError, match="is not new"):
        engine.scheduler.add(make_sequence("d", [1], state=SequenceState.ENDED))


def test_prompts_get_the_share_that_the_number_of_decodes_leaves_them():
    asked = []

    def limit(decodes: int) -> int:
        asked.append(decodes)
        return 5 - decodes

    engine = make_engine(token_budget=20, prefill_limit=limit)
    add(engine, "a", 10, 30)
    assert shown(engine.step()) == [("a", 0, 10)]
    add(engine, "b", 10, 30)
    assert shown(engine.step()) == [("a", 10, 1), ("b", 0, 4)]
    assert asked == [1]
    assert shown(engine.step()) == [("a", 11, 1), ("b", 4, 4)]
    engine.step()
    add(engine, "c", 10, 30)
    plan = engine.step()
    assert shown(plan) == [("a", 13, 1), ("b", 10, 1), ("c", 0, 3)]
    assert (plan.decodes, plan.tokens) == (2, 5)


def test_a_share_of_nothing_still_lets_a_prompt_get_on():
    engine = make_engine(prefill_limit=lambda decodes: 0)
    add(engine, "a", 3, 20)
    engine.step()
    add(engine, "b", 3, 1)
    assert shown(engine.step()) == [("a", 3, 1), ("b", 0, 1)]
    engine.drain()


@pytest.mark.parametrize("name", ["max_running", "token_budget", "chunk_limit"])
def test_limits_are_at_least_one(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        make_engine(**{name: 0})


def test_planning_a_step_of_32_decodes_takes_well_under_a_millisecond():
    engine = make_engine(blocks=4000, block_size=16, max_running=32, token_budget=20_000)
    for number in range(32):
        engine.scheduler.add(make_sequence(f"{number}", [number, *range(500)], 1000))
    plan = engine.scheduler.schedule()
    engine.scheduler.complete(plan)
    seconds = []
    for _ in range(200):
        begun = time.perf_counter()
        for entry in plan.entries:
            engine.scheduler.append(entry.sequence, 1)
        plan = engine.scheduler.schedule()
        engine.scheduler.complete(plan)
        seconds.append(time.perf_counter() - begun)
    assert len(plan.entries) == 32
    # The best of many: what it costs, whatever else the machine does.
    assert min(seconds) < 0.001
