"""Rows of logits, and a sampler's answers for them."""

from __future__ import annotations

import torch

from worker.engine.interface import Sampling
from worker.engine.sampling.batch_sampler import BatchSampler, Choice, SampleRow

OUT = float("-inf")


def random_rows(seed: int, rows: int = 1, size: int = 50, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def row_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def kept(logits: torch.Tensor) -> list[int]:
    assert logits.shape[0] == 1
    return torch.nonzero(logits[0] > OUT).flatten().tolist()


def number(value: float) -> torch.Tensor:
    return torch.tensor([value])


def choose(
    logits: torch.Tensor,
    history: tuple[int, ...] = (),
    *,
    seed: int = 0,
    sample: int = 0,
    prompt_length: int = 0,
    eos: tuple[int, ...] = (),
    stop: tuple[int, ...] = (),
    logprobs: int | None = None,
    **settings,
) -> Choice:
    """What one row alone gives; `history` is output after `prompt_length`."""
    sampler = BatchSampler(logits.shape[-1], eos)
    prepared = sampler.prepare(Sampling(**settings), seed=seed, sample=sample, stop_token_ids=stop, logprobs=logprobs)
    (choice,) = sampler.choose(logits.reshape(1, -1), [SampleRow(prepared, history, prompt_length)])
    return choice


def draws(logits: torch.Tensor, count: int, **settings) -> list[int]:
    """Tokens drawn from the same logits at `count` successive positions."""
    sampler = BatchSampler(logits.shape[-1])
    seed = settings.pop("seed", 0)
    prepared = sampler.prepare(Sampling(**settings), seed=seed)
    rows = [SampleRow(prepared, range(position), 0) for position in range(count)]
    choices = sampler.choose(logits.reshape(1, -1).expand(count, -1), rows)
    assert all(choice.error is None for choice in choices)
    return [choice.token_id for choice in choices if choice.token_id is not None]
