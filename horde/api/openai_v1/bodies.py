"""What clients send to `/v1`: OpenAI's fields with this horde's bounds, and our few extras.

OpenAI's SDKs write null for what is not set, so null means absent here. Unknown fields are ignored, unless they would
change the answer: see `horde.api.openai_v1.unsupported`.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from horde.api.chat_fields import (
    LONGEST_DEADLINE,
    MOST_CHOICES,
    MOST_TOP_LOGPROBS,
    Biases,
    Count,
    ModelRevision,
    Penalty,
    RepetitionPenalty,
    Seed,
    Share,
    Stops,
    TopK,
    TopP,
)
from horde.api.chat_messages import Messages
from horde.api.openai_v1.unsupported import refuse_unsupported
from horde.api.validation import INT32_MAX, WHOLE, Body, Number, first
from horde.errors import ErrorCode, HordeError

MOST_TOP_LOGPROBS_OF_COMPLETIONS = 5
MOST_WORKERS = 5

Item = TypeVar("Item")


class _OrNull:
    """Shows null in the API's description, which elsewhere means "may be left out"."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [handler(schema), {"type": "null"}]}


# A field that may be left out or null, and is None then.
Maybe = Annotated[Item | None, _OrNull()]


def _read_prompt(given: Any) -> Any:
    """A text or a list of token ids; of a list of prompts there may be only one."""
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > 1:
            raise HordeError(
                ErrorCode.UNSUPPORTED_PARAMETER,
                "`prompt`: several prompts in one call are not supported here; send a call for each.",
                rc="BadRequest",
                errors={"prompt": "several prompts are not supported"},
            )
        given = given[0]
    if not isinstance(given, str | list):
        raise PydanticCustomError("prompt", "has to be a string, a list with one string, or a list of token ids")
    if not given:
        raise PydanticCustomError("prompt", "is empty")
    if isinstance(given, str):
        return given
    ids = [int(item) if type(item) is float and item.is_integer() else item for item in given]
    if not all(type(item) is int and 0 <= item <= INT32_MAX for item in ids):
        raise PydanticCustomError("prompt", "token ids have to be integers from 0")
    return ids


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}}
_TEXT = {"type": "string", "minLength": 1}
Prompt = Annotated[
    str | list[int],
    BeforeValidator(_read_prompt),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "minItems": 1, "maxItems": 1, "items": _TEXT}, _IDS]}),
]


class StreamOptions(BaseModel):
    """How to stream; other options of other servers are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: Maybe[bool] = None


class Order(Body):
    """What both kinds of completion have in common.

    `max_completion_tokens` counts where both it and `max_tokens` are given.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(min_length=1, max_length=255)]
    max_tokens: Maybe[Count] = None
    max_completion_tokens: Maybe[Count] = None
    temperature: Maybe[Annotated[Number, Field(ge=0, le=2)]] = None
    top_p: Maybe[TopP] = None
    top_k: Maybe[TopK] = None
    min_p: Maybe[Share] = None
    frequency_penalty: Maybe[Penalty] = None
    presence_penalty: Maybe[Penalty] = None
    repetition_penalty: Maybe[RepetitionPenalty] = None
    logit_bias: Maybe[Biases] = None
    seed: Maybe[Seed] = None
    stop: Maybe[Stops] = None
    n: Maybe[Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES), WHOLE]] = None
    stream: Maybe[bool] = None
    stream_options: Maybe[StreamOptions] = None
    # Ours.
    model_revision: Maybe[ModelRevision] = None
    deadline_seconds: Maybe[Annotated[Number, Field(ge=1, le=LONGEST_DEADLINE)]] = None
    trusted_workers: Maybe[bool] = None
    workers: Maybe[Annotated[list[Annotated[uuid.UUID, Field(strict=False)]], first(MOST_WORKERS)]] = None

    @model_validator(mode="after")
    def _nothing_unsupported(self) -> Order:
        refuse_unsupported(self.model_extra or {})
        return self

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the answer at most; None: what fits."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionRequest(Order):
    """A chat to be continued by the assistant."""

    model_config = ConfigDict(json_schema_extra={"required": ["messages", "model"]})

    # Missing messages are refused by what reads them, before anything else of the body is.
    messages: Messages = Field(default=None)  # type: ignore[arg-type]
    logprobs: Maybe[bool] = None
    top_logprobs: Maybe[Annotated[int, Field(strict=True, ge=0, le=MOST_TOP_LOGPROBS), WHOLE]] = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise HordeError(
                ErrorCode.INVALID_REQUEST,
                "`top_logprobs` is only told where `logprobs` is true.",
                rc="BadRequest",
                errors={"top_logprobs": "needs `logprobs` to be true"},
            )
        return self


class CompletionRequest(Order):
    """A text to be continued as it is."""

    prompt: Prompt
    logprobs: Maybe[Annotated[int, Field(strict=True, ge=0, le=MOST_TOP_LOGPROBS_OF_COMPLETIONS), WHOLE]] = None
