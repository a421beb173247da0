"""Linear layers on a CPU, on weights that are packed once at load: a model's own layers are replaced in place.

Our kernels take fp32, bf16 and int8 weights; where they are missing, or much slower than oneDNN's packed ones on this
machine, oneDNN's are used; where neither is there, the model stays as it is. A weight is held in one form only. Layers
that the model keeps in int8 go to our kernels as they are, the others of the same model in their own type.
With our kernels the result of a row does not depend on the rows beside it, bit for bit; with oneDNN it may.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from worker.engine.kernels.bindings import load_kernels
from worker.engine.kernels.linear_binding import (
    LinearKernels,
    PackedWeight,
    WeightFormat,
    aligned_bytes,
    load_linear_kernels,
)
from worker.models.mapped_files import return_freed_memory
from worker.models.quantise import Int4Linear, Int8Linear

log = logging.getLogger(__name__)

_LARGE_PAGE = 1 << 21
# oneDNN has to be so much faster before we give up rows that are independent of their neighbours.
_WORTH_IT = 1.3
_ROWS_TRIED = (1, 32, 256)
_WEIGHTS_TRIED = 1 << 21
_SECONDS_PER_TRY = 0.02
# Freed weights are given back to the system each time so many bytes have been packed.
_TRIM_EVERY = 64 << 20
_LINEAR_TYPES = (nn.Linear, Conv1D, Int8Linear, Int4Linear)


class LinearPath(Enum):
    """What computes the linear layers."""

    KERNELS = "C++ kernels"
    ONEDNN = "oneDNN, prepacked"
    PLAIN = "PyTorch"


class PackedLinear(nn.Module):
    """Stands in for `nn.Linear` and transformers' `Conv1D`: x [..., in_features] to [..., out_features], of x's type."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class KernelLinear(PackedLinear):
    """By our kernels; sums are fp32, whatever the type of x."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        super().__init__(weight.inputs, weight.outputs)
        self._weight = weight
        self._bias = None if bias is None else bias.detach().float().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).float()
        return self._weight(rows, bias=self._bias).to(x.dtype).view(*x.shape[:-1], self.out_features)


class OneDnnLinear(PackedLinear):
    """By oneDNN, in the type of the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)  # noqa: SLF001
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")  # noqa: SLF001
        return out


