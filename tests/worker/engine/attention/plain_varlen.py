"""`torch.nn.attention.varlen.varlen_attn` with a block table, written from its documentation in plain PyTorch.

It is as strict as the documentation and FlashAttention 2 are, and looks at no key that it was not told to look at.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PlainVarlen:
    """Callable like the real one.

    Args:
        page_multiple: what a page's size must be a multiple of.
        head_multiple: what the size of a head must be a multiple of.

    Attributes:
        calls: how often it was called.
        windows: those that it was called with.
    """

    def __init__(self, page_multiple: int = 1, head_multiple: int = 1) -> None:
        self._page_multiple = page_multiple
        self._head_multiple = head_multiple
        self.calls = 0
        self.windows: set[tuple[int, int]] = set()

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
    ) -> Tensor:
        self.calls += 1
        self.windows.add(window_size)
        assert cu_seq_k is not None
        self._check(query, key, value, (cu_seq_q, cu_seq_k, seqused_k, block_table))
        assert num_splits == 1, "others are wrong on hardware"
        starts, lengths = cu_seq_q.tolist(), seqused_k.tolist()
        assert len(starts) == len(lengths) + 1 == len(block_table) + 1
        assert starts[0] == 0
        assert starts[-1] == len(query)
        assert cu_seq_k.diff().tolist() == lengths
        assert max_k >= max(lengths)
        heads, kv_heads, page = query.shape[1], key.shape[2], key.shape[1]
        assert heads == kv_heads or (enable_gqa and heads % kv_heads == 0)
        result = torch.empty_like(query)
        for s, length in enumerate(lengths):
            rows = slice(starts[s], starts[s + 1])
            count = starts[s + 1] - starts[s]
            assert 1 <= count <= min(max_q, length)
            at = torch.arange(length)
            table = block_table[s].long()
            keys = key[table[at // page], at % page].repeat_interleave(heads // kv_heads, dim=1).float()
            values = value[table[at // page], at % page].repeat_interleave(heads // kv_heads, dim=1).float()
            own = torch.arange(length - count, length)
            left, right = window_size
            seen = torch.ones(count, length, dtype=torch.bool)
            if left >= 0:
                seen &= at[None] >= own[:, None] - left
            if right >= 0:
                seen &= at[None] <= own[:, None] + right
            scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * (scale or query.shape[2] ** -0.5)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            result[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
        return result

    def _check(self, query: Tensor, key: Tensor, value: Tensor, numbers: tuple[Tensor, ...]) -> None:
        if key.shape[1] % self._page_multiple:
            raise RuntimeError(f"page size must be divisible by {self._page_multiple}\nand a trace of C++")
        if query.shape[2] % self._head_multiple:
            raise RuntimeError(f"head size must be divisible by {self._head_multiple}")
        assert key.shape == value.shape
        assert query.dtype == key.dtype == value.dtype
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        for tensor in numbers:
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
