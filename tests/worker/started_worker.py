"""A worker with a scripted engine, at work in a thread."""

from __future__ import annotations

import threading

from tests.worker.played_broker import PATIENCE, PlayedBroker
from tests.worker.scripted_engine import ScriptedEngine
from worker.backoff import Pace
from worker.broker import BrokerClient
from worker.loop import Worker
from worker.status import Status


class Started:
    """A worker in a thread of its own."""

    def __init__(self, broker: PlayedBroker, max_batch: int = 1, **pace: float) -> None:
        self.engine = ScriptedEngine(max_batch)
        self.status = Status()
        self.ready = threading.Event()
        self.result: str | None = None
        self.worker = Worker(
            self.engine,
            lambda: BrokerClient(broker.url, "key", "agent:1:x"),
            {"name": "w", "models": ["m"], "threads": max_batch, "wait": 1},
            status=self.status,
            on_ready=self.ready.set,
            pace=Pace(**{"first_retry": 0.02, "longest_retry": 0.1, "pause": 0.05, "progress": 0.05, **pace}),
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.result = self.worker.run()

    def stop(self) -> None:
        """A signal."""
        self.worker.stop()

    def ended(self) -> str | None:
        """Wait for the end; why it came."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.result

    def close(self) -> None:
        for _ in range(3):
            self.worker.stop()
        self._thread.join(PATIENCE)
        for thread in (self.worker._popper, self.worker._progress):
            thread.join(PATIENCE)
            assert not thread.is_alive()
