"""The one session scope of the broker.

Every statement of the broker runs through `Transaction.execute`. A transaction is READ COMMITTED, short, and does
no I/O besides the database. Errors of the database that a retry mends (deadlock, serialisation, a connection that
died before the commit was sent) are retried by `Database.run`; an outage is a `HordeError` 503.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import psycopg2
import sqlalchemy as sa
from sqlalchemy import exc

from horde.errors import HordeError, unavailable

T = TypeVar("T")

DEADLOCK, SERIALIZATION, LOCK_TIMEOUT, QUERY_CANCELED = "40P01", "40001", "55P03", "57014"
READ_ONLY, DISK_FULL, TOO_MANY_CONNECTIONS = "25006", "53100", "53300"
RETRIED = frozenset({DEADLOCK, SERIALIZATION})
UNAVAILABLE = frozenset(
    {LOCK_TIMEOUT, QUERY_CANCELED, READ_ONLY, DISK_FULL, TOO_MANY_CONNECTIONS, "57P01", "57P02", "57P03"}
)
ATTEMPTS = 3
# Seconds after which a prepared statement is planned again.
PLAN_AGE = 10.0


class Prepared(str):
    """A statement that each connection plans once: for those that run with every request.

    Every parameter's type must follow from where it stands, or from a cast.
    """

    @functools.cached_property
    def name(self) -> str:
        """Its name on the server."""
        return f"horde_{hashlib.sha256(self.encode()).hexdigest()[:16]}"

    @functools.cached_property
    def parts(self) -> tuple[str, str]:
        """The statement that prepares it and the one that executes it."""
        names = list(dict.fromkeys(_PARAMETER.findall(self)))
        body = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", self)
        arguments = ", ".join(f"%({name})s" for name in names)
        return f"PREPARE {self.name} AS {body}", f"EXECUTE {self.name}" + (f" ({arguments})" if names else "")


_PARAMETER = re.compile(r"%\((\w+)\)s")


class Rows(Sequence[Any]):
    """What a statement returned: rows whose columns are attributes, and how many rows it touched."""

    def __init__(self, rows: list[Any], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def all(self) -> list[Any]:
        """Every row."""
        return self._rows

    def one(self) -> Any:
        """The one row; raises LookupError when there is not exactly one."""
        if len(self._rows) != 1:
            raise LookupError(f"expected one row, got {len(self._rows)}")
        return self._rows[0]

    def one_or_none(self) -> Any:
        """The one row, or None; raises LookupError when there are more."""
        return self.one() if self._rows else None

    def scalars(self) -> list[Any]:
        """The first column."""
        return [row[0] for row in self._rows]

    def scalar_one(self) -> Any:
        """The one value."""
        return self.one()[0]

    def scalar_one_or_none(self) -> Any:
        """The one value, or None."""
        return self.one()[0] if self._rows else None


class Transaction:
    """A connection in a transaction (or in autocommit); statements are SQL strings with `%(name)s` parameters."""

    def __init__(self, connection: sa.Connection, *, autocommit: bool = False) -> None:
        self.connection = connection
        self._driver: Any = connection.connection.dbapi_connection
        self._begun = autocommit
        self._autocommit = autocommit

    def execute(self, statement: str, parameters: Mapping[str, Any] | None = None) -> Rows:
        """Run one statement; raises what SQLAlchemy raises, without the parameters, which may be somebody's prompt."""
        if isinstance(statement, Prepared):
            statement = self._prepare(statement)
        if not self._begun:
            # Sent with the first statement: a transaction costs one round trip less.
            self._begun = True
            statement = f"BEGIN; {statement}"
        return self._run(statement, parameters)

    def _run(self, statement: str, parameters: Mapping[str, Any] | None = None) -> Rows:
        # The driver's own cursor: SQLAlchemy's result machinery costs as much again as a short statement.
        cursor = self._driver.cursor()
        try:
            cursor.execute(statement, parameters or {})
            return Rows(_rows(statement, cursor), cursor.rowcount)
        except psycopg2.Error as error:
            raise self._wrapped(error, statement) from error
        finally:
            cursor.close()

    def _wrapped(self, error: psycopg2.Error, statement: str) -> BaseException:
        lost = bool(self._driver.closed)
        if lost:
            # The server went away: what lies in the pool is dead as well.
            self.connection.invalidate(error)
            self.connection.engine.dispose()
        return exc.DBAPIError.instance(
            statement,
            None,
            error,
            psycopg2.Error,
            hide_parameters=True,
            connection_invalidated=lost,
            dialect=self.connection.dialect,
        )

    def _prepare(self, statement: Prepared) -> str:
        planned: dict[str, float] = self.connection.connection.info.setdefault("planned", {})
        prepare, execute = statement.parts
        last, now = planned.get(statement.name), time.monotonic()
        if last is None or now - last > PLAN_AGE:
            if last is not None:
                # A cached plan does not see its tables grow; a fresh one looks at their size.
                self._run(f"DEALLOCATE {statement.name}")
                # Gone for good, whether or not the next statement succeeds.
                del planned[statement.name]
            self._run(prepare)
            planned[statement.name] = now
        return execute

    def commit(self) -> None:
        """Commit what was begun."""
        if self._begun and not self._autocommit:
            self._run("COMMIT")

    def roll_back(self) -> None:
        """Undo what was begun; a connection that cannot is closed."""
        if self._autocommit or not self._begun or self.connection.invalidated:
            return
        try:
            self._run("ROLLBACK")
        except exc.DBAPIError:
            self.connection.invalidate()


