"""The largest step, and what its memory leaves for the cache."""

from __future__ import annotations

import pytest
import torch

from tests.worker.engine.tiny_architectures import ARCHITECTURES, CONTEXT, VOCABULARY, make_model
from worker.engine.execution.cache_memory import cache_shape
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.execution.probe import probe
from worker.engine.execution.warm_up import largest_step, step_memory


@pytest.mark.parametrize(
    ("tokens", "rows", "longest", "lengths"),
    [(50, 3, 128, [16, 17, 17]), (50, 3, 10, [10] * 5), (4, 4, 128, [1] * 4), (2, 4, 128, [1] * 4)],
)
def test_the_largest_step_has_all_tokens_and_all_rows_and_no_text_too_long(monkeypatch, tokens, rows, longest, lengths):
    plans = []
    step = ModelRunner.step
    monkeypatch.setattr(ModelRunner, "step", lambda runner, plan: plans.append(plan) or step(runner, plan))
    model = make_model(*ARCHITECTURES["llama"])
    layers = probe(model).layers
    logits = largest_step(model, layers, tokens=tokens, rows=rows, longest=longest)
    assert logits.shape == (len(lengths), VOCABULARY)
    assert logits.isfinite().all()
    assert [entry.count for entry in plans[-1].entries] == lengths


def test_a_model_that_knows_its_positions_by_heart_is_not_led_beyond_them():
    model = make_model(*ARCHITECTURES["gpt2"])
    logits = largest_step(model, probe(model).layers, tokens=512, rows=2, longest=CONTEXT)
    assert logits.shape == (4, VOCABULARY)


def test_on_a_cpu_nothing_is_measured():
    model = make_model(*ARCHITECTURES["llama"])
    assert step_memory(model, probe(model).layers, tokens=8, rows=2, longest=CONTEXT) == 0


@pytest.mark.needs("cuda")
def test_on_a_gpu_the_largest_step_takes_more_than_a_small_one():
    model = make_model(*ARCHITECTURES["llama"]).to("cuda")
    layers = probe(model).layers
    small = step_memory(model, layers, tokens=2, rows=2, longest=CONTEXT)
    assert step_memory(model, layers, tokens=2048, rows=64, longest=CONTEXT) > max(small, 64 * VOCABULARY * 4)


def test_what_a_step_needs_is_left_out_of_the_cache_but_a_budget_is_kept(monkeypatch):
    layers = probe(make_model(*ARCHITECTURES["llama"])).layers
    usual = {"block_size": 16, "dtype": torch.float32, "device": torch.device("cpu")}
    usual |= {"context_length": 4096, "max_batch": 8}
    one = cache_shape(layers, budget=1 << 24, **usual).bytes_per_block
    monkeypatch.setattr("worker.engine.execution.cache_memory.free_memory", lambda device: 100 * one)
    assert cache_shape(layers, reserved=30 * one, **usual).blocks == 70
    assert cache_shape(layers, reserved=30 * one, budget=50 * one, **usual).blocks == 50
