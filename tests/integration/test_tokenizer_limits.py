"""Tokenizers made to cost a broker dearly are refused by the part that would, and usual ones are not."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from horde.registry.tokenizers import canonical_form, load_canonical
from tests.support.limited import run_limited
from tests.support.live_broker import LiveBroker
from tests.support.uploads import TINY, canonical, put, stored

SPLIT = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
MARK = {"SpecialToken": {"id": "z", "type_id": 0}}
PAIR = [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]


def doubling(letter: str, times: int, **of: str) -> list[dict[str, Any]]:
    return [{"type": "Replace", "pattern": of or {"String": letter}, "content": letter * 2}] * times


def replacing(found: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: found}, "content": content}


def sequence(part: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", part: steps}


def adding(single: list[Any], ids: list[int]) -> dict[str, Any]:
    special = {"z": {"id": "z", "ids": ids, "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": PAIR, "special_tokens": special}


def characters_map(*texts: bytes) -> dict[str, Any]:
    data = (4).to_bytes(4, "little") + bytes(4) + b"".join(text + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def model(**changed: Any) -> dict[str, Any]:
    return {**TINY["tokenizer"]["model"], **changed}


def words(more: dict[str, Any]) -> dict[str, Any]:
    return model(vocab={**TINY["tokenizer"]["model"]["vocab"], **more})


# Each of a part that asks for too much, at once or with the first text.
BOMBS: dict[str, tuple[str, Any]] = {
    "a text doubled again and again": ("normalizer", sequence("normalizers", doubling("a", 28))),
    "a text doubled few times": ("normalizer", sequence("normalizers", doubling("a", 5))),
    "sequences in sequences": (
        "normalizer", sequence("normalizers", [sequence("normalizers", doubling("a", 3)), sequence("normalizers", doubling("a", 3))]),
    ),
    "nothing replaced": ("normalizer", sequence("normalizers", doubling("ab", 2, Regex="x*"))),
    "nothing replaced, by its text": ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "x" * 16}),
    "bytes of bytes": ("pre_tokenizer", sequence("pretokenizers", [TINY["tokenizer"]["pre_tokenizer"]] * 5)),
    "bytes of bytes of a text": ("normalizer", sequence("normalizers", [{"type": "ByteLevel"}] * 5)),
    "a step that has no type": ("normalizer", {"pattern": {"String": "a"}, "content": "aa"}),
    "a long text in front": ("normalizer", sequence("normalizers", [{"type": "Prepend", "prepend": "a" * 600}] * 2)),
    "a long pattern": ("pre_tokenizer", {**SPLIT, "pattern": {"Regex": "a" * 20_000}}),
    "too many steps": ("pre_tokenizer", sequence("pretokenizers", [SPLIT] * 17)),
    "too many steps of steps": (
        "pre_tokenizer", sequence("pretokenizers", [sequence("pretokenizers", [SPLIT] * 8)] * 2),
    ),
    "long texts of characters": ("normalizer", characters_map(b"a", b"b" * 65)),
    "a map of characters that is none": ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "-"}),
    "two maps of characters": ("normalizer", sequence("normalizers", [characters_map(b"a" * 64)] * 2)),
    "an answer doubled again and again": ("decoder", sequence("decoders", [TINY["tokenizer"]["decoder"], *doubling("b", 15)])),
    "a text repeated": ("post_processor", adding([TEXT] * 2, [1])),
    "many pieces": ("post_processor", adding([*[MARK] * 64, TEXT], [1])),
    "many tokens of a piece": ("post_processor", adding([MARK, TEXT], [1] * 65)),
    "many steps behind": ("post_processor", sequence("processors", [adding([MARK, TEXT], [1])] * 17)),
    "the largest id there may be": ("model", words({"zz": (1 << 32) - 1})),
    "a large id": ("model", words({"zz": 1_999_999_999})),
    "an id with too many before it": ("model", words({"zz": 2 * 260 + 65_537})),
    "an added token with a large id": ("added_tokens", [{**TINY["tokenizer"]["added_tokens"][0], "id": 1_999_999_999}]),
    "a long token": ("model", words({"z" * 1025: 300})),
    "too many words": ("model", {"type": "WordLevel", "vocab": {f"{n:x}": n for n in range(1_000_001)}, "unk_token": "0"}),
    "too many merges": ("model", model(merges=["a b"] * 1_000_001)),
    "long words": (
        "model",
        {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "#", "max_input_chars_per_word": 10**9},
    ),
    "a long prefix": ("model", model(continuing_subword_prefix="#" * 65)),
}  # fmt: skip


def test_a_part_that_asks_for_too_much_is_a_400_that_names_it(broker: LiveBroker, key: str) -> None:
    for name, (part, value) in BOMBS.items():
        body = {**TINY, "tokenizer": {**TINY["tokenizer"], part: value}}
        answer = put(broker, body, key)
        assert answer.status_code == 400, (name, answer.text)
        assert list(answer.json()["errors"]) == [f"tokenizer.{part}"], (name, answer.text)
    assert stored(broker) == 0


# As they are found in the tokenizers of models.
USUAL: dict[str, dict[str, Any]] = {
    "spaces as letters": {
        "normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": "▁"}, replacing(" ", "▁")]),
        "pre_tokenizer": None,
        "decoder": sequence("decoders", [
            replacing("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]),
    },
    "quotes and rows of spaces": {
        "normalizer": sequence("normalizers", [
            replacing("``", '"'), replacing("''", '"'),
            {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, replacing(" {2,}", " ", "Regex"),
        ]),
    },
    "words, then bytes": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": sequence("pretokenizers", [
            SPLIT, {"type": "Digits", "individual_digits": True}, TINY["tokenizer"]["pre_tokenizer"],
        ]),
        "post_processor": sequence("processors", [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            adding([MARK, TEXT], [257]),
        ]),
    },
    "ids with a gap": {"model": words({"zz": 2 * 260 + 65_536})},
}  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_what_the_tokenizers_of_models_are_made_of_is_taken(name: str) -> None:
    body = {**TINY, "tokenizer": {**TINY["tokenizer"], **USUAL[name]}}
    assert load_canonical(canonical_form(canonical(body))).encode("two  words", special=True)


def test_no_tokenizer_takes_a_machine_down() -> None:
    """Those that would, were they loaded and asked for a text."""
    names = [name for name in BOMBS if name != "too many words"]
    bodies = {name: {**TINY, "tokenizer": {**TINY["tokenizer"], BOMBS[name][0]: BOMBS[name][1]}} for name in names}
    said = run_limited(LOADING, json.dumps(bodies))
    assert [json.loads(line)[0] for line in said.splitlines() if line.startswith("[")] == names, said[-500:]
    assert {json.loads(line)[1] for line in said.splitlines() if line.startswith("[")} == {400}


LOADING = """
import json, sys
from horde.errors import HordeError
from horde.registry.tokenizers import canonical_form, load_canonical
for name, body in json.load(sys.stdin).items():
    try:
        tokenizer = load_canonical(canonical_form(json.dumps(body).encode()))
        status = len(tokenizer.encode("a" * 1000, special=True))
    except HordeError as error:
        status = error.status
    print(json.dumps([name, status]), flush=True)
"""
