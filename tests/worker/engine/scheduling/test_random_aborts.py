"""Ten thousand requests aborted at any moment: no block is lost, and those that are left get their texts."""

from __future__ import annotations

import random

from tests.worker.engine.scheduling.played_model import PlayedEngine, make_sequence, text_of
from worker.engine.scheduling.block_allocator import BlockAllocator
from worker.engine.scheduling.scheduler import Scheduler

ABORTS = 10_000


def test_no_block_is_lost_by_ten_thousand_aborts() -> None:
    dice = random.Random(20261130)
    scheduler = Scheduler(BlockAllocator(16, 4), max_running=8, token_budget=24, chunk_limit=4)
    engine = PlayedEngine(scheduler)
    prompts: dict[str, list[int]] = {}
    moments = dict.fromkeys(("waiting", "preempted", "prefill", "decode", "in a step", "ended", "forked"), 0)
    number = aborts = 0
    while aborts < ABORTS:
        while len(scheduler._requests) < 14:
            number += 1
            prompt = [dice.randrange(2)] * dice.randrange(1, 14) + [dice.randrange(3) for _ in range(dice.randrange(4))]
            prompts[f"{number}"] = prompt
            samples = dice.choice([1, 1, 1, 3])
            scheduler.add(make_sequence(f"{number}", prompt, dice.randrange(1, 30), samples=samples))
        plan = scheduler.schedule()
        engine.model.run(plan)
        in_step = dice.random() < 0.5
        if not in_step:
            scheduler.complete(plan)
            engine.give_tokens([entry.sequence for entry in plan.entries if entry.samples])
        for _ in range(dice.randrange(3)):
            # Mostly one that is there, of the rarer states as often as it can be; else one that has gone or never came.
            names = list(scheduler._requests)
            rare = [name for name in names if _moment(scheduler, name, in_step=in_step) in ("preempted", "prefill")]
            name = dice.choice([dice.choice(rare or names), dice.choice(names), f"{dice.randrange(number + 2)}"])
            moments[_moment(scheduler, name, in_step=in_step)] += 1
            scheduler.abort(name)
            prompts.pop(name, None)
            aborts += 1
        if in_step:
            scheduler.complete(plan)
            engine.give_tokens([entry.sequence for entry in plan.entries if entry.samples])
        if aborts % 100 < 3:
            scheduler.check()
    engine.drain()
    assert min(moments.values()) > 100, moments
    survivors = {key: text for key, text in engine.texts.items() if key[0] in prompts}
    assert len(survivors) > 100
    for (name, sample), text in survivors.items():
        prompt = prompts[name]
        assert text == text_of(prompt, len(text) - len(prompt), sample)


def _moment(scheduler: Scheduler, name: str, *, in_step: bool) -> str:
    sequences = scheduler.sequences(name)
    if not sequences:
        return "ended"
    if len(sequences) > 1:
        return "forked"
    (sequence,) = sequences
    if not sequence.block_table:
        return "preempted" if sequence.preemptions else "waiting"
    if in_step:
        return "in a step"
    return "prefill" if sequence.computed < sequence.prompt_length else "decode"
