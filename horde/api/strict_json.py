"""JSON bodies, strictly.

`read_strict` accepts what RFC 8259 calls JSON and PostgreSQL can store: no NaN or Infinity, no number that overflows,
no lone surrogate, no NUL, at most `MAX_DEPTH` levels. It raises `BodyError` with the dotted path of what is wrong.
`read_repaired` is for results of workers: NUL, lone surrogates and broken UTF-8 become U+FFFD, so that a job can
always be finished. A repeated key means its last value, as in browsers.

Who sends a body has shown no key yet, so no body may cost much: what looks at every byte runs in C, what runs in
Python stops after `MOST_ERRORS` faults or `MOST_STEPS` values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson

MAX_DEPTH = 64
MOST_CONTAINERS = 10_000
MOST_ERRORS = 20
MOST_STEPS = 20_000
LONGEST_PATH = 200
REPLACEMENT = "\ufffd"
_ALL_BUT_QUOTES_AND_BRACKETS = bytes(set(range(256)) - set(b'"[]{}'))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
# `\ud83d` without the half that belongs to it, as it is spelled in a body.
_HALF_A_PAIR = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_ESCAPED_REPLACEMENT = r"\ufffd"
# Nothing that was decoded holds half a pair, so one can stand for two backslashes.
_TWO_BACKSLASHES, _THEIR_STAND_IN = r"\\", "\ud800"
_LONGEST_INTEGER = 40
_FAILED = "Input payload validation failed"


class BodyError(ValueError):
    """The body is not acceptable; `errors` maps dotted paths to what is wrong (empty when it is not JSON at all)."""

    def __init__(self, message: str, errors: Mapping[str, str] | None = None, *, nul: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.errors = dict(errors or {})
        self.nul = nul


class _NotJson(NamedTuple):
    """Stands in a parsed tree for a number that JSON does not have."""

    literal: str


class _TooManyError(ValueError):
    """More values than anybody should look at one by one."""


def read_strict(body: bytes, *, strip_nul_from: Iterable[str] = ()) -> Any:
    """The parsed body.

    Args:
        strip_nul_from: fields of the body whose text loses its NUL characters instead of being refused.

    Raises:
        BodyError: it is not strict JSON; names the fields at fault.
    """
    _check_brackets(body)
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise _explain(body, str(error), strip_nul_from) from None
    if rb"\u0000" in body.replace(rb"\\", b""):
        _strip_nul(parsed, strip_nul_from)
        faults = _Faults()
        faults.search(parsed)
        if faults.errors:
            raise faults.refusal()
        if faults.unfinished:
            raise BodyError("Text must not contain NUL characters", nul=True)
    return parsed


def read_repaired(body: bytes, *, most_containers: int = MOST_CONTAINERS) -> Any:
    """The parsed body, with text that nobody can store replaced by U+FFFD.

    Args:
        most_containers: arrays and objects that it may hold.

    Raises:
        BodyError: it is not JSON, or holds numbers that JSON does not have.
    """
    _check_brackets(body, most_containers)
    fault = ""
    if rb"\u0000" not in body:
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            fault = str(error)
    text = _repair(body.decode("utf-8", "replace"))
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        fault = fault or str(error)
    # What is left to blame are raw control characters, which are harmless, and numbers.
    reader = _LenientReader()
    parsed = reader.read(text, fault, raw_controls=True)
    if reader.odd_numbers:
        faults = _Faults(text_is_fine=True)
        faults.search(parsed)
        raise faults.refusal() if faults.errors else BodyError(f"The body is not valid JSON: {fault}")
    return parsed


def _check_brackets(body: bytes, most_containers: int = MOST_CONTAINERS) -> None:
    """Refuse what is nested too deep or made of too many parts, before anything is built from it."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _ALL_BUT_QUOTES_AND_BRACKETS)
    # Two quotes side by side are taken out first: that moves no bracket into or out of a text.
    outside = b"".join(plain.replace(b'""', b"").split(b'"')[::2]).translate(_SQUARE)
    opened = outside.count(b"[")
    if opened > most_containers and b"]" in outside:
        raise BodyError(f"The JSON body holds more than {most_containers} arrays and objects")
    # Each round takes the innermost pairs away, so a pair that is left has more levels than there were rounds.
    for _ in range(MAX_DEPTH):
        shorter = outside.replace(b"[]", b"")
        if len(shorter) == len(outside):
            break
        outside = shorter
    if b"[]" in outside or outside.count(b"[") > MAX_DEPTH:
        raise BodyError(f"The JSON body is nested deeper than {MAX_DEPTH} levels")


