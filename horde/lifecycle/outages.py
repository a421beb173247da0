"""The heartbeat, and the outages that it shows: time in which no broker was alive, which no worker is blamed for."""

from __future__ import annotations

from dataclasses import dataclass

from horde.db.database import Transaction

BEAT_EVERY, OUTAGE_AFTER = 5, 15

LOCK_HEARTBEAT = "SELECT beat_at FROM heartbeat WHERE id = 1 FOR UPDATE"

# In a statement of its own after the lock: the clock must not be older than the beat that we waited for.
BEAT = """
UPDATE heartbeat SET beat_at = greatest(beat_at, horde_now()) WHERE id = 1 AND beat_at = %(seen)s
RETURNING beat_at, extract(epoch FROM beat_at - %(seen)s) AS gap
"""

RECORD_OUTAGE = "INSERT INTO outages (begun, ended) VALUES (%(begun)s, %(ended)s)"


@dataclass(frozen=True)
class Beat:
    """One beat; `outage` is the length in seconds of the gap that it ended, 0 for none."""

    outage: float


def beat(tx: Transaction) -> Beat:
    """Advance the heartbeat; whoever finds it too old writes the outage in the same step, so it is written once."""
    seen = tx.execute(LOCK_HEARTBEAT).scalar_one()
    row = tx.execute(BEAT, {"seen": seen}).one()
    if row.gap <= OUTAGE_AFTER:
        return Beat(0.0)
    tx.execute(RECORD_OUTAGE, {"begun": seen, "ended": row.beat_at})
    return Beat(float(row.gap))
