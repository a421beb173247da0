"""One engine, one workload, one process: `python -m benchmarks.engine.measure '{"engine": "paged", ...}'`.

A process of its own, so that its peak memory is its own and its threads disturb no other engine. The last line it
prints is JSON. Times are seconds from the moment at which all requests are there; loading does not count.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.engine.workloads import Item, shared_prefix, stored, uniform
from worker.engine_options import prepare_process

MIB = 1 << 20


@dataclass
class Settings:
    """What to measure.

    Attributes:
        engine: `paged`, `static` (transformers' generate on one padded batch) or `serial` (one request at a time).
        workload: `stored`, `uniform` or `shared`; the fields beneath shape it.
        cache_mib: the default is what the stored workload fills in float32.
    """

    engine: str
    dtype: str = "float32"
    workload: str = "stored"
    requests: int | None = None
    batch: int = 32
    context: int = 256
    new_tokens: int = 16
    max_batch: int = 32
    cache_mib: int = 448
    prefix_caching: bool = True
    step_seconds: float | None = None
    backend: str | None = None


@dataclass
class Measured:
    """What came out.

    Attributes:
        first: per request, seconds to its first token.
        gaps: per request, the longest wait between two tokens.
        decode_step: median seconds of a step in which every request got one token and no prompt was computed.
        weights_mib: what the model's parameters are in this type.
        peak_mib: of the whole process, loading included.
    """

    tokens: int = 0
    seconds: float = 0.0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    decode_step: float = 0.0
    weights_mib: float = 0.0
    cache_mib: float = 0.0
    peak_mib: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    """Measure what the argument says.

    Our engine's threads wait as they do in `horde-worker`; transformers' spin, which is faster on an idle machine.
    """
    settings = Settings(**json.loads(sys.argv[1]))
    if settings.engine == "paged":
        prepare_process()
    measured = _ENGINES[settings.engine](settings, _items(settings))
    measured.peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(asdict(measured)))


def _items(settings: Settings) -> list[Item]:
    if settings.workload == "uniform":
        return uniform(settings.batch, settings.context, settings.new_tokens)
    if settings.workload == "shared":
        return shared_prefix()
    return stored(settings.requests)


def _load(dtype: str) -> Any:
    from worker.models.load import load, resolve

    return load(resolve("SmolLM2-135M-Instruct"), "cpu", dtype)


def _paged(settings: Settings, items: list[Item]) -> Measured:
    from worker.engine.interface import Delta, GenerationRequest, Sampling
    from worker.engine.paged import PagedEngine

    options: dict[str, Any] = {}
    if settings.step_seconds is not None:
        options["step_seconds"] = settings.step_seconds
    if settings.backend is not None:
        options["backend"] = settings.backend
    loaded = _load(settings.dtype)
    weights = _weights_mib(loaded.model)
    engine = PagedEngine(
        loaded,
        max_batch=settings.max_batch,
        cache_memory=settings.cache_mib * MIB,
        prefix_caching=settings.prefix_caching,
        **options,
    )
    greedy = Sampling(temperature=0, ignore_eos=True)
    measured = Measured(weights_mib=weights, cache_mib=settings.cache_mib, outputs=[[] for _ in items])
    engine.add(GenerationRequest("warm-up", tuple(range(1000, 1040)), 4, 0, sampling=greedy))
    while engine.running:
        engine.step()
    arrived: dict[str, list[float]] = {str(number): [] for number in range(len(items))}
    decodes: list[float] = []
    began = now = time.perf_counter()
    for number, item in enumerate(items):
        engine.add(GenerationRequest(str(number), item.prompt, item.new_tokens, 0, sampling=greedy))
    while engine.running:
        before, events, now = now, engine.step(), time.perf_counter()
        texts = [event for event in events if isinstance(event, Delta) and event.token_ids]
        if len(texts) == len(items) and all(arrived.values()):
            decodes.append(now - before)
        for event in texts:
            measured.outputs[int(event.request_id)] += event.token_ids
            arrived[event.request_id].append(now - began)
    measured.seconds = time.perf_counter() - began
    measured.decode_step = statistics.median(decodes) if decodes else 0.0
    measured.tokens = sum(map(len, measured.outputs))
    measured.first = [times[0] for times in arrived.values()]
    measured.gaps = [max(b - a for a, b in itertools.pairwise(t)) for t in arrived.values() if len(t) > 1]
    measured.notes = {
        "statistics": asdict(engine.statistics()),
        "profile": engine.profile.seconds,
        "steps": engine.profile.steps,
        "engine": engine.description,
    }
    return measured


def _static(settings: Settings, items: list[Item]) -> Measured:
    """All requests in one padded batch: it runs until the longest is done, and each gets what it asked for."""
    return _generate(settings, [items])


def _serial(settings: Settings, items: list[Item]) -> Measured:
    return _generate(settings, [[item] for item in items])


def _generate(settings: Settings, batches: list[list[Item]]) -> Measured:
    from transformers import GenerationConfig

    model = _load(settings.dtype).model
    model.generation_config = GenerationConfig(pad_token_id=0)
    measured = Measured(weights_mib=_weights_mib(model))
    _generate_batch(model, [Item(tuple(range(1000, 1040)), 4)])
    began = time.perf_counter()
    for batch in batches:
        measured.outputs += _generate_batch(model, batch)
        measured.first += [time.perf_counter() - began] * len(batch)
    measured.seconds = time.perf_counter() - began
    measured.tokens = sum(map(len, measured.outputs))
    return measured


def _generate_batch(model: Any, batch: list[Item]) -> list[list[int]]:
    import torch

    width, steps = max(len(item.prompt) for item in batch), max(item.new_tokens for item in batch)
    ids = torch.tensor([[0] * (width - len(item.prompt)) + list(item.prompt) for item in batch])
    mask = torch.tensor([[0] * (width - len(item.prompt)) + [1] * len(item.prompt) for item in batch])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False, eos_token_id=None
        )
    return [row[width : width + item.new_tokens].tolist() for row, item in zip(out, batch, strict=True)]


def _weights_mib(model: Any) -> float:
    return sum(p.numel() * p.element_size() for p in model.parameters()) / MIB


_ENGINES = {"paged": _paged, "static": _static, "serial": _serial}

if __name__ == "__main__":
    main()
