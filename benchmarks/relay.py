"""From a worker's post to its client's delta: 32 streams at 20 tokens a second through one broker; and with a real model.

The time of a piece of text begins when its post is handed to the worker's HTTP client and ends when the client has read the
last byte of the event with it. What a token waits in the worker for its post is not in it: that is the flush interval.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chat import PATIENCE, ChatBench, Clients, Reading, check, open_chat
from benchmarks.load import quantiles
from benchmarks.report import Report, median
from tests.support import needs
from tests.support.played_worker import Post

STREAMS, RATE, FLUSH = 32, 20.0, 0.05
MOST_P50, MOST_P99 = 80.0, 250.0
REAL_MODEL = "SmolLM2-135M-Instruct"
LOADING_SECONDS = 180.0
_WARM_UP = 3.0


@dataclass(frozen=True)
class Measured:
    """One measurement; durations in seconds, one entry for each piece of text posted."""

    latencies: list[float]
    post_seconds: list[float]
    tokens: int
    seconds: float
    broker_cpu: float
    postgres_cpu: float

    def as_json(self) -> dict[str, Any]:
        """For the report's file."""
        return {
            "delta": quantiles(self.latencies),
            "post": quantiles(self.post_seconds),
            "tokens_per_s": round(self.tokens / self.seconds, 1),
            "broker_ms_per_token": round(1000 * self.broker_cpu / max(1, self.tokens), 3),
            "postgres_ms_per_token": round(1000 * self.postgres_cpu / max(1, self.tokens), 3),
            "broker_cpu": round(self.broker_cpu / self.seconds, 2),
        }


def run(report: Report, *, seconds: float, rounds: int) -> None:
    """Fill `report`."""
    with open_chat() as bench:
        played = [_played(bench, seconds).as_json() for _ in range(rounds)]
        report.raw |= {"postgres": bench.postgres.version, "played": played, "streams": STREAMS, "rate": RATE}
        _tell(report, "", played)
        report.judge_at_most("played, 50 % of the deltas", _at(played, "p50"), MOST_P50, " ms")
        report.judge_at_most("played, 99 % of the deltas", _at(played, "p99"), MOST_P99, " ms")
        report.tell("played, 50 % of the deltas / flush interval", f"{_at(played, 'p50') / (1000 * FLUSH):.2f}")
        missing = needs.why_missing("model")
        if missing is not None:
            report.tell(f"with {REAL_MODEL}", f"not measured: {missing}")
            return
        real = _real(bench, seconds).as_json()
        report.raw["real"] = real
        _tell(report, f"{REAL_MODEL}, ", [real])
        report.tell(f"{REAL_MODEL}, 50 / 99 % of the deltas", f"{_at([real], 'p50'):.1f} / {_at([real], 'p99'):.1f} ms")


def _at(found: Sequence[dict[str, Any]], share: str) -> float:
    return median([each["delta"][share] for each in found])


def _tell(report: Report, who: str, found: Sequence[dict[str, Any]]) -> None:
    for what, name in {
        "tokens per second of all streams": "tokens_per_s",
        "milliseconds of the broker's CPU per streamed token": "broker_ms_per_token",
        "milliseconds of PostgreSQL's CPU per streamed token": "postgres_ms_per_token",
        "share of a core that the broker used": "broker_cpu",
    }.items():
        report.tell(f"{who}{what}", f"{median([each[name] for each in found]):.3g}")
    half, most = (median([each["post"][share] for each in found]) for share in ("p50", "p99"))
    report.tell(f"{who}50 / 99 % of the posts, until their answer", f"{half:.1f} / {most:.1f} ms")


def _played(bench: ChatBench, seconds: float) -> Measured:
    worker = bench.worker(threads=STREAMS, flush=FLUSH)
    try:
        with Clients() as clients:
            worker.start(jobs=STREAMS, rate=RATE)
            tokens = int(RATE * (_WARM_UP + seconds + PATIENCE))
            return _measure(bench, clients, seconds, lambda: worker.posts, max_tokens=min(tokens, worker.max_length))
    finally:
        worker.close()


def _real(bench: ChatBench, seconds: float) -> Measured:
    with _running_worker(bench) as posts, Clients() as clients:
        return _measure(bench, clients, seconds, posts, model=REAL_MODEL, max_tokens=1024, temperature=1.0)


