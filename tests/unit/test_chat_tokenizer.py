"""The broker's own reading of a tokenizer: ids, tokens as they are shown, and whether ids are what a text is made of."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from horde.errors import HordeError
from horde.registry.chat_tokenizer import ChatTokenizer, TokenizerError
from horde.registry.templates import ChatTemplate, TemplateError
from tests.support import tiny_tokenizer
from worker.engine.text_stream import TextStream

SPECIAL = ("<|end|>", "<|im_start|>", "<|im_end|>")
WORDS = [
    "the quick brown fox",
    "naïve café 漢字 😍 👩‍👩‍👧",
    "STOP the fox; User: hello",
    "   spaces\n\nand lines",
    "aaab aab ab",
]


def byte_level() -> Tokenizer:
    """Trained on a few lines: tokens of one byte up to a word, so that characters are spread over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS * 20, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece has it: a space is part of the word behind it, and what has no token is spelled in bytes."""
    vocabulary = {"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
    for text in ["▁", "▁the", "▁fox", "a", "b", "ab", "S", "T", "O", "P", "ST", "é", "▁S"]:
        vocabulary[text] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("a", "b"), ("S", "T"), ("▁", "S")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


RAW = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
CHAT = {name: ChatTokenizer(raw.to_str().encode(), None) for name, raw in RAW.items()}
SPOKEN = {
    name: [i for i in range(tokenizer.vocabulary) if RAW[name].id_to_token(i) not in {*SPECIAL, "<unk>"}]
    for name, tokenizer in CHAT.items()
}
PLAIN = {name: RAW[name].token_to_id("b") for name in RAW}
kinds = st.sampled_from(sorted(CHAT))


class AsWorker:
    """A worker's tokenizer."""

    def __init__(self, raw: Tokenizer) -> None:
        self._raw = raw

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return str(self._raw.decode(token_ids, skip_special_tokens=skip_special_tokens))


def worked(
    name: str, prompt: Sequence[int], ids: Iterable[int], stop: Sequence[str], limit: int
) -> tuple[list[int], str, str | None]:
    """What a worker that samples `ids` posts: tokens, text, and the stop string that ended it."""
    stream = TextStream(AsWorker(RAW[name]), prompt, limit=limit, ending=[-1], stop=tuple(stop))
    made: list[int] = []
    text = ""
    for token_id in [*ids, -1]:
        piece = stream.push(token_id)
        made += piece.token_ids
        text += piece.text
        if piece.reason is not None:
            return made, text, piece.stop_string
    raise AssertionError("unreachable")


@st.composite
def outputs(draw: st.DrawFn) -> tuple[str, list[int], list[int], list[str], int]:
    """A tokenizer, a prompt, what a model samples, stop strings of which some occur, and a limit."""
    name = draw(kinds)
    ids = draw(st.lists(st.sampled_from(SPOKEN[name]), max_size=40))
    prompt = draw(st.lists(st.integers(0, CHAT[name].vocabulary - 1), max_size=9))
    text = CHAT[name].decode(ids)
    start = draw(st.integers(0, max(0, len(text) - 1)))
    stop = draw(
        st.lists(st.sampled_from(["STOP", "ab", " ", "fox", "aab", text[start : start + 3] or "x"]), max_size=3)
    )
    return name, prompt, ids, stop, draw(st.integers(1, 45))


@settings(max_examples=400, deadline=None)
@given(outputs())
def test_what_a_worker_shows_is_always_accounted_for(output: tuple[str, list[int], list[int], list[str], int]) -> None:
    name, prompt, ids, stop, limit = output
    made, text, _ = worked(name, prompt, ids, stop, limit)
    assert CHAT[name].accounts_for(made, text, prompt_ids=prompt, stop=stop)


@settings(max_examples=300, deadline=None)
@given(outputs(), st.integers(4, 40), st.booleans())
def test_tokens_behind_the_text_are_not(
    output: tuple[str, list[int], list[int], list[str], int], more: int, stopped: bool
) -> None:
    name, prompt, ids, stop, limit = output
    made, text, matched = worked(name, prompt, ids, stop if stopped else [], limit)
    # A letter each, so that none of them is an unfinished character; and none begins a stop string.
    junk = [PLAIN[name]] * more
    allowed = [string for string in stop if stopped and not string.startswith("b")]
    if matched is not None and matched not in allowed:
        return
    assert not CHAT[name].accounts_for([*made, *junk], text, prompt_ids=prompt, stop=allowed)


