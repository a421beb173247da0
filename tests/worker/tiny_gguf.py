"""Writes small GGUF files: a random llama whose tokens are bytes, with a few that a real file would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

NORMAL, CONTROL = 1, 3
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "12", "<|im_end|>", "<|not_an_end|>"]
MERGES = ["1 2"]
END, IM_END = TOKENS.index("<end>"), TOKENS.index("<|im_end|>")
TWELVE = TOKENS.index("12")

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_llama(seed: int = 0) -> LlamaForCausalLM:
    """Two layers, four query and two key heads of 16, the head apart from the embedding."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    *,
    rule: str | None = "gpt-2",
    quantised: gguf.GGMLQuantizationType | None = None,
    architecture: str = "llama",
    metadata: dict[str, Any] | None = None,
    leave_out: tuple[str, ...] = (),
    more: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write what llama.cpp's converter would.

    Args:
        rule: `tokenizer.ggml.pre`.
        quantised: what matrices are stored in; None: float32.
        metadata: further numbers and texts.
        leave_out: tensors that are not written.
        more: further float32 tensors.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    if rule is not None:
        writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL if token.startswith("<") and len(token) > 1 else NORMAL for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(END)
    for key, value in (metadata or {}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_float32(key, value)
    for name, tensor in _tensors(model).items():
        if name in leave_out:
            continue
        if quantised is None or tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, quantised), raw_dtype=quantised)
    for name, tensor in (more or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    found = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
        "output.weight": model.lm_head.weight,
    }
    for index, layer in enumerate(model.model.layers):
        for theirs, ours in _NAMES.items():
            weight = layer.get_submodule(theirs).weight
            if ours in heads:
                # llama.cpp rotates neighbouring pairs, transformers the two halves of a head.
                weight = weight.reshape(heads[ours], 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            found[f"blk.{index}.{ours}.weight"] = weight
    return {name: weight.detach().numpy() for name, weight in found.items()}
