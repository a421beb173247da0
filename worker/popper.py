"""Fetches jobs in a thread of its own, so that the next ones are here when the current ones end."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from worker.backoff import Pace
from worker.broker import BrokerClient, BrokerUnavailableError, Kind, NoChatRouteError, PausedError, TurnedAwayError
from worker.jobs import Job, UnreadableJob, read_pop
from worker.messages import Inbox, Popped, PoppingEnded
from worker.progress_poster import ProgressPoster
from worker.status import Status

log = logging.getLogger(__name__)

# As many as a broker hands out in one answer.
_MOST_SLOTS = 50


class Popper(threading.Thread):
    """Pops whenever there is a seat for a job, for as many as there are seats.

    Args:
        client: this thread's own.
        body: of the pop, without `slots` and `progress`; its `wait` bounds how long stopping takes. With `manifests` in
            it, chat is asked for as well as text, from a broker that has it.
        seats: jobs that may be here at a time; the loop frees one with `free_seat`.
        inbox: gets `Popped`, and at the end `PoppingEnded`.
        progress: told of every job, so that it is named in time however busy the loop is.
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
        progress: ProgressPoster,
        on_first_answer: Callable[[], None],
        pace: Pace,
    ) -> None:
        super().__init__(name="popper", daemon=True)
        self._client = client
        self._body = body
        self._inbox = inbox
        self._status = status
        self._progress = progress
        self._on_first_answer: Callable[[], None] | None = on_first_answer
        self._pace = pace
        self._backoff = pace.backoff()
        self._stopping = threading.Event()
        self._seats_changed = threading.Condition()
        # Below 0 when more jobs came than were asked for: they are kept, and the next pop waits until they have left.
        self._free_seats = seats
        self._messages_seen: set[str] = set()
        self._serves_chat = bool(body.get("manifests"))

    def free_seat(self) -> None:
        """A job has left."""
        with self._seats_changed:
            self._free_seats += 1
            self._seats_changed.notify()

    def stop(self) -> None:
        """Take nothing new; a poll under way is let end, since it may have claimed a job already."""
        with self._seats_changed:
            self._stopping.set()
            self._seats_changed.notify()

    def run(self) -> None:
        """The thread."""
        fatal: str | None = None
        try:
            while slots := self._next_slots():
                jobs = self._pop_some(slots)
                if jobs:
                    with self._seats_changed:
                        self._free_seats -= len(jobs)
                    with self._progress.holding((job.id, isinstance(job, Job) and job.streams) for job in jobs):
                        self._inbox.put(Popped(tuple(jobs)))
        except TurnedAwayError as error:
            fatal = str(error)
        except Exception as error:
            log.exception("fetching jobs broke")
            fatal = f"fetching jobs broke: {error}"
        finally:
            self._client.close()
            self._inbox.put(PoppingEnded(fatal))

    def _next_slots(self) -> int:
        """How many jobs to ask for, waiting until there is a seat; 0 when nothing new is to be taken."""
        with self._seats_changed:
            self._seats_changed.wait_for(lambda: self._free_seats > 0 or self._stopping.is_set())
            return 0 if self._stopping.is_set() else min(self._free_seats, _MOST_SLOTS)

    def _pop_some(self, slots: int) -> list[Job | UnreadableJob]:
        """One pop, sent again with its key until it is answered: an answer that got lost may have held jobs."""
        key = str(uuid.uuid4())
        kind, body = self._question(slots)
        last_try = False
        while True:
            begun = time.monotonic()
            try:
                answer = self._client.pop(body, key, kind)
            except NoChatRouteError as error:
                log.info("%s: only text is served", error)
                self._serves_chat = False
                kind, body = self._question(slots)
                continue
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

    def _question(self, slots: int) -> tuple[Kind, dict[str, Any]]:
        """The kind of pop, and its body. A chat is only for a worker that tells how it gets on."""
        promise = {"progress": True} if self._progress.wanted else {}
        if self._serves_chat and promise:
            return "chat", {**self._body, "kinds": ["text", "chat"], "slots": slots, **promise}
        plain = {name: value for name, value in self._body.items() if name != "manifests"}
        return "text", {**plain, "slots": slots, **promise}

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
