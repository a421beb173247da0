"""Events: one appended row per transition, and its name among those not folded yet. Nothing here reads or updates."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Any

from horde.db.database import Transaction
from horde.lifecycle.words import Kind, Outcome

# Parameters carry `event_` so that this can be part of a larger statement.
INSERT_EVENT = """
INSERT INTO events (at, kind, request_kind, request_id, slot_idx, job_id, user_id, worker_id, worker_name, owner_id,
                    model, reason, outcome, price, reward, tokens, timings)
VALUES (horde_now(), %(event_kind)s, %(event_request_kind)s, %(event_request)s, %(event_slot)s, %(event_job)s, %(event_user)s,
        %(event_worker)s, %(event_worker_name)s, %(event_owner)s, %(event_model)s, %(event_reason)s, %(event_outcome)s,
        %(event_price)s, %(event_reward)s, %(event_tokens)s, %(event_timings)s)
RETURNING id
"""

APPEND = f"WITH event AS ({INSERT_EVENT}) INSERT INTO events_unfolded (event_id) SELECT id FROM event"


@dataclass(frozen=True)
class Event:
    """What happened. `price` and `reward` are hundredths of a kudos, `timings` milliseconds by name."""

    kind: str
    request_id: uuid.UUID
    request_kind: Kind
    user_id: int
    slot: int | None = None
    job_id: uuid.UUID | None = None
    worker_id: uuid.UUID | None = None
    worker_name: str | None = None
    owner_id: int | None = None
    model: str | None = None
    reason: str | None = None
    outcome: Outcome | None = None
    price: int = 0
    reward: int = 0
    tokens: int = 0
    timings: dict[str, Any] | None = None

    def parameters(self) -> dict[str, Any]:
        """By the names of `INSERT_EVENT`."""
        return {
            "event_kind": self.kind,
            "event_request_kind": self.request_kind.value,
            "event_request": self.request_id,
            "event_slot": self.slot,
            "event_job": self.job_id,
            "event_user": self.user_id,
            "event_worker": self.worker_id,
            "event_worker_name": self.worker_name,
            "event_owner": self.owner_id,
            "event_model": self.model,
            "event_reason": self.reason,
            "event_outcome": self.outcome.value if self.outcome else None,
            "event_price": self.price,
            "event_reward": self.reward,
            "event_tokens": self.tokens,
            "event_timings": json.dumps(self.timings) if self.timings is not None else None,
        }


def append(tx: Transaction, event: Event) -> None:
    """Append what happened."""
    tx.execute(APPEND, event.parameters())
