"""One PostgreSQL server per data directory: made on first use, started, found again after a crash, stopped.

It listens on a unix socket in a directory only its user may enter, which is why connections need no password. Commits
are durable: fsync stays on. The server outlives a killed owner on purpose; the next start takes it over.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import psycopg2
import sqlalchemy as sa

from horde.db.embedded import binaries as programs
from horde.db.embedded import directories, liveness
from horde.db.embedded.binaries import Binaries
from horde.db.embedded.errors import EmbeddedPostgresError
from horde.db.embedded.liveness import State
from horde.db.embedded.privileges import INSTEAD, Account, choose_account

SUPERUSER = DATABASE = "horde"
PORT = 5432
# The kernel's limit for a unix socket's path, less the NUL.
SOCKET_PATH_LIMIT = 107
PATIENCE_SECONDS = 300
RETRY_SECONDS = 0.1
LOG_LIMIT = 10 * 1024 * 1024
# What a server says that has to wait for the last processes of a killed one.
STILL_ENDING = ("is still in use", "already exists", "another postmaster")

DEFAULTS = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "fsync": "on",
    "max_connections": "200",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] ",
}


class EmbeddedPostgres:
    """The server of one data directory; a context manager.

    Args:
        data_dir: made if missing; the cluster lies in `postgres/` below it.
        settings: server settings on top of `DEFAULTS`. Only tests that don't test durability may lower it here.
        binaries: programs to use instead of the ones `binaries.choose` finds.
    """

    def __init__(
        self, data_dir: Path, *, settings: Mapping[str, str] | None = None, binaries: Binaries | None = None
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.root = self.data_dir / "postgres"
        self.data = self.root / "data"
        self.log = self.root / "server.log"
        self.settings = {**DEFAULTS, **(settings or {})}
        self.binaries = binaries
        self._account: Account | None = None
        self._lock: int | None = None
        self._url: str | None = None

    @property
    def url(self) -> str:
        """SQLAlchemy URL of the database `horde`; only while started."""
        if self._url is None:
            raise EmbeddedPostgresError("The embedded PostgreSQL is not running.")
        return self._url

    def start(self) -> str:
        """Start the server, or take over one whose owner was killed, and answer its `url`.

        Raises:
            EmbeddedPostgresError: another process uses this directory, or the server can't be started; says why.
        """
        if self._url is not None:
            return self._url
        try:
            directories.make_directory(self.data_dir)
            self._lock = directories.lock(self.data_dir / "lock")
            account = self._account = choose_account(self.data if self.data.exists() else self.root)
            self._prepare_root(account)
            if self.binaries is None:
                self.binaries = programs.choose(self.data)
            self.binaries = programs.executable_by(self.binaries, account, self.data_dir)
            self._check_major(self.binaries)
            self._initialise(account, self.binaries)
            self._run(account, self.binaries)
            self._url = self._make_database()
        except (OSError, psycopg2.Error) as error:
            self._unlock()
            raise EmbeddedPostgresError(f"PostgreSQL in {self.data_dir} could not be started: {error}") from error
        except BaseException:
            self._unlock()
            raise
        return self._url

    def revive(self) -> bool:
        """Start the server again if it has ended without `stop`; whether it had. The URL stays the same.

        Raises:
            EmbeddedPostgresError: it can't be started again.
        """
        if self._url is None or self._account is None or self.binaries is None:
            return False
        if liveness.look(self.data) in {State.OURS, State.UNKNOWN}:
            return False
        self._run(self._account, self.binaries)
        return True

    def stop(self) -> None:
        """End the server: clients are cut off, everything committed is on disk. Nothing happens if it isn't running.

        Raises:
            EmbeddedPostgresError: it did not end.
        """
        self._url = None
        try:
            # pg_ctl would signal whoever has the pid by now.
            if self._account is not None and self.binaries is not None and liveness.look(self.data) is State.OURS:
                done = self._pg_ctl(self._account, self.binaries, "stop", "-m", "fast")
                if done != 0 and liveness.look(self.data) is State.OURS:
                    raise EmbeddedPostgresError(f"PostgreSQL in {self.data_dir} did not stop.\n{self._log_tail(0)}")
        finally:
            self._unlock()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _prepare_root(self, account: Account) -> None:
        if not self.root.exists():
            self.root.mkdir(mode=0o700)
            if account.switch:
                os.chown(self.root, account.uid, account.gid, follow_symlinks=False)
        if not account.may_enter(self.root):
            closed = next((p for p in reversed(self.root.parents) if not account.may_traverse(p)), self.root)
            raise EmbeddedPostgresError(
                f"PostgreSQL runs as the user {account.name}, who may not enter {closed}. "
                f"Choose a data directory outside it (--data-dir), start as an ordinary user, {INSTEAD}."
            )

    def _check_major(self, binaries: Binaries) -> None:
        major = programs.cluster_major(self.data)
        if major is not None and major != binaries.major:
            raise EmbeddedPostgresError(
                f"The data in {self.data} were written by PostgreSQL {major}, which {binaries} cannot open."
            )

    def _initialise(self, account: Account, binaries: Binaries) -> None:
        if programs.cluster_major(self.data) is not None:
            return
        if self.data.exists() and any(self.data.iterdir()):
            raise EmbeddedPostgresError(
                f"{self.data} is not empty and holds no PostgreSQL data. "
                "Move it away, or choose another data directory."
            )
        # Made aside and renamed, so that an initdb that was killed leaves nothing that looks like a cluster.
        unfinished = self.root / "data.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        done = account.run(
            [
                binaries.program("initdb"),
                f"--pgdata={unfinished}",
                f"--username={SUPERUSER}",
                "--encoding=UTF8",
                "--no-locale",
                "--auth-local=trust",
                "--auth-host=reject",
                "--data-checksums",
            ]
        )
        if done.returncode != 0:
            raise EmbeddedPostgresError(f"initdb failed in {self.root}:\n{done.stdout}{done.stderr}".rstrip())
        with (unfinished / "postgresql.conf").open(encoding="utf-8") as file:
            configuration = file.read()
        account.write(
            unfinished / "postgresql.conf",
            f"{configuration}\n# Written anew at each start; settings below this line override it.\n"
            "include_if_exists = 'horde.conf'\n",
        )
        if self.data.exists():
            self.data.rmdir()
        unfinished.rename(self.data)
        directories.sync_directory(self.root)

    def _run(self, account: Account, binaries: Binaries) -> None:
        """Bring the server to the point where it answers, whatever the last one left behind."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            state = liveness.look(self.data)
            if state is State.OURS:
                if _answers(self.data):
                    return
                said = "it runs and does not answer"
                _wait_for_exit(self.data, RETRY_SECONDS)
            else:
                said = self._start_once(account, binaries, state)
                if not said:
                    return
                if not any(mark in said for mark in STILL_ENDING):
                    raise EmbeddedPostgresError(f"PostgreSQL did not start in {self.data_dir}:\n{said}")
                # Nothing tells us when the last backend of a killed server is gone but asking again.
                time.sleep(RETRY_SECONDS)
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(f"PostgreSQL did not start in {self.data_dir}: {said}")

    def _start_once(self, account: Account, binaries: Binaries, state: State) -> str:
        """One pg_ctl start; answers "" or what the server said instead of starting."""
        sockets = self._socket_directory(account)
        if state in {State.DEAD, State.STRANGER}:
            # Shared memory is still guarded without these: its key is the data directory's inode.
            for stale in (self.data / liveness.PID_FILE, sockets / f".s.PGSQL.{PORT}.lock"):
                stale.unlink(missing_ok=True)
        account.write(
            self.data / "horde.conf",
            "".join(
                f"{name} = '{_quoted(value)}'\n"
                for name, value in {**self.settings, "unix_socket_directories": _list_item(str(sockets))}.items()
            ),
        )
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > LOG_LIMIT:
                self.log.replace(self.log.with_suffix(".log.1"))
        size = self.log.stat().st_size if self.log.exists() else 0
        if self._pg_ctl(account, binaries, "start", "-l", self.log.name) == 0:
            return ""
        return self._log_tail(size) or "it said nothing; see " + str(self.log)

    def _pg_ctl(self, account: Account, binaries: Binaries, *arguments: str) -> int:
        # pg_ctl builds a shell command from what it is given: by environment and cwd no path needs quoting.
        return account.run(
            [binaries.program("pg_ctl"), *arguments, "-w", "-t", str(PATIENCE_SECONDS)],
            cwd=self.root,
            environment={"PGDATA": str(self.data)},
        ).returncode

    def _socket_directory(self, account: Account) -> Path:
        """A directory of the account's alone whose socket path is short enough; the last one if possible."""
        near = self.root / "socket"
        if len(os.fsencode(near / f".s.PGSQL.{PORT}.lock")) <= SOCKET_PATH_LIMIT:
            if not near.exists():
                near.mkdir(mode=0o700)
                directories.give(near, account)
            return near
        note = self.root / "socket-directory"
        if note.exists():
            known = Path(note.read_text(encoding="utf-8"))
            if directories.is_private(known, account):
                return known
        # A private directory of random name; not below $TMPDIR, which may be long too.
        made = Path(tempfile.mkdtemp(prefix="horde-", dir="/tmp"))
        directories.give(made, account)
        account.write(note, str(made))
        return made

    def _make_database(self) -> str:
        with contextlib.closing(psycopg2.connect(_dsn(self.data, "postgres"))) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,))
                if cursor.fetchone() is None:
                    cursor.execute(f"CREATE DATABASE {DATABASE}")
        url = running_url(self.data_dir)
        if url is None:
            raise EmbeddedPostgresError(f"PostgreSQL in {self.data_dir} ended right after its start; see {self.log}.")
        return url

    def _log_tail(self, offset: int, lines: int = 15) -> str:
        try:
            with self.log.open("rb") as file:
                file.seek(offset)
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def running_url(data_dir: Path) -> str | None:
    """SQLAlchemy URL of the server that runs on `data_dir` now, or None where none is ready.

    Raises:
        EmbeddedPostgresError: the directory belongs to another user.
    """
    data = data_dir.absolute() / "postgres" / "data"
    try:
        if liveness.look(data) not in {State.OURS, State.UNKNOWN}:
            return None
        postmaster = liveness.read(data)
    except PermissionError as error:
        raise EmbeddedPostgresError(f"{error.filename} is closed to this user: use the one that started it.") from error
    if postmaster is None or not postmaster.ready:
        return None
    return sa.URL.create(
        "postgresql+psycopg2",
        username=SUPERUSER,
        database=DATABASE,
        query={"host": postmaster.socket_directory or "", "port": str(postmaster.port or PORT)},
    ).render_as_string(hide_password=False)


