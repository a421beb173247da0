"""Typed doors to the attention and elementwise kernels: torch tensors in, addresses through.

Checks are those that keep a wrong call from reading or writing memory that is not its own; they cost about a
microsecond. Shapes as in `kv_pool.h`, whose structs are mirrored here.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch
from torch import Tensor

from worker.engine.kernels.build import load_library

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
_ROW_TYPES = (torch.float32, torch.bfloat16)


class _StepFields(ctypes.Structure):
    _fields_ = (
        ("query_starts", _POINTER),
        ("context_lengths", _POINTER),
        ("block_tables", _POINTER),
        ("slots", _POINTER),
        ("sequences", _LONG),
        ("tokens", _LONG),
        ("table_stride", _LONG),
    )


class Step:
    """The batch of one step as the kernels read it.

    Args:
        query_starts: [sequences + 1] int32.
        context_lengths: [sequences] int32.
        block_tables: [sequences, most blocks] int32.
        slots: [tokens] int64.

    Raises:
        ValueError: one of them is of another type or not dense.
    """

    def __init__(self, query_starts: Tensor, context_lengths: Tensor, block_tables: Tensor, slots: Tensor) -> None:
        self.tokens, sequences = len(slots), len(context_lengths)
        _check_dense(query_starts, (sequences + 1,), torch.int32)
        _check_dense(context_lengths, (sequences,), torch.int32)
        _check_dense(block_tables, (sequences, block_tables.shape[1]), torch.int32)
        _check_dense(slots, (self.tokens,), torch.int64)
        self._kept = (query_starts, context_lengths, block_tables, slots)
        addresses = (tensor.data_ptr() for tensor in self._kept)
        self._fields = _StepFields(*addresses, sequences, self.tokens, block_tables.shape[1])
        self.address = ctypes.addressof(self._fields)


class _PoolFields(ctypes.Structure):
    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("blocks", _LONG),
        ("block_size", _LONG),
        ("query_heads", _LONG),
        ("kv_heads", _LONG),
        ("key_size", _LONG),
        ("value_size", _LONG),
        ("is_bf16", _LONG),
    )


class Pool:
    """The keys and values of one layer.

    Args:
        keys: [blocks, kv_heads, key_size, block_size], fp32 or bf16, dense.
        values: [blocks, kv_heads, block_size, value_size], of the same type, dense.
        query_heads: a multiple of kv_heads.

    Raises:
        ValueError: they are not so.
    """

    def __init__(self, keys: Tensor, values: Tensor, query_heads: int) -> None:
        self.keys, self.values, self.query_heads = keys, values, query_heads
        blocks, self.kv_heads, self.key_size, self.block_size = keys.shape
        self.value_size = values.shape[3]
        _check_dense(keys, tuple(keys.shape), keys.dtype)
        _check_dense(values, (blocks, self.kv_heads, self.block_size, self.value_size), keys.dtype)
        if min(keys.shape[1:]) < 1 or self.value_size < 1 or query_heads % self.kv_heads:
            raise ValueError(f"{query_heads} query heads cannot share keys of shape {tuple(keys.shape)}")
        sizes = (blocks, self.block_size, query_heads, self.kv_heads, self.key_size, self.value_size)
        self._fields = _PoolFields(keys.data_ptr(), values.data_ptr(), *sizes, _is_bf16(keys))
        self.address = ctypes.addressof(self._fields)


class AttentionCall:
    """Where the arguments of `paged_attention` are laid out, as `HordeCall`; one for each user of the kernels.

    Packing them takes a third of the time that ctypes needs to convert as many arguments.
    """

    layout = struct.Struct("@13P2q2f")

    def __init__(self) -> None:
        self.memory = ctypes.create_string_buffer(self.layout.size)
        self.address = ctypes.addressof(self.memory)


class Kernels:
    """The functions of one loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        rows = (_POINTER, _LONG, _LONG)
        size, number, flag = _LONG, ctypes.c_float, ctypes.c_int

        def bind(name: str, *arguments: type, result: type | None = None) -> ctypes._NamedFuncPointer:
            function = library[name]
            function.argtypes = arguments
            function.restype = result
            return function

        self._check_step = bind("horde_check_step", _POINTER, size, size, result=ctypes.c_int)
        self._use_huge_pages = bind("horde_use_huge_pages", _POINTER, size)
        self._attention = bind("horde_paged_attention", _POINTER)
        self._store_kv = bind("horde_store_kv", _POINTER, _POINTER, *rows, *rows, flag)
        self._rope_store = bind("horde_rope_store", *[_POINTER] * 5, size, flag)
        self._rms_norm = bind("horde_rms_norm", *[_POINTER] * 4, size, size, number, number, flag)
        self._silu_mul = bind("horde_silu_mul", _POINTER, _POINTER, size, size, flag)
        self._gelu_tanh_mul = bind("horde_gelu_tanh_mul", _POINTER, _POINTER, size, size, flag)
        self._exp = bind("horde_exp", _POINTER, _POINTER, size)

    def check_step(self, step: Step, blocks: int, block_size: int) -> None:
        """Raises ValueError where the step names a place outside the pools or its lengths contradict each other."""
        wrong = self._check_step(step.address, blocks, block_size)
        if wrong:
            raise ValueError(f"the batch's {('block tables', 'slots', 'lengths')[wrong - 1]} lead outside the cache")

    def use_huge_pages(self, memory: Tensor) -> None:
        """Ask the system for large pages under a dense tensor that has not been written yet; it may decline."""
        self._use_huge_pages(memory.data_ptr(), memory.nbytes)

    def paged_attention(
        self,
        call: AttentionCall,
        step: Step,
        pool: Pool,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        out: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Store the keys and values `new`, if any, then attend; see `AttentionBackend.attend`.

        Args:
            query: [tokens, query_heads, key_size], fp32 or bf16, its last dimension dense.
            new: keys and values [tokens, kv_heads, size] likewise, of the query's type.
            out: [tokens, query_heads, value_size], dense, of the query's type.
            sinks: [query_heads] fp32, dense.
        """
        dtype, tokens, heads = query.dtype, step.tokens, pool.query_heads
        expected = (tokens, heads, pool.value_size)
        if out.shape != expected or out.dtype is not dtype or not out.is_contiguous():
            raise ValueError(f"the output has to be dense, {expected}, of the query's type")
        if sinks is not None:
            _check_dense(sinks, (heads,), torch.float32)
        if new is None:
            key_rows = value_rows = (0, 0, 0)
        else:
            key_rows = _rows(new[0], (tokens, pool.kv_heads, pool.key_size), dtype)
            value_rows = _rows(new[1], (tokens, pool.kv_heads, pool.value_size), dtype)
        call.layout.pack_into(
            call.memory,
            0,
            step.address,
            pool.address,
            *_rows(query, (tokens, heads, pool.key_size), dtype),
            *key_rows,
            *value_rows,
            out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            window or 0,
            _is_bf16(query),
            scale,
            softcap or 0.0,
        )
        self._attention(call.address)

    def store_kv(self, step: Step, pool: Pool, key: Tensor, value: Tensor) -> None:
        """Put keys and values [tokens, kv_heads, size] where the step's slots say."""
        self._store_kv(
            step.address,
            pool.address,
            *_rows(key, (step.tokens, pool.kv_heads, pool.key_size), key.dtype),
            *_rows(value, (step.tokens, pool.kv_heads, pool.value_size), key.dtype),
            _is_bf16(key),
        )

    def rope_store(self, step: Step, pool: Pool, qkv: Tensor, cosines: Tensor, sines: Tensor) -> None:
        """Turn queries and keys in place by their positions, then store keys and values.

        Args:
            qkv: [tokens, query_heads * key_size + kv_heads * (key_size + value_size)], dense.
            cosines: [tokens, rotary] fp32, dense, as transformers gives them (both halves alike): the first `rotary`
                values of a head turn, value i together with value i + rotary / 2.
            sines: likewise.
        """
        width = pool.query_heads * pool.key_size + pool.kv_heads * (pool.key_size + pool.value_size)
        _check_dense(qkv, (step.tokens, width), qkv.dtype)
        rotary = cosines.shape[-1]
        if rotary > pool.key_size or rotary % 2:
            raise ValueError(f"{rotary} of {pool.key_size} values cannot be turned in pairs")
        _check_dense(cosines, (step.tokens, rotary), torch.float32)
        _check_dense(sines, (step.tokens, rotary), torch.float32)
        self._rope_store(
            step.address,
            pool.address,
            qkv.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            rotary,
            _is_bf16(qkv),
        )

    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        epsilon: float,
        *,
        residual: Tensor | None = None,
        offset: float = 0.0,
    ) -> None:
        """out = x / sqrt(mean(x²) + epsilon) * (weight + offset), by rows [rows, size].

        All of one type, fp32 or bf16, and dense; `out` may be `x`. With a residual: residual += x, and the norm is of
        the residual.
        """
        rows, size = x.shape
        for tensor in (x, out) if residual is None else (x, out, residual):
            _check_dense(tensor, (rows, size), x.dtype)
        _check_dense(weight, (size,), x.dtype)
        self._rms_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            size,
            epsilon,
            offset,
            _is_bf16(x),
        )

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [rows, size] = silu(gate) * up, for gate_up [rows, 2 * size] with the gates first."""
        rows, size = out.shape
        _check_dense(out, (rows, size), out.dtype)
        _check_dense(gate_up, (rows, 2 * size), out.dtype)
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, _is_bf16(out))

    def gelu_tanh_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """As `silu_mul`, with gelu in its tanh approximation."""
        rows, size = out.shape
        _check_dense(out, (rows, size), out.dtype)
        _check_dense(gate_up, (rows, 2 * size), out.dtype)
        self._gelu_tanh_mul(gate_up.data_ptr(), out.data_ptr(), rows, size, _is_bf16(out))

    def exp(self, x: Tensor) -> Tensor:
        """The exponential that the kernels use, of floats; for tests of its accuracy."""
        out = torch.empty(x.shape, dtype=torch.float32)
        _check_dense(x, tuple(x.shape), torch.float32)
        self._exp(x.data_ptr(), out.data_ptr(), x.numel())
        return out


@cache
def _bound(library: ctypes.CDLL) -> Kernels:
    return Kernels(library)


def load_kernels() -> Kernels | None:
    """The kernels of this machine; None where they cannot be built or are switched off."""
    library = load_library()
    return None if library is None else _bound(library)


def _is_bf16(tensor: Tensor) -> bool:
    if tensor.dtype not in _ROW_TYPES:
        raise ValueError(f"the kernels take float32 and bfloat16, not {tensor.dtype}")
    return tensor.dtype is torch.bfloat16


def _rows(tensor: Tensor, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[int, int, int]:
    """Address and strides of [tokens, heads, size]."""
    token_stride, head_stride, stride = tensor.stride()
    if tensor.shape != shape or tensor.dtype is not dtype or stride != 1:
        raise ValueError(f"expected {dtype} of shape {shape} with a dense last dimension")
    return tensor.data_ptr(), token_stride, head_stride


def _check_dense(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype is not dtype or not tensor.is_contiguous():
        raise ValueError(f"expected dense {dtype} of shape {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
