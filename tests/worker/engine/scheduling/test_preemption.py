"""Who gives its blocks back when there are too few, and what becomes of it."""

from __future__ import annotations

from tests.worker.engine.scheduling.played_model import make_sequence, text_of
from tests.worker.engine.scheduling.scenes import add, make_engine, shown
from worker.engine.scheduling.sequence import SequenceState


def test_the_youngest_gives_its_blocks_back_and_loses_no_token():
    engine = make_engine(blocks=6, block_size=2, prefix_caching=False)
    a, b = add(engine, "a", 4, 6), add(engine, "b", 2, 6)
    assert shown(engine.step()) == [("a", 0, 4), ("b", 0, 2)]
    assert (a.block_table, b.block_table) == ([0, 1], [2])
    engine.step()
    engine.step()
    assert (a.block_table, b.block_table) == ([0, 1, 3], [2, 4])
    kept = list(b.token_ids)
    # Both need a fourth and a third block, and there is one more.
    assert shown(engine.step()) == [("a", 6, 1)]
    assert a.block_table == [0, 1, 3, 5]
    assert (b.state, b.token_ids, b.block_table, b.computed) == (SequenceState.WAITING, kept, [], 0)
    assert (b.preemptions, engine.scheduler.preemptions) == (1, 1)
    engine.drain()
    assert engine.texts["a", 0] == text_of(a.token_ids[:4], 6)
    assert engine.texts["b", 0] == text_of(b.token_ids[:2], 6)


def test_an_urgent_latecomer_is_not_the_one_to_give_way():
    engine = make_engine(blocks=4, block_size=1, prefix_caching=False)
    old = add(engine, "old", 1, 3, priority=1)
    engine.step()
    urgent = add(engine, "urgent", 1, 3, priority=0)
    engine.drain()
    assert (old.preemptions, urgent.preemptions) == (1, 0)
    assert list(engine.texts) == [("urgent", 0), ("old", 0)]


def test_nobody_is_let_in_by_a_step_that_preempts():
    engine = make_engine(blocks=6, block_size=2, prefix_caching=False)
    add(engine, "a", 4, 6)
    add(engine, "b", 2, 6)
    for _ in range(3):
        engine.step()
    add(engine, "c", 1, 1, priority=-1)
    assert shown(engine.step()) == [("a", 6, 1)]
    assert engine.scheduler.preemptions == 1
    assert shown(engine.step()) == [("a", 7, 1), ("c", 0, 1)]
    engine.drain()


def test_a_preempted_sequence_finds_its_own_blocks_again():
    engine = make_engine(blocks=7, block_size=2)
    a, b = add(engine, "a", 4, 6), add(engine, "b", 4, 6)
    while not b.preemptions:
        engine.step()
    assert engine.scheduler.allocator.pool.cached > 0
    while b.state is SequenceState.WAITING:
        plan = engine.step()
    entry = plan.entries[-1]
    assert entry.sequence is b
    assert entry.start == 4
    assert b.cached == 0
    engine.drain()
    assert engine.texts == {("a", 0): text_of(a.token_ids[:4], 6), ("b", 0): text_of(b.token_ids[:4], 6)}


def test_under_constant_pressure_everyone_finishes():
    engine = make_engine(blocks=9, block_size=2, max_running=8, token_budget=16)
    prompts = {f"{number}": [number, *range(number % 5)] for number in range(30)}
    for name, prompt in prompts.items():
        engine.scheduler.add(make_sequence(name, prompt, 10))
    engine.drain(most_steps=400)
    assert engine.texts == {(name, 0): text_of(prompt, 10) for name, prompt in prompts.items()}
    assert engine.scheduler.preemptions > 10


def test_who_lost_its_logits_and_then_its_blocks_waits_like_any_other():
    engine = make_engine(blocks=6, block_size=1, prefix_caching=False)
    a, b = add(engine, "a", 1, 3), add(engine, "b", 1, 3)
    unlucky = add(engine, "c", 1, 3)
    for _ in range(2):
        plan = engine.scheduler.schedule()
        assert plan.tokens == 3
        engine.model.run(plan)
        engine.scheduler.complete(plan)
        engine.give_tokens([a, b])
    assert shown(engine.step()) == [("a", 2, 1), ("b", 2, 1)]
    assert (unlucky.preemptions, engine.scheduler.preemptions) == (1, 1)
    engine.drain()
    assert len(engine.texts) == 3
