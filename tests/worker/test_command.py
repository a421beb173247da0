"""The command itself: its options, and a whole worker as a process."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from tests.worker.played_broker import CHAT_POP, FIND_USER, PATIENCE, Answer, PlayedBroker
from worker.cli import main
from worker.config import ConfigError, WorkerConfig, parse_size, read_file
from worker.display import panel
from worker.engine.interface import EngineStatistics
from worker.engine_options import prepare_process
from worker.models.load import ModelSource
from worker.models.revision import model_revision
from worker.status import Status

KEY = "canary-key-1234567890"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("HORDE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def told(monkeypatch) -> Iterator[list[WorkerConfig]]:
    """What `run` would have started with."""
    configs: list[WorkerConfig] = []
    monkeypatch.setattr("worker.cli._serve", configs.append)
    monkeypatch.setattr("worker.cli.log_lines", lambda level: None)
    return configs


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments], env=environment)


REQUIRED = ("--broker", "http://h:7001", "--api-key", KEY, "--name", "w", "--model", "m")


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(told, tmp_path):
    file = tmp_path / "worker.yaml"
    file.write_text(f"broker: http://file:1\napi-key: {KEY}\nname: file\nmodel: file\nmax_batch: 2\nmax-length: 99\n")
    result = invoke(
        "--config", str(file), "--name", "flag", HORDE_WORKER_NAME="environment", HORDE_WORKER_MODEL="environment"
    )
    assert result.exit_code == 0, result.output
    [config] = told
    assert (config.name, config.model, config.broker) == ("flag", "environment", "http://file:1")
    assert (config.max_batch, config.max_length, config.max_context_length) == (2, 99, None)
    assert (config.api_key, config.device, config.poll_wait) == (KEY, "auto", 5)


@pytest.mark.parametrize("option", ["--broker", "--api-key", "--name", "--model"])
def test_a_missing_option_is_named_with_its_variable(told, option):
    left_out = REQUIRED.index(option)
    result = invoke(*REQUIRED[:left_out], *REQUIRED[left_out + 2 :])
    assert result.exit_code == 2
    assert f"Missing option '{option}'" in result.output
    assert f"HORDE_WORKER_{option[2:].upper().replace('-', '_')}" in result.output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--broker", "localhost"), ("--max-batch", "0"), ("--max-batch", "many"), ("--max-length", "15"),
        ("--max-context-length", "79"), ("--device", "tpu"), ("--dtype", "int3"), ("--poll-wait", "26"),
        ("--engine", "fast"), ("--quantize", "int2"), ("--kv-cache-memory", "2"), ("--kv-cache-memory", "0MB"),
        ("--max-batch", "51"), ("--progress-interval", "0.001"), ("--progress-interval", "3"),
        ("--name", " "), ("--api-key", "with\nnewline"),
        ("--config", "/does/not/exist.yaml"), ("--log-level", "loud"),
    ],
)  # fmt: skip
def test_a_bad_option_is_named(told, option, value):
    result = invoke(*REQUIRED, option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output
    assert not told


def test_a_model_that_is_not_there_is_named():
    result = invoke(*REQUIRED[:-1], "/no/such/directory")
    assert result.exit_code == 2
    assert "Invalid value for --model: /no/such/directory is not there" in result.output


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("api_key: 0000000000", "put the value of api_key in quotes"),
        ("name: 5", "put the value of name in quotes"),
        ("max_btach: 5", "there is no option 'max_btach'"),
        ("max_batch: [1, 2]", "takes a single value"),
        ("- a", "not a list of"),
        ("api_key: 'canary\nname: [", "not valid YAML"),
    ],
)
def test_a_bad_file_is_explained_without_quoting_the_key(told, tmp_path, content, problem):
    file = tmp_path / "worker.yaml"
    file.write_text(content)
    result = invoke(*REQUIRED, "--config", str(file))
    assert result.exit_code == 2
    assert problem in " ".join(result.output.split())
    assert "canary" not in result.output


def test_a_bad_value_in_the_file_names_its_option(told, tmp_path):
    file = tmp_path / "worker.yaml"
    file.write_text("max_batch: 99")
    assert "Invalid value for '--max-batch'" in invoke(*REQUIRED, "--config", str(file)).output


def test_an_empty_file_is_fine(tmp_path):
    file = tmp_path / "worker.yaml"
    file.write_text("# nothing\n")
    assert read_file(file) == {}


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 << 30), ("512MB", 512_000_000), (" 1.5 gib ", 3 << 29), ("100b", 100), ("3KiB", 3072), ("1TB", 10**12)],
)
def test_a_size_is_read_with_its_unit(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2",
        "GiB",
        "-1GiB",
        "2G",
        "1e3MB",
        "2 GiB extra",
        "0.1b",
        "inf GB",
        "½GB",
        f"1{'0' * 29}TB",
        f"{'9' * 400}TB",
    ],
)
def test_a_size_that_is_none_is_refused(text):
    with pytest.raises(ConfigError):
        parse_size(text)


def test_the_cache_size_is_told_to_the_engine_in_bytes(told, tmp_path):
    file = tmp_path / "worker.yaml"
    file.write_text("kv-cache-memory: 2GiB\n")
    assert invoke(*REQUIRED, "--config", str(file)).exit_code == 0
    assert invoke(*REQUIRED, HORDE_WORKER_KV_CACHE_MEMORY="1MB").exit_code == 0
    assert [config.kv_cache_memory for config in told] == [2 << 30, 10**6]


def test_the_batch_is_large_unless_the_engine_takes_turns(told):
    for arguments in ((), ("--engine", "reference"), ("--engine", "reference", "--max-batch", "3")):
        assert invoke(*REQUIRED, *arguments).exit_code == 0
    assert [(config.engine, config.batch) for config in told] == [("paged", 32), ("reference", 1), ("reference", 3)]


def config(**changes) -> WorkerConfig:
    usual = {
        "broker": "http://h", "api_key": KEY, "name": "w", "model": "m", "announce_as": None, "max_length": None,
        "max_context_length": None, "poll_wait": 5, "progress_interval": 0.05, "log_level": "info",
    }  # fmt: skip
    return WorkerConfig(**{**usual, **changes})


def test_lengths_come_from_the_model_and_must_fit_it():
    assert config().lengths(8192) == (4096, 8192)
    assert config().lengths(512) == (256, 512)
    assert config().lengths(131072) == (4096, 131072)
    assert config().lengths(10_000_000) == (4096, 1_048_576)
    assert config(max_context_length=1000).lengths(8192) == (500, 1000)
    assert config(max_length=100, max_context_length=4096).lengths(8192) == (100, 4096)
    with pytest.raises(ConfigError, match="--max-context-length"):
        config(max_context_length=4096).lengths(2048)
    with pytest.raises(ConfigError, match="--max-length"):
        config(max_length=2048).lengths(2048)


def test_the_key_does_not_show_when_settings_are_printed():
    assert KEY not in repr(config())


def test_the_panel_shows_the_figures_and_takes_names_literally():
    status = Status()
    status.set_state("paused", "too many [red]dropped[/red] jobs")
    status.add_tokens(30)
    status.add_done(2.5)
    status.add_failed()
    status.add_stopped()
    status.set_engine(EngineStatistics(running=2, waiting=3), queued=1)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(panel("[bold]w[/bold]", "m/x", status.snapshot()))
    text = console.export_text()
    for expected in ("[bold]w[/bold] · m/x", "paused", "[red]dropped[/red]", "3.0 tokens/s", "2 running", "4 waiting",
                     "1 done", "1 failed", "1 stopped", "2.50 kudos"):  # fmt: skip
        assert expected in text
    assert "blocks" not in text, "this engine has no cache"
    status.set_engine(EngineStatistics(blocks_total=256, blocks_free=200, blocks_cached=50), queued=0)
    console.print(panel("w", "m", status.snapshot()))
    assert "no prompts yet" in console.export_text()
    status.set_engine(
        EngineStatistics(blocks_total=256, blocks_free=200, blocks_cached=50, prefix_queries=1000, prefix_hits=420),
        queued=0,
    )
    console.print(panel("w", "m", status.snapshot()))
    text = console.export_text()
    for expected in ("200 of 256 blocks free", "50 cached", "42% of prompts cached"):
        assert expected in text
    console.file.close()


class Process:
    """`horde-worker run` on the tiny model."""

    def __init__(
        self, broker: PlayedBroker, model: Path, log: Path, *options: str, stdout: int = subprocess.PIPE
    ) -> None:
        self._log = log
        environment = {
            **os.environ, "HORDE_WORKER_API_KEY": KEY, "HORDE_WORKER_BROKER": broker.url, "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100", "TERM": "xterm",
        }  # fmt: skip
        command = [sys.executable, "-c", "from worker.cli import main; main()", "run", "--name", "w", "--device", "cpu",
                   "--model", str(model), "--poll-wait", "1", "--log-level", "debug", *options]  # fmt: skip
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, env=environment, stdout=stdout, stderr=errors)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self) -> tuple[int, str, str]:
        """Exit code, output, log."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, (output or b"").decode(), self._log.read_text()


