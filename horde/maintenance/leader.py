"""Who runs the passes: one process at a time holds a lease row, by the database's clock.

Only an optimisation: every pass is a series of compare-and-sets. The holder is a random id per process, never a host name.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from horde.db.database import Transaction

TERM_SECONDS = 15
# The holder stops this long before its lease ends, by its own monotonic clock, which goes on while it is paused.
STEP_DOWN_BEFORE = 5

TAKE_OR_RENEW = """
UPDATE leader SET term = CASE WHEN holder = %(me)s THEN term ELSE term + 1 END, holder = %(me)s,
                  until = horde_now() + make_interval(secs => %(seconds)s)
WHERE id = 1 AND (holder = %(me)s OR holder IS NULL OR until < horde_now())
RETURNING term
"""

GIVE_UP = "UPDATE leader SET holder = NULL, until = NULL WHERE id = 1 AND holder = %(me)s"


@dataclass
class Leadership:
    """This process's claim to lead, which it believes in only until shortly before its lease ends."""

    me: uuid.UUID = field(default_factory=uuid.uuid4)
    _until: float = 0.0

    def take_or_renew(self, tx: Transaction) -> bool:
        """Try to become or stay leader; a failure, whatever its kind, means not being it."""
        self._until = 0.0
        asked = time.monotonic()
        row = tx.execute(TAKE_OR_RENEW, {"me": self.me, "seconds": TERM_SECONDS}).one_or_none()
        if row is not None:
            self._until = asked + TERM_SECONDS - STEP_DOWN_BEFORE
        return row is not None

    def holds(self) -> bool:
        """Whether this process may go on leading at this moment."""
        return time.monotonic() < self._until

    def give_up(self, tx: Transaction) -> None:
        """Let the next one lead at once."""
        self._until = 0.0
        tx.execute(GIVE_UP, {"me": self.me})
