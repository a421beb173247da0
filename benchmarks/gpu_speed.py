"""How fast the engine and its peers are on a device: workloads, runs of them, and a common way to ask for one."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.engine.workloads import Item, shared_prefix, stored, uniform
from worker.engine.interface import Delta, GenerationRequest, Sampling
from worker.engine.paged import PagedEngine
from worker.models.load import load, resolve
from worker.models.loaded import LoadedModel

# Requests side by side, in each engine.
_AT_ONCE = {"stored": 32, "many": 128, "long": 64, "shared prefix": 128, "miniature": 2}
# Prompt tokens a step; a GPU does more of them in the time of a few decodes than a CPU.
_TOKEN_BUDGET = 4096


@dataclass
class Measured:
    """One engine on one workload. `first`: median seconds to a request's first token. 0 seconds: it failed."""

    tokens: int = 0
    seconds: float = 0.0
    first: float = 0.0
    outputs: list[list[int]] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return self.tokens / self.seconds


def workload_names(*, quick: bool) -> list[str]:
    """In the order in which they are worth their time."""
    return ["miniature"] if quick else ["stored", "many", "long", "shared prefix"]


def workload(name: str) -> list[Item]:
    """The requests of one."""
    if name == "stored":
        return stored()
    if name == "many":
        return uniform(128, 512, 128)
    if name == "long":
        return uniform(64, 2048, 128)
    if name == "shared prefix":
        return shared_prefix(128, prefix=1024, own=64, new_tokens=64)
    return uniform(2, 12, 4)


def load_model(given: argparse.Namespace, dtype: str) -> LoadedModel:
    """The model under test; what earlier ones held of the device is free again."""
    gc.collect()
    if given.device.startswith("cuda"):
        torch.cuda.empty_cache()
    return load(resolve(given.model), given.device, dtype)


def fitted(items: Sequence[Item], loaded: LoadedModel) -> list[Item]:
    """The same requests in the ids of another vocabulary, where some are beyond it."""
    size = loaded.model.get_input_embeddings().num_embeddings
    return fitted_to(items, size)


def fitted_to(items: Sequence[Item], vocabulary: int) -> list[Item]:
    """See `fitted`."""
    if all(max(item.prompt) < vocabulary for item in items):
        return list(items)
    return [Item(tuple(i % vocabulary for i in item.prompt), item.new_tokens) for item in items]


def measure(engine: str, given: argparse.Namespace, name: str, *, timeout: float) -> Measured:
    """Run a workload through `ours`, `transformers` or `vllm`, in the type that was given."""
    if engine == "vllm":
        return _vllm(given, name, timeout)
    loaded = load_model(given, given.dtype)
    items = fitted(workload(name), loaded)
    if engine == "transformers":
        return static(loaded, items, batch=_AT_ONCE[name])
    return paged(loaded, items, max_batch=_AT_ONCE[name])


def paged(loaded: LoadedModel, items: Sequence[Item], **options: Any) -> Measured:
    """Through our engine, which takes the model over; after a warm-up."""
    on_cpu = loaded.model.device.type == "cpu"
    options.setdefault("token_budget", 512 if on_cpu else _TOKEN_BUDGET)
    engine = PagedEngine(loaded, **options)
    greedy = Sampling(temperature=0, ignore_eos=True)
    engine.add(GenerationRequest("warm-up", tuple(items[0].prompt[::-1]), 4, 0, sampling=greedy))
    while engine.running:
        engine.step()
    outputs: list[list[int]] = [[] for _ in items]
    first: dict[str, float] = {}
    _wait(loaded)
    began = time.perf_counter()
    for number, item in enumerate(items):
        engine.add(GenerationRequest(str(number), item.prompt, item.new_tokens, 0, sampling=greedy))
    while engine.running:
        for event in engine.step():
            if isinstance(event, Delta) and event.token_ids:
                outputs[int(event.request_id)] += event.token_ids
                first.setdefault(event.request_id, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    notes = {"engine": engine.description, "profile": engine.profile.seconds, "steps": engine.profile.steps}
    return Measured(sum(map(len, outputs)), seconds, statistics.median(first.values()), outputs, notes)


def static(loaded: LoadedModel, items: Sequence[Item], *, batch: int) -> Measured:
    """Through transformers: padded batches, each as long as its longest text; a text is seen when its batch is done."""
    from transformers import GenerationConfig

    model = loaded.model
    model.generation_config = GenerationConfig(pad_token_id=0)
    _generate(model, [Item(tuple(items[0].prompt[::-1]), 4)])
    _wait(loaded)
    measured, first = Measured(), []
    began = time.perf_counter()
    for start in range(0, len(items), batch):
        part = items[start : start + batch]
        measured.outputs += _generate(model, part)
        first += [time.perf_counter() - began] * len(part)
    measured.seconds = time.perf_counter() - began
    measured.tokens = sum(map(len, measured.outputs))
    measured.first = statistics.median(first)
    return measured


def _generate(model: Any, batch: Sequence[Item]) -> list[list[int]]:
    width, steps = max(len(item.prompt) for item in batch), max(item.new_tokens for item in batch)
    pads = [width - len(item.prompt) for item in batch]
    ids = torch.tensor([[0] * pad + list(item.prompt) for pad, item in zip(pads, batch, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
    with torch.inference_mode():
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            eos_token_id=None,
        ).tolist()
    return [row[width : width + item.new_tokens] for row, item in zip(out, batch, strict=True)]


def _wait(loaded: LoadedModel) -> None:
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize()


def has_vllm() -> bool:
    """Whether it could be imported; nothing is."""
    return importlib.util.find_spec("vllm") is not None


def _vllm(given: argparse.Namespace, name: str, timeout: float) -> Measured:
    """In a process of its own: it takes nearly all of the device's memory, and starts processes itself."""
    loaded = load_model(given, given.dtype)
    asked = {
        "model": loaded.model.name_or_path,
        "vocabulary": loaded.model.get_input_embeddings().num_embeddings,
        "dtype": given.dtype,
        "workload": name,
        "at_once": _AT_ONCE[name],
    }
    del loaded
    gc.collect()
    torch.cuda.empty_cache()
    command = [sys.executable, "-m", "benchmarks.gpu_vllm", json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=max(1.0, timeout))
    except subprocess.CalledProcessError as error:
        return Measured(notes={"error": f"vLLM failed: {error.stderr.strip()[-300:]}"})
    except subprocess.TimeoutExpired:
        return Measured(notes={"error": "vLLM took too long"})
    return Measured(**json.loads(done.stdout.strip().split("\n")[-1]))
