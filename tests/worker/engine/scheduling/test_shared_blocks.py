"""Requests with the same beginning and samples of one request, in the same blocks."""

from __future__ import annotations

import pytest

from tests.worker.engine.scheduling.played_model import make_sequence, text_of
from tests.worker.engine.scheduling.scenes import make_engine, shown


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_prompt_sent_again_and_twice_at_once_gives_the_same_text(length):
    engine = make_engine(blocks=40, block_size=16)
    prompt = list(range(length))
    cached = []
    for names in (["a"], ["b"], ["c"], ["d", "e"]):
        twins = [make_sequence(name, prompt, 20) for name in names]
        for sequence in twins:
            engine.scheduler.add(sequence)
        engine.drain()
        cached += [sequence.cached for sequence in twins]
    assert list(engine.texts.values()) == [text_of(prompt, 20)] * 5
    hit = (length - 1) // 16 * 16
    assert cached == [0, hit, hit, hit, hit]


def test_twins_in_a_step_each_compute_on_their_own_and_the_first_is_kept():
    engine = make_engine(block_size=4)
    twins = [make_sequence(name, range(8)) for name in "ab"]
    for sequence in twins:
        engine.scheduler.add(sequence)
    assert shown(engine.step()) == [("a", 0, 8), ("b", 0, 8)]
    assert [sequence.block_table for sequence in twins] == [[0, 1], [2, 3]]
    third = make_sequence("c", range(9))
    engine.scheduler.add(third)
    engine.step()
    assert third.block_table[:2] == [0, 1]
    engine.model.check([*twins, third])
    engine.drain()


def test_samples_share_the_prompt_and_part_when_they_write():
    engine = make_engine(blocks=20, block_size=4)
    leader = make_sequence("a", range(6), 4, samples=3)
    engine.scheduler.add(leader)
    engine.step()
    samples = engine.scheduler.sequences("a")
    assert [sequence.sample for sequence in samples] == [0, 1, 2]
    assert [sequence.block_table for sequence in samples] == [[0, 1]] * 3
    plan = engine.step()
    assert plan.copies == [(1, 2), (1, 3)]
    assert [sequence.block_table for sequence in samples] == [[0, 2], [0, 3], [0, 1]]
    engine.drain()
    assert engine.texts == {("a", sample): text_of(range(6), 4, sample) for sample in range(3)}


def test_samples_that_do_not_fit_together_run_one_after_the_other():
    engine = make_engine(blocks=3, block_size=4)
    engine.scheduler.add(make_sequence("a", range(6), 5, samples=3))
    engine.drain()
    assert engine.texts == {("a", sample): text_of(range(6), 5, sample) for sample in range(3)}


def test_a_leader_is_forked_right_after_its_prompt_only():
    engine = make_engine(token_budget=4)
    leader = make_sequence("a", range(6), samples=2)
    engine.scheduler.add(leader)
    with pytest.raises(ValueError, match="only right after"):
        engine.scheduler.fork(leader)
    engine.step()
    with pytest.raises(ValueError, match="only right after"):
        engine.scheduler.fork(leader)
    engine.drain()
    assert set(engine.texts) == {("a", 0), ("a", 1)}


def test_one_sample_may_end_while_the_others_go_on():
    engine = make_engine(block_size=4)
    engine.scheduler.add(make_sequence("a", range(6), 4, samples=3))
    engine.step()
    engine.scheduler.finish(engine.scheduler.sequences("a")[0])
    engine.drain()
    assert engine.texts == {("a", sample): text_of(range(6), 4, sample) for sample in (1, 2)}


def test_a_distrusted_request_leaves_nothing_in_the_cache():
    engine = make_engine(block_size=2)
    engine.scheduler.add(make_sequence("a", range(6), 4, samples=2))
    engine.step()
    engine.step()
    engine.scheduler.abort("a", forget=True)
    assert engine.scheduler.allocator.pool.cached == 0
    engine.scheduler.check()


def test_who_gets_no_token_stays_in_the_queue_and_finds_the_beginning_in_the_cache_later():
    engine = make_engine(block_size=4, token_budget=16)
    first, second = (make_sequence(name, range(17)) for name in "ab")
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    assert shown(engine.step()) == [("a", 0, 16)]
    assert second.block_table == []
    assert shown(engine.step()) == [("a", 16, 1), ("b", 16, 1)]
    assert second.cached == 16
    engine.drain()
