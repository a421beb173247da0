"""Random walks of the scheduler over a played model: all books agree, and every text is the one it would be alone."""

from __future__ import annotations

import hashlib

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.worker.engine.scheduling.played_model import PlayedEngine, make_sequence, text_of
from worker.engine.scheduling.block_allocator import BlockAllocator
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.scheduling.sequence import Sequence, SequenceState
from worker.engine.scheduling.step_plan import StepPlan

LIVE_REQUESTS = 10
picks = st.integers(0, 5)


def weak_digest(data: bytes) -> bytes:
    """Four bits."""
    return bytes([hashlib.blake2b(data, digest_size=1).digest()[0] & 15])


class Walk(RuleBasedStateMachine):
    """The machine; `prompts` are those of the requests that should get their texts."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, tuple[list[int], int]] = {}
        self.added = 0

    @initialize(
        block_size=st.integers(1, 16),
        blocks=st.integers(3, 24),
        max_running=st.integers(1, 6),
        token_budget=st.integers(1, 40),
        chunk_limit=st.sampled_from([None, 1, 7]),
        prefill_limit=st.sampled_from([None, lambda decodes: 3]),
        weak=st.booleans(),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def begin(self, block_size, blocks, max_running, token_budget, chunk_limit, prefill_limit, weak, prefix_caching):
        digest = weak_digest if weak else None
        allocator = BlockAllocator(blocks, block_size, prefix_caching=prefix_caching, digest=digest)
        self.scheduler = Scheduler(
            allocator,
            max_running=max_running,
            token_budget=token_budget,
            chunk_limit=chunk_limit,
            prefill_limit=prefill_limit,
        )
        self.engine = PlayedEngine(self.scheduler)
        self.room = blocks * block_size

    @rule(
        beginning=st.sampled_from([(), (1,) * 16, (1, 2) * 10, (1,) * 10 + (2,) * 10]),
        length=st.integers(1, 20),
        ending=st.lists(st.integers(0, 1), max_size=6),
        new_tokens=st.integers(1, 20),
        samples=st.sampled_from([1, 1, 2, 3]),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "", "other"]),
    )
    def add(self, beginning, length, ending, new_tokens, samples, priority, salt):
        if len(self.scheduler._requests) >= LIVE_REQUESTS:
            return
        prompt = [*beginning[:length], *ending] or [0]
        name = f"{self.added}"
        sequence = make_sequence(name, prompt, new_tokens, samples=samples, priority=priority, salt=salt)
        fits = (
            -(-(len(prompt) + new_tokens) // self.scheduler.allocator.block_size) <= self.scheduler.allocator.pool.total
        )
        try:
            self.scheduler.add(sequence)
        except ValueError:
            assert not fits or samples > self.scheduler.max_running
            return
        assert fits
        self.added += 1
        self.prompts[name] = (prompt, new_tokens)

    @rule(aborted=st.none() | picks, lost=st.none() | picks)
    def step(self, aborted, lost):
        """A step, perhaps with an abort while the model runs, or with logits that never become a token."""
        plan = self._plan()
        self.engine.model.run(plan)
        if aborted is not None:
            self._abort(aborted)
        self.scheduler.complete(plan)
        sampled = [entry.sequence for entry in plan.entries if entry.samples]
        self.engine.give_tokens(sampled if lost is None else sampled[:lost])

    @rule(count=st.integers(2, 8))
    def steps(self, count):
        for _ in range(count):
            self.step(None, None)
            self.books_and_contents_agree()

    @rule(pick=picks)
    def spoil(self, pick):
        """A sequence computes nonsense in the step that samples it, and is thrown out for it."""
        plan = self._plan()
        sampled = [entry.sequence for entry in plan.entries if entry.samples]
        guilty = sampled[pick % len(sampled)] if sampled else None
        self.engine.model.run(plan, spoilt=[] if guilty is None else [guilty])
        self.scheduler.complete(plan)
        if guilty is not None:
            self.scheduler.finish(guilty, forget=True)
            if guilty.samples > 1:
                self.prompts.pop(guilty.request_id)
        self.engine.give_tokens(sampled)

    @rule(copies=st.integers(0, 3), entries=st.integers(0, 6))
    def fail(self, copies, entries):
        """The step breaks down half-way."""
        self.engine.model.break_down(self._plan(), copies=copies, entries=entries)

    @rule(pick=picks)
    def abort(self, pick):
        self._abort(pick)

    @rule(pick=picks)
    def end_one_sample(self, pick):
        live = self._live()
        if live:
            sequence = live[pick % len(live)]
            self.scheduler.finish(sequence)

    @rule()
    def evict(self):
        pool = self.scheduler.allocator.pool
        for block in pool.allocate(pool.free):
            pool.release(block)
        assert pool.cached == 0

    @invariant()
    def books_and_contents_agree(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        self.engine.model.check(self._live())
        for (name, sample), text in self.engine.texts.items():
            prompt, new_tokens = self.prompts[name]
            assert text == text_of(prompt, new_tokens, sample)
        self.engine.texts.clear()

    def teardown(self) -> None:
        if hasattr(self, "scheduler"):
            self.engine.drain()
            self.books_and_contents_agree()

    def _live(self) -> list[Sequence]:
        return [sequence for name in self.scheduler._requests for sequence in self.scheduler.sequences(name)]

    def _abort(self, pick: int) -> None:
        names = list(self.scheduler._requests)
        self.scheduler.abort(names[pick % len(names)] if names else "nobody")

    def _plan(self) -> StepPlan:
        scheduler = self.scheduler
        something = scheduler.running + scheduler.waiting > 0
        plan = scheduler.schedule()
        assert bool(plan.entries) == something
        assert plan.tokens <= scheduler.token_budget
        planned = [entry.sequence for entry in plan.entries]
        assert len({id(sequence) for sequence in planned}) == len(planned)
        decodes = [
            entry.count == 1 and entry.samples for entry in plan.entries if entry.start >= entry.sequence.prompt_length
        ]
        assert decodes == sorted(decodes, reverse=True)
        for entry in plan.entries:
            assert entry.sequence.state is SequenceState.RUNNING
            assert 0 <= entry.start < entry.start + entry.count <= entry.sequence.length
        return plan


def test_no_walk_loses_a_block_or_changes_a_text() -> None:
    run_state_machine_as_test(
        Walk,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
