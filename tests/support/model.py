"""The rules of the lifecycle as a plain Python model: no database, no locks, one call at a time.

Written from the rules, not from the code, to be compared with it after every step. Times are seconds on a clock that
only `pass_time` and `outage` move; counts are counted, never kept.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

PRICE, REWARD = 740, 640
FAULT_LIMIT, RELEASE_LIMIT = 2, 5
START_WITHIN, PROGRESS_LEASE, AFTER_LEASE, ATTACHED_FOR, AFTER_OUTAGE = 15, 60, 60, 30, 60
# A lease that is no older is not renewed by a post.
YOUNG_LEASE = 5


@dataclass
class Slot:
    """One wanted result; `prefix` is how many tokens its client has already."""

    state: str = "waiting"
    releases: int = 0
    prefix: int = 0


@dataclass
class Job:
    """One attempt; `posted` is how many tokens of its slot it has shown, None before its first post."""

    request: uuid.UUID
    slot: int
    worker: uuid.UUID
    posts_progress: bool
    revision: str | None
    claimed_at: float
    lease_begun: float
    lease_end: float
    state: str = "processing"
    reason: str | None = None
    posted: int | None = None
    started_at: float | None = None
    text: str | None = None
    price: int = 0
    reward: int = 0
    by_cancel: bool = False
    acknowledged: bool = False
    key: str | None = None


@dataclass
class Request:
    """What a client asked for, and every job at it."""

    kind: str
    slots: list[Slot]
    expires_at: float
    deadline: float | None
    attached_until: float | None
    attached_by: int = 0
    revision: str | None = None
    needs_progress: bool = False
    jobs: dict[uuid.UUID, Job] = field(default_factory=dict)
    outcome: str | None = None
    reason: str | None = None
    error_code: str | None = None
    done_at: float | None = None
    last_faulted: bool = False
    tried: set[uuid.UUID] = field(default_factory=set)
    # (kind, reason, outcome, price, reward) of each event.
    events: list[tuple[str, str | None, str | None, int, int]] = field(default_factory=list)

    def count(self, state: str) -> int:
        """Slots in a state."""
        return sum(slot.state == state for slot in self.slots)

    def jobs_in(self, *states: str) -> list[Job]:
        """Jobs in one of the states."""
        return [job for job in self.jobs.values() if job.state in states]

    def until(self, moment: float) -> None:
        """Expire no sooner than `moment`, but never after the deadline."""
        self.expires_at = max(self.expires_at, moment)
        if self.deadline is not None:
            self.expires_at = min(self.expires_at, self.deadline)


def stream(slot: int, tokens: int) -> str:
    """The text of a slot's first tokens, one character each; every attempt at it produces the same."""
    return "".join(chr(97 + (7 * slot + place) % 26) for place in range(tokens))