class PackedEmbedding(nn.Module):
    """An embedding that reads the packed weight of the head it is tied to, instead of keeping a copy."""

    def __init__(self, weight: PackedWeight, original: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings = original.num_embeddings
        self.embedding_dim = original.embedding_dim
        self.padding_idx = original.padding_idx
        self._weight = weight
        self._dtype = original.weight.dtype

    def forward(self, token_ids: Tensor) -> Tensor:
        rows = self._weight.rows(token_ids.reshape(-1)).to(self._dtype)
        return rows.view(*token_ids.shape, self.embedding_dim)


class WeightMemory:
    """One stretch of memory, on large pages, for weights in the order of their use: each step reads it end to end.

    Its `size` in bytes is taken from the system as they are written.
    """

    def __init__(self, size: int) -> None:
        self._free = aligned_bytes(size, _LARGE_PAGE)
        if kernels := load_kernels():
            kernels.use_huge_pages(self._free)
        self._packed = 0

    def take(self, size: int) -> Tensor:
        """The next so many bytes."""
        taken, self._free = self._free[:size], self._free[size:]
        self._packed += size
        if self._packed >= _TRIM_EVERY:
            self._packed = 0
            return_freed_memory()
        return taken


def pack_linears(model: nn.Module, *, int8: bool = False) -> LinearPath:
    """Replace the linear layers of a model on the CPU; their unpacked weights are freed.

    Layers are left alone whose weights are neither fp32, bf16 nor int8, and without the kernels those in int8.

    Args:
        model: gives its weights away; only forward passes are possible afterwards.
        int8: round weights to 8 bits with one scale an output; needs the kernels.

    Returns:
        What most of the layers use from now on.
    """
    kernels = load_linear_kernels()
    layers = {id(module): module for _, _, module in _children(model) if isinstance(module, _LINEAR_TYPES)}.values()
    plain = [layer for layer in layers if is_plain_linear(layer)]
    path = LinearPath.KERNELS if int8 and kernels else _path_for(plain)
    taken: dict[LinearPath, list[Any]] = defaultdict(list)
    for layer in layers:
        if is_plain_linear(layer):
            taken[path].append(layer)
        else:
            taken[LinearPath.KERNELS if kernels and is_int8_linear(layer) else LinearPath.PLAIN].append(layer)
    if ours := taken[LinearPath.KERNELS]:
        assert kernels is not None
        _replace_all(model, ours, _kernel_packer(kernels, ours, int8=int8))
    if theirs := taken[LinearPath.ONEDNN]:
        _replace_all(model, theirs, lambda layer: OneDnnLinear(weight_of(layer), layer.bias))
    log.info("linear layers: %s", ", ".join(f"{len(found)} by {used.value}" for used, found in taken.items() if found))
    return max(LinearPath, key=lambda used: len(taken[used])) if layers else LinearPath.PLAIN


def is_plain_linear(module: Any) -> bool:
    """Whether it is a linear layer, and nothing more, with weights that can be packed."""
    return (
        type(module) in (nn.Linear, Conv1D)
        and type(module.weight) is nn.Parameter
        and type(module.weight.data) is Tensor
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and module.weight.device.type == "cpu"
    )


def is_int8_linear(module: Any) -> bool:
    """Whether it is a linear layer that holds whole numbers and scales already."""
    return type(module) is Int8Linear and module.weight.device.type == "cpu"


def weight_of(layer: Any) -> Tensor:
    """[outputs, inputs]; a view in the case of `Conv1D`, which keeps it the other way round."""
    weight: Tensor = layer.weight.detach()
    return weight.t() if type(layer) is Conv1D else weight


def scales_of(layer: Any) -> Tensor | None:
    """[outputs] of a layer whose weights are whole numbers."""
    return layer.scale if is_int8_linear(layer) else None


def format_for(kernels: LinearKernels, dtype: torch.dtype, *, int8: bool = False) -> WeightFormat:
    """How our kernels keep weights of this type on this machine."""
    if int8 or dtype is torch.int8:
        return WeightFormat.INT8
    if dtype is torch.float32:
        return WeightFormat.FP32
    return WeightFormat.BF16_PAIRS if kernels.multiplies_pairs else WeightFormat.BF16


def pack_weight(
    kernels: LinearKernels,
    weight: Tensor,
    weight_format: WeightFormat,
    memory: WeightMemory | None = None,
    scales: Tensor | None = None,
) -> PackedWeight:
    """Pack [outputs, inputs], rounding it to int8 first if that is the format and it comes without `scales` [outputs]."""
    room = None if memory is None else memory.take(kernels.packed_bytes(weight_format, *weight.shape))
    if weight_format is WeightFormat.INT8 and scales is None:
        largest = weight.abs().amax(dim=1).float()
        scales = torch.where(largest > 0, largest / 127, 1.0)
        weight = (weight.float() / scales[:, None]).round_().to(torch.int8)
    return kernels.pack(weight, weight_format, scales=scales, memory=room)


@cache
def choose_path(outputs: int, inputs: int, dtype: torch.dtype) -> LinearPath:
    """What to use for weights of this kind, by a short measurement where there is a choice."""
    kernels = load_linear_kernels()
    onednn = _onednn_takes(dtype)
    if kernels is None:
        return LinearPath.ONEDNN if onednn else LinearPath.PLAIN
    if not onednn:
        return LinearPath.KERNELS
    # A part of a large weight tells as much as the whole.
    weight = torch.full((max(1, min(outputs, _WEIGHTS_TRIED // inputs)), inputs), 0.01, dtype=dtype)
    ours = KernelLinear(kernels.pack(weight, format_for(kernels, dtype)), None)
    theirs = OneDnnLinear(weight, None)
    inputs_tried = [torch.ones((rows, inputs), dtype=dtype) for rows in _ROWS_TRIED]
    ratios = [_seconds(ours, x) / _seconds(theirs, x) for x in inputs_tried]
    gain = math.prod(ratios) ** (1 / len(ratios))
    log.info("linear layers in %s: oneDNN runs at %.2f times the speed of our kernels", dtype, gain)
    return LinearPath.ONEDNN if gain > _WORTH_IT else LinearPath.KERNELS


def _path_for(layers: list[Any]) -> LinearPath:
    """By the shape that most of their weights have."""
    if not layers:
        return LinearPath.PLAIN
    shapes = Counter((*weight_of(layer).shape, layer.weight.dtype) for layer in layers)
    return choose_path(*max(shapes, key=lambda shape: shapes[shape] * shape[0] * shape[1]))


def _onednn_takes(dtype: torch.dtype) -> bool:
    operations, library = torch.ops.mkldnn, cast("Any", torch.backends.mkldnn)
    if not (
        library.is_available()
        and hasattr(operations, "_reorder_linear_weight")
        and hasattr(operations, "_linear_pointwise")
    ):
        return False
    return dtype is torch.float32 or bool(operations._is_mkldnn_bf16_supported())  # noqa: SLF001


def _seconds(layer: nn.Module, x: Tensor) -> float:
    """The shortest of several runs."""
    with torch.inference_mode():
        layer(x)
        best, begun = math.inf, time.perf_counter()
        while (start := time.perf_counter()) < begun + _SECONDS_PER_TRY:
            layer(x)
            best = min(best, time.perf_counter() - start)
    return best


def _kernel_packer(kernels: LinearKernels, layers: list[Any], *, int8: bool) -> Callable[[Any], PackedLinear]:
    def format_of(layer: Any) -> WeightFormat:
        return format_for(kernels, layer.weight.dtype, int8=int8)

    memory = WeightMemory(sum(kernels.packed_bytes(format_of(layer), *weight_of(layer).shape) for layer in layers))

    def pack(layer: Any) -> PackedLinear:
        weight = pack_weight(kernels, weight_of(layer), format_of(layer), memory, scales_of(layer))
        return KernelLinear(weight, layer.bias)

    return pack


def _replace_all(model: nn.Module, layers: list[Any], pack: Callable[[Any], PackedLinear]) -> None:
    embeddings = {id(module.weight): module for _, _, module in _children(model) if type(module) is nn.Embedding}
    replaced: dict[int, nn.Module] = {}
    for layer in layers:
        packed = pack(layer)
        replaced[id(layer)] = packed
        tied = embeddings.get(id(layer.weight))
        weight = packed._weight if isinstance(packed, KernelLinear) else None  # noqa: SLF001
        if tied is not None and weight is not None and weight.format is not WeightFormat.INT8:
            replaced[id(tied)] = PackedEmbedding(weight, tied)
            del tied.weight
        # The old module may be known elsewhere; its weight goes now.
        del layer.weight
    for parent, name, module in list(_children(model)):
        if id(module) in replaced:
            setattr(parent, name, replaced[id(module)])
    return_freed_memory()


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for parent in model.modules():
        for name, child in parent._modules.items():  # noqa: SLF001  `named_children` tells a module only once
            yield parent, name, child
