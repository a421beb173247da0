"""A whole job over HTTP (order, pop, submit, status) against the server's heartbeat and against plain SQL.

Each round measures heartbeat, cycle and floor one after the other within a minute; the ratios are made within a round.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.floor import Floor
from benchmarks.report import Report, median
from benchmarks.server import make_users, open_broker, open_postgres

CONNECTIONS = 16
OF_HEARTBEAT, OF_FLOOR = 0.25, 0.1


def run(report: Report, *, seconds: float, rounds: int) -> None:
    """Fill `report`."""
    with open_postgres() as postgres:
        url = postgres.create_database()
        client, owner = make_users(url)
        floor = Floor(postgres)
        found: list[dict[str, Any]] = []
        with open_broker(url) as broker:
            for _ in range(rounds):
                # Joined by `=`: a key may begin with a dash.
                keys = ["--url", broker, f"--key={client.api_key}", f"--worker-key={owner.api_key}"]
                beats = load(*keys, "--mode", "get", seconds=seconds)
                cycle = load(*keys, "--mode", "cycle", seconds=seconds)
                plain, indexed = floor.measure(seconds), floor.measure(seconds, indexed=True)
                found.append({"heartbeat": beats, "cycle": cycle, "floor": plain, "floor_indexed": indexed})
        report.raw |= {"postgres": postgres.version, "floor": floor.how, "rounds": found}
    _tell(report, found)


def load(*arguments: str, seconds: float, connections: int = CONNECTIONS, warm_up: float = 2) -> dict[str, Any]:
    """Run `benchmarks.load` in a process of its own.

    Raises:
        RuntimeError: an answer was not what it should have been.
    """
    command = [sys.executable, "-m", "benchmarks.load", *arguments, "-c", str(connections), "-d", str(seconds)]
    command += ["--warm-up", str(warm_up)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    if measured["bad"]:
        raise RuntimeError(f"unexpected answers under load: {measured['bad']}")
    return measured


def _tell(report: Report, rounds: list[dict[str, Any]]) -> None:
    beats = median([each["heartbeat"]["requests_per_s"] for each in rounds])
    requests = median([each["cycle"]["requests_per_s"] for each in rounds])
    jobs = median([each["cycle"]["jobs_per_s"] for each in rounds])
    plain = median([each["floor"] for each in rounds])
    report.tell("heartbeats per second", f"{beats:.0f}")
    report.tell("requests per second in the cycle", f"{requests:.0f}")
    report.tell("jobs per second in the cycle", f"{jobs:.0f}")
    indexed = median([each["floor_indexed"] for each in rounds])
    report.tell(f"cycles per second in plain SQL ({report.raw['floor']})", f"{plain:.0f}")
    report.tell("the same with a partial index on what is queued", f"{indexed:.0f}")
    for route in ("async", "pop", "submit", "status"):
        found = [each["cycle"]["routes"][route] for each in rounds]
        report.tell(
            f"milliseconds of {route}, half and 99 % of the answers",
            f"{median([each['p50'] for each in found]):.1f} / {median([each['p99'] for each in found]):.1f}",
        )
    of_heartbeat = [each["cycle"]["requests_per_s"] / each["heartbeat"]["requests_per_s"] for each in rounds]
    of_floor = [each["cycle"]["jobs_per_s"] / each["floor"] for each in rounds]
    report.judge_at_least("requests in the cycle per heartbeat", median(of_heartbeat), OF_HEARTBEAT)
    report.judge_at_least("jobs per cycle in plain SQL", median(of_floor), OF_FLOOR)
    of_indexed = [each["cycle"]["jobs_per_s"] / each["floor_indexed"] for each in rounds]
    report.tell("jobs per cycle in plain SQL with the index", f"{median(of_indexed):.3f}")
