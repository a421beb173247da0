"""What one step computes: made by the scheduler, carried out by the runner."""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens `start` to `start + count` of a sequence are computed in this step.

    Attributes:
        samples: whether that reaches what is its newest token now, so that its logits choose the next one. It stays
            as it is when that next token is appended.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.start + self.count == self.sequence.length)


@dataclass(slots=True)
class StepPlan:
    """One step; at most one entry a sequence.

    Attributes:
        entries: what to compute, decodes first.
        copies: (source, target) blocks to copy before anything is computed, in this order.
    """

    entries: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(entry.count for entry in self.entries)

    @property
    def decodes(self) -> int:
        """Sequences that compute their newest token only."""
        return sum(entry.count == 1 and entry.samples for entry in self.entries)
