"""GGUF files: what they say, what is made of them, and what is refused."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.worker.tiny_gguf import END, IM_END, TOKENS, TWELVE, make_llama, write_gguf
from worker.models import gguf as unpacking
from worker.models.gguf_header import NotGgufError, read_float32, read_header
from worker.models.load import load, resolve
from worker.models.loaded import LoadedModel, ModelNotFoundError

PROMPT = torch.tensor([[84, 72, 69, 200, 5, 17, 33]])


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HORDE_MODEL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return make_llama()


def load_file(path: Path, dtype: str = "float32") -> LoadedModel:
    return load(resolve(str(path)), "cpu", dtype)


def logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits.float()


def test_a_file_gives_the_model_that_it_was_made_from(llama, tmp_path):
    path = write_gguf(tmp_path / "Tiny-Llama.F32.gguf", llama)
    source = resolve(str(path))
    assert source.announced_name == "Tiny-Llama.F32"
    loaded = load(source, "cpu", "float32")
    torch.testing.assert_close(logits(loaded.model), logits(llama), rtol=0, atol=1e-5)
    assert (loaded.context_length, loaded.model.dtype) == (512, torch.float32)
    assert not loaded.model.training
    assert loaded.tokenizer.decode(loaded.tokenizer("Sea 12!").input_ids) == "Sea 12!"


def test_quantised_weights_are_unpacked_into_the_format_asked_for(llama, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", llama, quantised=gguf.GGMLQuantizationType.Q8_0)
    stored = llama.model.layers[0].mlp.up_proj.weight.detach().numpy()
    expected = gguf.quants.dequantize(
        gguf.quants.quantize(stored, gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    )
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        weight = load_file(path, name).model.model.layers[0].mlp.up_proj.weight
        assert weight.dtype == dtype
        assert torch.equal(weight, torch.from_numpy(expected).to(dtype))
    assert len(list((tmp_path / "cache").glob("tiny-*"))) == 2


def test_a_file_is_unpacked_once_until_it_changes(llama, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    first = unpacking.unpacked_directory(path, "tiny", torch.float32)
    monkeypatch.setattr(unpacking, "_convert", lambda *_: pytest.fail("unpacked again"))
    assert unpacking.unpacked_directory(path, "tiny", torch.float32) == first
    monkeypatch.undo()
    monkeypatch.setenv("HORDE_MODEL_CACHE", str(tmp_path / "cache"))
    write_gguf(path, make_llama(seed=1))
    assert unpacking.unpacked_directory(path, "tiny", torch.float32) != first


def test_a_large_file_is_known_by_its_ends_and_its_date(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "_WHOLE_DIGEST_BYTES", 1000)
    monkeypatch.setattr(unpacking, "_EDGE_BYTES", 100)
    path = tmp_path / "large"

    def fingerprint(content: bytes) -> str:
        path.write_bytes(content)
        os.utime(path, (1, 1))
        return unpacking._fingerprint(path)

    same = fingerprint(b"a" * 2000)
    assert fingerprint(b"a" * 2000) == same
    assert len({same, fingerprint(b"b" + b"a" * 1999), fingerprint(b"a" * 1999 + b"b"), fingerprint(b"a" * 2001)}) == 4


@pytest.mark.parametrize(
    ("rule", "ids", "warned"),
    [
        ("gpt-2", [TWELVE], False),
        ("smollm", [TOKENS.index("1"), TOKENS.index("2")], False),
        ("stablelm2", [TOKENS.index("1"), TOKENS.index("2")], False),
        ("llama-bpe", [TWELVE], False),
        ("a-rule-of-next-year", [TWELVE], True),
        (None, [TWELVE], True),
    ],
)
def test_text_is_split_by_the_files_rule_and_an_unknown_one_is_named(llama, tmp_path, caplog, rule, ids, warned):
    path = write_gguf(tmp_path / "tiny.gguf", llama, rule=rule)
    with caplog.at_level(logging.WARNING, logger="worker.models.gguf_tokenizer"):
        tokenizer = load_file(path).tokenizer
    assert tokenizer("12").input_ids == ids
    messages = [r.getMessage() for r in caplog.records if r.name == "worker.models.gguf_tokenizer"]
    assert bool(messages) == warned
    if warned:
        assert repr(rule or "default") in messages[0]


def test_every_token_that_ends_a_text_is_found_and_no_other_control_token(llama, tmp_path):
    assert load_file(write_gguf(tmp_path / "tiny.gguf", llama)).eos_token_ids == (END, IM_END)
    eot = {"tokenizer.ggml.eot_token_id": TOKENS.index("<|not_an_end|>")}
    path = write_gguf(tmp_path / "other.gguf", llama, metadata=eot)
    assert load_file(path).eos_token_ids == (END, IM_END, TOKENS.index("<|not_an_end|>"))


def llama3_divisors(factor: float) -> np.ndarray:
    """As llama.cpp's converter computes them, by wavelength."""
    divisors = []
    for i in range(8):
        wavelength = 2 * math.pi * 10000.0 ** (2 * i / 16)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_the_stretched_context_of_llama_3_survives(llama, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", llama, more={"rope_freqs.weight": llama3_divisors(32.0)})
    loaded = load_file(path)
    assert loaded.model.config.rope_parameters["rope_type"] == "llama3"
    plain = llama.model.rotary_emb.inv_freq
    torch.testing.assert_close(
        plain / loaded.model.model.rotary_emb.inv_freq, torch.from_numpy(llama3_divisors(32.0)), rtol=1e-4, atol=0
    )


def test_stated_scaling_survives_and_any_other_is_said_aloud(llama, tmp_path, caplog):
    stated = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    loaded = load_file(write_gguf(tmp_path / "linear.gguf", llama, metadata=stated))
    torch.testing.assert_close(loaded.model.model.rotary_emb.inv_freq * 4, llama.model.rotary_emb.inv_freq)
    odd = write_gguf(tmp_path / "odd.gguf", llama, more={"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)})
    with caplog.at_level(logging.WARNING, logger="worker.models.gguf"):
        load_file(odd)
    assert "odd.gguf stretches its context" in caplog.text


def test_a_file_without_some_weights_is_refused_instead_of_filled_with_noise(llama, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", llama, leave_out=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelNotFoundError, match=r"no weights for model\.layers\.1\.mlp\.up_proj\.weight"):
        load_file(path)
    assert not list((tmp_path / "cache").glob("tiny-*"))


def test_an_architecture_that_transformers_cannot_read_is_named(llama, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", llama, architecture="rwkv7")
    with pytest.raises(ModelNotFoundError, match=r"cannot read .*tiny\.gguf.*rwkv7"):
        load_file(path)


def test_one_piece_of_a_split_model_is_refused(llama, tmp_path):
    path = write_gguf(tmp_path / "tiny-00001-of-00003.gguf", llama, metadata={"split.count": 3})
    with pytest.raises(ModelNotFoundError, match="one of 3 pieces"):
        load_file(path)


def test_a_disk_without_room_is_noticed_before_the_work(llama, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", llama)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ModelNotFoundError, match="HORDE_MODEL_CACHE names another place"):
        load_file(path)


@pytest.mark.parametrize("share", [0.001, 0.1, 0.6, 0.99])
def test_a_download_that_broke_off_is_refused(llama, tmp_path, share):
    whole = write_gguf(tmp_path / "whole.gguf", llama).read_bytes()
    path = tmp_path / "part.gguf"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelNotFoundError, match=r"part\.gguf"):
        load_file(path)


def test_files_that_are_no_gguf_are_refused_by_name(tmp_path):
    path = tmp_path / "model.gguf"
    for content in (b"", b"GG", b"PK\x03\x04 a zip file"):
        path.write_bytes(content)
        with pytest.raises(ModelNotFoundError, match=r"model\.gguf is not a GGUF file"):
            resolve(str(path))
    with pytest.raises(ModelNotFoundError, match="is not there"):
        resolve("some/missing.gguf")


def test_a_directory_of_gguf_files_says_to_name_one(llama, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", llama)
    with pytest.raises(ModelNotFoundError, match=r"name the file itself: tiny\.gguf"):
        resolve(str(tmp_path))


def test_the_header_agrees_with_the_gguf_package(llama, tmp_path):
    freqs = {"rope_freqs.weight": llama3_divisors(8.0)}
    path = write_gguf(tmp_path / "tiny.gguf", llama, quantised=gguf.GGMLQuantizationType.Q8_0, more=freqs)
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.metadata == {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert {n: (t.kind, t.offset) for n, t in header.tensors.items()} == {
        t.name: (int(t.tensor_type), t.data_offset) for t in reader.tensors
    }
    assert {n: list(t.shape[::-1]) for n, t in header.tensors.items()} == {
        t.name: t.shape.tolist() for t in reader.tensors
    }
    assert read_float32(path, header.tensors["rope_freqs.weight"]) == freqs["rope_freqs.weight"].tolist()


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_versions_that_are_not_read_are_said(tmp_path, version):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(16))
    with pytest.raises(NotGgufError, match="versions 2 and 3 are read"):
        read_header(path)
