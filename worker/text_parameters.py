"""AI Horde's text parameters, read into what an engine understands; docs/reference/text-parameters.md is the table."""

from __future__ import annotations

import math
from typing import Any

from worker.engine.interface import GenerationRequest, SamplerStep, Sampling
from worker.formatting import OutputFormat

# What an absent length means on the wire.
DEFAULT_MAX_LENGTH = 80
DEFAULT_MAX_CONTEXT_LENGTH = 2048

# No length and no count is anywhere near it.
_LARGEST_INTEGER = 2**31

# Positions are the numbers clients send in `sampler_order`.
_STEP_NUMBERS = (
    SamplerStep.TOP_K,
    SamplerStep.TOP_A,
    SamplerStep.TOP_P,
    SamplerStep.TAIL_FREE,
    SamplerStep.TYPICAL,
    SamplerStep.TEMPERATURE,
    SamplerStep.REPETITION,
)
_USUAL_ORDER = (6, 0, 1, 3, 4, 2, 5)


class BadPayloadError(Exception):
    """A job's payload cannot be read; the message names the field."""


def read_request(job_id: str, payload: dict[str, Any], seed: int, *, cache_salt: str = "") -> GenerationRequest:
    """The engine's request for a pop's `payload`; `cache_salt` keeps what tenants compute apart.

    Raises:
        BadPayloadError: a field has a wrong type or a senseless value.
    """
    prompt = payload.get("prompt")
    if not isinstance(prompt, str):
        raise BadPayloadError("prompt is not a string")
    max_length = _integer(payload, "max_length", DEFAULT_MAX_LENGTH)
    if max_length < 1:
        raise BadPayloadError("max_length is less than 1")
    return GenerationRequest(
        id=job_id,
        prompt=prompt,
        max_new_tokens=max_length,
        seed=seed,
        stop=_stop_strings(payload),
        max_context=_integer(payload, "max_context_length", DEFAULT_MAX_CONTEXT_LENGTH),
        cache_salt=cache_salt,
        sampling=_sampling(payload),
    )


def finite_number(value: Any, field: str) -> float:
    """The value of a field as a number.

    Raises:
        BadPayloadError: it is none, or is not finite.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadPayloadError(f"{field} is not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise BadPayloadError(f"{field} is too large a number") from error
    if not math.isfinite(number):
        raise BadPayloadError(f"{field} is not a finite number")
    return number


def read_format(payload: dict[str, Any]) -> OutputFormat:
    """The formatting flags of a pop's `payload`.

    Raises:
        BadPayloadError: a flag is not a boolean.
    """
    return OutputFormat(
        trim_incomplete_sentence=_flag(payload, "frmttriminc"),
        remove_blank_lines=_flag(payload, "frmtrmblln"),
        remove_special_characters=_flag(payload, "frmtrmspch"),
    )


def _sampling(payload: dict[str, Any]) -> Sampling:
    return Sampling(
        temperature=_number(payload, "temperature", 1.0),
        top_k=_integer(payload, "top_k", 0),
        top_p=_number(payload, "top_p", 1.0),
        min_p=_number(payload, "min_p", 0.0),
        top_a=_number(payload, "top_a", 0.0),
        tail_free=_number(payload, "tfs", 1.0),
        typical=_number(payload, "typical", 1.0),
        repetition_penalty=_number(payload, "rep_pen", 1.0),
        repetition_range=_integer(payload, "rep_pen_range", 0),
        repetition_slope=_number(payload, "rep_pen_slope", 0.0),
        smoothing_factor=_number(payload, "smoothing_factor", 0.0),
        dynatemp_range=_number(payload, "dynatemp_range", 0.0),
        dynatemp_exponent=_number(payload, "dynatemp_exponent", 1.0),
        ban_eos=_flag(payload, "use_default_badwordsids"),
        order=_order(payload),
    )


def _order(payload: dict[str, Any]) -> tuple[SamplerStep, ...]:
    """The wished order; unknown and repeated numbers are skipped, missing ones follow in the usual order."""
    wished = payload.get("sampler_order") or []
    if not isinstance(wished, list):
        raise BadPayloadError("sampler_order is not a list")
    known = [n for n in wished if isinstance(n, int) and 0 <= n < len(_STEP_NUMBERS)]
    return tuple(_STEP_NUMBERS[n] for n in dict.fromkeys([*known, *_USUAL_ORDER]))


def _stop_strings(payload: dict[str, Any]) -> tuple[str, ...]:
    stop = payload.get("stop_sequence") or []
    if not isinstance(stop, list) or not all(isinstance(s, str) for s in stop):
        raise BadPayloadError("stop_sequence is not a list of strings")
    # Everything after the first line is unwanted, so it need not be made.
    single_line = ["\n"] if _flag(payload, "singleline") else []
    return tuple(s for s in [*stop, *single_line] if s)


def _number(payload: dict[str, Any], field: str, default: float) -> float:
    value = payload.get(field)
    return default if value is None else finite_number(value, field)


def _integer(payload: dict[str, Any], field: str, default: int) -> int:
    value = _number(payload, field, default)
    if abs(value) > _LARGEST_INTEGER:
        raise BadPayloadError(f"{field} is too large a number")
    if value != int(value):
        raise BadPayloadError(f"{field} is not an integer")
    return int(value)


def _flag(payload: dict[str, Any], field: str) -> bool:
    value = payload.get(field, False)
    if value is not None and not isinstance(value, bool):
        raise BadPayloadError(f"{field} is not a boolean")
    return bool(value)
