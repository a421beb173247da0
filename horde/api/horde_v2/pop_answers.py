"""What a worker that asks for work is told: the shapes, and how the result of the use case becomes them."""

from __future__ import annotations

from typing import Any

from horde.api.horde_v2.text_bodies import DEFAULT_MAX_CONTEXT_LENGTH, DEFAULT_MAX_LENGTH
from horde.api.validation import Answer
from horde.usecases.hand_out import PoppedJob
from horde.usecases.pop import Popped

# Clients and bridges read these from a text's payload even where its request left them out, and from the payload of no job.
PAYLOAD_DEFAULTS: dict[str, Any] = {
    "max_context_length": DEFAULT_MAX_CONTEXT_LENGTH,
    "max_length": DEFAULT_MAX_LENGTH,
    "min_p": 0.0,
    "smoothing_factor": 0.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
}


class JobEntry(Answer):
    """A job. `ttl` and `deadline` are seconds from now; what has a prefix is gone on with behind it."""

    id: str
    kind: str
    model: str
    model_revision: str | None
    tokenizer_revision: str | None
    slot: int
    seed: int
    ttl: int
    payload: dict[str, Any]
    attached: bool
    deadline: float | None
    cache_salt: str
    prefix_token_ids: list[int]
    prefix_text: str


class PopAnswer(Answer):
    """A job, or the same shape with `id` null. `slot`, `seed` and `jobs` are told to workers that sent a field of ours."""

    payload: dict[str, Any]
    id: str | None
    ids: list[str]
    model: str | None
    ttl: int | None
    softprompt: None
    messages: list[dict[str, Any]]
    extra_source_images: None
    skipped: dict[str, int]
    slot: int | None = None
    seed: int | None = None
    jobs: list[JobEntry] | None = None


def pop_body(popped: Popped, *, native: bool, no_payload: dict[str, Any]) -> dict[str, Any]:
    """The answer to a pop.

    Args:
        native: whether the worker showed that it knows our fields; others get AI Horde's only.
        no_payload: what stands for the payload of no job.
    """
    jobs = [_entry(job) for job in popped.jobs]
    first = jobs[0] if jobs else None
    # They share the one payload, so they are the first request's alone.
    ids = [str(job.id) for job in popped.jobs if job.request_id == popped.jobs[0].request_id]
    body: dict[str, Any] = {
        "payload": first["payload"] if first else no_payload,
        "id": first["id"] if first else None,
        "ids": ids,
        "model": first["model"] if first else None,
        "ttl": first["ttl"] if first else None,
        "softprompt": None,
        "messages": popped.messages,
        "extra_source_images": None,
        "skipped": popped.skipped,
    }
    if native and first:
        body |= {"slot": first["slot"], "seed": first["seed"], "jobs": jobs}
    return body


def _entry(job: PoppedJob) -> dict[str, Any]:
    return {
        "id": str(job.id),
        "kind": job.kind,
        "model": job.model,
        "model_revision": job.model_revision,
        "tokenizer_revision": job.tokenizer_revision,
        "slot": job.slot,
        "seed": job.seed,
        "ttl": job.ttl,
        "payload": {**PAYLOAD_DEFAULTS, **job.payload} if job.kind == "text" else job.payload,
        "attached": job.attached,
        "deadline": job.deadline,
        "cache_salt": job.cache_salt,
        "prefix_token_ids": job.prefix_token_ids,
        "prefix_text": job.prefix_text,
    }
