"""Revisions: equal for equal models wherever they lie, different as soon as a result could be."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.worker.tiny_model import make_tiny_model
from worker.engine.interface import Delta, EngineStatistics, GenerationRequest, Sampling
from worker.engine.paged import PagedEngine
from worker.engine.reference import ReferenceEngine
from worker.manifest import PROBE_PROMPT, PROBE_TOKENS, describe, run_probe
from worker.models import revision
from worker.models.load import ModelSource, resolve
from worker.models.revision import NoRevisionError, model_revision, tokenizer_body, tokenizer_revision


def of(directory: Path, quantize: str | None = None) -> str:
    return model_revision(ModelSource(str(directory), "m"), quantize)


def test_a_copy_has_the_same_revision_whatever_it_is_called_and_lies_beside(tiny_directory, tmp_path):
    copy = tmp_path / "another-name"
    shutil.copytree(tiny_directory, copy)
    (copy / "README.md").write_text("A model.")
    (copy / "consolidated.safetensors").write_bytes(b"the same again in another form")
    assert of(copy) == of(tiny_directory)
    assert len(of(copy)) == 32


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_byte_of_weights_or_settings_makes_another_revision(tiny_directory, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_directory, copy)
    content = bytearray((copy / name).read_bytes())
    content[-2] ^= 1
    (copy / name).write_bytes(content)
    assert of(copy) != of(tiny_directory)


def test_quantised_weights_are_told_apart(tiny_directory):
    assert of(tiny_directory, "int8") == of(tiny_directory) + "-int8"


def test_weights_in_several_files_are_those_that_the_index_names(tiny_directory, tmp_path):
    for name in ("a.safetensors", "b.safetensors", "stray.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    before = of(tmp_path)
    (tmp_path / "stray.safetensors").write_bytes(b"other")
    assert of(tmp_path) == before
    (tmp_path / "b.safetensors").write_bytes(b"other")
    assert of(tmp_path) != before


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 5}', '{"weight_map": {"x": "gone.safetensors"}}'])
def test_weights_that_cannot_be_found_have_no_revision(tmp_path, index):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoRevisionError, match="has no weights"):
        of(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(NoRevisionError):
        of(tmp_path)
    with pytest.raises(NoRevisionError, match="no copy"):
        model_revision(ModelSource("nobody/has-this-model", "m"))


def test_of_a_large_file_any_stretch_that_differs_shows_and_most_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(revision, "WHOLE_BYTES", 1 << 20)
    monkeypatch.setattr(revision, "STRETCH_BYTES", 1 << 16)
    monkeypatch.setattr(revision, "PIECE_BYTES", 1 << 8)
    file = tmp_path / "model.gguf"
    content = bytearray(3 << 20)
    file.write_bytes(content)
    before = of(file)
    for start in (0, 1 << 20, (3 << 20) - (1 << 17)):
        changed = bytearray(content)
        changed[start : start + (1 << 17)] = b"\1" * (1 << 17)
        file.write_bytes(changed)
        assert of(file) != before
    for place, seen in ((1000, False), (len(content) - 1, True), (1 << 17, True)):
        changed = bytearray(content)
        changed[place] = 1
        file.write_bytes(changed)
        assert (of(file) != before) is seen
    file.write_bytes(content + b"\0")
    assert of(file) != before


@pytest.mark.needs("model")
def test_the_demo_model_has_a_revision():
    assert len(model_revision(resolve("SmolLM2-135M-Instruct"))) == 32


def test_a_tokenizers_body_is_canonical_and_does_not_change_with_use(tiny):
    body = tokenizer_body(tiny.tokenizer)
    tiny.tokenizer("some text that is cut", truncation=True, max_length=3)
    assert tokenizer_body(tiny.tokenizer) == body
    content = json.loads(body)
    assert set(content) == {"tokenizer", "chat_template", "special_tokens"}
    assert content["special_tokens"] == {"eos_token": "<end>"}
    assert content["tokenizer"]["truncation"] is None
    again = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    assert again.encode() == body
    assert tokenizer_revision(body) == hashlib.sha256(body).hexdigest()


def test_another_template_makes_another_tokenizer_revision(tiny):
    plain = tokenizer_body(tiny.tokenizer)
    assert json.loads(plain)["chat_template"] is None
    try:
        tiny.tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "x"}
        named = tokenizer_body(tiny.tokenizer)
        tiny.tokenizer.chat_template = "{{ messages }}"
        assert tokenizer_body(tiny.tokenizer) == named != plain
    finally:
        tiny.tokenizer.chat_template = None


def test_a_tokenizer_without_a_tokenizer_json_has_no_revision():
    with pytest.raises(NoRevisionError, match=r"tokenizer\.json"):
        tokenizer_body(object())


def test_a_manifest_has_the_figures_of_the_cache(tiny):
    engine = PagedEngine(make_tiny_model(), max_batch=4, cache_memory=1 << 21)
    manifest = describe(engine, model_revision="a", tokenizer_revision="b")
    # Two layers, two heads, keys and values of 16 numbers of four bytes.
    assert manifest.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert manifest.blocks * manifest.block_size * manifest.kv_bytes_per_token <= 1 << 21
    assert manifest.blocks == engine.statistics().blocks_total > 0
    assert manifest.context_length == 512
    plain = describe(ReferenceEngine(tiny, max_batch=2), model_revision="a", tokenizer_revision="b")
    assert (plain.blocks, plain.block_size, plain.kv_bytes_per_token) == (2, 512, 0)
    assert EngineStatistics().kv_bytes_per_token == 0


def test_a_probe_is_the_engines_own_greedy_continuation(tiny):
    engine = PagedEngine(make_tiny_model(), max_batch=4, cache_memory=1 << 21)
    ids = list(tiny.tokenizer(PROBE_PROMPT).input_ids)
    probe = run_probe(engine, PROBE_PROMPT, ids)
    assert engine.running == 0
    reference = ReferenceEngine(tiny)
    reference.add(GenerationRequest("r", tuple(ids), PROBE_TOKENS, seed=5, sampling=Sampling(temperature=0.0)))
    output = []
    while reference.running:
        output += [i for event in reference.step() if isinstance(event, Delta) for i in event.token_ids]
    assert probe == {"prompt": PROBE_PROMPT, "token_ids": ids, "output_token_ids": output}
    assert len(output) == PROBE_TOKENS
    assert run_probe(engine, "too long", [1] * 600) is None
