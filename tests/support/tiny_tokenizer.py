"""A tokenizer of 259 tokens, each a byte or a mark of a chat, with a template: as a worker announces and uploads them.

A text's token ids are its UTF-8 bytes, so a test can say what ids it expects, and a character of several bytes is a
character of several tokens.
"""

from __future__ import annotations

import codecs
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END, TURN_BEGIN, TURN_END = 256, 257, 258
SPECIAL = {END: "<|end|>", TURN_BEGIN: "<|im_start|>", TURN_END: "<|im_end|>"}
MODEL, MODEL_REVISION = "tiny", "tiny-1"
CONTEXT_LENGTH, BLOCK_SIZE = 4096, 16

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def tokenizer_json() -> str:
    """The tokenizer as the file `tokenizer.json` holds it."""
    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL.values()])
    assert all(tokenizer.token_to_id(text) == token_id for token_id, text in SPECIAL.items())
    return str(tokenizer.to_str())


def upload(template: str | None = TEMPLATE, **special_tokens: str) -> dict[str, Any]:
    """The body that a tokenizer is uploaded with."""
    return {
        "tokenizer": json.loads(tokenizer_json()),
        "chat_template": template,
        "special_tokens": {"eos_token": SPECIAL[TURN_END], **special_tokens},
    }


def revision_of(body: dict[str, Any]) -> str:
    """The revision of such a body: what it is stored under."""
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def manifest(**changed: Any) -> dict[str, Any]:
    """What a worker announces of a model with this tokenizer."""
    return {
        "model_revision": MODEL_REVISION,
        "tokenizer_revision": revision_of(upload()),
        "context_length": CONTEXT_LENGTH,
        "block_size": BLOCK_SIZE,
        "blocks": 4096,
        "kv_bytes_per_token": 23040,
        "capabilities": [],
        **changed,
    }


def render(messages: Sequence[dict[str, str]]) -> str:
    """What the template makes of these."""
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def encode(text: str) -> list[int]:
    """The ids of a text; marks of a chat in it are one token each."""
    ids: list[int] = []
    while text:
        places = {text.find(mark): token_id for token_id, mark in SPECIAL.items() if mark in text}
        first = min(places, default=len(text))
        ids += text[:first].encode()
        if first in places:
            ids.append(places[first])
            first += len(SPECIAL[places[first]])
        text = text[first:]
    return ids


def decode(token_ids: Iterable[int]) -> str:
    """The text that a stream shows of these ids: without marks, and without a character that is not whole yet."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(i for i in token_ids if i < END), final=False)


def _letters() -> list[str]:
    """How each byte is written in the vocabulary: printable ones as they are, the others moved out of the way."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = itertools.count(256)
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]
