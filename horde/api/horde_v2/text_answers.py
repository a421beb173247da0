"""What we answer about text: the shapes, and how the results of use cases become them."""

from __future__ import annotations

from typing import Any

from horde.api.validation import Answer
from horde.usecases.chat import ChatStatus
from horde.usecases.text import Accepted, TextStatus


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


class RequestState(Answer):
    """How far a request of any kind is. `cancelled` and `error_code` are there only where they apply."""

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
    cancelled: bool | None = None
    error_code: str | None = None


class StatusAnswer(RequestState):
    """How far a text is."""

    generations: list[Generation]


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


def state_fields(status: TextStatus | ChatStatus) -> dict[str, Any]:
    """What the status of every kind says. It never has a `message`: clients take one for a failure."""
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
    }
    if status.cancelled:
        body["cancelled"] = True
    if status.error_code:
        body["error_code"] = status.error_code
    return body


def status_body(status: TextStatus) -> dict[str, Any]:
    """The status of a text."""
    generations = [
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
    ]
    return {**state_fields(status), "generations": generations}
