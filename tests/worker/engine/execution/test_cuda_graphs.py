"""Recorded decode steps, with a recorder that runs the step anew into one and the same output, as a graph would."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.worker.engine.attention.plain_varlen import PlainVarlen
from tests.worker.engine.played_steps import PlayedSteps
from tests.worker.engine.tiny_architectures import ARCHITECTURES, CONTEXT, make_model
from tests.worker.tiny_model import make_tiny_model
from worker.engine.attention import choose
from worker.engine.attention.backend import CacheShape
from worker.engine.attention.gather import GatherBackend
from worker.engine.attention.varlen import VarlenBackend
from worker.engine.execution import cuda_graphs
from worker.engine.execution.assemble import Options, assemble
from worker.engine.execution.cuda_graphs import GraphRunner, Replay, recorded_sizes
from worker.engine.execution.model_runner import ModelRunner
from worker.engine.execution.probe import probe
from worker.engine.scheduling.sequence import Sequence
from worker.engine.scheduling.step_plan import Scheduled, StepPlan

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE = 24, 4
PROMPTS = [[5, 9, 2, 44, 7, 7, 31], [3], [8, 8, 1, 60]]


class Recorder:
    """Stands for CUDA graphs.

    Attributes:
        recorded: batch sizes, in the order of recording.
        replayed: batch sizes, in the order of replaying.
    """

    def __init__(self, device: torch.device = CPU, fails_at: int | None = None) -> None:
        self._fails_at = fails_at
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        output = run()
        size = len(output)
        if size == self._fails_at:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.recorded.append(size)

        def replay() -> Tensor:
            self.replayed.append(size)
            return output.copy_(run())

        return replay


def make_runner(
    model, recorder: Recorder, *, max_batch: int = 8, context_length: int = CONTEXT
) -> tuple[GraphRunner, VarlenBackend]:
    layers = probe(model).layers
    backend = VarlenBackend(CacheShape(layers, BLOCKS, BLOCK_SIZE, model.dtype, CPU), PlainVarlen(), set(layers))
    runner = GraphRunner(model, backend, max_batch=max_batch, context_length=context_length, record=recorder)
    return runner, backend


@pytest.fixture
def model():
    return make_model(*ARCHITECTURES["llama"])


def decode(table: list[int], length: int) -> Scheduled:
    """The newest token of a text."""
    return Scheduled(Sequence("a", 0, list(range(1, length + 1)), length, length, block_table=table), length - 1, 1)


def test_small_batches_are_recorded_each_and_large_ones_in_eights():
    assert recorded_sizes(1) == [1]
    assert recorded_sizes(8) == [1, 2, 4, 8]
    assert recorded_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert recorded_sizes(50) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 50]


@pytest.mark.parametrize(
    ("architecture", "count"), [("llama", 1), ("llama", 3), ("qwen2-sliding", 3), ("gpt2", 2), ("gemma3_text", 2)]
)
def test_replayed_steps_give_what_steps_give_without(architecture, count):
    model = make_model(*ARCHITECTURES[architecture])
    recorder = Recorder()
    runner, _ = make_runner(model, recorder, max_batch=4)
    runner.record()
    assert recorder.recorded == [4, 2, 1]
    assert runner.recorded == (1, 2, 4)
    settings = {"block_size": BLOCK_SIZE, "chunk": 3}
    replayed = PlayedSteps(runner, PROMPTS[:count], 5, **settings)
    plain = GatherBackend(CacheShape(probe(model).layers, BLOCKS, BLOCK_SIZE, torch.float32, CPU))
    expected = PlayedSteps(ModelRunner(model, plain), PROMPTS[:count], 5, **settings)
    assert replayed.output == expected.output
    for ours, theirs in zip(replayed.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    # Prompts of unlike length end apart: batches of all sizes were among them.
    assert set(recorder.replayed) == {1: {1}, 2: {1, 2}, 3: {1, 2, 4}}[count]


def test_a_batch_is_padded_to_the_next_recorded_size(model):
    recorder = Recorder()
    runner, _ = make_runner(model, recorder, max_batch=20)
    runner.record()
    for count in (1, 2, 3, 5, 17):
        assert runner.step(StepPlan([decode([block], 2) for block in range(count)])).shape[0] == count
    assert recorder.replayed == [1, 2, 4, 8, 20]


def test_steps_of_other_kinds_run_as_without(model):
    recorder = Recorder()
    runner, _ = make_runner(model, recorder, max_batch=2, context_length=8)
    runner.record()
    prompt = Sequence("p", 0, [4, 5, 6], 3, 3, block_table=[7])
    others = {
        "a prompt beside a decode": StepPlan([decode([0], 2), Scheduled(prompt, 0, 3)]),
        "a chunk of one token": StepPlan([decode([0], 2), Scheduled(prompt, 0, 1)]),
        "more texts than recorded": StepPlan([decode([block], 2) for block in range(3)]),
        "a text longer than promised": StepPlan([decode([0, 1, 2], 9)]),
    }
    for name, plan in others.items():
        logits = runner.step(plan)
        assert len(logits) == sum(entry.samples for entry in plan.entries), name
        assert recorder.replayed == [], name
    runner.step(StepPlan([decode([0, 1], 8)]))
    assert recorder.replayed == [1]


def test_nothing_is_written_but_the_places_of_the_batch_and_of_padding(model):
    recorder = Recorder()
    runner, backend = make_runner(model, recorder)
    runner.record()
    for layer in range(len(backend.shape.layers)):
        for block in range(backend.shape.blocks):
            for pool in backend.read(layer, block):
                pool.fill_(0.5)
    # Three texts beside one row of padding, then one in a table that was wider before.
    runner.step(StepPlan([decode([3, 9, 2], 10), decode([5], 1), decode([0, 1], 8)]))
    runner.step(StepPlan([decode([4], 2)]))
    assert recorder.replayed == [4, 1]
    changed = {
        (block, place)
        for layer in range(len(backend.shape.layers))
        for block in range(backend.shape.blocks)
        for pool in backend.read(layer, block)
        for place in (pool != 0.5).any(dim=(1, 2)).nonzero().flatten().tolist()
    }
    assert backend.scratch_block == BLOCKS
    assert changed == {(2, 1), (5, 0), (1, 3), (4, 1), (backend.scratch_block, 0)}


def test_the_logits_of_a_step_outlive_the_next_one(model):
    runner, _ = make_runner(model, Recorder())
    runner.record()
    first = runner.step(StepPlan([decode([0], 1)]))
    kept = first.clone()
    assert not torch.equal(runner.step(StepPlan([decode([1], 3)])), kept)
    assert torch.equal(first, kept)


def test_recording_touches_no_block_that_a_text_could_have(model):
    runner, backend = make_runner(model, Recorder())
    before = [pool.clone() for block in range(BLOCKS) for pool in backend.read(0, block)]
    runner.record()
    after = [pool for block in range(BLOCKS) for pool in backend.read(0, block)]
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, after, strict=True))


def test_where_recording_fails_larger_sizes_serve_and_the_log_says_so(model, caplog):
    caplog.set_level(logging.INFO, "worker.engine.execution.cuda_graphs")
    recorder = Recorder(fails_at=2)
    runner, _ = make_runner(model, recorder)
    runner.record()
    assert runner.recorded == (4, 8)
    runner.step(StepPlan([decode([0], 2)]))
    assert recorder.replayed == [4]
    assert caplog.messages == [
        "decode steps of 2 texts are not recorded: operation not permitted",
        "decode steps are recorded for batches of 4, 8",
    ]


def test_a_model_whose_attention_has_to_be_gathered_is_not_recorded_and_runs(caplog):
    model = make_model(*ARCHITECTURES["gemma2"])
    runner, _ = make_runner(model, Recorder())
    runner.record()
    assert runner.recorded == ()
    assert "decode steps of 8 texts are not recorded: layer 0 bounds its scores" in caplog.text
    settings = {"block_size": BLOCK_SIZE, "chunk": 3}
    plain = GatherBackend(CacheShape(probe(model).layers, BLOCKS, BLOCK_SIZE, torch.float32, CPU))
    ours = PlayedSteps(runner, PROMPTS[:3], 4, **settings)
    assert ours.output == PlayedSteps(ModelRunner(model, plain), PROMPTS[:3], 4, **settings).output


@pytest.mark.parametrize("cuda_graphs_wanted", [True, False])
def test_an_engine_on_the_varlen_backend_gets_recorded_steps_if_they_are_wanted(monkeypatch, cuda_graphs_wanted):
    monkeypatch.setattr(choose, "_varlen_attention", lambda shape: PlainVarlen(page_multiple=32))
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", Recorder)
    options = Options(4, 4 << 20, backend="varlen", cuda_graphs=cuda_graphs_wanted)
    assembled = assemble(make_tiny_model(), options)
    assert assembled.shape.block_size == 32
    if cuda_graphs_wanted:
        assert isinstance(assembled.runner, GraphRunner)
        assert assembled.runner.recorded == (1, 2, 4)
    else:
        assert type(assembled.runner) is ModelRunner
    entries = [decode([0], 1), decode([assembled.shape.blocks - 1], 1)]
    assert assembled.runner.step(StepPlan(entries)).isfinite().all()


@pytest.mark.needs("cuda")
def test_on_a_gpu_recorded_steps_choose_the_tokens_that_plain_ones_choose():
    device = torch.device("cuda")
    outputs = []
    for wanted in (True, False):
        loaded = make_tiny_model()
        loaded.model.to(device, torch.bfloat16)
        assembled = assemble(loaded, Options(4, 64 << 20, backend="varlen", cuda_graphs=wanted))
        assert isinstance(assembled.runner, GraphRunner) == wanted
        size = assembled.shape.block_size
        outputs.append(PlayedSteps(assembled.runner, PROMPTS[:3], 20, block_size=size, chunk=3).output)
    assert outputs[0] == outputs[1]
