"""`status/*`: whether the broker is up, how much there is to do, and which models are served."""

from __future__ import annotations

from typing import Annotated, Literal

from apiflask import APIBlueprint
from flask import Response
from pydantic import Field

from horde import __version__
from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import failures
from horde.api.validation import INT32_MAX, Absent, Answer, Query, list_of
from horde.usecases.horde_status import heartbeat, list_models, read_performance

status = APIBlueprint("status", __name__, url_prefix="/api/v2/status", tag="Status")

Count = Annotated[int, Field(ge=0, le=INT32_MAX)]


class HeartbeatAnswer(Answer):
    """`message` is `OK`, or `DOWN` while the database does not answer."""

    message: str
    version: str
    queue: int
    threads: int
    active_count: int
    db_connection: bool


class PerformanceAnswer(Answer):
    """Figures of the whole horde."""

    queued_requests: int
    queued_text_requests: int
    worker_count: int
    text_worker_count: int
    thread_count: int
    text_thread_count: int
    queued_megapixelsteps: int
    past_minute_megapixelsteps: int
    queued_forms: int
    interrogator_count: int
    interrogator_thread_count: int
    queued_tokens: int
    past_minute_tokens: int


class ModelsQuery(Query):
    """Which models to list."""

    type: Literal["text", "image"] = "image"
    min_count: Absent[Count] = None
    max_count: Absent[Count] = None
    model_state: Literal["known", "custom", "all"] = "all"


class ModelAnswer(Answer):
    """A model that is served or waited for; `count` is threads, `eta` is seconds."""

    name: str
    count: int
    performance: float
    queued: float
    jobs: float
    eta: int
    type: str


@status.get("/heartbeat")
@status.output(HeartbeatAnswer)
@status.doc(operation_id="heartbeat")
def read_heartbeat() -> Response:
    """Whether the broker is up

    Always 200 while it is; whether its database is reachable is in the body.
    """
    beat = heartbeat(context())
    return answer(
        {
            "message": "OK" if beat.db_connection else "DOWN",
            "version": __version__,
            "queue": beat.queue,
            "threads": beat.threads,
            "active_count": beat.active_count,
            "db_connection": beat.db_connection,
        }
    )


@status.get("/performance")
@status.output(PerformanceAnswer)
@status.doc(operation_id="read_performance", responses=failures(429))
def performance() -> Response:
    """How much is queued and done"""
    return answer(dict.fromkeys(PerformanceAnswer.model_fields, 0) | read_performance(context()))


@status.get("/models")
@status.input(ModelsQuery, location="query", arg_name="query")
@status.output(list_of(ModelAnswer))
@status.doc(operation_id="list_models", responses={400: "A parameter is not acceptable", **failures(429)})
def models(query: ModelsQuery) -> Response:
    """Which models are served

    Without `type` the image models, as on AI Horde; text models need `type=text`.
    """
    if query.model_state == "known":
        # No reference of models is kept here, so none is known more than another.
        return answer([])
    found = list_models(context(), query.type, min_count=query.min_count, max_count=query.max_count)
    return answer(
        [
            {
                "name": model.name,
                "count": model.count,
                "performance": model.performance,
                "queued": model.queued,
                "jobs": model.jobs,
                "eta": model.eta,
                "type": model.type,
            }
            for model in found
        ]
    )
