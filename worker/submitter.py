"""Delivers results in a thread of its own; each is sent, with one key, until the broker has answered it."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from worker.backoff import Backoff, Pace
from worker.broker import BrokerClient, BrokerUnavailableError, JobGoneError
from worker.jobs import Submission
from worker.messages import Inbox, SubmittingEnded
from worker.status import Status

log = logging.getLogger(__name__)

# The longest lease there is: after it the job has been given to somebody else.
_GIVE_UP_SECONDS = 3600.0


@dataclass(order=True, slots=True)
class _Parcel:
    """A submission with its next try's time; ties go by age."""

    due: float
    number: int
    submission: Submission = field(compare=False)
    put_at: float = field(compare=False)
    backoff: Backoff = field(compare=False)


class Submitter(threading.Thread):
    """Sends what it is given, oldest due first; a delivery that fails waits its turn without holding up the others.

    Args:
        client: this thread's own.
        inbox: gets `SubmittingEnded`.
        on_over: called with a job's id once nothing more will be sent for it.
    """

    def __init__(
        self, client: BrokerClient, *, inbox: Inbox, status: Status, on_over: Callable[[str], None], pace: Pace
    ) -> None:
        super().__init__(name="submitter", daemon=True)
        self._client = client
        self._inbox = inbox
        self._on_over = on_over
        self._status = status
        self._pace = pace
        self._changed = threading.Condition()
        self._parcels: list[_Parcel] = []
        self._sending: _Parcel | None = None
        self._numbers = itertools.count()
        self._deadline: float | None = None

    def put(self, submission: Submission) -> None:
        """Deliver this; returns at once."""
        now = time.monotonic()
        with self._changed:
            parcel = _Parcel(now, next(self._numbers), submission, now, self._pace.backoff())
            heapq.heappush(self._parcels, parcel)
            self._changed.notify()

    def close(self, within: float) -> None:
        """Nothing more will come. Everything still here is tried at once, and then until `within` seconds from now.

        Called again it only shortens the time.
        """
        now = time.monotonic()
        with self._changed:
            deadline = now + within
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            for parcel in self._parcels:
                parcel.due = now
            heapq.heapify(self._parcels)
            self._changed.notify()

    def undelivered(self) -> list[str]:
        """Ids of jobs whose submission the broker has not answered."""
        with self._changed:
            sending = [self._sending] if self._sending is not None else []
            return [parcel.submission.job_id for parcel in [*sending, *self._parcels]]

    def run(self) -> None:
        """The thread."""
        try:
            while (parcel := self._next_parcel()) is not None:
                try:
                    self._deliver(parcel)
                except BrokerUnavailableError as error:
                    self._try_later(parcel, error)
                else:
                    self._on_over(parcel.submission.job_id)
                finally:
                    with self._changed:
                        self._sending = None
                        self._status.set_submitting(len(self._parcels))
        finally:
            self._client.close()
            self._inbox.put(SubmittingEnded())

    def _next_parcel(self) -> _Parcel | None:
        """The next one due, waiting for it; None once closed and empty, or closed and out of time."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._deadline is not None and (not self._parcels or now > self._deadline):
                    return None
                if self._parcels and self._parcels[0].due <= now:
                    self._sending = heapq.heappop(self._parcels)
                    self._status.set_submitting(len(self._parcels) + 1)
                    return self._sending
                self._changed.wait(self._parcels[0].due - now if self._parcels else None)

    def _deliver(self, parcel: _Parcel) -> None:
        submission = parcel.submission
        try:
            reward = self._client.submit(submission.body(), submission.idempotency_key, submission.kind)
        except JobGoneError as error:
            log.warning("job %s dropped: %s", submission.job_id, error)
            if submission.state == "ok":
                self._status.add_failed()
            return
        if submission.state == "ok":
            self._status.add_done(reward)
            log.info("job %s delivered, %.2f kudos", submission.job_id, reward)
        else:
            log.info("job %s handed back as %s", submission.job_id, submission.state)

    def _try_later(self, parcel: _Parcel, error: BrokerUnavailableError) -> None:
        job_id = parcel.submission.job_id
        if time.monotonic() - parcel.put_at > _GIVE_UP_SECONDS:
            log.error("job %s given up after an hour: %s", job_id, error)
            self._status.add_failed()
            self._on_over(job_id)
            return
        delay = parcel.backoff.next(error.retry_after)
        log.warning("job %s not delivered yet (%s); trying again in %.1f s", job_id, error, delay)
        with self._changed:
            if self._deadline is not None:
                delay = min(delay, max(0.0, self._deadline - time.monotonic()))
            parcel.due = time.monotonic() + delay
            heapq.heappush(self._parcels, parcel)
