"""What clients send to `generate/chat/async`: a chat and how to continue it, in the manner of AI Horde's API v2.

Unknown fields are ignored, as everywhere on this side. What would change the answer and is not served is refused by name.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator
from typing_extensions import TypedDict

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
from horde.api.horde_v2.pop_bodies import MOST_MODELS
from horde.api.horde_v2.text_bodies import MOST_WORKERS
from horde.api.validation import WHOLE, Absent, Body, Number, at_most, first
from horde.errors import ErrorCode, HordeError, bad_request

# Field -> the values that ask for nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "webhook": (),
}
ModelName = Annotated[str, Field(min_length=1, max_length=255)]


class ChatParams(TypedDict, total=False):
    """How to continue. What is left out is up to the model's defaults; `max_tokens` then is what fits, within 1,024."""

    max_tokens: Count
    n: Annotated[int, Field(strict=True, ge=1, le=MOST_CHOICES), WHOLE]
    temperature: Annotated[Number, Field(ge=0, le=5)]
    top_p: TopP
    top_k: TopK
    min_p: Share
    frequency_penalty: Penalty
    presence_penalty: Penalty
    repetition_penalty: RepetitionPenalty
    logit_bias: Biases
    seed: Seed
    stop: Stops
    logprobs: bool
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_TOP_LOGPROBS), WHOLE]


class ChatRequest(Body):
    """A chat to be continued: by one model, or by whichever of several is served first in their order."""

    model_config = ConfigDict(
        json_schema_extra={
            "required": ["messages"],
            "oneOf": [{"required": ["model"]}, {"required": ["models"]}],
        }
    )

    # Missing messages are refused by what reads them, before anything else of the body is.
    messages: Messages = Field(default=None)  # type: ignore[arg-type]
    model: Absent[ModelName] = None
    models: Absent[Annotated[list[ModelName], Field(min_length=1), at_most(MOST_MODELS)]] = None
    model_revision: Absent[ModelRevision] = None
    params: ChatParams = Field(default_factory=ChatParams)
    deadline_seconds: Absent[Annotated[Number, Field(ge=1, le=LONGEST_DEADLINE)]] = None
    workers: Annotated[list[Annotated[uuid.UUID, Field(strict=False)]], first(MOST_WORKERS)] = Field(
        default_factory=list
    )
    worker_blacklist: bool = False
    trusted_workers: bool = False
    slow_workers: bool = True
    dry_run: bool = False
    tools: Any = None
    tool_choice: Any = None
    response_format: Any = None
    webhook: Any = None

    @model_validator(mode="after")
    def _can_be_served(self) -> ChatRequest:
        for field, harmless in _NOT_SERVED.items():
            given = getattr(self, field)
            if given is not None and given not in harmless:
                raise HordeError(
                    ErrorCode.UNSUPPORTED_PARAMETER,
                    f"`{field}` is not supported for chat on this horde.",
                    rc="BadRequest",
                    errors={field: "not supported"},
                )
        if self.params.get("top_logprobs") and not self.params.get("logprobs"):
            raise bad_request("`top_logprobs` is only told where `logprobs` is true.", field="params.top_logprobs")
        if (self.model is None) == (self.models is None):
            said = "Name either `model` or `models`."
            raise bad_request(said, field="model" if self.model is None else "models")
        return self

    @property
    def any_of(self) -> list[str]:
        """The models of which any will do."""
        return [self.model] if self.model is not None else list(dict.fromkeys(self.models or []))
