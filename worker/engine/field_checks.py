"""Whether each field of a request is of the type that it is declared as; what its value means is for the intake.

A caller may hold anything: what came out of JSON, a number with an absurd count of digits, a string in place of a list
of strings. Such a request would fail somewhere within a step, beside others. Here it is refused by the field's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from worker.engine.interface import GenerationRequest, RequestRefusedError, SamplerStep, Sampling

# More than any length in tokens, or any count of them.
LARGEST_COUNT = 2**31 - 1
# What an int64 holds: times in nanoseconds do as priorities.
_LARGEST_PRIORITY = 2**63 - 1

_COUNTS = ("max_new_tokens", "n")
_OPTIONAL_COUNTS = ("max_context", "logprobs")
_SAMPLING_COUNTS = ("top_k", "repetition_range", "min_tokens")
_NUMBERS = (
    "temperature", "top_p", "min_p", "top_a", "tail_free", "typical", "repetition_penalty", "repetition_slope",
    "frequency_penalty", "presence_penalty", "smoothing_factor", "dynatemp_range", "dynatemp_exponent",
)  # fmt: skip
_FLAGS = ("ban_eos", "ignore_eos")
_BYTES = (bytes, bytearray, memoryview)


def refused(message: str) -> RequestRefusedError:
    """The refusal of a request that makes no sense."""
    return RequestRefusedError("invalid_request", message)


def check_types(request: GenerationRequest) -> None:
    """See that every field holds what its declaration says, and that no number is too large to compute with.

    Ids are ints here, of any size; whether they are in the vocabulary is another question.

    Raises:
        RequestRefusedError: one does not; the message names it.
    """
    _check_strings("id", [request.id])
    _check_strings("cache_salt", [request.cache_salt])
    if not isinstance(request.prompt, str):
        _check_integers("prompt", _items("prompt", request.prompt, Sequence))
    for name in _COUNTS:
        _check_integer(name, getattr(request, name), LARGEST_COUNT)
    for name in _OPTIONAL_COUNTS:
        if getattr(request, name) is not None:
            _check_integer(name, getattr(request, name), LARGEST_COUNT)
    _check_integer("seed", request.seed, None)
    _check_integer("priority", request.priority, _LARGEST_PRIORITY)
    _check_strings("stop", _items("stop", request.stop))
    for name in ("stop_token_ids", "prefix"):
        _check_integers(name, _items(name, getattr(request, name)))
    if not isinstance(request.sampling, Sampling):
        raise refused("sampling is no Sampling")
    _check_sampling(request.sampling)


def _check_sampling(sampling: Sampling) -> None:
    for name in _SAMPLING_COUNTS:
        _check_integer(name, getattr(sampling, name), LARGEST_COUNT)
    for name in _NUMBERS:
        _check_number(name, getattr(sampling, name))
    for name in _FLAGS:
        if not isinstance(getattr(sampling, name), bool):
            raise refused(f"{name} is neither true nor false")
    _check_integers("banned_tokens", _items("banned_tokens", sampling.banned_tokens))
    for pair in _items("logit_bias", sampling.logit_bias):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise refused("logit_bias holds something that is no pair of a token and a number")
        _check_integers("logit_bias", pair[:1])
        _check_number("logit_bias", pair[1])
    if not all(isinstance(step, SamplerStep) for step in _items("order", sampling.order)):
        raise refused("order holds something that is no SamplerStep")
    if sampling.constraint is not None and not callable(getattr(sampling.constraint, "allowed", None)):
        raise refused("constraint has no method `allowed`")


def _items(name: str, value: Any, kind: Any = (tuple, list)) -> Sequence[Any]:
    if not isinstance(value, kind) or isinstance(value, (str, *_BYTES)):
        raise refused(f"{name} is not a sequence")
    items: Sequence[Any] = value
    return items


def _check_strings(name: str, values: Iterable[Any]) -> None:
    if not all(isinstance(value, str) for value in values):
        raise refused(f"{name} is not text, or holds something that is not")


def _check_integers(name: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise refused(f"{name} holds a {type(value).__name__}, which is no token id")


def _check_integer(name: str, value: Any, largest: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(f"{name} is not an integer")
    if largest is not None and abs(value) > largest:
        raise refused(f"{name} is too large a number")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(f"{name} is not a number")
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False  # an integer beyond all floats
    if not finite:
        raise refused(f"{name} is, or holds, what is not a finite number")
