"""An engine that does what a test tells it to, behind the real interface."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable

from worker.engine.interface import (
    Delta,
    Engine,
    EngineStatistics,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    RequestRefusedError,
    TokenLogprob,
)

# How long a step takes in which nothing is scripted to happen.
_STEP_SECONDS = 0.005


class ScriptedEngine(Engine):
    """Every request has a script of its own; it advances by one line a step, and without one it runs on silently."""

    def __init__(self, max_batch: int = 1) -> None:
        self.max_batch = max_batch
        self.context_length = 2048
        self.requests: dict[str, GenerationRequest] = {}
        self.aborted: list[str] = []
        self.started: list[str] = []
        self._changed = threading.Condition()
        self._scripts: defaultdict[str, deque[list[Event]]] = defaultdict(deque)
        self._breaks: deque[str] = deque()
        self._hangs: threading.Event | None = None
        self.figures: EngineStatistics | None = None

    @property
    def running(self) -> int:
        return len(self.requests)

    def add(self, request: GenerationRequest) -> None:
        if request.prompt == "unfit":
            raise RequestRefusedError("invalid_request", "unfit")
        if request.prompt == "too long":
            raise RequestRefusedError("context_length_exceeded", "too long")
        if request.prompt == "breaks add":
            raise RuntimeError("add broke")
        with self._changed:
            self.requests[request.id] = request
            self.started.append(request.id)
            self._changed.notify_all()

    def statistics(self) -> EngineStatistics:
        return self.figures or super().statistics()

    def step(self) -> list[Event]:
        if self._hangs is not None:
            self._hangs.wait()
            self._hangs = None
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: any(self._scripts[i] for i in self.requests) or self._breaks, _STEP_SECONDS)
            if self._breaks:
                raise RuntimeError(self._breaks.popleft())
            events = [e for i in self.requests if self._scripts[i] for e in self._scripts[i].popleft()]
            for event in events:
                if not isinstance(event, Delta):
                    del self.requests[event.request_id]
            return events

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.requests.pop(request_id, None)

    def wait_for(self, job_id: str, patience: float) -> None:
        """Until this job runs, or has run."""
        self.wait_until(lambda: job_id in self.started, patience)

    def wait_until(self, condition: Callable[[], bool], patience: float) -> None:
        """Until this holds; looked at with every step."""
        with self._changed:
            assert self._changed.wait_for(condition, patience)

    def breaks(self, message: str = "broken") -> None:
        """The next step fails as a whole."""
        with self._changed:
            self._breaks.append(message)
            self._changed.notify_all()

    def writes(self, job_id: str, text: str = "hi") -> None:
        """Two steps that finish a job with this text, one token a character."""
        half = len(text) // 2
        first, second = (Delta(job_id, tuple(map(ord, piece)), piece) for piece in (text[:half], text[half:]))
        self._script(job_id, [first], [second, Finished(job_id, FinishReason.LENGTH, 3, len(text))])

    def says(self, job_id: str, *pieces: tuple[str, str], logprobs: bool = False) -> None:
        """A step for each piece: the characters whose numbers are its token ids, and the text that is shown with it."""
        for characters, text in pieces:
            ids = tuple(map(ord, characters))
            told = tuple(TokenLogprob(i, -0.5, ((i, -0.5), (0, -1.5))) for i in ids) if logprobs else ()
            self._script(job_id, [Delta(job_id, ids, text, 0, told)])

    def ends(self, job_id: str, tokens: int, reason: FinishReason = FinishReason.STOP, stop: str | None = None) -> None:
        """A step in which a job's text is over, with that many tokens."""
        self._script(job_id, [Finished(job_id, reason, 3, tokens, stop, cached_tokens=2)])

    def begins(self, job_id: str) -> None:
        """A step in which a job gets its first token."""
        self._script(job_id, [Delta(job_id, (1,), "x")])

    def hangs_until(self, event: threading.Event) -> None:
        """The next step takes until then."""
        self._hangs = event

    def fails(self, job_id: str) -> None:
        """A step in which a job fails by itself."""
        self._script(job_id, [Failed(job_id, "poison")])

    def _script(self, job_id: str, *steps: list[Event]) -> None:
        with self._changed:
            self._scripts[job_id].extend(steps)
            self._changed.notify_all()
