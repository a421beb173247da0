"""From a plan to tensors."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.execution.input_batch import input_batch
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import Scheduled, StepPlan

CPU = torch.device("cpu")


def sequence(name: str, token_ids: list[int], table: list[int]) -> Sequence:
    return Sequence(name, 0, token_ids, len(token_ids), len(token_ids) + 8, block_table=table)


def test_a_decode_and_a_chunk_of_a_prompt_lie_next_to_each_other():
    decoding = sequence("a", [10, 11, 12, 13, 14], [7, 2])
    prompt = sequence("b", [20, 21, 22, 23, 24, 25, 26, 27, 28], [5, 0, 3])
    batch = input_batch(StepPlan([Scheduled(decoding, 4, 1), Scheduled(prompt, 2, 4)]), 4, CPU)
    assert batch.token_ids.tolist() == [14, 22, 23, 24, 25]
    assert batch.positions.tolist() == [4, 2, 3, 4, 5]
    assert batch.slots.tolist() == [2 * 4, 5 * 4 + 2, 5 * 4 + 3, 0, 1]
    assert batch.query_starts.tolist() == [0, 1, 5]
    assert batch.context_lengths.tolist() == [5, 6]
    assert batch.block_tables.tolist() == [[7, 2], [5, 0]]
    assert batch.sampled_rows.tolist() == [0]


def test_tables_are_padded_and_cut_to_what_the_step_looks_at():
    short = sequence("a", [1, 2], [9, 8, 6])
    long = sequence("b", list(range(10)), [1, 2, 3, 4])
    batch = input_batch(StepPlan([Scheduled(short, 1, 1), Scheduled(long, 8, 2)]), 4, CPU)
    assert batch.block_tables.tolist() == [[9, 0, 0], [1, 2, 3]]
    assert batch.sampled_rows.tolist() == [0, 2]


def test_a_step_that_only_computes_prompts_samples_nothing():
    batch = input_batch(StepPlan([Scheduled(sequence("a", list(range(9)), [0, 1, 2]), 0, 8)]), 4, CPU)
    assert batch.sampled_rows.tolist() == []
    assert batch.sampled_rows.dtype == torch.int64


def test_types_are_those_of_the_interface():
    batch = input_batch(StepPlan([Scheduled(sequence("a", [1], [0]), 0, 1)]), 4, CPU)
    assert {t.dtype for t in (batch.token_ids, batch.positions, batch.slots, batch.sampled_rows)} == {torch.int64}
    assert {t.dtype for t in (batch.query_starts, batch.context_lengths, batch.block_tables)} == {torch.int32}


@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=6),
    block_size=st.integers(1, 17),
)
def test_every_token_lands_in_the_slot_that_its_table_says(spans, block_size):
    plan = StepPlan()
    next_block = 0
    for i, (start, count, more) in enumerate(spans):
        needed = -(-(start + count) // block_size) + 1
        table = list(range(next_block, next_block + needed))
        next_block += needed
        token_ids = list(range(100 * i, 100 * i + start + count + more))
        plan.entries.append(Scheduled(sequence(str(i), token_ids, table), start, count))
    batch = input_batch(plan, block_size, CPU)
    starts = batch.query_starts.tolist()
    assert starts[-1] == plan.tokens == len(batch.token_ids)
    for s, entry in enumerate(plan.entries):
        for row, position in enumerate(range(entry.start, entry.start + entry.count), start=starts[s]):
            assert batch.token_ids[row] == entry.sequence.token_ids[position]
            assert batch.positions[row] == position
            block, place = divmod(int(batch.slots[row]), block_size)
            assert (block, place) == (entry.sequence.block_table[position // block_size], position % block_size)
            assert batch.block_tables[s, position // block_size] == block
    sampled = [starts[s + 1] - 1 for s, entry in enumerate(plan.entries) if entry.samples]
    assert batch.sampled_rows.tolist() == sampled
