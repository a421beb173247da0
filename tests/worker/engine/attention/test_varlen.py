"""The varlen backend with a plain function in the kernel's place, against the gather backend."""

from __future__ import annotations

import inspect
import logging
import random
import re
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.engine.attention.plain_varlen import PlainVarlen
from worker.engine.attention import choose, varlen_probe
from worker.engine.attention.backend import AttentionBackend, CacheShape, InputBatch, LayerShape
from worker.engine.attention.choose import BackendUnusableError, choose_backend, choose_block_size
from worker.engine.attention.gather import GatherBackend
from worker.engine.attention.varlen import NotPagedError, PagedBatch, VarlenBackend, torch_varlen_attention
from worker.engine.attention.varlen_probe import fitting_block_size, refusals

CPU = torch.device("cpu")
# Large enough here, and small blocks are probed faster.
SIZES = (16, 32)
NOTHING = torch.zeros(0, dtype=torch.int64)
LAYER = LayerShape(4, 2, 8, 8)


@dataclass
class Text:
    length: int
    table: list[int]
    computed: int = field(default=0)


def make_texts(seed: int, lengths: list[int], block_size: int) -> tuple[list[Text], int]:
    needed = [-(-length // block_size) for length in lengths]
    ids = list(range(sum(needed) + 2))
    random.Random(seed).shuffle(ids)
    return [Text(n, [ids.pop() for _ in range(count)]) for n, count in zip(lengths, needed, strict=True)], sum(
        needed
    ) + 2


def next_batch(texts: list[tuple[Text, int]], size: int) -> InputBatch:
    slots, starts, lengths = [], [0], []
    for text, count in texts:
        slots += [text.table[i // size] * size + i % size for i in range(text.computed, text.computed + count)]
        text.computed += count
        starts.append(starts[-1] + count)
        lengths.append(text.computed)
    most = max(len(text.table) for text, _ in texts)
    return InputBatch(
        NOTHING,
        NOTHING,
        torch.tensor(slots),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor([text.table + [0] * (most - len(text.table)) for text, _ in texts], dtype=torch.int32),
        NOTHING,
    )


def full_of_nan(backend: AttentionBackend) -> None:
    for layer in range(len(backend.shape.layers)):
        for block in range(backend.shape.blocks):
            for pool in backend.read(layer, block):
                pool.fill_(float("nan"))


def drawn(generator: torch.Generator, tokens: int, layer: LayerShape, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = (
        (layer.query_heads, layer.key_size),
        (layer.kv_heads, layer.key_size),
        (layer.kv_heads, layer.value_size),
    )
    return tuple(torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in shapes)


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 3, 16]),
    kv_heads=st.sampled_from([1, 2]),
    ratio=st.sampled_from([1, 3]),
    windows=st.lists(st.sampled_from([None, 1, 5]), min_size=2, max_size=2),
    seed=st.integers(0, 10_000),
)
def test_mixed_steps_give_what_gathering_gives_and_leave_the_same_pools(
    lengths, block_size, kv_heads, ratio, windows, seed
):
    layer = LayerShape(kv_heads * ratio, kv_heads, 8, 8)
    texts, blocks = make_texts(seed, lengths, block_size)
    shape = CacheShape((layer, layer), blocks, block_size, torch.float32, CPU)
    function = PlainVarlen()
    varlen, gather = VarlenBackend(shape, function, {layer}), GatherBackend(shape)
    for backend in (varlen, gather):
        full_of_nan(backend)
    generator, rng, steps = torch.Generator().manual_seed(seed), random.Random(seed), 0
    while left := [text for text in texts if text.computed < text.length]:
        chosen = [text for text in left if rng.random() < 0.7] or left
        rng.shuffle(chosen)
        batch = next_batch(
            [(text, rng.choice([1, 1, min(7, text.length - text.computed)])) for text in chosen], block_size
        )
        for backend in (varlen, gather):
            backend.begin(batch)
        for number, window in enumerate(windows):
            query, key, value = drawn(generator, len(batch.slots), layer, torch.float32)
            results = [b.attend(number, query, key, value, scale=0.7, window=window) for b in (varlen, gather)]
            torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
        steps += 1
    assert function.calls == 2 * steps
    for number in range(2):
        for block in range(blocks):
            for ours, theirs in zip(varlen.read(number, block), gather.read(number, block), strict=True):
                assert torch.equal(ours.nan_to_num(nan=99.0), theirs.nan_to_num(nan=99.0))


def test_decodes_alone_are_told_to_see_everything_and_windows_to_see_one_token_less_on_the_left():
    # The kernel is faster for grouped heads where it is told of no bound; one query alone needs none.
    function = PlainVarlen()
    texts, blocks = make_texts(1, [9, 5], 4)
    backend = VarlenBackend(CacheShape((LAYER,), blocks, 4, torch.float32, CPU), function, {LAYER})
    generator = torch.Generator().manual_seed(0)
    seen = []
    for counts, window in (((3, 2), None), ((1, 1), None), ((2, 1), 3), ((1, 1), 3)):
        function.windows.clear()
        batch = next_batch(list(zip(texts, counts, strict=True)), 4)
        backend.begin(batch)
        backend.attend(0, *drawn(generator, len(batch.slots), LAYER, torch.float32), scale=1.0, window=window)
        seen.append(function.windows.copy())
    assert seen == [{(-1, 0)}, {(-1, -1)}, {(2, 0)}, {(2, 0)}]


@pytest.mark.parametrize(
    ("number", "options", "dtype", "reason"),
    [
        (0, {"softcap": 3.0}, torch.float32, "layer 0 bounds its scores"),
        (0, {"sinks": torch.linspace(-1, 1, 4)}, torch.float32, "layer 0 has sinks"),
        (0, {}, torch.float64, "layer 0 asks in torch.float64 for keys in torch.float32"),
        (1, {}, torch.float32, "layer 1 has a shape that was refused"),
    ],
)
def test_what_the_function_does_not_take_is_gathered_from_the_same_pools_and_told_once(
    number, options, dtype, reason, caplog
):
    caplog.set_level(logging.INFO, "worker.engine.attention.varlen")
    layers = (LAYER, LayerShape(4, 2, 8, 6))
    texts, blocks = make_texts(1, [9, 6], 4)
    function = PlainVarlen()
    shape = CacheShape(layers, blocks, 4, torch.float32, CPU)
    varlen, gather = VarlenBackend(shape, function, {LAYER}), GatherBackend(shape)
    generator = torch.Generator().manual_seed(0)
    # The first step goes the fast way where that is possible: the second has to find what it stored.
    for counts, how, query_dtype in (((7, 5), {}, torch.float32), ((1, 1), options, dtype), ((1, 0), options, dtype)):
        batch = next_batch([(text, count) for text, count in zip(texts, counts, strict=True) if count], 4)
        query, key, value = drawn(generator, len(batch.slots), layers[number], torch.float32)
        results = []
        for backend in (varlen, gather):
            backend.begin(batch)
            results.append(backend.attend(number, query.to(query_dtype), key, value, scale=0.7, **how))
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    assert function.calls == (number == 0)
    assert caplog.messages == [f"{reason}: it is gathered, and so are others like it"]


def test_a_step_of_tensors_on_the_device_alone_is_never_gathered_and_the_next_one_may_be():
    texts, blocks = make_texts(1, [3], 4)
    backend = VarlenBackend(CacheShape((LAYER,), blocks, 4, torch.float32, CPU), PlainVarlen(), {LAYER})
    generator = torch.Generator().manual_seed(0)
    batch = next_batch([(texts[0], 2)], 4)
    backend.begin_paged(batch, PagedBatch.of(batch, CPU))
    tensors = drawn(generator, 2, LAYER, torch.float32)
    assert backend.attend(0, *tensors, scale=1.0).isfinite().all()
    with pytest.raises(NotPagedError, match="layer 0 bounds its scores"):
        backend.attend(0, *tensors, scale=1.0, softcap=2.0)
    backend.begin(next_batch([(texts[0], 1)], 4))
    result = backend.attend(0, *drawn(generator, 1, LAYER, torch.float32), scale=1.0, softcap=2.0)
    assert result.isfinite().all()


def test_the_tensors_of_a_step_are_laid_out_as_the_kernel_reads_them():
    texts, _ = make_texts(1, [9, 5, 2], 4)
    batch = next_batch([(texts[0], 7), (texts[1], 5), (texts[2], 1)], 4)
    paged = PagedBatch.of(batch, CPU)
    assert paged.query_starts.tolist() == [0, 7, 12, 13]
    assert paged.key_lengths.tolist() == [7, 5, 1]
    assert paged.key_starts.tolist() == [0, 7, 12, 13]
    assert (paged.most_queries, paged.most_keys) == (7, 7)
    assert torch.equal(paged.block_tables, batch.block_tables)
    tensors = (paged.query_starts, paged.key_starts, paged.key_lengths, paged.block_tables)
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in tensors)


def test_halves_are_computed_as_they_are():
    texts, blocks = make_texts(1, [9], 4)
    backend = VarlenBackend(CacheShape((LAYER,), blocks, 4, torch.bfloat16, CPU), PlainVarlen(), {LAYER})
    batch = next_batch([(texts[0], 9)], 4)
    backend.begin(batch)
    result = backend.attend(0, *drawn(torch.Generator(), 9, LAYER, torch.bfloat16), scale=1.0)
    assert result.dtype == torch.bfloat16


def shape_of(*layers: LayerShape, block_size: int = 16, dtype: torch.dtype = torch.float16) -> CacheShape:
    return CacheShape(layers, 1, block_size, dtype, CPU)


def test_the_probe_refuses_shapes_that_raise_or_differ_and_says_why():
    odd, uneven = LayerShape(4, 2, 12, 12), LayerShape(2, 2, 16, 8)
    refused = refusals(shape_of(LAYER, odd, LAYER, uneven), PlainVarlen(head_multiple=8))
    assert refused == {odd: "head size must be divisible by 8", uneven: "keys and values of different sizes"}
    assert refusals(shape_of(LAYER, block_size=1), PlainVarlen()) == {}


class Wrong(PlainVarlen):
    """Does something else than it should."""

    def __init__(self, **changes) -> None:
        super().__init__()
        self._changes = changes

    def __call__(self, *args, **options) -> Tensor:
        for name, change in self._changes.items():
            options[name] = change(options[name])
        return super().__call__(*args, **options)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Wrong(window_size=lambda w: (-1, -1)), r"off by [\d.]+"),
        (Wrong(window_size=lambda w: (-1, w[1])), r"off by [\d.]+ with a window"),
        (Wrong(window_size=lambda w: (w[0] + 1 if w[0] >= 0 else -1, w[1])), r"off by [\d.]+ with a window"),
        (Wrong(block_table=lambda table: table.flip(0)), r"off by nan"),
        (Wrong(scale=lambda scale: scale * 1.2), r"off by [\d.]+"),
    ],
)
def test_the_probe_notices_what_a_kernel_does_wrong(function, reason):
    (said,) = refusals(shape_of(LAYER), function).values()
    assert re.fullmatch(reason, said)


