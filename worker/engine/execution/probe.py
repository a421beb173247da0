"""Learns of a model, by a few tiny forward passes, what a paged cache must hold, and whether the model is right with it.

A model is refused that attends in another way than through transformers' attention interface, in part or as a whole,
that masks tokens in a way that we don't follow, or that mixes tokens elsewhere too (state-space layers).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from worker.engine.attention import hook
from worker.engine.attention.backend import CacheShape, LayerShape
from worker.engine.attention.gather import GatherBackend
from worker.engine.execution.input_batch import input_batch
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import Scheduled, StepPlan

_NAME = "horde_probe"
_BLOCK_SIZE = 4
# As far back as we look for the end of a window.
_FAR = 1 << 18
# Of the difference between our logits and the model's own, relative to their size. What is wrong is off by about 1.
_TOLERANCE_FP32 = 1e-3
_TOLERANCE_OTHER = 0.1


class UnsupportedModelError(Exception):
    """The paged engine cannot run this model; the message says why, and what can."""


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """What a paged cache needs to know.

    Attributes:
        layers: shapes of its attention layers.
        longest_context: tokens up to which a result does not depend on how long the neighbours are; None: no limit.
            Some rotary embeddings change for a whole step as soon as one position in it is beyond this.
    """

    layers: tuple[LayerShape, ...]
    longest_context: int | None


def probe(model: Any) -> ProbedModel:
    """Look at a `PreTrainedModel`, and leave it as it was.

    Raises:
        UnsupportedModelError: the paged engine cannot run it.
    """
    config = model.config.get_text_config(decoder=True)
    before = model.config._attn_implementation  # noqa: SLF001 (transformers has no other name for it)
    try:
        _check_kind(model)
        layers = _layer_shapes(model, config.num_hidden_layers)
        _compare(model, layers)
    except hook.ForeignAttentionError as error:
        kind = getattr(config, "model_type", None) or type(model).__name__
        raise UnsupportedModelError(
            f"the paged engine cannot run models of the type {kind}: the model {error}; use the reference engine for it"
        ) from error
    finally:
        model.set_attn_implementation(before)
    return ProbedModel(layers, _longest_context(config))


def _check_kind(model: Any) -> None:
    if model.config.is_encoder_decoder:
        raise hook.ForeignAttentionError("has an encoder beside its decoder")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise hook.ForeignAttentionError("does not take the positions of its tokens")


class _Recorder:
    """Notes what the layers hand over. What it gives back is of the right shape and else without meaning."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
        if layer in self.layers:
            raise hook.ForeignAttentionError("runs a layer more than once in a step")
        if key.shape[0] != query.shape[0]:
            raise hook.ForeignAttentionError("attends over other tokens than those of the text")
        self.layers[layer] = LayerShape(query.shape[1], key.shape[1], query.shape[2], value.shape[2])
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def _layer_shapes(model: Any, count: int) -> tuple[LayerShape, ...]:
    """A run under a name for which transformers makes masks, so that each layer can be asked about its own."""
    hook.install(model)
    AttentionInterface.register(_NAME, _attention_with_mask)
    AttentionMaskInterface.register(_NAME, _mask)
    model.set_attn_implementation(_NAME)
    recorder = _Recorder()
    token_ids = torch.tensor([_token_ids(model)], device=model.device)
    positions = torch.arange(token_ids.shape[1], device=model.device)[None]
    with torch.inference_mode(), hook.attending(recorder):
        model(input_ids=token_ids, position_ids=positions, use_cache=False)
    if sorted(recorder.layers) != list(range(count)):
        raise hook.ForeignAttentionError(
            f"has {count} layers, of which {len(recorder.layers)} use transformers' attention interface"
        )
    return tuple(recorder.layers[layer] for layer in range(count))


def _mask(*_: object, mask_function: Callable[..., Tensor], device: torch.device, **__: object) -> Tensor:
    """In place of a mask: [1, 1, 1, 1], how many tokens it shows of a text that is long enough; 0: all of it."""
    newest = torch.tensor(_FAR)
    back = torch.arange(-1, _FAR)
    shown = mask_function(0, 0, newest, newest - back)
    later, earlier = shown[0], shown[1:]
    window = 0 if earlier.all() else int(earlier.int().argmin())
    if later or (window and earlier[window:].any()):
        raise hook.ForeignAttentionError("masks tokens in a way of its own")
    return torch.tensor(window, device=device).view(1, 1, 1, 1)


def _attention_with_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    window = options.get("sliding_window")
    if attention_mask is not None and (
        attention_mask.numel() != 1 or not _same_window(int(attention_mask.item()), window)
    ):
        raise hook.ForeignAttentionError("masks tokens without telling its attention about it")
    return hook.attention(module, query, key, value, None, **options)


def _same_window(shown: int, window: int | None) -> bool:
    return shown == (0 if window is None or window > _FAR else window)


def _token_ids(model: Any) -> list[int]:
    """Low ids: the special ones of models that take more than text are high."""
    size = min(64, model.get_input_embeddings().num_embeddings)
    return [(3 + 7 * i) % size for i in range(12)]


def _compare(model: Any, layers: tuple[LayerShape, ...]) -> None:
    """In two steps and beside a neighbour, the logits must be those that the model computes by its own attention."""
    text = _token_ids(model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0].float()
    runner = ModelRunner(model, GatherBackend(CacheShape(layers, 6, _BLOCK_SIZE, model.dtype, model.device)))
    sequence = Sequence("text", 0, text, len(text), len(text), block_table=[4, 0, 3])
    neighbour = Sequence("neighbour", 0, text[::-1], len(text), len(text), block_table=[1, 5, 2])
    ours = []
    for start, count, beside in ((0, 7, 5), (7, 5, 1)):
        plan = StepPlan([Scheduled(neighbour, neighbour.computed, beside), Scheduled(sequence, start, count)])
        neighbour.computed += beside
        batch = input_batch(plan, _BLOCK_SIZE, model.device)
        rows = torch.arange(beside, beside + count, device=model.device)
        ours.append(runner.run(replace(batch, sampled_rows=rows)))
    difference = (torch.cat(ours) - own).norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-9)
    tolerance = _TOLERANCE_FP32 if model.dtype == torch.float32 else _TOLERANCE_OTHER
    # The median: in a low precision a router of experts may choose differently for a token.
    if not difference.median() < tolerance:
        raise hook.ForeignAttentionError("keeps more of a text than the keys and values of its attention")


def _longest_context(config: Any) -> int | None:
    rope = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one for each type of layer.
    each = [rope] if "rope_type" in rope else [part for part in rope.values() if isinstance(part, dict)]
    limits = []
    for part in each:
        kind = str(part.get("rope_type"))
        if kind == "longrope":
            limits.append(part.get("original_max_position_embeddings") or config.original_max_position_embeddings)
        elif "dynamic" in kind:
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)
