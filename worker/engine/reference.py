"""The reference engine: transformers' own `generate`, a token at a time. Slow and plain, and right.

Faster engines are held against it: for every request they must choose the tokens that this one chooses. Requests take
turns, each in a forward pass of its own, so no padding and no neighbour can touch a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from worker.engine.intake import Intake, Prepared
from worker.engine.interface import Delta, Engine, Event, Failed, Finished, GenerationRequest, RequestRefusedError
from worker.engine.sampling.batch_sampler import BatchSampler, Choice, SampleRow
from worker.engine.sampling.settings import SampleSettings
from worker.engine.text_stream import Piece, TextStream
from worker.models.loaded import LoadedModel


class NoChoiceError(Exception):
    """The sampler found no token to choose; the message says why."""


class _Chosen(LogitsProcessor):
    """Lets our sampler choose: every other token is ruled out, and greedy `generate` takes the one that is left."""

    def __init__(self, sampler: BatchSampler, row: SampleRow) -> None:
        self._sampler = sampler
        self._row = row
        self.choice: Choice | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002  the row holds the ids
        self.choice = self._sampler.choose(scores, [self._row])[0]
        if self.choice.token_id is None:
            raise NoChoiceError(self.choice.error)
        only = torch.full_like(scores, float("-inf"))
        only[0, self.choice.token_id] = 0.0
        return only


@dataclass(slots=True)
class _Sequence:
    """One running sample; `cache` holds keys and values of all tokens but the newest."""

    request: GenerationRequest
    sample: int
    token_ids: list[int]
    prompt_tokens: int
    settings: SampleSettings
    stream: TextStream
    ended: Piece | None
    cache: dict[str, Any] = field(default_factory=dict)


class ReferenceEngine(Engine):
    """Runs up to `max_batch` samples in turns; see the module."""

    def __init__(self, loaded: LoadedModel, *, max_batch: int = 1) -> None:
        self.max_batch = max_batch
        self.context_length = loaded.context_length
        self._model = loaded.model
        self._tokenizer = loaded.tokenizer
        self._eos = loaded.eos_token_ids
        self._intake = Intake(loaded, loaded.context_length)
        self._sampler = BatchSampler(self._intake.vocabulary, self._eos)
        # A model may bring sampling defaults of its own; what a request gets must come from the request alone.
        self._model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
        self._one_token = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=1, do_sample=False, pad_token_id=0, return_dict_in_generate=True, use_cache=True
        )
        self._sequences: dict[str, list[_Sequence]] = {}

    @property
    def running(self) -> int:
        """Samples held now."""
        return sum(map(len, self._sequences.values()))

    def add(self, request: GenerationRequest) -> None:
        """See `Engine.add`; it has no queue."""
        prepared = self._intake.read(request)
        if request.id in self._sequences:
            raise ValueError(f"request {request.id} is running already")
        if request.n > self.max_batch:
            raise RequestRefusedError("invalid_request", f"n is more than the {self.max_batch} texts of a batch")
        if self.capacity < request.n:
            raise ValueError(f"there is room for {self.capacity} of {self.max_batch} samples")
        self._sequences[request.id] = [self._begin(request, prepared, sample) for sample in range(request.n)]

    def step(self) -> list[Event]:
        """One token for every running sample."""
        events: list[Event] = []
        for request_id, samples in list(self._sequences.items()):
            try:
                told = [event for sequence in list(samples) for event in self._advance(sequence)]
            except Exception as error:  # noqa: BLE001  whatever a request does to the model, it fails alone
                del self._sequences[request_id]
                told = [Failed(request_id, f"{type(error).__name__}: {error}")]
            events += told
        return events

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        self._sequences.pop(request_id, None)

    def _begin(self, request: GenerationRequest, prepared: Prepared, sample: int) -> _Sequence:
        stream = TextStream.of(request, prepared, self._tokenizer, self._eos)
        settings = self._sampler.prepare(
            request.sampling,
            seed=request.seed,
            sample=sample,
            stop_token_ids=request.stop_token_ids,
            logprobs=request.logprobs,
        )
        token_ids = [*prepared.prompt, *request.prefix]
        ended = stream.resume(request.prefix)
        return _Sequence(request, sample, token_ids, len(prepared.prompt), settings, stream, ended)

    def _advance(self, sequence: _Sequence) -> list[Event]:
        if sequence.ended is not None:
            return [self._finish(sequence, sequence.ended)]
        choice = self._choose(sequence)
        assert choice.token_id is not None
        sequence.token_ids.append(choice.token_id)
        piece = sequence.stream.push(choice.token_id)
        logprobs = (choice.logprob,) if choice.logprob is not None and piece.token_ids else ()
        delta = Delta(sequence.request.id, piece.token_ids, piece.text, sequence.sample, logprobs)
        return [delta] if piece.reason is None else [delta, self._finish(sequence, piece)]

    def _choose(self, sequence: _Sequence) -> Choice:
        ids = torch.tensor([sequence.token_ids], device=self._model.device)
        chosen = _Chosen(self._sampler, SampleRow(sequence.settings, sequence.token_ids, sequence.prompt_tokens))
        with torch.inference_mode():
            answer: Any = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._one_token,
                logits_processor=LogitsProcessorList([chosen]),
                **sequence.cache,
            )
        # The argument's name changed within transformers 5.
        name = "cache" if hasattr(answer, "cache") else "past_key_values"
        sequence.cache = {name: getattr(answer, name)}
        assert chosen.choice is not None
        return chosen.choice

    def _finish(self, sequence: _Sequence, piece: Piece) -> Finished:
        samples = self._sequences[sequence.request.id]
        samples.remove(sequence)
        if not samples:
            del self._sequences[sequence.request.id]
        return piece.finished(
            sequence.request.id, sequence.sample, sequence.prompt_tokens, sequence.stream.tokens, cached_tokens=0
        )
