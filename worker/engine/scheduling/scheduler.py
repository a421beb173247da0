"""Chooses what each step computes: decodes and chunks of prompts under one token budget.

    plan = scheduler.schedule()
    logits = runner.run(plan)
    scheduler.complete(plan)
    for entry in plan.entries:
        if entry.samples:
            ...  # fork, if it stands for several samples; then `append` its token or `finish` it

Everything goes by `priority`, then by order of arrival: who decodes, whose prompt is computed, who is let in. Nobody
is overtaken in the queue. When a running sequence finds no block to grow into, the last of the running gives its
blocks back and waits again at its old place, with all its tokens; what it had computed is computed anew, or found in
the prefix cache. So the first of the running always advances, and everyone's turn comes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from itertools import count

from worker.engine.scheduling.block_allocator import BlockAllocator
from worker.engine.scheduling.sequence import Sequence, SequenceState
from worker.engine.scheduling.step_plan import Scheduled, StepPlan


def _turn(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.priority, sequence.arrival, sequence.sample


class Scheduler:
    """Holds the waiting and the running sequences; used from a single thread.

    Args:
        allocator: of the blocks; nobody else may change its sequences.
        max_running: sequences side by side; one that is to be forked into n takes n seats from the start.
        token_budget: most tokens computed in a step; below `max_running`, decodes at the end of the order pause.
        chunk_limit: most tokens of a prompt computed in a step; None: only the budgets bound it.
        prefill_limit: given the number of decodes in a step, most tokens of prompts beside them (at least 1 counts).
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        *,
        max_running: int,
        token_budget: int,
        chunk_limit: int | None = None,
        prefill_limit: Callable[[int], int] | None = None,
    ) -> None:
        for name, value in (("max_running", max_running), ("token_budget", token_budget), ("chunk_limit", chunk_limit)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.allocator = allocator
        self.max_running = max_running
        self.token_budget = token_budget
        self.chunk_limit = token_budget if chunk_limit is None else chunk_limit
        self.prefill_limit = prefill_limit
        self.preemptions = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._arrivals = count()
        self._open: StepPlan | None = None

    @property
    def running(self) -> int:
        """Samples that have seats."""
        return sum(sequence.samples for sequence in self._running)

    @property
    def waiting(self) -> int:
        """Samples in the queue."""
        return sum(sequence.samples for sequence in self._waiting)

    def sequences(self, request_id: str) -> list[Sequence]:
        """Those of a request that have not ended."""
        return list(self._requests.get(request_id, ()))

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the queue.

        Raises:
            ValueError: it can never run here; nothing has changed.
        """
        allocator = self.allocator
        if sequence.state is not SequenceState.WAITING or sequence.block_table or sequence.computed:
            raise ValueError(f"{sequence.request_id} is not new")
        if not 1 <= sequence.length <= sequence.most_tokens:
            raise ValueError(f"{sequence.request_id} has {sequence.length} tokens of at most {sequence.most_tokens}")
        if allocator.blocks_for(sequence.most_tokens) > allocator.pool.total:
            fits = allocator.pool.total * allocator.block_size
            raise ValueError(f"{sequence.most_tokens} tokens do not fit in a cache of {fits}")
        if not 1 <= sequence.samples <= self.max_running:
            raise ValueError(f"{sequence.samples} samples cannot run side by side, at most {self.max_running}")
        sequence.arrival = next(self._arrivals)
        self._requests.setdefault(sequence.request_id, []).append(sequence)
        insort(self._waiting, sequence, key=_turn)

    def abort(self, request_id: str, *, forget: bool = False) -> None:
        """End all samples of a request at once, wherever they are; unknown ids are fine."""
        for sequence in self.sequences(request_id):
            self.finish(sequence, forget=forget)

    def finish(self, sequence: Sequence, *, forget: bool = False) -> None:
        """End one sequence and free its blocks; nothing happens if it has ended.

        Args:
            sequence: in any state.
            forget: its content is not to be trusted; see `BlockAllocator.release`.
        """
        if sequence.state is SequenceState.ENDED:
            return
        _remove(self._running if sequence.state is SequenceState.RUNNING else self._waiting, sequence)
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._requests[sequence.request_id]
        self.allocator.release(sequence, forget=forget)
        sequence.state = SequenceState.ENDED

    def append(self, sequence: Sequence, token: int) -> None:
        """Add the token that its logits chose.

        Raises:
            ValueError: it does not run, or has as many tokens as it may have.
        """
        if sequence.state is not SequenceState.RUNNING or sequence.to_compute:
            raise ValueError(f"{sequence.request_id} has no logits to choose a token from")
        if sequence.length >= sequence.most_tokens:
            raise ValueError(f"{sequence.request_id} has all its {sequence.most_tokens} tokens")
        sequence.token_ids.append(token)

    def fork(self, leader: Sequence) -> list[Sequence]:
        """The other `samples` of a sequence whose prompt has just been computed: running, in the same blocks.

        Each, like the leader, is to be given its own first token. Afterwards the leader stands for itself only.

        Raises:
            ValueError: its prompt has not been computed, or a step is open.
        """
        if leader.state is not SequenceState.RUNNING or leader.to_compute or self._open is not None:
            raise ValueError(f"{leader.request_id} can be forked only right after its prompt has been computed")
        children = []
        for sample in range(leader.sample + 1, leader.sample + leader.samples):
            child = Sequence(
                request_id=leader.request_id,
                sample=sample,
                token_ids=list(leader.token_ids),
                prompt_length=leader.prompt_length,
                most_tokens=leader.most_tokens,
                priority=leader.priority,
                arrival=leader.arrival,
                salt=leader.salt,
                state=SequenceState.RUNNING,
                cached=leader.cached,
                block_keys=list(leader.block_keys),
                preemptions=leader.preemptions,
            )
            self.allocator.fork(leader, child)
            self._requests[leader.request_id].append(child)
            insort(self._running, child, key=_turn)
            children.append(child)
        leader.samples = 1
        return children

    def schedule(self) -> StepPlan:
        """What to compute next; empty if and only if there is nothing to run.

        A plan that is never completed, because the step failed, costs nothing: the next one makes up for it, its
        copies included. It must not be run any more then, nor after one of its sequences has ended.
        """
        plan = StepPlan()
        preemptions = self.preemptions
        self._add_decodes(plan)
        budget = self.token_budget - plan.tokens
        if self.prefill_limit is not None and plan.entries:
            budget = min(budget, max(1, self.prefill_limit(len(plan.entries))))
        for sequence in self._running:
            if budget > 0 and sequence.to_compute > 1:
                # Its blocks are there since it was let in, and those that it writes are its own.
                budget -= self._add_chunk(plan, sequence, budget)
        if self.preemptions == preemptions:
            self._let_in(plan, budget)
        plan.copies = self.allocator.copies
        self._open = plan
        return plan

    def _add_decodes(self, plan: StepPlan) -> None:
        for sequence in list(self._running):
            if len(plan.entries) == self.token_budget:
                return
            if sequence.to_compute > 1 or sequence.state is not SequenceState.RUNNING:
                continue
            # With nothing to compute, its logits were lost before they gave a token; the last one gives them again.
            sequence.computed = sequence.length - 1
            if self._make_room(sequence):
                plan.entries.append(Scheduled(sequence, sequence.computed, 1))

    def _make_room(self, sequence: Sequence) -> bool:
        """Whether its next token has a place; if not, it has been preempted itself.

        The last of the running comes after all that are in the plan already, so none of those loses its blocks.
        """
        while not self.allocator.grow(sequence, sequence.length):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.allocator.release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.preemptions += 1
        self.preemptions += 1
        insort(self._waiting, sequence, key=_turn)

    def _add_chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        tokens = min(sequence.to_compute, self.chunk_limit, budget)
        plan.entries.append(Scheduled(sequence, sequence.computed, tokens))
        return tokens

    def _let_in(self, plan: StepPlan, budget: int) -> None:
        """Start waiting ones in their order, as long as there are seats, blocks, and tokens to compute.

        Who gets no token in this step stays in the queue: by the next one the cache may hold its beginning.
        """
        seats = self.running
        while self._waiting and budget > 0:
            head = self._waiting[0]
            # One block for each to grow into, or those just let in would soon be preempted. Alone, all blocks will do.
            reserve = seats + head.samples - 1 if self._running else 0
            if seats + head.samples > self.max_running or not self.allocator.admit(head, reserve):
                return
            del self._waiting[0]
            head.state = SequenceState.RUNNING
            insort(self._running, head, key=_turn)
            seats += head.samples
            budget -= self._add_chunk(plan, head, budget)

    def complete(self, plan: StepPlan) -> None:
        """The plan has been carried out: its tokens count as computed, its full blocks can be found by others.

        Sequences that have ended meanwhile are passed over.

        Raises:
            ValueError: it is not the newest plan, or has been completed.
        """
        if plan is not self._open:
            raise ValueError("only the newest plan can be completed, and only once")
        self._open = None
        self.allocator.copied()
        for entry in plan.entries:
            if entry.sequence.state is SequenceState.RUNNING:
                entry.sequence.computed = entry.start + entry.count
                self.allocator.register(entry.sequence)

    def check(self) -> None:
        """See that all books agree; for tests, and for an engine with nothing to do.

        Raises:
            RuntimeError: they do not; what is wrong.
        """
        self.allocator.check(self._running)
        held = {id(sequence) for samples in self._requests.values() for sequence in samples}
        if held != {id(sequence) for sequence in self._running + self._waiting}:
            raise RuntimeError("requests and queues hold different sequences")
        for queue, state in ((self._running, SequenceState.RUNNING), (self._waiting, SequenceState.WAITING)):
            if queue != sorted(queue, key=_turn) or any(sequence.state is not state for sequence in queue):
                raise RuntimeError(f"a sequence is out of its place among the {state.value}")
        if any(sequence.block_table for sequence in self._waiting):
            raise RuntimeError("a waiting sequence has blocks")
        if self.running > self.max_running:
            raise RuntimeError(f"{self.running} run, at most {self.max_running} may")


def _remove(queue: list[Sequence], sequence: Sequence) -> None:
    # Among many waiting ones a search from the front would take long.
    del queue[bisect_left(queue, _turn(sequence), key=_turn)]
