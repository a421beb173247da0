"""The paged engine: continuous batching over a paged key-value cache.

A step is four calls: the scheduler says who computes what, the runner gives logits, the sampler chooses tokens, and
each sample's text stream says what can be shown and whether that was the end.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from torch import Tensor

from worker.engine.execution.assemble import Assembled, Options, assemble
from worker.engine.execution.step_profile import StepProfile
from worker.engine.intake import Intake, Prepared
from worker.engine.interface import (
    Delta,
    Engine,
    EngineStatistics,
    Event,
    Failed,
    GenerationRequest,
    RequestRefusedError,
)
from worker.engine.sampling.batch_sampler import BatchSampler, Choice, SampleRow
from worker.engine.sampling.settings import SampleSettings
from worker.engine.scheduling.block_allocator import BlockAllocator
from worker.engine.scheduling.pacing import PrefillPacer
from worker.engine.scheduling.scheduler import Scheduler
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import Scheduled, StepPlan
from worker.engine.text_stream import TextStream
from worker.models.loaded import LoadedModel

log = logging.getLogger(__name__)

# Prompt tokens that a step computes however long it takes, so that prompts get on beside many texts.
_SMALLEST_PREFILL = 16


@dataclass(slots=True)
class _Sample:
    """One sample that the engine holds."""

    request: GenerationRequest
    prepared: Prepared
    sequence: Sequence
    settings: SampleSettings
    stream: TextStream

    @property
    def row(self) -> SampleRow:
        return SampleRow(self.settings, self.sequence.token_ids, self.sequence.prompt_length)


class PagedEngine(Engine):
    """Runs up to `max_batch` samples side by side; more wait in its queue, so `add` never lacks capacity.

        engine = PagedEngine(load(resolve("SmolLM2-135M-Instruct")))
        engine.add(GenerationRequest(id="a", prompt="The sea is", max_new_tokens=20, seed=1))
        while engine.running:
            for event in engine.step():
                print(event)

    Args:
        loaded: the engine takes the model over: its weights are packed and its attention replaced.
        max_batch: samples side by side.
        cache_memory: bytes for keys and values; None: a share of what is free.
        block_size: tokens a block; on a GPU it may have to be more (see `attention/choose.py`).
        prefix_caching: find what was computed for another prompt of the same beginning and the same salt.
        step_seconds: while texts are decoded, prompts get no more of a step than makes it last about so long.
        token_budget: most tokens computed in a step.
        chunk_limit: most tokens of one prompt computed in a step; None: only the budget bounds it.
        backend: of attention: `auto`, or the name of one (see `attention/choose.py`).
        cuda_graphs: on an NVIDIA GPU, replay decode steps instead of launching their kernels one by one.

    Raises:
        UnsupportedModelError: its attention cannot be replaced; the message says what to do.
        CacheMemoryError: the cache would not hold a single text.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_batch: int = 32,
        cache_memory: int | None = None,
        block_size: int = 16,
        prefix_caching: bool = True,
        step_seconds: float = 0.25,
        token_budget: int = 512,
        chunk_limit: int | None = None,
        backend: str = "auto",
        cuda_graphs: bool = True,
    ) -> None:
        self.max_batch = max_batch
        token_budget = max(token_budget, max_batch)
        options = Options(
            block_size=block_size,
            max_batch=max_batch,
            cache_memory=cache_memory,
            backend=backend,
            token_budget=token_budget,
            cuda_graphs=cuda_graphs,
        )
        self._assembled: Assembled = assemble(loaded, options)
        shape = self._assembled.shape
        self._bytes_per_token = shape.bytes_per_block // shape.block_size
        # A text has to fit the cache too, or it could wait for ever.
        self.context_length = min(self._assembled.context_length, shape.blocks * shape.block_size)
        self._intake = Intake(loaded, self.context_length)
        self._decoder = loaded.tokenizer
        self._eos = loaded.eos_token_ids
        self._sampler = BatchSampler(self._intake.vocabulary, loaded.eos_token_ids)
        self._pacer = PrefillPacer(step_seconds, min(_SMALLEST_PREFILL, token_budget), token_budget)
        self._allocator = BlockAllocator(shape.blocks, shape.block_size, prefix_caching=prefix_caching)
        self._scheduler = Scheduler(
            self._allocator,
            max_running=max_batch,
            token_budget=token_budget,
            chunk_limit=chunk_limit,
            prefill_limit=self._pacer.limit,
        )
        self._samples: dict[str, list[_Sample]] = {}
        # What `add` found out already and the next step tells.
        self._early: dict[str, list[Event]] = {}
        self.profile = StepProfile()

    @property
    def running(self) -> int:
        """Samples held now, waiting ones included."""
        return self._scheduler.running + self._scheduler.waiting + len(self._early)

    @property
    def description(self) -> str:
        """What computes here, for logs and tables."""
        return self._assembled.description

    def statistics(self) -> EngineStatistics:
        """See `Engine.statistics`."""
        pool = self._allocator.pool
        return EngineStatistics(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_cached=pool.cached,
            block_size=self._allocator.block_size,
            kv_bytes_per_token=self._bytes_per_token,
            prefix_queries=self._allocator.prefix_queries,
            prefix_hits=self._allocator.prefix_hits,
            preemptions=self._scheduler.preemptions,
        )

    def add(self, request: GenerationRequest) -> None:
        """See `Engine.add`; there is always room in the queue."""
        prepared = self._intake.read(request)
        if request.id in self._samples or request.id in self._early:
            raise ValueError(f"request {request.id} is here already")
        if request.n > self.max_batch:
            raise RequestRefusedError("invalid_request", f"n is more than the {self.max_batch} texts of a batch")
        stream = TextStream.of(request, prepared, self._decoder, self._eos)
        ended = stream.resume(request.prefix)
        if ended is not None:
            self._early[request.id] = [
                ended.finished(request.id, 0, len(prepared.prompt), stream.tokens, cached_tokens=0)
            ]
            return
        sequence = Sequence(
            request_id=request.id,
            sample=0,
            token_ids=[*prepared.prompt, *request.prefix],
            prompt_length=len(prepared.prompt),
            most_tokens=len(prepared.prompt) + prepared.max_new_tokens,
            priority=request.priority,
            salt=request.cache_salt,
            samples=request.n,
        )
        sample = _Sample(request, prepared, sequence, self._settings(request, 0), stream)
        # Last, so that nothing is left behind by whatever goes wrong.
        self._scheduler.add(sequence)
        self._samples[request.id] = [sample]

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        self._early.pop(request_id, None)
        self._scheduler.abort(request_id)
        self._samples.pop(request_id, None)

    def step(self) -> list[Event]:
        """See `Engine.step`."""
        events = [event for early in self._early.values() for event in early]
        self._early.clear()
        with self.profile.phase("schedule"):
            plan = self._scheduler.schedule()
        if not plan.entries:
            return events
        began = time.perf_counter()
        self.profile.steps += 1
        try:
            with self.profile.phase("model"):
                logits = self._assembled.runner.step(plan)
        except Exception:
            log.exception("a step of %d sequences failed; each is tried alone", len(plan.entries))
            return events + self._step_apart(plan)
        events += self._advance(plan, [entry for entry in plan.entries if entry.samples], logits)
        self._observe(plan, time.perf_counter() - began)
        return events

    def check(self) -> None:
        """See that the books of the cache are right; for tests.

        Raises:
            RuntimeError: they are not.
        """
        self._scheduler.check()

    def _settings(self, request: GenerationRequest, sample: int) -> SampleSettings:
        return self._sampler.prepare(
            request.sampling,
            seed=request.seed,
            sample=sample,
            stop_token_ids=request.stop_token_ids,
            logprobs=request.logprobs,
        )

    def _step_apart(self, plan: StepPlan) -> list[Event]:
        """Nothing of a failed step counts, so it can be done again, a sequence at a time, until one of them fails."""
        events: list[Event] = []
        good: list[tuple[Scheduled, Tensor]] = []
        copies = plan.copies
        for entry in plan.entries:
            if entry.sequence.request_id not in self._samples:
                continue
            try:
                logits = self._assembled.runner.step(StepPlan([entry], copies))
            except Exception as error:  # noqa: BLE001  whatever a request does to the model, it fails alone
                events.append(self._fail(entry.sequence.request_id, f"{type(error).__name__}: {error}"))
            else:
                # Made, and not to be made again: a later copy would undo what has been computed into its target.
                copies = []
                good.append((entry, logits))
        self._scheduler.complete(plan)
        for entry, logits in good:
            # A sample that went well may have lost its request by another one since.
            if entry.samples and entry.sequence.request_id in self._samples:
                events += self._sample([entry], logits)
        return events

    def _advance(self, plan: StepPlan, sampling: list[Scheduled], logits: Tensor) -> list[Event]:
        self._scheduler.complete(plan)
        return self._sample(sampling, logits)

    def _sample(self, entries: list[Scheduled], logits: Tensor) -> list[Event]:
        """Choose a token for each of the entries' sequences, which have a row of logits each."""
        samples: list[_Sample] = []
        rows: list[int] = []
        for row, entry in enumerate(entries):
            for sample in self._samples_of(entry.sequence):
                samples.append(sample)
                rows.append(row)
        if len(rows) != logits.shape[0]:
            logits = logits[rows]
        with self.profile.phase("sample"):
            choices = self._sampler.choose(logits, [sample.row for sample in samples])
        with self.profile.phase("text"):
            return [
                event for sample, choice in zip(samples, choices, strict=True) for event in self._take(sample, choice)
            ]

    def _samples_of(self, sequence: Sequence) -> list[_Sample]:
        """The samples that a row of logits is for: several, when a prompt that they share has just been computed."""
        held = self._samples[sequence.request_id]
        if sequence.samples > 1:
            first = held[0]
            for child in self._scheduler.fork(sequence):
                request, prepared = first.request, first.prepared
                stream = TextStream.of(request, prepared, self._decoder, self._eos)
                held.append(_Sample(request, prepared, child, self._settings(request, child.sample), stream))
            return list(held)
        return [sample for sample in held if sample.sequence is sequence]

    def _take(self, sample: _Sample, choice: Choice) -> list[Event]:
        request_id, sequence = sample.request.id, sample.sequence
        if request_id not in self._samples:
            return []  # another sample of it has failed in this step
        if choice.token_id is None:
            return [self._fail(request_id, choice.error or "no token was chosen")]
        piece = sample.stream.push(choice.token_id)
        logprobs = (choice.logprob,) if choice.logprob is not None and piece.token_ids else ()
        delta = Delta(request_id, piece.token_ids, piece.text, sequence.sample, logprobs)
        if piece.reason is None:
            self._scheduler.append(sequence, choice.token_id)
            return [delta]
        self._scheduler.finish(sequence)
        held = self._samples[request_id]
        held.remove(sample)
        if not held:
            del self._samples[request_id]
        finished = piece.finished(
            request_id,
            sequence.sample,
            sequence.prompt_length,
            sample.stream.tokens,
            cached_tokens=sequence.cached or 0,
        )
        return [delta, finished]

    def _fail(self, request_id: str, message: str) -> Failed:
        # What it computed may be what made it fail.
        self._scheduler.abort(request_id, forget=True)
        self._samples.pop(request_id, None)
        return Failed(request_id, message)

    def _observe(self, plan: StepPlan, seconds: float) -> None:
        self._pacer.observe(plan.tokens - plan.decodes, plan.decodes, seconds)
