from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.worker.engine.attention.paged_texts import Cache, Case, Text, close_to, drive
from worker.engine.attention.backend import CacheShape, InputBatch, LayerShape
from worker.engine.attention.cpu import CpuKernelBackend
from worker.engine.kernels import build
from worker.engine.kernels.bindings import Kernels, load_kernels

pytestmark = pytest.mark.needs("compiler")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = load_kernels()
    assert loaded is not None, "there is a compiler, and it does not take our sources"
    return loaded


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["x86-64", "x86-64-v3"])
def narrow_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """As on a CPU whose vectors are of 4 floats, and of 8."""
    compiler = shutil.which("c++")
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if sys.platform == "linux" else ""
    if compiler is None or " avx2 " not in flags:
        pytest.skip("takes a compiler, and a CPU of the kind that it asks for")
    target = tmp_path_factory.mktemp("narrow")
    objects = []
    for name in ("paged_attention", "elementwise"):
        objects.append(str(target / f"{name}.o"))
        command = [compiler, "-O1", "-std=c++17", "-fPIC", "-w", "-ffp-contract=fast", f"-march={request.param}"]
        source = build.SOURCES / f"{name}.cpp"
        subprocess.run([*command, "-fopenmp", "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run([compiler, "-shared", *objects, "-o", str(target / "kernels.so")], check=True)
    return Kernels(build._open(target / "kernels.so"))


TYPES = st.sampled_from([torch.float32, torch.bfloat16])
CASES = st.builds(
    Case,
    group=st.integers(1, 8),
    kv_heads=st.integers(1, 3),
    key_size=st.sampled_from([64, 80, 96, 128, 256, 1, 7, 33]),
    value_size=st.sampled_from([64, 80, 96, 128, 256, 1, 7, 33]),
    block_size=st.sampled_from([1, 4, 16, 32, 5]),
    pools=TYPES,
    rows=TYPES,
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(0.5, 50),
    sinks=st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES, lengths=st.lists(st.integers(1, 120), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_mixed_decodes_and_prompt_chunks_give_what_the_formula_gives(
    kernels: Kernels, case: Case, lengths: list[int], seed: int
) -> None:
    drive(kernels, case, lengths, seed)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=CASES, lengths=st.lists(st.integers(1, 100), min_size=1, max_size=3), seed=st.integers(0, 2**16))
def test_cpus_with_narrow_vectors_give_it_too(
    narrow_kernels: Kernels, case: Case, lengths: list[int], seed: int
) -> None:
    drive(narrow_kernels, case, lengths, seed)


@pytest.mark.parametrize("pools", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "counts"), [(1, (1, 700, 598, 1)), (5, (1, 700, 598, 1)), (100, (269, 1))])
def test_long_contexts_are_split_and_joined_again(
    kernels: Kernels, pools: torch.dtype, group: int, counts: tuple[int, ...]
) -> None:
    case = Case(group=group, kv_heads=1, pools=pools, window=1000, sinks=True)
    text = Text(case, sum(counts), seed=1)
    cache = Cache(kernels, case, sum(counts))
    for count in counts:
        start = text.done
        (out,) = cache.step([(text, count)])
        close_to(case, out, text.expected[start : start + count])


@pytest.mark.parametrize("pools", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [Case(), Case(group=7, block_size=4, key_size=33, value_size=33), Case(window=300)])
def test_a_result_does_not_depend_on_company_chunks_or_threads(
    kernels: Kernels, case: Case, pools: torch.dtype
) -> None:
    case = Case(**{**case.__dict__, "pools": pools})
    lengths = [900, 40, 257, 3, 512]

    def together() -> list[Tensor]:
        """Prompts in chunks, the last tokens one at a time."""
        texts = [Text(case, length, seed) for seed, length in enumerate(lengths)]
        cache = Cache(kernels, case, sum(lengths), seed=5)
        outs: list[list[Tensor]] = [[] for _ in texts]
        for most in (2, 100, 300, 400, 1, 1):
            entries = [(t, min(most, len(t.query) - t.done)) for t in texts if t.done < len(t.query)]
            indices = [i for i, t in enumerate(texts) if t.done < len(t.query)]
            for i, out in zip(indices, cache.step(entries), strict=True):
                outs[i].append(out)
        return [torch.cat(parts) for parts in outs]

    in_company = together()
    torch.set_num_threads(1)
    on_one_thread = together()
    for seed, length in enumerate(lengths):
        text = Text(case, length, seed)
        (alone,) = Cache(kernels, case, length).step([(text, length)])
        done = len(in_company[seed])
        assert torch.equal(alone[:done], in_company[seed])
        assert torch.equal(alone[:done], on_one_thread[seed])
        # The last token once more, as a decode of a sequence that is alone.
        text = Text(case, length, seed)
        cache = Cache(kernels, case, length)
        if length > 1:
            cache.step([(text, length - 1)])
        torch.set_num_threads(2)
        assert torch.equal(cache.step([(text, 1)])[0], alone[-1:])


def test_a_nan_stays_in_its_own_sequence_and_is_not_hidden(kernels: Kernels) -> None:
    case = Case()
    sick, sound = Text(case, 20, seed=1), Text(case, 20, seed=2)
    sick.key[4] = torch.nan
    sick_out, sound_out = Cache(kernels, case, 40).step([(sick, 20), (sound, 20)])
    assert sick_out[4:].isnan().all()
    close_to(case, sound_out, sound.expected)


def test_a_value_of_infinity_gives_what_softmax_gives(kernels: Kernels) -> None:
    case = Case()
    text = Text(case, 3, seed=1)
    first = text.expected[:1]
    text.value[1] = torch.inf
    cache = Cache(kernels, case, 3)
    before, *after = (cache.step([(text, 1)])[0] for _ in range(3))
    close_to(case, before, first)
    assert all((out == torch.inf).all() for out in after)


def test_views_of_any_strides_are_read_where_they_lie(kernels: Kernels) -> None:
    case = Case()
    text = Text(case, 30, seed=1)
    for name in ("query", "key", "value"):
        head_major = getattr(text, name).transpose(0, 1).contiguous()
        setattr(text, name, head_major.transpose(0, 1))
    text.key = torch.stack([text.key, text.key], dim=-1)[..., 0]
    (out,) = Cache(kernels, case, 30).step([(text, 30)])
    close_to(case, out, text.expected)


def test_blocks_are_copied_in_order_and_read_back(kernels: Kernels) -> None:
    case = Case(block_size=4)
    text = Text(case, 8, seed=1)
    cache = Cache(kernels, case, 8)
    cache.step([(text, 8)])
    free = cache.free
    cache.backend.copy_blocks([(text.table[0], free[0]), (text.table[1], text.table[0]), (free[0], free[1])])
    first, second = cache.backend.read(0, free[1]), cache.backend.read(0, text.table[0])
    assert torch.equal(first[0], text.key[:4])
    assert torch.equal(first[1], text.value[:4])
    assert torch.equal(second[0], text.key[4:])
    assert torch.equal(second[1], text.value[4:])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_tables", [[1, 99]]),
        ("block_tables", [[1, -1]]),
        ("block_tables", [[1]]),
        ("slots", [5, 1000]),
        ("slots", [-1, 5]),
        ("context_lengths", [1]),
        ("query_starts", [0, 3]),
    ],
)
def test_a_batch_that_leads_outside_the_pools_is_refused(kernels: Kernels, name: str, value: list[int]) -> None:
    layer = LayerShape(2, 1, 16, 16)
    backend = CpuKernelBackend(CacheShape((layer,), 4, 4, torch.float32, torch.device("cpu")), kernels)
    good = {
        "token_ids": torch.zeros(2, dtype=torch.int64),
        "positions": torch.tensor([4, 5]),
        "slots": torch.tensor([8, 9]),
        "query_starts": torch.tensor([0, 2], dtype=torch.int32),
        "context_lengths": torch.tensor([6], dtype=torch.int32),
        "block_tables": torch.tensor([[1, 2]], dtype=torch.int32),
        "sampled_rows": torch.zeros(0, dtype=torch.int64),
    }
    backend.begin(InputBatch(**good))
    with pytest.raises(ValueError, match="lead outside"):
        backend.begin(InputBatch(**{**good, name: torch.tensor(value, dtype=good[name].dtype)}))


def test_rows_of_a_wrong_shape_or_type_are_refused(kernels: Kernels) -> None:
    case = Case()
    for name, wrong in (
        ("query", torch.zeros(3, 6, 63)),
        ("key", torch.zeros(3, 1, 64)),
        ("value", torch.zeros(3, 2, 64, dtype=torch.float64)),
    ):
        text = Text(case, 3, seed=1)
        setattr(text, name, wrong)
        with pytest.raises(ValueError, match="expected"):
            Cache(kernels, case, 3).step([(text, 3)])


def test_pools_that_the_kernels_do_not_know_are_refused(kernels: Kernels) -> None:
    shape = CacheShape((LayerShape(2, 1, 16, 16),), 4, 4, torch.float16, torch.device("cpu"))
    with pytest.raises(ValueError, match="float16"):
        CpuKernelBackend(shape, kernels)
