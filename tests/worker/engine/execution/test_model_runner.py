"""Running steps on a tiny model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.worker.engine.tiny_architectures import ARCHITECTURES, VOCABULARY, make_model
from worker.engine.attention.backend import CacheShape, InputBatch
from worker.engine.attention.gather import GatherBackend
from worker.engine.attention.hook import AttentionOutsideStepError
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.execution.probe import probe
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import Scheduled, StepPlan

CPU = torch.device("cpu")
PROMPT = [5, 9, 2, 44, 7, 7, 31]


@pytest.fixture
def model():
    return make_model(*ARCHITECTURES["llama"])


def backend_for(model) -> GatherBackend:
    return GatherBackend(CacheShape(probe(model).layers, 8, 4, torch.float32, CPU))


def sequence(table: list[int], token_ids: list[int] | None = None) -> Sequence:
    token_ids = list(token_ids or PROMPT)
    return Sequence("a", 0, token_ids, len(token_ids), len(token_ids), block_table=table)


def test_a_model_called_outside_of_a_step_raises_and_does_not_attend_in_some_other_way(model):
    ModelRunner(model, backend_for(model))
    with pytest.raises(AttentionOutsideStepError, match="called outside of its steps"):
        model(torch.tensor([PROMPT]))


def test_after_a_step_that_failed_the_model_is_outside_of_a_step_again(model):
    runner = ModelRunner(model, backend_for(model))
    with pytest.raises(IndexError):
        runner.step(StepPlan([Scheduled(sequence([6, 7], [VOCABULARY]), 0, 1)]))
    with pytest.raises(AttentionOutsideStepError):
        model(torch.tensor([PROMPT]))
    assert runner.step(StepPlan([Scheduled(sequence([6, 7]), 0, 7)])).isfinite().all()


def test_only_sampled_tokens_get_logits(model):
    ids = torch.tensor([PROMPT])
    expected = model(ids).logits[0, -1]
    runner = ModelRunner(model, backend_for(model))
    part, whole = sequence([0, 1]), sequence([2, 3])
    logits = runner.step(StepPlan([Scheduled(part, 0, 3), Scheduled(whole, 0, 7)]))
    assert logits.shape == (1, VOCABULARY)
    torch.testing.assert_close(logits[0], expected)
    assert runner.step(StepPlan([Scheduled(part, 3, 3)])).shape == (0, VOCABULARY)


def test_copies_are_made_before_anything_is_computed(model):
    runner = ModelRunner(model, backend_for(model))
    first = sequence([0, 1])
    expected = runner.step(StepPlan([Scheduled(first, 0, 7)]))
    # The last token of a copy, computed anew on the copied blocks.
    second = sequence([4, 5])
    logits = runner.step(StepPlan([Scheduled(second, 6, 1)], copies=[(0, 4), (1, 5)]))
    torch.testing.assert_close(logits, expected)


def test_logits_are_fp32_whatever_the_model_is(model):
    model = model.to(torch.bfloat16)
    runner = ModelRunner(model, GatherBackend(CacheShape(probe(model).layers, 8, 4, torch.bfloat16, CPU)))
    assert runner.step(StepPlan([Scheduled(sequence([0, 1]), 0, 7)])).dtype == torch.float32


def test_a_fused_forward_takes_the_place_of_the_models_own_and_finds_the_backend_begun(model):
    backend = backend_for(model)
    begun: list[InputBatch] = []
    backend.begin = begun.append  # type: ignore[method-assign]

    class Fused:
        def forward(self, batch: InputBatch) -> Tensor:
            assert begun == [batch]
            return torch.full((batch.sampled_rows.numel(), 3), 2.5)

    logits = ModelRunner(model, backend, fused=Fused()).step(StepPlan([Scheduled(sequence([0, 1]), 0, 7)]))
    assert logits.tolist() == [[2.5] * 3]
