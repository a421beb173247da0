"""The worker's main loop: jobs in, tokens out, results away; the only thread that touches the engine.

Three threads serve it: the popper, which fetches ahead, the submitter, which delivers, and the progress poster, which
tells the broker what is held. They talk to it through its inbox, and it waits for nothing else. One `stop()` drains:
what runs is finished, what has not begun is released, and nothing new is taken. A second one aborts what runs and
releases that too. The last word to the broker, either way, is that this worker has left.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from worker.backoff import Pace
from worker.broker import BrokerClient, Kind
from worker.engine.interface import Delta, Engine, Event, Failed, Finished, GenerationRequest, RequestRefusedError
from worker.job_output import JobOutput
from worker.jobs import ErrorCode, Job, UnreadableJob, faulted, rejected, released, stored
from worker.messages import Inbox, JobsStopped, Message, Popped, PoppingEnded, StopWanted, SubmittingEnded
from worker.popper import Popper
from worker.progress_poster import ProgressPoster
from worker.status import Status
from worker.submitter import Submitter

log = logging.getLogger(__name__)

# Of the jobs that fit into the engine, one in so many is fetched beyond them: the batch stays full while a pop is on its
# way, and few wait here that another worker could begin at once.
_AHEAD_SHARE = 8
# Steps that fail as a whole, one after another, before the engine counts as broken.
_BROKEN_AFTER = 3

# Token ids of a conversation, by the model's own chat template; raises RequestRefusedError.
Render = Callable[[list[dict[str, Any]]], tuple[int, ...]]


@dataclass(slots=True)
class _Running:
    job: Job
    output: JobOutput
    begun: float = field(default_factory=time.monotonic)


class Worker:
    """Runs one engine for one broker.

    Args:
        engine: driven from the thread that calls `run`.
        clients: makes a client; each thread gets its own.
        pop_body: the body of every pop; with `manifests` in it, chat is served too.
        render: for chats that come as messages.
        status: told what happens.
        on_ready: called once, when the broker has answered the first pop.
        pace: how long it waits where it has to.
    """

    def __init__(
        self,
        engine: Engine,
        clients: Callable[[], BrokerClient],
        pop_body: dict[str, Any],
        *,
        status: Status,
        on_ready: Callable[[], None],
        render: Render | None = None,
        pace: Pace = Pace(),  # noqa: B008  frozen
    ) -> None:
        self._engine = engine
        self._manifests: dict[str, dict[str, Any]] = pop_body.get("manifests") or {}
        self._render = render
        self._status = status
        self._pace = pace
        self._inbox: Inbox = queue.SimpleQueue()
        self._progress = ProgressPoster(clients(), str(pop_body.get("name")), inbox=self._inbox, pace=pace)
        self._submitter = Submitter(
            clients(), inbox=self._inbox, status=status, on_over=self._progress.let_go, pace=pace
        )
        self._popper = Popper(
            clients(),
            pop_body,
            seats=engine.max_batch + max(1, engine.max_batch // _AHEAD_SHARE),
            inbox=self._inbox,
            status=status,
            progress=self._progress,
            on_first_answer=on_ready,
            pace=pace,
        )
        self._waiting: deque[Job] = deque()
        self._running: dict[str, _Running] = {}
        self._stops = 0
        self._popping = True
        self._submitting = True
        self._failed_steps = 0
        self._fatal: str | None = None

    def stop(self) -> None:
        """Drain; called again, hand everything back. Safe in a signal handler and from any thread."""
        self._inbox.put(StopWanted())

    def run(self) -> str | None:
        """Work until stopped; why it ended, when that was not asked for."""
        self._submitter.start()
        self._progress.start()
        self._popper.start()
        while self._popping or self._running or self._waiting:
            self._read_inbox(wait=not self._running and not self._waiting)
            if self._stops > 1:
                break
            self._fill_engine()
            if self._running:
                self._step()
            self._show()
        self._hand_back_everything()
        self._flush()
        self._progress.leave(self._pace.goodbye)
        return self._fatal

    def _read_inbox(self, *, wait: bool) -> None:
        """Take in every message there is; with `wait`, at least one."""
        try:
            message = self._inbox.get(block=wait)
            while True:
                self._receive(message)
                message = self._inbox.get(block=False)
        except queue.Empty:
            return

    def _receive(self, message: Message) -> None:
        match message:
            case Popped(jobs):
                for job in jobs:
                    self._accept(job)
            case PoppingEnded(fatal):
                self._popping = False
                if fatal is not None:
                    self._give_up(fatal)
            case JobsStopped(reasons):
                for job_id, reason in reasons.items():
                    self._drop(job_id, reason)
            case SubmittingEnded():
                self._submitting = False
            case StopWanted():
                self._stops += 1
                self._drain() if self._stops == 1 else self._hurry()

    def _accept(self, job: Job | UnreadableJob) -> None:
        if job.id in self._running or any(job.id == other.id for other in self._waiting):
            # Told twice of one job: to fault or release it would take it from ourselves.
            self._popper.free_seat()
        elif isinstance(job, UnreadableJob):
            log.warning("job %s cannot be read: %s", job.id, job.message)
            if job.error_code is None:
                self._submit_fault(job.id, job.kind)
            else:
                self._reject(job.id, job.kind, job.error_code)
        elif self._stops or self._fatal is not None:
            self._submitter.put(released(job))
        elif (other := self._other_revision(job)) is not None:
            log.warning("job %s is handed back: it is for the %s", job.id, other)
            self._submitter.put(released(job))
            self._popper.free_seat()
        else:
            self._waiting.append(job)

    def _other_revision(self, job: Job) -> str | None:
        """Which revision a chat is meant for, in words, if it is not ours: its ids would mean other text here."""
        manifest = self._manifests.get(job.model)
        if job.kind != "chat" or manifest is None:
            return None
        for field_name in ("model_revision", "tokenizer_revision"):
            wanted = getattr(job, field_name)
            if wanted is not None and wanted != manifest[field_name]:
                return f"{field_name.replace('_', ' ')} {wanted}"
        return None

    def _drop(self, job_id: str, reason: str) -> None:
        """The broker has settled this one itself. It is not ours any more, so nothing is submitted; one that has just
        ended here is left to its submission, which the broker answers as it likes."""
        if self._running.pop(job_id, None) is not None:
            self._engine.abort(job_id)
        elif (waiting := next((job for job in self._waiting if job.id == job_id), None)) is not None:
            self._waiting.remove(waiting)
        else:
            return
        log.info("job %s stopped by the broker: %s", job_id, reason)
        self._status.add_stopped()
        self._popper.free_seat()

    def _drain(self) -> None:
        log.info(
            "draining: %d running are finished, %d not begun are handed back", len(self._running), len(self._waiting)
        )
        self._status.set_state("draining", "finishing what runs; once more to hand it back")
        self._popper.stop()
        self._release_waiting()

    def _hurry(self) -> None:
        log.info("handing back what runs")
        self._status.set_state("stopping", "handing back what runs")

    def _give_up(self, reason: str) -> None:
        """Stop for a reason of our own: as a drain, but remembered."""
        if self._fatal is None:
            log.error("%s", reason)
            self._fatal = reason
            self._status.set_state("stopping", reason)
            self._popper.stop()
            self._release_waiting()

    def _release_waiting(self) -> None:
        while self._waiting:
            self._submitter.put(released(self._waiting.popleft()))

    def _fill_engine(self) -> None:
        while self._waiting and self._engine.capacity > 0:
            job = self._waiting.popleft()
            try:
                with self._progress.watched_step():
                    self._engine.add(self._request(job))
            except RequestRefusedError as error:
                log.warning("job %s refused: %s", job.id, error)
                self._refuse(job, error)
            except Exception:
                log.exception("job %s could not begin", job.id)
                self._submit_fault(job.id, job.kind, job.seed)
            else:
                output = job.new_output()
                self._running[job.id] = _Running(job, output)
                self._progress.set_stage(job.id, "started")
                if job.streams:
                    self._progress.follow(job.id, output)

    def _request(self, job: Job) -> GenerationRequest:
        """What the engine is to do for a job.

        Raises:
            RequestRefusedError: its messages cannot be made into a prompt.
        """
        if job.messages is None:
            return job.request
        if self._render is None:
            raise RequestRefusedError("invalid_request", "messages cannot be rendered here")
        return replace(job.request, prompt=self._render(job.messages))

    def _refuse(self, job: Job, error: RequestRefusedError) -> None:
        """A chat that can't run anywhere ends as what it is; a text, whose broker knows no such end, as a fault. So does a
        chat that another worker began: what is wrong is what that one said, not what was ordered."""
        if job.kind == "text" or job.request.prefix:
            self._submit_fault(job.id, job.kind, job.seed)
        elif error.code == "context_length_exceeded":
            self._reject(job.id, job.kind, "context_length_exceeded", job.seed)
        else:
            self._reject(job.id, job.kind, "unsupported_parameter", job.seed)

    def _step(self) -> None:
        try:
            with self._progress.watched_step():
                events = self._engine.step()
        except Exception:
            log.exception("a step of the engine failed as a whole")
            self._after_failed_step()
            return
        self._failed_steps = 0
        for event in events:
            self._handle(event)

    def _after_failed_step(self) -> None:
        """Nobody knows who did it, so nothing that was in the engine can be trusted."""
        for job_id, running in list(self._running.items()):
            self._engine.abort(job_id)
            self._submit_fault(job_id, running.job.kind, running.job.seed)
        self._running.clear()
        self._failed_steps += 1
        if self._failed_steps >= _BROKEN_AFTER:
            self._give_up(f"the engine failed {self._failed_steps} times in a row")

    def _handle(self, event: Event) -> None:
        running = self._running.get(event.request_id)
        if running is None:
            return
        match event:
            case Delta(_, token_ids, text):
                if not running.output.begun:
                    self._progress.set_stage(event.request_id, "decode")
                running.output.add(token_ids, text, event.logprobs)
                self._status.add_tokens(len(token_ids))
            case Finished():
                del self._running[event.request_id]
                seconds = time.monotonic() - running.begun
                log.info("job %s finished: %d tokens in %.1f s", running.job.id, event.completion_tokens, seconds)
                # The result has all of it: a post beside it would only be late.
                self._progress.follow(running.job.id, None)
                self._submitter.put(stored(running.job, running.output, event))
                self._popper.free_seat()
            case Failed(_, message):
                del self._running[event.request_id]
                log.warning("job %s failed: %s", running.job.id, message)
                self._submit_fault(running.job.id, running.job.kind, running.job.seed)

    def _submit_fault(self, job_id: str, kind: Kind, seed: int = 0) -> None:
        self._status.add_failed()
        self._progress.follow(job_id, None)
        self._submitter.put(faulted(job_id, kind, seed))
        self._popper.free_seat()

    def _reject(self, job_id: str, kind: Kind, code: ErrorCode, seed: int = 0) -> None:
        self._submitter.put(rejected(job_id, kind, code, seed))
        self._popper.free_seat()

    def _show(self) -> None:
        figures = self._engine.statistics()
        self._status.set_engine(figures, queued=len(self._waiting))
        if figures.waiting == 0:
            # The engine has begun with all it holds, so those without a token are at their prompt.
            for job_id, running in self._running.items():
                if not running.output.begun:
                    self._progress.set_stage(job_id, "prefill")

    def _hand_back_everything(self) -> None:
        for job_id, running in self._running.items():
            self._engine.abort(job_id)
            self._progress.follow(job_id, None)
            self._submitter.put(released(running.job))
        self._running.clear()
        self._release_waiting()
        self._show()

    def _flush(self) -> None:
        """Wait for the last deliveries; a further stop shortens that."""
        within = self._pace.flush if self._stops < 2 else self._pace.hurried_flush
        self._submitter.close(within)
        deadline = time.monotonic() + within
        while self._submitting and (left := deadline - time.monotonic()) > 0:
            stops = self._stops
            with contextlib.suppress(queue.Empty):
                self._receive(self._inbox.get(timeout=left))
            if self._stops > max(stops, 1):
                self._submitter.close(self._pace.hurried_flush)
                deadline = min(deadline, time.monotonic() + self._pace.hurried_flush)
        if lost := self._submitter.undelivered():
            log.warning("the broker was not told about %s", ", ".join(lost))
