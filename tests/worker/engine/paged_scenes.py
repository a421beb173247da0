"""What tests of the paged engine begin with: small engines with pools of any size, runs, and a plain model beside them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.worker.tiny_model import EOS, make_tiny_model
from worker.engine.interface import (
    Delta,
    Engine,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    Sampling,
    TokenLogprob,
)
from worker.engine.paged import PagedEngine
from worker.engine.reference import ReferenceEngine
from worker.engine.scheduling.step_plan import StepPlan
from worker.models.loaded import LoadedModel

GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=1.3, top_p=0.95)
# Two logits that are further apart than this do not change places, whatever computes them in fp32.
GAP = 1e-4
BYTES_A_TOKEN = 512  # of the tiny model: 2 layers, 2 heads of 16 keys and 16 values, 4 bytes each


@contextmanager
def one_thread() -> Iterator[None]:
    """For the tiny model: to share its work takes longer than to do it, by far if others want the cores as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def pristine(context_length: int = 512, seed: int = 0) -> LoadedModel:
    """The tiny model, for those who leave it as it is."""
    return make_tiny_model(seed, context_length)


def fresh(loaded: LoadedModel, eos: Sequence[int] | None = None) -> LoadedModel:
    """A copy of a model, for an engine to take over."""
    return LoadedModel(
        copy.deepcopy(loaded.model),
        loaded.tokenizer,
        loaded.context_length,
        loaded.eos_token_ids if eos is None else tuple(eos),
    )


def make_engine(
    *,
    context_length: int = 512,
    tokens: int = 2048,
    block_size: int = 16,
    eos: Sequence[int] = (EOS,),
    loaded: LoadedModel | None = None,
    **options: Any,
) -> PagedEngine:
    """An engine on the tiny model with room for so many `tokens`; by default prompts never wait for the clock."""
    model = loaded or fresh(pristine(context_length), eos)
    usual = {"max_batch": 8, "step_seconds": 60.0}
    return PagedEngine(model, cache_memory=tokens * BYTES_A_TOKEN, block_size=block_size, **{**usual, **options})


def request(name: str = "a", prompt: str | tuple[int, ...] = "The capital", **settings: Any) -> GenerationRequest:
    usual: dict[str, Any] = {"id": name, "prompt": prompt, "max_new_tokens": 16, "seed": 5, "sampling": GREEDY}
    return GenerationRequest(**{**usual, **settings})


