"""A chat whose client waits on an open connection: from its admission to what ends it, as typed events.

A handler that waits here holds a thread and no database connection. Whoever leaves last before the end cancels the request.
"""

from __future__ import annotations

import builtins
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

import structlog

from horde.admission.chat import ChatOrder
from horde.admission.keys import hash_key
from horde.errors import ErrorCode, HordeError, unavailable
from horde.lifecycle.attach import join, leave, let_go
from horde.lifecycle.cancel import Cancelled, cancel_if_due
from horde.lifecycle.words import CancelReason, Outcome, ResultState
from horde.registry.chat_tokenizer import ChatTokenizer
from horde.streams.hub import Follower
from horde.streams.output import Output, SlotOutput
from horde.usecases.chat_admission import Admitted, admit_chat
from horde.usecases.context import Context
from horde.usecases.pricing import pricing

log = structlog.get_logger(__name__)

KEEP_ALIVE_EVERY = 10.0
# How often a waiting handler asks whether its client is there and the process goes on; a hang-up that the server sees wakes it.
LOOK_EVERY = 1.0
NO_PLACE_RETRY = 5.0


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token as text and bytes, its natural logarithm of probability, and the likeliest ones at its place."""

    token: str
    bytes: builtins.bytes
    logprob: float
    top: list[tuple[str, builtins.bytes, float]]


@dataclass(frozen=True)
class KeepAlive:
    """Nothing came for a while."""


@dataclass(frozen=True)
class Delta:
    """New text of a slot; `tokens` where log-probabilities were asked for. Texts of a slot, joined, are its text."""

    slot: int
    text: str
    tokens: list[TokenLogprob] | None = None


@dataclass(frozen=True)
class Ended:
    """A slot has all it will have; counts are tokens."""

    slot: int
    finish_reason: str
    completion_tokens: int
    cached_tokens: int


Event = KeepAlive | Delta | Ended


def open_chat(context: Context, api_key: str, order: ChatOrder, *, client_gone: Callable[[], bool]) -> OpenChat:
    """Admit a chat that this connection will wait for; use the result as a context manager, or close it.

    Args:
        client_gone: whether the caller has hung up.

    Raises:
        HordeError: as `admit_chat`; 503 where too many connections wait already.
    """
    with ExitStack() as held:
        # No key alone keeps all others out, the anonymous one least of all.
        shares: dict[object, int] = {("key", hash_key(api_key)): max(2, context.places.most * 3 // 4)}
        if not held.enter_context(context.places.place(shares)):
            raise unavailable("As many streams are open here as may be; try again shortly.", retry_after=NO_PLACE_RETRY)
        admitted = _admit_or_join(context, api_key, order)
        chat = OpenChat(context, admitted, client_gone)
        held.callback(chat.leave)
        follower = held.enter_context(context.streams.follow(chat.id, admitted.n))
        tokenizer = context.tokenizers.load(context.database, admitted.tokenizer_revision)
        chat.begin(follower, tokenizer, held.pop_all())
    return chat


def _admit_or_join(context: Context, api_key: str, order: ChatOrder) -> Admitted:
    """A request of this order that this connection counts as waiting for, or one that has its end and is told again."""
    ended: uuid.UUID | None = None
    while True:
        admitted = admit_chat(context, api_key, order, attached=True)
        request_id = admitted.id
        assert request_id is not None, "no dry run"
        if not admitted.repeated or request_id == ended or context.database.run(partial(join, request_id=request_id)):
            return admitted
        # It has ended. If that is so since we looked, because its last client has just gone, the order is a fresh one.
        ended = request_id


class OpenChat:
    """One connection that waits for a request; several may wait for the same.

    Args:
        admitted: in the queue, or of an earlier call.
    """

    def __init__(self, context: Context, admitted: Admitted, client_gone: Callable[[], bool]) -> None:
        assert admitted.id is not None
        self.id: uuid.UUID = admitted.id
        self.created = admitted.created
        self.model = admitted.model
        self.model_revision = admitted.model_revision
        self.n = admitted.n
        self.prompt_tokens = admitted.prompt_tokens
        self.estimated = admitted.estimated
        self._context = context
        self._admitted = admitted
        self._shows_tokens = admitted.logprobs is not None
        self._tokenizer: ChatTokenizer | None = None
        self._client_gone = client_gone
        left = admitted.seconds_left
        self._deadline = None if left is None else time.monotonic() + left
        self._over = False
        self._follower: Follower | None = None
        self._held = ExitStack()

    def begin(self, follower: Follower, tokenizer: ChatTokenizer | None, held: ExitStack) -> None:
        """Take over what is held for this connection, to be let go when it closes.

        Args:
            tokenizer: shows tokens; None where the broker does not know it.
        """
        self._follower, self._held = follower, held
        self._tokenizer = tokenizer if self._shows_tokens else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of everything; cancels the request when nobody else waits for it and it has not ended."""
        self._held.close()

    def wake(self) -> None:
        """The client may have gone: look now. From any thread."""
        follower = self._follower
        if follower is not None:
            follower.wake()

    def events(self) -> Iterator[Event]:
        """What happens, in order, until every slot has ended; ends early and quietly when the client has gone.

        Raises:
            HordeError: the request ended otherwise; its code says how.
        """
        assert self._follower is not None, "events of a chat that was opened"
        ended: set[int] = set()
        heard = time.monotonic()
        while not self._client_gone():
            if self._context.streams.closed:
                raise unavailable("This broker is shutting down; try again.")
            self._end_at_deadline()
            output = self._follower.next(self._patience(heard))
            now = time.monotonic()
            if output is not None:
                for event in self._read(output, ended):
                    heard = now
                    yield event
                if len(ended) == self.n:
                    self._over = True
                    return
                self._raise_if_ended(output)
            elif now - heard >= KEEP_ALIVE_EVERY:
                heard = now
                yield KeepAlive()

    def leave(self) -> None:
        """Tell the request that one connection fewer waits for it."""
        if self._over:
            return
        try:
            if self._context.streams.closed:
                # A broker that shuts down leaves its requests attached for a moment: their clients may come back elsewhere.
                self._context.database.run(lambda tx: let_go(tx, self.id))
                return
            cancelled = self._context.database.run(lambda tx: leave(tx, self.id, pricing=pricing(self._context)))
        except HordeError as error:
            # Nobody renews the attachment any more, so maintenance ends the request in its stead.
            log.warning("chat.could_not_leave", error=error.message)
            return
        if cancelled:
            self._context.streams.announce([self.id])

    def _patience(self, heard: float) -> float:
        now = time.monotonic()
        until = min(now + LOOK_EVERY, heard + KEEP_ALIVE_EVERY)
        if self._deadline is not None:
            until = min(until, self._deadline)
        return max(0.0, until - now)

    def _end_at_deadline(self) -> None:
        """Maintenance would find it within seconds; who waits should not have to."""
        if self._deadline is None or time.monotonic() < self._deadline:
            return
        cancelled = self._context.database.run(
            lambda tx: cancel_if_due(tx, self.id, CancelReason.DEADLINE, pricing=pricing(self._context))
        )
        # The database's clock may be a moment behind ours.
        self._deadline = time.monotonic() + LOOK_EVERY if cancelled is Cancelled.NOT_DUE else None
        self._context.streams.announce([self.id])

    def _read(self, output: Output, ended: set[int]) -> Iterator[Event]:
        for slot in output.slots:
            if slot.idx in ended:
                continue
            tokens = self._shown(slot)
            if slot.text or tokens:
                yield Delta(slot.idx, slot.text, tokens)
            if slot.state == "stored" and output.outcome in {None, Outcome.COMPLETED}:
                ended.add(slot.idx)
                yield Ended(
                    slot.idx, finish_reason(slot.finish_reason, slot.result_state), slot.tokens, slot.cached_tokens or 0
                )

    def _shown(self, slot: SlotOutput) -> list[TokenLogprob] | None:
        if self._tokenizer is None or not slot.logprobs:
            return None
        return show_logprobs(self._tokenizer, slot.logprobs)

    def _raise_if_ended(self, output: Output) -> None:
        if output.gone or output.outcome not in {None, Outcome.COMPLETED}:
            self._over = True
            raise ending(output, self._admitted)


