"""Carries out a step: copies blocks, runs the model over the step's tokens, gives the logits that choose tokens."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from worker.engine.attention.backend import AttentionBackend, InputBatch
from worker.engine.attention.hook import attending, install
from worker.engine.execution.input_batch import input_batch
from worker.engine.scheduling.step_plan import StepPlan


class FusedForward(Protocol):
    """A forward pass of our own for one kind of model, in place of transformers' code; it uses the same backend."""

    def forward(self, batch: InputBatch) -> Tensor:
        """The logits of `batch.sampled_rows`: [N, vocab] fp32. The backend has begun this batch."""


class ModelRunner:
    """Runs one model with one backend. From here on the model can't be used in other ways.

    Args:
        model: a `PreTrainedModel` that `probe` took.
        backend: holds the cache.
        fused: takes over the forward pass.

    Raises:
        ForeignAttentionError: `probe` was not asked.
    """

    def __init__(self, model: Any, backend: AttentionBackend, fused: FusedForward | None = None) -> None:
        self._model = model
        self._backend = backend
        self._fused = fused
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        install(model)

    def step(self, plan: StepPlan) -> Tensor:
        """Carry out a plan.

        Returns:
            [N, vocab] fp32: a row for each entry that samples, in the order of the entries.
        """
        self._backend.copy_blocks(plan.copies)
        return self.run(input_batch(plan, self._backend.shape.block_size, self._backend.shape.device))

    def run(self, batch: InputBatch) -> Tensor:
        """The logits of the batch's sampled rows: [N, vocab] fp32, to be changed in `torch.inference_mode` only."""
        with torch.inference_mode():
            self._backend.begin(batch)
            if self._fused is not None:
                return self._fused.forward(batch)
            with attending(self._backend):
                return self._logits(batch)

    def _logits(self, batch: InputBatch) -> Tensor:
        wanted = batch.sampled_rows
        # Not every head takes no rows at all: then one is computed for nothing.
        rows = wanted if wanted.numel() else torch.zeros(1, dtype=torch.int64, device=wanted.device)
        keep = {"logits_to_keep": rows} if self._keeps_rows else {}
        logits: Tensor = self._model(
            input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **keep
        ).logits[0]
        if not self._keeps_rows:
            logits = logits[rows]
        return logits[: wanted.numel()].float()
