"""What clients and workers send about text: fields, bounds and defaults of AI Horde's API v2, and our few extras."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from horde.api.horde_v2.pop_bodies import MOST_KINDS, MOST_MODELS, WorkerPop
from horde.api.validation import INT32_MAX, INT64_MAX, WHOLE, Absent, Body, Number, WorkerResult, at_most, first

DEFAULT_MAX_LENGTH = 80
DEFAULT_MAX_CONTEXT_LENGTH = 2048
# Clients name more workers than anybody reads: the first ones count.
MOST_WORKERS = 5
# All stop strings together have at most 2,000 characters, and none is empty.
_MOST_STOPS = 2000
# Twice the longest result that can be asked for.
_MOST_TOKENS = 8192

ModelName = Annotated[str, Field(max_length=255)]
Share = Annotated[Number, Field(ge=0, le=1)]


class TextParams(TypedDict, total=False):
    """Sampling parameters. Validation gives a dict of exactly the documented ones that were given: nothing else may
    reach a worker."""

    n: Annotated[int, Field(strict=True, ge=1, le=20), WHOLE]
    max_length: Annotated[int, Field(strict=True, ge=16, le=4096), WHOLE]
    max_context_length: Annotated[int, Field(strict=True, ge=80, le=1048576), WHOLE]
    temperature: Annotated[Number, Field(ge=0, le=5)]
    top_p: Annotated[Number, Field(ge=0.001, le=1)]
    top_k: Annotated[int, Field(strict=True, ge=0, le=200), WHOLE]
    top_a: Share
    tfs: Share
    typical: Share
    min_p: Share
    rep_pen: Annotated[Number, Field(ge=1, le=3)]
    rep_pen_range: Annotated[int, Field(strict=True, ge=0, le=4096), WHOLE]
    rep_pen_slope: Annotated[Number, Field(ge=0, le=10)]
    smoothing_factor: Annotated[Number, Field(ge=0, le=10)]
    dynatemp_range: Annotated[Number, Field(ge=0, le=5)]
    dynatemp_exponent: Annotated[Number, Field(ge=0, le=5)]
    sampler_order: Annotated[list[Annotated[int, Field(strict=True, ge=0, le=255), WHOLE]], at_most(64)]
    # An empty stop string would match everywhere, so it is refused rather than passed on.
    stop_sequence: Annotated[list[Annotated[str, Field(min_length=1)]], at_most(_MOST_STOPS)]
    use_default_badwordsids: bool
    frmtadsnsp: bool
    frmtrmblln: bool
    frmtrmspch: bool
    frmttriminc: bool
    singleline: bool


class TextRequest(Body):
    """A request for text. Fields that other kinds of request have, and unknown ones, are ignored."""

    prompt: str
    params: TextParams = Field(default_factory=TextParams)
    models: Annotated[list[ModelName], at_most(MOST_MODELS)] = Field(default_factory=list)
    workers: Annotated[list[Annotated[uuid.UUID, Field(strict=False)]], first(MOST_WORKERS)] = Field(
        default_factory=list
    )
    worker_blacklist: bool = False
    trusted_workers: bool = False
    slow_workers: bool = True
    nsfw: bool = True
    dry_run: bool = False
    disable_batching: bool = False
    allow_downgrade: bool = False
    deadline_seconds: Absent[Annotated[Number, Field(ge=1, le=86400)]] = None
    # These change the result or its delivery and cannot be honoured yet: refused, not ignored.
    webhook: Absent[Annotated[str, Field(max_length=1024)]] = None
    style: Absent[Annotated[str, Field(max_length=1024)]] = None
    extra_source_images: Absent[Annotated[list[Any], at_most(1000)]] = None


class TextPop(WorkerPop):
    """A worker's call for work on texts alone."""

    kinds: Annotated[list[Literal["text"]], Field(min_length=1), at_most(MOST_KINDS)] = Field(default=["text"])


class GenerationNote(Body):
    """What a worker notes about a result."""

    type: Literal[
        "lora", "ti", "censorship", "source_image", "source_mask", "extra_source_images", "batch_index", "information"
    ]
    value: Literal["download_failed", "parse_failed", "baseline_mismatch", "csam", "nsfw", "see_ref"]
    ref: Absent[Annotated[str, Field(max_length=255)]] = None


class TextSubmit(WorkerResult):
    """What a worker has to say about a job: its text, or why there is none."""

    id: str
    generation: Absent[str] = None
    state: Literal["ok", "censored", "csam", "faulted", "released", "rejected"] = "ok"
    seed: Annotated[int, Field(strict=True, ge=-INT64_MAX - 1, le=INT64_MAX), WHOLE] = 0
    gen_metadata: Annotated[list[GenerationNote], at_most(50)] = Field(default_factory=list)
    finish_reason: Absent[Annotated[str, Field(max_length=64)]] = None
    token_ids: Absent[
        Annotated[list[Annotated[int, Field(strict=True, ge=0, le=INT32_MAX), WHOLE]], at_most(_MOST_TOKENS)]
    ] = None
    error_code: Absent[Annotated[str, Field(max_length=64)]] = None

    @model_validator(mode="after")
    def _a_result_has_its_text(self) -> TextSubmit:
        if self.generation is None and self.state in {"ok", "censored", "csam"}:
            raise PydanticCustomError("no_generation", "a stored result needs its `generation`")
        return self
