"""Fetches jobs in a thread of its own, so that the next one is here when the current one ends."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from worker.backoff import Pace
from worker.broker import BrokerClient, BrokerUnavailableError, PausedError, TurnedAwayError
from worker.jobs import Job, UnreadableJob, read_pop
from worker.messages import Inbox, Popped, PoppingEnded
from worker.status import Status

log = logging.getLogger(__name__)


class Popper(threading.Thread):
    """Pops whenever there is a seat for a job.

    Args:
        client: this thread's own.
        body: of the pop; its `wait` bounds how long stopping takes.
        seats: jobs that may be here at a time; the loop frees one with `free_seat`.
        inbox: gets `Popped`, and at the end `PoppingEnded`.
        on_first_answer: called once, when the broker has answered a pop.
    """

    def __init__(
        self,
        client: BrokerClient,
        body: dict[str, Any],
        *,
        seats: int,
        inbox: Inbox,
        status: Status,
        on_first_answer: Callable[[], None],
        pace: Pace,
    ) -> None:
        super().__init__(name="popper", daemon=True)
        self._client = client
        self._body = body
        self._seats = threading.Semaphore(seats)
        self._inbox = inbox
        self._status = status
        self._on_first_answer: Callable[[], None] | None = on_first_answer
        self._pace = pace
        self._backoff = pace.backoff()
        self._stopping = threading.Event()
        self._messages_seen: set[str] = set()
        self._overdrawn = 0

    def free_seat(self) -> None:
        """A job has left."""
        self._seats.release()

    def stop(self) -> None:
        """Take nothing new; a poll under way is let end, since it may have claimed a job already."""
        self._stopping.set()
        self._seats.release()

    def run(self) -> None:
        """The thread."""
        fatal: str | None = None
        try:
            while self._next_seat():
                jobs = self._pop_some()
                if jobs:
                    self._overdrawn += len(jobs) - 1
                    self._inbox.put(Popped(tuple(jobs)))
                else:
                    self._seats.release()
        except TurnedAwayError as error:
            fatal = str(error)
        except Exception as error:
            log.exception("fetching jobs broke")
            fatal = f"fetching jobs broke: {error}"
        finally:
            self._client.close()
            self._inbox.put(PoppingEnded(fatal))

    def _next_seat(self) -> bool:
        while True:
            self._seats.acquire()
            if self._stopping.is_set():
                return False
            if self._overdrawn == 0:
                return True
            # More jobs came than were asked for: they are kept, and the next pop waits until they have left.
            self._overdrawn -= 1

    def _pop_some(self) -> list[Job | UnreadableJob]:
        """One pop, sent again with its key until it is answered: an answer that got lost may have held jobs."""
        key = str(uuid.uuid4())
        last_try = False
        while True:
            begun = time.monotonic()
            try:
                answer = self._client.pop(self._body, key)
            except BrokerUnavailableError as error:
                if last_try:
                    return []
                delay = self._backoff.next(error.retry_after)
                self._status.set_state("reconnecting", str(error))
                log.warning("%s; trying again in %.1f s", error, delay)
                last_try = self._stopping.wait(delay)
                continue
            except PausedError as error:
                self._status.set_state("paused", str(error))
                log.warning("the broker pauses this worker: %s", error)
                self._stopping.wait(self._pace.pause)
                return []
            self._welcome(answer)
            jobs = read_pop(answer)
            if not jobs:
                self._stopping.wait(max(0.0, self._pace.shortest_round - (time.monotonic() - begun)))
            return jobs

    def _welcome(self, answer: dict[str, Any]) -> None:
        self._backoff.reset()
        if not self._stopping.is_set():
            self._status.set_state("working")
        if self._on_first_answer is not None:
            self._on_first_answer()
            self._on_first_answer = None
        messages = answer.get("messages")
        for message in messages if isinstance(messages, list) else []:
            if isinstance(message, dict) and str(message.get("id")) not in self._messages_seen:
                self._messages_seen.add(str(message.get("id")))
                log.info("message from %s: %s", message.get("origin", "the broker"), message.get("message"))
