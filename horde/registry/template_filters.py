"""The filters and tests that a chat template may use: those that templates of models do use, each with a look at what it is
asked for. Any other name does not compile.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.filters import (
    do_dictsort,
    do_float,
    do_format,
    do_indent,
    do_int,
    do_replace,
    do_title,
    do_trim,
    make_attrgetter,
    sync_do_join,
)

from horde.registry.template_guards import (
    check_join,
    check_percent,
    check_replace,
    check_size,
    check_work,
    made,
    one_by_one,
    step,
    too_large,
    weigh,
)

_PLAIN = (
    *("abs", "capitalize", "count", "d", "default", "e", "escape", "first", "items", "last", "length", "list", "lower"),
    *("map", "reject", "rejectattr", "reverse", "safe", "select", "selectattr", "string", "upper"),
)
# Each item is compared, or asked for something in Python.
_OF_FEW = ("max", "min", "sort", "unique")
_MOST_COMPARED = 100_000
# Python splits it and puts it together again, letter by letter.
_SLOWER = 16
_LONGEST_NUMBER = 5_000
_WIDEST_INDENT = 16
_LONGEST_SEPARATOR = 16


def allowed_filters(plain: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The filters for an environment that has `plain` of its own."""
    filters = {name: plain[name] for name in _PLAIN}
    filters.update({name: _of_few(plain[name]) for name in _OF_FEW})
    filters.update(_GUARDED)
    return {name: _counting(filter_) for name, filter_ in filters.items()}


def counted_tests(plain: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Tests make nothing; they take their time."""
    return {name: _counting(test) for name, test in plain.items()}


def _counting(plain: Callable[..., Any]) -> Callable[..., Any]:
    # `wraps` takes along what else the filter wants to be given.
    @functools.wraps(plain)
    def counting(*args: Any, **kwargs: Any) -> Any:
        step()
        value = plain(*args, **kwargs)
        return one_by_one(value) if isinstance(value, Iterator) else made(value)

    return counting


def _of_few(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def of_few(environment: jinja2.Environment, value: Any, *args: Any, **kwargs: Any) -> Any:
        items = list(value)
        if len(items) > _MOST_COMPARED:
            too_large()
        return plain(environment, items, *args, **kwargs)

    return of_few


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    wide = len(indent) if isinstance(indent, str) else indent or 0
    if wide > _WIDEST_INDENT or any(len(separator) > _LONGEST_SEPARATOR for separator in separators or ()):
        too_large()
    weight = weigh(value)
    between = sum(map(len, separators)) if separators else 2
    check_size("", weight.characters + weight.nodes * (max(0, wide) * weight.depth + between))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    check_percent(str(value), kwargs or args)
    return do_format(value, *args, **kwargs)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    wide = len(width) if isinstance(width, str) else width
    check_size("", len(text) + (len(text.splitlines()) + 1) * wide)
    return do_indent(text, width, first, blank)


@jinja2.pass_eval_context
def _replace(context: nodes.EvalContext, text: Any, old: Any, new: Any, count: int | None = None) -> str:
    check_replace(str(text), str(old), str(new))
    return do_replace(context, text, old, new, count)


@jinja2.pass_eval_context
def _join(context: nodes.EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    parts = list(value if attribute is None else map(make_attrgetter(context.environment, attribute), value))
    made(parts)
    texts = [str(part) for part in parts]
    check_join(str(d), texts)
    return sync_do_join(context, texts, d)


def _trim(value: Any, chars: str | None = None) -> str:
    check_work(str(value), chars)
    return do_trim(value, chars)


def _title(value: Any) -> str:
    check_size("", _SLOWER * len(str(value)))
    return do_title(value)


def _int(value: Any, default: int = 0, base: int = 10) -> int:
    _check_number(value)
    return do_int(value, default, base)


def _float(value: Any, default: float = 0.0) -> float:
    _check_number(value)
    return do_float(value, default)


def _dictsort(value: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping) and len(value) > _MOST_COMPARED:
        too_large()
    return do_dictsort(value, *args, **kwargs)


def _check_number(value: Any) -> None:
    if isinstance(value, str) and len(value) > _LONGEST_NUMBER:
        too_large()


_GUARDED: dict[str, Callable[..., Any]] = {
    "dictsort": _dictsort,
    "float": _float,
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "replace": _replace,
    "title": _title,
    "tojson": _to_json,
    "trim": _trim,
}
