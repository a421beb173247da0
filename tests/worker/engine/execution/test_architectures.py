"""Every supported architecture, small and random, through the paged path: the tokens are those of plain `generate`."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from tests.worker.engine.played_steps import PlayedSteps
from tests.worker.engine.tiny_architectures import ARCHITECTURES, VOCABULARY, make_model
from worker.engine.attention.backend import CacheShape, LayerShape
from worker.engine.attention.choose import choose_backend
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.execution.probe import probe
from worker.engine.kernels.bindings import load_kernels

# Around block sizes and windows of the models.
PROMPT_LENGTHS = (1, 6, 16, 33)
NEW_TOKENS = 6
GAP = 1e-4
CHUNKS = (1, 7, 64)
BLOCK_SIZES = (1, 4, 16, 32)
# Chunk and block size: each of both once.
GEOMETRIES = ((1, 16), (7, 1), (64, 4), (7, 32))
BACKENDS = ("gather",) if load_kernels() is None else ("gather", "kernels")


@dataclass(frozen=True)
class Reference:
    """What `generate` makes of the prompts, one at a time, with transformers' plainest attention."""

    model: Any
    layers: tuple[LayerShape, ...]
    prompts: list[list[int]]
    output: list[list[int]]
    logits: list[Tensor]


def make_reference(name: str) -> Reference:
    """With weights for which no two tokens are ever about equally likely."""
    for seed in range(10):
        model = make_model(*ARCHITECTURES[name], seed=seed)
        rng = random.Random(seed)
        prompts = [[rng.randrange(3, VOCABULARY) for _ in range(length)] for length in PROMPT_LENGTHS]
        answers = [generate(model, prompt) for prompt in prompts]
        logits = [rows for _, rows in answers]
        best = torch.cat(logits).topk(2).values
        if (best[:, 0] - best[:, 1]).min() > GAP:
            return Reference(model, probe(model).layers, prompts, [tokens for tokens, _ in answers], logits)
    raise AssertionError("no seed gives clear answers")


def generate(model: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return made.sequences[0, len(prompt) :].tolist(), torch.cat(made.logits).float()


def assert_paged_equals(reference: Reference, backend: str, chunk: int, block_size: int) -> None:
    blocks = sum((length + NEW_TOKENS) // block_size + 1 for length in PROMPT_LENGTHS)
    shape = CacheShape(reference.layers, blocks, block_size, torch.float32, torch.device("cpu"))
    runner = ModelRunner(reference.model, choose_backend(shape, backend))
    played = PlayedSteps(runner, reference.prompts, NEW_TOKENS, block_size=block_size, chunk=chunk)
    assert played.output == reference.output
    for ours, theirs in zip(played.logits, reference.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_generate(name):
    reference = make_reference(name)
    for backend in BACKENDS:
        for chunk, block_size in GEOMETRIES:
            assert_paged_equals(reference, backend, chunk, block_size)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_any_chunk_with_any_block_size_gives_the_same_tokens(name):
    reference = make_reference(name)
    for backend in BACKENDS:
        for chunk, block_size in itertools.product(CHUNKS, BLOCK_SIZES):
            assert_paged_equals(reference, backend, chunk, block_size)
