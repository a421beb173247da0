"""What a worker's pop says, whatever kind of work it takes: AI Horde's fields, and our few extras."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from horde.api.validation import INT32_MAX, INT64_MAX, WHOLE, Absent, Body, Number, at_most, first

# Workers offer more models than anybody reads: the first ones count.
MOST_MODELS = 200
MOST_CAPABILITIES = 32
# Two are known; a list that names one twice is no harm.
MOST_KINDS = 8


def _few_enough(value: Any) -> Any:
    """Before any entry is looked at: thousands of bad ones must not cost thousands of messages."""
    if isinstance(value, dict) and len(value) > MOST_MODELS:
        raise PydanticCustomError("too_long", "too many entries", {"max_length": MOST_MODELS})
    return value


ModelName = Annotated[str, Field(min_length=1, max_length=255)]
Revision = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
Size = Annotated[int, Field(strict=True, ge=1, le=INT32_MAX), WHOLE]


class ManifestBody(Body):
    """How a worker serves one of its models: tokens of context and of a block, blocks in its pool, bytes of cache a token."""

    model_revision: Revision
    tokenizer_revision: Revision
    context_length: Size
    block_size: Size
    blocks: Size
    kv_bytes_per_token: Annotated[int, Field(strict=True, ge=0, le=INT64_MAX), WHOLE]
    capabilities: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\x21-\x7e]+$")]], at_most(MOST_CAPABILITIES)
    ] = Field(default_factory=list)


class WorkerPop(Body):
    """A worker's call for work, with what it can do."""

    strip_nul_from: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    models: Annotated[list[ModelName], first(MOST_MODELS)] = Field(default_factory=list)
    max_length: Size = 512
    max_context_length: Size = 2048
    priority_usernames: Annotated[list[Annotated[str, Field(max_length=255)]], at_most(100)] = Field(
        default_factory=list
    )
    nsfw: bool = True
    bridge_agent: Annotated[str, Field(max_length=1000)] = "unknown:0:unknown"
    threads: Annotated[int, Field(strict=True, ge=1, le=50), WHOLE] = 1
    amount: Annotated[int, Field(strict=True, ge=1, le=20), WHOLE] = 1
    wait: Annotated[Number, Field(ge=0, le=25)] = 0.0
    slots: Absent[Annotated[int, Field(strict=True, ge=1, le=50), WHOLE]] = None
    progress: bool = False
    manifests: Annotated[dict[ModelName, ManifestBody], Field(max_length=MOST_MODELS), BeforeValidator(_few_enough)] = (
        Field(default_factory=dict)
    )
