"""The clean-ups of a finished text that a client may ask for (AI Horde's `frmt...` flags)."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SPECIAL = str.maketrans("", "", "#/@%}{+=~|^<>")
_BLANK_LINES = re.compile(r"\n{2,}")
# A sentence's end, with the closing quotes and brackets that belong to it.
_SENTENCE_END = re.compile(r"[.!?…。！？][\"'”’»)\]*]*")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Which clean-ups to apply, in this order."""

    trim_incomplete_sentence: bool = False
    remove_blank_lines: bool = False
    remove_special_characters: bool = False

    def apply(self, text: str) -> str:
        """The cleaned text."""
        if self.trim_incomplete_sentence:
            ends = [match.end() for match in _SENTENCE_END.finditer(text)]
            # Less than one sentence is better than nothing.
            text = text[: ends[-1]] if ends else text
        if self.remove_blank_lines:
            text = _BLANK_LINES.sub("\n", text)
        if self.remove_special_characters:
            text = text.translate(_SPECIAL)
        return text
