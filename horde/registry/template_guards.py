"""What a chat template may make, and how much of it. One operation can ask for more than a machine has, so each is looked at
before it is done; and each value that comes into being is weighed, so that whatever walks one later (to write it, to compare
it) has little to walk. What is left takes time, which is looked at all along.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import jinja2

MOST_CHARACTERS = 4 << 20
# A template writes each character a few times before it comes out (into a variable, out of a macro), and makes it more often
# on the way there: each `+` of a row makes all that stands before it again.
_MOST_WRITTEN = 4 * MOST_CHARACTERS
_MOST_MADE = 64 * MOST_CHARACTERS
_MOST_NODES = 1 << 18
_DEEPEST = 64
_LARGEST_NUMBER = 1_000_000
_LARGEST_POWER = 64
_MOST_BITS = 16_384
_WIDEST_FIELD = 9_999
_MOST_FIELDS = 10_000
# Characters looked at, where each of a text may be compared with each of another.
_MOST_WORK = 1 << 27
# Of a value that is no text; its spelling has a few characters around it as well.
_SPELLED = 24
_LONGEST_SPELLED = 1_024
# The clock is read once in so many steps.
_STEPS_AT_ONCE = 8
_MOST_REMEMBERED = 4 * _MOST_NODES
_WORTH_REMEMBERING = 64

_PERCENT = re.compile(r"%(?:\([^()%]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")
# A name in which another field could hide.
_ODD_NAME = re.compile(r"%\([^()%]*[(%]")
_NUMBER = re.compile(r"\d+")
_CONTAINERS = (list, tuple, Mapping, set, frozenset, KeysView, ItemsView, ValuesView)
_BY_CHARACTER = frozenset({"strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"})


class ExhaustedError(jinja2.TemplateError):
    """More time or more text than a template gets."""


class Weight(NamedTuple):
    """What walking a value takes: a part that is in it twice counts twice."""

    nodes: int
    characters: int
    depth: int


@dataclass
class Budget:
    """What one rendering may still take."""

    until: float
    written: int = 0
    made: int = 0
    out: int = 0
    _steps: int = 0
    _remembered: int = 0
    # With the value itself, so that its place in memory is not another's.
    _weights: dict[int, tuple[Any, Weight]] = field(default_factory=dict)

    def step(self) -> None:
        """One operation, one round of a loop, one call of a macro."""
        self._steps += 1
        if self._steps % _STEPS_AT_ONCE == 0 and time.thread_time() > self.until:
            raise ExhaustedError("it takes too long")

    def write(self, characters: int) -> None:
        """Text that went somewhere: out, or into a variable."""
        self.written += characters
        if self.written > _MOST_WRITTEN:
            raise ExhaustedError("it makes too much text")

    def make(self, characters: int) -> None:
        """Text that is part of an expression."""
        self.made += characters
        if self.made > _MOST_MADE:
            raise ExhaustedError("it makes too much text")

    def let_out(self, characters: int) -> None:
        """Text that is part of the result."""
        self.out += characters
        if self.out > MOST_CHARACTERS:
            raise ExhaustedError("it makes too much text")

    def known(self, value: Any) -> Weight | None:
        """The weight of a value that was weighed before; none of them changes."""
        found = self._weights.get(id(value))
        return None if found is None else found[1]

    def remember(self, value: Any, weight: Weight) -> None:
        """Keep what was found; only so much, for it keeps the value as well."""
        if weight.nodes < _WORTH_REMEMBERING:
            return
        self._remembered += weight.nodes
        if self._remembered > _MOST_REMEMBERED:
            self._weights.clear()
            self._remembered = weight.nodes
        self._weights[id(value)] = value, weight


# Unset while a template is compiled, when nothing of it is run.
budget_of_this: ContextVar[Budget | None] = ContextVar("budget_of_this", default=None)


def step() -> None:
    """Stop a template whose time is over."""
    if (budget := budget_of_this.get()) is not None:
        budget.step()


def made(value: Any) -> Any:
    """A value that an expression has made, unless it is too much of one."""
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            too_large()
        if (budget := budget_of_this.get()) is not None:
            budget.make(len(value))
    elif isinstance(value, _CONTAINERS):
        weigh(value)
    elif isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            too_large()
    elif isinstance(value, bytes | bytearray | memoryview):
        too_large()
    return value


def weigh(value: Any) -> Weight:
    """The weight of any value, found without walking more than the heaviest that may be."""
    if isinstance(value, str):
        return Weight(1, len(value), 0)
    if isinstance(value, int):
        return Weight(1, value.bit_length() // 3, 0)
    if not isinstance(value, _CONTAINERS):
        return Weight(1, 0 if value is None or isinstance(value, float) else _LONGEST_SPELLED, 0)
    return _weigh_parts(value, budget_of_this.get(), 1)


def _weigh_parts(whole: Any, budget: Budget | None, level: int) -> Weight:
    if budget is not None and (known := budget.known(whole)) is not None:
        return known
    if level > _DEEPEST:
        too_large()
    nodes, characters, depth = 1, 0, 1
    for part in _parts(whole):
        if isinstance(part, _CONTAINERS):
            inner = _weigh_parts(part, budget, level + 1)
            depth = max(depth, inner.depth + 1)
        else:
            inner = weigh(part)
        nodes += inner.nodes
        characters += inner.characters
        if nodes > _MOST_NODES or characters > MOST_CHARACTERS or depth > _DEEPEST:
            too_large()
    weight = Weight(nodes, characters, depth)
    if budget is not None:
        budget.remember(whole, weight)
    return weight


def _parts(whole: Any) -> Iterator[Any]:
    if isinstance(whole, Mapping):
        for key, value in whole.items():
            yield key
            yield value
    else:
        yield from whole


def one_by_one(items: Iterator[Any]) -> Iterator[Any]:
    """What comes one after another, as heavy at most as a list of it might be."""
    nodes = characters = 0
    for item in items:
        step()
        weight = weigh(item)
        nodes += weight.nodes
        characters += weight.characters
        if nodes > _MOST_NODES or characters > MOST_CHARACTERS:
            too_large()
        yield item


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse `left operator right` where it would be huge."""
    if operator == "**":
        if abs(left) > _LARGEST_NUMBER or abs(right) > _LARGEST_POWER:
            too_large()
    elif operator == "%":
        if isinstance(left, str):
            check_percent(left, right)
    elif operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            check_size(left, len(left) + len(right))
    elif operator == "*":
        for whole, times in ((left, right), (right, left)):
            if isinstance(whole, str | list | tuple) and isinstance(times, int):
                check_size(whole, len(whole) * times)