class Model:
    """Every request, and the clock."""

    def __init__(self, now: float, *, expiry: float, retention: float) -> None:
        self.now = now
        self.expiry = expiry
        self.retention = retention
        self.outages: list[tuple[float, float]] = []
        self.requests: dict[uuid.UUID, Request] = {}
        self.removed: set[uuid.UUID] = set()

    # Time

    def pass_time(self, seconds: float) -> None:
        """The clock moves while brokers live."""
        self.now += seconds

    def outage(self, seconds: float) -> None:
        """The clock moves and no broker lives."""
        self.outages.append((self.now, self.now + seconds))
        self.now += seconds

    def ending(self, begun: float, until: float) -> float:
        """The effective end of a term: longer by each outage that began within it, 60 s after the last at least."""
        for start, stop in self.outages:
            if begun <= start <= until:
                until = max(until + stop - start, stop + AFTER_OUTAGE)
        return until

    # Lookups

    def job(self, job_id: uuid.UUID) -> tuple[Request, Job] | None:
        """A job with its request; None once retention has removed them."""
        for request in self.requests.values():
            if job_id in request.jobs:
                return request, request.jobs[job_id]
        return None

    @staticmethod
    def sent(request: Request, job: Job) -> int:
        """How many tokens of its slot a client can have by this job."""
        return request.slots[job.slot].prefix if job.posted is None else job.posted

    def stale(self) -> set[uuid.UUID]:
        """Jobs whose lease is over."""
        return {
            job_id
            for request in self.requests.values()
            for job_id, job in request.jobs.items()
            if job.state == "processing" and self.ending(job.lease_begun, job.lease_end) < self.now
        }

    def unstarted(self) -> set[uuid.UUID]:
        """Claims that no post has named in time."""
        return {
            job_id
            for request in self.requests.values()
            for job_id, job in request.jobs.items()
            if job.state == "processing" and job.posts_progress and job.started_at is None
            if self.ending(job.claimed_at, job.claimed_at + START_WITHIN) < self.now
        }

    def due(self, request: Request, reason: str) -> bool:
        """Whether maintenance may cancel a request for this reason."""
        if request.outcome is not None:
            return False
        if reason == "expired":
            return request.count("waiting") > 0 and request.expires_at <= self.now
        if reason == "deadline":
            return request.deadline is not None and request.deadline <= self.now
        until = request.attached_until
        return until is not None and self.ending(until - ATTACHED_FOR, until) <= self.now

    # Transitions; a report's answer is (verdict, reward)

    def enqueue(
        self,
        request_id: uuid.UUID,
        kind: str,
        n: int,
        *,
        attached: bool = False,
        deadline_in: float | None = None,
        revision: str | None = None,
    ) -> None:
        """n slots wait; with a revision, for a worker that posts and serves that one."""
        request = Request(
            kind=kind,
            slots=[Slot() for _ in range(n)],
            expires_at=self.now,
            deadline=None if deadline_in is None else self.now + deadline_in,
            attached_until=self.now + ATTACHED_FOR if attached else None,
            attached_by=int(attached),
            revision=revision,
            needs_progress=revision is not None,
        )
        request.until(self.now + self.expiry)
        request.events.append(("enqueued", None, None, 0, 0))
        self.requests[request_id] = request

    def offered(self, request_id: uuid.UUID, count: int, *, posts_progress: bool, revision: str | None) -> list[int]:
        """The slots that a claim of up to `count` gets, by a worker that posts or not and serves this revision."""
        request = self.requests.get(request_id)
        if request is None or request.outcome is not None or request.expires_at <= self.now:
            return []
        if request.attached_until is not None and request.attached_until <= self.now:
            return []
        if request.revision not in {None, revision} or (request.needs_progress and not posts_progress):
            return []
        return [index for index, slot in enumerate(request.slots) if slot.state == "waiting"][:count]

    def claim(
        self,
        request_id: uuid.UUID,
        worker: uuid.UUID,
        jobs: dict[int, uuid.UUID],
        lease: float,
        *,
        posts_progress: bool,
        revision: str | None,
    ) -> None:
        """The slots of `jobs` are taken under these job ids."""
        request = self.requests[request_id]
        for index, job_id in jobs.items():
            request.slots[index].state = "processing"
            request.jobs[job_id] = Job(
                request_id, index, worker, posts_progress, revision, self.now, self.now, self.now + lease
            )
            request.until(self.now + lease + AFTER_LEASE)
            request.events.append(("claimed", None, None, 0, 0))

    def store(self, job_id: uuid.UUID, text: str, tokens: int, key: str | None) -> tuple[str, int]:
        """Submit ok: the slot's whole text, which has so many tokens."""
        found = self.job(job_id)
        if found is None:
            return "gone", 0
        request, job = found
        if job.by_cancel and not job.acknowledged:
            job.acknowledged, job.key = True, key
            return "acknowledged", job.reward
        if job.state != "processing":
            return self._told_before(job, key)
        if request.attached_until is not None and not text.startswith(stream(job.slot, self.sent(request, job))):
            return "contradicted", 0
        reward = 0 if tokens <= request.slots[job.slot].prefix and request.slots[job.slot].prefix else REWARD
        self._store(request, job, text, PRICE, reward)
        job.key = key
        request.until(self.now + self.expiry)
        completes = request.outcome is None and not request.count("waiting") and not request.count("processing")
        if completes:
            request.outcome = "completed"
        request.events.append(("stored", None, "completed" if completes else None, PRICE, reward))
        self._finish(request)
        return "settled", reward

    def fault(self, job_id: uuid.UUID, key: str | None = None, *, reason: str = "reported") -> tuple[str, int]:
        """A worker failed; with reason `stale`, its lease is over."""
        found = self.job(job_id)
        if found is None:
            return "gone", 0
        request, job = found
        if job.state != "processing":
            return self._told_before(job, key)
        if reason == "stale" and job_id not in self.stale():
            return "not_due", 0
        self._fault(request, job, reason)
        job.key = key
        return "settled", 0

    def release(self, job_id: uuid.UUID, key: str | None = None, *, reason: str = "handed_back") -> tuple[str, int]:
        """A job comes back without blame; with reason `not_started`, nobody posted for it in time."""
        found = self.job(job_id)
        if found is None:
            return "gone", 0
        request, job = found
        if job.state != "processing":
            return self._told_before(job, key)
        if reason == "not_started" and job_id not in self.unstarted():
            return "not_due", 0
        slot = request.slots[job.slot]
        if request.outcome is None and slot.releases == RELEASE_LIMIT:
            self._fault(request, job, "release_cap")
        else:
            self._leave(request, job, "released", reason)
            request.last_faulted = False
            request.events.append(("released", reason, None, 0, 0))
            if request.outcome is None and self._put_back(request, job):
                slot.releases += 1
            self._finish(request)
        job.key = key
        return "settled", 0

    def reject(self, job_id: uuid.UUID, code: str, key: str | None, *, known: bool) -> tuple[str, int]:
        """The worker says the request itself is at fault."""
        if known or code not in {"context_length_exceeded", "unsupported_parameter"}:
            return self.fault(job_id, key)
        found = self.job(job_id)
        if found is None:
            return "gone", 0
        request, job = found
        if job.state != "processing":
            return self._told_before(job, key)
        self._leave(request, job, "rejected", code)
        job.key = key
        request.last_faulted = False
        ends = request.outcome is None
        request.events.append(("rejected", code, "rejected" if ends else None, 0, 0))
        if ends:
            request.outcome, request.error_code = "rejected", code
            self._drop_waiting(request)
            self._void_rest(request)
        self._finish(request)
        return "settled", 0

    def cancel(self, request_id: uuid.UUID, reason: str) -> str:
        """Nobody wants the rest."""
        request = self.requests.get(request_id)
        if request is None:
            return "gone"
        if request.outcome is not None:
            return "already_ended"
        self._cancel(request, reason)
        return "done"

    def cancel_if_due(self, request_id: uuid.UUID, reason: str) -> str:
        """The same from maintenance."""
        request = self.requests.get(request_id)
        if request is not None and request.outcome is None and not self.due(request, reason):
            return "not_due"
        return self.cancel(request_id, reason)

    def post(self, job_id: uuid.UUID, offset: int, count: int) -> tuple[int, str | None]:
        """Tokens `offset` to `offset + count` of the slot; (tokens held, why to stop)."""
        found = self.job(job_id)
        if found is None:
            return 0, "stale"
        request, job = found
        if job.state != "processing":
            if job.state == "stored":
                return 0, "cancelled" if job.by_cancel else "stale"
            return 0, job.state if job.state in {"voided", "rejected"} else "stale"
        if not job.posts_progress:
            return 0, None
        if job.started_at is None or job.lease_begun + YOUNG_LEASE < self.now:
            job.started_at = self.now if job.started_at is None else job.started_at
            job.lease_begun, job.lease_end = self.now, self.now + PROGRESS_LEASE
        held = self.sent(request, job)
        if offset <= held < offset + count:
            job.posted = held = offset + count
        return held, None

    def stay_attached(self, request_id: uuid.UUID) -> None:
        """A client still waits on its connection; what runs for it has not expired."""
        if self._hold(request_id):
            request = self.requests[request_id]
            if request.count("processing"):
                request.until(self.now + PROGRESS_LEASE + AFTER_LEASE)

    def _hold(self, request_id: uuid.UUID) -> bool:
        """Move the attachment's end ahead; whether there is anything left to wait for."""
        request = self.requests.get(request_id)
        if request is None or request.outcome is not None or request.attached_until is None:
            return False
        request.attached_until = max(request.attached_until, self.now + ATTACHED_FOR)
        return True

    def join(self, request_id: uuid.UUID) -> bool:
        """One client more waits."""
        if not self._hold(request_id):
            return False
        self.requests[request_id].attached_by += 1
        return True

    def leave(self, request_id: uuid.UUID) -> bool:
        """One client fewer waits; whether that was the last, whose leaving cancels."""
        request = self.requests.get(request_id)
        if request is None or request.outcome is not None or not request.attached_by:
            return False
        request.attached_by -= 1
        if request.attached_by:
            return False
        self._cancel(request, "disconnect")
        return True

    def remove_old(self) -> set[uuid.UUID]:
        """Retention; who went."""
        old = {
            request_id
            for request_id, request in self.requests.items()
            if request.done_at is not None and request.done_at + self.retention <= self.now
            if all(self.ending(job.lease_begun, job.lease_end) <= self.now for job in request.jobs.values())
        }
        for request_id in old:
            del self.requests[request_id]
        self.removed |= old
        return old

    # What they share

    def _told_before(self, job: Job, key: str | None) -> tuple[str, int]:
        if key is not None and key == job.key:
            return "repeated", job.reward
        return ("duplicate", job.reward) if job.state == "stored" else ("aborted", 0)

    def _leave(self, request: Request, job: Job, state: str, reason: str | None) -> None:
        """A job settles without a result; its slot is dropped unless it is put back later."""
        job.state, job.reason = state, reason
        request.slots[job.slot].state = "dropped"

    def _store(self, request: Request, job: Job, text: str, price: int, reward: int) -> None:
        job.state, job.text, job.price, job.reward = "stored", text, price, reward
        request.slots[job.slot].state = "stored"
        request.last_faulted = False

    def _fault(self, request: Request, job: Job, reason: str) -> None:
        self._leave(request, job, "faulted", reason)
        request.last_faulted = True
        faulted = len(request.jobs_in("faulted"))
        attempts = faulted + len(request.jobs_in("stored"))
        ends = request.outcome is None and (
            faulted == FAULT_LIMIT or (request.kind == "image" and attempts >= len(request.slots))
        )
        request.events.append(("faulted", reason, "faulted" if ends else None, 0, 0))
        if ends:
            request.outcome = "faulted"
            self._drop_waiting(request)
            self._void_rest(request)
        elif request.outcome is None:
            self._put_back(request, job)
        self._finish(request)

    def _put_back(self, request: Request, job: Job) -> bool:
        """The slot waits again, unless it is too late for that: then the request is cancelled."""
        if request.deadline is not None and request.deadline <= self.now:
            self._cancel(request, "deadline")
            return False
        if request.expires_at <= self.now:
            self._cancel(request, "expired")
            return False
        slot = request.slots[job.slot]
        slot.state = "waiting"
        if request.attached_until is not None and job.posted:
            slot.prefix = job.posted
            request.needs_progress = True
            request.revision = request.revision or job.revision
        request.tried.add(job.worker)
        return True

    def _cancel(self, request: Request, reason: str) -> None:
        request.outcome, request.reason = "cancelled", reason
        request.events.append(("cancelled", reason, "cancelled", 0, 0))
        self._drop_waiting(request)
        if request.attached_until is not None and reason != "expired":
            for job in request.jobs_in("processing"):
                if job.posts_progress:
                    self._store_posted(request, job)
        self._finish(request)

    def _store_posted(self, request: Request, job: Job) -> None:
        prefix, posted = request.slots[job.slot].prefix, self.sent(request, job)
        price, reward = PRICE if posted else 0, REWARD if posted > prefix else 0
        self._store(request, job, stream(job.slot, posted), price, reward)
        job.by_cancel = True
        request.events.append(("stored", "cancelled", None, price, reward))

    def _drop_waiting(self, request: Request) -> None:
        for slot in request.slots:
            if slot.state == "waiting":
                slot.state = "dropped"

    def _void_rest(self, request: Request) -> None:
        for job in request.jobs_in("processing"):
            self._leave(request, job, "voided", None)
            request.events.append(("voided", None, None, 0, 0))

    def _finish(self, request: Request) -> None:
        if request.outcome is not None and request.done_at is None and not request.count("processing"):
            request.done_at = self.now


def status_of(request: Request) -> dict[str, object]:
    """What the status of a request shows."""
    idle = not request.count("waiting") and not request.count("processing")
    return {
        "n": len(request.slots),
        "waiting": request.count("waiting"),
        "processing": request.count("processing"),
        "finished": request.count("stored"),
        "restarted": len(request.jobs_in("faulted", "released")),
        "charged": sum(job.price for job in request.jobs.values()),
        "done": request.done_at is not None,
        "faulted": request.outcome in {"faulted", "rejected"}
        or (request.kind == "image" and idle and request.last_faulted),
        "cancelled": request.outcome == "cancelled",
        "error_code": request.error_code,
        "results": _results(request.jobs_in("stored")),
    }


def _results(jobs: Sequence[Job]) -> list[tuple[int, str | None]]:
    return sorted((job.slot, job.text) for job in jobs)
