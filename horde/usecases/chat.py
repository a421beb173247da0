"""What a client does with a chat that it polls: order it, look at it, cancel it."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from horde.admission.chat import ChatOrder
from horde.db.database import Transaction
from horde.lifecycle.cancel import cancel
from horde.lifecycle.status import Status
from horde.lifecycle.words import CancelReason, Kind
from horde.registry.chat_tokenizer import ChatTokenizer
from horde.usecases.chat_admission import admit_chat
from horde.usecases.chat_stream import TokenLogprob, finish_reason, show_logprobs
from horde.usecases.context import Context
from horde.usecases.pricing import ready_to_price
from horde.usecases.request_status import RequestStatus, read_request, require_request

__all__ = ["AcceptedChat", "ChatGeneration", "ChatOrder", "ChatStatus", "cancel_chat", "order_chat", "read_chat_status"]


@dataclass(frozen=True)
class AcceptedChat:
    """The answer to an order; `id` is None for a dry run, `kudos` what it costs at most."""

    id: uuid.UUID | None
    kudos: float
    prompt_tokens: int
    estimated: bool
    message: str | None = None


@dataclass(frozen=True)
class ChatGeneration:
    """One finished answer; counts are tokens. `logprobs` where they were asked for."""

    worker_id: str
    worker_name: str
    model: str
    state: str
    text: str
    seed: int
    finish_reason: str
    completion_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob] | None


@dataclass(frozen=True)
class ChatStatus(RequestStatus):
    """A chat at one moment, and what its prompt was counted as."""

    prompt_tokens: int
    estimated: bool
    generations: list[ChatGeneration]


def order_chat(context: Context, api_key: str, order: ChatOrder) -> AcceptedChat:
    """Admit and enqueue a chat; on disk when this returns.

    Raises:
        HordeError: as `admit_chat`, with nothing enqueued.
    """
    admitted = admit_chat(context, api_key, order, attached=False)
    message = None
    if admitted.estimated:
        message = "The tokenizer of this model is not known here: prompt_tokens is an estimate, and the worker decides."
    return AcceptedChat(admitted.id, admitted.kudos, admitted.prompt_tokens, admitted.estimated, message)


def read_chat_status(context: Context, request_id: uuid.UUID) -> ChatStatus:
    """The status of a chat request; raises HordeError 404 when there is none (any more)."""
    status, fields = context.database.read(lambda tx: read_request(tx, request_id, Kind.CHAT))
    return _status(context, status, fields)


def cancel_chat(context: Context, request_id: uuid.UUID) -> ChatStatus:
    """Cancel for the client, and the status as it is then; a second time changes nothing."""
    priced = ready_to_price(context, request_id)

    def work(tx: Transaction) -> tuple[Status, dict[str, Any]]:
        require_request(tx, request_id, Kind.CHAT)
        cancel(tx, request_id, CancelReason.CLIENT, pricing=priced)
        return read_request(tx, request_id, Kind.CHAT)

    status, fields = context.database.run(work)
    context.streams.announce([request_id])
    return _status(context, status, fields)


def _status(context: Context, status: Status, fields: dict[str, Any]) -> ChatStatus:
    return ChatStatus(
        **fields,
        prompt_tokens=int(status.payload.get("prompt_tokens", 0)),
        estimated=bool(status.payload.get("estimated")),
        generations=[_generation(context, result) for result in status.results],
    )


def _generation(context: Context, result: dict[str, Any]) -> ChatGeneration:
    tokenizer: ChatTokenizer | None = None
    if result["logprobs"] and result["tokenizer_revision"]:
        tokenizer = context.tokenizers.load(context.database, result["tokenizer_revision"])
    return ChatGeneration(
        worker_id=result["worker_id"],
        worker_name=result["worker_name"],
        model=result["model"],
        state=result["state"],
        text=result["text"],
        seed=result["seed"],
        finish_reason=finish_reason(result["finish_reason"], result["state"]),
        completion_tokens=result["tokens"] or 0,
        cached_tokens=result["cached_tokens"] or 0,
        logprobs=show_logprobs(tokenizer, result["logprobs"]) if tokenizer is not None else None,
    )
