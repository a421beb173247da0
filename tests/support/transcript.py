"""What a client of `/v1` was told in one answer, read event by event and held to the shape that every stream has.

One id, moment and model throughout; the role first and once; no text behind a finish reason; one finish reason a choice; at
most one usage chunk, behind them; `[DONE]` last, and never beside an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.sse import Event


@dataclass
class Transcript:
    """An answer so far.

    Attributes:
        texts: choice -> its text.
        deltas: (arrival, choice, text) of every piece of text.
        finished: choice -> its finish reason.
        logprobs: choice -> its entries, chat's or those of a completion, in order.
        usage: of the usage chunk.
        error: of the error event.
        done: whether `[DONE]` came.
        comments: texts of the comments.
        chunks: every chunk as it came.
    """

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    deltas: list[tuple[float, int, str]] = field(default_factory=list)
    finished: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    comments: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    _roles: set[int] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.texts[0]

    @property
    def finish_reason(self) -> str | None:
        """The first choice's."""
        return self.finished.get(0)

    def read(self, events: Iterable[Event]) -> Transcript:
        """Take in what comes, to its end."""
        for event in events:
            self.add(event)
        return self

    def add(self, event: Event) -> None:
        """Take in one event; fails where it must not stand here."""
        if event.comment is not None:
            self.comments.append(event.comment)
            return
        assert not self.done, f"behind [DONE]: {event}"
        assert self.error is None, f"behind an error: {event}"
        if event.is_done:
            assert self.finished, "[DONE] without a finish reason"
            self.done = True
            return
        chunk = event.json()
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self._add_chunk(chunk, event.at)

    def _add_chunk(self, chunk: dict[str, Any], at: float) -> None:
        if self.chunks:
            for name in ("id", "created", "model", "object"):
                assert chunk[name] == self.chunks[0][name], f"{name} changed: {chunk}"
        self.chunks.append(chunk)
        assert self.usage is None, f"behind the usage: {chunk}"
        if not chunk["choices"]:
            assert chunk["usage"], f"a chunk without anything: {chunk}"
            self.usage = chunk["usage"]
        for choice in chunk["choices"]:
            self._add_choice(choice, at, is_chat=chunk["object"] == "chat.completion.chunk")

    def _add_choice(self, choice: dict[str, Any], at: float, *, is_chat: bool) -> None:
        index = choice["index"]
        assert index not in self.finished, f"behind the finish reason: {choice}"
        if is_chat:
            text = choice["delta"].get("content") or ""
            has_role = "role" in choice["delta"]
            assert has_role == (index not in self._roles), f"the role comes first and once: {choice}"
            self._roles.add(index)
        else:
            text = choice["text"]
        if text:
            self.texts[index] += text
            self.deltas.append((at, index, text))
        if choice.get("logprobs"):
            entries = choice["logprobs"]
            self.logprobs[index] += entries["content"] if is_chat else [entries]
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"], "a finish reason is never empty"
            self.finished[index] = choice["finish_reason"]