# Its names are known at run time only, which a type checker does not take from `namedtuple` itself.
_make_row_type: Callable[..., Any] = namedtuple  # noqa: PYI024
_row_types: dict[str, Callable[[Iterable[Any]], Any]] = {}


def _rows(statement: str, cursor: Any) -> list[Any]:
    """The rows as named tuples. Which names is looked up once per statement: reading them costs more than the row."""
    if cursor.description is None:
        return []
    make = _row_types.get(statement)
    if make is None:
        names = [column.name for column in cursor.description]
        row = _make_row_type("Row", names, rename=True)
        make = _row_types[statement] = row._make
    return [make(row) for row in cursor.fetchall()]


class Database:
    """An engine and its scopes.

    Args:
        url: `postgresql+psycopg2://...`; a plain `postgresql://` is taken as that.
        pool: connections kept by this process.
        pool_wait: seconds to wait for one of them before a 503.
        settings: server settings of every connection, e.g. `{"synchronous_commit": "off"}`.
    """

    def __init__(
        self, url: str, *, pool: int = 16, pool_wait: float = 5.0, settings: Mapping[str, str] | None = None
    ) -> None:
        self.url = sqlalchemy_url(url)
        guc = {
            "timezone": "UTC",
            # A handler that dies or stalls inside a transaction must not hold locks or the oldest snapshot.
            "idle_in_transaction_session_timeout": "15s",
            "statement_timeout": "30s",
            "jit": "off",
            # Tables here go from empty to a million rows within the life of a plan: never plan by today's size.
            "enable_seqscan": "off",
            "enable_bitmapscan": "off",
            # A `Prepared` statement is planned once per connection, not once per call.
            "plan_cache_mode": "force_generic_plan",
            **(settings or {}),
        }
        self.engine = sa.create_engine(
            self.url,
            pool_size=pool,
            max_overflow=0,
            pool_timeout=pool_wait,
            # `Transaction` leaves nothing to undo.
            pool_reset_on_return=None,
            pool_use_lifo=True,
            hide_parameters=True,
            # Transactions are begun and ended by `Transaction`: the driver's own BEGIN is a round trip of its own.
            isolation_level="AUTOCOMMIT",
            connect_args={
                "options": " ".join(f"-c {name}={_escaped(value)}" for name, value in guc.items()),
                "connect_timeout": 5,
                "application_name": "horde",
            },
        )

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """One READ COMMITTED transaction; commits at the end, rolls back when the block raises."""
        with _as_unavailable(), self.engine.connect() as connection:
            transaction = Transaction(connection)
            try:
                yield transaction
                transaction.commit()
            except BaseException:
                transaction.roll_back()
                raise

    @contextmanager
    def autocommit(self) -> Iterator[Transaction]:
        """Single statements, each its own transaction: saves round trips where one statement is all."""
        with _as_unavailable(), self.engine.connect() as connection:
            yield Transaction(connection, autocommit=True)

    def run(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction; again, in a fresh one, after a deadlock or a connection lost on the way."""
        return self._retry(work, self.transaction)

    def read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work`, which only reads, in autocommit; again after a lost connection."""
        return self._retry(work, self.autocommit, reads_only=True)

    def write_one(self, work: Callable[[Transaction], T]) -> T:
        """Run `work`, which writes with one statement, in autocommit; never again: a lost answer may hide a commit."""
        with self.autocommit() as transaction:
            return work(transaction)

    def _retry(
        self,
        work: Callable[[Transaction], T],
        scope: Callable[[], AbstractContextManager[Transaction]],
        *,
        reads_only: bool = False,
    ) -> T:
        for attempt in range(1, ATTEMPTS + 1):
            returned = False
            try:
                with scope() as transaction:
                    result = work(transaction)
                    returned = True
                    return result
            except _RetryError as retry:
                # A commit whose answer was lost may have happened; what never came to its commit has not.
                safe = retry.rolled_back or reads_only or not returned
                if attempt == ATTEMPTS or not safe:
                    raise unavailable() from retry.__cause__
                time.sleep(random.uniform(0.005, 0.05) * attempt)  # noqa: S311 jitter, not a secret
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()


class _RetryError(HordeError):
    """A database error that a fresh transaction may not meet again; a 503 where nobody retries."""

    def __init__(self, *, rolled_back: bool) -> None:
        error = unavailable()
        super().__init__(error.code, error.message, rc=error.rc, retry_after=error.retry_after)
        self.rolled_back = rolled_back


@contextmanager
def _as_unavailable() -> Iterator[None]:
    try:
        yield
    except exc.TimeoutError as error:
        raise unavailable("Every database connection is busy; try again shortly.") from error
    except exc.DBAPIError as error:
        code = getattr(error.orig, "pgcode", None)
        if code in RETRIED:
            raise _RetryError(rolled_back=True) from error
        if error.connection_invalidated or (
            code is None and isinstance(error, exc.OperationalError | exc.InterfaceError)
        ):
            raise _RetryError(rolled_back=False) from error
        if code in UNAVAILABLE:
            raise unavailable() from error
        raise


def _escaped(value: str) -> str:
    """A setting's value as libpq's `options` takes it: a space would end it."""
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def sqlalchemy_url(url: str) -> str:
    """`postgresql://` and `postgres://` as SQLAlchemy's psycopg2 URL."""
    for prefix in ("postgresql://", "postgres://"):
        if url.startswith(prefix):
            return "postgresql+psycopg2://" + url[len(prefix) :]
    return url
