"""What the worker's threads tell its main loop. They meet in one `queue.SimpleQueue`, the loop's inbox:
its `put` is safe even inside a signal handler, where taking an ordinary lock could hang."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue

from worker.jobs import Job, UnreadableJob


@dataclass(frozen=True, slots=True)
class Popped:
    """Jobs claimed for us."""

    jobs: tuple[Job | UnreadableJob, ...]


@dataclass(frozen=True, slots=True)
class PoppingEnded:
    """No more jobs will come; `fatal` says why, when it was not our wish."""

    fatal: str | None = None


@dataclass(frozen=True, slots=True)
class JobsStopped:
    """The broker wants no more of these: job id -> its reason."""

    reasons: dict[str, str]


@dataclass(frozen=True, slots=True)
class SubmittingEnded:
    """All results are delivered or given up."""


@dataclass(frozen=True, slots=True)
class StopWanted:
    """A signal: the first one drains, the second hands back."""


Message = Popped | PoppingEnded | JobsStopped | SubmittingEnded | StopWanted
Inbox = SimpleQueue[Message]