def test_a_kernel_that_reads_where_no_token_lies_is_refused():
    class Careless(PlainVarlen):
        def __call__(self, query, key, value, *args, **options) -> Tensor:
            result = super().__call__(query, key, value, *args, **options)
            return result + 0 * value[0, 0, 0, 0]

    assert list(refusals(shape_of(LAYER), Careless()).values()) == ["off by nan"]


@pytest.fixture
def _few_sizes(monkeypatch):
    monkeypatch.setattr(varlen_probe, "BLOCK_SIZES", SIZES)


@pytest.mark.usefixtures("_few_sizes")
def test_the_smallest_block_size_that_suits_most_layers_is_taken():
    odd = LayerShape(4, 2, 12, 12)
    assert fitting_block_size(shape_of(LAYER), PlainVarlen()) == 16
    assert fitting_block_size(shape_of(LAYER, block_size=24), PlainVarlen()) == 24
    assert fitting_block_size(shape_of(LAYER), PlainVarlen(page_multiple=32)) == 32
    assert fitting_block_size(shape_of(LAYER, odd), PlainVarlen(page_multiple=32, head_multiple=8)) == 32
    assert fitting_block_size(shape_of(odd), PlainVarlen(page_multiple=32, head_multiple=8)) == 16


@pytest.mark.usefixtures("_few_sizes")
def test_where_the_kernel_may_be_used_it_is_chosen_with_the_blocks_that_it_reads(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "worker.engine.attention.choose")
    monkeypatch.setattr(choose, "_varlen_attention", lambda shape: PlainVarlen(page_multiple=32, head_multiple=8))
    odd = LayerShape(4, 2, 12, 12)
    wished = shape_of(LAYER, odd)
    with pytest.raises(BackendUnusableError, match=r"does not do it: .*page size must be divisible by 32"):
        choose_backend(wished, "varlen")
    assert choose_block_size(wished) == 32
    assert choose_block_size(wished, "gather") == 16
    assert isinstance(choose_backend(shape_of(LAYER, odd, block_size=32), "varlen"), VarlenBackend)
    assert caplog.messages == [
        "attention: blocks of 32 tokens, as varlen attention does not read 16",
        f"attention: layers of {odd} are gathered, varlen attention does not do them: head size must be divisible by 8",
        "attention: varlen, float16 on cpu",
    ]


def test_without_an_nvidia_gpu_blocks_stay_as_wished_and_the_kernel_cannot_be_had():
    assert choose_block_size(shape_of(LAYER)) == 16
    with pytest.raises(BackendUnusableError, match="for NVIDIA GPUs, the model is on cpu"):
        choose_backend(shape_of(LAYER), "varlen")


def test_the_real_function_takes_what_ours_takes():
    real = inspect.signature(torch_varlen_attention()).parameters
    ours = inspect.signature(PlainVarlen.__call__).parameters
    assert [name for name in ours if name not in ("self", *real)] == []
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD and name != "self"]
    assert list(real)[: len(positional)] == positional


@pytest.mark.needs("cuda")
def test_on_a_gpu_usual_shapes_in_blocks_of_256_are_computed_right():
    shape = CacheShape(
        (LayerShape(9, 3, 64, 64), LayerShape(8, 2, 128, 128)), 1, 256, torch.bfloat16, torch.device("cuda")
    )
    assert refusals(shape, torch_varlen_attention()) == {}
