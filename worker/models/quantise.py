"""Weight-only quantisation: linear layers that keep their weights in 8 or 4 bits and compute in bfloat16.

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    quantise(model, "int4")

int8 has one scale an output row; int4 has a scale and a zero point for every 32 inputs of a row. The output head, which
decides between tokens, is never coarser than int8, and stays as it is where it is the embedding's matrix. Embedding and
norms stay as they are.
The matrix products are torch's own (`_weight_int8pack_mm`, `_weight_int4pack_mm`), the ones that torchao calls on a CPU
and for its tile-packed int4 on a GPU; going through its tensor subclasses measured slower for the same numbers. On a CPU
with kernels of ours the paged engine takes the int8 layers over and computes them by those.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.models.mapped_files import return_freed_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

_INT8_PRODUCT = torch.ops.aten._weight_int8pack_mm  # noqa: SLF001
_INT4_PRODUCT = torch.ops.aten._weight_int4pack_mm  # noqa: SLF001
_INT4_PRODUCT_CPU = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001
_INT4_PACK = torch.ops.aten._convert_weight_to_int4pack  # noqa: SLF001
_INT4_PACK_CPU = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001

KINDS = ("int8", "int4")

# Finer than the usual 64 or 128, for half a bit a weight more: small models suffer most, and the many that come from
# 4-bit GGUF files, which group like this, lose next to nothing.
INT4_GROUP = 32
_INT4_LEVELS = 15
# The CPU's int8 product costs the same for every row; from here on unpacking the weights once is cheaper.
_MANY_ROWS = 32
# It reads and writes where it must not when the inputs are no multiple of this: wrong numbers, or the process dies.
_INT8_INPUTS = 16
_CHUNK_ELEMENTS = 1 << 24
_RETURN_BYTES = 64 << 20
_TINY = 1e-10
# What is left unquantised must not be most of the model, or the option does not do what it says.
_LEAST_SHARE = 0.5


class QuantisationError(Exception):
    """The model or the device does not allow it; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """What became of the linear layers: how many of each kind, and bytes of their weights before and after."""

    int8: int
    int4: int
    bytes_before: int
    bytes_after: int


