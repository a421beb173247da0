"""What is published of models and tokenizers, on the wire."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from horde.api.validation import INT32_MAX, INT64_MAX, WHOLE, Absent, Answer, Body, LateBody, at_most

MOST_CAPABILITIES = 32
MOST_PROBE_TOKENS, LONGEST_PROBE = 4096, 16_384

Tokens = Annotated[list[Annotated[int, Field(strict=True, ge=0, le=INT32_MAX), WHOLE]], at_most(MOST_PROBE_TOKENS)]
RevisionName = Annotated[str, Field(min_length=1, max_length=128, pattern="^[\\x21-\\x7e]+$")]


class Probe(TypedDict):
    """A fixed prompt, and what a model makes of it without chance: by it two copies of a model can be told apart."""

    prompt: Annotated[str, Field(max_length=LONGEST_PROBE)]
    token_ids: Tokens
    output_token_ids: Tokens


class RevisionBody(Body):
    """A revision of a model: what is the same wherever it is served. Lengths are tokens."""

    context_length: Annotated[int, Field(strict=True, ge=1, le=INT32_MAX), WHOLE]
    block_size: Annotated[int, Field(strict=True, ge=1, le=INT32_MAX), WHOLE]
    kv_bytes_per_token: Annotated[int, Field(strict=True, ge=0, le=INT64_MAX), WHOLE]
    tokenizer_revision: RevisionName
    capabilities: Annotated[list[RevisionName], at_most(MOST_CAPABILITIES)] = Field(default_factory=list)
    probe: Absent[Probe] = None


class RevisionAnswer(Answer):
    """A published revision."""

    model: str
    revision: str
    tokenizer_revision: str
    context_length: int
    block_size: int
    kv_bytes_per_token: int
    capabilities: list[str]
    probe: dict[str, Any] | None


class PublishedModelAnswer(Answer):
    """A model and its published revisions, the newest first."""

    name: str
    revisions: list[RevisionAnswer]


class TokenizerBody(LateBody):
    """A tokenizer with its chat template. Its revision is the SHA-256 of its canonical form: these three fields as JSON of
    ASCII characters, keys sorted, without spaces."""

    tokenizer: dict[str, Any] = Field(description="the content of a `tokenizer.json`")
    chat_template: str | None = None
    special_tokens: dict[str, str] = Field(
        default_factory=dict, description="what the template may name: `bos_token` and the like"
    )


class TokenizerAnswer(Answer):
    """What was stored."""

    revision: str
