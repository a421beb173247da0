"""What workers send about chat: a pop for several kinds, and a result with its tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from horde.api.horde_v2.pop_bodies import MOST_KINDS, WorkerPop
from horde.api.horde_v2.text_bodies import TextSubmit
from horde.api.validation import INT32_MAX, WHOLE, Absent, Body, Number, at_most

# More than a body of the largest size has room for beside their text.
MOST_TOKENS = 1 << 17
MOST_ALTERNATIVES = 20

Count = Annotated[int, Field(strict=True, ge=0, le=INT32_MAX), WHOLE]
# Numbers that a program wrote: an integer is one without a fraction, and ten thousands of them are read at once.
TokenId = Annotated[int, Field(strict=True, ge=0, le=INT32_MAX)]
Alternative = Annotated[tuple[TokenId, Number], Field(strict=False)]
TokenLogprobs = Annotated[
    tuple[TokenId, Number, Annotated[list[Alternative], at_most(MOST_ALTERNATIVES)]], Field(strict=False)
]


class ChatPop(WorkerPop):
    """A worker's call for work on chats, or on texts and chats. `progress` is true, and each model has its manifest."""

    kinds: Annotated[list[Literal["text", "chat"]], Field(min_length=1), at_most(MOST_KINDS)] = Field(default=["chat"])


class ChatUsage(Body):
    """Counts of tokens, as the worker has them."""

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    cached_tokens: Count = 0


class ChatSubmit(TextSubmit):
    """What a worker has to say about a chat's job. Text and tokens are the slot's whole output, a prefix included.

    `logprobs` has an entry for each token behind the prefix: its id, its log probability, and the likeliest tokens with theirs.
    """

    # With twenty alternatives to each of its tokens a result has many small lists.
    most_containers: ClassVar[int] = 100_000

    finish_reason: Absent[Literal["stop", "length"]] = None
    token_ids: Absent[Annotated[list[TokenId], at_most(MOST_TOKENS)]] = None
    logprobs: Absent[Annotated[list[TokenLogprobs], at_most(MOST_TOKENS)]] = None
    usage: Absent[ChatUsage] = None