def show_logprobs(tokenizer: ChatTokenizer, entries: list[Any]) -> list[TokenLogprob]:
    """Entries as workers post them (`[id, logprob, [[id, logprob], ...]]`) with the tokens they are of."""
    return [
        TokenLogprob(
            *tokenizer.token(token_id), logprob, [(*tokenizer.token(other), likely) for other, likely in likeliest]
        )
        for token_id, logprob, likeliest in entries
    ]


def finish_reason(given: str | None, result_state: str | None) -> str:
    """Why a stored slot ended, by the closed list of finish reasons."""
    if result_state in {ResultState.CENSORED, ResultState.CSAM}:
        return "content_filter"
    return given if given in {"stop", "length", "tool_calls", "cancelled"} else "stop"


def ending(output: Output, admitted: Admitted) -> HordeError:
    """The error that tells a waiting client how its request ended without all its results."""
    match output.outcome:
        case Outcome.FAULTED:
            return _error(ErrorCode.GENERATION_FAULTED, "Two workers failed at this request.", "Faulted")
        case Outcome.REJECTED if output.error_code == ErrorCode.CONTEXT_LENGTH_EXCEEDED:
            message = (
                f"This model's maximum context length is {admitted.context_length} tokens, and its worker counted more than "
                f"that in the prompt (about {admitted.prompt_tokens} by our estimate) and max_tokens of "
                f"{admitted.max_new_tokens} together."
            )
            error = _error(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message, "TokenOverflow")
            error.errors = {admitted.content: "is too long for the model's context"}
            return error
        case Outcome.REJECTED:
            return _error(
                ErrorCode.UNSUPPORTED_PARAMETER, "The model cannot do what this request asks for.", "Rejected"
            )
        case Outcome.CANCELLED if output.outcome_reason == CancelReason.DEADLINE:
            return _error(ErrorCode.DEADLINE_EXCEEDED, "The request's deadline has passed.", "DeadlineExceeded")
        case Outcome.CANCELLED if output.outcome_reason == CancelReason.EXPIRED:
            message = "No worker took this request for as long as it may wait."
            return HordeError(ErrorCode.NO_CAPACITY, message, rc="Expired", retry_after=10)
        case _:
            return _error(ErrorCode.CANCELLED, "The request was cancelled.", "Cancelled")


def _error(code: ErrorCode, message: str, rc: str) -> HordeError:
    return HordeError(code, message, rc=rc)
