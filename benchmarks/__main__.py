"""`python -m benchmarks [name ...]`: measure, print a table, write JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import cycle, depth, disconnect, relay, slow_bodies, streams_open
from benchmarks.report import Report, machine

BENCHMARKS: dict[str, tuple[str, Callable[[Report, argparse.Namespace], None]]] = {
    "cycle": (
        "a whole job over HTTP, against heartbeats and against plain SQL",
        lambda report, given: cycle.run(report, seconds=given.seconds, rounds=given.rounds),
    ),
    "depth": (
        "a pop with a thousand and with a million requests waiting",
        lambda report, given: depth.run(report, many=given.deep),
    ),
    "slow-bodies": (
        "heartbeats beside 400 clients that send a byte a second",
        lambda report, given: slow_bodies.run(report, seconds=given.seconds, rounds=given.rounds),
    ),
    "relay": (
        "from a worker's post to the client's delta, 32 streams; played, and with a model",
        lambda report, given: relay.run(report, seconds=given.seconds, rounds=given.rounds),
    ),
    "streams-open": (
        "a status read beside 100 streams and 100 long polls",
        lambda report, given: streams_open.run(report, seconds=given.seconds, rounds=given.rounds),
    ),
    "disconnect": (
        "from a client's hang-up to its worker being told",
        lambda report, _: disconnect.run(report),
    ),
}


def main() -> int:
    """Run what the command line names; 1 if a target was missed."""
    names = "\n".join(f"  {name:12} {what}" for name, (what, _) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measure the broker:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="name", help="which  [default: all]")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement  [default: 10]")
    parser.add_argument("--rounds", type=int, default=3, help="medians are of so many  [default: 3]")
    parser.add_argument("--deep", type=int, default=depth.MANY, help="requests in a deep queue  [default: 1,000,000]")
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="where the JSON goes  [default: build/bench]"
    )
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    missed = False
    for name in given.names or BENCHMARKS:
        report = Report(name, raw={"machine": machine()})
        BENCHMARKS[name][1](report, given)
        report.print()
        print(f"written to {report.write(given.out)}\n")
        missed = missed or any(row.met is False for row in report.rows)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
