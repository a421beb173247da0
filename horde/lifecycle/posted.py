"""What has been posted of a running job: all that a waiting client can have of its slot, and what its result must go on from."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Any

from horde.db.database import Prepared, Transaction

# A continued job stands at first where the attempt before it stopped.
READ_POSTED = Prepared("""
SELECT coalesce(progress.text, slots.prefix_text, '') AS text,
       coalesce(progress.token_ids, slots.prefix_token_ids, '{}') AS token_ids,
       CASE WHEN progress.job_id IS NULL THEN slots.prefix_logprobs ELSE progress.logprobs END AS logprobs,
       coalesce(cardinality(slots.prefix_token_ids), 0) AS prefix_tokens,
       coalesce(char_length(slots.prefix_text), 0) AS prefix_characters
FROM jobs JOIN slots ON slots.request_id = jobs.request_id AND slots.idx = jobs.slot_idx
LEFT JOIN progress ON progress.job_id = jobs.id
WHERE jobs.id = %(job)s
""")


@dataclass(frozen=True)
class Posted:
    """A slot's output so far, its prefix included.

    Attributes:
        logprobs: one entry a token, where the order asked for them.
        prefix_tokens, prefix_characters: how many of the tokens earlier attempts made, and what of the text these show.
    """

    text: str
    token_ids: list[int]
    logprobs: list[Any] | None
    prefix_tokens: int
    prefix_characters: int

    def is_continued_by(self, text: str, token_ids: list[int] | None) -> bool:
        """Whether a whole output begins with this; where ids were posted it has to tell its own."""
        begins = (token_ids or [])[: len(self.token_ids)] == self.token_ids
        return begins and text.startswith(self.text)

    def share_of(self, tokens: int, text: str, token_ids: list[int] | None) -> int:
        """How many of a whole output's `tokens` earlier attempts made; by their part of its text, where it is not the ids
        that were counted."""
        if not text or (token_ids is not None and tokens == len(token_ids)):
            return self.prefix_tokens
        return math.ceil(tokens * self.prefix_characters / len(text))


NOTHING_POSTED = Posted("", [], None, 0, 0)


def read_posted(tx: Transaction, job_id: uuid.UUID) -> Posted:
    """Of a job under our lock, taken by a statement before: nobody posts for it meanwhile."""
    row = tx.execute(READ_POSTED, {"job": job_id}).one()
    return Posted(row.text, row.token_ids, row.logprobs, row.prefix_tokens, row.prefix_characters)
