"""Makes a small random model: seconds to build, milliseconds a token, and every token is a byte."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from worker.models.loaded import LoadedModel

EOS = 256


def make_tiny_model(seed: int = 0, context_length: int = 512) -> LoadedModel:
    """Weights drawn wide enough that the likeliest token stands out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    assert tokenizer.eos_token_id == EOS
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context_length,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        # The end never comes by itself: a test that wants one names another token as the end.
        model.lm_head.weight[EOS] = 0
    return LoadedModel(model, tokenizer, context_length, (EOS,))
