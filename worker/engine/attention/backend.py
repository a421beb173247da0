"""The interface of an attention backend: it owns the pools of keys and values and attends over block tables.

One backend serves one model. For each step: `copy_blocks`, then `begin` with the step's batch, then `attend` once a
layer, in any order of layers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Keys and values of one attention layer: heads, and values per head and token."""

    query_heads: int
    kv_heads: int
    key_size: int
    value_size: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The pools: `blocks` of `block_size` tokens in each of the layers."""

    layers: tuple[LayerShape, ...]
    blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_block(self) -> int:
        """Of all layers together."""
        values = sum(layer.kv_heads * (layer.key_size + layer.value_size) for layer in self.layers)
        return values * self.block_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The tokens of one step, those of each of S sequences next to each other: T in all.

    Attributes:
        token_ids: [T] int64, on the model's device.
        positions: [T] int64, on the model's device.
        slots: [T] int64, on the model's device: block id * block size + place in the block, where a token's keys go.
        query_starts: [S + 1] int32, on the CPU: sequence s has the tokens query_starts[s] to query_starts[s + 1].
        context_lengths: [S] int32, on the CPU: tokens of a sequence up to and with its last one in this step.
        block_tables: [S, most blocks] int32, on the CPU; padded with 0.
        sampled_rows: [N] int64, on the model's device: tokens whose logits are wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    sampled_rows: Tensor


class AttentionBackend(ABC):
    """See the module. `name` is what the log and the documentation call it."""

    name: str
    shape: CacheShape

    @abstractmethod
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, target) in every layer, in this order."""

    @abstractmethod
    def begin(self, batch: InputBatch) -> None:
        """Get ready for the layers of a step."""

    @abstractmethod
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
        """Store the step's keys and values, then attend causally, each token to its own sequence.

        softmax(softcap * tanh(scale * q k / softcap)) v, in fp32 inside, whatever the pools hold.

        Args:
            layer: index into `shape.layers`.
            query: [T, query_heads, key_size]; query head h reads kv head h * kv_heads // query_heads.
            key: [T, kv_heads, key_size].
            value: [T, kv_heads, value_size].
            scale: of the scores.
            window: token i sees token j only where i - j < window.
            softcap: bound of the scores; None: unbounded.
            sinks: [query_heads] logits that take part in the softmax's sum and have no value (gpt-oss).

        Returns:
            [T, query_heads, value_size] in the dtype of `query`.
        """

    @abstractmethod
    def read(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        """Keys [block_size, kv_heads, key_size] and values of one block, as the pool holds them; for tests."""
