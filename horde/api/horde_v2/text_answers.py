"""What we answer about text: the shapes, and how the results of use cases become them."""

from __future__ import annotations

from typing import Any

from horde.api.horde_v2.text_bodies import DEFAULT_MAX_CONTEXT_LENGTH, DEFAULT_MAX_LENGTH
from horde.api.validation import Answer
from horde.usecases.pop import Popped
from horde.usecases.text import Accepted, TextStatus

# Clients and bridges read these from a payload even where a request left them out, and from the payload of no job.
PAYLOAD_DEFAULTS: dict[str, Any] = {
    "max_context_length": DEFAULT_MAX_CONTEXT_LENGTH,
    "max_length": DEFAULT_MAX_LENGTH,
    "min_p": 0.0,
    "smoothing_factor": 0.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
}


class Notice(Answer):
    """Something a client should know about a request that was accepted."""

    code: str
    message: str


class AcceptedAnswer(Answer):
    """A request that is on disk, or for a dry run only its price."""

    id: str | None = None
    kudos: float
    message: str | None = None
    warnings: list[Notice] | None = None


class Generation(Answer):
    """One result."""

    worker_id: str
    worker_name: str
    model: str
    state: str
    text: str
    seed: int
    gen_metadata: list[dict[str, Any]]


class StatusAnswer(Answer):
    """How far a request is. `cancelled` and `error_code` are there only where they apply."""

    finished: int
    processing: int
    restarted: int
    waiting: int
    done: bool
    faulted: bool
    wait_time: int
    queue_position: int
    kudos: float
    is_possible: bool
    generations: list[Generation]
    cancelled: bool | None = None
    error_code: str | None = None


class PopAnswer(Answer):
    """A job, or the same shape with `id` null. `slot`, `seed` and `jobs` are told to workers that sent `wait`, `slots` or `progress`."""

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
    jobs: list[dict[str, Any]] | None = None


class SubmitAnswer(Answer):
    """What a job earned."""

    reward: float


def accepted_body(accepted: Accepted) -> dict[str, Any]:
    """The 202 of a request, the 200 of a dry run."""
    body: dict[str, Any] = {"kudos": accepted.kudos}
    if accepted.id is not None:
        body["id"] = str(accepted.id)
    if accepted.message:
        body["message"] = accepted.message
    if accepted.warnings:
        body["warnings"] = accepted.warnings
    return body


def status_body(status: TextStatus) -> dict[str, Any]:
    """The status. It never has a `message`: clients take one for a failure."""
    body: dict[str, Any] = {
        "finished": status.finished,
        "processing": status.processing,
        "restarted": status.restarted,
        "waiting": status.waiting,
        "done": status.done,
        "faulted": status.faulted,
        "wait_time": status.wait_time,
        "queue_position": status.queue_position,
        "kudos": status.kudos,
        "is_possible": status.is_possible,
        "generations": [
            {
                "worker_id": str(generation.worker_id),
                "worker_name": generation.worker_name,
                "model": generation.model,
                "state": generation.state,
                "text": generation.text,
                "seed": generation.seed,
                "gen_metadata": generation.gen_metadata,
            }
            for generation in status.generations
        ],
    }
    if status.cancelled:
        body["cancelled"] = True
    if status.error_code:
        body["error_code"] = status.error_code
    return body


def pop_body(popped: Popped, *, native: bool) -> dict[str, Any]:
    """The answer to a pop. AI Horde's fields only, unless the worker showed that it knows ours (`native`)."""
    jobs = [
        {
            "id": str(job.id),
            "kind": job.kind,
            "model": job.model,
            "ttl": job.ttl,
            "payload": {**PAYLOAD_DEFAULTS, **job.payload},
            "slot": job.slot,
            "seed": job.seed,
            "attached": job.attached,
            "cache_salt": job.cache_salt,
        }
        for job in popped.jobs
    ]
    first = jobs[0] if jobs else None
    # They share the one payload, so they are the first request's alone.
    ids = [str(job.id) for job in popped.jobs if job.request_id == popped.jobs[0].request_id]
    body: dict[str, Any] = {
        "payload": first["payload"] if first else PAYLOAD_DEFAULTS,
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
