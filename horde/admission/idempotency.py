"""`Idempotency-Key` of orders: the same key and body give the same request, another body is a conflict."""

from __future__ import annotations

import json
import uuid
from typing import Any

from horde.db.database import Transaction
from horde.errors import ErrorCode, HordeError, bad_request

LONGEST_KEY = 255

FIND = """
SELECT body_hash, request_id, answer FROM idempotency_keys
WHERE user_id = %(user)s AND scope = %(scope)s AND route = %(route)s AND key = %(key)s
"""

# Two orders with one key at once: the later one waits here for the first to commit, then conflicts.
KEEP = """
INSERT INTO idempotency_keys (user_id, scope, route, key, body_hash, request_id, answer)
VALUES (%(user)s, %(scope)s, %(route)s, %(key)s, %(body_hash)s, %(request)s, %(answer)s)
ON CONFLICT DO NOTHING
"""

# A client that hung up never had the answer, so its key is free again.
FORGET = """
DELETE FROM idempotency_keys k USING requests r
WHERE k.user_id = %(user)s AND k.scope = %(scope)s AND k.route = %(route)s AND k.key = %(key)s
  AND r.id = k.request_id AND r.outcome = 'cancelled' AND r.outcome_reason = %(reason)s
"""


class KeyTaken(Exception):  # noqa: N818 not an error: somebody was first
    """Another order was enqueued under this key meanwhile; roll back and look it up."""


def check_key(key: str) -> str:
    """The key, if it is 1 to 255 visible ASCII characters; raises HordeError 400 otherwise."""
    if not 1 <= len(key) <= LONGEST_KEY or not all("!" <= character <= "~" for character in key):
        raise bad_request("Idempotency-Key must be 1 to 255 visible ASCII characters.", field="Idempotency-Key")
    return key


def find_answer(
    tx: Transaction, user_id: int, scope: str, route: str, key: str, body_hash: str
) -> dict[str, Any] | None:
    """The answer that was given under this key; None when the key is new.

    Raises:
        HordeError: 422, when it was used for another body.
    """
    row = tx.execute(FIND, {"user": user_id, "scope": scope, "route": route, "key": key}).one_or_none()
    if row is None:
        return None
    if row.body_hash != body_hash:
        raise HordeError(
            ErrorCode.IDEMPOTENCY_CONFLICT,
            "This Idempotency-Key was used for a different body.",
            rc="IdempotencyKeyConflict",
        )
    return dict(row.answer)


def keep_answer(
    tx: Transaction,
    user_id: int,
    scope: str,
    route: str,
    key: str,
    body_hash: str,
    request_id: uuid.UUID,
    answer: dict[str, Any],
) -> None:
    """Keep the answer with the request, in its transaction; raises KeyTaken when somebody was first."""
    kept = tx.execute(
        KEEP,
        {
            "user": user_id,
            "scope": scope,
            "route": route,
            "key": key,
            "body_hash": body_hash,
            "request": request_id,
            "answer": json.dumps(answer),
        },
    )
    if kept.rowcount == 0:
        raise KeyTaken


def forget_answer(tx: Transaction, user_id: int, scope: str, route: str, key: str, *, reason: str) -> None:
    """Free a key whose request was cancelled for this `reason`; any other keeps its answer."""
    tx.execute(FORGET, {"user": user_id, "scope": scope, "route": route, "key": key, "reason": reason})