def _dsn(data: Path, database: str) -> str:
    postmaster = liveness.read(data)
    if postmaster is None or not postmaster.socket_directory:
        raise EmbeddedPostgresError(f"The server in {data} has ended.")
    return psycopg2.extensions.make_dsn(
        host=postmaster.socket_directory,
        port=postmaster.port or PORT,
        user=SUPERUSER,
        dbname=database,
        connect_timeout=10,
    )


def _answers(data: Path) -> bool:
    postmaster = liveness.read(data)
    if postmaster is None or not postmaster.ready:
        return False
    try:
        psycopg2.connect(_dsn(data, "postgres")).close()
    except psycopg2.OperationalError:
        return False
    return True


def _wait_for_exit(data: Path, seconds: float) -> None:
    """Wait until the postmaster ends, but no longer than `seconds`: it may as well become ready meanwhile."""
    postmaster = liveness.read(data)
    if postmaster is None:
        return
    try:
        handle = os.pidfd_open(postmaster.pid)
    except OSError:
        return
    try:
        select.select([handle], [], [], seconds)
    finally:
        os.close(handle)


def _list_item(path: str) -> str:
    """One entry of a comma-separated setting: quoted, since a path may hold a comma."""
    return '"' + path.replace('"', '""') + '"'


def _quoted(value: str) -> str:
    """A value inside single quotes in postgresql.conf, where a backslash escapes too."""
    return value.replace("\\", "\\\\").replace("'", "''")