@pytest.fixture
def process(broker, patient_model, tmp_path):
    made: list[Process] = []

    def start(*options: str, **settings) -> Process:
        made.append(Process(broker, patient_model, tmp_path / "log", *options, **settings))
        # Loading torch on a busy machine takes longer than anything else here.
        for _ in range(120):
            with broker.changed:
                if broker.changed.wait_for(broker.pops, 0.5):
                    return made[-1]
            assert made[-1].process.poll() is None, (tmp_path / "log").read_text()
        raise AssertionError((tmp_path / "log").read_text())

    yield start
    for worker in made:
        worker.process.kill()
        worker.process.communicate()


def test_a_key_that_is_nobodys_is_noticed_before_the_model_is_loaded(broker, patient_model, tmp_path):
    broker.fail(FIND_USER, Answer(404, {"message": "No user matches this API key.", "rc": "UserNotFound"}))
    worker = Process(broker, patient_model, tmp_path / "log")
    try:
        code, _, log = worker.ended()
    finally:
        worker.process.kill()
        worker.process.communicate()
    assert code == 1
    assert "Stopped: the broker does not know this API key" in log
    assert "loading" not in log
    assert not broker.pops()


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}),
        ({"GOMP_SPINCOUNT": "9"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "9"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_openmp_waits_calmly_unless_the_environment_says_otherwise(monkeypatch, given, used):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    monkeypatch.setattr(os, "environ", {**environment, **given})
    prepare_process()
    assert {n: v for n, v in os.environ.items() if n.startswith(("OMP_", "GOMP_"))} == used


def test_a_worker_serves_drains_on_sigterm_and_never_shows_its_key(broker, process, patient_model, monkeypatch):
    # Has libgomp say how it was set up, once it is loaded with torch.
    monkeypatch.setenv("OMP_DISPLAY_ENV", "VERBOSE")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    worker = process()
    broker.give("j", "canary prompt", max_length=20, temperature=0, seed=1)
    broker.give_chat("c", prompt_token_ids=None, messages=None, prompt="canary chat", max_new_tokens=20)
    broker.wait_until(lambda: len(broker.settled) == 2 and len(broker.published) == 2)
    worker.signal(signal.SIGTERM)
    code, output, log = worker.ended()
    assert code == 0, log
    assert output == "worker w serves tiny-llama\n"
    assert "job j delivered, 1.50 kudos" in log
    assert KEY not in output + log
    assert "job c delivered, 1.50 kudos" in log
    assert "canary" not in log.replace(KEY, "")
    assert broker.held["c"].token_ids == broker.settled["c"]["token_ids"][: len(broker.held["c"].token_ids)]
    if "OPENMP DISPLAY ENVIRONMENT" in log:
        assert "OMP_WAIT_POLICY = 'PASSIVE'" in log
    [result] = [broker.settled["j"]]
    assert (result["state"], result["finish_reason"], len(result["token_ids"])) == ("ok", "length", 20)
    pop = broker.made(CHAT_POP)[0].body
    manifest = pop["manifests"]["tiny-llama"]
    assert pop == {
        "name": "w", "models": ["tiny-llama"], "max_length": 4096, "max_context_length": 65536,
        "threads": 32, "slots": 36, "progress": True, "kinds": ["text", "chat"], "manifests": {"tiny-llama": manifest},
        "bridge_agent": pop["bridge_agent"], "wait": 1,
    }  # fmt: skip
    assert manifest["context_length"] == 65536
    assert manifest["model_revision"] == model_revision(ModelSource(str(patient_model), "tiny-llama"))
    tokenizer = f"/api/v2/tokenizers/{manifest['tokenizer_revision']}"
    revision = f"/api/v2/models/tiny-llama/revisions/{manifest['model_revision']}"
    assert set(broker.published) == {tokenizer, revision}
    assert len(broker.published[revision]["probe"]["output_token_ids"]) == 8


def test_a_second_signal_releases_what_runs_and_exits_at_once(broker, process):
    worker = process("--max-batch", "1")
    broker.give("long", "x", max_length=100_000, max_context_length=100_000)
    broker.give("next", "y")
    broker.wait_until(lambda: not broker.jobs)
    worker.signal(signal.SIGINT)
    broker.wait_until(lambda: "next" in broker.settled)
    worker.signal(signal.SIGINT)
    code, _, log = worker.ended()
    assert code == 0, log
    assert broker.states() == {"long": "released", "next": "released"}


def test_a_terminal_gets_a_live_panel(broker, process):
    ours, theirs = pty.openpty()
    try:
        worker = process(stdout=theirs)
        os.close(theirs)
        seen = b""
        while b"tokens/s" not in seen or b"serves tiny-llama" not in seen:
            readable, _, _ = select.select([ours], [], [], 60)
            assert readable, seen
            seen += os.read(ours, 4096)
        worker.signal(signal.SIGTERM)
        worker.process.wait(PATIENCE)
    finally:
        os.close(ours)
    assert KEY.encode() not in seen
