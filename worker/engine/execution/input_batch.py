"""Turns a step's plan into the tensors that the model and the attention read."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from worker.engine.attention.backend import InputBatch
from worker.engine.scheduling.step_plan import StepPlan


def input_batch(plan: StepPlan, block_size: int, device: torch.device) -> InputBatch:
    """The batch of a plan with at least one entry; rows of tokens and tables are in the order of its entries.

    Blocks for all scheduled tokens must be in the tables of their sequences. Numbers go through `array`, which is some
    times faster than building tensors from lists.
    """
    token_ids, positions, slots, sampled = array("q"), array("q"), array("q"), array("q")
    starts, lengths, tables = array("i", (0,)), array("i"), array("i")
    most_blocks = max((entry.start + entry.count - 1) // block_size + 1 for entry in plan.entries)
    for entry in plan.entries:
        end = entry.start + entry.count
        table = entry.sequence.block_table
        if entry.count == 1:
            token_ids.append(entry.sequence.token_ids[entry.start])
            positions.append(entry.start)
            slots.append(table[entry.start // block_size] * block_size + entry.start % block_size)
        else:
            token_ids.extend(entry.sequence.token_ids[entry.start : end])
            positions.extend(range(entry.start, end))
            slots.extend(table[at // block_size] * block_size + at % block_size for at in range(entry.start, end))
        starts.append(len(token_ids))
        lengths.append(end)
        # A table may hold a block for tokens that come after this step.
        needed = (end - 1) // block_size + 1
        tables.extend(table[:needed])
        tables.extend([0] * (most_blocks - needed))
        if entry.samples:
            sampled.append(len(token_ids) - 1)
    count = len(token_ids)
    # What goes to the device goes in one copy.
    moved = _tensor(token_ids + positions + slots + sampled, torch.int64).to(device)
    return InputBatch(
        token_ids=moved[:count],
        positions=moved[count : 2 * count],
        slots=moved[2 * count : 3 * count],
        query_starts=_tensor(starts, torch.int32),
        context_lengths=_tensor(lengths, torch.int32),
        block_tables=_tensor(tables, torch.int32).view(len(lengths), most_blocks),
        sampled_rows=moved[3 * count :],
    )


def _tensor(numbers: array[int], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(numbers, dtype=dtype)
