"""`python -m benchmarks.gpu`: is the engine right on this GPU, and how fast beside others. In under ten minutes.

First what must be right: the attention kernel's shapes, small models of many architectures, a real model in float32 and
in half precision, recorded decode steps against plain ones. Then speed, against vLLM if it can be imported, else
against transformers on one padded batch. `--device cpu --quick` runs all of it in miniature, to test this program.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_correctness as right
from benchmarks import gpu_speed as speed
from benchmarks.engine.workloads import Item, stored
from benchmarks.report import Report, machine
from worker.models.demo import DEMO_MODEL

# In half precision a token may be another one where the reference holds the two for about equally likely.
MARGIN = 0.5
# Of logits through the kernel and logits through gathered blocks, relative to their size.
HALF_DIFFERENCE = 0.1


@dataclasses.dataclass
class Run:
    """What the parts share."""

    given: argparse.Namespace
    report: Report
    began: float

    @property
    def on_gpu(self) -> bool:
        """Where the kernel and recorded steps can be had."""
        return bool(self.given.device.startswith("cuda"))

    @property
    def seconds_left(self) -> float:
        """Until the time that was given is over."""
        return self.given.minutes * 60 - (time.monotonic() - self.began)

    def items(self, count: int) -> list[Item]:
        """The first requests of the stored workload; in miniature where a quick run is wanted."""
        if self.given.quick:
            return [Item(item.prompt[:24], 4) for item in stored(2)]
        return stored(count)


def kernel(run: Run) -> None:
    """Which shapes, types and block sizes the varlen function takes on this device."""
    found = run.report.raw["kernel"] = right.kernel_table(run.given.device, quick=run.given.quick)
    for dtype, size in sorted({(row["dtype"], row["block_size"]) for row in found}):
        rows = [row for row in found if (row["dtype"], row["block_size"]) == (dtype, size)]
        taken = [row["heads"] for row in rows if row["refused"] is None]
        run.report.tell(f"varlen attention, {dtype}, blocks of {size}", f"{len(taken)} of {len(rows)} shapes")


def architectures(run: Run) -> None:
    """Small models: tokens of float32, and in half precision the kernel against gathered blocks."""
    names = right.ARCHITECTURE_NAMES[:2] if run.given.quick else right.ARCHITECTURE_NAMES
    differ = run.report.raw["architectures_differ"] = [
        n for n in names if not right.equals_generate(n, run.given.device)
    ]
    run.report.judge_at_most(f"architectures of {len(names)} whose float32 tokens differ", len(differ), 0)
    if run.on_gpu:
        found = {name: right.kernel_difference(name, run.given.device) for name in names}
        run.report.raw["kernel_difference"] = found
        worst = max((value for value in found.values() if value is not None), default=0.0)
        run.report.judge_at_most("difference of logits between kernel and gathered, bfloat16", worst, HALF_DIFFERENCE)


def single_precision(run: Run) -> None:
    """The model's float32 tokens are those of transformers."""
    items = run.items(32)
    loaded = speed.load_model(run.given, "float32")
    items = speed.fitted(items, loaded)
    theirs = speed.static(loaded, items, batch=len(items)).outputs
    ours = speed.paged(loaded, items, max_batch=len(items), backend="auto").outputs
    run.report.judge_at_most(f"texts of {len(items)} that differ in float32", right.count_different(ours, theirs), 0)


