"""Typed door to the linear kernels of `linear.cpp`: weights packed once, then applied to rows of fp32 activations."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache

import torch
from torch import Tensor

from worker.engine.kernels.build import load_library

_POINTER = ctypes.c_void_p
_LONG = ctypes.c_int64
_ALIGNMENT = 64


class WeightFormat(IntEnum):
    """How weights are kept and multiplied; the numbers are those of `linear.cpp`."""

    FP32 = 0
    BF16 = 1  # widened to fp32 as they are used: exact
    INT8 = 2  # whole numbers, with one scale an output
    BF16_PAIRS = 3  # packed as BF16; activations are rounded to bf16 as well and multiplied two by two


_SOURCE_TYPES = {
    WeightFormat.FP32: torch.float32,
    WeightFormat.BF16: torch.bfloat16,
    WeightFormat.INT8: torch.int8,
    WeightFormat.BF16_PAIRS: torch.bfloat16,
}


class LinearKernels:
    """The functions of one loaded library.

    Attributes:
        multiplies_pairs: `BF16_PAIRS` pays here: the CPU has the instruction, and it gives the right result.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._bytes = library.horde_linear_bytes
        self._bytes.argtypes, self._bytes.restype = (ctypes.c_int, _LONG, _LONG), _LONG
        self._pack = library.horde_linear_pack
        self._pack.argtypes = (ctypes.c_int, _POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, ctypes.c_int)
        self._pack.restype = None
        self._gather = library.horde_linear_gather
        self._gather.argtypes = (ctypes.c_int, _POINTER, _LONG, _POINTER, _LONG, _POINTER, ctypes.c_int)
        self._gather.restype = None
        self.run = library.horde_linear
        self.run.argtypes = (
            *(ctypes.c_int, _POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG),
            *(_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG, ctypes.c_int),
        )
        self.run.restype = None
        self.multiplies_pairs = bool(library.horde_linear_multiplies_pairs()) and self._pairs_are_right()

    def packed_bytes(self, weight_format: WeightFormat, outputs: int, inputs: int) -> int:
        """Memory that a packed weight takes, in whole cache lines."""
        exact = int(self._bytes(weight_format, outputs, inputs))
        return -(-exact // _ALIGNMENT) * _ALIGNMENT

    def pack(
        self,
        weight: Tensor,
        weight_format: WeightFormat,
        *,
        scales: Tensor | None = None,
        memory: Tensor | None = None,
    ) -> PackedWeight:
        """Pack a weight [outputs, inputs], of any strides.

        Args:
            weight: fp32, bf16 or int8, as the format wants it.
            weight_format: of the packed weight.
            scales: [outputs] fp32, for INT8.
            memory: `packed_bytes` of uint8 to pack into, aligned to 64 bytes; None: fresh memory.

        Raises:
            ValueError: something does not fit together.
        """
        outputs, inputs = weight.shape
        if weight.dtype is not _SOURCE_TYPES[weight_format] or weight.device.type != "cpu":
            raise ValueError(f"{weight_format.name} is packed from {_SOURCE_TYPES[weight_format]}, not {weight.dtype}")
        if (scales is not None) != (weight_format is WeightFormat.INT8):
            raise ValueError("scales belong to INT8 and to nothing else")
        if scales is not None:
            scales = scales.to(torch.float32).contiguous()
            if scales.shape != (outputs,):
                raise ValueError(f"expected {outputs} scales, got {tuple(scales.shape)}")
        size = self.packed_bytes(weight_format, outputs, inputs)
        if memory is None:
            memory = aligned_bytes(size)
        if memory.dtype is not torch.uint8 or memory.numel() != size or memory.data_ptr() % _ALIGNMENT:
            raise ValueError(f"expected {size} bytes of memory, aligned to {_ALIGNMENT}")
        self._pack(
            weight_format,
            weight.data_ptr(),
            outputs,
            inputs,
            *weight.stride(),
            memory.data_ptr(),
            torch.get_num_threads(),
        )
        return PackedWeight(self, weight_format, outputs, inputs, memory, scales)

    def gather(self, weight: PackedWeight, ids: Tensor, out: Tensor) -> None:
        """See `PackedWeight.rows`."""
        self._gather(
            weight.format,
            weight.memory.data_ptr(),
            weight.inputs,
            ids.data_ptr(),
            ids.numel(),
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def _pairs_are_right(self) -> bool:
        """Tried on small numbers: all products and sums of them are exact in every order."""
        count = torch.arange(70 * 61).view(70, 61)
        weight, x = (count % 7 - 3).to(torch.bfloat16), (count % 5 - 2).float()[:11]
        got = self.pack(weight, WeightFormat.BF16_PAIRS)(x)
        return torch.equal(got, x @ weight.float().T)


class PackedWeight:
    """One weight [outputs, inputs] in packed form. A row's result does not depend on the rows beside it.

    Made by `LinearKernels.pack`.
    """

    __slots__ = ("_address", "_kernels", "_scales", "format", "inputs", "memory", "outputs")

    def __init__(
        self,
        kernels: LinearKernels,
        weight_format: WeightFormat,
        outputs: int,
        inputs: int,
        memory: Tensor,
        scales: Tensor | None,
    ) -> None:
        self._kernels = kernels
        self._scales = scales
        self._address = memory.data_ptr()
        self.format = weight_format
        self.outputs = outputs
        self.inputs = inputs
        self.memory = memory

    def __call__(
        self, x: Tensor, out: Tensor | None = None, *, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x W^T + bias + residual.

        Args:
            x: [rows, inputs] fp32, its last dimension dense, as in all others.
            out: [rows, outputs] fp32; may be `residual`; None: a fresh one.
            bias: [outputs] fp32.
            residual: [rows, outputs] fp32.

        Raises:
            ValueError: a tensor is of another shape or type.
        """
        rows = x.shape[0]
        if out is None:
            out = torch.empty((rows, self.outputs), dtype=torch.float32)
        x_stride = _row_stride(x, rows, self.inputs)
        out_stride = _row_stride(out, rows, self.outputs)
        residual_stride = 0 if residual is None else _row_stride(residual, rows, self.outputs)
        if bias is not None and (
            bias.shape != (self.outputs,) or bias.dtype is not torch.float32 or not bias.is_contiguous()
        ):
            raise ValueError(f"the bias has to be {self.outputs} dense floats")
        self._kernels.run(
            self.format,
            self._address,
            self.outputs,
            self.inputs,
            None if self._scales is None else self._scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows,
            x.data_ptr(),
            x_stride,
            None if residual is None else residual.data_ptr(),
            residual_stride,
            out.data_ptr(),
            out_stride,
            torch.get_num_threads(),
        )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight, as an embedding reads them: fp32 [ids, inputs].

        Args:
            ids: [ids] int64, each below `outputs`.

        Raises:
            IndexError: an id is out of range.
            ValueError: the weight is of a format that no embedding shares.
        """
        if self.format is WeightFormat.INT8:
            raise ValueError("rows of int8 weights are not read")
        ids = ids.contiguous()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.outputs:
            raise IndexError(f"token ids must be in 0 .. {self.outputs - 1}")
        out = torch.empty((ids.numel(), self.inputs), dtype=torch.float32)
        self._kernels.gather(self, ids, out)
        return out


def aligned_bytes(size: int, alignment: int = _ALIGNMENT) -> Tensor:
    """Fresh memory, not written yet: uint8 [size] whose address is a multiple of `alignment`."""
    memory = torch.empty(size + alignment, dtype=torch.uint8)
    start = -memory.data_ptr() % alignment
    return memory[start : start + size]


def _row_stride(tensor: Tensor, rows: int, size: int) -> int:
    row_stride, stride = tensor.stride()
    if tensor.shape != (rows, size) or tensor.dtype is not torch.float32 or (stride != 1 and size > 1):
        raise ValueError(f"expected floats [{rows}, {size}] with dense rows, got {tensor.dtype} {tuple(tensor.shape)}")
    return row_stride


@cache
def _bound(library: ctypes.CDLL) -> LinearKernels:
    return LinearKernels(library)


def load_linear_kernels() -> LinearKernels | None:
    """The kernels of this machine; None where they cannot be built or are switched off."""
    library = load_library()
    return None if library is None else _bound(library)
