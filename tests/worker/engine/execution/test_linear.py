"""Packed linear layers against PyTorch's own, over shapes that fill panels and shapes that do not."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.worker.engine.tiny_architectures import ARCHITECTURES, VOCABULARY, make_model
from worker.engine.execution import linear
from worker.engine.execution.linear import (
    KernelLinear,
    LinearPath,
    OneDnnLinear,
    PackedEmbedding,
    PackedLinear,
    WeightMemory,
    pack_linears,
    pack_weight,
)
from worker.engine.kernels.linear_binding import WeightFormat, load_linear_kernels
from worker.models.quantise import Int4Linear, Int8Linear, quantise

KERNELS = load_linear_kernels()


def as_packed(weight: torch.Tensor, weight_format: WeightFormat) -> torch.Tensor:
    """The numbers that a packed weight stands for, in fp64."""
    if weight_format is WeightFormat.FP32:
        return weight.double()
    if weight_format is WeightFormat.INT8:
        scales = weight.abs().amax(dim=1, keepdim=True) / 127
        return (weight / scales).round().double() * scales.double()
    return weight.bfloat16().double()


def packed(weight: torch.Tensor, weight_format: WeightFormat):
    bf16 = weight_format in (WeightFormat.BF16, WeightFormat.BF16_PAIRS)
    return pack_weight(KERNELS, weight.bfloat16() if bf16 else weight, weight_format)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("weight_format", WeightFormat)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 130),
    inputs=st.integers(1, 230),
    bias=st.booleans(),
    residual=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_it_equals_a_product_in_double_precision(weight_format, rows, outputs, inputs, bias, residual, seed):
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random)
    x = torch.randn(rows, inputs, generator=random)
    biases = torch.randn(outputs, generator=random) if bias else None
    stream = torch.randn(rows, outputs, generator=random) if residual else None

    got = packed(weight, weight_format)(x, bias=biases, residual=stream)

    read = x.bfloat16() if weight_format is WeightFormat.BF16_PAIRS else x
    exact = as_packed(weight, weight_format)
    expected = read.double() @ exact.T
    # Rounding grows with the size of what is summed, not with that of the sum.
    size = read.double().abs() @ exact.abs().T
    for added in (biases, stream):
        if added is not None:
            expected, size = expected + added, size + added.abs()
    assert ((got - expected).abs() <= 1e-6 * size + 1e-30).all()


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("weight_format", WeightFormat)
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (97, 193)])
def test_a_row_does_not_depend_on_the_rows_beside_it_nor_on_threads(weight_format, outputs, inputs):
    weight = packed(torch.randn(outputs, inputs), weight_format)
    x = torch.randn(600, inputs)
    together = weight(x)
    for rows in (1, 2, 7, 8, 9, 31, 33, 257):
        assert torch.equal(weight(x[:rows]), together[:rows])
    assert torch.equal(weight(x[577:]), together[577:])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(weight(x), together)
    finally:
        torch.set_num_threads(before)


@pytest.mark.needs("compiler")
def test_bf16_weights_are_widened_exactly():
    weight = torch.randn(100, 65).bfloat16()
    assert torch.equal(packed(weight.float(), WeightFormat.BF16)(torch.eye(65)), weight.float().T)


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("weight_format", [WeightFormat.FP32, WeightFormat.BF16, WeightFormat.BF16_PAIRS])
def test_rows_of_a_packed_weight_can_be_read_back(weight_format):
    weight = torch.randn(101, 33).bfloat16().float()
    ids = torch.tensor([0, 100, 47, 48, 48])
    assert torch.equal(packed(weight, weight_format).rows(ids), weight[ids])
    with pytest.raises(IndexError):
        packed(weight, weight_format).rows(torch.tensor([101]))


@pytest.mark.needs("compiler")
def test_a_nan_stays_in_its_row():
    weight = packed(torch.randn(64, 40), WeightFormat.BF16_PAIRS)
    x = torch.randn(12, 40)
    clean = weight(x)
    x[5, 7] = torch.nan
    got = weight(x)
    assert got[5].isnan().all()
    assert torch.equal(got[:5], clean[:5])
    assert torch.equal(got[6:], clean[6:])


@pytest.mark.needs("compiler")
def test_activations_may_be_columns_of_a_wider_buffer():
    weight = torch.randn(50, 20)
    x, out = torch.randn(9, 64), torch.zeros(9, 80)
    packed(weight, WeightFormat.FP32)(x[:, 10:30], out[:, 7:57])
    torch.testing.assert_close(out[:, 7:57], x[:, 10:30] @ weight.T)
    assert not out[:, :7].any()
    assert not out[:, 57:].any()


@pytest.mark.needs("compiler")
def test_what_does_not_fit_together_is_refused():
    weight = packed(torch.randn(50, 20), WeightFormat.FP32)
    x = torch.randn(3, 20)
    for wrong in (
        lambda: weight(x[:, :19]),
        lambda: weight(x.double()),
        lambda: weight(x.t().contiguous().t()),
        lambda: weight(x, torch.empty(3, 49)),
        lambda: weight(x, residual=torch.empty(2, 50)),
        lambda: weight(x, bias=torch.empty(49)),
        lambda: KERNELS.pack(torch.randn(5, 5), WeightFormat.BF16),
        lambda: KERNELS.pack(torch.randn(5, 5), WeightFormat.FP32, memory=torch.empty(7, dtype=torch.uint8)),
    ):
        with pytest.raises(ValueError, match=r"expected|has to be|is packed from"):
            wrong()


class Small(nn.Module):
    """A linear layer of each kind, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(53, 40)
        self.inner = nn.Sequential(nn.Linear(40, 61), nn.GELU(), nn.Linear(61, 40, bias=False))
        self.turned = Conv1D(40, 40)
        self.head = nn.Linear(40, 53, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(self.turned(x + self.inner(x)))


PATHS = [LinearPath.ONEDNN] if KERNELS is None else [LinearPath.ONEDNN, LinearPath.KERNELS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", PATHS)
def test_a_model_computes_the_same_with_packed_layers(monkeypatch, path, dtype):
    if not linear._onednn_takes(dtype) and path is LinearPath.ONEDNN:
        pytest.skip("oneDNN does not take this type here")
    monkeypatch.setattr(linear, "choose_path", lambda *_: path)
    model = Small().to(dtype).eval()
    ids = torch.randint(0, 53, (2, 9))
    with torch.inference_mode():
        expected = model(ids)
        assert pack_linears(model) is path
        got = model(ids)
    kind = KernelLinear if path is LinearPath.KERNELS else OneDnnLinear
    assert [type(m) for m in model.modules() if isinstance(m, PackedLinear)] == [kind] * 4
    assert got.dtype is dtype
    tolerance = 1e-5 if dtype is torch.float32 else 0.03
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    # The weight is held once: tied layers share the packed one.
    assert isinstance(model.embedding, PackedEmbedding) == (path is LinearPath.KERNELS)
    assert "head.weight" not in dict(model.named_parameters())


def test_layers_of_other_types_and_subclasses_stay_as_they_are():
    class Special(nn.Linear):
        pass

    model = nn.ModuleList([Special(8, 8), nn.Linear(8, 8, dtype=torch.float16), nn.Linear(8, 8)])
    pack_linears(model)
    assert type(model[0]) is Special
    assert type(model[1]) is nn.Linear
    assert isinstance(model[2], PackedLinear) or linear.choose_path(8, 8, torch.float32) is LinearPath.PLAIN


@pytest.mark.needs("compiler")
def test_int8_is_within_half_a_step_of_the_weight():
    layer = nn.Linear(96, 70)
    model = nn.Sequential(copy.deepcopy(layer))
    pack_linears(model, int8=True)
    read_back = model(torch.eye(96)) - layer.bias
    step = layer.weight.abs().amax(dim=1) / 127
    assert ((read_back.T - layer.weight).abs() <= 0.5001 * step[:, None] + 1e-6).all()


def int8_layer(out: int, inner: int) -> Int8Linear:
    """With rows of very different sizes."""
    return Int8Linear(torch.randn(out, inner) * torch.logspace(-3, 0, out)[:, None], torch.randn(out))


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "out", "inner"), [(1, 96, 64), (5, 61, 97), (40, 130, 576)])
def test_layers_in_int8_are_computed_by_our_kernels_without_a_second_rounding(rows, out, inner, dtype):
    layer, x = int8_layer(out, inner), torch.randn(rows, inner)
    weight = layer.weight.double() * layer.scale.double()[:, None]
    expected = x.double() @ weight.T + layer.bias
    size = x.double().abs() @ weight.abs().T + layer.bias.abs()
    model = nn.Sequential(layer)
    assert pack_linears(model) is LinearPath.KERNELS
    assert isinstance(model[0], KernelLinear)
    got = model(x)
    assert (got - expected).norm() <= 1e-5 * expected.norm()
    assert ((got - expected).abs() <= 1e-6 * size).all()
    # A row of another type is read and answered in it.
    rounded = x.to(dtype)
    assert torch.equal(model(rounded), model(rounded.float()).to(dtype))
    assert not list(layer.parameters())
    assert "weight" not in dict(layer.named_buffers())


