"""Puts tokenizers right that were rebuilt from a GGUF file.

A GGUF names how text is split before merges apply (`tokenizer.ggml.pre`), in llama.cpp's words. transformers knows some
of the names and otherwise splits as GPT-2 did, without a word; a model then reads numbers or punctuation in pieces that
it was never trained on. Which names split alike is taken from llama.cpp's list of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    from worker.models.gguf_header import GgufHeader

log = logging.getLogger(__name__)

# Every digit by itself, then GPT-2's rule.
_SINGLE_DIGITS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"}
)  # fmt: skip
_LIKE_GPT2 = frozenset(
    {
        "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", "roberta-bpe", "gigachat",
        "a.x-4.0", "mellum", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code",
    }
)  # fmt: skip
# Names that transformers does not know, for rules that it knows under another name.
_SAME_AS = {"stablelm2": "qwen2", "hunyuan": "qwen2", "solar-open": "qwen2", "glm4": "llama3", "chatglm-bpe": "llama3"}

# Control tokens that end an answer in one family or another; a file names one or two of them as such.
_END_TOKENS = (
    "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>",
    "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<eos>", "</s>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
_CONTROL = 3


def repair_tokenizer(tokenizer: PreTrainedTokenizerBase, header: GgufHeader) -> None:
    """Split text as the file asks; a rule that is not known is named in a warning and left as GPT-2's."""
    if header.metadata.get("tokenizer.ggml.model") != "gpt2":
        return  # the others do not split before they merge
    rule = str(header.metadata.get("tokenizer.ggml.pre", "default"))
    known = _splits_of_transformers()
    if rule in _SINGLE_DIGITS:
        split_digits(tokenizer)
    elif rule in _SAME_AS and _SAME_AS[rule] in known:
        _split_by(tokenizer, known[_SAME_AS[rule]])
    elif rule not in known and rule not in _LIKE_GPT2:
        log.warning(
            "the tokenizer of this GGUF splits text by the rule %r, which is not known here: GPT-2's is used, and some "
            "text (numbers, punctuation, other scripts) may be read wrongly; the model's own directory has it right",
            rule,
        )


def split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Split numbers into single digits before byte-level splitting, so that SmolLM2 reads `   42` as [333, 36, 34]."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def end_token_ids(header: GgufHeader) -> list[int]:
    """Ids of all tokens that end a text: those the file names, and control tokens known for it; in ascending order.

    A raw completion may end with another token than an answer in the chat format, and a file names just one of them.
    """
    metadata = header.metadata
    ids = {metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    for token_id, (token, kind) in enumerate(zip(metadata.get("tokenizer.ggml.tokens") or [], kinds, strict=False)):
        if kind == _CONTROL and token in _END_TOKENS:
            ids.add(token_id)
    return sorted(int(token_id) for token_id in ids if token_id is not None)


def _splits_of_transformers() -> Mapping[str, str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # older than the table
        return {}
    splits: dict[str, str] = GGUF_PRE_TOKENIZER_SPLITS
    return splits


def _split_by(tokenizer: Any, pattern: str) -> None:
    from tokenizers import Regex, pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
