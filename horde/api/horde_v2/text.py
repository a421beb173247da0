"""`generate/text/*`: ask, look, cancel; and for workers pop and submit."""

from __future__ import annotations

from typing import cast

from apiflask import APIBlueprint
from flask import Response

from horde.api.address import client_address
from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import failures
from horde.api.horde_v2.pop_answers import PAYLOAD_DEFAULTS, PopAnswer, pop_body
from horde.api.horde_v2.text_answers import (
    AcceptedAnswer,
    StatusAnswer,
    SubmitAnswer,
    accepted_body,
    status_body,
)
from horde.api.horde_v2.text_bodies import (
    DEFAULT_MAX_CONTEXT_LENGTH,
    DEFAULT_MAX_LENGTH,
    TextPop,
    TextRequest,
    TextSubmit,
)
from horde.api.horde_v2.work import popped_for, submission_of
from horde.api.identity import body_hash, client_agent, idempotency_key, request_id_or_404, required_key
from horde.errors import ErrorCode, HordeError, not_found
from horde.usecases.submit import submit as submit_result
from horde.usecases.text import TextOrder, cancel_text, read_text_status, request_text

# Who sends one of these in a pop knows our answer.
OUR_FIELDS = frozenset({"wait", "slots", "progress", "kinds", "manifests"})

text = APIBlueprint("text", __name__, url_prefix="/api/v2/generate/text", tag="Text")


@text.post("/async")
@text.input(TextRequest, arg_name="body")
@text.output(AcceptedAnswer, status_code=202, description="The request is on disk and waits for a worker")
@text.doc(
    operation_id="request_text",
    security="apikey",
    responses={200: "The price, for a dry run", **failures(400, 401, 403, 404, 422, 429)},
)
def ask(body: TextRequest) -> Response:
    """Ask for text

    Any key may ask, the anonymous one `0000000000` too. Poll the status with the `id` of the answer. With a header
    `Idempotency-Key` a repeat with the same body gives the same request.
    """
    key, order = required_key(), _order(body)
    accepted = request_text(context(), key, order)
    return answer(accepted_body(accepted), 200 if body.dry_run else 202)


@text.get("/status/<request_id>")
@text.output(StatusAnswer)
@text.doc(operation_id="read_text_status", responses=failures(404, 429))
def read_status(request_id: str) -> Response:
    """How far a request is, and its results so far

    No key: who knows the id may look. Nothing arrives any more once `done` is true.
    """
    return answer(status_body(read_text_status(context(), request_id_or_404(request_id))))


@text.delete("/status/<request_id>")
@text.output(StatusAnswer)
@text.doc(operation_id="cancel_text", responses=failures(404, 429))
def cancel(request_id: str) -> Response:
    """Cancel a request

    What waits is dropped, what runs is finished and shown. Answers the status after the cancel.
    """
    return answer(status_body(cancel_text(context(), request_id_or_404(request_id))))


@text.post("/pop")
@text.input(TextPop, arg_name="body")
@text.output(PopAnswer, description="A job, or the same shape with `id` null when there is none")
@text.doc(operation_id="pop_text", security="apikey", responses=failures(400, 401, 403, 429))
def pop(body: TextPop) -> Response:
    """Ask for a job, as a worker

    The first call makes the worker. With `wait` the answer may take that many seconds. With `slots` it holds up to
    that many jobs, of several requests. With `progress` the worker promises to post progress. With a header
    `Idempotency-Key` a repeat gives the same jobs again, so that a lost answer loses nothing.
    """
    popped = popped_for(body, body.kinds)
    native = not body.model_fields_set.isdisjoint(OUR_FIELDS)
    return answer(pop_body(popped, native=native, no_payload=PAYLOAD_DEFAULTS))


@text.post("/submit")
@text.input(TextSubmit, arg_name="body")
@text.output(SubmitAnswer)
@text.doc(operation_id="submit_text", security="apikey", responses=failures(400, 401, 403, 404, 429))
def submit(body: TextSubmit) -> Response:
    """Hand in the result of a job, or give it up

    `ok`, `censored` and `csam` store the text; `faulted` puts the job back or ends the request; `released` hands it
    back without blame; `rejected` says that the request itself cannot be served, with `error_code`.
    """
    key = required_key()
    submission = submission_of(body)
    return answer({"reward": submit_result(context(), key, submission)})


def _order(body: TextRequest) -> TextOrder:
    _refuse_unsupported(body)
    key = idempotency_key()
    params = {
        "max_length": DEFAULT_MAX_LENGTH,
        "max_context_length": DEFAULT_MAX_CONTEXT_LENGTH,
        "n": 1,
        **body.params,
    }
    return TextOrder(
        prompt=body.prompt,
        params=params,
        n=cast("int", params["n"]),
        max_length=cast("int", params["max_length"]),
        max_context_length=cast("int", params["max_context_length"]),
        models=body.models,
        worker_ids=body.workers,
        worker_blacklist=body.worker_blacklist,
        trusted_workers=body.trusted_workers,
        slow_workers=body.slow_workers,
        nsfw=body.nsfw,
        dry_run=body.dry_run,
        allow_downgrade=body.allow_downgrade,
        disable_batching=body.disable_batching,
        deadline_seconds=body.deadline_seconds,
        client_agent=client_agent(),
        address=client_address(),
        idempotency_key=key,
        body_hash=body_hash(body) if key else "",
    )


def _refuse_unsupported(body: TextRequest) -> None:
    if body.style is not None:
        raise not_found("There are no styles on this horde.", rc="StyleNotFound")
    for field in ("webhook", "extra_source_images"):
        if getattr(body, field):
            raise HordeError(
                ErrorCode.UNSUPPORTED_PARAMETER,
                f"`{field}` is not supported for text on this horde.",
                rc="BadRequest",
                errors={field: "not supported"},
            )
