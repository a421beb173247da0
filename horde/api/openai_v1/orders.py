"""What a body of `/v1` asks for, in the words of the use cases."""

from __future__ import annotations

from typing import Any

from flask import request

from horde.api.address import client_address
from horde.api.identity import body_hash, client_agent, idempotency_key
from horde.api.openai_v1.bodies import ChatCompletionRequest, CompletionRequest, Order
from horde.usecases.chat import ChatOrder

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)
# They change how an answer is sent, not what it says: a repeat may ask for the same answer another way.
_DELIVERY = frozenset({"stream", "stream_options"})


def chat_order(body: ChatCompletionRequest) -> ChatOrder:
    """A chat as this call asks for it."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _order(body, messages=body.messages, logprobs=logprobs)


def completion_order(body: CompletionRequest) -> ChatOrder:
    """A text to be continued as this call asks for it."""
    return _order(body, prompt=body.prompt, logprobs=body.logprobs)


def _order(body: Order, **of_its_kind: Any) -> ChatOrder:
    key = idempotency_key()
    return ChatOrder(
        models=[body.model],
        model_revision=body.model_revision,
        n=body.n or 1,
        max_tokens=body.most_tokens,
        sampling=_sampling(body),
        stop=body.stop or [],
        seed=body.seed,
        deadline_seconds=body.deadline_seconds,
        worker_ids=body.workers or [],
        trusted_workers=bool(body.trusted_workers),
        client_agent=client_agent(),
        address=client_address(),
        idempotency_key=key,
        body_hash=body_hash(body, without=_DELIVERY) if key else "",
        route=request.path.lstrip("/"),
        **of_its_kind,
    )


def _sampling(body: Order) -> dict[str, Any]:
    given = {name: getattr(body, name) for name in _SAMPLING}
    return {name: value for name, value in given.items() if value not in (None, {})}
