"""Races staged on real connections: calls in threads of their own, started together, or stopped between two statements.

Every statement of the broker goes through `Transaction.execute`; a call in a `Stage` is hooked there, by its thread,
and nobody else notices. Whether a call waits for a lock is asked of the server, so nothing here sleeps and hopes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import psycopg2
import sqlalchemy as sa

from horde.db.database import DEADLOCK, Database, Rows, Transaction

T = TypeVar("T")

# Nothing staged here takes long; whoever waits for longer waits for something that will not come.
DEADLINE = 12.0

_here = threading.local()
_execute = Transaction.execute


class DidNotHappen(AssertionError):  # noqa: N818 reads as what it is in a test's report
    """A staged call ended, or took another way, before the moment the test waited for."""


class Deadlock(AssertionError):  # noqa: N818 reads as what it is in a test's report
    """Two transactions took their locks in different orders; a retry hides that from users, not from tests."""


class Call(Generic[T]):
    """A piece of work in a thread of its own.

    Args:
        work: what to do; its statements go through `Transaction.execute`.
        before: stop before the first statement that is this very text; `go_on` lets it run.
        after: the same, once the statement has been run.
        skip: how many such statements to let pass first.
        gate: a barrier to wait at with the first statement, connection in hand.
    """

    def __init__(
        self,
        work: Callable[[], T],
        *,
        before: str | None = None,
        after: str | None = None,
        skip: int = 0,
        gate: threading.Barrier | None = None,
    ) -> None:
        self._work, self._before, self._after, self._skip, self._gate = work, before, after, skip, gate
        self.statements: list[str] = []
        self.backend: int | None = None
        self.deadlocks = 0
        self._value: T | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._stopped = self._released = self._finished = False
        self._thread = threading.Thread(target=self._run, name="staged call", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let the call run past its stop point, now or when it gets there."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def stopped(self) -> Self:
        """Wait until the call stands at its stop point."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._finished, DEADLINE)
            if not self._stopped:
                raise DidNotHappen(f"never at its stop point; it ran {self.statements}") from self._error
        return self

    def blocked(self, monitor: Monitor) -> Self:
        """Wait until the server says that the call waits for a lock."""
        give_up = time.monotonic() + DEADLINE
        while not (self.backend and monitor.waits_for_a_lock(self.backend)):
            if self.finished or time.monotonic() > give_up:
                raise DidNotHappen(f"never waited for a lock; it ran {self.statements}") from self._error
        return self

    def blocked_or_finished(self, monitor: Monitor) -> bool:
        """Wait until the call either waits for a lock (True) or has ended (False)."""
        give_up = time.monotonic() + DEADLINE
        while not self.finished:
            if self.backend and monitor.waits_for_a_lock(self.backend):
                return True
            if time.monotonic() > give_up:
                raise DidNotHappen(f"neither ended nor waited for a lock; it ran {self.statements}")
        return False

    @property
    def finished(self) -> bool:
        """Whether the call has ended."""
        with self._changed:
            return self._finished

    def result(self) -> T:
        """What the call returned; raises what it raised."""
        self.go_on()
        self._thread.join(DEADLINE)
        if self._thread.is_alive():
            raise DidNotHappen(f"still running; it ran {self.statements}")
        if self.deadlocks:
            raise Deadlock(f"met a deadlock; it ran {self.statements}")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _run(self) -> None:
        _here.call = self
        try:
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001 raised again where the result is asked for
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _enter(self, tx: Transaction, statement: str) -> None:
        connection = tx.connection.connection.driver_connection
        assert connection is not None
        self.backend = connection.info.backend_pid
        if self._gate is not None and not self.statements:
            self._gate.wait(DEADLINE)
        self.statements.append(statement)
        if statement == self._before:
            self._stop()

    def _leave(self, statement: str) -> None:
        if statement == self._after:
            self._stop()

    def _stop(self) -> None:
        with self._changed:
            if self._skip:
                self._skip -= 1
                return
            self._stopped = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._released, DEADLINE):
                raise DidNotHappen("the test never let a stopped call go on")
            # Only once: whoever runs the same statement again goes through.
            self._before = self._after = None


def _execute_staged(self: Transaction, statement: str, parameters: Mapping[str, Any] | None = None) -> Rows:
    call: Call[Any] | None = getattr(_here, "call", None)
    if call is None:
        return _execute(self, statement, parameters)
    call._enter(self, statement)
    try:
        result = _execute(self, statement, parameters)
    except sa.exc.DBAPIError as error:
        call.deadlocks += getattr(error.orig, "pgcode", None) == DEADLOCK
        raise
    call._leave(statement)
    return result


Transaction.execute = _execute_staged  # type: ignore[method-assign]


class Monitor:
    """A connection outside the pool that asks the server who waits for a lock."""

    def __init__(self, db: Database) -> None:
        dsn = sa.make_url(db.url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._connection = psycopg2.connect(dsn)
        self._connection.autocommit = True
        self._cursor = self._connection.cursor()

    def waits_for_a_lock(self, backend: int) -> bool:
        """Whether this backend waits for a lock now."""
        self._cursor.execute("SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", (backend,))
        row = self._cursor.fetchone()
        return bool(row and row[0])

    def close(self) -> None:
        """Close the connection."""
        self._cursor.close()
        self._connection.close()


class Stage:
    """Calls on one database, and the means to order them; at its end every call has run out."""

    def __init__(self, db: Database) -> None:
        self.monitor = Monitor(db)
        self._calls: list[Call[Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for call in self._calls:
            call.go_on()
        for call in self._calls:
            call._thread.join(DEADLINE)
        self.monitor.close()

    def start(
        self, work: Callable[[], T], *, before: str | None = None, after: str | None = None, skip: int = 0
    ) -> Call[T]:
        """Start a call; see `Call` for the stop points."""
        call = Call(work, before=before, after=after, skip=skip)
        self._calls.append(call)
        return call

    def hold(
        self, work: Callable[[], T], *, before: str | None = None, after: str | None = None, skip: int = 0
    ) -> Call[T]:
        """Start a call and wait until it stands at its stop point."""
        return self.start(work, before=before, after=after, skip=skip).stopped()

    def blocked(self, work: Callable[[], T]) -> Call[T]:
        """Start a call and wait until it waits for a lock that another one holds."""
        return self.start(work).blocked(self.monitor)

    def in_order(self, first: Callable[[], Any], second: Callable[[], Any], *, after: str) -> tuple[Any, Any]:
        """The first call wins for sure: it is held behind `after`, locks in hand, until the second waits for them."""
        leading = self.hold(first, after=after)
        following = self.blocked(second)
        leading.go_on()
        return leading.result(), following.result()


def eventually(condition: Callable[[], bool], what: str = "it holds", *, within: float = DEADLINE) -> None:
    """Ask again and again until a condition holds that something else brings about; fails with `what` after `within` s."""
    give_up, pause = time.monotonic() + within, 0.001
    while not condition():
        if time.monotonic() > give_up:
            raise DidNotHappen(f"not within {within:.0f} s: {what}")
        # Whoever brings it about may be a thread here: one that only asks keeps the interpreter from it, 5 ms each time.
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def together(*works: Callable[[], Any], within: float = DEADLINE) -> list[Any]:
    """Run calls that start at the same moment, each with a connection in hand; their results, in the order given.

    The pool must hold a connection for each. Raises the first error of any, once all have ended.
    """
    gate = threading.Barrier(len(works))
    calls = [Call(work, gate=gate) for work in works]
    give_up = time.monotonic() + within
    for call in calls:
        call._thread.join(max(0.0, give_up - time.monotonic()))
    return [call.result() for call in calls]