def _measure(
    bench: ChatBench, clients: Clients, seconds: float, posts: Callable[[], Sequence[Post]], **body: Any
) -> Measured:
    readings = [clients.add(bench.stream(**body)) for _ in range(STREAMS)]
    for reading in readings:
        if not reading.begun.wait(PATIENCE):
            raise RuntimeError(f"a stream has not begun: {reading.error or 'nothing came'}")
    # Not an event but a stretch of time is wanted: the streams run, and what is counted lies between two clock readings.
    time.sleep(_WARM_UP)
    began, before = time.monotonic(), bench.cpu()
    time.sleep(seconds)
    ended, after = time.monotonic(), bench.cpu()
    # Pieces come in order: a client that has one from behind the window has all that were in it.
    while time.monotonic() < ended + PATIENCE and not all(
        each.finished or each.error or each.at[-1] > ended for each in readings
    ):
        # Read elsewhere, and nothing is announced; to look oftener would take the core from what is measured.
        time.sleep(FLUSH)
    check(readings)
    latencies, posted, tokens = _pieces(bench, readings, posts(), began, ended)
    for reading in readings:
        clients.hang_up(reading)
    return Measured(latencies, posted, tokens, ended - began, after[0] - before[0], after[1] - before[1])


def _pieces(
    bench: ChatBench, readings: Sequence[Reading], posts: Sequence[Post], began: float, ended: float
) -> tuple[list[float], list[float], int]:
    """Of the posts between two moments: each piece's time to its client, each post's to its answer, and all tokens."""
    by_job = _readings_by_job(bench, readings)
    shown: dict[str, int] = {}
    latencies: list[float] = []
    answered: list[float] = []
    tokens = 0
    for post in posts:
        counted = began <= post.handed_at < ended
        if counted:
            answered.append(post.answered_at - post.handed_at)
            tokens += post.tokens
        for job, characters in post.shown.items():
            if characters <= shown.get(job, 0) or job not in by_job:
                continue
            shown[job] = characters
            arrived = by_job[job].time_of(characters)
            if counted and arrived is None and not by_job[job].finished:
                raise RuntimeError(f"posted and never seen: {characters} characters of job {job}")
            if counted and arrived is not None:
                latencies.append(arrived - post.handed_at)
    if not latencies:
        raise RuntimeError("nothing was streamed while it was measured")
    return latencies, answered, tokens


def _readings_by_job(bench: ChatBench, readings: Sequence[Reading]) -> Mapping[str, Reading]:
    by_request = {reading.request_id: reading for reading in readings}
    jobs = bench.requests_of_jobs()
    return {job: by_request[request] for job, request in jobs.items() if request in by_request}


@contextlib.contextmanager
def _running_worker(bench: ChatBench) -> Iterator[Callable[[], Sequence[Post]]]:
    """`horde-worker` with the demo model, which notes when it hands a post to its HTTP client; yields what it noted."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "posts.jsonl")
        options = [
            "--broker",
            bench.broker.url,
            "--name",
            "bench real",
            "--model",
            REAL_MODEL,
            "--log-level",
            "warning",
        ]
        command = [sys.executable, "-m", "benchmarks.noting_worker", str(notes), "run", *options]
        process = subprocess.Popen(
            [*command, f"--max-batch={STREAMS}", f"--api-key={bench.owner_key}"], stdout=subprocess.DEVNULL
        )
        try:
            _await_model(bench, process)
            yield lambda: [_read_note(line) for line in notes.read_text().splitlines()]
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _read_note(line: str) -> Post:
    note = json.loads(line)
    return Post(note["handed_at"], note["answered_at"], note["shown"], note["tokens"])


def _await_model(bench: ChatBench, process: subprocess.Popen[bytes]) -> None:
    """Until the worker has announced its model."""
    import requests

    give_up, waiting = time.monotonic() + LOADING_SECONDS, threading.Event()
    while time.monotonic() < give_up:
        answer = requests.get(
            f"{bench.broker.url}/v1/models", headers={"Authorization": f"Bearer {bench.client_key}"}, timeout=60
        )
        if any(model["id"] == REAL_MODEL for model in answer.json()["data"]):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the worker ended with {process.returncode}")
        waiting.wait(0.5)
    raise RuntimeError("the worker does not serve its model")
