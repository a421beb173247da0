"""`generate/progress`: workers say how far their jobs are, and hear which of them nobody wants any more."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from apiflask import APIBlueprint
from flask import Response
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import failures
from horde.api.horde_v2.chat_work_bodies import MOST_TOKENS, Count, TokenId, TokenLogprobs
from horde.api.identity import required_key
from horde.api.validation import Absent, Answer, Body, Number, WorkerResult, at_most
from horde.usecases.progress import Chunk, Progressed, post_progress

MOST_JOBS = 200

Milliseconds = Annotated[Number, Field(ge=0)]

progress = APIBlueprint("progress", __name__, url_prefix="/api/v2/generate", tag="Text")


class JobProgress(Body):
    """One job: what is new of its output, counted from its slot's first token, and what the worker does with it.

    `text` is all that is shown of `token_ids`; `logprobs`, where the order asked for them, has an entry for each of them: its
    id, its log probability, and the likeliest tokens with theirs. What follows `logprobs` is checked, and kept nowhere yet.
    """

    id: Annotated[uuid.UUID, Field(strict=False)]
    state: Literal["queued", "started", "prefill", "decode"]
    offset: Count = 0
    token_ids: Annotated[list[TokenId], at_most(MOST_TOKENS)] = Field(default_factory=list)
    text: str = ""
    text_offset: Count = 0
    logprobs: Absent[Annotated[list[TokenLogprobs], at_most(MOST_TOKENS)]] = None
    prefill_ms: Absent[Milliseconds] = None
    decode_ms: Absent[Milliseconds] = None
    batch: Absent[Count] = None
    preemptions: Absent[Count] = None

    @field_validator("logprobs")
    @classmethod
    def _one_a_token(cls, logprobs: list[Any] | None, info: ValidationInfo) -> list[Any] | None:
        if logprobs is not None and [entry[0] for entry in logprobs] != info.data.get("token_ids"):
            raise PydanticCustomError("not_aligned", "there has to be one entry for each of `token_ids`, of that token")
        return logprobs


class ProgressPost(WorkerResult):
    """What a worker posts: every job it holds, running or waiting in it. With `leaving` it is offline until its next pop."""

    # With twenty alternatives to each token there are many small lists.
    most_containers: ClassVar[int] = 100_000

    worker: str
    jobs: Annotated[list[JobProgress], at_most(MOST_JOBS)]
    leaving: bool = False


class JobAnswer(Answer):
    """One job that goes on; `ttl` is what is left of its lease, in seconds."""

    id: str
    accepted: int
    ttl: int


class StopAnswer(Answer):
    """One job that nobody wants any more."""

    id: str
    reason: Literal["cancelled", "voided", "stale", "rejected"]


class ProgressAnswer(Answer):
    """Each job that was named, under `jobs` or under `stop`."""

    jobs: list[JobAnswer]
    stop: list[StopAnswer]


@progress.post("/progress")
@progress.input(ProgressPost, arg_name="body")
@progress.output(ProgressAnswer)
@progress.doc(operation_id="post_progress", security="apikey", responses=failures(400, 401, 403, 429))
def post(body: ProgressPost) -> Response:
    """Say how far jobs are, as their worker

    A post keeps the leases of the jobs that it names alive, for a worker that popped with `progress`; `ttl` tells what
    is left of each. Tokens and text are kept from where the broker is, so repeats are harmless; `accepted` tells how many
    tokens it holds. What is under `stop` is not this worker's any more.
    """
    chunks = [
        Chunk(
            job.id,
            offset=job.offset,
            token_ids=job.token_ids,
            text=job.text,
            text_offset=job.text_offset,
            logprobs=job.logprobs,
        )
        for job in body.jobs
    ]
    return answer(progress_body(post_progress(context(), required_key(), body.worker, chunks, leaving=body.leaving)))


def progress_body(answers: Sequence[Progressed]) -> dict[str, Any]:
    """The answer to a post."""
    return {
        "jobs": [
            {"id": str(job.job_id), "accepted": job.accepted, "ttl": job.ttl} for job in answers if job.stop is None
        ],
        "stop": [{"id": str(job.job_id), "reason": job.stop} for job in answers if job.stop is not None],
    }
