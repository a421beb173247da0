"""What a client does with a text: order it, look at it, cancel it."""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError

from horde.admission.idempotency import KeyTaken, check_key, find_answer, keep_answer
from horde.admission.keys import User, authenticate
from horde.admission.text import (
    TextOrder,
    check_concurrency,
    check_order,
    check_workers,
    new_seeds,
    read_standing,
)
from horde.db.database import Transaction
from horde.kudos.prices import HUNDREDTHS, TEXT_TAX, estimate_text_price
from horde.lifecycle.cancel import cancel
from horde.lifecycle.enqueue import NewRequest, enqueue, queue_keys
from horde.lifecycle.words import CancelReason, Kind
from horde.queue.estimate import is_possible
from horde.queue.rank import rank_offset
from horde.registry.workers import served_by_trusted
from horde.usecases.context import Context
from horde.usecases.pricing import pricing
from horde.usecases.request_status import RequestStatus, read_request, require_request

__all__ = ["Accepted", "Generation", "TextOrder", "TextStatus", "cancel_text", "read_text_status", "request_text"]

log = structlog.get_logger(__name__)

ROUTE = "text/async"
NOBODY = "No worker online can serve this request now. It waits until one comes or it expires."


@dataclass(frozen=True)
class Accepted:
    """The answer to an order; `id` is None for a dry run."""

    id: uuid.UUID | None
    kudos: float
    message: str | None = None
    warnings: list[dict[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Generation:
    """One finished text."""

    worker_id: str
    worker_name: str
    model: str
    state: str
    text: str
    seed: int
    gen_metadata: list[dict[str, Any]]


@dataclass(frozen=True)
class TextStatus(RequestStatus):
    """A text request at one moment."""

    generations: list[Generation]


@dataclass(frozen=True)
class _Admitted:
    """An order that may be enqueued, or, for a repeat, what its first call was `answered`.

    Attributes:
        offset: seconds, of its rank.
        price: kudos, at most for what it asks.
    """

    user: User
    answered: Accepted | None = None
    offset: float = 0.0
    price: float = 0.0


def request_text(context: Context, api_key: str, order: TextOrder) -> Accepted:
    """Admit and enqueue an order; on disk when this returns.

    `kudos` of the answer is what it costs at most: see `estimate_text_price`.

    Raises:
        HordeError: 400, 401, 404, 422 or 429, with nothing enqueued.
    """
    key = check_key(order.idempotency_key) if order.idempotency_key is not None else None

    def admit(tx: Transaction) -> _Admitted:
        user = authenticate(tx, api_key)
        if key is not None:
            answer = find_answer(tx, user.id, _scope(user, order), ROUTE, key, order.body_hash)
            if answer is not None:
                return _Admitted(user, _replay(answer))
        check_order(order, user)
        check_workers(tx, order.worker_ids)
        standing = read_standing(tx, user, order.models)
        if not order.dry_run and context.settings.rate_limits == "on":
            check_concurrency(user, standing.waiting, order.n)
        offset = rank_offset(standing.balance / HUNDREDTHS, standing.waiting)
        return _Admitted(user, None, offset, _price(tx, order))

    admitted = context.database.read(admit)
    if admitted.answered is not None:
        return admitted.answered
    if order.dry_run:
        return Accepted(None, admitted.price)
    new = _new_request(order, admitted.user, admitted.offset)
    try:
        accepted = _enqueue(context, new, admitted, order, key)
    except KeyTaken:
        return request_text(context, api_key, order)
    context.wakeups.announce(queue_keys(Kind.TEXT, order.models), order.n)
    return accepted


def read_text_status(context: Context, request_id: uuid.UUID) -> TextStatus:
    """The status of a text request; raises HordeError 404 when there is none (any more)."""
    return context.database.read(lambda tx: _read(tx, request_id))


def cancel_text(context: Context, request_id: uuid.UUID) -> TextStatus:
    """Cancel for the client, and the status as it is then; a second time changes nothing."""

    def work(tx: Transaction) -> TextStatus:
        require_request(tx, request_id, Kind.TEXT)
        cancel(tx, request_id, CancelReason.CLIENT, pricing=pricing(context))
        return _read(tx, request_id)

    return context.database.run(work)


def _scope(user: User, order: TextOrder) -> str:
    return order.address if user.anonymous else ""


def _price(tx: Transaction, order: TextOrder) -> float:
    models = order.models or served_by_trusted(tx, Kind.TEXT)
    return estimate_text_price(n=order.n, max_length=order.max_length, prompt=order.prompt, models=models) / HUNDREDTHS


def _replay(answer: dict[str, Any]) -> Accepted:
    return Accepted(**{**answer, "id": uuid.UUID(answer["id"])})


def _new_request(order: TextOrder, user: User, offset: float) -> NewRequest:
    return NewRequest(
        id=uuid.uuid4(),
        kind=Kind.TEXT,
        user_id=user.id,
        payload={**order.params, "prompt": order.prompt, "n": 1},
        seeds=new_seeds(order.n),
        max_length=order.max_length,
        max_context_length=order.max_context_length,
        rank_offset=offset,
        models=list(dict.fromkeys(order.models)),
        worker_ids=order.worker_ids,
        worker_blacklist=order.worker_blacklist,
        trusted_workers=order.trusted_workers,
        slow_workers=order.slow_workers,
        nsfw=order.nsfw,
        deadline=order.deadline_seconds,
        tax=TEXT_TAX,
        client_agent=order.client_agent,
    )


def _enqueue(context: Context, new: NewRequest, admitted: _Admitted, order: TextOrder, key: str | None) -> Accepted:
    """Enqueue, and the answer, which says so if nobody could serve it now."""
    user = admitted.user

    def answer(*, possible: bool) -> Accepted:
        if possible:
            return Accepted(new.id, admitted.price)
        return Accepted(new.id, admitted.price, NOBODY, [{"code": "NoAvailableWorker", "message": NOBODY}])

    def alone(tx: Transaction) -> Accepted:
        enqueue(tx, new, context.terms)
        try:
            return answer(possible=is_possible(tx, new.id))
        except DBAPIError as error:
            # The order is on disk by now: told of an error, its client would order again.
            log.warning("text.nobody_knows_who_could_serve", error=type(error).__name__)
            return answer(possible=True)

    def with_key(tx: Transaction) -> Accepted:
        enqueue(tx, new, context.terms)
        accepted = answer(possible=is_possible(tx, new.id))
        kept = {**dataclasses.asdict(accepted), "id": str(new.id)}
        keep_answer(tx, user.id, _scope(user, order), ROUTE, str(key), order.body_hash, new.id, kept)
        return accepted

    return context.database.write_one(alone) if key is None else context.database.run(with_key)


def _read(tx: Transaction, request_id: uuid.UUID) -> TextStatus:
    status, fields = read_request(tx, request_id, Kind.TEXT)
    generations = [
        Generation(
            worker_id=result["worker_id"],
            worker_name=result["worker_name"],
            model=result["model"],
            state=result["state"],
            text=result["text"],
            seed=result["seed"],
            gen_metadata=result["gen_metadata"] or [],
        )
        for result in status.results
    ]
    return TextStatus(**fields, generations=generations)
