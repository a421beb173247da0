"""A worker over real HTTP that says what a test wants, token by token, or by itself at a steady pace.

By hand: each call returns when the broker has answered. By itself (`start`): one thread pops, one posts the output of all
jobs in one request every `flush` seconds and submits what is finished, as `horde-worker` does.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from tests.support import tiny_tokenizer
from tests.support.played_output import PlayedJob

PATIENCE = 20.0
# Without news a lease is renewed so often.
SIGN_OF_LIFE = 2.0
_POP_SECONDS = 5.0


class VanishedError(Exception):
    """A call by a worker that is gone."""


@dataclass(frozen=True)
class Reply:
    """A broker's answer."""

    status: int
    body: dict[str, Any]


class RefusedError(AssertionError):
    """A broker's answer that a worker does not expect."""

    def __init__(self, call: str, reply: Reply) -> None:
        super().__init__(f"{call} was answered {reply}")
        self.status = reply.status


@dataclass(frozen=True)
class Post:
    """One post of progress with output in it.

    Attributes:
        handed_at: `time.monotonic()` when it was handed to the HTTP client; `answered_at`: when its answer was read.
        shown: job -> characters of its slot that are shown with this.
        tokens: how many are in it, of all jobs.
    """

    handed_at: float
    answered_at: float
    shown: dict[str, int]
    tokens: int


@dataclass(frozen=True)
class Stop:
    """The broker wants no more of a job; `at` is `time.monotonic()` when the answer that says so was read."""

    job_id: str
    reason: str
    at: float


