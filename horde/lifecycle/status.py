"""The status of a request, read in one statement so that counters, outcome and results belong together."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass
from typing import Any

from horde.db.database import Prepared, Transaction
from horde.lifecycle.words import Kind, Outcome

READ_STATUS = Prepared("""
SELECT r.kind, r.user_id, r.n, r.waiting, r.processing, r.stored, r.faulted, r.restarted, r.charged, r.outcome, r.outcome_reason,
       r.error_code, r.last_settled_faulted, r.done_at IS NOT NULL AS done, r.models, r.max_length, r.rank,
       r.attached_until IS NOT NULL AS attached,
       CASE r.kind WHEN 'chat' THEN r.payload - '{messages,prompt,prompt_token_ids}'::text[] ELSE '{}' END AS payload,
       (SELECT coalesce(max(extract(epoch FROM horde_now() - j.claimed_at)), 0) FROM jobs j
        WHERE j.request_id = r.id AND j.state = 'processing' AND r.processing > 0)::float AS oldest_running,
       CASE WHEN r.stored = 0 THEN NULL ELSE (
            SELECT jsonb_agg(jsonb_build_object(
                       'slot', j.slot_idx, 'worker_id', j.worker_id, 'worker_name', j.worker_name, 'model', j.model,
                       'state', j.result_state, 'text', j.result, 'seed', coalesce(j.result_seed, s.seed),
                       'gen_metadata', j.gen_metadata, 'finish_reason', j.finish_reason, 'tokens', j.tokens,
                       'token_ids', j.token_ids, 'logprobs', j.logprobs, 'cached_tokens', j.cached_tokens,
                       'tokenizer_revision', j.tokenizer_revision)
                   ORDER BY j.slot_idx)
            FROM jobs j JOIN slots s ON s.request_id = j.request_id AND s.idx = j.slot_idx
            WHERE j.request_id = r.id AND j.state = 'stored') END AS results
FROM requests r WHERE r.id = %(request)s
""")


@dataclass(frozen=True)
class Status:
    """What is known of a request at one moment.

    Attributes:
        charged: hundredths of a kudos so far.
        results: one per stored slot, by slot index.
        oldest_running: seconds since the claim of the job that runs longest.
        payload: of a chat, what its worker gets, without the prompt itself; of other kinds nothing.
        attached: whether clients wait, or waited, for it on open connections.
    """

    id: uuid.UUID
    kind: Kind
    user_id: int
    n: int
    waiting: int
    processing: int
    finished: int
    restarted: int
    charged: int
    outcome: Outcome | None
    outcome_reason: str | None
    error_code: str | None
    done: bool
    faulted: bool
    models: list[str]
    max_length: int
    rank: dt.datetime
    oldest_running: float
    results: list[dict[str, Any]]
    payload: dict[str, Any]
    attached: bool

    @property
    def cancelled(self) -> bool:
        """Whether the outcome is `cancelled`."""
        return self.outcome is Outcome.CANCELLED


def read_status(tx: Transaction, request_id: uuid.UUID) -> Status | None:
    """The status; None when there is no such request (any more)."""
    row = tx.execute(READ_STATUS, {"request": request_id}).one_or_none()
    if row is None:
        return None
    outcome = Outcome(row.outcome) if row.outcome else None
    kind = Kind(row.kind)
    nothing_left = row.waiting == 0 and row.processing == 0
    image_faulted = kind is Kind.IMAGE and nothing_left and row.last_settled_faulted
    return Status(
        id=request_id,
        kind=kind,
        user_id=row.user_id,
        n=row.n,
        waiting=row.waiting,
        processing=row.processing,
        finished=row.stored,
        restarted=row.restarted,
        charged=row.charged,
        outcome=outcome,
        outcome_reason=row.outcome_reason,
        error_code=row.error_code,
        done=row.done,
        faulted=outcome in {Outcome.FAULTED, Outcome.REJECTED} or image_faulted,
        models=row.models,
        max_length=row.max_length,
        rank=row.rank,
        oldest_running=row.oldest_running,
        results=row.results or [],
        payload=row.payload,
        attached=row.attached,
    )
