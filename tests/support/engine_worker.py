"""A whole worker on the paged engine with a tiny model, in threads of this process, against a running broker.

It is what `horde-worker run` makes, but for its model, which is random and whose tokens are bytes, and for two things that
a test holds in its hands: the line to the broker, which can be cut and mended, and how far the engine goes.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import torch

from tests.support.relay import Relay
from tests.worker.tiny_model import make_tiny_model
from worker.backoff import Pace
from worker.broker import BrokerClient
from worker.chat_template import render
from worker.engine.interface import Delta, EngineStatistics, Event
from worker.engine.paged import PagedEngine
from worker.loop import Worker
from worker.manifest import PROBE_PROMPT, describe, run_probe
from worker.models.loaded import LoadedModel
from worker.models.revision import tokenizer_body, tokenizer_revision
from worker.publishing import Publication, Publisher
from worker.status import Status

MODEL, MODEL_REVISION = "tiny-llama", "random-weights-0"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PATIENCE = 30.0
_AGENT = "Horde Worker:1:tests"
_CACHE_BYTES = 1 << 22


def chat_model(dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The tiny model with a chat template; the same weights each time."""
    loaded = make_tiny_model()
    loaded.tokenizer.chat_template = TEMPLATE
    loaded.model.to(dtype)
    return loaded


class HeldEngine(PagedEngine):
    """A paged engine that stands still where it is told to; it holds what it has, and goes on as if nothing had been."""

    def __init__(self, loaded: LoadedModel, **options: Any) -> None:
        super().__init__(loaded, **options)
        self._changed = threading.Condition()
        self._made = 0
        self._hold_at: int | None = None

    def hold_after(self, tokens: int | None) -> None:
        """Make so many tokens more, of all requests together, or in the step that makes them a few beyond; None: go on."""
        with self._changed:
            self._hold_at = None if tokens is None else self._made + tokens
            self._changed.notify_all()

    @property
    def is_held(self) -> bool:
        """Whether it stands, and so makes nothing more."""
        with self._changed:
            return self._stands()

    def step(self) -> list[Event]:
        """See `Engine.step`; while it stands there are no events."""
        with self._changed:
            if self._stands():
                self._changed.wait(0.005)
                return []
        events = super().step()
        with self._changed:
            self._made += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        return events

    def _stands(self) -> bool:
        return self._hold_at is not None and self._made >= self._hold_at


class _Line(Relay):
    """The way to a broker."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"


class EngineWorker:
    """A worker that serves `MODEL`; as a context manager it has been answered by the broker, and ends with the context.

    Args:
        url: the broker's.
        key: its owner's; a trusted one's publishes the tokenizer.
        dtype: of the weights.
    """

    def __init__(
        self,
        url: str,
        key: str,
        name: str = "engine worker",
        *,
        dtype: torch.dtype = torch.float32,
        max_batch: int = 8,
    ) -> None:
        self.name = name
        self.loaded = chat_model(dtype)
        self.engine = HeldEngine(self.loaded, max_batch=max_batch, cache_memory=_CACHE_BYTES)
        self.status = Status()
        self._line = _Line(url)
        self._is_cut_off = False
        self._key = key
        self._ready = threading.Event()
        self._worker: Worker | None = None
        self._thread = threading.Thread(target=self._run, name=name)
        self.fatal: str | None = None

    def __enter__(self) -> Self:
        self._line.__enter__()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def figures(self) -> EngineStatistics:
        """Of the engine, as the worker saw them last."""
        return self.status.snapshot().engine

    def cut_off(self) -> None:
        """Nothing that it says reaches the broker from now on, as when its machine has lost its power."""
        self._is_cut_off = True
        self._line.cut()

    def mend(self) -> None:
        """It reaches the broker again."""
        self._is_cut_off = False
        self._line.restore()

    def close(self) -> None:
        """End it; what runs is handed back, unless the broker has given it away already."""
        if self._is_cut_off:
            # Else it would try for a while to tell how its jobs ended.
            self.mend()
        if self._worker is not None:
            for _ in range(3):
                self._worker.stop()
            for thread in (self._thread, self._worker._popper, self._worker._progress):
                thread.join(PATIENCE)
                assert not thread.is_alive(), f"{thread.name} does not end"
            self.engine.check()
        self._line.__exit__(None, None, None)

    def _begin(self) -> None:
        tokenizer = tokenizer_body(self.loaded.tokenizer)
        manifest = describe(
            self.engine, model_revision=MODEL_REVISION, tokenizer_revision=tokenizer_revision(tokenizer)
        )
        prompt = [int(i) for i in self.loaded.tokenizer(PROBE_PROMPT).input_ids]
        probe = run_probe(self.engine, PROBE_PROMPT, prompt)
        # Its thread is not needed: there is nothing else to do meanwhile.
        Publisher(self._client(), Publication(MODEL, manifest, tokenizer, self.loaded.context_length, probe)).run()
        self._worker = Worker(
            self.engine,
            self._client,
            {
                "name": self.name,
                "models": [MODEL],
                "max_length": self.engine.context_length // 2,
                "max_context_length": self.engine.context_length,
                "threads": self.engine.max_batch,
                "bridge_agent": _AGENT,
                "wait": 1,
                "manifests": {MODEL: manifest.body()},
            },
            status=self.status,
            on_ready=self._ready.set,
            render=lambda messages: render(self.loaded.tokenizer, messages),
            pace=Pace(first_retry=0.02, longest_retry=0.1, shortest_round=0.2, stream=0.02, progress=0.2),
        )
        self._thread.start()
        assert self._ready.wait(PATIENCE), "the broker never answered"

    def _client(self) -> BrokerClient:
        return BrokerClient(self._line.url, self._key, _AGENT)

    def _run(self) -> None:
        assert self._worker is not None
        self.fatal = self._worker.run()
