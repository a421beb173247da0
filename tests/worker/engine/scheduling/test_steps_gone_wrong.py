"""Steps that fail, tokens that never come, and aborts in between."""

from __future__ import annotations

import pytest

from tests.worker.engine.scheduling.played_model import make_sequence, text_of
from tests.worker.engine.scheduling.scenes import add, make_engine, shown
from worker.engine.scheduling.sequence import SequenceState


def test_a_text_is_not_continued_beyond_its_end():
    engine = make_engine()
    sequence = make_sequence("a", [1], 0)
    engine.scheduler.add(sequence)
    plan = engine.scheduler.schedule()
    with pytest.raises(ValueError, match="no logits"):
        engine.scheduler.append(sequence, 1)
    engine.scheduler.complete(plan)
    with pytest.raises(ValueError, match="all its 1 tokens"):
        engine.scheduler.append(sequence, 1)


def test_a_step_that_failed_is_planned_again_with_its_copies():
    engine = make_engine(block_size=4)
    engine.scheduler.add(make_sequence("a", range(5), 3, samples=2))
    engine.step()
    failed = engine.scheduler.schedule()
    assert failed.copies == [(1, 2)]
    engine.model.break_down(failed, copies=0, entries=0)
    again = engine.scheduler.schedule()
    assert (shown(again), again.copies) == (shown(failed), failed.copies)
    with pytest.raises(ValueError, match="only the newest plan"):
        engine.scheduler.complete(failed)
    engine.drain()
    assert engine.texts == {("a", sample): text_of(range(5), 3, sample) for sample in range(2)}


def test_a_plan_is_completed_once():
    engine = make_engine()
    add(engine, "a", 3)
    plan = engine.scheduler.schedule()
    engine.scheduler.complete(plan)
    with pytest.raises(ValueError, match="only once"):
        engine.scheduler.complete(plan)


def test_lost_logits_are_computed_again_from_the_last_token():
    engine = make_engine(block_size=2)
    sequence = add(engine, "a", 4)
    plan = engine.scheduler.schedule()
    engine.model.run(plan)
    engine.scheduler.complete(plan)
    assert shown(engine.step()) == [("a", 3, 1)]
    engine.drain()
    assert engine.texts["a", 0] == text_of(sequence.token_ids[:4], 4)


def test_whoever_ends_between_plan_and_commit_is_passed_over():
    engine = make_engine(blocks=10, block_size=2)
    a, b = add(engine, "a", 4), add(engine, "b", 4)
    plan = engine.scheduler.schedule()
    engine.model.run(plan)
    engine.scheduler.abort("a")
    engine.scheduler.abort("a")
    engine.scheduler.complete(plan)
    assert (a.state, a.computed, b.computed) == (SequenceState.ENDED, 0, 4)
    engine.scheduler.check()
    assert engine.scheduler.allocator.pool.free == 8
    engine.give_tokens([b])
    engine.drain()


def test_an_abort_of_nobody_changes_nothing():
    engine = make_engine()
    engine.scheduler.abort("nobody")
    sequence = add(engine, "a", 3, 1)
    engine.drain()
    engine.scheduler.abort("a")
    engine.scheduler.finish(sequence)
    engine.scheduler.check()
