"""Tells the broker which jobs are held, in a thread of its own, and hears from it which of them to stop.

A job is named from the moment it was popped until its result has been taken, so that its lease lives as long as the
work does: also while the engine is within a step, and while a finished text waits for a broker that is away. A broker
without this route is noticed by its 404 and left alone from then on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from worker.backoff import Pace
from worker.broker import BrokerClient, BrokerUnavailableError, NoProgressRouteError
from worker.messages import Inbox, JobsStopped

log = logging.getLogger(__name__)

# Here and not begun; in the engine; in it with nothing before it, so its prompt is being read; writing, or written.
Stage = Literal["queued", "started", "prefill", "decode"]
_POSTS_A_LEASE = 4
# As many as a broker takes in one post. Only results that pile up undelivered come near it; then the newest count.
_MOST_JOBS = 200


@dataclass(slots=True)
class _Held:
    stage: Stage = "queued"
    ttl: float | None = None


class ProgressPoster(threading.Thread):
    """Posts at once when jobs have come, and then at a steady pace while any is held.

    Args:
        client: this thread's own.
        worker_name: as popped with.
        inbox: gets `JobsStopped`.
        pace: `progress` and `stalled` are used.
    """

    def __init__(self, client: BrokerClient, worker_name: str, *, inbox: Inbox, pace: Pace) -> None:
        super().__init__(name="progress", daemon=True)
        self._client = client
        self._worker_name = worker_name
        self._inbox = inbox
        self._pace = pace
        self._backoff = pace.backoff()
        self._changed = threading.Condition()
        self._held: dict[str, _Held] = {}
        self._due = 0.0
        self._closed = False
        self._wanted = True
        self._step_begun: float | None = None
        self._stall_told = False

    @property
    def wanted(self) -> bool:
        """Whether to pop with the promise to post."""
        with self._changed:
            return self._wanted

    @contextlib.contextmanager
    def holding(self, job_ids: Iterable[str]) -> Iterator[None]:
        """These have just come: name them at once, since a claim that nobody names does not last.

        The loop is told of them in the body of this, before which no post can name one: else a stop could be here first.
        """
        with self._changed:
            for job_id in job_ids:
                self._held.setdefault(job_id, _Held())
            yield
            self._due = time.monotonic()
            self._changed.notify()

    def set_stage(self, job_id: str, stage: Stage) -> None:
        """How far a job is; told with the next post."""
        with self._changed:
            if job_id in self._held:
                self._held[job_id].stage = stage

    def let_go(self, job_id: str) -> None:
        """The broker knows how this one ended."""
        with self._changed:
            self._held.pop(job_id, None)

    @contextlib.contextmanager
    def watched_step(self) -> Iterator[None]:
        """The engine works meanwhile. When it does not come back from it, no job is named any more."""
        with self._changed:
            self._step_begun = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                self._step_begun, self._stall_told = None, False

    def close(self) -> None:
        """No more posts."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def run(self) -> None:
        """The thread."""
        try:
            while (body := self._next_post()) is not None:
                self._post(body)
        except NoProgressRouteError as error:
            log.info("%s: jobs are worked off without it", error)
        except Exception:
            log.exception("telling the broker about running jobs broke")
        finally:
            with self._changed:
                self._wanted = False
            self._client.close()

    def _next_post(self) -> dict[str, Any] | None:
        """The body of the next post, waiting for its time; None once closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._held and now >= self._due:
                    self._due = now + self._interval()
                    if not self._is_stalled(now):
                        jobs = [{"id": job_id, "state": held.stage} for job_id, held in self._held.items()]
                        return {"worker": self._worker_name, "jobs": jobs[-_MOST_JOBS:]}
                self._changed.wait(max(0.0, self._due - now) if self._held else None)
        return None

    def _interval(self) -> float:
        ttls = [held.ttl for held in self._held.values() if held.ttl is not None]
        return min([self._pace.progress, *(ttl / _POSTS_A_LEASE for ttl in ttls)])

    def _is_stalled(self, now: float) -> bool:
        if self._step_begun is None or now - self._step_begun <= self._pace.stalled:
            return False
        if not self._stall_told:
            self._stall_told = True
            log.error("the engine has not come back for %.0f s; its jobs are left to others", self._pace.stalled)
        return True

    def _post(self, body: dict[str, Any]) -> None:
        try:
            answer = self._client.post_progress(body)
        except BrokerUnavailableError as error:
            delay = self._backoff.next(error.retry_after)
            log.warning("the broker was not told about running jobs (%s); again in %.1f s", error, delay)
            with self._changed:
                self._due = time.monotonic() + delay
            return
        self._backoff.reset()
        reasons = {str(entry["id"]): str(entry.get("reason")) for entry in _entries(answer, "stop")}
        with self._changed:
            for entry in _entries(answer, "jobs"):
                held, ttl = self._held.get(str(entry["id"])), entry.get("ttl")
                if held is not None and isinstance(ttl, int | float) and ttl >= 1:
                    held.ttl = float(ttl)
            for job_id in reasons:
                self._held.pop(job_id, None)
            self._due = min(self._due, time.monotonic() + self._interval())
        if reasons:
            self._inbox.put(JobsStopped(reasons))


def _entries(answer: dict[str, Any], field: str) -> list[dict[str, Any]]:
    entries = answer.get(field)
    return [e for e in entries if isinstance(e, dict) and e.get("id")] if isinstance(entries, list) else []
