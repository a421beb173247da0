"""Small random models of many architectures: two or three layers, a vocabulary of 97, a few dozen wide."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 97
CONTEXT = 128

# Of every architecture; what a configuration does not know is left out.
_USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_OF_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "n_inner": 48}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_SLIDING: dict[str, Any] = {"sliding_window": 9, "use_sliding_window": True}
_MIXED: dict[str, Any] = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}

# Name -> (type in transformers, what is special). Head geometries differ on purpose.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral-sliding": ("mistral", _SLIDING),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen2-sliding": ("qwen2", _MIXED),
    "qwen3": ("qwen3", {"head_dim": 12}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "moe_intermediate_size": 24, "head_dim": 16}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("gemma2", {**_MIXED, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 3.0}),
    "gemma3_text": ("gemma3_text", {**_MIXED, "query_pre_attn_scalar": 8}),
    "gpt2": ("gpt2", _OF_GPT2),
    "gptj": ("gptj", {**_OF_GPT2, "rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", {"num_key_value_heads": None}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2}),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi3": ("phi3", {**_SLIDING, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}),
    "granite": ("granite", {"attention_multiplier": 0.2, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "olmo": ("olmo", {"num_key_value_heads": 4}),
    "olmo2": ("olmo2", {"num_key_value_heads": 4}),
    "smollm3": ("smollm3", {**_MIXED, "no_rope_layers": [1, 0]}),
    "starcoder2": ("starcoder2", _SLIDING),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", _MIXED),
    "glm4": ("glm4", {"head_dim": 10}),
    "helium": ("helium", {}),
    "mixtral": ("mixtral", {**_EXPERTS, **_SLIDING}),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, **_MIXED}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "exaone4": ("exaone4", _MIXED),
    "ernie4_5": ("ernie4_5", {}),
    "nemotron": ("nemotron", {}),
    "apertus": ("apertus", {}),
    "seed_oss": ("seed_oss", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "arcee": ("arcee", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20}),
}


def make_model(model_type: str, settings: dict[str, Any], seed: int = 0) -> Any:
    """A `PreTrainedModel` in fp32, in evaluation mode, that never ends a text by itself."""
    known = inspect.signature(type(AutoConfig.for_model(model_type)).__init__).parameters
    usual = {name: value for name, value in _USUAL.items() if name in known}
    config = AutoConfig.for_model(model_type, **{**usual, **settings})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model
