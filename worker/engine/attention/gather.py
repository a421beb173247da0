"""Attention over block tables in plain PyTorch: it runs wherever PyTorch does, and is what faster backends fall back on.

The tokens that a sequence may look at are gathered out of the pools, then attended over by PyTorch's own attention, or
by a softmax written out where there is a softcap or a sink. Only places that hold tokens are ever gathered, so what
lies in the rest of a block can't reach a result, whatever it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from worker.engine.attention.backend import AttentionBackend, CacheShape, InputBatch

# The written-out softmax works on so many scores at once, which bounds its memory.
_SCORES_AT_ONCE = 1 << 24
# Tokens whose keys and values are gathered for one call, where a single sequence does not need more.
_GATHERED_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class _Group:
    """B sequences with T tokens each in this step, which look at up to L tokens each.

    Attributes:
        rows: the group's tokens in the step, as many as B * T, sequence after sequence.
        places: [B * L] int64: where the looked-at tokens lie in the pools; a short sequence repeats its newest one.
        visible: [B, 1, T, L] bool: what each token may look at; None: everything.
    """

    sequences: int
    tokens: int
    rows: slice | Tensor
    places: Tensor
    visible: Tensor | None


class _Scratch:
    """Memory to gather into, used again and again: fresh memory costs several times what the copy does."""

    def __init__(self, device: torch.device) -> None:
        self._found = torch.empty(0, device=device)
        self._widened = torch.empty(0, device=device)

    def gathered(self, pool: Tensor, group: _Group) -> Tensor:
        """[B, kv heads, L, size] in fp32, until the next call."""
        shape = (group.places.shape[0], *pool.shape[1:])
        self._found = _with_room(self._found, shape, pool.dtype)
        found = self._found[: math.prod(shape)].view(shape)
        torch.index_select(pool, 0, group.places, out=found)
        if pool.dtype != torch.float32:
            self._widened = _with_room(self._widened, shape, torch.float32)
            found = self._widened[: math.prod(shape)].view(shape).copy_(found)
        return found.view(group.sequences, -1, *shape[1:]).transpose(1, 2)


def _with_room(memory: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if memory.dtype == dtype and memory.numel() >= math.prod(shape):
        return memory
    with torch.inference_mode(mode=False):  # what is made in that mode can't be written outside of it
        return torch.empty(math.prod(shape) * 5 // 4, dtype=dtype, device=memory.device)


class GatherBackend(AttentionBackend):
    """See the module. Pools are `[slots, kv heads, size]`, slot = block id * block size + place in the block.

    Args:
        shape: of the pools.
        group_decodes: attend for all decodes in one call, the shorter ones padded: that saves launches on a GPU, and
            costs copies on a CPU. None: as the device likes it.
    """

    name = "gather"

    def __init__(self, shape: CacheShape, *, group_decodes: bool | None = None) -> None:
        self.shape = shape
        self._group_decodes = shape.device.type != "cpu" if group_decodes is None else group_decodes
        slots = shape.blocks * shape.block_size
        self._keys = [self._pool(slots, layer.kv_heads, layer.key_size) for layer in shape.layers]
        self._values = [self._pool(slots, layer.kv_heads, layer.value_size) for layer in shape.layers]
        self._key_scratch, self._value_scratch = _Scratch(shape.device), _Scratch(shape.device)
        self._batch: InputBatch | None = None
        self._groups: dict[int | None, list[_Group]] = {}

    def _pool(self, slots: int, heads: int, size: int) -> Tensor:
        return torch.empty(slots, heads, size, dtype=self.shape.dtype, device=self.shape.device)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        size = self.shape.block_size
        for source, target in copies:
            for pool in (*self._keys, *self._values):
                pool[target * size : (target + 1) * size] = pool[source * size : (source + 1) * size]

    def begin(self, batch: InputBatch) -> None:
        self._batch = batch
        self._groups = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert self._batch is not None, "attend before begin"
        keys, values = self._keys[layer], self._values[layer]
        keys[self._batch.slots] = key.to(keys.dtype)
        values[self._batch.slots] = value.to(values.dtype)
        if window not in self._groups:
            # Layers share it: a model has one or two windows.
            self._groups[window] = _grouped(self._batch, self.shape.block_size, window, together=self._group_decodes)
        result = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
        for group in self._groups[window]:
            queries = query[group.rows].float()
            queries = queries.reshape(group.sequences, group.tokens, *queries.shape[1:]).transpose(1, 2)
            seen_keys = self._key_scratch.gathered(keys, group)
            seen_values = self._value_scratch.gathered(values, group)
            if softcap is None and sinks is None:
                attended = _attend(queries, seen_keys, seen_values, group.visible, scale)
            else:
                attended = _attend_written_out(queries, seen_keys, seen_values, group.visible, scale, softcap, sinks)
            result[group.rows] = attended.transpose(1, 2).flatten(0, 1).to(result.dtype)
        return result

    def read(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        places = slice(block * self.shape.block_size, (block + 1) * self.shape.block_size)
        return self._keys[layer][places], self._values[layer][places]


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float) -> Tensor:
    """[B, query heads, T, key size], [B, kv heads, L, ...] -> [B, query heads, T, value size]."""
    heads, shared = query.shape[1], query.shape[1] != key.shape[1]
    if shared and query.shape[2] == 1:
        # The query heads of a kv head become its rows, for nothing.
        query, shared = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3]), False
    result = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=shared)
    return result if result.shape[1] == heads else result.flatten(1, 2).unsqueeze(2)


def _attend_written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """As `_attend`, with a bound on the scores and with sinks."""
    sequences, heads, tokens, _ = query.shape
    kv_heads, seen = key.shape[1], key.shape[2]
    query = query.reshape(sequences, kv_heads, -1, tokens, query.shape[3])
    key, value = key.unsqueeze(2), value.unsqueeze(2)
    parts = []
    at_once = max(1, _SCORES_AT_ONCE // (sequences * heads * seen))
    for start in range(0, tokens, at_once):
        scores = query[:, :, :, start : start + at_once] @ key.transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if visible is not None:
            scores = scores.masked_fill(~visible[:, :, None, start : start + at_once], float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        parts.append(scores.softmax(dim=-1)[..., :seen] @ value)
    return torch.cat(parts, dim=3).flatten(1, 2)


def _grouped(batch: InputBatch, block_size: int, window: int | None, *, together: bool) -> list[_Group]:
    starts = batch.query_starts.tolist()
    lengths = batch.context_lengths.tolist()
    each = [(s, starts[s], starts[s + 1] - starts[s], lengths[s]) for s in range(len(lengths))]
    decodes = [entry for entry in each if entry[2] == 1] if together else []
    alone = [entry for entry in each if not decodes or entry[2] != 1]
    return [
        *(_decode_group(part, batch, block_size, window) for part in _parts(decodes)),
        *(_sequence_group(*entry, batch, block_size, window) for entry in alone),
    ]


def _parts(decodes: list[tuple[int, int, int, int]]) -> Iterator[list[tuple[int, int, int, int]]]:
    """Those of similar length together, as many as may be gathered at once."""
    part: list[tuple[int, int, int, int]] = []
    for entry in sorted(decodes, key=lambda entry: entry[3]):
        if part and (len(part) + 1) * entry[3] > _GATHERED_AT_ONCE:
            yield part
            part = []
        part.append(entry)
    if part:
        yield part


def _sequence_group(
    sequence: int, start: int, tokens: int, length: int, batch: InputBatch, block_size: int, window: int | None
) -> _Group:
    """Of one sequence alone."""
    device = batch.slots.device
    first = 0 if window is None else max(0, length - tokens - window + 1)
    seen = torch.arange(first, length)
    table = batch.block_tables[sequence].long()
    places = table[seen // block_size] * block_size + seen % block_size
    visible = None
    if tokens > 1:
        back = torch.arange(length - tokens, length)[:, None] - seen[None, :]
        visible = back >= 0 if window is None else (back >= 0) & (back < window)
        visible = visible[None, None].to(device)
    return _Group(1, tokens, slice(start, start + tokens), places.to(device), visible)


def _decode_group(
    decodes: list[tuple[int, int, int, int]], batch: InputBatch, block_size: int, window: int | None
) -> _Group:
    """Of all sequences that compute one token."""
    device = batch.slots.device
    lengths = torch.tensor([length for _, _, _, length in decodes])
    firsts = torch.zeros_like(lengths) if window is None else (lengths - window).clamp(min=0)
    seen = firsts[:, None] + torch.arange(int((lengths - firsts).max()))[None, :]
    visible = seen < lengths[:, None]
    seen = torch.minimum(seen, lengths[:, None] - 1)
    tables = batch.block_tables[[sequence for sequence, _, _, _ in decodes]].long()
    places = tables.gather(1, seen // block_size) * block_size + seen % block_size
    rows = torch.tensor([start for _, start, _, _ in decodes], device=device)
    return _Group(len(decodes), 1, rows, places.flatten().to(device), visible[:, None, None].to(device))