@dataclass
class Text:
    """What came out for one sample; `shown` is its text after each of the tokens."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    shown: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | None = None

    @property
    def outcome(self) -> tuple[object, ...]:
        """All that must not depend on neighbours, blocks, chunks or preemptions."""
        assert self.end is not None, "it has not finished"
        end = self.end
        return self.token_ids, self.text, end.reason, end.stop_string, end.prompt_tokens, end.completion_tokens


class Run:
    """Drives an engine and keeps what comes out; after each step the books of the engine must be right.

    Attributes:
        texts: by request id and sample.
        failures: messages, by request id.
        first_token: the step that brought the first token of each sample, in the order in which they came.
    """

    def __init__(self, engine: Engine, *requests: GenerationRequest) -> None:
        self.engine = engine
        self.texts: dict[tuple[str, int], Text] = {}
        self.failures: dict[str, str] = {}
        self.first_token: dict[tuple[str, int], int] = {}
        self.steps = 0
        self.add(*requests)

    def add(self, *requests: GenerationRequest) -> Run:
        for each in requests:
            self.engine.add(each)
        return self

    def step(self) -> list[Event]:
        events = self.engine.step()
        self.steps += 1
        for event in events:
            self._take(event)
        self.check()
        return events

    def drain(self, after_each: Callable[[], object] = lambda: None, most_steps: int = 3000) -> Run:
        """Step until nothing is left; then every block is free. `after_each` step something else may happen."""
        for _ in range(most_steps):
            if not self.engine.running:
                break
            self.step()
            after_each()
        assert self.engine.running == 0, "it does not come to an end"
        self.check()
        state = self.engine.statistics()
        assert state.blocks_free == state.blocks_total
        return self

    def check(self) -> None:
        if isinstance(self.engine, PagedEngine):
            self.engine.check()

    def _take(self, event: Event) -> None:
        assert event.request_id not in self.failures, "an event after the end"
        if isinstance(event, Failed):
            self.failures[event.request_id] = event.message
            return
        text = self.texts.setdefault((event.request_id, event.sample), Text())
        assert text.end is None, "an event after the end"
        if isinstance(event, Finished):
            text.end = event
            return
        assert isinstance(event, Delta)
        self.first_token.setdefault((event.request_id, event.sample), self.steps)
        text.token_ids += event.token_ids
        text.text += event.text
        text.shown += [text.text] * len(event.token_ids)
        text.logprobs += event.logprobs

    @property
    def outcomes(self) -> dict[tuple[str, int], tuple[object, ...]]:
        assert not self.failures, self.failures
        return {key: text.outcome for key, text in self.texts.items()}

    def tokens(self, name: str = "a", sample: int = 0) -> list[int]:
        return self.texts[name, sample].token_ids

    def cached(self, name: str) -> int:
        """Prompt tokens of a finished request that were found computed."""
        end = self.texts[name, 0].end
        assert end is not None
        return end.cached_tokens


def run(engine: Engine, *requests: GenerationRequest) -> Run:
    return Run(engine, *requests).drain()


def reference(requests: Iterable[GenerationRequest], eos: Sequence[int] = (EOS,)) -> Run:
    """The same by the reference engine, one request at a time."""
    made = Run(ReferenceEngine(fresh(pristine(), eos), max_batch=8))
    for each in requests:
        made.add(each).drain()
    return made


def preempt(engine: PagedEngine, leave: int = 0) -> None:
    """Take the blocks of all that run but the first `leave`, as if the pool had run out."""
    for sequence in reversed(engine._scheduler._running[leave:]):
        engine._scheduler._preempt(sequence)
    engine.check()


class Interference:
    """Sits between an engine and its runner.

    Args:
        before: is called with each plan first; it may raise.
        after: is called with the plan and its logits, and may change them.
    """

    def __init__(self, engine: PagedEngine, before: Any = None, after: Any = None) -> None:
        runner = engine._assembled.runner
        self._step = runner.step
        self._before, self._after = before, after
        self.calls = 0
        runner.step = self  # type: ignore[method-assign]

    def __call__(self, plan: StepPlan) -> Tensor:
        self.calls += 1
        if self._before is not None:
            self._before(plan)
        logits = self._step(plan)
        if self._after is not None:
            with torch.inference_mode():
                self._after(plan, logits)
        return logits


def plain_logits(loaded: LoadedModel, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """One forward pass of transformers' own code: [tokens, vocab] of each text.

    Shorter ones are filled up at their end, where nothing that comes before can see it.
    """
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *([0] * (longest - len(text)))] for text in texts])
    with torch.inference_mode():
        logits: Tensor = loaded.model(input_ids=ids, use_cache=False).logits.float()
    return [rows[: len(text)] for rows, text in zip(logits, texts, strict=True)]


def assert_greedy(
    loaded: LoadedModel, answers: Sequence[tuple[Sequence[int], Sequence[int]]], most_texts: int = 16
) -> list[Tensor]:
    """See that each token of each answer is the plain model's clear choice after those before it.

    Args:
        loaded: the plain model.
        answers: prompts and outputs.
        most_texts: in one forward pass.

    Returns:
        The logits that chose each answer's tokens.
    """
    found: dict[int, Tensor] = {}
    by_length = sorted(range(len(answers)), key=lambda i: len(answers[i][0]))
    for begin in range(0, len(answers), most_texts):
        members = by_length[begin : begin + most_texts]
        texts = [[*answers[index][0], *answers[index][1]] for index in members]
        for index, logits in zip(members, plain_logits(loaded, texts), strict=True):
            prompt, output = answers[index]
            rows = found[index] = logits[len(prompt) - 1 : -1]
            best = rows.topk(2)
            assert best.indices[:, 0].tolist() == list(output)
            gap = float((best.values[:, 0] - best.values[:, 1]).min())
            assert gap > GAP, f"two tokens are about equally likely ({gap}): take another text"
    return [found[index] for index in range(len(answers))]
