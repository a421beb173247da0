"""How long to wait: between tries, between questions, and at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """The worker's waits, in seconds.

    Args:
        first_retry, longest_retry: bounds of the delays before a failed call is sent again.
        pause: between two pops while the broker has paused this worker.
        shortest_round: a broker that answers "nothing" at once (it knows no `wait`, or has too many polls) is asked
            no more often than this.
        stream: between two posts while somebody waits for a job: they carry its tokens, and their answers a hang-up.
        progress: between two posts while nobody does: they tell which jobs are held; less where leases are short.
        stalled: a step of the engine that takes longer is taken for one that never ends: no more posts, so that the
            broker gives the jobs to somebody else.
        flush: how long results may still be delivered after a drain.
        hurried_flush: the same after a second stop.
        goodbye: how long the broker may then be told that this worker leaves.
    """

    first_retry: float = 0.5
    longest_retry: float = 15.0
    pause: float = 30.0
    shortest_round: float = 2.0
    stream: float = 0.05
    progress: float = 2.0
    stalled: float = 300.0
    flush: float = 60.0
    hurried_flush: float = 5.0
    goodbye: float = 3.0

    def backoff(self) -> Backoff:
        """Delays for one call."""
        return Backoff(self.first_retry, self.longest_retry)


class Backoff:
    """Doubling delays with jitter, so that workers of a restarted broker do not all come back in one instant.

    Args:
        first: upper bound of the first delay, seconds.
        longest: upper bound of any delay of our own choosing, seconds.
    """

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._tries = 0

    def next(self, retry_after: float | None = None) -> float:
        """Seconds to wait now; never less than the broker asks for."""
        bound = min(self._longest, self._first * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return max(retry_after or 0.0, bound * random.uniform(0.5, 1.0))  # noqa: S311  spreads load, guards nothing

    def reset(self) -> None:
        """Begin again after a success."""
        self._tries = 0
