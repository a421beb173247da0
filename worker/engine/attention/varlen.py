"""Attention over block tables by PyTorch's own FlashAttention (`torch.nn.attention.varlen`), for NVIDIA GPUs.

Keys and values lie where the gather backend keeps them, so each layer, and each call, can be computed either way: what
the function does not take (a softcap, sinks, another type, a shape that its probe refused) is gathered. The function is
given from outside; its contract is tested with a plain one. Untested on hardware.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.engine.attention.backend import CacheShape, InputBatch, LayerShape
from worker.engine.attention.gather import GatherBackend

log = logging.getLogger(__name__)


class VarlenAttention(Protocol):
    """`torch.nn.attention.varlen.varlen_attn`, as far as it is used here.

    For each of S sequences the queries `cu_seq_q[s]` to `cu_seq_q[s + 1]` attend to the first `seqused_k[s]` tokens of
    the pages in row s of `block_table`; the last query stands at the last of these. `window_size` (left, right): how
    many tokens before and after its own place a query sees, -1: all. `num_splits` 1: the result of a sequence depends
    on that sequence alone. Other values are wrong for paged sequences in PyTorch 2.13 (pytorch/pytorch#194167).
    """

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
        num_splits: int | None,
    ) -> Any:
        """[T, query heads, size], of [T, query heads, size] and pages [pages, page size, kv heads, size]."""


def torch_varlen_attention() -> VarlenAttention:
    """PyTorch's.

    Raises:
        ImportError: this PyTorch has none.
    """
    from torch.nn.attention import varlen

    # It tells of every call.
    logging.getLogger(varlen.__name__).setLevel(logging.WARNING)
    function: VarlenAttention = varlen.varlen_attn
    return function


class NotPagedError(RuntimeError):
    """A layer can't be computed from block tables alone, in a step that has nothing else."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """What the function reads of a step with S sequences; tensors int32, on the device.

    Attributes:
        query_starts: [S + 1], of the tokens in this step.
        key_starts: [S + 1], sums of `key_lengths`.
        key_lengths: [S]: tokens of a sequence up to and with its last one in this step.
        block_tables: [S, most blocks].
        most_queries: of one sequence.
        most_keys: of one sequence; a bound is enough.
    """

    query_starts: Tensor
    key_starts: Tensor
    key_lengths: Tensor
    block_tables: Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, batch: InputBatch, device: torch.device) -> PagedBatch:
        """All tensors go to the device in one copy."""
        lengths = batch.context_lengths
        key_starts = torch.zeros_like(batch.query_starts)
        torch.cumsum(lengths, 0, out=key_starts[1:])
        parts = (batch.query_starts, key_starts, lengths, batch.block_tables.flatten())
        starts, key_starts, lengths, tables = torch.split(torch.cat(parts).to(device), [len(part) for part in parts])
        return cls(
            starts,
            key_starts,
            lengths,
            tables.view(batch.block_tables.shape),
            most_queries=int(batch.query_starts.diff().max()),
            most_keys=int(batch.context_lengths.max()),
        )


class VarlenBackend(GatherBackend):
    """See the module.

    Args:
        shape: of the cache; the pools get one block more, the scratch block.
        attention: PyTorch's function.
        taken: shapes of layers that the function computes right; layers of other shapes are gathered.

    Attributes:
        scratch_block: belongs to no sequence: padding may be written there.
    """

    name = "varlen"

    def __init__(self, shape: CacheShape, attention: VarlenAttention, taken: Collection[LayerShape]) -> None:
        super().__init__(replace(shape, blocks=shape.blocks + 1))
        self.scratch_block = shape.blocks
        self._attention = attention
        self._taken = [layer in taken for layer in shape.layers]
        self._paged: PagedBatch | None = None
        self._only_paged = False
        self._told: set[str] = set()

    def begin(self, batch: InputBatch) -> None:
        super().begin(batch)
        self._paged = PagedBatch.of(batch, self.shape.device)
        self._only_paged = False

    def begin_paged(self, batch: InputBatch, paged: PagedBatch) -> None:
        """Like `begin`, with tensors that are on the device already and whose contents may still change.

        Of `batch` only `slots` is read. Until the next `begin`, nothing is gathered: `attend` raises `NotPagedError`.
        """
        super().begin(batch)
        self._paged = paged
        self._only_paged = True

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
        assert self._paged is not None, "attend before begin"
        why = self._refusal(layer, query, softcap, sinks)
        if why is not None:
            if self._only_paged:
                raise NotPagedError(f"layer {layer} {why}")
            self._tell(layer, why)
            return super().attend(layer, query, key, value, scale=scale, window=window, softcap=softcap, sinks=sinks)
        keys, values, paged = self._keys[layer], self._values[layer], self._paged
        keys[self._batch.slots] = key.to(keys.dtype)
        values[self._batch.slots] = value.to(values.dtype)
        result: Tensor = self._attention(
            query if query.stride(-1) == 1 else query.contiguous(),
            keys.view(-1, self.shape.block_size, *keys.shape[1:]),
            values.view(-1, self.shape.block_size, *values.shape[1:]),
            paged.query_starts,
            paged.key_starts,
            paged.most_queries,
            paged.most_keys,
            scale=scale,
            window_size=_window_size(window, paged.most_queries),
            enable_gqa=query.shape[1] != keys.shape[1],
            seqused_k=paged.key_lengths,
            block_table=paged.block_tables,
            num_splits=1,
        )
        return result

    def _refusal(self, layer: int, query: Tensor, softcap: float | None, sinks: Tensor | None) -> str | None:
        if not self._taken[layer]:
            return "has a shape that was refused"
        if softcap is not None or sinks is not None:
            return "bounds its scores" if softcap is not None else "has sinks"
        if query.dtype != self.shape.dtype:
            return f"asks in {query.dtype} for keys in {self.shape.dtype}"
        return None

    def _tell(self, layer: int, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            log.info("layer %d %s: it is gathered, and so are others like it", layer, why)


def _window_size(window: int | None, most_queries: int) -> tuple[int, int]:
    if window is not None:
        return window - 1, 0
    # A sequence's only query may see all there is. Told so, the kernel reads keys once for all heads that share them.
    return (-1, -1) if most_queries == 1 else (-1, 0)
