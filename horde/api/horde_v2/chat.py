"""`generate/chat/*` for clients: ask, look, cancel. What workers call is in `chat_work`."""

from __future__ import annotations

from typing import Any

from apiflask import APIBlueprint
from flask import Response

from horde.api.address import client_address
from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import failures
from horde.api.horde_v2.chat_answers import (
    AcceptedChatAnswer,
    ChatStatusAnswer,
    accepted_chat_body,
    chat_status_body,
)
from horde.api.horde_v2.chat_bodies import ChatParams, ChatRequest
from horde.api.identity import body_hash, client_agent, idempotency_key, request_id_or_404, required_key
from horde.errors import HordeError
from horde.usecases.chat import ChatOrder, cancel_chat, order_chat, read_chat_status

# The rest of `params` says how much is wanted, and how it is told.
_SAMPLING = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        "logit_bias",
    }
)  # fmt: skip

chat = APIBlueprint("chat", __name__, url_prefix="/api/v2/generate/chat", tag="Chat")


@chat.post("/async")
@chat.input(ChatRequest, arg_name="body")
@chat.output(AcceptedChatAnswer, status_code=202, description="The request is on disk and waits for a worker")
@chat.doc(
    operation_id="request_chat",
    security="apikey",
    responses={200: "The price, for a dry run", **failures(400, 401, 403, 404, 422, 429, 503)},
)
def ask(body: ChatRequest) -> Response:
    """Ask for the continuation of a chat

    As `generate/text/async`: any key may ask, and the status is polled with the `id` of the answer. The prompt is
    rendered and counted before anything is queued, so one that does not fit is refused here. To have the text as it is
    made, ask at `/v1/chat/completions`.
    """
    key, order = required_key(), _order(body)
    try:
        accepted = order_chat(context(), key, order)
    except HordeError as error:
        raise _placed(error) from None
    return answer(accepted_chat_body(accepted), 200 if body.dry_run else 202)


@chat.get("/status/<request_id>")
@chat.output(ChatStatusAnswer)
@chat.doc(operation_id="read_chat_status", responses=failures(404, 429))
def read_status(request_id: str) -> Response:
    """How far a chat is, and its answers so far

    No key: who knows the id may look. Nothing arrives any more once `done` is true.
    """
    return answer(chat_status_body(read_chat_status(context(), request_id_or_404(request_id))))


@chat.delete("/status/<request_id>")
@chat.output(ChatStatusAnswer)
@chat.doc(operation_id="cancel_chat", responses=failures(404, 429))
def cancel(request_id: str) -> Response:
    """Cancel a chat

    What waits is dropped, what runs is finished and shown; where a client waits for it on an open connection, it ends
    at once with what there is. Answers the status after the cancel.
    """
    return answer(chat_status_body(cancel_chat(context(), request_id_or_404(request_id))))


def _order(body: ChatRequest) -> ChatOrder:
    key, params = idempotency_key(), body.params
    sampling: dict[str, Any] = {name: value for name, value in params.items() if name in _SAMPLING and value != {}}
    return ChatOrder(
        models=body.any_of,
        messages=body.messages,
        model_revision=body.model_revision,
        n=params.get("n", 1),
        max_tokens=params.get("max_tokens"),
        sampling=sampling,
        stop=params.get("stop", []),
        seed=params.get("seed"),
        logprobs=params.get("top_logprobs", 0) if params.get("logprobs") else None,
        deadline_seconds=body.deadline_seconds,
        worker_ids=body.workers,
        worker_blacklist=body.worker_blacklist,
        trusted_workers=body.trusted_workers,
        slow_workers=body.slow_workers,
        dry_run=body.dry_run,
        client_agent=client_agent(),
        address=client_address(),
        idempotency_key=key,
        body_hash=body_hash(body) if key else "",
        route="chat/async",
    )


def _placed(error: HordeError) -> HordeError:
    """The same, with the fields of `params` named by where they stand in this body."""
    known = ChatParams.__annotations__
    error.errors = error.errors and {
        f"params.{name}" if name in known else name: said for name, said in error.errors.items()
    }
    return error
