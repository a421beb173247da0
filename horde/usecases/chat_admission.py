"""A chat from its order to the queue: every check before anything exists, then one transaction that enqueues it.

What a repeat under the same `Idempotency-Key` gets is the request of the first call.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from dataclasses import dataclass
from typing import Any

from horde.admission.chat import (
    ChatOrder,
    Prompt,
    choose_target,
    context_needed,
    fit,
    no_capacity,
    projected_blocks,
    read_prompt,
    seeds_of,
)
from horde.admission.idempotency import KeyTaken, check_key, find_answer, forget_answer, keep_answer
from horde.admission.keys import User, authenticate
from horde.admission.text import Standing, check_concurrency, check_workers, read_standing
from horde.db.database import Transaction
from horde.errors import ErrorCode, HordeError
from horde.kudos.prices import HUNDREDTHS, TEXT_TAX, believed_prompt, most_per_text
from horde.kudos.upfront import free_tokens, upfront
from horde.lifecycle.enqueue import NewRequest, enqueue, queue_keys
from horde.lifecycle.status import read_status
from horde.lifecycle.words import CancelReason, Kind, Outcome
from horde.queue.estimate import estimate_wait
from horde.queue.rank import rank_offset
from horde.registry.models import Target
from horde.usecases.context import Context

# An open connection waits in the queue no longer than this, in seconds.
LONGEST_WAIT_ATTACHED = 600.0


@dataclass(frozen=True)
class Admitted:
    """A chat that is in the queue, or, for a dry run (`id` None), that could be.

    Attributes:
        created: seconds since the epoch, by this broker's clock.
        kudos: what it costs at most.
        content: the field that its prompt came in.
        context_length: the most that a worker holds of prompt and answer together, in tokens.
        estimated: whether its prompt was counted without the model's tokenizer.
        seconds_left: until its deadline; None without one.
        repeated: whether it is the request of an earlier call with the same key.
    """

    id: uuid.UUID | None
    model: str
    model_revision: str
    tokenizer_revision: str
    n: int
    prompt_tokens: int
    estimated: bool
    created: int
    kudos: float
    content: str
    max_new_tokens: int
    context_length: int
    logprobs: int | None = None
    seconds_left: float | None = None
    repeated: bool = False


@dataclass(frozen=True)
class _Caller:
    user: User
    standing: Standing
    target: Target


def admit_chat(context: Context, api_key: str, order: ChatOrder, *, attached: bool) -> Admitted:
    """Check an order and enqueue it; on disk when this returns.

    No connection to the database is held while the prompt is rendered and counted.

    Raises:
        HordeError: 400, 401, 403, 404, 422, 429 or 503, with nothing enqueued.
    """
    key = check_key(order.idempotency_key) if order.idempotency_key is not None else None
    found = context.database.read(lambda tx: _read(tx, context, api_key, order, key))
    if isinstance(found, Admitted):
        return found
    tokenizer = context.tokenizers.load(context.database, found.target.manifest.tokenizer_revision)
    prompt = read_prompt(order, tokenizer, found.target.context_length)
    max_new_tokens = _fit(context, order, prompt, found)
    offset = rank_offset(found.standing.balance / HUNDREDTHS, found.standing.waiting)
    if order.deadline_seconds is not None:
        _check_deadline(context, order.deadline_seconds, found.target.model, offset)
    new = _new_request(order, prompt, max_new_tokens, found, offset, attached=attached)
    admitted = _admitted(order, prompt, max_new_tokens, found, new.id)
    if order.dry_run:
        return dataclasses.replace(admitted, id=None)
    try:
        context.database.run(lambda tx: _enqueue(tx, context, new, admitted, found.user, order, key))
    except KeyTaken:
        return admit_chat(context, api_key, order, attached=attached)
    context.wakeups.announce(queue_keys(Kind.CHAT, new.models), order.n)
    return admitted


def _read(tx: Transaction, context: Context, api_key: str, order: ChatOrder, key: str | None) -> Admitted | _Caller:
    user = authenticate(tx, api_key)
    if key is not None:
        answer = find_answer(tx, user.id, _scope(user, order), order.route, key, order.body_hash)
        if answer is not None and not _was_abandoned(tx, answer):
            return _replay(answer)
    check_workers(tx, order.worker_ids)
    target = choose_target(tx, order, user.id)
    standing = read_standing(tx, user, [target.model])
    if not order.dry_run and context.settings.rate_limits == "on":
        check_concurrency(user, standing.waiting, order.n)
    return _Caller(user, standing, target)


def _scope(user: User, order: ChatOrder) -> str:
    return order.address if user.anonymous else ""


def _was_abandoned(tx: Transaction, answer: dict[str, Any]) -> bool:
    """Whether the first call's client hung up before it had its answer: then the repeat is an order of its own."""
    status = read_status(tx, uuid.UUID(answer["id"]))
    return (
        status is not None and status.outcome is Outcome.CANCELLED and status.outcome_reason == CancelReason.DISCONNECT
    )


