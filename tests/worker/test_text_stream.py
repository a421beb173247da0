"""Stop strings and characters, token by token."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.tiny_model import make_tiny_model
from worker.engine.detokenizer import Detokenizer
from worker.engine.stop_checker import StopChecker


def shown(pieces: list[str], stop: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(tuple(stop))
    text = "".join(checker.push(piece) for piece in pieces) + checker.flush()
    return text, checker.matched


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "matched"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["x\nUs", "er", ":"], ["\nUser:"], "x", "\nUser:"),
        (["foo STOP bar"], ["STOP"], "foo ", "STOP"),
        (["aaa", "ab"], ["aab"], "aa", "aab"),
        (["xab", "c"], ["ab", "abc"], "x", "ab"),
        (["xabc"], ["abc", "bc"], "x", "abc"),
        (["ab", "cd"], ["abcX"], "abcd", None),
        (["abc"], ["", "zz"], "abc", None),
        (["abc"], [], "abc", None),
        (["end with ST"], ["STOP"], "end with ST", None),
        (["😀", "👍🏽"], ["👍🏽"], "😀", "👍🏽"),
    ],
)
def test_a_text_ends_before_its_stop_string(pieces, stop, text, matched):
    assert shown(pieces, stop) == (text, matched)


def test_only_what_may_begin_a_stop_string_is_held_back():
    checker = StopChecker(("\nUser:",))
    assert checker.push("hello\nUs") == "hello"
    assert checker.push("ed car") == "\nUsed car"


def test_nothing_is_shown_after_a_match():
    checker = StopChecker(("stop",))
    assert checker.push("a stop b") == "a "
    assert checker.push("more") == ""
    assert checker.flush() == ""


@given(
    text=st.text("abc", max_size=30),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_the_outcome_does_not_depend_on_how_the_text_is_cut(text, stop, cuts):
    places = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert shown(pieces, stop) == shown([text], stop) == shown(list(text), stop)


TOKENIZER = make_tiny_model().tokenizer


def decoded(token_ids: list[int], prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, prompt)
    return [*(detokenizer.push(i) for i in token_ids), detokenizer.flush()]


@given(st.text(max_size=20), st.text(max_size=10))
def test_pieces_join_to_the_text_and_never_hold_half_a_character(text, prompt):
    ids = TOKENIZER(text).input_ids
    pieces = decoded(ids, TOKENIZER(prompt).input_ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


@given(st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes_come_out_as_the_tokenizer_decodes_them(token_ids):
    assert "".join(decoded(token_ids, [])) == TOKENIZER.decode(token_ids)


# The tokenizer's ids are bytes, those first that are characters to be seen.
SEEN = [*range(33, 127), *range(161, 173), *range(174, 256)]
ID_OF_BYTE = {byte: token_id for token_id, byte in enumerate([*SEEN, *(b for b in range(256) if b not in SEEN)])}


def ids_of(content: Iterable[int]) -> list[int]:
    return [ID_OF_BYTE[byte] for byte in content]


GARBAGE = st.lists(st.sampled_from(b"\x80\xe2\x82\xac\xf0\x9f\x98\xff\xc3A"), min_size=17, max_size=80).map(ids_of)


@given(GARBAGE, st.text(max_size=3), GARBAGE)
def test_a_long_row_of_half_characters_comes_out_as_the_tokenizer_decodes_it(before, text, after):
    token_ids = [*before, *TOKENIZER(text).input_ids, *after]
    assert "".join(decoded(token_ids, [])) == TOKENIZER.decode(token_ids)


def test_the_bytes_of_these_tests_are_the_ids_of_the_tokenizer():
    assert TOKENIZER.decode(ids_of("A€😀".encode())) == "A€😀"


def test_text_after_a_long_row_of_half_characters_comes_at_once():
    pieces = decoded(ids_of(b"\x80" * 100 + b"AB"), [])
    assert pieces == [*[""] * 100, "\ufffd" * 100 + "A", "B", ""]


class Counting:
    """A tokenizer that counts the tokens it was asked about."""

    def __init__(self) -> None:
        self.tokens = 0

    def decode(self, token_ids: list[int], **options: bool) -> str:
        self.tokens += len(token_ids)
        return str(TOKENIZER.decode(token_ids, **options))


def test_a_row_of_half_characters_costs_by_its_length_only():
    counting = Counting()
    detokenizer = Detokenizer(counting, [])
    assert [detokenizer.push(each) for each in ids_of(b"\x80" * 4096)] == [""] * 4096
    assert detokenizer.flush() == "\ufffd" * 4096
    assert counting.tokens < 10 * 4096


def test_a_character_comes_whole_with_its_last_byte():
    ids = TOKENIZER("é😍").input_ids
    assert decoded(ids, []) == ["", "é", "", "", "", "😍", ""]


def test_a_character_cut_off_at_the_end_is_one_replacement_mark():
    ids = TOKENIZER("a😍").input_ids[:-2]
    assert "".join(decoded(ids, [])) == "a\ufffd"
