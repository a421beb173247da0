"""What is new of a request's output, for whoever was given the rest of it already: one statement for any number of readers.

A slot's output is its stored result; until there is one, what the running attempt has posted; before it has posted anything,
what the attempts before it left. Each begins with the one before it, so counting from the slot's first token and character
nothing is given twice and nothing left out, whichever of them is read when. A result that is withheld (censored, csam) adds
nothing: it is not what was posted.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from horde.db.database import Prepared, Transaction

FINAL = frozenset({"stored", "dropped"})

# LIMIT keeps each look into `jobs` a single descent of the partial index that belongs to it.
READ_OUTPUT = Prepared("""
SELECT asked.reader, asked.slot, r.outcome, r.outcome_reason, r.error_code, r.done_at IS NOT NULL AS done, s.state,
       CASE WHEN held.withheld THEN '' ELSE substr(coalesce(held.text, s.prefix_text, ''), asked.characters + 1) END AS text,
       CASE WHEN held.withheld THEN '{}'
            ELSE coalesce((coalesce(held.token_ids, s.prefix_token_ids))[asked.tokens + 1:], '{}') END AS token_ids,
       CASE WHEN held.withheld THEN NULL
            ELSE jsonb_path_query_array(coalesce(held.logprobs, s.prefix_logprobs), '$[$given to last]',
                                        jsonb_build_object('given', asked.tokens)) END AS logprobs,
       coalesce(held.tokens, cardinality(coalesce(held.token_ids, s.prefix_token_ids)), 0) AS tokens,
       held.finish_reason, held.result_state, held.cached_tokens
FROM unnest(%(readers)s::int[], %(requests)s::uuid[], %(slots)s::int[], %(characters)s::int[], %(tokens)s::int[])
     AS asked (reader, request, slot, characters, tokens)
JOIN requests r ON r.id = asked.request
JOIN slots s ON s.request_id = r.id AND s.idx = asked.slot
LEFT JOIN LATERAL (
    (SELECT j.result AS text, j.token_ids, j.logprobs, j.tokens, j.finish_reason, j.result_state, j.cached_tokens,
            j.result_state <> 'ok' AS withheld
     FROM jobs j WHERE s.state = 'stored' AND j.request_id = s.request_id AND j.slot_idx = s.idx AND j.state = 'stored' LIMIT 1)
    UNION ALL
    (SELECT p.text, p.token_ids, p.logprobs, NULL, NULL, NULL, NULL, false FROM jobs j JOIN progress p ON p.job_id = j.id
     WHERE s.state = 'processing' AND j.request_id = s.request_id AND j.slot_idx = s.idx AND j.state = 'processing' LIMIT 1)
) AS held ON true
""")


@dataclass(frozen=True)
class SlotOutput:
    """What is new of one slot.

    Attributes:
        text, token_ids, logprobs: what was not given before; an entry of `logprobs` is `[id, logprob, [[id, logprob], ...]]`,
            one a token, None where none were asked for.
        tokens: how many the slot has in all, those given before included.
        finish_reason, result_state, cached_tokens: of a stored slot.
    """

    idx: int
    state: str
    text: str
    token_ids: list[int]
    logprobs: list[Any] | None
    finish_reason: str | None
    result_state: str | None
    tokens: int
    cached_tokens: int | None


@dataclass(frozen=True)
class Output:
    """What is new of a request.

    Attributes:
        done: nothing more will come.
        slots: those with something new, by index; all of them the first time.
        gone: there is no such request (any more).
    """

    outcome: str | None
    outcome_reason: str | None
    error_code: str | None
    done: bool
    slots: list[SlotOutput]
    gone: bool = False


@dataclass
class _Given:
    """What a reader has of a slot; `seen` is the state it was told last."""

    characters: int = 0
    tokens: int = 0
    seen: str | None = None


@dataclass
class Reader:
    """How much of a request somebody has been given.

    Args:
        n: slots of the request.
    """

    request_id: uuid.UUID
    n: int
    slots: list[_Given] = field(init=False)
    _outcome: str | None = None
    _done: bool = False

    def __post_init__(self) -> None:
        self.slots = [_Given() for _ in range(self.n)]

    def open_slots(self) -> list[int]:
        """Slots to read: those from which more may come, and one in any case, for what the request itself has come to."""
        return [idx for idx, given in enumerate(self.slots) if given.seen not in FINAL] or [0]

    def take(self, rows: Sequence[Any]) -> Output | None:
        """Count what was read as given; None when it is nothing new."""
        if not rows:
            return Output(None, None, None, done=True, slots=[], gone=True)
        slots = [new for row in sorted(rows, key=lambda row: row.slot) if (new := self._new(row)) is not None]
        request = rows[0]
        if not slots and (request.outcome, request.done) == (self._outcome, self._done):
            return None
        self._outcome, self._done = request.outcome, request.done
        return Output(request.outcome, request.outcome_reason, request.error_code, request.done, slots)

    def _new(self, row: Any) -> SlotOutput | None:
        given = self.slots[row.slot]
        if row.state == given.seen and not row.text and not row.token_ids:
            return None
        given.seen = row.state
        given.characters += len(row.text)
        given.tokens += len(row.token_ids)
        return SlotOutput(
            idx=row.slot,
            state=row.state,
            text=row.text,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            finish_reason=row.finish_reason,
            result_state=row.result_state,
            tokens=row.tokens,
            cached_tokens=row.cached_tokens,
        )


def read_output(tx: Transaction, readers: Sequence[Reader]) -> list[list[Any]]:
    """The rows for each reader to `take`, all as of one moment."""
    asked = [(place, reader, idx) for place, reader in enumerate(readers) for idx in reader.open_slots()]
    found: list[list[Any]] = [[] for _ in readers]
    rows = tx.execute(
        READ_OUTPUT,
        {
            "readers": [place for place, _, _ in asked],
            "requests": [reader.request_id for _, reader, _ in asked],
            "slots": [idx for _, _, idx in asked],
            "characters": [reader.slots[idx].characters for _, reader, idx in asked],
            "tokens": [reader.slots[idx].tokens for _, reader, idx in asked],
        },
    )
    for row in rows:
        found[row.reader].append(row)
    return found