@pytest.mark.needs("compiler")
@pytest.mark.parametrize("path", PATHS)
def test_layers_of_one_model_keep_each_its_own_format(monkeypatch, path):
    """As when the output head is the embedding, and therefore not quantised."""
    monkeypatch.setattr(linear, "choose_path", lambda *_: path)
    model = Small().eval()
    model.inner = nn.Sequential(Int8Linear(torch.randn(40, 40), None), Int4Linear(torch.randn(48, 32), None))
    model.inner[0].register_buffer("bias", torch.randn(40))
    x, ids = torch.randn(7, 40), torch.arange(7)
    eight, four = model.inner
    weight = eight.weight.float() * eight.scale.float()[:, None]
    expected = model.head(model.turned(model.embedding(ids) + x @ weight.T + eight.bias))
    pack_linears(model)
    got = model.head(model.turned(model.embedding(ids) + model.inner[0](x)))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)
    assert isinstance(model.inner[0], KernelLinear)
    assert model.inner[1] is four
    assert isinstance(model.head, KernelLinear if path is LinearPath.KERNELS else OneDnnLinear)
    assert isinstance(model.embedding, PackedEmbedding) == (path is LinearPath.KERNELS)


@pytest.mark.needs("compiler")
def test_a_layer_in_int8_that_stands_in_two_places_is_packed_once():
    layer, x = int8_layer(40, 40), torch.randn(3, 40)
    expected = layer(layer(x))
    model = nn.Sequential(layer, layer)
    pack_linears(model)
    assert model[0] is model[1]
    # The layer's own product is in bf16.
    torch.testing.assert_close(model(x), expected, atol=0.05 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(("name", "kind"), [("gemma", "int8"), ("gpt2", "int8"), ("phi", "int8"), ("phi", "int4")])
def test_a_quantised_model_of_any_kind_keeps_its_logits(name, kind):
    model = make_model(*ARCHITECTURES[name])
    quantise(model, kind)
    ids = torch.arange(3, 40)[None] % VOCABULARY
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        path = pack_linears(model)
        got = model(ids, use_cache=False).logits
    # Before, each product was rounded to bf16.
    assert (got - expected).norm() < 0.02 * expected.norm()
    if kind == "int8" and KERNELS:
        assert path is LinearPath.KERNELS
        assert not [module for module in model.modules() if isinstance(module, Int8Linear)]


@pytest.mark.needs("compiler")
def test_memory_for_weights_is_one_stretch_in_the_order_of_taking():
    memory = WeightMemory(3 * 640)
    parts = [memory.take(640) for _ in range(3)]
    assert [part.data_ptr() - parts[0].data_ptr() for part in parts] == [0, 640, 1280]
    assert parts[0].data_ptr() % 64 == 0


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "deepseek_v3", "gemma3_text", "phi", "cohere"])
def test_models_of_many_kinds_keep_their_logits(name):
    model = make_model(*ARCHITECTURES[name])
    ids = torch.arange(3, 40)[None] % VOCABULARY
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        pack_linears(model)
        got = model(ids, use_cache=False).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_without_kernels_the_layers_still_give_the_same():
    """In a process of its own: whether there are kernels is decided once."""
    program = """
import torch
from torch import nn
from worker.engine.execution.linear import LinearPath, pack_linears
layer = nn.Linear(70, 33)
x = torch.randn(5, 70)
expected = layer(x)
model = nn.Sequential(layer)
path = pack_linears(model)
assert path is not LinearPath.KERNELS, path
torch.testing.assert_close(model(x), expected)

from worker.models.quantise import Int8Linear
rounded = Int8Linear(torch.randn(33, 70), None)
mixed = nn.Sequential(rounded, nn.Linear(33, 33), nn.Linear(33, 33))
expected = mixed(x)
assert pack_linears(mixed) is path
assert mixed[0] is rounded
torch.testing.assert_close(mixed(x), expected, atol=1e-4, rtol=1e-4)
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"HORDE_WORKER_KERNELS": "off", "PATH": "", "PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_without_kernels_and_onednn_nothing_is_replaced(monkeypatch):
    monkeypatch.setattr(linear, "load_linear_kernels", lambda: None)
    monkeypatch.setattr(linear, "_onednn_takes", lambda _: False)
    linear.choose_path.cache_clear()
    try:
        model = Small()
        assert pack_linears(model) is LinearPath.PLAIN
    finally:
        linear.choose_path.cache_clear()
    assert type(model.inner[0]) is nn.Linear
