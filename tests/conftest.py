"""Fixtures for every test: a PostgreSQL server per session, a migrated database per test, and the `needs` marker."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from horde.db.database import Database
from horde.db.embedded import liveness
from tests.support import needs
from tests.support.postgres import NoServerError, Server, choose_source, open_directory

# As `horde-worker` does before torch is imported: its threads would spin for cores that a broker beside them needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

LEFT_OUT = pytest.StashKey[dict[str, list[str]]]()
# A transaction open this long between two statements is stuck, not at work.
STUCK_SECONDS = 2.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(name): runs only where `name` (see tests/support/needs.py) is there")
    config.stash[LEFT_OUT] = {}
    try:
        needs.required(os.environ)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header(config: pytest.Config) -> str:
    try:
        return f"postgres: {choose_source(os.environ).description}"
    except NoServerError as error:
        return f"postgres: {error}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for name in marker.args:
            if name not in needs.PROBES:
                pytest.fail(f"unknown need {name!r}; known: {', '.join(needs.PROBES)}", pytrace=False)
            reason = needs.why_missing(name)
            if reason is None:
                continue
            if name in needs.required(os.environ):
                pytest.fail(f"HORDE_TEST_REQUIRE names {name}, and it is missing: {reason}", pytrace=False)
            item.config.stash[LEFT_OUT].setdefault(f"{name}: {reason}", []).append(item.nodeid)
            pytest.skip(f"needs {name}: {reason}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out:
        terminalreporter.section("left out")
        for reason, tests in sorted(left_out.items()):
            terminalreporter.line(f"{len(tests)} test{'s' if len(tests) > 1 else ''} without {reason}")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The session's server, with its migrated template."""
    try:
        source = choose_source(os.environ)
    except NoServerError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    with source.open() as url:
        found = Server(source, url)
        try:
            found.prepare()
            yield found
            assert_no_stuck_transaction(found)
        finally:
            found.close()


@pytest.fixture
def database_url(server: Server) -> Iterator[str]:
    """SQLAlchemy URL of a fresh, migrated database; dropped afterwards, after a look for a transaction left open."""
    url = server.create()
    try:
        yield url
        assert_no_stuck_transaction(server, url)
    finally:
        server.drop(url)


@pytest.fixture
def empty_database_url(server: Server) -> Iterator[str]:
    """SQLAlchemy URL of a database that no migration has touched."""
    url = server.create_empty()
    try:
        yield url
    finally:
        server.drop(url)


@pytest.fixture
def db(database_url: str) -> Iterator[Database]:
    """The broker's session scope over `database_url`."""
    database = Database(database_url)
    try:
        yield database
    finally:
        database.close()


@pytest.fixture
def data_dir() -> Iterator[Path]:
    """A directory for a server of the test's own, which an unprivileged account may enter."""
    with open_directory() as path:
        try:
            yield path
        finally:
            # A test that failed may have left its server running; on a directory that is about to go.
            for pid_file in path.rglob(liveness.PID_FILE):
                postmaster = liveness.read(pid_file.parent)
                if postmaster is not None and liveness.look(pid_file.parent) is liveness.State.OURS:
                    os.kill(postmaster.pid, signal.SIGQUIT)


def assert_no_stuck_transaction(server: Server, url: str | None = None) -> None:
    """Invariant I7: no connection stays idle in transaction."""
    if not server.idle_in_transaction(url):
        return
    # One that is between two statements moves on; only time tells it from a stuck one.
    deadline = time.monotonic() + STUCK_SECONDS + 1
    while time.monotonic() < deadline and server.idle_in_transaction(url):
        time.sleep(0.05)
    stuck = server.idle_in_transaction(url, seconds=STUCK_SECONDS)
    assert not stuck, f"left idle in transaction: {stuck}"
