"""What a model tells about itself, and which models are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

from tests.worker.engine.tiny_architectures import ARCHITECTURES, CONTEXT, make_model
from worker.engine.attention.backend import LayerShape
from worker.engine.execution.probe import UnsupportedModelError, probe


def tiny(name: str, **settings: Any) -> Any:
    model_type, special = ARCHITECTURES[name]
    return make_model(model_type, {**special, **settings})


def test_shapes_are_those_of_each_layer():
    assert probe(tiny("seed_oss", num_hidden_layers=3)).layers == (LayerShape(6, 3, 8, 8),) * 3
    assert probe(tiny("deepseek_v3")).layers == (LayerShape(4, 4, 12, 10),) * 2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_probed_model_is_as_it_was(attention):
    model = tiny("llama")
    model.set_attn_implementation(attention)
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(ids).logits
    probe(model)
    assert torch.equal(model(ids).logits, before)


def test_a_model_is_probed_in_its_own_precision():
    for dtype in (torch.bfloat16, torch.float16):
        assert probe(tiny("gemma2").to(dtype)).layers == (LayerShape(4, 2, 8, 8),) * 2


REFUSED = {
    "falcon": ({"new_decoder_architecture": True, "num_kv_heads": 2}, "computes its attention by itself"),
    "bloom": ({"n_head": 4, "n_layer": 2}, "does not take the positions of its tokens"),
    "mamba": ({"state_size": 4}, "does not take the positions of its tokens"),
    "falcon_h1": (
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
        "keeps more of a text than the keys and values",
    ),
    "qwen3_next": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "has 2 layers, of which 1 use",
    ),
    "qwen2_moe": (
        {
            "sliding_window": 9,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        "masks tokens without telling its attention",
    ),
    "llama4_text": (
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 16,
            "num_local_experts": 2,
            "intermediate_size_mlp": 32,
        },
        "masks tokens",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_the_cache_cannot_serve_is_refused_with_a_sentence_and_left_as_it_was(model_type):
    settings, why = REFUSED[model_type]
    model = make_model(model_type, settings)
    ids = torch.tensor([[1, 2, 3, 4]])
    before = model(ids).logits
    with pytest.raises(UnsupportedModelError) as refusal:
        probe(model)
    assert str(refusal.value).startswith(
        f"the paged engine cannot run models of the type {model_type}: the model {why}"
    )
    assert str(refusal.value).endswith("; use the reference engine for it")
    assert torch.equal(model(ids).logits, before)


def test_an_encoder_decoder_is_refused():
    config = T5Config(
        vocab_size=97, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    with pytest.raises(UnsupportedModelError, match="type t5: the model has an encoder beside its decoder"):
        probe(AutoModelForSeq2SeqLM.from_config(config).eval())


def test_qwen2_moe_without_a_window_is_taken():
    settings = copy.deepcopy(REFUSED["qwen2_moe"][0])
    settings.update(use_sliding_window=False, layer_types=["full_attention"] * 2)
    assert len(probe(make_model("qwen2_moe", settings)).layers) == 2


def test_a_rotary_embedding_that_changes_with_the_longest_text_of_a_step_limits_the_context():
    assert probe(tiny("llama")).longest_context is None
    long = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    }
    assert probe(tiny("phi3", rope_parameters=long, original_max_position_embeddings=64)).longest_context == 64
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    assert probe(tiny("llama", rope_parameters=dynamic)).longest_context == CONTEXT
