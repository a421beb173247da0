"""Whether the engine is right on a device: shapes of the kernel, small models of many architectures, close calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.workloads import Item
from tests.worker.engine.played_steps import PlayedSteps
from tests.worker.engine.tiny_architectures import ARCHITECTURES, make_model
from worker.engine.attention.backend import AttentionBackend, CacheShape, LayerShape
from worker.engine.attention.choose import BackendUnusableError, choose_backend, choose_block_size
from worker.engine.attention.gather import GatherBackend
from worker.engine.attention.varlen import torch_varlen_attention
from worker.engine.attention.varlen_probe import BLOCK_SIZES, refusals
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.execution.probe import probe
from worker.engine.scheduling.sequence import Sequence as Text
from worker.engine.scheduling.step_plan import Scheduled, StepPlan

ARCHITECTURE_NAMES = list(ARCHITECTURES)
_PROMPTS = [[5, 9, 2, 44, 7, 7, 31], [3], [8, 8, 1, 60, 12, 40, 11, 3, 96, 2, 2, 19, 33]]
_BLOCKS, _BLOCK_SIZE = 64, 4

# Query heads, kv heads, size: those of common models, and sizes that kernels are known to dislike.
_HEADS = [(9, 3, 64), (32, 8, 128), (16, 16, 128), (8, 1, 256), (32, 32, 80), (32, 32, 96), (8, 4, 72), (4, 2, 12)]


def kernel_table(device: str, *, quick: bool) -> list[dict[str, Any]]:
    """For each type, block size and geometry: None, or why the varlen function is not used for it."""
    function = torch_varlen_attention()
    rows = []
    sizes, heads = (BLOCK_SIZES[:1], _HEADS[:2]) if quick else (BLOCK_SIZES, _HEADS)
    for dtype, size in itertools.product((torch.bfloat16, torch.float16, torch.float32), sizes):
        layers = {LayerShape(q, kv, head, head): (q, kv, head) for q, kv, head in heads}
        refused = refusals(CacheShape(tuple(layers), 1, size, dtype, torch.device(device)), function)
        for layer, named in layers.items():
            kind = str(dtype).removeprefix("torch.")
            rows.append({"dtype": kind, "block_size": size, "heads": named, "refused": refused.get(layer)})
    return rows


def equals_generate(name: str, device: str, new_tokens: int = 12) -> bool:
    """Whether a small model's greedy float32 tokens, in mixed steps, are those of its `generate`."""
    model = make_model(*ARCHITECTURES[name]).to(device)
    expected = []
    for prompt in _PROMPTS:
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
            )
        expected.append(out[0, len(prompt) :].tolist())
    backend = GatherBackend(CacheShape(probe(model).layers, _BLOCKS, _BLOCK_SIZE, torch.float32, torch.device(device)))
    played = PlayedSteps(ModelRunner(model, backend), _PROMPTS, new_tokens, block_size=_BLOCK_SIZE, chunk=5)
    return played.output == expected


def kernel_difference(name: str, device: str) -> float | None:
    """How far a small model's bfloat16 logits are apart through the kernel and gathered, relative to their size.

    A prompt step, and a decode after it. None: the kernel takes none of its layers.
    """
    model = make_model(*ARCHITECTURES[name]).to(device, torch.bfloat16)
    shape = CacheShape(probe(model).layers, 8, 16, torch.bfloat16, torch.device(device))
    size = choose_block_size(shape)
    shape = CacheShape(shape.layers, 8, size, shape.dtype, shape.device)
    try:
        backend = choose_backend(shape, "varlen")
    except BackendUnusableError:
        return None
    ours, theirs = _two_steps(model, backend), _two_steps(model, GatherBackend(shape))
    return float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())


def _two_steps(model: Any, backend: AttentionBackend) -> Tensor:
    runner = ModelRunner(model, backend)
    per_text = -(-max(map(len, _PROMPTS)) // backend.shape.block_size)
    texts = [
        Text(str(i), 0, list(p), len(p), len(p), block_table=list(range(i * per_text, (i + 1) * per_text)))
        for i, p in enumerate(_PROMPTS)
    ]
    # The last token of each is computed again, as a decode.
    steps = (
        [Scheduled(text, 0, text.length) for text in texts],
        [Scheduled(text, text.length - 1, 1) for text in texts],
    )
    return torch.cat([runner.step(StepPlan(entries)) for entries in steps])


def count_different(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    """Texts that are not the same in both."""
    return sum(list(a) != list(b) for a, b in zip(ours, theirs, strict=True))


def gaps_where_different(
    model: Any, items: Sequence[Item], ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> list[float]:
    """For each text that differs, at its first difference: by how much the model's logits prefer their token."""
    gaps = []
    for item, mine, other in zip(items, ours, theirs, strict=True):
        place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if place is None:
            continue
        ids = torch.tensor([[*item.prompt, *other[:place]]], device=model.device)
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0, -1].float()
        gaps.append(float(logits[other[place]] - logits[mine[place]]))
    return gaps
