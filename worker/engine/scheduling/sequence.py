"""One sample on its way through the engine: the object that scheduler, runner and sampler pass along."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from worker.engine.scheduling.block_pool import CachedBlock


class SequenceState(Enum):
    """Where a sequence stands; a preempted one is `WAITING` again."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens of one sample and the blocks that hold their keys and values. All counts are tokens.

    Attributes:
        request_id: several samples of one request share it.
        sample: which of them this is.
        token_ids: prompt, then output so far.
        prompt_length: how many of `token_ids` are prompt.
        most_tokens: prompt and longest possible output together; blocks for all of them exist in an empty pool.
        priority: lower runs first.
        arrival: order of `add`, set there; ties of `priority` are broken by it. Samples of one request share it.
        salt: of the prefix cache.
        samples: how many samples are forked from this one when its prompt is computed (itself included).
        block_table: block ids; token i lies in `block_table[i // block_size]` at `i % block_size`.
        computed: the first so many of `token_ids` have their keys and values in the blocks.
        cached: the first so many of the prompt were found in the prefix cache when it first ran.
        block_keys: keys of the full blocks so far, made as they are needed (see `prefix_keys.py`).
        chain: what the prefix cache knows its first full blocks as; it may be an equal block of another sequence.
        preemptions: how often it had to give its blocks back.
    """

    request_id: str
    sample: int
    token_ids: list[int]
    prompt_length: int
    most_tokens: int
    priority: int = 0
    arrival: int = 0
    salt: str = ""
    samples: int = 1
    state: SequenceState = SequenceState.WAITING
    block_table: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int | None = None
    block_keys: list[bytes] = field(default_factory=list, repr=False)
    chain: list[CachedBlock] = field(default_factory=list, repr=False)
    preemptions: int = 0

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    @property
    def to_compute(self) -> int:
        """Tokens whose keys and values are missing; at least 1 while it runs."""
        return len(self.token_ids) - self.computed

    def block_tokens(self, index: int, block_size: int) -> tuple[int, ...]:
        """The tokens in the block of that index."""
        return tuple(self.token_ids[index * block_size : (index + 1) * block_size])
