"""`python -m benchmarks.engine`: the paged engine beside transformers, everything in one run; 1 if a target was missed."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.engine.measure import Measured, Settings
from benchmarks.report import Report, machine

SINGLE = 4  # requests of the one-at-a-time comparison
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
CONTEXT_BATCH = 8
NEW_TOKENS = 96
# Ours over a static batch of 32 of the same type. The second is what a CPU build of vLLM reached on another machine.
LEAST, AIM = {"float32": 2.5, "bfloat16": 2.5}, {"float32": 3.1, "bfloat16": 3.5}
# llama.cpp's server over a static batch of 32, on that machine.
LLAMA_CPP = {"float32": 1.6, "bfloat16": 1.4}
STEP_SECONDS = 0.25


def measure(settings: Settings) -> Measured:
    """In a process of its own, with large pages where they can be had."""
    environment = {
        **os.environ,
        "TQDM_DISABLE": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.measure", json.dumps(asdict(settings))],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def rate(measured: Measured) -> float:
    """Output tokens per second of the whole run."""
    return measured.tokens / measured.seconds


def workload(report: Report, dtype: str, rounds: int) -> None:
    """The stored 32 requests, ours and the static batch turn by turn."""
    ours, static = [], []
    for _ in range(rounds):
        ours.append(measure(Settings("paged", dtype)))
        static.append(measure(Settings("static", dtype)))
    report.raw[f"workload_{dtype}"] = {"paged": [asdict(m) for m in ours], "static": [asdict(m) for m in static]}
    ratios = [rate(a) / rate(b) for a, b in zip(ours, static, strict=True)]
    middle = sorted(ours, key=rate)[rounds // 2]
    report.tell(f"{dtype}: paged, tokens/s", f"{rate(middle):.1f}")
    report.tell(f"{dtype}: transformers, static batch of 32", f"{statistics.median(map(rate, static)):.1f}")
    report.judge_at_least(f"{dtype}: paged / static", statistics.median(ratios), LEAST[dtype])
    report.judge_at_least(f"{dtype}: the same, to beat llama.cpp's ratio", statistics.median(ratios), LLAMA_CPP[dtype])
    report.judge_at_least(f"{dtype}: the same, to reach vLLM's ratio", statistics.median(ratios), AIM[dtype])
    first = statistics.median(middle.first) / middle.seconds
    report.judge_at_most(f"{dtype}: median first token, share of the run", first, round(1 / 3, 3))
    report.judge_at_most(f"{dtype}: longest gap between tokens of a text", max(middle.gaps), 2 * STEP_SECONDS, " s")
    phases = middle.notes["profile"]
    overhead = sum(seconds for phase, seconds in phases.items() if phase != "model") / middle.seconds
    report.judge_at_most(f"{dtype}: outside the model, share of the run", overhead, 0.05)
    report.judge_at_most(
        f"{dtype}: peak memory - loaded model - cache",
        middle.peak_mib - middle.weights_mib - middle.cache_mib,
        600,
        " MiB",
    )
    exact = sum(a == b for a, b in zip(middle.outputs, static[0].outputs, strict=True))
    if dtype == "float32":
        report.judge_at_least(f"{dtype}: texts equal to transformers', of 32", exact, 32)
    else:
        report.tell(f"{dtype}: texts equal to transformers', of 32", str(exact))


def single(report: Report, dtype: str) -> None:
    """One text at a time."""
    ours = measure(Settings("paged", dtype, requests=SINGLE, max_batch=1))
    theirs = measure(Settings("serial", dtype, requests=SINGLE))
    report.raw[f"single_{dtype}"] = {"paged": asdict(ours), "serial": asdict(theirs)}
    report.tell(f"{dtype}: one at a time, tokens/s, paged and transformers", f"{rate(ours):.1f} and {rate(theirs):.1f}")
    report.judge_at_least(f"{dtype}: one at a time, paged / transformers", rate(ours) / rate(theirs), 2)


def shared_prefix(report: Report, dtype: str) -> None:
    """A system prompt of 300 tokens before each of 32 texts."""
    on = measure(Settings("paged", dtype, workload="shared", cache_mib=1024))
    off = measure(Settings("paged", dtype, workload="shared", cache_mib=1024, prefix_caching=False))
    report.raw[f"shared_{dtype}"] = {"on": asdict(on), "off": asdict(off)}
    report.judge_at_least(f"{dtype}: shared prefix, caching on / off", rate(on) / rate(off), 2)


def growth(report: Report, dtype: str) -> None:
    """Decodes alone: tokens per second by batch and by context."""
    table: dict[str, float] = {}
    shapes = [(batch, 256) for batch in BATCHES] + [(CONTEXT_BATCH, context) for context in CONTEXTS]
    for batch, context in shapes:
        # Prompts first, and as fast as they go: what counts are the steps in which all decode.
        shape = Settings("paged", dtype, workload="uniform", batch=batch, context=context, new_tokens=NEW_TOKENS)
        found = measure(replace(shape, max_batch=batch, cache_mib=2048, step_seconds=60))
        table[f"batch {batch}, context {context}"] = batch / found.decode_step
    report.raw[f"growth_{dtype}"] = table
    for what, tokens in table.items():
        report.tell(f"{dtype}: decode, {what}, tokens/s", f"{tokens:.1f}")


def main() -> int:
    """See the module."""
    parts = ("workload", "single", "shared", "growth")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description="Measure the paged engine.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(parts)}  [default: all]")
    parser.add_argument("--dtype", choices=list(LEAST), help="only this one  [default: both]")
    parser.add_argument("--rounds", type=int, default=3, help="medians of the workload are of so many  [default: 3]")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="where the JSON goes")
    given = parser.parse_args()
    if unknown := sorted(set(given.parts) - set(parts)):
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(parts)}")
    report = Report("engine", raw={"machine": machine()})
    for dtype in [given.dtype] if given.dtype else list(LEAST):
        for part in given.parts or parts:
            if part == "workload":
                workload(report, dtype, given.rounds)
            elif part == "single":
                single(report, dtype)
            elif part == "shared":
                shared_prefix(report, dtype)
            else:
                growth(report, dtype)
    report.print()
    print(f"written to {report.write(given.out)}")
    return int(any(row.met is False for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
