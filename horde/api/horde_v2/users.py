"""`find_user`: whose key this is."""

from __future__ import annotations

from typing import Any

from apiflask import APIBlueprint
from flask import Response

from horde.api.answers import answer
from horde.api.broker import context
from horde.api.documents import failures
from horde.api.identity import given_key
from horde.api.validation import Answer
from horde.errors import invalid_key
from horde.usecases.users import UserView
from horde.usecases.users import find_user as find

users = APIBlueprint("users", __name__, url_prefix="/api/v2", tag="Users")

# AI Horde shows these for every user; nothing here gives a user one of them.
_NOT_HERE: dict[str, Any] = {
    "worker_invited": 0,
    "styles": [],
    "sharedkey_ids": [],
    "vpn": False,
    "service": False,
    "education": False,
    "customizer": False,
    "special": False,
    "pseudonymous": False,
}


class UserAnswer(Answer):
    """A user, as it sees itself."""

    username: str
    id: int
    kudos: float
    concurrency: int
    moderator: bool
    trusted: bool
    flagged: bool
    contact: str | None
    account_age: int
    worker_count: int
    worker_ids: list[str]
    kudos_details: dict[str, float]
    active_generations: dict[str, list[str]]
    usage: dict[str, float]
    contributions: dict[str, float]
    records: dict[str, dict[str, float]]
    worker_invited: int
    styles: list[dict[str, Any]]
    sharedkey_ids: list[str]
    vpn: bool
    service: bool
    education: bool
    customizer: bool
    special: bool
    pseudonymous: bool


@users.get("/find_user")
@users.output(UserAnswer)
@users.doc(operation_id="find_user", security="apikey", responses=failures(401, 404, 429))
def find_user() -> Response:
    """Whose key this is, with balance and figures"""
    key = given_key()
    if not key:
        raise invalid_key()
    return answer(user_body(find(context(), key)))


def user_body(user: UserView) -> dict[str, Any]:
    """A user on the wire."""
    return {
        "username": user.username,
        "id": user.id,
        "kudos": user.kudos,
        "concurrency": user.concurrency,
        "moderator": user.moderator,
        "trusted": user.trusted,
        "flagged": user.flagged,
        "contact": user.contact,
        "account_age": user.account_age,
        "worker_count": user.worker_count,
        "worker_ids": user.worker_ids,
        "kudos_details": user.kudos_details,
        "active_generations": user.active_generations,
        "usage": user.usage,
        "contributions": user.contributions,
        "records": user.records,
        **_NOT_HERE,
    }
