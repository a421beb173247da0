"""A forward pass of our own for models built like Llama, on a CPU: our kernels from the token ids to the logits.

Taken: Llama, Mistral, Qwen2 and Qwen3, with weights in fp32, bf16 or int8. Activations are fp32, weights stay in their
type (see `linear.py`), which need not be that of their neighbours; queries, keys and values are one matrix, as are gate
and up. What a token gets does not depend on the other tokens of the step, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from worker.engine.attention.backend import AttentionBackend, InputBatch, LayerShape
from worker.engine.attention.cpu import CpuKernelBackend
from worker.engine.execution.linear import (
    WeightMemory,
    format_for,
    is_int8_linear,
    is_plain_linear,
    pack_weight,
    scales_of,
)
from worker.engine.kernels.bindings import Kernels, load_kernels
from worker.engine.kernels.linear_binding import LinearKernels, PackedWeight, WeightFormat, load_linear_kernels
from worker.models.mapped_files import return_freed_memory

_TYPES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Their angles depend on the position alone, so that a table holds them.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_FIRST_TABLE = 1024
_ATTENTION = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: PackedWeight
    bias: Tensor | None

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        self.weight(x, out, bias=self.bias, residual=residual)


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class _Layer:
    shape: LayerShape
    scale: float
    window: int | None
    before_attention: _Norm
    qkv: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    attention_out: _Linear
    before_gates: _Norm
    gate_up: _Linear
    down: _Linear


class _Room:
    """Buffers for a number of tokens, kept from step to step."""

    def __init__(self, tokens: int, hidden: int, layers: list[_Layer]) -> None:
        self.tokens = tokens
        self.stream = torch.empty(tokens, hidden)
        self.normed = torch.empty(tokens, hidden)
        self.qkv = torch.empty(tokens, layers[0].qkv.weight.outputs)
        self.attended = torch.empty(tokens, layers[0].attention_out.weight.inputs)
        self.gate_up = torch.empty(tokens, layers[0].gate_up.weight.outputs)
        self.gated = torch.empty(tokens, layers[0].down.weight.inputs)


class FusedLlama:
    """See the module; made by `from_model`."""

    def __init__(self, model: Any, backend: CpuKernelBackend, kernels: Kernels, packer: _Packer) -> None:
        body = model.model
        self._backend = backend
        self._kernels = kernels
        self._layers = [
            packer.layer(layer, shape) for layer, shape in zip(body.layers, backend.shape.layers, strict=True)
        ]
        tied = model.lm_head.weight is body.embed_tokens.weight
        self._head = packer.linear(model.lm_head)
        if tied and self._head.weight.format is not WeightFormat.INT8:
            self._embedding = None
            del body.embed_tokens.weight
        else:
            self._embedding = body.embed_tokens.weight.detach()
        self._norm = _norm(body.norm)
        self._rotary = body.rotary_emb
        self._cosines = torch.empty(0)
        self._sines = torch.empty(0)
        self._hidden = self._head.weight.inputs
        self._room = _Room(0, self._hidden, self._layers)
        return_freed_memory()

    @classmethod
    def from_model(cls, model: Any, backend: AttentionBackend, *, int8: bool = False) -> FusedLlama | None:
        """The fused form of a model; None if it, the backend or the machine is not of the right kind.

        A model that is taken gives its weights away, and cannot run by itself any more.

        Args:
            model: a `PreTrainedModel`, evaluating.
            backend: made for this model.
            int8: round weights to 8 bits with one scale an output, where they are not yet.
        """
        kernels, linear_kernels = load_kernels(), load_linear_kernels()
        if kernels is None or linear_kernels is None or not isinstance(backend, CpuKernelBackend):
            return None
        if not _is_taken(model):
            return None
        with torch.no_grad():
            return cls(model, backend, kernels, _Packer(model, linear_kernels, int8=int8))

    def forward(self, batch: InputBatch) -> Tensor:
        """Logits of the batch's sampled rows; the backend has begun this batch.

        Returns:
            [N, vocab] fp32.
        """
        tokens = batch.token_ids.shape[0]
        room = self._room_for(tokens)
        stream = room.stream[:tokens]
        stream.copy_(self._embedded(batch.token_ids))
        cosines, sines = self._angles(batch)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, stream, room, cosines, sines)
            if index == last:
                # From here on only the tokens matter whose logits are wanted.
                stream, attended = stream[batch.sampled_rows], attended[batch.sampled_rows]
            layer.attention_out(attended, stream, residual=stream)
            self._feed_forward(layer, stream, room)
        return self._logits_of(stream, room)

    def _attend(self, index: int, layer: _Layer, stream: Tensor, room: _Room, cosines: Tensor, sines: Tensor) -> Tensor:
        tokens, shape = stream.shape[0], layer.shape
        normed, qkv = room.normed[:tokens], room.qkv[:tokens]
        self._kernels.rms_norm(stream, layer.before_attention.weight, normed, layer.before_attention.epsilon)
        layer.qkv(normed, qkv)
        queries = qkv[:, : shape.query_heads * shape.key_size].view(tokens, shape.query_heads, shape.key_size)
        if layer.query_norm is not None and layer.key_norm is not None:
            after = (shape.query_heads + shape.kv_heads) * shape.key_size
            keys = qkv[:, shape.query_heads * shape.key_size : after].view(tokens, shape.kv_heads, shape.key_size)
            for heads, norm in ((queries, layer.query_norm), (keys, layer.key_norm)):
                heads.copy_(F.rms_norm(heads, norm.weight.shape, norm.weight, norm.epsilon))
        self._backend.rope_and_store(index, qkv, cosines, sines)
        attended = room.attended[:tokens]
        self._backend.attend_stored(
            index,
            queries,
            attended.view(tokens, shape.query_heads, shape.value_size),
            scale=layer.scale,
            window=layer.window,
        )
        return attended

    def _feed_forward(self, layer: _Layer, stream: Tensor, room: _Room) -> None:
        tokens = stream.shape[0]
        normed, gate_up, gated = room.normed[:tokens], room.gate_up[:tokens], room.gated[:tokens]
        self._kernels.rms_norm(stream, layer.before_gates.weight, normed, layer.before_gates.epsilon)
        layer.gate_up(normed, gate_up)
        self._kernels.silu_mul(gate_up, gated)
        layer.down(gated, stream, residual=stream)

    def _logits_of(self, stream: Tensor, room: _Room) -> Tensor:
        rows = stream.shape[0]
        normed = room.normed[:rows]
        self._kernels.rms_norm(stream, self._norm.weight, normed, self._norm.epsilon)
        return self._head.weight(normed)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        if self._embedding is None:
            return self._head.weight.rows(token_ids)
        return F.embedding(token_ids, self._embedding)

    def _angles(self, batch: InputBatch) -> tuple[Tensor, Tensor]:
        """Of the model's own rotary embedding, in fp32, from a table that grows with the positions."""
        longest = int(batch.context_lengths.max())
        if longest > len(self._cosines):
            positions = torch.arange(max(_FIRST_TABLE, 1 << (longest - 1).bit_length()))[None]
            cosines, sines = self._rotary(torch.empty(0), positions)
            self._cosines, self._sines = cosines[0].contiguous(), sines[0].contiguous()
        return self._cosines[batch.positions], self._sines[batch.positions]

    def _room_for(self, tokens: int) -> _Room:
        if self._room.tokens < tokens:
            self._room = _Room(tokens, self._hidden, self._layers)
        return self._room


