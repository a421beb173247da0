"""Names that people see, of workers and users: what is allowed, and one form for each.

A name shows: it holds something that can be seen, and nothing that cannot, which would make it look like another name. The
exceptions are joiners and variation selectors where emoji and some scripts are spelled with them.
"""

from __future__ import annotations

import unicodedata

from horde.errors import bad_request

LONGEST_NAME = 100

ZWNJ, ZWJ = "\u200c", "\u200d"
TEXT_STYLE, EMOJI_STYLE = "\ufe0e", "\ufe0f"
KEYCAP = "\u20e3"

# Control, surrogate, format (zero width, direction, soft hyphen, tags) and private characters; separators of lines.
_UNSEEN_CATEGORIES = frozenset({"Cc", "Cs", "Cf", "Co", "Zl", "Zp"})
# What the categories do not say: fillers, blank Braille, a joiner and vowels without a form, and whole blocks of selectors and
# of code points set aside for more of them.
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
_UNSEEN_BLOCKS = (range(0xFE00, 0xFE10), range(0xFFF0, 0xFFF9), range(0xE0000, 0xE1000))

_EMOJI_BLOCKS = range(0x1F000, 0x1FB00)
# Letters, punctuation and signs of other blocks that have an emoji form too.
_EMOJI_BESIDES_SYMBOLS = frozenset("\u00a9\u00ae\u203c\u2049\u2139\u3030\u303d")
_KEYCAP_BASES = frozenset("0123456789#*")
_VIRAMA = 9


def worker_name(name: str, *, field: str = "name") -> str:
    """The one form of a worker's name: composed (NFC), without NUL; upper and lower case differ.

    Raises:
        HordeError: 400, names the `field`, when it is empty, too long, or holds what cannot be seen.
    """
    return _seen_name(name.replace("\0", ""), "A worker's name", field, rc="TooLongWorkerName")


def user_name(name: str) -> str:
    """The one form of a username: composed (NFC).

    Raises:
        HordeError: 400, when it is empty, too long, or holds what cannot be seen.
    """
    return _seen_name(name, "A username", "username", rc="TooLongUserName")


def _seen_name(name: str, what: str, field: str, *, rc: str) -> str:
    form = unicodedata.normalize("NFC", name)
    if not form.strip():
        raise bad_request(f"{what} must not be empty.", field=field)
    if len(form) > LONGEST_NAME:
        raise bad_request(
            f"{what} has at most {LONGEST_NAME} characters, this one has {len(form)}.", rc=rc, field=field
        )
    for place, character in enumerate(form):
        if _is_unseen(character) and not _belongs(form, place):
            raise bad_request(
                f"{what} must not hold control or invisible characters; there is U+{ord(character):04X}.", field=field
            )
    if not any(unicodedata.category(character)[0] in "LNPS" or _is_symbol(character) for character in form):
        raise bad_request(f"{what} must hold something that can be seen.", field=field)
    return form


def _is_unseen(character: str) -> bool:
    return (
        unicodedata.category(character) in _UNSEEN_CATEGORIES
        or character in _UNSEEN
        or any(ord(character) in block for block in _UNSEEN_BLOCKS)
    )


def _belongs(form: str, place: int) -> bool:
    """Whether the invisible character at `place` is part of how its neighbours are spelled."""
    character, before, after = form[place], form[:place], form[place + 1 : place + 2]
    if character in {TEXT_STYLE, EMOJI_STYLE}:
        return _is_symbol(before[-1:]) or (before[-1:] in _KEYCAP_BASES and after == KEYCAP)
    if character == ZWJ:
        return _is_virama(before[-1:]) or (_is_symbol(before.removesuffix(EMOJI_STYLE)[-1:]) and _is_symbol(after))
    if character == ZWNJ:
        # RFC 5892, A.1: after a virama, or between letters that would join.
        return _is_virama(before[-1:]) or (_joins(_base(before)) and _joins(after))
    return False


def _is_symbol(character: str) -> bool:
    """Whether a character is one that emoji are made of, those that this Python does not know yet included."""
    return character != "" and (
        character in _EMOJI_BESIDES_SYMBOLS
        or (character > "\u2000" and unicodedata.category(character) in {"So", "Sm"})
        or ord(character) in _EMOJI_BLOCKS
    )


def _is_virama(character: str) -> bool:
    return character != "" and unicodedata.combining(character) == _VIRAMA


def _base(text: str) -> str:
    """The last character of `text` that is no mark upon another."""
    return next((character for character in reversed(text) if not unicodedata.combining(character)), "")


def _joins(character: str) -> bool:
    """Whether a letter is of a script whose letters join (Arabic, Syriac and their kin)."""
    return character != "" and unicodedata.bidirectional(character) == "AL"
