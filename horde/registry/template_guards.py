"""What a chat template may make, and how much of it: looked at before it is made, for one expression can ask for more than a
machine has. The rest is counted as it is written.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.filters import sync_do_join

MOST_CHARACTERS = 4 << 20
# A template writes each character a few times before it comes out (into a variable, out of a macro), and makes it more often
# on the way there: each `+` of a row makes all that stands before it again.
_MOST_WRITTEN = 4 * MOST_CHARACTERS
_MOST_MADE = 64 * MOST_CHARACTERS
_MOST_ITEMS = 1_000_000
_LARGEST_POWER = 64
# A width of seven digits, or one that is filled in: in `"%9999999d"`, `"%*d"`, `"{:9999999}"`, `"{:{}}"`.
_WIDE_FIELD = re.compile(r"%[^a-zA-Z%]*(?:\d{7}|\*)|\{[^{}]*:[^{}]*(?:\d{7}|\{)")
# Filters that make much of little, or differ from one time to the next; no chat needs them.
_LEFT_OUT = (
    "center",
    "filesizeformat",
    "pprint",
    "random",
    "striptags",
    "sum",
    "urlencode",
    "urlize",
    "wordwrap",
    "xmlattr",
)


class ExhaustedError(jinja2.TemplateError):
    """More time or more text than a template gets."""


@dataclass
class Budget:
    """What one rendering may still take."""

    until: float
    written: int = 0
    made: int = 0
    out: int = 0

    def step(self, characters: int) -> None:
        """One round of a loop, or one call of a macro, which writes that much text of its own."""
        if time.thread_time() > self.until:
            raise ExhaustedError("it takes too long")
        self.write(characters)

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


# Unset while a template is compiled, when constants are worked out.
budget_of_this: ContextVar[Budget | None] = ContextVar("budget_of_this", default=None)


def written(value: Any) -> Any:
    """A value that is written where it stands in the template."""
    if isinstance(value, str) and (budget := budget_of_this.get()) is not None:
        budget.write(len(value))
    return value


def made(value: Any) -> Any:
    """A value that an expression has made."""
    if isinstance(value, str) and (budget := budget_of_this.get()) is not None:
        budget.make(len(value))
    return value


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse `left operator right` where it would be huge."""
    if operator == "**":
        if abs(left) > _MOST_ITEMS or abs(right) > _LARGEST_POWER:
            too_large()
    elif operator == "%":
        if isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,))
    elif operator == "+":
        if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(left, len(left) + len(right))
    elif isinstance(left, int) and isinstance(right, int):
        _check_size(0, left.bit_length() + right.bit_length())
    else:
        for whole, times in ((left, right), (right, left)):
            if isinstance(whole, str | list | tuple) and isinstance(times, int):
                _check_size(whole, len(whole) * times)


def _check_size(like: Any, size: int) -> None:
    if isinstance(like, str):
        if size > MOST_CHARACTERS:
            too_large()
    elif size > _MOST_ITEMS:
        too_large()


def check_text_method(text: str, name: str, arguments: Sequence[Any]) -> None:
    """Refuse a call of a text's method where it would make something huge."""
    if any(isinstance(argument, int) and abs(argument) > _MOST_ITEMS for argument in arguments):
        too_large()
    if name == "translate":
        too_large()
    if name == "replace" and len(arguments) >= 2:
        _check_replace(text, *arguments[:2])
    elif name == "join" and arguments:
        _check_join(text, arguments[0])
    elif name == "expandtabs":
        _check_size(text, text.count("\t") * max([8, *(size for size in arguments if isinstance(size, int))]))


def check_format(text: str, values: Iterable[Any]) -> None:
    """Refuse a format that asks for widths nobody reads; each of its fields may hold the longest value."""
    if _WIDE_FIELD.search(text):
        too_large()
    longest = max((len(value) for value in _within(values) if isinstance(value, str)), default=0)
    _check_size(text, len(text) + (text.count("{") + text.count("%")) * longest)


def _within(values: Iterable[Any]) -> Iterable[Any]:
    """Values, and those that a format can reach in them by one step."""
    for value in values:
        yield value
        if isinstance(value, Mapping):
            yield from value.values()
        elif isinstance(value, list | tuple):
            yield from value


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_size(text, len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_join(separator: str, parts: Any) -> None:
    if isinstance(parts, list | tuple):
        _check_size(separator, sum(len(part) + len(separator) for part in parts if isinstance(part, str)))


def too_large() -> NoReturn:
    """Stop the template."""
    raise ExhaustedError("it makes too much of something")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if (len(indent) if isinstance(indent, str) else indent or 0) > 16:
        too_large()
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def guarded_filters(environment: jinja2.Environment) -> dict[str, Callable[..., Any]]:
    """Jinja's filters without those that are left out, and with a look at what comes before it is made."""
    filters: dict[str, Callable[..., Any]] = {
        name: plain for name, plain in environment.filters.items() if name not in _LEFT_OUT
    }
    plain_format, plain_indent, plain_replace = filters["format"], filters["indent"], filters["replace"]

    def format_(value: Any, *args: Any, **kwargs: Any) -> Any:
        check_format(str(value), (*args, *kwargs.values()))
        return plain_format(value, *args, **kwargs)

    def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        _check_size("", len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
        return plain_indent(text, width, first, blank)

    @jinja2.pass_eval_context
    def replace(context: nodes.EvalContext, text: Any, old: Any, new: Any, count: int | None = None) -> Any:
        _check_replace(str(text), old, new)
        return plain_replace(context, text, old, new, count)

    @jinja2.pass_eval_context
    def join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> Any:
        parts = list(value)
        if attribute is None:
            _check_join(str(d), parts)
        return sync_do_join(context, parts, d, attribute)

    guarded: dict[str, Callable[..., Any]] = {
        "format": format_,
        "indent": indent,
        "join": join,
        "replace": replace,
        "tojson": _to_json,
    }
    return {name: _counting(plain) for name, plain in {**filters, **guarded}.items()}


def _counting(plain: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` takes along what else the filter wants to be given.
    @functools.wraps(plain)
    def counting(*args: Any, **kwargs: Any) -> Any:
        return made(plain(*args, **kwargs))

    return counting
