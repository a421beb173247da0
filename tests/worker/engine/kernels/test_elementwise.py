from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from worker.engine.kernels.bindings import Kernels, Pool, Step, load_kernels

TYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 576), (3, 7), (40, 1000), (300, 64), (2, 1)]


pytestmark = pytest.mark.needs("compiler")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = load_kernels()
    assert loaded is not None, "there is a compiler, and it does not take our sources"
    return loaded


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(*shape, generator=torch.Generator().manual_seed(3))).to(dtype)


def close(out: Tensor, expected: Tensor) -> None:
    bound = 1e-2 if out.dtype is torch.bfloat16 else 2e-6
    torch.testing.assert_close(out, expected, atol=bound, rtol=bound)


def test_the_exponential_is_right_to_seven_digits(kernels: Kernels) -> None:
    x = torch.cat([torch.linspace(-87.3, 88.7, 300_001), torch.linspace(-1, 1, 100_003)])
    expected = x.double().exp()
    assert ((kernels.exp(x).double() - expected) / expected).abs().max() < 4e-7


def test_the_exponential_knows_its_ends(kernels: Kernels) -> None:
    x = torch.tensor([0.0, -0.0, -torch.inf, -88.0, -1e30, torch.inf, 200.0, 1e30, torch.nan])
    out = kernels.exp(x)
    assert out[:8].tolist() == [1, 1, 0, 0, 0, torch.inf, torch.inf, torch.inf]
    assert out[8].isnan()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_the_norm_equals_that_of_llama(kernels: Kernels, rows: int, size: int, dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(size, eps=1e-5).to(dtype)
    theirs.weight.data = draw(size, dtype=dtype)
    x = draw(rows, size, dtype=dtype)
    out = torch.empty_like(x)
    kernels.rms_norm(x, theirs.weight.data, out, 1e-5)
    with torch.no_grad():
        close(out, theirs(x))


@pytest.mark.parametrize("dtype", TYPES)
def test_the_norm_with_an_offset_equals_that_of_gemma(kernels: Kernels, dtype: torch.dtype) -> None:
    theirs = GemmaRMSNorm(100, eps=1e-6).to(dtype)
    theirs.weight.data = draw(100, dtype=dtype)
    x = draw(9, 100, dtype=dtype)
    out = torch.empty_like(x)
    kernels.rms_norm(x, theirs.weight.data, out, 1e-6, offset=1.0)
    with torch.no_grad():
        close(out, theirs(x))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_a_residual_is_added_to_before_the_norm(kernels: Kernels, rows: int, size: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, size, dtype=dtype), draw(size, dtype=dtype)
    residual = torch.linspace(-3, 5, rows * size).view(rows, size).to(dtype)
    expected = residual + x
    normed, out = torch.empty_like(x), torch.empty_like(x)
    kernels.rms_norm(expected, weight, normed, 1e-5)
    kernels.rms_norm(x, weight, out, 1e-5, residual=residual)
    assert torch.equal(residual, expected)
    assert torch.equal(out, normed)


def test_a_norm_may_be_written_over_its_input_and_its_rows_are_independent(kernels: Kernels) -> None:
    x, weight = draw(50, 576), draw(576)
    whole, row = torch.empty_like(x), torch.empty(1, 576)
    kernels.rms_norm(x, weight, whole, 1e-5)
    kernels.rms_norm(x[7:8], weight, row, 1e-5)
    kernels.rms_norm(x, weight, x, 1e-5)
    assert torch.equal(whole[7:8], row)
    assert torch.equal(whole, x)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_gates_equal_those_of_torch(kernels: Kernels, rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = 3 * draw(rows, 2 * size, dtype=dtype)
    gate_up[0, 0] = -100
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty(rows, size, dtype=dtype)
    kernels.silu_mul(gate_up, out)
    close(out, (torch.nn.functional.silu(gate.double()) * up).to(dtype))
    kernels.gelu_tanh_mul(gate_up, out)
    close(out, (torch.nn.functional.gelu(gate.double(), approximate="tanh") * up).to(dtype))


def make_step(slots: Tensor) -> Step:
    tokens = len(slots)
    lengths = torch.tensor([0, tokens], dtype=torch.int32)
    return Step(lengths, lengths[1:], torch.zeros(1, 1, dtype=torch.int32), slots)


@pytest.mark.parametrize("pools", TYPES)
@pytest.mark.parametrize("rows", TYPES)
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (6, 6), (80, 32)])
def test_turned_rows_equal_those_of_llama_and_lie_in_their_slots(
    kernels: Kernels, rows: torch.dtype, pools: torch.dtype, size: int, rotary: int
) -> None:
    tokens, query_heads, kv_heads, block_size = 70, 6, 2, 16
    config = LlamaConfig(hidden_size=rotary * query_heads, num_attention_heads=query_heads)
    positions = torch.arange(5, 5 + tokens)[None]
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    qkv = draw(tokens, (query_heads + 2 * kv_heads) * size, dtype=rows)
    query, key, value = (
        part.view(tokens, -1, size).transpose(0, 1)[None]
        for part in torch.split(qkv.clone(), [query_heads * size, kv_heads * size, kv_heads * size], dim=1)
    )
    turned = apply_rotary_pos_emb(query[..., :rotary].float(), key[..., :rotary].float(), cosines, sines)
    expected_query, expected_key = (
        torch.cat([part, rest[..., rotary:].float()], dim=-1)[0].transpose(0, 1)
        for part, rest in zip(turned, (query, key), strict=True)
    )
    keys = torch.zeros(8, kv_heads, size, block_size, dtype=pools)
    values = torch.zeros(8, kv_heads, block_size, size, dtype=pools)
    slots = torch.randperm(8 * block_size, generator=torch.Generator().manual_seed(1))[:tokens]
    step = make_step(slots)
    kernels.rope_store(step, Pool(keys, values, query_heads), qkv, cosines[0], sines[0])
    close(qkv[:, : query_heads * size].view(tokens, query_heads, size), expected_query.to(rows))
    stored_keys = keys.permute(0, 3, 1, 2).reshape(-1, kv_heads, size)[slots]
    stored_values = values.transpose(1, 2).reshape(-1, kv_heads, size)[slots]
    close(stored_keys.to(rows), expected_key.to(pools).to(rows))
    assert torch.equal(stored_values, value[0].transpose(0, 1).to(pools))

    again = Pool(torch.zeros_like(keys), torch.zeros_like(values), query_heads)
    parts = qkv[:, query_heads * size :].view(tokens, 2, kv_heads, size)
    kernels.store_kv(step, again, parts[:, 0], parts[:, 1])
    assert torch.equal(again.keys, keys)
    assert torch.equal(again.values, values)


def test_what_does_not_fit_is_refused(kernels: Kernels) -> None:
    x, out = torch.zeros(2, 8), torch.zeros(2, 8)
    for weight in (torch.zeros(7), torch.zeros(8, dtype=torch.bfloat16), torch.zeros(16)[::2]):
        with pytest.raises(ValueError, match="expected dense"):
            kernels.rms_norm(x, weight, out, 1e-5)
    with pytest.raises(ValueError, match="expected dense"):
        kernels.silu_mul(torch.zeros(2, 15), out)
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        kernels.silu_mul(torch.zeros(2, 16).double(), out.double())
    pool = Pool(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 4, 8), 2)
    with pytest.raises(ValueError, match="in pairs"):
        kernels.rope_store(
            make_step(torch.zeros(1).long()), pool, torch.zeros(1, 32), torch.ones(1, 3), torch.ones(1, 3)
        )
    with pytest.raises(ValueError, match="cannot share"):
        Pool(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 4, 8), 3)
