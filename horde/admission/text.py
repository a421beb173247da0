"""A text order as the API parsed it, and the checks that need more than one field or the database."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from horde.admission.keys import User
from horde.db.database import Prepared, Transaction
from horde.errors import ErrorCode, HordeError, bad_request, not_found

MOST_STOPS, MOST_STOP_CHARACTERS = 128, 2000
# The queue's own word for "any model": as a model's name it would reach workers that do not serve it.
RESERVED_MODEL = "*"
FULL_SAMPLER_ORDER = 7
SEED_BITS = 31

# Counted no further than any limit reaches, so that a flood cannot make its own admission slow. The balance is that of the last
# fold: it decides a place in the queue only.
READ_STANDING = Prepared("""
SELECT (SELECT coalesce(sum(waiting), 0) FROM (
            SELECT waiting FROM requests WHERE user_id = %(user)s AND waiting > 0 LIMIT 1000) AS mine)::int AS waiting,
       (SELECT balance FROM accounts WHERE user_id = %(user)s) AS balance
""")

# AI Horde counts the anonymous account's concurrency by model, since strangers share it; its balance brings nobody forward.
READ_ANONYMOUS_STANDING = Prepared("""
SELECT coalesce(sum(waiting), 0)::int AS waiting, 0 AS balance FROM (
    SELECT waiting FROM requests
    WHERE user_id = %(user)s AND waiting > 0 AND (models = %(models)s::text[] OR models && %(models)s::text[]) LIMIT 1000) AS mine
""")

KNOWN_WORKERS = "SELECT id FROM workers WHERE id = ANY (%(workers)s::uuid[]) AND deleted_at IS NULL"


@dataclass(frozen=True)
class TextOrder:
    """What a client asks for.

    Attributes:
        params: the documented parameters that were given, with `n`, `max_length` and `max_context_length` filled in.
        deadline_seconds: nobody wants the result later than that from now.
        address: the client's, for the scope of the anonymous account's idempotency keys.
        body_hash: of the whole body, to tell a repeat from a different order under the same key.
    """

    prompt: str
    params: dict[str, Any]
    n: int
    max_length: int
    max_context_length: int
    models: list[str] = field(default_factory=list)
    worker_ids: list[uuid.UUID] = field(default_factory=list)
    worker_blacklist: bool = False
    trusted_workers: bool = False
    slow_workers: bool = True
    nsfw: bool = True
    dry_run: bool = False
    allow_downgrade: bool = False
    disable_batching: bool = False
    deadline_seconds: float | None = None
    client_agent: str = "unknown:0:unknown"
    address: str = ""
    idempotency_key: str | None = None
    body_hash: str = ""


def check_order(order: TextOrder, user: User) -> None:
    """The checks across fields; raises HordeError 400 with AI Horde's `rc`."""
    if not order.prompt:
        raise bad_request("You cannot send an empty prompt.", rc="MissingPrompt", field="prompt")
    if RESERVED_MODEL in order.models:
        raise bad_request("`*` is no model's name. Name no model at all to accept any.", field="models")
    if order.max_context_length < order.max_length:
        raise bad_request(
            f"max_length ({order.max_length}) must not exceed max_context_length ({order.max_context_length}).",
            rc="TokenOverflow",
            field="params.max_context_length",
        )
    samplers = order.params.get("sampler_order")
    if samplers is not None and len(set(samplers)) < FULL_SAMPLER_ORDER:
        raise bad_request(
            "sampler_order must name all 7 samplers.", rc="MissingFullSamplerOrder", field="params.sampler_order"
        )
    stops = order.params.get("stop_sequence") or []
    if len(set(stops)) > MOST_STOPS:
        raise bad_request(
            f"At most {MOST_STOPS} stop sequences are allowed.", rc="TooManyStopSequences", field="params.stop_sequence"
        )
    if sum(map(len, stops)) > MOST_STOP_CHARACTERS:
        raise bad_request(
            f"Stop sequences have at most {MOST_STOP_CHARACTERS} characters together.",
            rc="ExcessiveStopSequence",
            field="params.stop_sequence",
        )
    if order.disable_batching and order.n > 1 and not user.trusted:
        raise bad_request("Only trusted users may disable batching.", rc="RequiresTrust", field="disable_batching")


def check_workers(tx: Transaction, worker_ids: Sequence[uuid.UUID]) -> None:
    """Raise HordeError 404 when a named worker does not exist."""
    if not worker_ids:
        return
    known = set(tx.execute(KNOWN_WORKERS, {"workers": list(worker_ids)}).scalars())
    for worker in worker_ids:
        if worker not in known:
            raise not_found(f"Worker with ID {worker} not found.", rc="WorkerNotFound")


@dataclass(frozen=True)
class Standing:
    """What a user has waiting, in slots as far as its concurrency is concerned, and its balance in hundredths of a kudos."""

    waiting: int
    balance: int


def read_standing(tx: Transaction, user: User, models: Sequence[str]) -> Standing:
    """The user's standing, read without a lock."""
    if user.anonymous:
        row = tx.execute(READ_ANONYMOUS_STANDING, {"user": user.id, "models": list(models)}).one()
    else:
        row = tx.execute(READ_STANDING, {"user": user.id}).one()
    return Standing(row.waiting, row.balance or 0)


def check_concurrency(user: User, waiting: int, n: int) -> None:
    """Raise HordeError 429 when the user would have more slots waiting than allowed."""
    if waiting + n > user.concurrency:
        raise HordeError(
            ErrorCode.CONCURRENCY_EXCEEDED,
            f"Parallel requests ({waiting} waiting, {n} more) exceed your limit of {user.concurrency}.",
            rc="TooManyPrompts",
            retry_after=5,
        )


def new_seeds(n: int) -> list[int]:
    """A seed for each slot, fixed for all its attempts."""
    return [secrets.randbits(SEED_BITS) for _ in range(n)]
