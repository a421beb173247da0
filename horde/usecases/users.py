"""A user looking at itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horde.admission.keys import authenticate
from horde.db.database import Transaction
from horde.errors import HordeError, not_found
from horde.kudos.accounts import read_balance
from horde.kudos.prices import HUNDREDTHS
from horde.registry.workers import read_workers
from horde.statistics.users import read_user_totals
from horde.usecases.context import Context


@dataclass(frozen=True)
class UserView:
    """A user with its figures; kudos in whole kudos with two decimals."""

    id: int
    username: str
    kudos: float
    concurrency: int
    moderator: bool
    admin: bool
    trusted: bool
    flagged: bool
    contact: str | None
    account_age: int
    worker_count: int
    worker_ids: list[str]
    kudos_details: dict[str, float]
    active_generations: dict[str, list[str]]
    usage: dict[str, int]
    contributions: dict[str, int]
    records: dict[str, dict[str, int]]


def find_user(context: Context, api_key: str) -> UserView:
    """The holder of the key; raises HordeError 404 `UserNotFound` when nobody holds it."""

    def work(tx: Transaction) -> UserView:
        try:
            user = authenticate(tx, api_key)
        except HordeError as error:
            raise not_found("No user matches this API key.", rc="UserNotFound") from error
        workers = [] if user.anonymous else read_workers(tx, "owner", user.id)
        row = read_user_totals(tx, user.id, registered=not user.anonymous)
        return UserView(
            id=user.id,
            username=user.alias,
            kudos=read_balance(tx, user.id) / HUNDREDTHS,
            concurrency=user.concurrency,
            moderator=user.moderator,
            admin=user.admin,
            trusted=user.trusted,
            flagged=user.flagged,
            contact=row.contact,
            account_age=row.age,
            worker_count=len(workers),
            worker_ids=[str(worker.id) for worker in workers],
            kudos_details=_kudos_details(row),
            active_generations={"text": [str(request) for request in row.active], "image": [], "alchemy": []},
            usage={"megapixelsteps": 0, "requests": int(row.results)},
            contributions={"megapixelsteps": 0, "fulfillments": int(row.fulfilled)},
            records=_records(row),
        )

    return context.database.read(work)


def _kudos_details(row: Any) -> dict[str, float]:
    details = dict.fromkeys(
        ("accumulated", "gifted", "donated", "admin", "received", "recurring", "awarded", "styled"), 0.0
    )
    details["accumulated"] = float(row.earned - row.spent) / HUNDREDTHS
    return details


def _records(row: Any) -> dict[str, dict[str, int]]:
    return {
        "usage": {"megapixelsteps": 0, "tokens": int(row.tokens)},
        "contribution": {"megapixelsteps": 0, "tokens": int(row.tokens_generated)},
        "fulfillment": {"image": 0, "text": int(row.fulfilled), "interrogation": 0},
        "request": {"image": 0, "text": int(row.results), "interrogation": 0},
    }
