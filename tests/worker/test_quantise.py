"""Weights in 8 and 4 bits: what the products come to, what is replaced, what is refused."""

from __future__ import annotations

import copy
import weakref

import gguf
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from worker.models import quantise as quantising
from worker.models.load import load, resolve
from worker.models.quantise import (
    INT4_GROUP,
    Int4Linear,
    Int8Linear,
    QuantisationError,
    int4_groups,
    int8_rows,
    quantise,
)

SHAPES = [(16, 32), (48, 64), (64, 128), (80, 160), (4096, 96), (112, 1536)]
ODD_SHAPES = [(33, 7), (61, 40), (17, 72), (40, 101)]
# bfloat16 keeps 8 bits: the product is rounded to them once.
ROUNDING = 2**-8


def restored(weight: Tensor, kind: str) -> Tensor:
    """What the quantised numbers stand for, by the formulas of the module."""
    if kind == "int8":
        levels, scales = int8_rows(weight)
        return levels.float() * scales.float()[:, None]
    levels, scales, zeros = int4_groups(weight)
    grouped = levels.reshape(weight.shape[0], -1, INT4_GROUP) - 8
    return (grouped * scales.float()[..., None] + zeros.float()[..., None]).reshape(weight.shape)


def wide_weight(out: int, inner: int) -> Tensor:
    """Rows of very different sizes, off centre, with a few outliers: like the worst rows of a real model."""
    torch.manual_seed(out * inner)
    weight = torch.randn(out, inner) * torch.logspace(-3, 0, out)[:, None] + 0.01
    weight[0, 0], weight[-1, -1] = 9.0, -9.0
    return weight


@pytest.mark.parametrize("rows", [1, 3, 31, 32, 70])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(kind, shape) for kind in ("int8", "int4") for shape in SHAPES] + [("int8", s) for s in ODD_SHAPES],
)
def test_a_product_is_that_of_the_restored_weights(kind, shape, rows):
    out, inner = shape
    weight, bias = wide_weight(out, inner), torch.randn(out)
    layer = Int8Linear(weight, bias) if kind == "int8" else Int4Linear(weight, bias)
    x = torch.randn(2, rows, inner)
    rounded = x.to(torch.bfloat16).float()
    product = functional.linear(rounded, restored(weight, kind))
    got = layer(x)
    assert (got.shape, got.dtype) == ((2, rows, out), torch.float32)
    tolerance = product.abs() * ROUNDING + 1e-4 * rounded.abs().sum(-1, keepdim=True) / inner + 1e-5
    assert ((got - bias - product).abs() <= tolerance).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_answer_comes_in_the_format_of_the_question(kind, dtype):
    linear = nn.Linear(64, 32).to(dtype)
    model = nn.Sequential(linear)
    quantise(model, kind)
    assert model(torch.randn(5, 64, dtype=dtype)).dtype == dtype


def test_a_row_does_not_depend_on_the_rows_beside_it():
    weight = wide_weight(64, 128)
    rows = torch.randn(20, 128)
    for layer in (Int8Linear(weight, None), Int4Linear(weight, None)):
        together = layer(rows)
        for i in range(20):
            # Single rows may be summed in another order, so their last bit may differ.
            torch.testing.assert_close(layer(rows[i : i + 1])[0], together[i], rtol=2 * ROUNDING, atol=1e-4)


def test_int8_is_off_by_half_a_step_of_its_row_at_most():
    weight = wide_weight(50, 200)
    levels, scales = int8_rows(weight)
    assert levels.dtype == torch.int8
    # A scale that bfloat16 rounded down leaves the largest number of a row a little further off.
    step = scales.float()[:, None] * (0.5 + 127 * ROUNDING)
    assert ((restored(weight, "int8") - weight).abs() <= step).all()
    inner = weight.abs() < 100 * scales.float()[:, None]
    assert ((restored(weight, "int8") - weight).abs() <= scales.float()[:, None] * 0.5001)[inner].all()


def test_int4_groups_are_independent_and_off_by_half_a_step_at_most():
    weight = wide_weight(32, 256)
    levels, scales, _ = int4_groups(weight)
    assert (levels.amin().item(), levels.amax().item()) == (0, 15)
    step = scales.float().repeat_interleave(INT4_GROUP, dim=1)
    # Scale and zero are rounded to bfloat16, which moves the ends of a group's range.
    size = weight.abs().reshape(32, -1, INT4_GROUP).amax(2).repeat_interleave(INT4_GROUP, dim=1)
    assert ((restored(weight, "int4") - weight).abs() <= step * (0.5 + 15 * ROUNDING) + size * 2 * ROUNDING).all()
    changed = weight.clone()
    changed[:, 64:96] *= 100
    assert torch.equal(restored(changed, "int4")[:, :64], restored(weight, "int4")[:, :64])


def test_weights_that_were_4_bit_already_lose_next_to_nothing():
    """As in a GGUF of type Q4_1, whose groups are the same."""
    torch.manual_seed(0)
    stored = gguf.quants.quantize(torch.randn(64, 128).numpy(), gguf.GGMLQuantizationType.Q4_1)
    weight = torch.from_numpy(gguf.quants.dequantize(stored, gguf.GGMLQuantizationType.Q4_1))
    error = (restored(weight, "int4") - weight).abs()
    assert error.max() < 0.02 * weight.abs().max()
    assert error.mean() < 0.005 * weight.abs().mean()


