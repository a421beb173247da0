"""A model without tensors: its cache remembers what was written where, and its next token depends on what it reads.

Keys and values of a token depend on all tokens before it, so a place of a block holds the whole text up to its token
(and the salt, which must never be shared across). Reading through a block table gives the right text only if every
block was shared, copied, written and found rightly.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence as Many
from typing import Any

from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.scheduling.sequence import Sequence, SequenceState
from worker.engine.scheduling.step_plan import Scheduled, StepPlan

VOCABULARY = 5
Place = tuple[str, tuple[int, ...]] | None
GARBAGE: Place = ("garbage", ())


def make_sequence(request_id: str, prompt: Many[int], new_tokens: int = 4, **options: Any) -> Sequence:
    tokens = list(prompt)
    return Sequence(request_id, 0, tokens, len(tokens), len(tokens) + new_tokens, **options)


def next_token(text: Many[int], sample: int) -> int:
    return zlib.crc32(repr((tuple(text), sample)).encode()) % VOCABULARY


def text_of(prompt: Many[int], new_tokens: int, sample: int = 0) -> list[int]:
    """What a sequence that has the machine for itself becomes."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(next_token(tokens, sample))
    return tokens


class PlayedModel:
    """The cache of `scheduler`'s blocks and the model that fills it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.block_size = scheduler.allocator.block_size
        self.blocks: list[list[Place]] = [[None] * self.block_size for _ in range(scheduler.allocator.pool.total)]

    def run(self, plan: StepPlan, *, spoilt: Many[Sequence] = ()) -> None:
        """Carry a plan out. What `spoilt` sequences write is garbage."""
        self.copy(plan)
        for entry in plan.entries:
            self._write(entry, garbage=entry.sequence in spoilt)
        for entry in plan.entries:
            if entry.samples and entry.sequence not in spoilt:
                table = entry.sequence.block_table
                assert self._read(table, entry.sequence.length) == self._own(entry.sequence)

    def break_down(self, plan: StepPlan, *, copies: int, entries: int) -> None:
        """Carry out the first part of a plan and leave garbage behind in every place that it was to write."""
        for source, target in plan.copies[:copies]:
            self.blocks[target] = list(self.blocks[source])
        if copies >= len(plan.copies):
            for entry in plan.entries[:entries]:
                self._write(entry, garbage=True)

    def copy(self, plan: StepPlan) -> None:
        for source, target in plan.copies:
            self.blocks[target] = list(self.blocks[source])

    def _write(self, entry: Scheduled, *, garbage: bool) -> None:
        sequence, pool = entry.sequence, self.scheduler.allocator.pool
        sources = [source for source, _ in self.scheduler.allocator.copies]
        for position in range(entry.start, entry.start + entry.count):
            block = sequence.block_table[position // self.block_size]
            assert pool.references(block) - sources.count(block) == 1, "a shared block is written"
            assert pool._cached[block] is None, "a block that others can find is written"
            place = GARBAGE if garbage else (sequence.salt, tuple(sequence.token_ids[: position + 1]))
            self.blocks[block][position % self.block_size] = place

    def _read(self, table: Many[int], end: int) -> list[Place]:
        return [self.blocks[table[i // self.block_size]][i % self.block_size] for i in range(end)]

    def _own(self, sequence: Sequence) -> list[Place]:
        return [(sequence.salt, tuple(sequence.token_ids[: i + 1])) for i in range(sequence.length)]

    def check(self, running: Many[Sequence]) -> None:
        """Every place that somebody relies on, or could come to rely on, holds what it should."""
        # A copy that is still owed is as good as its source.
        owed = {target: source for source, target in self.scheduler.allocator.copies}
        for sequence in running:
            table = [owed.get(block, block) for block in sequence.block_table]
            assert self._read(table, sequence.computed) == self._own(sequence)[: sequence.computed]
        for entry in self.scheduler.allocator.pool._by_key.values():
            chain = [entry]
            while chain[0].parent is not None:
                chain.insert(0, chain[0].parent)
            if all(link.block is not None for link in chain):  # else it cannot be found
                text = tuple(token for link in chain for token in link.tokens)
                end = len(text) - self.block_size
                assert entry.block is not None
                assert self.blocks[entry.block] == [
                    (entry.salt, text[: end + i + 1]) for i in range(self.block_size)
                ], "a registered block holds something else"


class PlayedEngine:
    """The loop around a scheduler, with the played model in it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.model = PlayedModel(scheduler)
        self.texts: dict[tuple[str, int], list[int]] = {}
        self.steps = 0

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.model.run(plan)
        self.scheduler.complete(plan)
        self.give_tokens([entry.sequence for entry in plan.entries if entry.samples])
        self.steps += 1
        return plan

    def give_tokens(self, sequences: Many[Sequence]) -> None:
        """Fork those that are to be forked, then append a token to each, and end those that are complete."""
        for leader in sequences:
            if leader.state is SequenceState.RUNNING:
                for sequence in (leader, *self.scheduler.fork(leader)):
                    self.scheduler.append(sequence, next_token(sequence.token_ids, sequence.sample))
                    if sequence.length == sequence.most_tokens:
                        self.scheduler.finish(sequence)
                        self.texts[sequence.request_id, sequence.sample] = sequence.token_ids

    def drain(self, most_steps: int = 2000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.running + self.scheduler.waiting:
                break
            assert self.step().entries, "something waits and nothing runs"
        assert self.scheduler.running + self.scheduler.waiting == 0
        self.scheduler.check()
        pool = self.scheduler.allocator.pool
        assert pool.free == pool.total