@settings(max_examples=200, deadline=None)
@given(outputs(), st.text(max_size=5))
def test_another_text_is_not_what_they_are_made_of(
    output: tuple[str, list[int], list[int], list[str], int], other: str
) -> None:
    name, prompt, ids, _, limit = output
    made, text, _ = worked(name, prompt, ids, [], limit)
    if other and text + other != text:
        assert not CHAT[name].accounts_for(made, text + other, prompt_ids=prompt, stop=[other])
        assert not CHAT[name].accounts_for([], other, prompt_ids=prompt, stop=[other])


@pytest.mark.parametrize("name", CHAT)
def test_tokens_that_show_nothing_account_for_nothing(name: str) -> None:
    chat, raw = CHAT[name], RAW[name]
    ids = chat.encode("ab fox", special=False)
    text = chat.decode(ids)
    assert chat.accounts_for(ids, text, prompt_ids=[])
    end = raw.token_to_id("<|im_end|>")
    for junk in ([end], [end] * 500, [chat.vocabulary], [-1], [1 << 40]):
        assert not chat.accounts_for([*ids, *junk], text, prompt_ids=[])
        assert not chat.accounts_for(junk, "", prompt_ids=[])
    assert chat.accounts_for([], "", prompt_ids=[end])


@pytest.mark.parametrize("name", CHAT)
def test_a_stop_string_accounts_for_the_token_that_completed_it_and_no_more(name: str) -> None:
    chat = CHAT[name]
    prompt = chat.encode("fox", special=False)
    ids = chat.encode("abSTOP", special=False)
    text = chat.decode([*prompt, *ids]).removeprefix(chat.decode(prompt)).removesuffix("STOP")
    assert chat.accounts_for(ids, text, prompt_ids=prompt, stop=["x", "STOP"])
    assert not chat.accounts_for(ids, text, prompt_ids=prompt, stop=["x"])
    assert not chat.accounts_for([*ids, PLAIN[name]], text, prompt_ids=prompt, stop=["STOP"])
    assert not chat.accounts_for([*ids, *ids], text, prompt_ids=prompt, stop=["STOP"])


@pytest.mark.parametrize("name", CHAT)
def test_an_unfinished_character_may_be_missing_and_a_row_of_broken_bytes_may_not(name: str) -> None:
    chat = CHAT[name]
    smile = chat.encode("😍", special=False)[-4:]
    prompt = chat.encode("the", special=False)
    whole = [*chat.encode("ab", special=False), *smile]
    text = chat.decode([*prompt, *whole]).removeprefix(chat.decode(prompt))
    assert text.endswith("ab😍")
    cut = text.removesuffix("😍")
    assert chat.accounts_for(whole[:-1], cut, prompt_ids=prompt)
    assert not chat.accounts_for(whole, cut, prompt_ids=prompt)
    assert not chat.accounts_for([*whole[:-1], *smile[:1] * 5], cut, prompt_ids=prompt)


def test_a_space_at_the_beginning_is_right_behind_the_prompt() -> None:
    chat = CHAT["byte_fallback"]
    fox = [RAW["byte_fallback"].token_to_id("▁fox")]
    assert chat.accounts_for(fox, " fox", prompt_ids=chat.encode("the", special=False))
    assert not chat.accounts_for(fox, "fox", prompt_ids=chat.encode("the", special=False))
    assert chat.accounts_for(fox, "fox", prompt_ids=[])


@settings(max_examples=200, deadline=None)
@given(kinds, st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_ids_are_the_librarys_own_and_a_count_is_how_many(name: str, text: str) -> None:
    ids = CHAT[name].encode(text, special=False)
    assert ids == RAW[name].encode(text, add_special_tokens=False).ids
    assert CHAT[name].count(text) == len(ids)
    assert CHAT["byte_level"].decode(CHAT["byte_level"].encode(text.replace("<", ""), special=False)) == text.replace(
        "<", ""
    )


def test_a_tokenizer_adds_its_own_tokens_only_where_it_is_asked_to() -> None:
    content = json.loads(RAW["byte_level"].to_str())
    first = RAW["byte_level"].token_to_id("<|im_start|>")
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [first], "tokens": ["<|im_start|>"]}},
    }
    # Left behind by whoever used it last; no part of what it is.
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    chat = ChatTokenizer(json.dumps(content).encode(), None)
    plain = RAW["byte_level"].encode("the quick brown fox", add_special_tokens=False).ids
    assert chat.encode("the quick brown fox", special=False) == plain
    assert chat.encode("the quick brown fox", special=True) == [first, *plain]
    assert chat.count("the quick brown fox") == len(plain)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_bytes_of_a_texts_tokens_joined_are_its_bytes(text: str) -> None:
    for name, skipped in (("byte_level", b""), ("byte_fallback", b" ")):
        chat = CHAT[name]
        text = text.replace("▁", "").replace("<", "")
        joined = b"".join(chat.token(token_id)[1] for token_id in chat.encode(text, special=False))
        assert joined == (skipped if text else b"") + text.encode()


