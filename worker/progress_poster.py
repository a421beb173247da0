"""Tells the broker which jobs are held and what they have produced, in a thread of its own, and hears from it which of
them to stop.

A job is named from the moment it was popped until its result has been taken, so that its lease lives as long as the
work does: also while the engine is within a step, and while a finished text waits for a broker that is away. Of a job
that somebody waits for, each post carries what the broker does not hold yet; a post that fails is made again from what
it holds then. A broker without this route is noticed by its 404 and left alone from then on.

No lock is held while a post is built or on its way: the engine's thread never waits for more than a look at a dict.
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
from worker.job_output import JobOutput, Room
from worker.messages import Inbox, JobsStopped

log = logging.getLogger(__name__)

# Here and not begun; in the engine; in it with nothing before it, so its prompt is being read; writing, or written.
Stage = Literal["queued", "started", "prefill", "decode"]
_POSTS_A_LEASE = 4
# As many as a broker takes in one post. Only results that pile up undelivered come near it; then the newest count.
_MOST_JOBS = 200
# What a broker reads as one body, in bytes and in arrays and objects, less what a post has around its jobs.
_MOST_BYTES, _MOST_CONTAINERS = (1 << 20) - 4096, 10_000 - 16
# Of an entry without its tokens: an id may be any text, but a broker's own are short.
_BYTES_A_JOB, _CONTAINERS_A_JOB = 256, 3


@dataclass(slots=True)
class _Held:
    """One job; `attached` while somebody waits for it, `output` while it is to be told.

    A broker that took nothing of what it was last sent, as one does with a long text from time to time, is told no more of it
    before `again`; the pause doubles with each time.
    """

    attached: bool = False
    stage: Stage = "queued"
    ttl: float | None = None
    output: JobOutput | None = None
    again: float = 0.0
    pause: float = 0.0

    def told(self, now: float, *, advanced: bool, shortest: float, longest: float) -> None:
        """The broker has answered, and holds more than before or not."""
        self.pause = 0.0 if advanced else min(max(2 * self.pause, shortest), longest)
        self.again = now + self.pause


class ProgressPoster(threading.Thread):
    """Posts at once when jobs have come, often while somebody waits for one of them, who may hang up at any moment, else
    steadily.

    Args:
        client: this thread's own.
        worker_name: as popped with.
        inbox: gets `JobsStopped`.
        pace: `stream`, `progress` and `stalled` are used.
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
        # When the next post is due in any case, when the last one was, and before when there is to be none.
        self._due = self._posted = self._not_before = 0.0
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
    def holding(self, jobs: Iterable[tuple[str, bool]]) -> Iterator[None]:
        """These have just come (ids, and whether somebody waits for it): name them at once, since a claim that nobody names
        does not last.

        The loop is told of them in the body of this, before which no post can name one: else a stop could be here first.
        """
        with self._changed:
            for job_id, attached in jobs:
                self._held.setdefault(job_id, _Held(attached))
            yield
            self._due = time.monotonic()
            self._changed.notify()

    def set_stage(self, job_id: str, stage: Stage) -> None:
        """How far a job is; told with the next post."""
        with self._changed:
            if job_id in self._held:
                self._held[job_id].stage = stage

    def follow(self, job_id: str, output: JobOutput | None) -> None:
        """Tell what is in this as it grows; None: no more, the result says it all."""
        with self._changed:
            if job_id in self._held:
                held = self._held[job_id]
                held.output, held.attached = output, held.attached and output is not None

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

    def leave(self, within: float) -> None:
        """Post nothing more but that this worker leaves, so that nobody counts on it; best effort, for `within` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self.join(within)

    def run(self) -> None:
        """The thread."""
        try:
            while (held := self._next_post()) is not None:
                self._post(held)
            self._client.post_progress(
                {"worker": self._worker_name, "jobs": [], "leaving": True}, patience=self._pace.goodbye
            )
        except BrokerUnavailableError as error:
            log.info("the broker was not told that this worker leaves: %s", error)
        except NoProgressRouteError as error:
            log.info("%s: jobs are worked off without it", error)
        except Exception:
            log.exception("telling the broker about running jobs broke")
        finally:
            with self._changed:
                self._wanted = False
            self._client.close()

    def _next_post(self) -> list[tuple[str, _Held]] | None:
        """The jobs to post about, waiting for the time to do so; None once closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                due = self._next_due()
                if due is not None and now >= due:
                    self._posted, self._due = now, now + self._interval()
                    if not self._is_stalled(now):
                        return list(self._held.items())[-_MOST_JOBS:]
                    continue
                self._changed.wait(due if due is None else due - now)
        return None

    def _next_due(self) -> float | None:
        """When to post; None while there is nothing to post about."""
        if not self._held:
            return None
        attached = any(held.attached for held in self._held.values())
        due = min(self._due, self._posted + self._pace.stream) if attached else self._due
        return max(due, self._not_before)

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

    def _post(self, held: list[tuple[str, _Held]]) -> None:
        body, told = self._body(held)
        try:
            answer = self._client.post_progress(body)
        except BrokerUnavailableError as error:
            delay = self._backoff.next(error.retry_after)
            log.warning("the broker was not told about running jobs (%s); again in %.1f s", error, delay)
            with self._changed:
                self._due = self._not_before = time.monotonic() + delay
            return
        self._backoff.reset()
        reasons = {str(entry["id"]): str(entry.get("reason")) for entry in _entries(answer, "stop")}
        taken = {str(entry["id"]): entry for entry in _entries(answer, "jobs")}
        for job_id, output in told.items():
            accepted = taken.get(job_id, {}).get("accepted")
            advanced = isinstance(accepted, int) and output.accept(accepted)
            with self._changed:
                if job_id in self._held:
                    self._held[job_id].told(
                        time.monotonic(), advanced=advanced, shortest=self._pace.stream, longest=self._pace.progress
                    )
        with self._changed:
            for job_id, entry in taken.items():
                here, ttl = self._held.get(job_id), entry.get("ttl")
                if here is not None and isinstance(ttl, int | float) and ttl >= 1:
                    here.ttl = float(ttl)
            for job_id in reasons:
                self._held.pop(job_id, None)
            self._due = min(self._due, time.monotonic() + self._interval())
        if reasons:
            self._inbox.put(JobsStopped(reasons))

    def _body(self, held: list[tuple[str, _Held]]) -> tuple[dict[str, Any], dict[str, JobOutput]]:
        """A post about these jobs, and the outputs that it has something of."""
        room = Room(_MOST_BYTES - _BYTES_A_JOB * len(held), _MOST_CONTAINERS - _CONTAINERS_A_JOB * len(held))
        now = time.monotonic()
        entries: list[dict[str, Any]] = []
        told: dict[str, JobOutput] = {}
        for job_id, job in held:
            entry: dict[str, Any] = {"id": job_id, "state": job.stage}
            # Read once: the loop may take it away meanwhile.
            output = job.output
            if output is not None and now >= job.again and (chunk := output.next_chunk(room)) is not None:
                entry |= chunk.body()
                told[job_id] = output
            entries.append(entry)
        return {"worker": self._worker_name, "jobs": entries}, told


def _entries(answer: dict[str, Any], field: str) -> list[dict[str, Any]]:
    entries = answer.get(field)
    return [e for e in entries if isinstance(e, dict) and e.get("id")] if isinstance(entries, list) else []
