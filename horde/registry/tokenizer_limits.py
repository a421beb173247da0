"""What a tokenizer may be made of, looked at before it is loaded: a few hundred bytes of one can ask for more than a machine
has, at once or with the first text that it reads.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from horde.errors import bad_request

MOST_STEPS = 16
# How much longer a text may become on its way through a part, and what may be put in front of it.
MOST_GROWTH = 16
LONGEST_PREPENDED = 1_024
MOST_PIECES = 64
MOST_TOKENS = 1_000_000
LARGEST_ID = (1 << 31) - 1
# Ids need not be without gaps, but each of them takes its place.
GAPS = 65_536
LONGEST_TOKEN = 1_024
LONGEST_WORD = 1_000
LONGEST_AFFIX = 64
LONGEST_TEXT = 16_384
LARGEST_MAP = 1 << 20
# Bytes that one character becomes; the usual maps have 33.
LONGEST_MAPPED = 64

_STEPS_OF = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
_AFFIXES = ("unk_token", "continuing_subword_prefix", "end_of_word_suffix")


def check_parts(tokenizer: Mapping[str, Any]) -> None:
    """Look at the content of a `tokenizer.json`. What is of the wrong type altogether is left to whoever loads it.

    Raises:
        HordeError: 400 that names the part which asks for too much.
    """
    for part in _STEPS_OF:
        _check_steps(part, list(_steps(part, tokenizer.get(part))))
    model = tokenizer.get("model")
    added = tokenizer.get("added_tokens")
    _check_model(model if isinstance(model, dict) else {}, added if isinstance(added, list) else [])


def _steps(part: str, whole: Any) -> Iterator[dict[str, Any]]:
    """Each step of a part, sequences too."""
    waiting, count = [whole], 0
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        count += 1
        inner = step.get(_STEPS_OF[part])
        # The sequence itself is none.
        if count > MOST_STEPS + 1 or (isinstance(inner, list) and len(inner) > MOST_STEPS):
            _refuse(part, f"has more than {MOST_STEPS} steps")
        yield step
        waiting += inner if isinstance(inner, list) else []


def _check_steps(part: str, steps: list[dict[str, Any]]) -> None:
    growth, prepended, maps = 1.0, 0, 0
    for step in steps:
        kind = step.get("type")
        if not isinstance(kind, str):
            # It might be loaded all the same, by the look of it.
            _refuse(part, "has a step without a type")
        if kind == "Precompiled":
            maps += 1
            _check_map(part, step.get("precompiled_charsmap"))
        elif kind == "TemplateProcessing":
            _check_template(part, step)
        elif any(len(text) > LONGEST_TEXT for text in _texts(step)):
            _refuse(part, f"holds a text of more than {LONGEST_TEXT} characters")
        growth *= _growth(step)
        if kind == "Prepend":
            prepended += len(str(step.get("prepend")))
    if growth > MOST_GROWTH or maps > 1:
        _refuse(part, f"may make a text more than {MOST_GROWTH} times as long")
    if prepended > LONGEST_PREPENDED:
        _refuse(part, f"puts more than {LONGEST_PREPENDED} characters in front of a text")


def _growth(step: Mapping[str, Any]) -> float:
    """How many times as long a step makes a text at most; what it makes shorter might come first, so never below 1."""
    kind = step.get("type")
    if kind == "ByteLevel":
        # Each byte becomes a character, most of them of two bytes.
        return 2
    if kind == "Replace":
        pattern, content = step.get("pattern"), len(str(step.get("content")))
        found = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(found, str) and found:
            return max(1.0, content / len(found))
        # It may find nothing between any two characters.
        return 1 + content
    return 1


def _check_map(part: str, encoded: Any) -> None:
    """A map of characters: the size of its tree, the tree, and the texts, each with a NUL behind it."""
    try:
        data = base64.b64decode(encoded if isinstance(encoded, str) else "", validate=True)
    except (binascii.Error, ValueError):
        _refuse(part, "holds a map of characters that is none")
    if len(data) > LARGEST_MAP:
        _refuse(part, f"holds a map of characters of more than {LARGEST_MAP} bytes")
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    if max(map(len, texts.split(b"\0")), default=0) > LONGEST_MAPPED:
        _refuse(part, f"makes more than {LONGEST_MAPPED} bytes of one character")


def _check_template(part: str, step: Mapping[str, Any]) -> None:
    special = step.get("special_tokens")
    tokens: list[Any] = list(
        special.values() if isinstance(special, dict) else special if isinstance(special, list) else ()
    )
    for name in ("ids", "tokens"):
        rows = [token[name] for token in tokens if isinstance(token, dict) and isinstance(token.get(name), list)]
        if len(tokens) > MOST_PIECES or sum(map(len, rows)) > MOST_PIECES:
            _refuse(part, f"adds more than {MOST_PIECES} tokens")
    for form in ("single", "pair"):
        pieces = step.get(form)
        if not isinstance(pieces, list):
            continue
        texts = [piece for piece in pieces if not (isinstance(piece, dict) and "SpecialToken" in piece)]
        if len(pieces) > MOST_PIECES:
            _refuse(part, f"has more than {MOST_PIECES} pieces")
        # Otherwise steps of it multiply a text.
        if len(texts) > (1 if form == "single" else 2):
            _refuse(part, "repeats a text")


def _check_model(model: Mapping[str, Any], added: list[Any]) -> None:
    vocabulary, merges = model.get("vocab"), model.get("merges")
    words: Iterable[Any] = ()
    ids: list[int] = []
    if isinstance(vocabulary, dict):
        words = vocabulary
        ids = [token_id for token_id in vocabulary.values() if type(token_id) is int]
    elif isinstance(vocabulary, list):
        # A row each of the text and how likely it is; its id is its place.
        words = (row[0] for row in vocabulary if isinstance(row, list) and row)
    size = (len(vocabulary) if isinstance(vocabulary, dict | list) else 0) + len(added)
    if size > MOST_TOKENS:
        _refuse("model", f"has more than {MOST_TOKENS} tokens")
    if isinstance(merges, list) and len(merges) > MOST_TOKENS:
        _refuse("model", f"has more than {MOST_TOKENS} merges")
    _check_longest("model", words)
    known: list[dict[str, Any]] = [token for token in added if isinstance(token, dict)]
    _check_longest("added_tokens", (token.get("content") for token in known))
    _check_ids("model", ids, size)
    _check_ids("added_tokens", [token["id"] for token in known if type(token.get("id")) is int], size)
    word = model.get("max_input_chars_per_word")
    if isinstance(word, int) and word > LONGEST_WORD:
        _refuse("model", f"has a max_input_chars_per_word of more than {LONGEST_WORD}")
    if any(len(str(model.get(name))) > LONGEST_AFFIX for name in _AFFIXES):
        _refuse("model", f"has one of {', '.join(_AFFIXES)} of more than {LONGEST_AFFIX} characters")


def _check_longest(part: str, words: Iterable[Any]) -> None:
    if max((len(word) for word in words if isinstance(word, str)), default=0) > LONGEST_TOKEN:
        _refuse(part, f"has a token of more than {LONGEST_TOKEN} characters")


def _check_ids(part: str, ids: list[int], size: int) -> None:
    if ids and (max(ids) > min(LARGEST_ID, 2 * size + GAPS) or min(ids) < 0):
        _refuse(part, f"has an id of more than twice the number of tokens and {GAPS}, or one below 0")


def _texts(whole: Any) -> Iterator[str]:
    """Each text in a step; steps within it are looked at on their own, and what is deeper has been refused."""
    if isinstance(whole, str):
        yield whole
    elif isinstance(whole, dict):
        for name, value in whole.items():
            if name not in _STEPS_OF.values():
                yield from _texts(value)
    elif isinstance(whole, list):
        for value in whole:
            yield from _texts(value)


def _refuse(part: str, fault: str) -> NoReturn:
    field = f"tokenizer.{part}"
    raise bad_request(f"{field} {fault}.", field=field)
