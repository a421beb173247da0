"""The gather backend against a softmax over the whole text, written out token by token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.engine.attention.backend import CacheShape, InputBatch, LayerShape
from worker.engine.attention.gather import GatherBackend

CPU = torch.device("cpu")


@dataclass
class Text:
    """Queries, keys and values of a whole text, and where it lies in the pools."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: list[int]
    computed: int = 0
    outputs: list[Tensor] = field(default_factory=list)


def by_definition(text: Text, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """The formula of `AttentionBackend.attend`, one token and one head at a time, in fp64."""
    length, heads, _ = text.query.shape
    group = heads // text.key.shape[1]
    result = torch.zeros(length, heads, text.value.shape[2], dtype=torch.float64)
    for i in range(length):
        first = 0 if window is None else max(0, i - window + 1)
        for h in range(heads):
            scores = text.key[first : i + 1, h // group].double() @ text.query[i, h].double() * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[h].double()[None]])
            weights = scores.softmax(0)[: i + 1 - first]
            result[i, h] = weights @ text.value[first : i + 1, h // group].double()
    return result


def run_step(backend: GatherBackend, texts: list[tuple[Text, int]], **options) -> None:
    """The next tokens of each text, so many of each."""
    size = backend.shape.block_size
    slots, starts, lengths = [], [0], []
    for text, count in texts:
        slots += [text.table[i // size] * size + i % size for i in range(text.computed, text.computed + count)]
        starts.append(starts[-1] + count)
        lengths.append(text.computed + count)
    most = max(len(text.table) for text, _ in texts)
    tables = [text.table + [0] * (most - len(text.table)) for text, _ in texts]
    nothing = torch.zeros(0, dtype=torch.int64)
    backend.begin(
        InputBatch(
            nothing,
            nothing,
            torch.tensor(slots),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lengths, dtype=torch.int32),
            torch.tensor(tables, dtype=torch.int32),
            nothing,
        )
    )

    def rows(name: str) -> Tensor:
        return torch.cat([getattr(text, name)[text.computed : text.computed + count] for text, count in texts])

    result = backend.attend(0, rows("query"), rows("key"), rows("value"), **options)
    for i, (text, count) in enumerate(texts):
        text.outputs.append(result[starts[i] : starts[i + 1]])
        text.computed += count


def full_of_nan(shape: CacheShape, *, group_decodes: bool) -> GatherBackend:
    backend = GatherBackend(shape, group_decodes=group_decodes)
    for block in range(shape.blocks):
        for pool in backend.read(0, block):
            pool.fill_(float("nan"))
    return backend


def make_texts(seed: int, lengths: list[int], layer: LayerShape, block_size: int) -> tuple[list[Text], int]:
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, heads: int, size: int) -> Tensor:
        return torch.randn(length, heads, size, generator=generator)

    needed = [-(-length // block_size) for length in lengths]
    ids = list(range(sum(needed) + 1))
    random.Random(seed).shuffle(ids)
    texts = [
        Text(
            draw(length, layer.query_heads, layer.key_size),
            draw(length, layer.kv_heads, layer.key_size),
            draw(length, layer.kv_heads, layer.value_size),
            [ids.pop() for _ in range(count)],
        )
        for length, count in zip(lengths, needed, strict=True)
    ]
    return texts, sum(needed) + 1


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4, 16]),
    kv_heads=st.sampled_from([1, 2]),
    ratio=st.sampled_from([1, 3, 4]),
    sizes=st.sampled_from([(8, 8), (8, 5), (5, 12)]),
    window=st.sampled_from([None, 1, 5]),
    softcap=st.sampled_from([None, 2.0]),
    with_sinks=st.booleans(),
    group_decodes=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_mixed_steps_of_prefill_and_decode_give_what_the_formula_gives(
    lengths, block_size, kv_heads, ratio, sizes, window, softcap, with_sinks, group_decodes, seed
):
    layer = LayerShape(kv_heads * ratio, kv_heads, *sizes)
    texts, blocks = make_texts(seed, lengths, layer, block_size)
    backend = full_of_nan(CacheShape((layer,), blocks, block_size, torch.float32, CPU), group_decodes=group_decodes)
    sinks = torch.linspace(-1, 2, layer.query_heads) if with_sinks else None
    options = {"scale": 0.7, "window": window, "softcap": softcap, "sinks": sinks}
    rng = random.Random(seed)
    while left := [text for text in texts if text.computed < len(text.query)]:
        chosen = [text for text in left if rng.random() < 0.7] or left
        rng.shuffle(chosen)
        run_step(backend, [(t, rng.choice([1, 1, min(7, len(t.query) - t.computed)])) for t in chosen], **options)
    for text in texts:
        torch.testing.assert_close(
            torch.cat(text.outputs).double(), by_definition(text, **options), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_scores_too_many_to_hold_at_once_are_computed_in_parts(monkeypatch, softcap):
    monkeypatch.setattr("worker.engine.attention.gather._SCORES_AT_ONCE", 100)
    layer = LayerShape(4, 2, 8, 8)
    (text,), blocks = make_texts(1, [40], layer, 4)
    backend = GatherBackend(CacheShape((layer,), blocks, 4, torch.float32, CPU))
    options = {"scale": 0.3, "window": 6, "softcap": softcap, "sinks": torch.zeros(4)}
    run_step(backend, [(text, 40)], **options)
    torch.testing.assert_close(text.outputs[0].double(), by_definition(text, **options), atol=1e-5, rtol=1e-5)


def test_decodes_too_long_to_gather_at_once_are_computed_in_parts(monkeypatch):
    monkeypatch.setattr("worker.engine.attention.gather._GATHERED_AT_ONCE", 20)
    layer = LayerShape(4, 2, 8, 8)
    texts, blocks = make_texts(1, [9, 30, 3, 7, 4], layer, 4)
    backend = GatherBackend(CacheShape((layer,), blocks, 4, torch.float32, CPU), group_decodes=True)
    options = {"scale": 0.3, "window": None, "softcap": None, "sinks": None}
    run_step(backend, [(text, len(text.query) - 1) for text in texts], **options)
    run_step(backend, [(text, 1) for text in texts], **options)
    for text in texts:
        torch.testing.assert_close(
            torch.cat(text.outputs).double(), by_definition(text, **options), atol=1e-5, rtol=1e-5
        )


def test_one_backend_works_with_inference_mode_and_without():
    layer = LayerShape(4, 2, 8, 8)
    (text,), blocks = make_texts(1, [9], layer, 4)
    backend = GatherBackend(CacheShape((layer,), blocks, 4, torch.bfloat16, CPU))
    with torch.inference_mode():
        run_step(backend, [(text, 8)], scale=0.3)
    run_step(backend, [(text, 1)], scale=0.3)
    assert torch.cat([output.clone() for output in text.outputs]).isfinite().all()


@pytest.mark.parametrize("group_decodes", [True, False])
def test_a_broken_neighbour_does_not_touch_a_result(group_decodes):
    layer = LayerShape(4, 2, 8, 8)

    def outputs(*, broken: bool) -> list[Tensor]:
        texts, blocks = make_texts(3, [9, 14, 5], layer, 4)
        if broken:
            texts[1].value[:] = float("nan")
            texts[1].query[:] = float("inf")
        backend = GatherBackend(CacheShape((layer,), blocks, 4, torch.float32, CPU), group_decodes=group_decodes)
        run_step(backend, [(text, len(text.query) - 1) for text in texts], scale=0.3)
        run_step(backend, [(text, 1) for text in texts], scale=0.3)
        assert torch.cat(texts[1].outputs).isnan().any() == broken
        return [torch.cat(texts[i].outputs) for i in (0, 2)]

    for sound, beside_broken in zip(outputs(broken=False), outputs(broken=True), strict=True):
        torch.testing.assert_close(beside_broken, sound, atol=0, rtol=0)


def test_pools_in_bf16_round_keys_and_values_and_nothing_else():
    layer = LayerShape(4, 2, 16, 16)
    (text,), blocks = make_texts(5, [30], layer, 4)
    backend = GatherBackend(CacheShape((layer,), blocks, 4, torch.bfloat16, CPU))
    run_step(backend, [(text, 29)], scale=0.25)
    run_step(backend, [(text, 1)], scale=0.25)
    text.key, text.value = text.key.bfloat16(), text.value.bfloat16()
    result = torch.cat(text.outputs)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), by_definition(text, 0.25, None, None, None), atol=1e-5, rtol=1e-5)


def test_the_result_has_the_type_of_the_queries():
    layer = LayerShape(4, 2, 16, 16)
    (text,), blocks = make_texts(5, [6], layer, 4)
    text.query, text.key, text.value = text.query.half(), text.key.half(), text.value.half()
    backend = GatherBackend(CacheShape((layer,), blocks, 4, torch.float16, CPU))
    run_step(backend, [(text, 6)], scale=0.25)
    assert text.outputs[0].dtype == torch.float16


def test_blocks_are_copied_in_the_order_given_in_every_layer():
    layers = (LayerShape(2, 1, 4, 4), LayerShape(2, 2, 4, 6))
    backend = GatherBackend(CacheShape(layers, 4, 2, torch.float32, CPU))
    for layer in range(2):
        for block in range(4):
            for pool in backend.read(layer, block):
                pool.fill_(block)
    backend.copy_blocks([(0, 1), (1, 2)])
    for layer in range(2):
        contents = [[pool.unique().tolist() for pool in backend.read(layer, block)] for block in range(4)]
        assert contents == [[[0.0]] * 2, [[0.0]] * 2, [[0.0]] * 2, [[3.0]] * 2]


def test_a_block_is_read_as_it_was_written():
    layer = LayerShape(2, 1, 4, 3)
    (text,), blocks = make_texts(2, [4], layer, 4)
    backend = GatherBackend(CacheShape((layer,), blocks, 4, torch.float32, CPU))
    run_step(backend, [(text, 4)], scale=1.0)
    keys, values = backend.read(0, text.table[0])
    assert torch.equal(keys, text.key)
    assert torch.equal(values, text.value)
