"""The status of a request in AI Horde's terms: what every kind has of it. Its results are each kind's own."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from horde.db.database import Transaction
from horde.errors import not_found
from horde.kudos.prices import HUNDREDTHS
from horde.lifecycle.status import Status, read_status
from horde.lifecycle.words import Kind
from horde.queue.estimate import Estimate, estimate, is_possible


@dataclass(frozen=True)
class RequestStatus:
    """A request at one moment; `wait_time` is seconds, `kudos` whole kudos charged so far."""

    finished: int
    processing: int
    restarted: int
    waiting: int
    done: bool
    faulted: bool
    is_possible: bool
    wait_time: int
    queue_position: int
    kudos: float
    cancelled: bool
    error_code: str | None


def require_request(tx: Transaction, request_id: uuid.UUID, kind: Kind) -> Status:
    """A request of this kind; raises HordeError 404 when there is none (any more)."""
    status = read_status(tx, request_id)
    if status is None or status.kind is not kind:
        raise not_found(f"Request with ID {request_id} not found.", rc="RequestNotFound")
    return status


def read_request(tx: Transaction, request_id: uuid.UUID, kind: Kind) -> tuple[Status, dict[str, Any]]:
    """A request and the fields of its `RequestStatus`; raises HordeError 404."""
    status = require_request(tx, request_id, kind)
    queue = Estimate(0, 0)
    possible = True
    if status.outcome is None:
        queue = estimate(
            tx,
            kind=status.kind,
            models=status.models,
            rank=status.rank,
            waiting=status.waiting,
            processing=status.processing,
            max_length=status.max_length,
            oldest_running=status.oldest_running,
        )
        possible = status.processing > 0 or status.finished > 0 or is_possible(tx, request_id)
    return status, {
        "finished": status.finished,
        "processing": status.processing,
        "restarted": status.restarted,
        "waiting": status.waiting,
        "done": status.done,
        "faulted": status.faulted,
        "is_possible": possible,
        "wait_time": queue.wait_seconds,
        "queue_position": queue.position,
        "kudos": float(round(status.charged / HUNDREDTHS)),
        "cancelled": status.cancelled,
        "error_code": status.error_code,
    }