def half_precision(run: Run) -> None:
    """Where a token differs from transformers', or with and without recorded steps, it was a close call."""
    items = run.items(32)
    loaded = speed.load_model(run.given, run.given.dtype)
    items = speed.fitted(items, loaded)
    theirs = speed.static(loaded, items, batch=len(items)).outputs
    outputs = {"transformers": theirs}
    for graphs in (True, False) if run.on_gpu else (False,):
        loaded = speed.load_model(run.given, run.given.dtype)
        measured = speed.paged(loaded, items, max_batch=len(items), cuda_graphs=graphs)
        outputs[f"recorded: {graphs}"] = measured.outputs
        run.report.raw[f"engine, recorded: {graphs}"] = measured.notes["engine"]
    loaded = speed.load_model(run.given, run.given.dtype)
    for name, ours in list(outputs.items())[1:]:
        gaps = right.gaps_where_different(loaded.model, items, ours, theirs)
        run.report.raw[f"gaps, {name}"] = gaps
        run.report.tell(f"texts of {len(items)} that differ in {run.given.dtype}, {name}", str(len(gaps)))
        run.report.judge_at_most(f"widest gap at a first difference, {name}", max(gaps, default=0.0), MARGIN)
    if run.on_gpu:
        with_and_without = right.count_different(outputs["recorded: True"], outputs["recorded: False"])
        run.report.tell(f"texts of {len(items)} that differ with recorded steps", str(with_and_without))


def throughput(run: Run) -> None:
    """Tokens per second, each workload through each engine; those that time allows."""
    found: list[dict[str, Any]] = run.report.raw.setdefault("speed", [])
    peer = "vllm" if speed.has_vllm() and run.on_gpu else "transformers"
    for name in speed.workload_names(quick=run.given.quick):
        if run.seconds_left < 60 and not run.given.quick:
            run.report.tell(f"{name}: left out", "no time left")
            continue
        measured = {
            engine: speed.measure(engine, run.given, name, timeout=run.seconds_left) for engine in ("ours", peer)
        }
        for engine, result in measured.items():
            found.append({"workload": name, "engine": engine, **dataclasses.asdict(result), "outputs": None})
            what = f"{name}, {engine} ({run.given.dtype})"
            if result.seconds:
                run.report.tell(what, f"{result.rate:.0f} tokens/s, first after {result.first:.2f} s")
            else:
                run.report.tell(what, str(result.notes.get("error", "nothing measured")))
        if all(result.seconds for result in measured.values()):
            run.report.tell(f"{name}, ours to {peer}", f"{measured['ours'].rate / measured[peer].rate:.2f}")


PARTS: dict[str, Callable[[Run], None]] = {
    "kernel": kernel,
    "architectures": architectures,
    "float32": single_precision,
    "half": half_precision,
    "speed": throughput,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if one of them found something wrong or failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, mps or cpu  [default: cuda]")
    parser.add_argument("--model", default=DEMO_MODEL, help=f"as for horde-worker  [default: {DEMO_MODEL}]")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"], help="for all but float32")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which  [default: {','.join(PARTS)}]")
    parser.add_argument("--minutes", type=float, default=9, help="no measurement begins after that  [default: 9]")
    parser.add_argument("--quick", action="store_true", help="in miniature; the numbers mean nothing")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for gpu.json")
    given = parser.parse_args(arguments)
    parts = given.parts.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    report = Report("gpu", raw={"machine": {**machine(), **_device(given.device)}, "failed": {}})
    run = Run(given, report, time.monotonic())
    for name in parts:
        if run.seconds_left <= 0:
            report.tell(f"{name}: left out", "no time left")
            continue
        started = time.monotonic()
        try:
            PARTS[name](run)
        except Exception as error:  # noqa: BLE001  the other parts tell something all the same
            report.raw["failed"][name] = f"{type(error).__name__}: {error}"
            report.judge_at_most(f"{name}: {type(error).__name__}: {str(error)[:200]}", 1, 0, " failed")
        report.tell(f"{name} took", f"{time.monotonic() - started:.1f} s")
        # What has been found is kept, whatever happens to the rest.
        report.write(given.out)
    report.print()
    print(f"written to {report.write(given.out)}")
    return int(any(row.met is False for row in report.rows))


def _device(name: str) -> dict[str, Any]:
    known: dict[str, Any] = {"device": name, "torch": torch.__version__}
    if name.startswith("cuda"):
        properties = torch.cuda.get_device_properties(name)
        known |= {"gpu": properties.name, "gpu_memory_gib": round(properties.total_memory / 2**30, 1)}
        known |= {"capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda}
    return known


if __name__ == "__main__":
    sys.exit(main())
