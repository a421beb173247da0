"""`horde up`: PostgreSQL, broker and one worker on this machine, in the foreground, and in order down again."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from horde.cli.broker_client import BrokerClient, BrokerError
from horde.cli.local import (
    FIRST_USER,
    FirstUser,
    Running,
    data_dir_option,
    forget_running,
    read_first_user,
    read_running,
    settings_with,
    write_first_user,
    write_running,
)
from horde.cli.output import lasting_output
from horde.cli.serve import BrokerThread, check_address, listening_options
from horde.cli.signals import StopSignals
from horde.cli.worker_process import WorkerOptions, WorkerProcess
from horde.settings import Settings, default_data_dir

DEMO_MODEL = "SmolLM2-135M-Instruct"
FIRST_USER_NAME = "operator"
FIRST_USER_ROLES = ("admin", "moderator", "trusted")
PROMPT = "The capital of France is"
LOOK_SECONDS = 0.2


@click.command()
@listening_options
@data_dir_option
@click.option("--no-worker", is_flag=True, help="Broker and PostgreSQL only.")
@click.option("--model", default=DEMO_MODEL, show_default=True, help="What the worker serves: a name or a directory.")
def up(host: str | None, port: int | None, data_dir: Path | None, no_worker: bool, model: str) -> None:
    """Start PostgreSQL, a broker and a worker here; Ctrl-C ends all of it, and the data stay."""
    settings = settings_with(host=host, port=port, data_dir=data_dir)
    settings = settings.model_copy(update={"data_dir": settings.data_dir.absolute()})
    if "log_level" not in settings.model_fields_set:
        # What matters to a person at this terminal is said here; the broker's log is for who runs one for others.
        settings = settings.model_copy(update={"log_level": "WARNING"})
    with lasting_output(), StopSignals() as signals:
        _House(settings, None if no_worker else model, signals).live()
        _say("All ended.")


class _House:
    """Everything that runs, each started after what it needs and ended before it."""

    def __init__(self, settings: Settings, model: str | None, signals: StopSignals) -> None:
        from horde.db.embedded import EmbeddedPostgres

        self.settings = settings
        self.model = model
        self.signals = signals
        self.postgres = None if settings.database_url else EmbeddedPostgres(settings.data_dir)
        self.worker: WorkerProcess | None = None
        self.ends = ExitStack()

    def live(self) -> None:
        """Start all, stay until a signal or a failure, end all in the opposite order."""
        if read_running(self.settings.data_dir) is None:
            check_address(self.settings)
        with self.ends:
            self._open_database()
            self._migrate()
            broker = BrokerThread(self.settings)
            if not self._start_broker(broker):
                return
            user = self._first_user(broker.url)
            if self.model is not None:
                self._start_worker(self.model, broker.url, user)
            self._stay(broker, user)

    def _open_database(self) -> None:
        from horde.db.embedded import directories

        if self.postgres is None:
            directories.make_directory(self.settings.data_dir)
            self.ends.callback(os.close, directories.lock(self.settings.data_dir / "lock"))
            _say("PostgreSQL  the one of HORDE_DATABASE_URL")
            return
        _say(f"PostgreSQL  starting, data in {self.settings.data_dir}")
        url = self.postgres.start()
        self.ends.callback(_end, "PostgreSQL", self.postgres.stop)
        self.settings = self.settings.model_copy(update={"database_url": url})
        _say(f"PostgreSQL  up: {self.postgres.binaries}")

    def _migrate(self) -> None:
        from horde.db import migrate

        url = self.settings.database_url
        assert url is not None
        before = migrate.current(url)
        migrate.upgrade(url)
        after = migrate.current(url)
        if before != after:
            _say(f"PostgreSQL  tables brought from {before or 'nothing'} to {after}")

    def _start_broker(self, broker: BrokerThread) -> bool:
        if self.signals.stop.is_set():
            return False
        self.ends.callback(_end, "broker", broker.stop)
        if not broker.start(self.signals.stop):
            return False
        write_running(self.settings.data_dir, Running(os.getpid(), broker.url))
        self.ends.callback(forget_running, self.settings.data_dir)
        _say(f"broker      up at {broker.url}")
        return True

    def _first_user(self, url: str) -> FirstUser:
        """The account of this directory, made at its first start, and again if the database no longer knows it."""
        known = read_first_user(self.settings.data_dir)
        if known is not None:
            try:
                with BrokerClient(url, known.api_key) as client:
                    client.get("find_user")
            except BrokerError as error:
                if error.status not in {401, 404}:
                    raise
            else:
                return known
        from horde.db.database import Database
        from horde.usecases.accounts import create_user

        assert self.settings.database_url is not None
        database = Database(self.settings.database_url, pool=2)
        try:
            made = create_user(database, FIRST_USER_NAME, FIRST_USER_ROLES, 0)
        finally:
            database.close()
        user = FirstUser(id=made.id, alias=made.alias, api_key=made.api_key)
        write_first_user(self.settings.data_dir, user)
        return user

    def _start_worker(self, model: str, url: str, user: FirstUser) -> None:
        # A name belongs to one account of a broker for good: another database's first user needs another name.
        name = f"{socket.gethostname()[:60]}-{user.id}"
        options = WorkerOptions(broker=url, api_key=user.api_key, name=name, model=model)
        _say(f"worker      {name} loads {model}")
        self.worker = WorkerProcess(options, lambda line: _say(f"worker    | {line}"))
        self.ends.callback(_end_worker, self.worker, self.signals)

    def _stay(self, broker: BrokerThread, user: FirstUser) -> None:
        introduced = ended = False
        while True:
            if not introduced and (self.worker is None or self.worker.announced.is_set()):
                introduced = True
                self._introduce(broker.url, user)
            if self.signals.stop.wait(LOOK_SECONDS):
                _say("Ending all (jobs that run are finished; Ctrl-C again hands them back)")
                return
            broker.check()
            if self.postgres is not None and self.postgres.revive():
                _say("PostgreSQL  had ended by itself; it is up again")
            if self.worker is not None and not ended and self.worker.wait(0):
                ended = True
                self._lose_worker(self.worker)

    def _lose_worker(self, worker: WorkerProcess) -> None:
        reason = _reason(worker.status or 0)
        if not worker.announced.is_set():
            raise click.ClickException(
                f"The worker could not begin ({reason}); its lines above say why. Choose another --model, or start "
                "without one: --no-worker."
            )
        _say(f"worker      ended ({reason}); the broker goes on without it")

    def _introduce(self, url: str, user: FirstUser) -> None:
        horde = shlex.quote(sys.argv[0])
        if self.settings.data_dir != default_data_dir():
            ask = f"{horde} ask --data-dir {shlex.quote(str(self.settings.data_dir))}"
        else:
            ask = f"{horde} ask"
        ask += f" --max-length 20 {shlex.quote(PROMPT)}"
        curl = (
            f"curl -s {url}/api/v2/generate/text/async -H 'apikey: {user.api_key}' -H 'Content-Type: application/json' "
            f"""-d '{{"prompt": "{PROMPT}", "params": {{"max_length": 20, "temperature": 0.7}}}}'"""
        )
        # Straight through, a token at a time; any OpenAI SDK does the same.
        chat = (
            f"curl -sN {url}/v1/chat/completions -H 'Authorization: Bearer {user.api_key}' "
            f"""-H 'Content-Type: application/json' -d '{{"model": "{self.model or DEMO_MODEL}", "stream": true, """
            f""""messages": [{{"role": "user", "content": "Tell me about bees."}}]}}'"""
        )
        invitation = ["  Ask it something:"]
        if self.worker is None:
            program = shlex.quote(_beside(sys.argv[0], "horde-worker"))
            options = f"run --broker {url} --name my-worker --model {DEMO_MODEL}"
            invitation = [
                "  Nobody answers until a worker is there. To start one:",
                f"    HORDE_WORKER_API_KEY={user.api_key} {program} {options}",
                "  Then ask it something:",
            ]
        _say(
            "\n".join(
                (
                    "",
                    f"  broker      {url}  (its API to try out: {url}/api)",
                    f"  database    {self.postgres.root if self.postgres else 'HORDE_DATABASE_URL'}",
                    f"  worker      {f'one, serving {self.model}' if self.worker else 'none'}",
                    f"  API key     {user.api_key}  (of {user.alias}; kept in {self.settings.data_dir / FIRST_USER})",
                    "",
                    *invitation,
                    f"    {ask}",
                    f"    {curl}",
                    f"    curl -s {url}/api/v2/generate/text/status/ID   # ID: what the line above answered",
                    "",
                    f"  Chat with it (OpenAI's API; the base URL for any SDK or app is {url}/v1):",
                    f"    {chat}",
                    "",
                    "  Ctrl-C ends all of it; the data stay.",
                    "",
                )
            )
        )


def _end(name: str, stop: Callable[[], None]) -> None:
    try:
        _say(f"{name:<11} ending")
    finally:
        stop()


def _end_worker(worker: WorkerProcess, signals: StopSignals) -> None:
    """Ask once; each further signal to us hurries it: hand the jobs back, then end at once."""
    if worker.status is not None:
        return
    _say("worker      ending")
    worker.ask_to_stop()
    hurried, seen = 0, signals.count
    while not worker.wait(LOOK_SECONDS):
        if signals.count > seen:
            seen = signals.count
            hurried += 1
            if hurried == 1:
                _say("worker      handing its jobs back")
                worker.ask_to_stop()
            else:
                worker.kill()


def _reason(status: int) -> str:
    return f"status {status}" if status >= 0 else f"signal {-status}"


def _beside(program: str, other: str) -> str:
    """How to call `other`, which was installed where `program` was."""
    return str(Path(program).with_name(other)) if os.sep in program else other


def _say(line: str) -> None:
    # One write: the worker's lines come from another thread.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
