"""The fused forward pass against transformers' own: tokens, logits, and what it does not take."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.worker.engine.execution.restored_weights import restored
from tests.worker.engine.played_steps import PlayedSteps
from tests.worker.engine.tiny_architectures import ARCHITECTURES, CONTEXT, VOCABULARY, make_model
from worker.engine.attention.backend import AttentionBackend, CacheShape
from worker.engine.attention.cpu import CpuKernelBackend
from worker.engine.attention.gather import GatherBackend
from worker.engine.execution.input_batch import input_batch
from worker.engine.execution.llama import FusedLlama
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.execution.probe import probe
from worker.engine.kernels.bindings import load_kernels
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import Scheduled, StepPlan
from worker.models.quantise import Int4Linear, quantise

KERNELS = load_kernels()
pytestmark = pytest.mark.needs("compiler")

NEW_TOKENS = 8
CPU = torch.device("cpu")
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ARCHITECTURES[name] for name in ("llama", "mistral-sliding", "qwen2", "qwen2-sliding", "qwen3")},
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama of odd sizes": (
        "llama",
        {
            "hidden_size": 42,
            "intermediate_size": 51,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 14,
        },
    ),
    "llama, rope of llama 3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama, rope of yarn": ("llama", {"rope_parameters": _YARN}),
}


def backend_for(model: Any, kind: Any = None, dtype: torch.dtype = torch.float32) -> AttentionBackend:
    shape = CacheShape(probe(model).layers, 40, 4, dtype, CPU)
    return CpuKernelBackend(shape, KERNELS) if kind is None else kind(shape)


def make_prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(sum(lengths))
    return [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in lengths]


def generate(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits)


def batch_of(*parts: tuple[list[int], int, int]):
    """Texts of which so many tokens are computed already, with how many more to compute; 8 blocks a text."""
    plan = StepPlan()
    for index, (text, start, count) in enumerate(parts):
        table = list(range(8 * index, 8 * index + 8))
        sequence = Sequence(str(index), 0, text, len(text), len(text), block_table=table, computed=start)
        plan.entries.append(Scheduled(sequence, start, count))
    return input_batch(plan, 4, CPU)


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("name", TAKEN)
def test_greedy_tokens_and_logits_are_those_of_generate(name, chunk):
    prompts = make_prompts(1, 9, 30)
    for seed in range(10):
        model = make_model(*TAKEN[name], seed=seed)
        reference = [generate(model, prompt) for prompt in prompts]
        best = torch.cat([logits for _, logits in reference]).topk(2).values
        if (best[:, 0] - best[:, 1]).min() > 1e-4:
            break
    backend = backend_for(model)
    fused = FusedLlama.from_model(model, backend)
    assert fused is not None
    played = PlayedSteps(ModelRunner(model, backend, fused), prompts, NEW_TOKENS, block_size=4, chunk=chunk)
    assert played.output == [tokens for tokens, _ in reference]
    for ours, (_, theirs) in zip(played.logits, reference, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_bf16_model_is_closer_to_the_exact_logits_than_its_own_forward_pass():
    (prompt,) = make_prompts(30)
    model = make_model("llama", {"tie_word_embeddings": True}).bfloat16()
    exact_model = make_model("llama", {"tie_word_embeddings": True})
    exact_model.load_state_dict(model.state_dict())
    with torch.inference_mode():
        exact = exact_model(torch.tensor([prompt])).logits[0]
        own = model(torch.tensor([prompt])).logits[0].float()
    backend = backend_for(model, dtype=torch.bfloat16)
    fused = FusedLlama.from_model(model, backend)
    batch = replace(batch_of((prompt, 0, 30)), sampled_rows=torch.arange(30))
    logits = ModelRunner(model, backend, fused).run(batch)
    assert logits.dtype is torch.float32
    assert (logits - exact).norm() < (own - exact).norm()


def test_weights_in_8_bits_stay_close():
    (prompt,) = make_prompts(30)
    model = make_model("llama", {"tie_word_embeddings": True, "initializer_range": 0.05})
    with torch.inference_mode():
        exact = model(torch.tensor([prompt])).logits[0]
    backend = backend_for(model)
    fused = FusedLlama.from_model(model, backend, int8=True)
    logits = ModelRunner(model, backend, fused).run(replace(batch_of((prompt, 0, 30)), sampled_rows=torch.arange(30)))
    assert 0 < (logits - exact).norm() < 0.05 * exact.norm()


def fused_logits(model: Any, prompt: list[int]) -> torch.Tensor:
    backend = backend_for(model)
    fused = FusedLlama.from_model(model, backend)
    assert fused is not None
    batch = replace(batch_of((prompt, 0, len(prompt))), sampled_rows=torch.arange(len(prompt)))
    return ModelRunner(model, backend, fused).run(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "llama, tied", "llama with biases", "llama of odd sizes", "qwen2", "qwen3"])
def test_a_model_in_int8_gives_the_logits_of_what_its_weights_stand_for(name, dtype):
    (prompt,) = make_prompts(30)
    model = make_model(*TAKEN[name]).to(dtype)
    quantise(model, "int8")
    with torch.inference_mode():
        exact = restored(model)(torch.tensor([prompt])).logits[0]
    logits = fused_logits(model, prompt)
    # A head that is the embedding stays in bf16, and so may its activations; all else is computed in fp32.
    tied = name == "llama, tied" and dtype is torch.bfloat16
    assert (logits - exact).norm() <= (5e-3 if tied else 1e-5) * exact.norm()
    assert not [name for name, _ in model.named_buffers() if name.endswith("weight")]


def test_groups_of_layers_may_differ_in_their_format():
    (prompt,) = make_prompts(30)
    model = make_model("llama", {})
    plain = copy.deepcopy(model.model.layers[0])
    quantise(model, "int8")
    model.model.layers[0].mlp = plain.mlp
    model.model.layers[1].self_attn.o_proj = plain.self_attn.o_proj
    with torch.inference_mode():
        exact = restored(model)(torch.tensor([prompt])).logits[0]
    logits = fused_logits(model, prompt)
    assert (logits - exact).norm() <= 1e-5 * exact.norm()


def test_layers_that_would_be_one_but_differ_in_format_are_left_alone():
    for change in (0, 1):
        model = make_model("llama", {})
        plain = copy.deepcopy(model.model.layers[1].self_attn.k_proj)
        quantise(model, "int8")
        if change:
            model.model.layers[1].self_attn.k_proj = plain
        assert (FusedLlama.from_model(model, backend_for(model)) is None) == bool(change)


def test_a_model_in_int4_is_left_as_it_is():
    model = make_model("llama", {"hidden_size": 64, "intermediate_size": 96})
    quantise(model, "int4")
    assert FusedLlama.from_model(model, backend_for(model)) is None
    assert isinstance(model.model.layers[0].mlp.up_proj, Int4Linear)


@pytest.mark.parametrize("quantised", [False, True])
def test_what_a_text_gets_does_not_depend_on_its_company(quantised):
    model = make_model("llama", {})
    if quantised:
        quantise(model, "int8")
    backend = backend_for(model)
    runner = ModelRunner(model, backend, FusedLlama.from_model(model, backend))
    first, *others = make_prompts(20, 17, 30, 6)
    alone = runner.run(batch_of((first, 0, 20)))
    together = runner.run(batch_of((first, 0, 20), *((other, 0, len(other)) for other in others)))
    assert torch.equal(together[0], alone[0])
    # The same, computed in two steps.
    runner.run(batch_of((first, 0, 13)))
    assert torch.equal(runner.run(batch_of((first, 13, 7)))[0], alone[0])


def test_a_step_without_sampled_rows_fills_the_cache_and_gives_no_logits():
    model = make_model("llama", {})
    backend = backend_for(model)
    runner = ModelRunner(model, backend, FusedLlama.from_model(model, backend))
    (text,) = make_prompts(20)
    whole = runner.run(batch_of((text, 0, 20)))
    for layer in range(2):
        for pool in backend.read(layer, 0):
            pool.zero_()
    assert runner.run(batch_of((text, 0, 12))).shape == (0, VOCABULARY)
    assert torch.equal(runner.run(batch_of((text, 12, 8))), whole)


def test_logits_of_earlier_steps_stay_as_they_were():
    model = make_model("llama", {})
    backend = backend_for(model)
    runner = ModelRunner(model, backend, FusedLlama.from_model(model, backend))
    first, second = make_prompts(8, 9)
    logits = runner.run(batch_of((first, 0, 8)))
    kept = logits.clone()
    runner.run(batch_of((second, 0, 9)))
    assert torch.equal(logits, kept)


def test_the_model_gives_its_weights_away():
    model = make_model("llama", {"tie_word_embeddings": True})
    FusedLlama.from_model(model, backend_for(model))
    left = [name for name, _ in model.named_parameters()]
    assert left
    assert all("norm" in name for name in left)


@pytest.mark.parametrize(
    "settings",
    [
        ("gemma", {}),
        ("phi3", {}),
        ("olmo", {}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
    ids=str,
)
def test_other_models_are_left_as_they_are(settings):
    model = make_model(settings[0], {**ARCHITECTURES.get(settings[0], ("", {}))[1], **settings[1]})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert FusedLlama.from_model(model, backend_for(model)) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_layers_that_are_not_plain_and_other_backends_are_left_alone():
    model = make_model("llama", {})
    assert FusedLlama.from_model(model, backend_for(model, GatherBackend)) is None
    model.model.layers[1].mlp.up_proj.half()
    assert FusedLlama.from_model(model, backend_for(make_model("llama", {}))) is None


def test_positions_beyond_the_first_table_of_angles(monkeypatch):
    from worker.engine.execution import llama

    monkeypatch.setattr(llama, "_FIRST_TABLE", 4)
    model = make_model("llama", {})
    prompts = make_prompts(3, 30)
    reference = [generate(model, prompt)[0] for prompt in prompts]
    backend = backend_for(model)
    runner = ModelRunner(model, backend, FusedLlama.from_model(model, backend))
    assert CONTEXT > 38
    assert PlayedSteps(runner, prompts, NEW_TOKENS, block_size=4, chunk=2).output == reference
