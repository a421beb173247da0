"""The program for the day a GPU is at hand runs from end to end where there is none."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu
from benchmarks.engine.workloads import Item
from benchmarks.gpu_correctness import gaps_where_different
from tests.worker.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tiny_directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    loaded = make_tiny_model()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def test_all_parts_run_on_a_cpu_and_are_written_down(tiny_directory, tmp_path, capsys):
    arguments = ["--device", "cpu", "--quick", "--model", tiny_directory, "--out", str(tmp_path)]
    assert gpu.main(arguments) == 0, capsys.readouterr().out
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["failed"] == {}
    assert told["architectures_differ"] == []
    assert {row["dtype"] for row in told["kernel"]} == {"bfloat16", "float16", "float32"}
    assert all(row["refused"] for row in told["kernel"])
    assert [(row["engine"], row["tokens"]) for row in told["speed"]] == [("ours", 8), ("transformers", 8)]
    assert {"kernel took", "half took", "speed took"} <= {row["what"] for row in told["rows"]}


def test_a_part_that_fails_is_told_and_the_others_run_on(tiny_directory, tmp_path, monkeypatch, capsys):
    def fail(run: gpu.Run) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(gpu.PARTS, "float32", fail)
    arguments = ["--device", "cpu", "--quick", "--model", tiny_directory, "--parts", "float32,kernel"]
    assert gpu.main([*arguments, "--out", str(tmp_path)]) == 1
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert told["failed"] == {"float32": "RuntimeError: out of memory"}
    assert told["kernel"]
    assert "MISSED" in capsys.readouterr().out


def test_when_the_time_is_over_parts_are_left_out(tmp_path):
    assert gpu.main(["--device", "cpu", "--minutes", "0", "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["what"] for row in rows] == [f"{name}: left out" for name in gpu.PARTS]


def test_a_difference_is_weighed_by_the_reference_at_its_first_token():
    model = make_tiny_model().model
    item = Item((5, 9, 44), 3)
    (theirs,) = gpu.speed._generate(model, [item])
    second = model(torch.tensor([[*item.prompt, theirs[0]]])).logits[0, -1].detach()
    worst = int(second.argmin())
    (gap,) = gaps_where_different(model, [item, item], [theirs, [theirs[0], worst, 7]], [theirs, theirs])
    assert gap == pytest.approx(float(second.max() - second.min()), rel=1e-4)
