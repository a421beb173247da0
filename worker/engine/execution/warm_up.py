"""Runs the largest step once before the cache is made, so that what it needs of an accelerator's memory is known.

Only what a step takes in the end can be left out of the cache: activations, logits, and what libraries and kernels keep
for themselves once they have run. The measurement is untested on hardware; on a CPU nothing is measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from worker.engine.attention.backend import CacheShape, LayerShape
from worker.engine.attention.gather import GatherBackend
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import Scheduled, StepPlan

_BLOCK_SIZE = 16


def step_memory(model: Any, layers: tuple[LayerShape, ...], *, tokens: int, rows: int, longest: int) -> int:
    """Bytes that the largest step takes beside weights and cache; 0 where memory is not the device's own.

    What libraries keep is taken afterwards, and thus no longer free. The rest is the answer; the keys and values of
    this one step are counted in.

    Args:
        model: a `PreTrainedModel` that `probe` took; it belongs to a paged engine from here on.
        layers: from `probe`.
        tokens: computed in a step at most.
        rows: logits wanted of a step at most.
        longest: tokens a sequence may have.
    """
    device = model.device
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    largest_step(model, layers, tokens=tokens, rows=rows, longest=longest)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def largest_step(model: Any, layers: tuple[LayerShape, ...], *, tokens: int, rows: int, longest: int) -> Tensor:
    """Its logits: `rows` sequences, or more where they would be too long, share the tokens evenly."""
    count = max(rows, -(-tokens // longest))
    lengths = [max(1, (tokens + i) // count) for i in range(count)]
    plan, blocks = StepPlan(), 0
    for i, length in enumerate(lengths):
        needed = -(-length // _BLOCK_SIZE)
        table = list(range(blocks, blocks + needed))
        blocks += needed
        plan.entries.append(Scheduled(Sequence(str(i), 0, [0] * length, length, length, block_table=table), 0, length))
    shape = CacheShape(layers, blocks, _BLOCK_SIZE, model.dtype, model.device)
    return ModelRunner(model, GatherBackend(shape)).step(plan)