class _Line:
    """One keep-alive connection, made when first needed, that may be cut while a call waits on it."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self._headers = {"Content-Type": "application/json", **headers}
        self._turn = threading.Lock()
        self._cut = False

    def call(self, route: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Reply:
        with self._turn:
            try:
                if self._connection.sock is None:
                    self._connection.connect()
                if self._cut:
                    raise VanishedError
                content = json.dumps(body, separators=(",", ":")).encode()
                self._connection.request("POST", f"/api/v2/{route}", content, self._headers | (headers or {}))
                answer = self._connection.getresponse()
                return Reply(answer.status, json.loads(answer.read()))
            except (OSError, http.client.HTTPException) as error:
                self._connection.close()
                if self._cut:
                    raise VanishedError from error
                raise

    def cut(self) -> None:
        """End a call under way, and refuse further ones."""
        self._cut = True
        if (used := self._connection.sock) is not None:
            with contextlib.suppress(OSError):
                used.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        self.cut()
        with self._turn:
            self._connection.close()


@dataclass
class PlayedWorker:
    """A worker of one owner.

    Attributes:
        url: the broker's.
        key: its owner's.
        held: job id -> what it works on.
        posts: those with output, and `stops`, in the order they came.
        refused: submits that the broker did not take, and `failures`: calls that came to nothing, both only when it works by itself.
    """

    url: str
    key: str
    name: str = "played worker"
    model: str = tiny_tokenizer.MODEL
    manifest: dict[str, Any] = field(default_factory=tiny_tokenizer.manifest)
    kinds: tuple[str, ...] = ("chat",)
    threads: int = 32
    max_length: int = 2048
    max_context_length: int = tiny_tokenizer.CONTEXT_LENGTH
    flush: float = 0.05
    held: dict[str, PlayedJob] = field(default_factory=dict)
    posts: list[Post] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    refused: list[Reply] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        headers = {"apikey": self.key}
        self._pops, self._tells = _Line(self.url, headers), _Line(self.url, headers)
        self._changed = threading.Condition()
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._broken: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # By hand.

    def check_in(self) -> None:
        """Be online; nothing may wait for it."""
        assert self.pop() == []

    def pop(self, *, wait: float = 0, slots: int = 1, idempotency_key: str | None = None) -> list[PlayedJob]:
        """Ask for up to `slots` jobs, for up to `wait` seconds; they are held from now on."""
        reply = self._pops.call(
            "generate/chat/pop",
            self.offer(wait=wait, slots=slots),
            {} if idempotency_key is None else {"Idempotency-Key": idempotency_key},
        )
        if reply.status != 200:
            raise RefusedError("a pop", reply)
        jobs = [PlayedJob(told) for told in reply.body.get("jobs") or []]
        with self._changed:
            self.held |= {job.id: job for job in jobs}
            self._changed.notify_all()
        return jobs

    def offer(self, **fields: Any) -> dict[str, Any]:
        """The body of a pop."""
        return {
            "name": self.name,
            "models": [self.model],
            "manifests": {self.model: self.manifest},
            "kinds": list(self.kinds),
            "progress": True,
            "threads": self.threads,
            "max_length": self.max_length,
            "max_context_length": self.max_context_length,
            "bridge_agent": "Played Worker:1:tests",
            **fields,
        }

    def take(self, *, wait: float = 10) -> PlayedJob:
        """The one job that is there, or comes within `wait` seconds."""
        jobs = self.pop(wait=wait)
        assert len(jobs) == 1, f"no job came within {wait} s"
        return jobs[0]

    def say(self, job: PlayedJob, added: str | Iterable[int], *, lag: int = 0) -> int:
        """Add to a job's output and post it; how many tokens the broker holds now."""
        job.say(added, lag=lag)
        self.post(job)
        return job.accepted

    def write(self, job: PlayedJob, count: int) -> int:
        """The same with the next tokens of the job's story."""
        job.write(count)
        self.post(job)
        return job.accepted

    def post(self, *jobs: PlayedJob, state: str = "decode") -> list[Stop]:
        """Post what the broker does not hold yet of these jobs, or of all; those it wants no more of are held no longer."""
        named = jobs or tuple(self.held.values())
        entries = [{"id": job.id, "state": state, **(job.piece() if job.attached else {})} for job in named]
        handed_at = time.monotonic()
        reply = self.send(*entries)
        answered_at = time.monotonic()
        if reply.status != 200:
            raise RefusedError("a post", reply)
        told = [entry for entry in entries if entry.get("token_ids")]
        shown = {entry["id"]: entry["text_offset"] + len(entry["text"]) for entry in told}
        tokens = sum(len(entry["token_ids"]) for entry in told)
        stops = [Stop(told["id"], told["reason"], answered_at) for told in reply.body["stop"]]
        with self._changed:
            if shown:
                self.posts.append(Post(handed_at, answered_at, shown, tokens))
            by_id = {job.id: job for job in named}
            for told in reply.body["jobs"]:
                job = by_id[told["id"]]
                job.accepted = max(job.accepted, min(told["accepted"], len(job.token_ids)))
            for stop in stops:
                by_id[stop.job_id].stopped = stop.reason
                self.held.pop(stop.job_id, None)
            self.stops += stops
            self._changed.notify_all()
        return stops

    def send(self, *entries: dict[str, Any]) -> Reply:
        """Post these very entries, which need not be true."""
        return self._tells.call("generate/progress", {"worker": self.name, "jobs": list(entries)})

    def submit(self, job: PlayedJob, idempotency_key: str | None = None, **fields: Any) -> Reply:
        """Submit these very fields for a job; it is held no longer once the broker has said yes or no."""
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        reply = self._tells.call(f"generate/{job.kind}/submit", {"id": job.id, **fields}, headers)
        if reply.status < 500:
            with self._changed:
                self.held.pop(job.id, None)
                self._changed.notify_all()
        return reply

    def finish(self, job: PlayedJob, reason: str = "stop", **fields: Any) -> float:
        """Submit all there is of a job; the reward."""
        return self._settle(job, state="ok", finish_reason=reason, **{**job.result(), **fields})

    def fault(self, job: PlayedJob) -> None:
        """Give up on a job."""
        self._settle(job, state="faulted")

    def release(self, job: PlayedJob) -> None:
        """Hand a job back without blame."""
        self._settle(job, state="released")

    def reject(self, job: PlayedJob, code: str = "context_length_exceeded") -> None:
        """Say that the request itself is at fault."""
        self._settle(job, state="rejected", error_code=code)

    def hear_stop(self, job: PlayedJob, *, within: float = PATIENCE) -> Stop:
        """Go on posting a job, at the pace of `flush`, until the broker wants no more of it."""
        give_up = time.monotonic() + within
        while not (stops := [stop for stop in self.post(job) if stop.job_id == job.id]):
            assert time.monotonic() < give_up, f"never told to stop {job.id}"
            self._ending.wait(self.flush)
        return stops[0]

    def vanish(self) -> None:
        """Be gone, as when the machine loses its power: calls under way end unanswered, no further one is made."""
        self._ending.set()
        with self._changed:
            self._changed.notify_all()
        self._pops.cut()
        self._tells.cut()
        self._join()

    # By itself.

    def start(self, *, jobs: int, rate: float, length: int | None = None) -> Self:
        """Serve up to `jobs` at a time from now on, each with `rate` tokens a second of its story, up to `length` or what was ordered."""
        for name, work in {
            "played pops": lambda: self._keep_popping(jobs),
            "played posts": lambda: self._keep_posting(rate, length),
        }.items():
            thread = threading.Thread(target=self._watched, args=(work,), name=name)
            self._threads.append(thread)
            thread.start()
        return self

    def wait_until(self, condition: Callable[[], bool], *, within: float = PATIENCE) -> None:
        """Wait for something that the worker itself sees: a job taken, a post answered, a stop."""
        with self._changed:
            came = self._changed.wait_for(lambda: condition() or self._broken is not None, within)
        if self._broken is not None:
            raise self._broken
        assert came, f"never happened; held {list(self.held)}, stops {self.stops}, failures {self.failures}"

    def close(self) -> None:
        """Make no further call; raises what broke while it worked by itself."""
        self.vanish()
        self._pops.close()
        self._tells.close()
        if self._broken is not None:
            raise self._broken

    def _settle(self, job: PlayedJob, **fields: Any) -> float:
        reply = self.submit(job, **fields)
        if reply.status != 200:
            raise RefusedError("a submit", reply)
        return float(reply.body["reward"])

    def _join(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(PATIENCE)
                assert not thread.is_alive(), f"{thread.name} does not end"

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except VanishedError:
            pass
        except BaseException as error:  # noqa: BLE001 raised where the worker is used
            with self._changed:
                self._broken = error
                self._changed.notify_all()

    def _keep_popping(self, most: int) -> None:
        while not self._ending.is_set():
            with self._changed:
                self._changed.wait_for(lambda: len(self.held) < most or self._ending.is_set())
                free = most - len(self.held)
            if not self._ending.is_set():
                self._tried(lambda free=free: self.pop(wait=_POP_SECONDS, slots=free))  # type: ignore[misc]

    def _keep_posting(self, rate: float, length: int | None) -> None:
        alive_until, due = 0.0, time.monotonic()
        while not self._ending.is_set():
            due = max(due + self.flush, time.monotonic())
            self._ending.wait(due - time.monotonic())
            with self._changed:
                held = list(self.held.values())
            for job in held:
                self._go_on(job, rate, length)
            everything = time.monotonic() >= alive_until
            named = [job for job in held if everything or (job.attached and len(job.token_ids) > job.accepted)]
            if everything:
                alive_until = time.monotonic() + SIGN_OF_LIFE
            if named:
                self._tried(lambda named=named: self.post(*named))  # type: ignore[misc]
            for job in held:
                if job.stopped is None and self._is_finished(job, length):
                    self._tried(lambda job=job: self._deliver(job))  # type: ignore[misc]

    def _go_on(self, job: PlayedJob, rate: float, length: int | None) -> None:
        due = len(job.prefix) + int((time.monotonic() - job.taken_at) * rate)
        due = min(due, job.max_new_tokens if length is None else min(length, job.max_new_tokens))
        if due > len(job.token_ids):
            job.write(due - len(job.token_ids))

    @staticmethod
    def _is_finished(job: PlayedJob, length: int | None) -> bool:
        return job.ended or len(job.token_ids) >= min(job.max_new_tokens, length or job.max_new_tokens)

    def _deliver(self, job: PlayedJob) -> None:
        reason = "length" if len(job.token_ids) >= job.max_new_tokens and not job.ended else "stop"
        reply = self.submit(job, state="ok", finish_reason=reason, **job.result())
        if reply.status >= 500:
            raise RefusedError("a submit", reply)
        if reply.status != 200:
            self.refused.append(reply)

    def _tried(self, call: Callable[[], object]) -> None:
        """A broker that is away is no end of the work: another try follows."""
        try:
            call()
        except RefusedError as error:
            if error.status < 500:
                raise
            self.failures.append(error)
        except (OSError, http.client.HTTPException) as error:
            self.failures.append(error)
        else:
            return
        self._ending.wait(self.flush)
