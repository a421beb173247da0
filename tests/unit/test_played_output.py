"""A played worker's output: what it shows, what a post carries of it, and that a second worker goes on where the first stopped."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.support import tiny_tokenizer
from tests.support.played_output import PlayedJob


def job(**told: Any) -> PlayedJob:
    payload = {"max_new_tokens": 500, "stop": [], "logprobs": None, **told.pop("payload", {})}
    return PlayedJob({"id": "j", "kind": "chat", "slot": 0, "seed": 7, "attached": True, "payload": payload, **told})


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=50).map(lambda text: f"{text}<|im_end|>{text}"))
def test_the_tiny_tokenizer_is_the_one_that_is_uploaded(text: str) -> None:
    tokenizer = Tokenizer.from_str(tiny_tokenizer.tokenizer_json())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == tiny_tokenizer.encode(text)
    assert tokenizer.decode(ids) == tiny_tokenizer.decode(ids)


def test_half_a_character_is_not_shown() -> None:
    played = job()
    played.say("ü".encode()[:1])
    assert (played.text, played.piece()) == ("", {"offset": 0, "token_ids": [0xC3], "text": "", "text_offset": 0})
    played.say("ü".encode()[1:])
    assert played.text == "ü"
    played.accepted = 1
    assert played.piece() == {"offset": 1, "token_ids": [0xBC], "text": "ü", "text_offset": 0}


def test_text_may_lag_behind_its_tokens_and_comes_with_a_later_one() -> None:
    played = job()
    played.say("abc", lag=2)
    assert played.text == "a"
    assert played.result()["generation"] == "abc"
    played.accepted = 3
    played.say("d")
    assert (played.piece()["text"], played.piece()["text_offset"]) == ("bcd", 1)


def test_a_stop_string_ends_the_output_and_no_part_of_it_is_shown() -> None:
    played = job(payload={"stop": ["END", "x"]})
    played.say("one EN")
    assert played.text == "one "
    played.say("E")
    assert played.text == "one EN"
    played.say("ND and more")
    assert (played.text, played.ended) == ("one EN", True)
    assert played.result()["generation"] == "one EN"
    assert played.result()["token_ids"] == list(b"one ENEND")


def test_pieces_of_any_cut_join_to_the_whole() -> None:
    whole = job()
    whole.write(120)
    for cut in range(121):
        first, second = whole.piece(0, cut), whole.piece(cut)
        assert first["token_ids"] + second["token_ids"] == whole.token_ids
        assert first["text"] + second["text"] == whole.text
        assert (second["offset"], second["text_offset"]) == (cut, len(first["text"]))


def test_whoever_continues_a_slot_writes_what_the_first_worker_would_have_written() -> None:
    whole = job()
    whole.write(120)
    for cut in range(121):
        piece = whole.piece(0, cut)
        second = job(prefix_token_ids=piece["token_ids"], prefix_text=piece["text"])
        assert second.piece()["token_ids"] == []
        second.write(120 - cut)
        assert (second.token_ids, second.text) == (whole.token_ids, whole.text)
        assert second.piece()["offset"] == cut
    other = job(seed=8)
    other.write(120)
    assert other.text != whole.text


def test_no_more_is_written_than_was_ordered() -> None:
    played = job(payload={"max_new_tokens": 5})
    played.write(9)
    assert len(played.token_ids) == 5


def test_every_token_has_its_log_probabilities_where_they_were_asked_for() -> None:
    played = job(payload={"logprobs": 2}, prefix_token_ids=[97], prefix_text="a")
    played.say("bc")
    assert [entry[0] for entry in played.piece()["logprobs"]] == [98, 99]
    assert all(len(entry[2]) == 2 for entry in played.piece()["logprobs"])
    assert len(played.result()["logprobs"]) == 2
    assert "logprobs" not in job().piece()
