"""Fields of a chat's body that both doors have, with their bounds: sampling, stops, biases."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from horde.api.validation import INT32_MAX, INT64_MAX, WHOLE, Number

MOST_CHOICES = 16
MOST_STOPS, LONGEST_STOP = 16, 256
MOST_BIASES, STRONGEST_BIAS = 1024, 100
MOST_TOP_LOGPROBS = 20
LONGEST_DEADLINE = 86400
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")

Count = Annotated[int, Field(strict=True, ge=1, le=INT32_MAX), WHOLE]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[Number, Field(gt=0, le=10)]
Share = Annotated[Number, Field(ge=0, le=1)]
TopP = Annotated[Number, Field(gt=0, le=1)]
TopK = Annotated[int, Field(strict=True, ge=0, le=INT32_MAX), WHOLE]
Seed = Annotated[int, Field(strict=True, ge=-INT64_MAX - 1, le=INT64_MAX), WHOLE]
ModelRevision = Annotated[str, Field(min_length=1, max_length=128)]


def _read_stop(given: Any) -> Any:
    """One string or a list of them, as a list; empty for none."""
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list):
        raise PydanticCustomError("stop", "has to be a string or a list of strings")
    if len(stops) > MOST_STOPS:
        raise PydanticCustomError("stop", "has more than {most} strings", {"most": MOST_STOPS})
    for stop in stops:
        # An empty one would match everywhere.
        if not isinstance(stop, str) or not 1 <= len(stop) <= LONGEST_STOP:
            raise PydanticCustomError(
                "stop", "each has to be a string of 1 to {most} characters", {"most": LONGEST_STOP}
            )
    return stops


def _read_bias(given: Any) -> Any:
    """Token ids and what is added to their logits. By hand: the first fault ends it, however many entries follow."""
    if not isinstance(given, dict):
        raise PydanticCustomError("bias", "has to be an object of token ids and numbers")
    if len(given) > MOST_BIASES:
        raise PydanticCustomError("bias", "has more than {most} entries", {"most": MOST_BIASES})
    for token, bias in given.items():
        if not _TOKEN_ID.fullmatch(token) or int(token) > INT32_MAX:
            raise PydanticCustomError("bias", "names something that is no token id, like `50256`")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= STRONGEST_BIAS:
            raise PydanticCustomError(
                "bias", "each value has to be a number from -{most} to {most}", {"most": STRONGEST_BIAS}
            )
    return {token: float(bias) for token, bias in given.items()}


_STOP = {"type": "string", "minLength": 1, "maxLength": LONGEST_STOP}
Stops = Annotated[
    list[str],
    BeforeValidator(_read_stop),
    WithJsonSchema({"anyOf": [_STOP, {"type": "array", "maxItems": MOST_STOPS, "items": _STOP}]}),
]
Biases = Annotated[
    dict[str, float],
    BeforeValidator(_read_bias),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MOST_BIASES,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
            "additionalProperties": {"type": "number", "minimum": -STRONGEST_BIAS, "maximum": STRONGEST_BIAS},
        }
    ),
]