class _Packer:
    """Turns a model's modules into packed weights, one after the other, and frees theirs."""

    def __init__(self, model: Any, kernels: LinearKernels, *, int8: bool) -> None:
        self._kernels = kernels
        self._int8 = int8
        size = 0
        for group in _all_groups(model):
            outputs, inputs = sum(len(linear.weight) for linear in group), group[0].weight.shape[1]
            size += kernels.packed_bytes(self._format(group[0].weight), outputs, inputs)
        self._memory = WeightMemory(size)

    def layer(self, layer: Any, shape: LayerShape) -> _Layer:
        attention = layer.self_attn
        qkv, attention_out, gate_up, down = (self.linear(*group) for group in _groups(layer))
        return _Layer(
            shape=shape,
            scale=float(attention.scaling),
            window=_window(attention),
            before_attention=_norm(layer.input_layernorm),
            qkv=qkv,
            query_norm=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
            key_norm=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
            attention_out=attention_out,
            before_gates=_norm(layer.post_attention_layernorm),
            gate_up=gate_up,
            down=down,
        )

    def linear(self, *layers: Any) -> _Linear:
        """One for several, with their outputs next to each other."""
        weight = _joined([layer.weight.detach() for layer in layers])
        scales = [scale for layer in layers if (scale := scales_of(layer)) is not None]
        bias = None
        if any(layer.bias is not None for layer in layers):
            each = [layer.bias if layer.bias is not None else torch.zeros(len(layer.weight)) for layer in layers]
            bias = torch.cat(each).detach().float()
        for layer in layers:
            del layer.weight
        weight_format, joined_scales = self._format(weight), _joined(scales) if scales else None
        return _Linear(pack_weight(self._kernels, weight, weight_format, self._memory, joined_scales), bias)

    def _format(self, weight: Tensor) -> WeightFormat:
        return format_for(self._kernels, weight.dtype, int8=self._int8)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _all_groups(model: Any) -> list[list[Any]]:
    return [[model.lm_head], *(group for layer in model.model.layers for group in _groups(layer))]


def _groups(layer: Any) -> list[list[Any]]:
    """The linear layers of a decoder layer that are computed together, in the order of their use."""
    attention, gates = layer.self_attn, layer.mlp
    return [
        [getattr(attention, name) for name in _ATTENTION],
        [attention.o_proj],
        [getattr(gates, name) for name in _GATED],
        [gates.down_proj],
    ]


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight.detach().float().contiguous(), float(module.variance_epsilon))


def _window(attention: Any) -> int | None:
    """Mistral has one for all layers, in its configuration; Qwen knows it layer by layer; Llama has none."""
    holder = attention.config if attention.config.model_type == "mistral" else attention
    window = getattr(holder, "sliding_window", None)
    return None if window is None else int(window)


def _is_taken(model: Any) -> bool:
    if type(model).__name__ not in _TYPES or not type(model).__module__.startswith("transformers.models."):
        return False
    config = model.config
    if config.hidden_act != "silu" or config.rope_parameters.get("rope_type") not in _ROPE_TYPES:
        return False
    return (
        all(_is_packable(group) for group in _all_groups(model))
        and model.lm_head.bias is None
        and type(model.model.embed_tokens) is nn.Embedding
    )


def _is_packable(group: list[Any]) -> bool:
    """Whether its layers can be one: all in the same type, which our kernels take."""
    return (
        all((type(linear) is nn.Linear and is_plain_linear(linear)) or is_int8_linear(linear) for linear in group)
        and len({linear.weight.dtype for linear in group}) == 1
    )
