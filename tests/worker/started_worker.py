"""A worker with a scripted engine, at work in a thread."""

from __future__ import annotations

import threading
from typing import Any

from tests.worker.played_broker import PATIENCE, PlayedBroker
from tests.worker.scripted_engine import ScriptedEngine
from worker.backoff import Pace
from worker.broker import BrokerClient
from worker.engine.interface import Engine, RequestRefusedError
from worker.loop import Worker
from worker.manifest import Manifest
from worker.status import Status

MANIFESTS = {"m": Manifest("model 1", "tokenizer 1", 2048, 16, 128, 64).body()}


def render(messages: list[dict[str, Any]]) -> tuple[int, ...]:
    """What stands for a chat template."""
    if messages[0]["role"] != "user":
        raise RequestRefusedError("invalid_request", "a user speaks first")
    return tuple(ord(c) for message in messages for c in message["content"])


class Started:
    """A worker in a thread of its own; with `chat` it serves that too. Messages become the ids of what they say."""

    def __init__(
        self,
        broker: PlayedBroker,
        max_batch: int = 1,
        *,
        chat: bool = False,
        engine: Engine | None = None,
        **pace: float,
    ) -> None:
        self.engine: Any = engine or ScriptedEngine(max_batch)
        self.status = Status()
        self.ready = threading.Event()
        self.result: str | None = None
        self.worker = Worker(
            self.engine,
            lambda: BrokerClient(broker.url, "key", "agent:1:x"),
            {
                "name": "w",
                "models": ["m"],
                "threads": max_batch,
                "wait": 1,
                **({"manifests": MANIFESTS} if chat else {}),
            },
            status=self.status,
            on_ready=self.ready.set,
            render=render,
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