def test_numbers_do_not_depend_on_how_a_matrix_is_cut_for_the_work(monkeypatch):
    weight = wide_weight(40, 64)
    whole = restored(weight, "int8"), restored(weight, "int4")
    rows = torch.randn(40, 64)
    product = Int8Linear(weight, None)(rows)
    monkeypatch.setattr(quantising, "_CHUNK_ELEMENTS", 64 * 4 * 3)
    assert torch.equal(restored(weight, "int8"), whole[0])
    assert torch.equal(restored(weight, "int4"), whole[1])
    torch.testing.assert_close(Int8Linear(weight, None)(rows), product)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_zeros_stay_zeros(kind):
    assert torch.equal(restored(torch.zeros(16, 64), kind), torch.zeros(16, 64))


def test_linear_layers_are_replaced_and_take_less_memory(tiny):
    model = copy.deepcopy(tiny.model)
    before = [p.clone() for p in (model.model.embed_tokens.weight, model.model.norm.weight)]
    report = quantise(model, "int8")
    assert (report.int8, report.int4) == (15, 0)
    assert isinstance(model.model.layers[1].mlp.down_proj, Int8Linear)
    assert not [m for m in model.modules() if isinstance(m, nn.Linear)]
    after = (model.model.embed_tokens.weight, model.model.norm.weight)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert report.bytes_after < 0.3 * report.bytes_before


def test_the_head_is_never_coarser_than_int8(tiny):
    model = copy.deepcopy(tiny.model)
    report = quantise(model, "int4")
    assert (report.int8, report.int4) == (1, 14)
    assert isinstance(model.lm_head, Int8Linear)
    assert isinstance(model.model.layers[0].self_attn.q_proj, Int4Linear)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_head_that_is_the_embedding_stays_it(kind):
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    assert getattr(quantise(model, kind), kind) == 14
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_layer_is_gone_when_the_next_one_is_made(tiny, monkeypatch):
    model = copy.deepcopy(tiny.model)
    originals = [weakref.ref(m) for m in model.modules() if isinstance(m, nn.Linear)]
    alive: list[int] = []
    make = quantising._quantised

    def counting(linear: nn.Module, kind: str, device: torch.device) -> nn.Module:
        alive.append(sum(ref() is not None for ref in originals))
        return make(linear, kind, device)

    monkeypatch.setattr(quantising, "_quantised", counting)
    quantise(model, "int4")
    assert alive == list(range(15, 0, -1))


def test_shapes_that_int4_cannot_take_become_int8():
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64), nn.Linear(64, 17))
    report = quantise(model, "int4")
    assert [type(m) for m in model] == [Int4Linear, Int8Linear, Int8Linear]
    assert (report.int8, report.int4) == (2, 1)


@pytest.mark.parametrize(("kind", "largest"), [("int8", 0.02), ("int4", 0.3)])
def test_matrices_that_stand_the_other_way_round_are_turned(kind, largest):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=2, initializer_range=0.2)
    model = GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.inference_mode():
        exact = model(ids).logits
        assert quantise(model, kind).bytes_before == 2 * 12 * 64 * 64 * 4
        difference = (model(ids).logits - exact).abs().mean() / exact.abs().mean()
    assert 0 < difference < largest


def test_a_model_whose_weights_are_elsewhere_is_refused_and_left_as_it_was():
    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with pytest.raises(QuantisationError, match="of this model's weights are not in linear layers"):
        quantise(model, "int8")
    assert not [m for m in model.modules() if isinstance(m, Int8Linear)]


def test_kinds_and_devices_that_there_are_not_are_refused(tiny):
    with pytest.raises(QuantisationError, match="int8 and int4"):
        quantise(copy.deepcopy(tiny.model), "int2")
    with pytest.raises(QuantisationError, match="int4 runs on a CPU and on NVIDIA GPUs"):
        quantise(copy.deepcopy(tiny.model), "int4", "mps")


def test_an_old_gpu_is_refused_before_anything_is_changed(tiny, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    model = copy.deepcopy(tiny.model)
    with pytest.raises(QuantisationError, match=r"compute capability 8\.0"):
        quantise(model, "int4", "cuda")
    assert not [m for m in model.modules() if isinstance(m, Int4Linear | Int8Linear)]


@pytest.mark.needs("model")
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_real_model_keeps_its_sense(kind):
    loaded = load(resolve("SmolLM2-135M-Instruct"), "cpu", "float32")
    ids = loaded.tokenizer(
        "An old woman sat on a bench beside the water, mending a basket, and told the children who had gathered around "
        "her about the winter when the bay froze so hard that carts could cross it.",
        return_tensors="pt",
    ).input_ids
    with torch.inference_mode():
        exact = loaded.model(ids).logits[0].log_softmax(-1)
        quantise(loaded.model, kind)
        got = loaded.model(ids).logits[0].log_softmax(-1)
        assert (exact.exp() * (exact - got)).sum(-1).mean() < 0.01
        prompt = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
        answer = loaded.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert loaded.tokenizer.decode(answer[0, prompt.shape[1] :]).startswith(" Paris")
