"""From a client's hang-up to its worker hearing that nobody wants the job any more: 16 streams open, 200 hang up one by one."""

from __future__ import annotations

import random
import time

from benchmarks.chat import PATIENCE, ChatBench, Clients, Reading, open_chat
from benchmarks.load import quantiles
from benchmarks.report import Report
from tests.support.played_worker import PlayedWorker

STREAMS, HANG_UPS, RATE, FLUSH = 16, 200, 20.0, 0.05
MOST_P99 = 2 * FLUSH
_MAX_TOKENS = 2000


def run(report: Report, *, hang_ups: int = HANG_UPS) -> None:
    """Fill `report`."""
    with open_chat() as bench:
        worker = bench.worker(threads=STREAMS, flush=FLUSH)
        try:
            with Clients() as clients:
                worker.start(jobs=STREAMS, rate=RATE)
                told = _hang_ups(bench, clients, worker, hang_ups)
        finally:
            worker.close()
    took, posts = quantiles(told), quantiles([post.answered_at - post.handed_at for post in worker.posts])
    report.raw |= {"postgres": bench.postgres.version, "streams": STREAMS, "told": took, "posts": posts, "each": told}
    report.tell("hang-ups", str(took["n"]))
    report.tell("50 % of the workers told", f"{took['p50']:.1f} ms")
    report.judge_at_most("99 % of the workers told", took["p99"], 1000 * MOST_P99, " ms")
    report.tell("50 % of the workers told / flush interval", f"{took['p50'] / (1000 * FLUSH):.2f}")
    report.tell("50 / 99 % of all posts, until their answer", f"{posts['p50']:.1f} / {posts['p99']:.1f} ms")


def _hang_ups(bench: ChatBench, clients: Clients, worker: PlayedWorker, count: int) -> list[float]:
    """Seconds from each hang-up to the answer that tells of it; as many streams are open all the time."""
    chance = random.Random(7)
    streams = [_begun(bench, clients) for _ in range(STREAMS)]
    gone: list[Reading] = []
    for _ in range(count):
        leaving = streams.pop(chance.randrange(len(streams)))
        # The one before it began with a post; without this all would hang up just behind one.
        time.sleep(chance.uniform(0, FLUSH))
        clients.hang_up(leaving)
        gone.append(leaving)
        streams.append(_begun(bench, clients))
    worker.wait_until(lambda: len(worker.stops) >= count, within=PATIENCE)
    requests = bench.requests_of_jobs()
    stopped = {requests[stop.job_id]: stop for stop in worker.stops}
    wrong = [stop for stop in stopped.values() if stop.reason != "cancelled"]
    if wrong:
        raise RuntimeError(f"told to stop for another reason: {wrong[0]}")
    return [stopped[leaving.request_id].at - (leaving.stream.hung_up_at or 0.0) for leaving in gone]


def _begun(bench: ChatBench, clients: Clients) -> Reading:
    reading = clients.add(bench.stream(max_tokens=_MAX_TOKENS))
    if not reading.begun.wait(PATIENCE):
        raise RuntimeError(f"a stream has not begun: {reading.error or 'nothing came'}")
    return reading
