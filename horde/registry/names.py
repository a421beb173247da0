"""Names of workers: what is allowed, and one form for each."""

from __future__ import annotations

import unicodedata

from horde.errors import bad_request

LONGEST_NAME = 100
# They turn the text around them on a page: a name could pose as another.
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def worker_name(name: str) -> str:
    """The one form of a worker's name: composed (NFC), without NUL; upper and lower case differ.

    Raises:
        HordeError: 400, when it is empty, too long, or holds control characters.
    """
    form = unicodedata.normalize("NFC", name.replace("\0", ""))
    if not form.strip():
        raise bad_request("A worker's name must not be empty.", field="name")
    if len(form) > LONGEST_NAME:
        raise bad_request(
            f"A worker's name has at most {LONGEST_NAME} characters, this one has {len(form)}.",
            rc="TooLongWorkerName",
            field="name",
        )
    if any(unicodedata.category(character) in {"Cc", "Cs"} or character in _BIDI_CONTROLS for character in form):
        raise bad_request("A worker's name must not hold control characters.", field="name")
    return form
