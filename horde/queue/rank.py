"""The place of a new request in the queue: its time of enqueue, moved once and never again."""

from __future__ import annotations

import math

MOST_HEAD_START = 600.0
HEAD_START_PER_DOUBLING = 60.0
DELAY_PER_WAITING_SLOT = 2.0


def rank_offset(kudos: float, waiting_slots: int) -> float:
    """Seconds that a user's balance and waiting slots move the rank of a new request.

    min(600, 60 log2(1 + kudos / 1000)) earlier for the balance, 2 s later for each slot of the user that waits already:
    one user's flood spreads out behind everybody else's requests, and nobody waits for ever behind the rich.
    """
    head_start = min(MOST_HEAD_START, HEAD_START_PER_DOUBLING * math.log2(1 + max(0.0, kudos) / 1000))
    return DELAY_PER_WAITING_SLOT * waiting_slots - head_start
