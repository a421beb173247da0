"""What is generated: the stored workload, and made-up ones of a given shape."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

# SmolLM2's ordinary tokens; the first few are special.
_FIRST, _LAST = 100, 48_000


@dataclass(frozen=True)
class Item:
    """One request: prompt ids, and how many new tokens it gets whatever they are."""

    prompt: tuple[int, ...]
    new_tokens: int


def stored(count: int | None = None) -> list[Item]:
    """The first `count` requests of `workload.json`; None: all 32."""
    items = json.loads((Path(__file__).parent / "workload.json").read_text())
    return [Item(tuple(item["ids"]), item["max_new"]) for item in items[:count]]


def uniform(batch: int, context: int, new_tokens: int) -> list[Item]:
    """`batch` requests that reach `context` tokens with their last one."""
    return [Item(_random_ids(context - new_tokens, seed), new_tokens) for seed in range(batch)]


def shared_prefix(count: int = 32, prefix: int = 300, own: int = 20, new_tokens: int = 16) -> list[Item]:
    """`count` requests behind one system prompt of `prefix` tokens."""
    system = _random_ids(prefix, -1)
    return [Item(system + _random_ids(own, seed), new_tokens) for seed in range(count)]


def _random_ids(length: int, seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randint(_FIRST, _LAST) for _ in range(length))
