"""`workers`: who lends their machines, and what an owner may change about them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from apiflask import APIBlueprint
from flask import Response
from pydantic import Field

from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import failures
from horde.api.errors import InvalidInputError
from horde.api.identity import given_key, no_worker, required_key, worker_id_or_404
from horde.api.validation import Absent, Answer, Body, Query, list_of
from horde.usecases.workers import WorkerView, list_workers, read_worker, read_worker_by_name, update_worker

workers = APIBlueprint("workers", __name__, url_prefix="/api/v2/workers", tag="Workers")

# AI Horde shows these for every worker; a worker for text has none of them.
_OF_IMAGE_WORKERS: dict[str, Any] = {
    "team": {"name": None, "id": None},
    "img2img": False,
    "painting": False,
    "post-processing": False,
    "lora": False,
    "controlnet": False,
    "sdxl_controlnet": False,
}


class WorkersQuery(Query):
    """Which workers to list."""

    # horde-sdk sends an empty one where it means all.
    type: Absent[Literal["image", "text", "chat", "interrogation", ""]] = None
    name: Absent[str] = None


class WorkerAnswer(Answer):
    """A worker. `owner` and `maintenance_message` are shown to its owner and to moderators only; `kinds` where it takes others
    than its type."""

    id: str
    name: str
    type: str
    online: bool
    requests_fulfilled: int
    uncompleted_jobs: int
    kudos_rewards: float
    kudos_details: dict[str, float]
    performance: str
    threads: int
    uptime: int
    maintenance_mode: bool
    info: str | None
    nsfw: bool
    trusted: bool
    flagged: bool
    team: dict[str, str | None]
    bridge_agent: str
    models: list[str]
    max_length: int | None
    max_context_length: int | None
    tokens_generated: float
    img2img: bool
    painting: bool
    post_processing: bool = Field(serialization_alias="post-processing", validation_alias="post-processing")
    lora: bool
    controlnet: bool
    sdxl_controlnet: bool
    kinds: list[str] | None = None
    owner: str | None = None
    maintenance_message: str | None = None


class WorkerChange(Body):
    """What to change; what is left out stays."""

    maintenance: Absent[bool] = None
    maintenance_msg: Absent[Annotated[str, Field(max_length=1000)]] = None
    info: Absent[Annotated[str, Field(max_length=1000)]] = None


class ChangeAnswer(Answer):
    """What was changed."""

    maintenance: bool | None = None
    maintenance_msg: str | None = None
    info: str | None = None


@workers.get("")
@workers.input(WorkersQuery, location="query", arg_name="query")
@workers.output(list_of(WorkerAnswer))
@workers.doc(operation_id="list_workers", responses={400: "A parameter is not acceptable", **failures(401, 429)})
def list_all(query: WorkersQuery) -> Response:
    """Who is online"""
    found = list_workers(context(), query.type or None, name=query.name or None, api_key=given_key())
    return answer([worker_body(worker) for worker in found])


@workers.get("/<worker_id>")
@workers.output(WorkerAnswer)
@workers.doc(operation_id="read_worker", responses=failures(401, 404, 429))
def read(worker_id: str) -> Response:
    """One worker, by its id"""
    return answer(worker_body(read_worker(context(), worker_id_or_404(worker_id), api_key=given_key())))


@workers.get("/name/<any_text:name>")
@workers.output(WorkerAnswer)
@workers.doc(operation_id="read_worker_by_name", responses=failures(401, 404, 429))
def read_by_name(name: str) -> Response:
    """One worker, by its name"""
    if "\x00" in name:
        raise no_worker()
    return answer(worker_body(read_worker_by_name(context(), name, api_key=given_key())))


@workers.put("/<worker_id>")
@workers.input(WorkerChange, arg_name="body")
@workers.output(ChangeAnswer)
@workers.doc(operation_id="update_worker", security="apikey", responses=failures(400, 401, 403, 404, 429))
def change(worker_id: str, body: WorkerChange) -> Response:
    """Change a worker: maintenance on or off, what is said about it

    For its owner and for moderators. Maintenance after too many aborted jobs ends only here.
    """
    key = required_key()
    found = worker_id_or_404(worker_id)
    if not body.model_fields_set:
        raise InvalidInputError({}, message="No worker modification was selected.", rc="NoWorkerModSelected")
    changed = update_worker(
        context(),
        key,
        found,
        maintenance=body.maintenance,
        maintenance_message=body.maintenance_msg,
        info=body.info,
    )
    return answer(changed)


def worker_body(worker: WorkerView) -> dict[str, Any]:
    """A worker on the wire."""
    body: dict[str, Any] = {
        "id": str(worker.id),
        "name": worker.name,
        "type": worker.type,
        "online": worker.online,
        "requests_fulfilled": worker.requests_fulfilled,
        "uncompleted_jobs": worker.uncompleted_jobs,
        "kudos_rewards": worker.kudos_rewards,
        "kudos_details": worker.kudos_details,
        "performance": worker.performance,
        "threads": worker.threads,
        "uptime": worker.uptime,
        "maintenance_mode": worker.maintenance_mode,
        "info": worker.info,
        "nsfw": worker.nsfw,
        "trusted": worker.trusted,
        "flagged": worker.flagged,
        "bridge_agent": worker.bridge_agent,
        "models": worker.models,
        "max_length": worker.max_length,
        "max_context_length": worker.max_context_length,
        "tokens_generated": worker.tokens_generated,
        **_OF_IMAGE_WORKERS,
    }
    if worker.kinds != [worker.type]:
        body["kinds"] = worker.kinds
    if worker.owner is not None:
        body["owner"] = worker.owner
    if worker.maintenance_message is not None:
        body["maintenance_message"] = worker.maintenance_message
    return body
