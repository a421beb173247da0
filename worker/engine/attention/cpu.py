"""Attention on a CPU by our C++ kernels, straight from the block tables: nothing is gathered, nothing copied."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine.attention.backend import AttentionBackend, CacheShape, InputBatch
from worker.engine.kernels.bindings import AttentionCall, Kernels, Pool, Step


class CpuKernelBackend(AttentionBackend):
    """Pools in fp32 or bf16, with the keys of a block transposed; the layout is told in `kv_pool.h`.

    A token's result depends on its own sequence alone, to the last bit: not on the other sequences of the step, not
    on how its prompt was cut into chunks, not on the number of threads.

    Beside the interface there are `rope_and_store` and `attend_stored`, in this order, for a model that keeps queries,
    keys and values of a token side by side.

    Raises:
        ValueError: pools of another type, or not on the CPU.
    """

    name = "C++ kernels"

    def __init__(self, shape: CacheShape, kernels: Kernels) -> None:
        if shape.device.type != "cpu" or shape.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the C++ kernels keep float32 or bfloat16 on the CPU, not {shape.dtype}, {shape.device}")
        self.shape = shape
        self._kernels = kernels
        self._call = AttentionCall()
        self._step: Step | None = None
        self._pools: list[Pool] = []
        for layer in shape.layers:
            keys = torch.empty(shape.blocks, layer.kv_heads, layer.key_size, shape.block_size, dtype=shape.dtype)
            values = torch.empty(shape.blocks, layer.kv_heads, shape.block_size, layer.value_size, dtype=shape.dtype)
            kernels.use_huge_pages(keys)
            kernels.use_huge_pages(values)
            self._pools.append(Pool(keys, values, layer.query_heads))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        for pool in self._pools:
            for source, target in copies:
                pool.keys[target] = pool.keys[source]
                pool.values[target] = pool.values[source]

    def begin(self, batch: InputBatch) -> None:
        """As the interface says.

        Raises:
            ValueError: the batch leads outside the pools, or is not of the types that `InputBatch` names.
        """
        step = Step(batch.query_starts, batch.context_lengths, batch.block_tables, batch.slots)
        self._kernels.check_step(step, self.shape.blocks, self.shape.block_size)
        self._step = step

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
        pool = self._pools[layer]
        out = torch.empty((query.shape[0], pool.query_heads, pool.value_size), dtype=query.dtype)
        self._kernels.paged_attention(
            self._call,
            self._begun(),
            pool,
            _dense_rows(query),
            (_dense_rows(key), _dense_rows(value)),
            out,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=None if sinks is None else sinks.to(torch.float32).contiguous(),
        )
        return out

    def rope_and_store(self, layer: int, qkv: Tensor, cosines: Tensor, sines: Tensor) -> None:
        """Rotary embedding in place, and the keys and values into the pools; see `Kernels.rope_store`."""
        self._kernels.rope_store(self._begun(), self._pools[layer], qkv, cosines, sines)

    def attend_stored(
        self,
        layer: int,
        query: Tensor,
        out: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """As `attend`, into `out`, with the step's keys and values in the pools already.

        Args:
            query: [T, query_heads, key_size]; may be a view of the rows given to `rope_and_store`.
            out: [T, query_heads, value_size], dense, of the same type.
            sinks: fp32.
        """
        self._kernels.paged_attention(
            self._call,
            self._begun(),
            self._pools[layer],
            query,
            None,
            out,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    def read(self, layer: int, block: int) -> tuple[Tensor, Tensor]:
        pool = self._pools[layer]
        return pool.keys[block].permute(2, 0, 1), pool.values[block].transpose(0, 1)

    def _begun(self) -> Step:
        if self._step is None:
            raise RuntimeError("`begin` comes before the layers")
        return self._step


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
