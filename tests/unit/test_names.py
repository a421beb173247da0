"""Names that people see: what is kept, what is refused because nobody could see it or tell it from another."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable

import pytest

from horde.errors import HordeError
from horde.registry.names import LONGEST_NAME, user_name, worker_name

FORMS = {"name": worker_name, "username": user_name}


@pytest.fixture(params=FORMS)
def field(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def form(field: str) -> Callable[[str], str]:
    return FORMS[field]


KEPT = {
    "one letter": "x",
    "the longest": "x" * LONGEST_NAME,
    "spaces around": " padded ",
    "another space": "a\u00a0b",
    "punctuation": "\"';--<b>%(name)s*",
    "accents": "Ünïcödé",
    "family": "👩‍👩‍👧‍👦",
    "with arrows": "🙂‍↔️",
    "skin": "🧑🏽‍🚒 crew",
    "flag": "🏳️‍🌈",
    "heart": "❤️‍🔥",
    "keycap": "worker 1️⃣",
    "a text sign": "I ☺︎",
    "letter as emoji": "ℹ️",
    "Persian": "می\u200cخواهم",
    "Persian with a vowel sign": "نامهُ\u200cای",
    "Hindi half form": "क्\u200dष",
    "Hindi explicit virama": "क्\u200cष",
    "Sinhala": "ශ්\u200dරී",
    "Malayalam chillu": "അവന്\u200d",
    "kanji": "作業者",
    "Korean": "한국어",
    "a mark alone beside a letter": "e\u0301",
}

INVISIBLE = {
    "nothing": "",
    "a space": " ",
    "wide spaces": "\u3000\u2003",
    "zero-width space": "\u200b",
    "joiner": "\u200d",
    "soft hyphen": "\u00ad",
    "Hangul fillers": "\u3164\u115f\uffa0",
    "blank Braille": "\u2800",
    "marks": "\u0301\u0302",
    "variation selectors": "\ufe0f\ufe0f",
}

TWINS = {
    "zero-width space": "work\u200ber",
    "non-joiner between Latin letters": "work\u200cer",
    "joiner between Latin letters": "work\u200der",
    "joiner at the end": "worker\u200d",
    "joiner at the end of an emoji": "🙂\u200d",
    "joiner before an emoji": "\u200d🙂",
    "two joiners": "👩\u200d\u200d👩",
    "joiner between letter and emoji": "a\u200d🙂",
    "two non-joiners": "می\u200c\u200cخواهم",
    "non-joiner at the end": "می\u200c",
    "soft hyphen": "work\u00ader",
    "byte order mark": "\ufeffworker",
    "word joiner": "work\u2060er",
    "invisible times": "work\u2062er",
    "line separator": "work\u2028er",
    "paragraph separator": "work\u2029er",
    "grapheme joiner": "work\u034fer",
    "tag": "worker\U000e0001",
    "tag letters": "worker\U000e0061\U000e007f",
    "variation selector after a letter": "worker\ufe0f",
    "two variation selectors": "☺\ufe0f\ufe0f",
    "ideographic variation": "作\U000e0100業",
    "Hangul filler": "work\u3164er",
    "blank Braille": "work\u2800er",
    "Khmer inherent vowel": "work\u17b4er",
    "Mongolian separator": "work\u180eer",
    "interlinear annotation": "work\ufff9er",
    "override": "a\u202eb",
    "isolate": "a\u2066b",
    "mark of direction": "a\u200eb",
    "private use": "work\ue000er",
    "tab": "a\tb",
    "next line": "a\u0085b",
    "half a pair": "a\ud83d",
}


@pytest.mark.parametrize("what", KEPT)
def test_a_name_that_people_can_see_is_kept(form: Callable[[str], str], what: str) -> None:
    name = KEPT[what]
    assert form(name) == unicodedata.normalize("NFC", name)
    assert form(form(name)) == form(name)


@pytest.mark.parametrize("what", INVISIBLE)
def test_a_name_that_nobody_can_see_is_refused(form: Callable[[str], str], field: str, what: str) -> None:
    with pytest.raises(HordeError) as refused:
        form(INVISIBLE[what])
    assert (refused.value.status, list(refused.value.errors or ())) == (400, [field])


@pytest.mark.parametrize("what", TWINS)
def test_a_name_that_looks_like_another_is_refused(form: Callable[[str], str], field: str, what: str) -> None:
    with pytest.raises(HordeError) as refused:
        form(TWINS[what])
    assert (refused.value.status, list(refused.value.errors or ())) == (400, [field])


def test_a_name_that_is_too_long_is_refused(form: Callable[[str], str], field: str) -> None:
    with pytest.raises(HordeError, match="at most 100 characters") as refused:
        form("x" * (LONGEST_NAME + 1))
    assert list(refused.value.errors or ()) == [field]


def test_no_control_or_format_character_at_all_is_taken_between_letters() -> None:
    """Every one that this Python knows, joiners included."""
    taken = []
    for code in range(sys.maxunicode + 1):
        if code and unicodedata.category(chr(code)) in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}:
            try:
                worker_name(f"a{chr(code)}b")
            except HordeError:
                continue
            taken.append(hex(code))
    assert taken == []
