"""What is put together for a model whose weights are in int8: with kernels the fused pass, without them its own layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.worker.engine.execution.restored_weights import restored
from tests.worker.engine.paged_scenes import Run, fresh, make_engine, one_thread, pristine, request, run
from worker.engine.execution.linear import choose_path
from worker.models.loaded import LoadedModel
from worker.models.quantise import Int8Linear, quantise

PROMPTS = {"a": "The capital of France", "b": "Once", "c": "In the beginning there was a word, and then another"}


@pytest.fixture(autouse=True, scope="module")
def thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def in_int8() -> LoadedModel:
    loaded = replace(fresh(pristine()), quantize="int8")
    quantise(loaded.model, "int8")
    return loaded


@pytest.fixture
def kernels_off(monkeypatch) -> Iterator[None]:
    monkeypatch.setenv("HORDE_WORKER_KERNELS", "off")
    choose_path.cache_clear()
    yield
    choose_path.cache_clear()


def layers_in_int8(loaded: LoadedModel) -> int:
    return sum(isinstance(module, Int8Linear) for module in loaded.model.modules())


def written(engine: Any) -> Run:
    return run(engine, *(request(name, prompt, max_new_tokens=12, logprobs=5) for name, prompt in PROMPTS.items()))


def furthest(done: Run, exact: Any, tokenizer: Any) -> float:
    """The largest difference of a log probability from what the model without quantised layers says of the same text."""
    found = 0.0
    for name, prompt in PROMPTS.items():
        ids = tokenizer(prompt).input_ids
        told = done.texts[name, 0]
        with torch.inference_mode():
            logits = exact(torch.tensor([ids + told.token_ids])).logits[0, len(ids) - 1 : -1]
        assert len(told.logprobs) == len(logits) == 12
        for row, logprob in zip(logits.log_softmax(-1), told.logprobs, strict=True):
            for token, value in logprob.top:
                found = max(found, abs(value - float(row[token])))
    return found


@pytest.mark.needs("compiler")
def test_a_llama_in_int8_keeps_the_fused_pass_and_the_logits_of_its_weights(in_int8):
    exact = restored(in_int8.model)
    engine = make_engine(loaded=in_int8)
    assert engine.description.startswith("fused layers in int8, attention by C++ kernels")
    assert furthest(written(engine), exact, in_int8.tokenizer) < 2e-4


@pytest.mark.needs("compiler")
def test_layers_in_int8_that_cannot_be_fused_are_computed_by_our_kernels(in_int8):
    in_int8.model.config.hidden_act = "gelu"
    exact = restored(in_int8.model)
    engine = make_engine(loaded=in_int8)
    assert engine.description.startswith("linear layers by C++ kernels in int8")
    assert layers_in_int8(in_int8) == 0
    assert furthest(written(engine), exact, in_int8.tokenizer) < 2e-4


def test_without_kernels_layers_in_int8_stay_what_they_are(in_int8, kernels_off):
    exact = restored(in_int8.model)
    before = layers_in_int8(in_int8)
    engine = make_engine(loaded=in_int8, backend="auto")
    assert engine.description.startswith("linear layers by PyTorch in int8")
    assert layers_in_int8(in_int8) == before == 15
    # torch's product is rounded to bf16; the weights before they were quantised would be 0.2 away.
    assert furthest(written(engine), exact, in_int8.tokenizer) < 0.15
