"""JSON bodies, strictly.

`read_strict` accepts what RFC 8259 calls JSON and PostgreSQL can store: no NaN or Infinity, no number that overflows,
no lone surrogate, no NUL, at most `MAX_DEPTH` levels. It raises `BodyError` with the dotted path of what is wrong.
`read_repaired` is for results of workers: NUL, lone surrogates and broken UTF-8 become U+FFFD, so that a job can
always be finished. A repeated key means its last value, as in browsers.

The common case costs one `orjson.loads` and two searches; only a body that is suspect is walked in Python.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import orjson

MAX_DEPTH = 64
REPLACEMENT = "\ufffd"
_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|([\[{])|([\]}])', re.DOTALL)
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_LONGEST_INTEGER = 40


class BodyError(ValueError):
    """The body is not acceptable; `errors` maps dotted paths to what is wrong (empty when it is not JSON at all)."""

    def __init__(self, message: str, errors: dict[str, str] | None = None, *, nul: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.errors = errors or {}
        self.nul = nul


@dataclass(frozen=True)
class _NotJson:
    """Stands in a parsed tree for a number that JSON does not have."""

    literal: str


def read_strict(body: bytes) -> Any:
    """The parsed body.

    Raises:
        BodyError: it is not strict JSON; names the fields at fault.
    """
    _check_depth(body)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _explain(body, str(error)) from None
    if rb"\u0000" in body:
        _refuse_unstorable(parsed)
    return parsed


def read_repaired(body: bytes) -> Any:
    """The parsed body, with text that nobody can store replaced by U+FFFD.

    Raises:
        BodyError: it is not JSON, or holds numbers that JSON does not have.
    """
    _check_depth(body)
    try:
        parsed = orjson.loads(body)
        if rb"\u0000" not in body:
            return parsed
    except orjson.JSONDecodeError as error:
        # Control characters may stand raw in the text too: the same flaw as an escaped one, in another spelling.
        parsed = _read_leniently(body.decode("utf-8", "replace"), str(error), raw_controls=True)
    errors = {path: problem for path, problem, _ in _problems(parsed, text_is_fine=True)}
    if errors:
        raise BodyError("Input payload validation failed", errors)
    return _repair(parsed)


def _check_depth(body: bytes) -> None:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKET.finditer(body):
        if match.group(1):
            depth += 1
            if depth > MAX_DEPTH:
                raise BodyError(f"The JSON body is nested deeper than {MAX_DEPTH} levels")
        elif match.group(2):
            depth -= 1


def _explain(body: bytes, fault: str) -> BodyError:
    """Why orjson refused the body, by field where Python's more lenient parser can read it."""
    try:
        text = body.decode("utf-8", "surrogatepass")
        parsed = _read_leniently(text, fault, raw_controls=False)
    except UnicodeDecodeError:
        return BodyError("The body is not UTF-8")
    except BodyError as error:
        return error
    problems = list(_problems(parsed))
    if not problems:
        return BodyError(f"The body is not valid JSON: {fault}")
    return _refusal(problems)


def _read_leniently(text: str, fault: str, *, raw_controls: bool) -> Any:
    try:
        return json.loads(
            text,
            strict=not raw_controls,
            parse_constant=_NotJson,
            parse_float=_finite(float),
            parse_int=lambda literal: int(literal) if len(literal) <= _LONGEST_INTEGER else _NotJson(literal),
        )
    except (ValueError, RecursionError):
        raise BodyError(f"The body is not valid JSON: {fault}") from None


def _finite(parse: Callable[[str], float]) -> Callable[[str], float | _NotJson]:
    def read(literal: str) -> float | _NotJson:
        value = parse(literal)
        return value if math.isfinite(value) else _NotJson(literal)

    return read


def _refuse_unstorable(parsed: Any) -> None:
    problems = list(_problems(parsed))
    if problems:
        raise _refusal(problems)


def _refusal(problems: list[tuple[str, str, bool]]) -> BodyError:
    return BodyError(
        "Input payload validation failed",
        {path: problem for path, problem, _ in problems},
        nul=any(nul for _, _, nul in problems),
    )


def _problems(value: Any, path: str = "", *, text_is_fine: bool = False) -> Iterator[tuple[str, str, bool]]:
    """(dotted path, what is wrong, whether it is a NUL) of everything that must not be stored or answered."""
    if isinstance(value, _NotJson):
        yield path, f"{value.literal[:20]} is not a number that JSON has or that fits", False
    elif isinstance(value, str):
        if not text_is_fine:
            yield from _text_problems(value, path)
    elif isinstance(value, dict):
        for key, item in value.items():
            shown = _UNSTORABLE.sub(REPLACEMENT, key)[:64]
            here = f"{path}.{shown}" if path else shown
            if not text_is_fine:
                yield from _text_problems(key, here)
            yield from _problems(item, here, text_is_fine=text_is_fine)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _problems(item, f"{path}.{index}" if path else str(index), text_is_fine=text_is_fine)


def _text_problems(text: str, path: str) -> Iterator[tuple[str, str, bool]]:
    found = _UNSTORABLE.search(text)
    if found is None:
        return
    if found.group() == "\x00":
        yield path, "text must not contain NUL characters", True
    else:
        yield path, "text must not contain half of a surrogate pair", False


def _repair(value: Any) -> Any:
    if isinstance(value, str):
        return _UNSTORABLE.sub(REPLACEMENT, value)
    if isinstance(value, dict):
        return {_repair(key): _repair(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_repair(item) for item in value]
    return value
