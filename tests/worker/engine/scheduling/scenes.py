"""What the scenes with a scheduler begin with, and how their plans are shown."""

from __future__ import annotations

from tests.worker.engine.scheduling.played_model import PlayedEngine, make_sequence
from worker.engine.scheduling.block_allocator import BlockAllocator
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.scheduling.step_plan import StepPlan


def make_engine(blocks=100, block_size=4, max_running=8, token_budget=64, prefix_caching=True, **options):
    allocator = BlockAllocator(blocks, block_size, prefix_caching=prefix_caching)
    return PlayedEngine(Scheduler(allocator, max_running=max_running, token_budget=token_budget, **options))


def add(engine: PlayedEngine, request_id: str, length: int, new_tokens: int = 4, **options):
    """A prompt that begins like no other request's."""
    sequence = make_sequence(request_id, [ord(request_id[0]), *range(length - 1)], new_tokens, **options)
    engine.scheduler.add(sequence)
    return sequence


def shown(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(entry.sequence.request_id, entry.start, entry.count) for entry in plan.entries]
