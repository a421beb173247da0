"""A mutant: one guard taken out of a module's source or of the database, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Mismatch(Exception):  # noqa: N818 says what it is: the guard and the code no longer fit together
    """The text that a mutant replaces isn't there exactly once."""


@dataclass(frozen=True)
class Mutant:
    """One guard.

    Attributes:
        guard: what is taken out, in words; unique.
        test: node id of the test that must fail without it.
        module: dotted name of the module whose source is changed, or None.
        within: text that begins the block in which `old` is looked for: a `def` with its body, or else up to the next empty
            line; empty: the whole file.
        old, new: what is replaced, exactly once, and by what.
        sql: statements for the migrated database instead.
    """

    guard: str
    test: str
    module: str | None = None
    within: str = ""
    old: str = ""
    new: str = ""
    sql: str | None = None

    @property
    def path(self) -> Path:
        """The changed module's file."""
        assert self.module is not None
        return ROOT.joinpath(*self.module.split(".")).with_suffix(".py")

    def check(self) -> None:
        """Raises Mismatch when the code has moved on; a mutant that changes nothing proves nothing."""
        if (self.module is None) == (self.sql is None):
            raise Mismatch(f"{self.guard}: either a module or SQL")
        if self.module is not None:
            self.apply(self.path.read_text())

    def apply(self, source: str) -> str:
        """The source without the guard.

        Raises:
            Mismatch: `within` or `old` isn't there exactly once.
        """
        begin, end = 0, len(source)
        if self.within:
            begin = self._only(source, self.within, 0, end)
            found = source.find("\n\n\n" if self.within.startswith("def ") else "\n\n", begin)
            end = found if found >= 0 else end
        at = self._only(source, self.old, begin, end)
        return source[:at] + self.new + source[at + len(self.old) :]

    def _only(self, source: str, text: str, begin: int, end: int) -> int:
        count = source.count(text, begin, end) if text else 0
        if count != 1:
            raise Mismatch(f"{self.guard}: {text!r} is there {count} times in {self.module}, not once")
        return source.index(text, begin, end)
