"""A PostgreSQL server and a broker for one benchmark: both fresh, both gone afterwards.

`synchronous_commit` is off for the whole server, so that broker and plain SQL are measured without waiting for the disk.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg2
import sqlalchemy as sa

from horde.db import migrate
from horde.db.database import Database, sqlalchemy_url
from horde.db.embedded import EmbeddedPostgres
from horde.usecases.accounts import CreatedUser, create_user

SETTINGS = {"synchronous_commit": "off", "shared_buffers": "512MB", "max_wal_size": "8GB"}
STOP_SECONDS = 40


@dataclass
class Postgres:
    """A server, and databases on it."""

    embedded: EmbeddedPostgres
    _names: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def version(self) -> str:
        """Of the programs it runs."""
        return str(self.embedded.binaries)

    def create_database(self, *, migrated: bool = True) -> str:
        """A fresh database; its SQLAlchemy URL."""
        name = f"bench{next(self._names)}"
        with contextlib.closing(psycopg2.connect(dsn(self.embedded.url))) as connection:
            connection.autocommit = True
            connection.cursor().execute(f'CREATE DATABASE "{name}"')
        url = sa.make_url(sqlalchemy_url(self.embedded.url)).set(database=name).render_as_string(hide_password=False)
        if migrated:
            migrate.upgrade(url)
        return url

    def drop_database(self, url: str) -> None:
        """Drop a database made here, to have its disk space back."""
        with contextlib.closing(psycopg2.connect(dsn(self.embedded.url))) as connection:
            connection.autocommit = True
            connection.cursor().execute(f'DROP DATABASE "{sa.make_url(url).database}" WITH (FORCE)')

    def program(self, name: str) -> Path | None:
        """A program that came with the server, or the one on PATH."""
        assert self.embedded.binaries is not None
        beside = self.embedded.binaries.program(name)
        if beside.exists():
            return beside
        found = shutil.which(name)
        return Path(found) if found else None


def dsn(url: str) -> str:
    """A SQLAlchemy URL as libpq takes it."""
    return sa.make_url(sqlalchemy_url(url)).set(drivername="postgresql").render_as_string(hide_password=False)


@contextlib.contextmanager
def open_postgres() -> Iterator[Postgres]:
    """A server in a temporary directory."""
    directory = Path(tempfile.mkdtemp(prefix="horde-bench-"))
    # Started by root it runs as somebody else, who has to get in.
    directory.chmod(0o755)
    try:
        with EmbeddedPostgres(directory, settings=SETTINGS) as embedded:
            yield Postgres(embedded)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(frozen=True)
class RunningBroker:
    """A broker in a process of its own."""

    url: str
    pid: int


@contextlib.contextmanager
def open_broker(database_url: str) -> Iterator[str]:
    """`horde serve` on a migrated database, without rate limits, in a process of its own; its URL."""
    with run_broker(database_url) as broker:
        yield broker.url


@contextlib.contextmanager
def run_broker(database_url: str) -> Iterator[RunningBroker]:
    """The same, with its process."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HORDE_")},
        "HORDE_DATABASE_URL": database_url,
        "HORDE_RATE_LIMITS": "off",
        "HORDE_LOG_LEVEL": "WARNING",
        "PYTHONUNBUFFERED": "1",
    }
    program = "from horde.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith("broker"):
            raise RuntimeError(f"the broker did not start: {line or 'it said nothing'}")
        yield RunningBroker(line.split()[1], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def make_users(database_url: str) -> tuple[CreatedUser, CreatedUser]:
    """A client and a workers' owner on a migrated database."""
    database = Database(database_url, pool=1)
    try:
        return create_user(database, "client", kudos=1000), create_user(database, "owner")
    finally:
        database.close()
