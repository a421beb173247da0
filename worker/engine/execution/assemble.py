"""Puts a model, a cache and an attention backend together, the fastest way that this machine allows."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from worker.engine.attention.backend import CacheShape, LayerShape
from worker.engine.attention.choose import AUTO, choose_backend, choose_block_size
from worker.engine.attention.cpu import CpuKernelBackend
from worker.engine.attention.varlen import VarlenBackend
from worker.engine.execution.cache_memory import cache_shape
from worker.engine.execution.cuda_graphs import GraphRunner
from worker.engine.execution.linear import pack_linears
from worker.engine.execution.llama import FusedLlama
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.execution.probe import probe
from worker.engine.execution.warm_up import step_memory
from worker.models.loaded import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What `PagedEngine` was told; see there. `cuda_graphs`: replay decode steps where the device can."""

    max_batch: int
    cache_memory: int | None = None
    block_size: int = 16
    backend: str = AUTO
    token_budget: int = 512
    cuda_graphs: bool = True


@dataclass(frozen=True, slots=True)
class Assembled:
    """What carries out steps, and what it holds at most; `description` is for people."""

    runner: ModelRunner
    shape: CacheShape
    context_length: int
    description: str


def assemble(loaded: LoadedModel, options: Options) -> Assembled:
    """Take the model over: afterwards it runs in steps only, on packed weights where that is faster.

    Raises:
        UnsupportedModelError: its attention cannot be replaced.
        CacheMemoryError: too little memory for a cache.
    """
    model = loaded.model
    probed = probe(model)
    context_length = min(loaded.context_length, probed.longest_context or loaded.context_length)
    shape = _cache_shape(model, probed.layers, context_length, options)
    backend = choose_backend(shape, options.backend)
    fused = FusedLlama.from_model(model, backend) if isinstance(backend, CpuKernelBackend) else None
    if fused is not None:
        linears = "fused layers"
    elif model.device.type == "cpu":
        linears = f"linear layers by {pack_linears(model).value}"
    else:
        linears = "the model's own layers"
    if loaded.quantize:
        linears += f" in {loaded.quantize}"
    description = (
        f"{linears}, attention by {backend.name}, {shape.blocks} blocks of {shape.block_size} tokens "
        f"({shape.blocks * shape.bytes_per_block / 2**20:.0f} MiB)"
    )
    log.info("paged engine: %s", description)
    runner = ModelRunner(model, backend, fused)
    if options.cuda_graphs and isinstance(backend, VarlenBackend):
        runner = GraphRunner(model, backend, max_batch=options.max_batch, context_length=context_length)
        runner.record()
    return Assembled(runner, shape, context_length, description)


def _cache_shape(model: Any, layers: tuple[LayerShape, ...], context_length: int, options: Options) -> CacheShape:
    dtype, device = model.dtype, model.device
    reserved = 0
    if options.cache_memory is None:
        reserved = step_memory(
            model, layers, tokens=options.token_budget, rows=options.max_batch, longest=context_length
        )
    return cache_shape(
        layers,
        block_size=choose_block_size(CacheShape(layers, 1, options.block_size, dtype, device), options.backend),
        dtype=dtype,
        device=device,
        context_length=context_length,
        max_batch=options.max_batch,
        budget=options.cache_memory,
        reserved=reserved,
    )
