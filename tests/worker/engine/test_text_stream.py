"""What one sample shows, token by token, and how it ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.worker.tiny_model import EOS, make_tiny_model
from worker.engine.interface import FinishReason
from worker.engine.text_stream import Piece, TextStream

TOKENIZER = make_tiny_model().tokenizer


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def stream(*stop: str, limit: int = 100, ending: tuple[int, ...] = (EOS,)) -> TextStream:
    return TextStream(TOKENIZER, ids("prompt "), limit=limit, ending=ending, stop=stop)


def run(text_stream: TextStream, token_ids: list[int]) -> list[Piece]:
    """Pieces up to the end."""
    pieces = []
    for token_id in token_ids:
        pieces.append(text_stream.push(token_id))
        if pieces[-1].reason is not None:
            break
    return pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_end_token_is_not_part_of_the_text():
    pieces = run(stream(), [*ids("good"), EOS])
    assert text_of(pieces) == "good"
    assert pieces[-1].token_ids == ()
    assert pieces[-1].reason is FinishReason.STOP


def test_an_end_as_the_first_token_is_an_empty_text():
    assert run(stream(), [EOS]) == [Piece((), "", FinishReason.STOP)]


def test_an_end_token_right_at_the_limit_means_stop():
    assert run(stream(limit=4), [*ids("four"), EOS])[-1].reason is FinishReason.LENGTH
    assert run(stream(limit=5), [*ids("four"), EOS])[-1].reason is FinishReason.STOP


def test_a_stop_string_completed_by_the_last_allowed_token_means_stop():
    pieces = run(stream("xy", limit=4), ids("abxy"))
    assert (text_of(pieces), pieces[-1].reason, pieces[-1].stop_string) == ("ab", FinishReason.STOP, "xy")


def test_a_stop_token_ends_a_text_that_may_not_end_by_itself():
    pieces = run(stream(ending=(ord("!"),)), [*ids("go"), EOS, ord("!")])
    assert pieces[2].reason is None
    assert pieces[3] == Piece((), "", FinishReason.STOP)


def test_what_was_held_back_is_shown_when_the_text_ends_otherwise():
    assert text_of(run(stream("STOP", limit=6), ids("the ST"))) == "the ST"
    assert text_of(run(stream("STOP"), [*ids("the ST"), EOS])) == "the ST"


def test_a_prompt_never_triggers_a_stop():
    assert text_of(run(stream("prompt "), [*ids("more"), EOS])) == "more"


def test_a_character_cut_off_by_the_limit_comes_out_as_one_replacement():
    pieces = run(stream(limit=3), ids("a😀"))
    assert text_of(pieces) == "a\ufffd"
    assert pieces[-1].reason is FinishReason.LENGTH


@given(
    text=st.text("ab😀é", max_size=12),
    stop=st.lists(st.text("ab😀", min_size=1, max_size=3), max_size=2),
    cut=st.integers(0, 40),
)
def test_a_text_that_goes_on_elsewhere_shows_the_rest_and_nothing_twice(text, stop, cut):
    tokens = [*ids(text), EOS]
    whole = run(stream(*stop), tokens)
    cut = min(cut, len(tokens) - 1)
    first = run(stream(*stop), tokens[:cut])
    second = stream(*stop)
    ended = second.resume(tokens[:cut])
    if ended is not None:
        assert text_of(first) == text_of(whole)
        assert ended == whole[-1]
    else:
        rest = run(second, tokens[cut:])
        assert text_of(first) + text_of(rest) == text_of(whole)
        assert rest[-1].reason is whole[-1].reason


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_joined_text_is_the_text_of_all_its_tokens(size):
    text = "日本語 👩‍👩‍👧‍👦 naïve \U0001f1e9\U0001f1ea" * size
    pieces = run(stream(limit=1000), [*ids(text), EOS])
    assert text_of(pieces) == text
    assert all("\ufffd" not in piece.text for piece in pieces)
