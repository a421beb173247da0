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

from worker.engine.detokenizer import Detokenizer
from worker.engine.interface import (
    Delta,
    Engine,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    RequestRefusedError,
)
from worker.engine.stop_checker import StopChecker
from worker.engine.token_sampler import TokenSampler
from worker.models.loaded import LoadedModel


class _Chosen(LogitsProcessor):
    """Lets our sampler choose: every other token is ruled out, and greedy `generate` takes the one that is left."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = self._sampler.choose(input_ids[0], scores[0])
        only = torch.full_like(scores, float("-inf"))
        only[0, token] = 0.0
        return only


@dataclass(slots=True)
class _Sequence:
    """One running request; `cache` holds keys and values of all tokens but the newest."""

    request: GenerationRequest
    token_ids: list[int]
    prompt_tokens: int
    max_new_tokens: int
    sampler: TokenSampler
    detokenizer: Detokenizer
    stop: StopChecker
    cache: dict[str, Any] = field(default_factory=dict)

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


class ReferenceEngine(Engine):
    """Runs up to `max_batch` requests in turns; see the module."""

    def __init__(self, loaded: LoadedModel, *, max_batch: int = 1) -> None:
        self.max_batch = max_batch
        self.context_length = loaded.context_length
        self._model = loaded.model
        self._tokenizer = loaded.tokenizer
        self._eos = loaded.eos_token_ids
        self._vocabulary = min(len(loaded.tokenizer), int(loaded.model.config.get_text_config().vocab_size))
        # A model may bring sampling defaults of its own; what a request gets must come from the request alone.
        self._model.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
        self._one_token = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=1, do_sample=False, pad_token_id=0, return_dict_in_generate=True, use_cache=True
        )
        self._sequences: dict[str, _Sequence] = {}

    @property
    def running(self) -> int:
        """Requests held now."""
        return len(self._sequences)

    def add(self, request: GenerationRequest) -> None:
        """See `Engine.add`."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id} is running already")
        if self.capacity < 1:
            raise ValueError(f"{self.max_batch} requests are running already")
        if request.max_new_tokens < 1:
            raise RequestRefusedError("invalid_request", "max_new_tokens is less than 1")
        prompt, max_new_tokens = self._fit(request, self._encode(request.prompt))
        self._sequences[request.id] = _Sequence(
            request=request,
            token_ids=prompt,
            prompt_tokens=len(prompt),
            max_new_tokens=max_new_tokens,
            sampler=TokenSampler(request.sampling, request.seed, eos_token_ids=self._eos, vocabulary=self._vocabulary),
            detokenizer=Detokenizer(self._tokenizer, prompt),
            stop=StopChecker(request.stop),
        )

    def step(self) -> list[Event]:
        """One token for every running request."""
        events: list[Event] = []
        for sequence in list(self._sequences.values()):
            try:
                events += self._advance(sequence)
            except Exception as error:  # noqa: BLE001  whatever a request does to the model, it fails alone
                del self._sequences[sequence.request.id]
                events.append(Failed(sequence.request.id, f"{type(error).__name__}: {error}"))
        return events

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        self._sequences.pop(request_id, None)

    def _encode(self, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, str):
            try:
                ids = [int(i) for i in self._tokenizer(prompt).input_ids]
            except (TypeError, ValueError, UnicodeError) as error:
                raise RequestRefusedError("invalid_request", "the prompt is not valid Unicode text") from error
        else:
            ids = list(prompt)
        if any(not 0 <= i < self._vocabulary for i in ids):
            raise RequestRefusedError("invalid_request", "the prompt holds a token id outside the vocabulary")
        if ids:
            return ids
        first = (
            self._tokenizer.bos_token_id if self._tokenizer.bos_token_id is not None else next(iter(self._eos), None)
        )
        if first is None:
            raise RequestRefusedError("invalid_request", "the prompt is empty and the model has no token to begin with")
        return [int(first)]

    def _fit(self, request: GenerationRequest, prompt: list[int]) -> tuple[list[int], int]:
        """Prompt and answer length that fit the context together; see `GenerationRequest.max_context`."""
        wanted = request.max_new_tokens
        if request.max_context is None:
            if len(prompt) + wanted > self.context_length:
                raise RequestRefusedError(
                    "context_length_exceeded",
                    f"{len(prompt)} prompt tokens and {wanted} new ones exceed the context of {self.context_length}",
                )
            return prompt, wanted
        room = max(2, min(request.max_context, self.context_length))
        wanted = min(wanted, room - 1)
        keep = room - wanted
        if len(prompt) <= keep:
            return prompt, wanted
        if prompt[0] == self._tokenizer.bos_token_id and keep > 1:
            return [prompt[0], *prompt[len(prompt) - keep + 1 :]], wanted
        return prompt[-keep:], wanted

    def _advance(self, sequence: _Sequence) -> list[Event]:
        token = self._next_token(sequence)
        request_id = sequence.request.id
        if token in self._eos:
            text = sequence.stop.push(sequence.detokenizer.flush()) + sequence.stop.flush()
            return [Delta(request_id, (), text), self._finish(sequence, FinishReason.STOP)]
        sequence.token_ids.append(token)
        text = sequence.stop.push(sequence.detokenizer.push(token))
        if sequence.stop.matched is not None:
            return [Delta(request_id, (token,), text), self._finish(sequence, FinishReason.STOP)]
        if sequence.completion_tokens < sequence.max_new_tokens:
            return [Delta(request_id, (token,), text)]
        text += sequence.stop.push(sequence.detokenizer.flush())
        reason = FinishReason.STOP if sequence.stop.matched is not None else FinishReason.LENGTH
        text += sequence.stop.flush()
        return [Delta(request_id, (token,), text), self._finish(sequence, reason)]

    def _next_token(self, sequence: _Sequence) -> int:
        ids = torch.tensor([sequence.token_ids], device=self._model.device)
        with torch.inference_mode():
            answer: Any = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=self._one_token,
                logits_processor=LogitsProcessorList([_Chosen(sequence.sampler)]),
                **sequence.cache,
            )
        # The argument's name changed within transformers 5.
        name = "cache" if hasattr(answer, "cache") else "past_key_values"
        sequence.cache = {name: getattr(answer, name)}
        return int(answer.sequences[0, -1])

    def _finish(self, sequence: _Sequence, reason: FinishReason) -> Finished:
        del self._sequences[sequence.request.id]
        return Finished(
            sequence.request.id,
            reason,
            prompt_tokens=sequence.prompt_tokens,
            completion_tokens=sequence.completion_tokens,
            stop_string=sequence.stop.matched,
        )
