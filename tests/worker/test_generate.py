"""`horde-worker generate`: one prompt, continued here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from worker.cli import main
from worker.engine.interface import GenerationRequest, Sampling
from worker.engine.reference import ReferenceEngine

FIGURES = re.compile(
    r"\d+ tokens in \d+\.\d\d s \(\d+\.\d tokens/s\), first token after \d+\.\d\d s, \d+ prompt tokens, seed"
)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("HORDE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def run(tiny_directory):
    def invoke(*arguments: str, given: str | bytes | None = None) -> Result:
        usual = ["generate", "--model", str(tiny_directory), "--device", "cpu", "--dtype", "float32"]
        return CliRunner().invoke(main, [*usual, *arguments], input=given)

    return invoke


@pytest.fixture
def expected(tiny):
    """The text that the reference engine makes, and its ids."""

    def make(prompt: str, **settings) -> tuple[str, list[int]]:
        engine = ReferenceEngine(tiny)
        engine.add(GenerationRequest("r", prompt, **{"max_new_tokens": 12, "seed": 5, **settings}))
        text, ids = "", []
        while engine.running:
            for event in engine.step():
                text += getattr(event, "text", "")
                ids += getattr(event, "token_ids", ())
        return text, ids

    return make


ENGINES = pytest.mark.parametrize("engine", ["paged", "reference"])


@ENGINES
def test_the_text_goes_to_standard_output_and_figures_to_standard_error(run, expected, engine):
    result = run("The sea", "--engine", engine, "--max-new-tokens", "12", "--seed", "5", "--temperature", "0")
    assert result.exit_code == 0, result.output
    text, _ = expected("The sea", sampling=Sampling(temperature=0))
    assert result.stdout.removesuffix("\n") == text.removesuffix("\n")
    assert FIGURES.search(result.stderr)
    assert "12 tokens in" in result.stderr
    assert result.stderr.rstrip().endswith("7 prompt tokens, seed 5")


def test_sampling_options_reach_the_engine(run, expected):
    options = ("--max-new-tokens", "12", "--seed", "5", "--temperature", "0.7", "--top-p", "0.9", "--top-k", "20")
    result = run("The sea", "--engine", "reference", *options, "--json")
    assert result.exit_code == 0, result.output
    _, ids = expected("The sea", sampling=Sampling(temperature=0.7, top_p=0.9, top_k=20))
    assert json.loads(result.stdout)["samples"][0]["token_ids"] == ids


def test_json_is_one_object_with_all_there_is(run, expected, tiny_directory):
    text, ids = expected("x", sampling=Sampling(temperature=0))
    stop = text[3:5]
    result = run("x", "--engine", "reference", "--temperature", "0", "--stop", "no such", "--stop", stop, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["model"], document["prompt"]) == (str(tiny_directory), "x")
    [sample] = document["samples"]
    assert sample["text"] == text[: text.index(stop)]
    assert sample["token_ids"] == ids[: len(sample["token_ids"])]
    assert (sample["finish_reason"], sample["stop_string"]) == ("stop", stop)
    assert sample["completion_tokens"] == len(sample["token_ids"])
    assert 0 < document["timing"]["first_token"] <= document["timing"]["total"]
    assert str(document["seed"]) in result.stderr


def test_several_texts_come_one_after_another(run):
    arguments = ("The sea", "--n", "3", "--max-new-tokens", "12", "--seed", "5")
    plain, as_json = run(*arguments), run(*arguments, "--json")
    assert plain.exit_code == 0, plain.output
    texts = [sample["text"] for sample in json.loads(as_json.stdout)["samples"]]
    assert len(texts) == 3
    shown = f"{texts[0]}\n--- 2 ---\n{texts[1]}\n--- 3 ---\n{texts[2]}"
    assert plain.stdout.removesuffix("\n") == shown.removesuffix("\n")


def test_a_minus_reads_standard_input_without_its_last_line_break(run):
    result = run("-", "--engine", "reference", "--max-new-tokens", "1", "--json", given="two\nlines é\n")
    assert json.loads(result.stdout)["prompt"] == "two\nlines é"


def test_input_that_is_no_text_is_refused(run):
    result = run("-", given=b"\xff\xfe")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 text" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("x", "--max-new-tokens", "5000"), "exceed the context of 512"),
        (("x", "--max-new-tokens", "0"), "Invalid value for '--max-new-tokens'"),
        (("x", "--temperature", "-1"), "Invalid value for '--temperature'"),
        (("x", "--top-p", "1.5"), "Invalid value for '--top-p'"),
        (("x", "--model", "/no/such"), "/no/such is not there"),
        ((), "Missing argument 'PROMPT'"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(run, arguments, says):
    usual = () if "--engine" in arguments else ("--engine", "reference")
    result = run(*arguments, *usual)
    assert result.exit_code in {1, 2}
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_one_token_is_not_called_tokens(run):
    result = run("T", "--engine", "reference", "--max-new-tokens", "1")
    assert "1 token in " in result.stderr
    assert ", 1 prompt token, seed" in result.stderr


def test_a_cache_beyond_the_machine_or_too_small_for_a_text_is_refused_in_a_sentence(run):
    for size, says in (("1KB", "a cache of 1000 bytes holds no tokens"), ("900TB", "free on this machine")):
        result = run("x", "--kv-cache-memory", size)
        assert (result.exit_code, result.stdout) == (2, "")
        assert says in " ".join(result.stderr.split())
        assert "Traceback" not in result.output


PROGRAM = "from worker.cli import main; main()"


def in_a_shell(model: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    options = "--device cpu --engine reference --dtype float32 --max-new-tokens 2 --log-level error"
    command = f'"{sys.executable}" -c "{PROGRAM}" generate --model "{model}" {options} {arguments}'
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        ["sh", "-c", command], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("- <&-", "there is no standard input"),
        ("- </proc/self/mem", "cannot read standard input: Input/output error"),
        ("x >&-", "there is no standard output"),
        ("x >/dev/full", "cannot write to standard output: No space left on device"),
        ("x --json >/dev/full", "cannot write to standard output: No space left on device"),
    ],
)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_streams_that_cannot_be_used_are_told_of_in_one_line(tiny_directory, arguments, says):
    result = in_a_shell(tiny_directory, arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert says in line


def test_without_standard_error_the_text_comes_all_the_same(tiny_directory):
    result = in_a_shell(tiny_directory, "--json x 2>&-")
    assert result.returncode == 0
    assert json.loads(result.stdout)["prompt"] == "x"


def test_a_reader_that_goes_away_ends_it_without_a_word(tiny_directory):
    result = in_a_shell(tiny_directory, "x | true")
    assert result.stderr == ""


def test_ctrl_c_keeps_what_was_written_and_exits_as_interrupted(tmp_path, patient_model):
    # A shell gives what it starts with `&` an ignored SIGINT, and pytest would pass it on.
    program = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {PROGRAM}"
    command = [sys.executable, "-c", program, "generate", "--model", str(patient_model),
               "--device", "cpu", "--engine", "reference", "--max-new-tokens", "60000", "--log-level", "error",
               "The sea"]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert process.stdout is not None
        # It streams: this is here long before the end.
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert (tmp_path / "errors").read_text().strip() == ""
