"""Texts with random queries, keys and values, run through the C++ backend step by step and compared with the formula."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from worker.engine.attention.backend import CacheShape, InputBatch, LayerShape
from worker.engine.attention.cpu import CpuKernelBackend
from worker.engine.kernels.bindings import Kernels


@dataclass(frozen=True)
class Case:
    """One layer and what it is asked for."""

    group: int = 3
    kv_heads: int = 2
    key_size: int = 64
    value_size: int = 64
    block_size: int = 16
    pools: torch.dtype = torch.float32
    rows: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def query_heads(self) -> int:
        return self.group * self.kv_heads

    @property
    def scale(self) -> float:
        return 1.5 / math.sqrt(self.key_size)

    def sink_logits(self) -> Tensor | None:
        return torch.linspace(-2, 3, self.query_heads) if self.sinks else None


class Text:
    """Queries, keys and values of one sequence, and what attention over it should give."""

    def __init__(self, case: Case, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, size: int) -> Tensor:
            return torch.randn(length, heads, size, generator=generator).to(case.rows)

        self.query = draw(case.query_heads, case.key_size)
        self.key = draw(case.kv_heads, case.key_size)
        self.value = draw(case.kv_heads, case.value_size)
        self.case = case
        self.done = 0
        self.table: list[int] = []

    @cached_property
    def expected(self) -> Tensor:
        key, value = self.key.to(self.case.pools), self.value.to(self.case.pools)
        return plain_attention(self.case, self.query.double(), key.double(), value.double())


def plain_attention(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The formula, in doubles, with every score in memory."""
    length = len(query)
    key, value = (x.repeat_interleave(case.group, dim=1) for x in (key, value))
    scores = torch.einsum("thd,shd->hts", query, key) * case.scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    seen = (distance >= 0) & (distance < (case.window or length))
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = case.sink_logits()
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length, 1)], dim=2)
    weights = scores.softmax(dim=2)[:, :, :length]
    return torch.einsum("hts,shd->thd", weights, value)


class Cache:
    """A backend whose unused places are all NaN, with blocks handed out in no order."""

    def __init__(self, kernels: Kernels, case: Case, tokens: int, seed: int = 0) -> None:
        blocks = 10 + tokens // case.block_size  # block 0 is nobody's; a text may leave a part of its last one empty
        layer = LayerShape(case.query_heads, case.kv_heads, case.key_size, case.value_size)
        shape = CacheShape((layer,), blocks, case.block_size, case.pools, torch.device("cpu"))
        self.case = case
        self.backend = CpuKernelBackend(shape, kernels)
        for pool in self.backend._pools:
            pool.keys.fill_(torch.nan)
            pool.values.fill_(torch.nan)
        self.free = list(range(1, blocks))
        random.Random(seed).shuffle(self.free)

    def step(self, entries: list[tuple[Text, int]]) -> list[Tensor]:
        """Attend over the next so many tokens of each text."""
        size = self.case.block_size
        slots: list[int] = []
        positions: list[int] = []
        for text, count in entries:
            for position in range(text.done, text.done + count):
                if position // size == len(text.table):
                    text.table.append(self.free.pop())
                slots.append(text.table[position // size] * size + position % size)
                positions.append(position)
            if self.case.window is not None:
                # What no token will see again is given back: it may hold anything, here NaN.
                for block in range(max(0, text.done - self.case.window + 1) // size):
                    text.table[block] = 0
        tables = torch.zeros(len(entries), max(len(text.table) for text, _ in entries), dtype=torch.int32)
        for row, (text, _) in zip(tables, entries, strict=True):
            row[: len(text.table)] = torch.tensor(text.table, dtype=torch.int32)
        counts = [count for _, count in entries]
        self.backend.begin(
            InputBatch(
                token_ids=torch.zeros(len(slots), dtype=torch.int64),
                positions=torch.tensor(positions),
                slots=torch.tensor(slots),
                query_starts=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
                context_lengths=torch.tensor([text.done + count for text, count in entries], dtype=torch.int32),
                block_tables=tables,
                sampled_rows=torch.zeros(0, dtype=torch.int64),
            )
        )
        query, key, value = (
            torch.cat([getattr(text, name)[text.done : text.done + count] for text, count in entries])
            for name in ("query", "key", "value")
        )
        case = self.case
        out = self.backend.attend(
            0,
            query,
            key,
            value,
            scale=case.scale,
            window=case.window,
            softcap=case.softcap,
            sinks=case.sink_logits(),
        )
        for text, count in entries:
            text.done += count
        return [*torch.split(out, counts)]


def close_to(case: Case, out: Tensor, expected: Tensor) -> None:
    bound = 1e-2 if case.rows is torch.bfloat16 else 2e-5
    torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)


def drive(kernels: Kernels, case: Case, lengths: list[int], seed: int) -> None:
    """Run texts side by side, cut at random, and compare each piece."""
    choose = random.Random(seed)
    texts = [Text(case, length, seed + i) for i, length in enumerate(lengths)]
    cache = Cache(kernels, case, sum(lengths), seed)
    while left := [text for text in texts if text.done < len(text.query)]:
        chosen = choose.sample(left, choose.randint(1, len(left)))
        most = choose.choice([1, 7, 200])
        entries = [(text, choose.randint(1, min(most, len(text.query) - text.done))) for text in chosen]
        starts = [text.done for text in chosen]
        for (text, count), start, out in zip(entries, starts, cache.step(entries), strict=True):
            close_to(case, out, text.expected[start : start + count])