class Int8Linear(nn.Module):
    """`x W^T + b` with W[out, in] = weight (int8) x scale[out] (bfloat16); any shape, any device."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        quantised, scale = int8_rows(weight)
        self.register_buffer("weight", quantised)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self._few_rows = _MANY_ROWS if weight.device.type == "cpu" and self.in_features % _INT8_INPUTS == 0 else 0

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the number format of `x`."""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16)
        if rows.shape[0] < self._few_rows:
            return _finish(_INT8_PRODUCT(rows, self.weight, self.scale), self.bias, x)
        return _finish(self._unpacked_product(rows), self.bias, x)

    def _unpacked_product(self, rows: Tensor) -> Tensor:
        kind = torch.bfloat16 if _multiplies_bfloat16(rows.device) else torch.float32
        rows = rows.to(kind)
        step = max(1, _CHUNK_ELEMENTS // self.in_features)
        pieces = [functional.linear(rows, part.to(kind)) for part in torch.split(self.weight, step)]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return out * self.scale.to(kind)


class Int4Linear(nn.Module):
    """`x W^T + b` with W[out, in] = scale x (weight - 8) + zero, one scale and zero for each 32 inputs."""

    weight: Tensor
    scale_and_zero: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        levels, scale, zero = int4_groups(weight)
        self._on_cpu = weight.device.type == "cpu"
        self.register_buffer("weight", _pack_int4(levels))
        # torch's products take [groups, out, 2].
        self.register_buffer("scale_and_zero", torch.stack([scale, zero], dim=-1).transpose(0, 1).contiguous())
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], in the number format of `x`."""
        rows = x.reshape(-1, self.in_features).to(torch.bfloat16).contiguous()
        product = _INT4_PRODUCT_CPU if self._on_cpu else _INT4_PRODUCT
        return _finish(product(rows, self.weight, INT4_GROUP, self.scale_and_zero), self.bias, x)


def quantise(model: nn.Module, kind: str, device: str | torch.device = "cpu") -> Quantised:
    """Replace the linear layers of a model by quantised ones, in place, one after the other.

    At no time are there two copies of more than one layer, and each goes to the device by itself: a model that fits a
    GPU only when quantised is loaded on the CPU first and quantised from there. What stays unquantised is not moved.
    A layer whose shape int4 cannot take becomes int8.

    Args:
        model: a `transformers.PreTrainedModel` on the CPU.
        kind: `int8` or `int4`.
        device: where the quantised layers shall live.

    Raises:
        QuantisationError: the device cannot compute so, or most weights are not in linear layers; the model is
            unchanged then.
    """
    if kind not in KINDS:
        raise QuantisationError(f"{kind!r} is no kind of quantisation; there are {' and '.join(KINDS)}")
    place = torch.device(device)
    if kind == "int4":
        _check_int4(place)
    head = _head(model)
    found = list(_linears(model))
    total = sum(p.numel() for p in model.parameters()) - _spared(model)
    share = sum(linear.weight.numel() for _, _, linear in found) / max(1, total)
    if share < _LEAST_SHARE:
        raise QuantisationError(
            f"{1 - share:.0%} of this model's weights are not in linear layers (experts are kept in one block), so "
            "quantising would save little; load it without"
        )
    counts = {Int8Linear: 0, Int4Linear: 0}
    before = after = unreturned = 0
    while found:
        # Popped and forgotten, so that nothing holds the layer any more when the next one is made.
        parent, name, linear = found.pop()
        size = linear.weight.numel() * linear.weight.element_size()
        quantised = _quantised(linear, "int8" if linear is head else kind, place)
        setattr(parent, name, quantised)
        counts[type(quantised)] += 1
        before, after, unreturned = before + size, after + _bytes(quantised), unreturned + size
        del linear
        if unreturned > _RETURN_BYTES:
            return_freed_memory()
            unreturned = 0
    return_freed_memory()
    log.info("linear layers in %s: %.0f MB instead of %.0f", kind, after / 1e6, before / 1e6)
    return Quantised(counts[Int8Linear], counts[Int4Linear], before, after)


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> int8 of that shape and bfloat16 scales [out]: symmetric, nearest, the largest of a row is 127."""
    levels = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.bfloat16, device=weight.device)
    for part in _row_chunks(weight):
        values = weight[part].float()
        # The scale is rounded first, so that the levels make up for its rounding.
        scale = (values.abs().amax(dim=1) / 127).clamp(min=_TINY).to(torch.bfloat16)
        levels[part] = (values / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        scales[part] = scale
    return levels, scales


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[out, in] -> levels 0..15 (int32, same shape), bfloat16 scales and zeros [out, in / 32].

    Asymmetric: w ~ scale (level - 8) + zero, where each group's smallest number is level 0 and its largest 15. (Giving
    up a group's extremes for smaller squared errors was tried; the model's predictions did not get closer.)
    """
    out, inner = weight.shape
    groups = inner // INT4_GROUP
    levels = torch.empty(out, inner, dtype=torch.int32, device=weight.device)
    scales = torch.empty(out, groups, dtype=torch.bfloat16, device=weight.device)
    zeros = torch.empty_like(scales)
    for part in _row_chunks(weight):
        values = weight[part].float().reshape(-1, groups, INT4_GROUP)
        low, high = values.amin(dim=2), values.amax(dim=2)
        # Rounded first, as in `int8_rows`.
        scale = ((high - low) / _INT4_LEVELS).clamp(min=_TINY).to(torch.bfloat16)
        zero = (low + scale.float() * 8).to(torch.bfloat16)
        level = (values - zero.float()[..., None]) / scale.float()[..., None]
        levels[part] = level.round_().add_(8).clamp_(0, _INT4_LEVELS).reshape(-1, inner).to(torch.int32)
        scales[part], zeros[part] = scale, zero
    return levels, scales, zeros


def _row_chunks(weight: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // 4 // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)


def _pack_int4(levels: Tensor) -> Tensor:
    if levels.device.type == "cpu":
        packed: Tensor = _INT4_PACK_CPU(levels, 1)
        return packed
    pairs = (levels[:, ::2] << 4 | levels[:, 1::2]).to(torch.uint8)
    tiles = next(t for t in (8, 4, 2) if levels.shape[1] % (16 * t) == 0)
    packed = _INT4_PACK(pairs, tiles)
    return packed  # noqa: RET504  an untyped call


def _quantised(linear: Any, kind: str, device: torch.device) -> Int8Linear | Int4Linear:
    weight = linear.weight.detach()
    if not isinstance(linear, nn.Linear):
        weight = weight.t()  # GPT-2 keeps its matrices the other way round
    weight = weight.to(device)
    bias = None if linear.bias is None else linear.bias.detach().to(device)
    out, inner = weight.shape
    if kind == "int4" and inner % INT4_GROUP == 0 and out % 16 == 0:
        return Int4Linear(weight, bias)
    return Int8Linear(weight, bias)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Each linear layer with its parent and its name there, but for a head that shares the embedding's matrix."""
    from transformers.pytorch_utils import Conv1D

    embedding = _embedding(model)
    shared = None if embedding is None else embedding.weight
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | Conv1D) and child.weight is not shared:
                yield parent, name, child


def _head(model: Any) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    return find() if find else None


def _embedding(model: Any) -> Any:
    find = getattr(model, "get_input_embeddings", None)
    return find() if find else None


def _spared(model: Any) -> int:
    """Numbers in the embedding."""
    embedding = _embedding(model)
    return 0 if embedding is None else sum(p.numel() for p in embedding.parameters())


def _bytes(module: nn.Module) -> int:
    return sum(b.numel() * b.element_size() for name, b in module.named_buffers() if name != "bias")


def _finish(out: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if bias is not None:
        out = out + bias
    return out.to(x.dtype).reshape(*x.shape[:-1], out.shape[-1])


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are fast there; elsewhere they are emulated and several times slower than float32."""
    if device.type != "cpu":
        return True
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def _check_int4(device: torch.device) -> None:
    if device.type == "cpu":
        return
    if device.type != "cuda" or torch.version.hip is not None:
        raise QuantisationError("int4 runs on a CPU and on NVIDIA GPUs; take int8 here")
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise QuantisationError("int4 needs an NVIDIA GPU of 2020 or newer (compute capability 8.0); take int8 here")
