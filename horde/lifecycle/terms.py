"""How long things last: a request waits, a job's lease runs, a done request stays readable. All in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A worker that posts progress renews its lease with its posts; one that does not gets all of it at the claim.
PROGRESS_LEASE = 60
# Posts come many times a second; a lease younger than this is left as it is.
RENEW_AFTER = 5.0
# A claim of such a worker that no post has named within this time is released.
START_WITHIN = 15
SHORTEST_LEASE, LONGEST_LEASE = 150, 3600
# A request outlives the lease of its running job by this much.
EXPIRY_AFTER_LEASE = 60
# A waiting handler holds its request attached this far ahead, and says so again every ATTACH_EVERY seconds.
ATTACHED_FOR, ATTACH_EVERY = 30, 5


@dataclass(frozen=True)
class Terms:
    """The configurable ones.

    Attributes:
        expiry: how long a request waits from its enqueue, or from its last result.
        retention: how long it stays readable once done.
        fixed_lease: a lease for every job, instead of the formula.
    """

    expiry: float = 1200
    retention: float = 1200
    fixed_lease: float | None = None

    def lease(self, *, max_length: int, tokens_per_second: float | None, posts_progress: bool) -> int:
        """Seconds of a new lease for a job of `max_length` tokens.

        Three times what the worker needs at its measured speed, and at least what a bridge of AI Horde itself
        waits for its backend (max_length / 2 + 10 s) with some slack.
        """
        if self.fixed_lease is not None:
            return max(1, math.ceil(self.fixed_lease))
        if posts_progress:
            return PROGRESS_LEASE
        expected = max_length / tokens_per_second if tokens_per_second else 0
        return math.ceil(min(LONGEST_LEASE, max(SHORTEST_LEASE, max_length / 2 + 30, 3 * expected)))
