"""Drives a model runner by hand: plans by a simple rule, blocks in a shuffled order, the likeliest token."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from worker.engine.execution.model_runner import ModelRunner
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import Scheduled, StepPlan


class PlayedSteps:
    """Runs prompts side by side: each step decodes all that can, and computes up to `chunk` tokens of each prompt.

    Attributes:
        output: token ids of each prompt's answer.
        logits: [tokens, vocab] of each answer: what its tokens were chosen by.
    """

    def __init__(self, runner: ModelRunner, prompts: list[list[int]], new_tokens: int, *, block_size: int, chunk: int):
        self._block_size = block_size
        most = [len(prompt) + new_tokens for prompt in prompts]
        self._sequences = [Sequence(str(i), 0, list(prompt), len(prompt), most[i]) for i, prompt in enumerate(prompts)]
        self._free = list(range(sum(n // block_size + 1 for n in most)))
        random.Random(len(self._free)).shuffle(self._free)
        rows: list[list[Tensor]] = [[] for _ in prompts]
        while any(s.length < s.most_tokens for s in self._sequences):
            plan = self._plan(chunk)
            logits = iter(runner.step(plan))
            for entry in plan.entries:
                entry.sequence.computed += entry.count
                if entry.samples:
                    row = next(logits)
                    rows[int(entry.sequence.request_id)].append(row)
                    entry.sequence.token_ids.append(int(row.argmax()))
            assert next(logits, None) is None, "more rows than samples"
        self.output = [s.token_ids[s.prompt_length :] for s in self._sequences]
        self.logits = [torch.stack(each) for each in rows]

    def _plan(self, chunk: int) -> StepPlan:
        plan = StepPlan()
        open_sequences = [s for s in self._sequences if s.length < s.most_tokens]
        for sequence in open_sequences:
            if sequence.to_compute == 1 and sequence.computed >= sequence.prompt_length:
                plan.entries.append(Scheduled(sequence, sequence.computed, 1))
        for sequence in open_sequences:
            if sequence.computed < sequence.prompt_length:
                plan.entries.append(Scheduled(sequence, sequence.computed, min(chunk, sequence.to_compute)))
        for entry in plan.entries:
            table = entry.sequence.block_table
            while len(table) * self._block_size < entry.start + entry.count:
                table.append(self._free.pop())
        return plan
