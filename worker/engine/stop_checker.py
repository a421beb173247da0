"""Finds stop strings in a growing text, and holds back just what may still turn out to be the start of one."""

from __future__ import annotations


class StopChecker:
    """Feed it text; it gives back what may be shown.

    The match that is complete first wins, and of two that end together the longer one. So the outcome depends on the
    text alone, not on how it was cut into pieces. Nothing from the match on is ever given back.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = tuple(sorted({s for s in stop if s}, key=len, reverse=True))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The newly showable text; once `matched` is set there is never more."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        hit = self._first_match(buffer)
        if hit is not None:
            start, self.matched = hit
            self._held = ""
            return buffer[:start]
        keep = self._suffix_that_may_match(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """What was held back, once the text has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(start + len(stop), start, stop) for stop in self._stop if (start := buffer.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _suffix_that_may_match(self, buffer: str) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
