"""Finds out on the device itself which layers, and which block sizes, the varlen function computes right.

A small case runs through it and through the gather backend: a prompt longer than a block, a chunk after it, decodes
beside both and alone, with a window and without, in pools that hold NaN wherever no token lies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from worker.engine.attention.backend import CacheShape, InputBatch, LayerShape
from worker.engine.attention.gather import GatherBackend
from worker.engine.attention.varlen import VarlenAttention, VarlenBackend

# FlashAttention 2 takes multiples of 256, its successors less.
BLOCK_SIZES = (16, 32, 64, 128, 256)
# Values are drawn from a unit normal distribution: bfloat16 differs by a hundredth, a token more or less by a tenth.
_TOLERANCE = 0.05
_WINDOW = 5


def refusals(shape: CacheShape, attention: VarlenAttention) -> dict[LayerShape, str]:
    """Those shapes of layers that the function does not do, or does wrong, and why."""
    reasons = {}
    for layer in dict.fromkeys(shape.layers):
        if reason := _reason(replace(shape, layers=(layer,)), attention):
            reasons[layer] = reason
    return reasons


def fitting_block_size(shape: CacheShape, attention: VarlenAttention) -> int:
    """The block size that suits most of the layers, and of these the smallest from `shape.block_size` on."""
    best, fewest = shape.block_size, len(set(shape.layers))
    for size in (shape.block_size, *(size for size in BLOCK_SIZES if size > shape.block_size)):
        refused = len(refusals(replace(shape, block_size=size), attention))
        if refused < fewest:
            best, fewest = size, refused
        if not refused:
            break
    return best


def _reason(shape: CacheShape, attention: VarlenAttention) -> str | None:
    """Of a shape with one layer."""
    layer = shape.layers[0]
    if layer.key_size != layer.value_size:
        return "keys and values of different sizes"
    try:
        for window in (None, _WINDOW):
            difference = _difference(shape, attention, window)
            if not difference < _TOLERANCE:  # NaN is not
                return f"off by {difference:.2g}" + ("" if window is None else " with a window")
    except (RuntimeError, ValueError, TypeError) as error:
        # What a kernel does not take it says in one of these.
        return str(error).strip().split("\n")[0] or type(error).__name__
    return None


def _difference(shape: CacheShape, attention: VarlenAttention, window: int | None) -> float:
    """The largest one between the two results, of the first step where it is too large."""
    layer = shape.layers[0]
    size = shape.block_size
    # How many tokens of each of three texts are computed in each of three steps.
    counts = ((size + 3, 4, 1), (7, 1, 1), (size, 1, 1))
    tables = _tables([sum(each) for each in counts], size)
    shape = replace(shape, blocks=1 + sum(map(len, tables)))
    checked, plain = VarlenBackend(shape, attention, [layer]), GatherBackend(shape)
    for backend in (checked, plain):
        for block in range(shape.blocks):
            for pool in backend.read(0, block):
                pool.fill_(float("nan"))
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int, heads: int, size: int) -> Tensor:
        return torch.randn(tokens, heads, size, generator=generator).to(shape.device, shape.dtype)

    difference = 0.0
    for step in range(len(counts[0])):
        batch = _batch(tables, [(sum(each[:step]), sum(each[: step + 1])) for each in counts], shape)
        tokens = len(batch.slots)
        query = draw(tokens, layer.query_heads, layer.key_size)
        key, value = draw(tokens, layer.kv_heads, layer.key_size), draw(tokens, layer.kv_heads, layer.value_size)
        results = []
        for backend in (checked, plain):
            backend.begin(batch)
            results.append(backend.attend(0, query, key, value, scale=layer.key_size**-0.5, window=window).float())
        worst = float((results[0] - results[1]).abs().max())
        if not worst < _TOLERANCE:
            return worst
        difference = max(difference, worst)
    return difference


def _tables(lengths: Sequence[int], block_size: int) -> list[list[int]]:
    """Blocks for texts of these lengths, in no order; block 0 stays unused."""
    needed = [-(-length // block_size) for length in lengths]
    ids = list(range(sum(needed), 0, -1))
    return [[ids.pop(i % 2 - 1) for i in range(count)] for count in needed]


def _batch(tables: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], shape: CacheShape) -> InputBatch:
    """The step that computes the tokens from, and up to but without, these of each text."""
    size = shape.block_size
    slots = [
        table[at // size] * size + at % size
        for table, (first, last) in zip(tables, spans, strict=True)
        for at in range(first, last)
    ]
    starts = [0, *itertools.accumulate(last - first for first, last in spans)]
    widest = max(map(len, tables))
    nothing = torch.zeros(0, dtype=torch.int64, device=shape.device)
    return InputBatch(
        token_ids=nothing,
        positions=nothing,
        slots=torch.tensor(slots, device=shape.device),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lengths=torch.tensor([last for _, last in spans], dtype=torch.int32),
        block_tables=torch.tensor([[*table, *[0] * (widest - len(table))] for table in tables], dtype=torch.int32),
        sampled_rows=nothing,
    )