def check_size(like: Any, size: int) -> None:
    """Refuse something of this kind and size."""
    if size > (MOST_CHARACTERS if isinstance(like, str) else _MOST_NODES):
        too_large()


def check_work(text: str, other: Any) -> None:
    """Refuse what compares each character of a text with each of another."""
    if isinstance(other, str) and len(text) * len(other) > _MOST_WORK:
        too_large()


def check_text_method(text: str, name: str, arguments: Sequence[Any]) -> None:
    """Refuse a call of a text's method where it would make something huge, or take very long."""
    if any(isinstance(argument, int) and abs(argument) > _LARGEST_NUMBER for argument in arguments):
        too_large()
    if name in _BY_CHARACTER and arguments:
        check_work(text, arguments[0])
    elif name == "replace" and len(arguments) >= 2:
        check_replace(text, *arguments[:2])
    elif name == "join" and arguments:
        check_join(text, arguments[0])


def check_replace(text: str, old: Any, new: Any) -> None:
    """Refuse to put `new` for each `old` where that makes a huge text."""
    if isinstance(old, str) and isinstance(new, str):
        check_size(text, len(text) + text.count(old) * max(0, len(new) - len(old)))


def check_join(separator: str, parts: Any) -> None:
    """Refuse a huge text of parts."""
    if isinstance(parts, str | list | tuple | Mapping | KeysView | ValuesView | ItemsView):
        characters = sum(len(part) for part in parts if isinstance(part, str))
        check_size(separator, characters + len(separator) * len(parts))


def check_percent(text: str, values: Any) -> None:
    """Refuse `text % values` where it would be huge; each of its fields may hold all the values."""
    fields = 0
    width = 0
    if _ODD_NAME.search(text):
        too_large()
    for found in _PERCENT.finditer(text):
        fields += 1
        for wide in found.groups(default="0"):
            width += _width("9" * 9 if wide == "*" else wide)
    _check_fields(text, fields, width, values)


def check_braces(text: str, values: Any) -> None:
    """Refuse `text.format(values)` where it would be huge; each of its fields may hold all the values."""
    fields = 0
    width = 0
    for _, name, form, _ in string.Formatter().parse(text):
        if name is None:
            continue
        fields += 1
        # A field of a field may be as wide as its value says.
        width += sum(map(_width, _NUMBER.findall(form or ""))) + _width("9" * 9 if "{" in (form or "") else "0")
        if fields > _MOST_FIELDS:
            too_large()
    _check_fields(text, fields, width, values)


def _width(digits: str) -> int:
    if len(digits) > 6 or int(digits) > _WIDEST_FIELD:
        too_large()
    return int(digits)


def _check_fields(text: str, fields: int, width: int, values: Any) -> None:
    if fields > _MOST_FIELDS:
        too_large()
    weight = weigh(values)
    check_size(text, len(text) + width + fields * (weight.characters + _SPELLED * weight.nodes))


def too_large() -> NoReturn:
    """Stop the template."""
    raise ExhaustedError("it makes too much of something")