def _explain(body: bytes, fault: str, strip_nul_from: Iterable[str]) -> BodyError:
    """Why orjson refused the body, by field where Python's more lenient parser can read it."""
    try:
        text = body.decode("utf-8", "surrogatepass")
        parsed = _LenientReader().read(text, fault, raw_controls=False)
    except UnicodeDecodeError:
        return BodyError("The body is not UTF-8")
    except BodyError as error:
        return error
    _strip_nul(parsed, strip_nul_from)
    faults = _Faults()
    faults.search(parsed)
    return faults.refusal() if faults.errors else BodyError(f"The body is not valid JSON: {fault}")


class _LenientReader:
    """Reads what Python calls JSON, with `_NotJson` for numbers that are none."""

    def __init__(self) -> None:
        self.odd_numbers = False
        self._steps = 0

    def read(self, text: str, fault: str, *, raw_controls: bool) -> Any:
        """The parsed text; raises BodyError with `fault` where it cannot be read, or not in `MOST_STEPS`."""
        try:
            return json.loads(
                text,
                strict=not raw_controls,
                parse_constant=self._odd,
                parse_float=self._float,
                parse_int=self._integer,
            )
        except (ValueError, RecursionError):
            raise BodyError(f"The body is not valid JSON: {fault}") from None

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise _TooManyError

    def _odd(self, literal: str) -> _NotJson:
        self._step()
        self.odd_numbers = True
        return _NotJson(literal)

    def _float(self, literal: str) -> float | _NotJson:
        self._step()
        value = float(literal)
        return value if math.isfinite(value) else self._odd(literal)

    def _integer(self, literal: str) -> int | _NotJson:
        self._step()
        return int(literal) if len(literal) <= _LONGEST_INTEGER else self._odd(literal)


class _Faults:
    """What must not be stored or answered in a parsed tree, by dotted path.

    Attributes:
        unfinished: the search ended before it had seen everything.
    """

    def __init__(self, *, text_is_fine: bool = False) -> None:
        self.errors: dict[str, str] = {}
        self.unfinished = False
        self._nul = False
        self._text_is_fine = text_is_fine
        self._steps = 0

    def search(self, value: Any) -> None:
        """Find the first `MOST_ERRORS` faults among the first `MOST_STEPS` values."""
        try:
            self._look(value, "")
        except _TooManyError:
            self.unfinished = True

    def refusal(self) -> BodyError:
        """The faults as an error."""
        return BodyError(_FAILED, self.errors, nul=self._nul)

    def _look(self, value: Any, path: str) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise _TooManyError
        if isinstance(value, _NotJson):
            self._note(path, f"{value.literal[:20]} is not a number that JSON has or that fits")
        elif isinstance(value, str):
            self._look_at_text(value, path)
        elif isinstance(value, dict):
            for key, item in value.items():
                shown = _UNSTORABLE.sub(REPLACEMENT, key[:64])
                here = f"{path}.{shown}" if path else shown
                self._look_at_text(key, here)
                self._look(item, here)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self._look(item, f"{path}.{index}" if path else str(index))

    def _look_at_text(self, text: str, path: str) -> None:
        found = None if self._text_is_fine else _UNSTORABLE.search(text)
        if found is None:
            return
        if found.group() == "\x00":
            self._nul = True
            self._note(path, "text must not contain NUL characters")
        else:
            self._note(path, "text must not contain half of a surrogate pair")

    def _note(self, path: str, problem: str) -> None:
        self.errors[path[:LONGEST_PATH]] = problem
        if len(self.errors) >= MOST_ERRORS:
            raise _TooManyError


def _strip_nul(parsed: Any, fields: Iterable[str]) -> None:
    if isinstance(parsed, dict):
        for field in fields:
            if isinstance(parsed.get(field), str):
                parsed[field] = parsed[field].replace("\x00", "")


def _repair(text: str) -> str:
    """The text of a body with U+FFFD for NUL and for half a pair of surrogates, raw or escaped."""
    held = text.replace("\x00", REPLACEMENT).replace(_TWO_BACKSLASHES, _THEIR_STAND_IN)
    held = _HALF_A_PAIR.sub(r"\\ufffd", held.replace(r"\u0000", _ESCAPED_REPLACEMENT))
    return held.replace(_THEIR_STAND_IN, _TWO_BACKSLASHES)