def _replay(answer: dict[str, Any]) -> Admitted:
    deadline = answer.pop("deadline", None)
    left = None if deadline is None else max(0.0, deadline - time.time())
    return Admitted(**{**answer, "id": uuid.UUID(answer["id"]), "seconds_left": left, "repeated": True})


def _fit(context: Context, order: ChatOrder, prompt: Prompt, caller: _Caller) -> int:
    """Tokens to generate, and the kudos for more of them than anybody may have."""
    user, target = caller.user, caller.target
    free = free_tokens(threads=context.vitals.threads, queued=context.vitals.queue)
    pays = user.trusted or user.moderates
    affordable = pays or caller.standing.balance >= upfront(
        max_length=order.max_tokens or max(free, 1024), model=target.model, n=order.n
    )
    wanted = fit(order, prompt, target, most=None if affordable else free)
    if wanted > free and not affordable:
        needed = upfront(max_length=wanted, model=target.model, n=order.n) / HUNDREDTHS
        raise HordeError(
            ErrorCode.INSUFFICIENT_KUDOS,
            f"Answers of more than {free} tokens need kudos beforehand: {needed:.2f} for this one. Ask for fewer tokens.",
            rc="KudosUpfront",
            errors={"max_tokens": f"more than {free} tokens need {needed:.2f} kudos"},
        )
    return wanted


def _check_deadline(context: Context, seconds: float, model: str, offset: float) -> None:
    wait = context.database.read(lambda tx: estimate_wait(tx, kind=Kind.CHAT, model=model, rank_offset=offset))
    if wait > seconds:
        raise no_capacity(
            f"What waits ahead of this takes about {wait:.0f} s, longer than its deadline of {seconds:g} s.",
            retry_after=min(60.0, max(1.0, wait - seconds)),
        )


def _new_request(
    order: ChatOrder, prompt: Prompt, max_new_tokens: int, caller: _Caller, offset: float, *, attached: bool
) -> NewRequest:
    target = caller.target
    payload = {
        "messages": order.messages,
        "prompt": prompt.text,
        "prompt_token_ids": prompt.token_ids,
        "prompt_tokens": prompt.tokens,
        "estimated": prompt.estimated,
        "max_new_tokens": max_new_tokens,
        "blocks": projected_blocks(prompt, max_new_tokens, target),
        "stop": order.stop,
        "logprobs": order.logprobs,
        "sampling": order.sampling,
        "tools": None,
        "response_format": None,
    }
    return NewRequest(
        id=uuid.uuid4(),
        kind=Kind.CHAT,
        user_id=caller.user.id,
        payload=payload,
        seeds=seeds_of(order),
        max_length=max_new_tokens,
        max_context_length=context_needed(prompt, max_new_tokens, target),
        rank_offset=offset,
        models=[target.model],
        worker_ids=order.worker_ids,
        worker_blacklist=order.worker_blacklist,
        trusted_workers=order.trusted_workers,
        slow_workers=order.slow_workers,
        deadline=order.deadline_seconds,
        attached=attached,
        revision=target.key,
        needs_progress=True,
        tax=TEXT_TAX,
        client_agent=order.client_agent,
    )


def _admitted(
    order: ChatOrder, prompt: Prompt, max_new_tokens: int, caller: _Caller, request_id: uuid.UUID
) -> Admitted:
    target = caller.target
    believed = believed_prompt(prompt.tokens, estimated=prompt.estimated)
    each = most_per_text(max_length=max_new_tokens, prompt_tokens=believed, models=[target.model])
    return Admitted(
        id=request_id,
        model=target.model,
        model_revision=target.manifest.model_revision,
        tokenizer_revision=target.manifest.tokenizer_revision,
        n=order.n,
        prompt_tokens=prompt.tokens,
        estimated=prompt.estimated,
        created=int(time.time()),
        kudos=(TEXT_TAX + order.n * each) / HUNDREDTHS,
        content="prompt" if order.messages is None else "messages",
        max_new_tokens=max_new_tokens,
        context_length=target.context_length,
        logprobs=order.logprobs,
        seconds_left=order.deadline_seconds,
    )


def _enqueue(
    tx: Transaction,
    context: Context,
    new: NewRequest,
    admitted: Admitted,
    user: User,
    order: ChatOrder,
    key: str | None,
) -> None:
    terms = context.terms
    if new.attached:
        terms = dataclasses.replace(terms, expiry=min(terms.expiry, LONGEST_WAIT_ATTACHED))
    enqueue(tx, new, terms)
    if key is None:
        return
    kept = dataclasses.asdict(admitted) | {"id": str(new.id)}
    del kept["seconds_left"], kept["repeated"]
    if order.deadline_seconds is not None:
        kept["deadline"] = time.time() + order.deadline_seconds
    scope = _scope(user, order)
    forget_answer(tx, user.id, scope, order.route, key, reason=CancelReason.DISCONNECT)
    keep_answer(tx, user.id, scope, order.route, key, order.body_hash, new.id, kept)