@pytest.mark.parametrize("name", CHAT)
def test_each_token_is_shown_with_its_bytes(name: str) -> None:
    chat, raw = CHAT[name], RAW[name]
    for token_id in range(chat.vocabulary):
        shown, data = chat.token(token_id)
        assert shown == data.decode("utf-8", "replace")
        assert data
    assert chat.token(raw.token_to_id("<|im_end|>")) == ("<|im_end|>", b"<|im_end|>")
    assert chat.token(chat.vocabulary) == ("", b"")
    assert chat.token(-1) == ("", b"")
    assert CHAT["byte_fallback"].token(1 + 0xF0) == ("\ufffd", b"\xf0")
    assert CHAT["byte_fallback"].token(RAW["byte_fallback"].token_to_id("▁the")) == (" the", b" the")


def test_a_chat_is_rendered_by_its_template_and_not_without_one() -> None:
    content = tiny_tokenizer.tokenizer_json().encode()
    chat = ChatTokenizer(content, ChatTemplate(tiny_tokenizer.TEMPLATE, {}))
    assert chat.has_template
    text = chat.render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.encode(text, special=False) == tiny_tokenizer.encode(text)
    bare = ChatTokenizer(content, None)
    assert not bare.has_template
    with pytest.raises(TemplateError):
        bare.render([{"role": "user", "content": "Hi"}])


def test_ids_beyond_a_gap_in_the_vocabulary_are_below_its_size() -> None:
    raw = Tokenizer(models.WordLevel({"a": 0, "b": 500}, unk_token="a"))
    assert ChatTokenizer(raw.to_str().encode(), None).vocabulary == 501


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"model": {"type": "BPE"}}', b"\xff"])
def test_what_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(TokenizerError):
        ChatTokenizer(content, None)


def test_text_that_a_tokenizer_cannot_read_is_the_senders_fault_and_has_a_length_all_the_same() -> None:
    raw = Tokenizer(models.Unigram([("a", -1.0)], unk_id=None, byte_fallback=False))
    chat = ChatTokenizer(raw.to_str().encode(), None)
    assert chat.encode("aa", special=False) == [0, 0]
    with pytest.raises(HordeError) as refused:
        chat.encode("xyz", special=False)
    assert refused.value.status == 400
    assert chat.count("x" * 40) == 10


def test_a_long_text_is_encoded_while_other_threads_go_on() -> None:
    """A mebibyte, as much as a body holds. Python's lock is held only to take the ids out."""
    chat, text = CHAT["byte_level"], ("the quick brown fox STOP 漢字 " * 40_000)[: 1 << 20]
    beats: list[float] = []
    done = threading.Event()

    def beat() -> None:
        while not done.wait(0.002):
            beats.append(time.monotonic())

    other = threading.Thread(target=beat)
    other.start()
    try:
        began = time.monotonic()
        count = chat.count(text)
        took = time.monotonic() - began
    finally:
        done.set()
        other.join()
    assert count > 100_000
    assert took < 30
    within = [moment for moment in beats if began < moment < began + took]
    longest = max(after - before for before, after in zip([began, *within], [*within, began + took], strict=True))
    assert longest < max(0.25, took / 2), (longest, took)


def test_many_threads_use_one_tokenizer_at_once() -> None:
    chat = ChatTokenizer(RAW["byte_level"].to_str().encode(), ChatTemplate(tiny_tokenizer.TEMPLATE, {}))
    barrier = threading.Barrier(8)
    wrong: list[Any] = []

    def work(number: int) -> None:
        text = f"{number} the fox 😍 " * 20
        expected = RAW["byte_level"].encode(text, add_special_tokens=False).ids
        barrier.wait()
        for _ in range(20):
            ids = chat.encode(text, special=False)
            tokens = b"".join(chat.token(token_id)[1] for token_id in ids).decode()
            if ids != expected or tokens != text or not chat.accounts_for(ids, text, prompt_ids=[]):
                wrong.append((number, ids))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
