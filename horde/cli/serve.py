"""`horde serve`: a broker alone, on the database that HORDE_DATABASE_URL names; and the thread a broker runs in."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable

import click

from horde.cli.local import settings_with
from horde.cli.signals import StopSignals
from horde.settings import Settings

LOOK_SECONDS = 0.1
CANNOT_LISTEN = {errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL}


def cannot_listen(settings: Settings, error: OSError) -> click.ClickException:
    """The sentence for an address that can't be had."""
    return click.ClickException(
        f"The broker cannot listen at {settings.host}, port {settings.port} ({error.strerror}). Choose another --port "
        'or --host (`horde up --port 8000`, or `make run ARGS="--port 8000"`), or stop what listens there.'
    )


def check_address(settings: Settings) -> None:
    """Whether the broker could listen now, asked before anything is started that would have to be ended again.

    Raises:
        click.ClickException: it could not.
    """
    try:
        addresses = socket.getaddrinfo(
            settings.host or None, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise cannot_listen(settings, error) from error
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as probe:
                # As the broker itself does: what a broker has just left is free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            if error.errno in CANNOT_LISTEN:
                raise cannot_listen(settings, error) from error


class BrokerThread:
    """A broker with its maintenance, in a thread of this process; signals stay with the main thread."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.error: BaseException | None = None
        self._port = settings.port
        self._listens = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="broker")

    @property
    def url(self) -> str:
        """Where it answers from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.settings.host, self.settings.host)  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    def start(self, given_up: threading.Event) -> bool:
        """Start it and wait until it listens; False if `given_up` was set before.

        Raises:
            click.ClickException: it ended instead.
        """
        self._thread.start()
        while not self._listens.wait(LOOK_SECONDS):
            self.check()
            if given_up.is_set():
                return False
        return True

    def check(self) -> None:
        """Raise why it has ended, if it has without being told to.

        Raises:
            click.ClickException: the reason.
        """
        if self._thread.is_alive():
            return
        error = self.error
        if isinstance(error, OSError) and error.errno in CANNOT_LISTEN:
            raise cannot_listen(self.settings, error) from error
        raise click.ClickException(f"The broker ended: {error or 'no reason given'}") from error

    def stop(self) -> None:
        """Have it finish what it answers, and wait for it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # noqa: BLE001 the main thread reports it
            self.error = error

    def _serve(self) -> None:
        from horde.app import create_app
        from horde.serving import Server, serve

        def listens(server: Server) -> None:
            self._port = server.port
            self._listens.set()

        serve(create_app(self.settings), self.settings, stop=self._stop, on_ready=listens)


def listening_options(command: Callable[..., None]) -> Callable[..., None]:
    """`--host` and `--port`, as `up` and `serve` take them."""
    command = click.option("--port", type=click.IntRange(0, 65535), help="[default: $HORDE_PORT, else 7001]")(command)
    return click.option("--host", help="Address to listen on.  [default: $HORDE_HOST, else 127.0.0.1]")(command)


@click.command()
@listening_options
def serve(host: str | None, port: int | None) -> None:
    """Run a broker alone; its database is HORDE_DATABASE_URL."""
    settings = settings_with(host=host, port=port)
    if not settings.database_url:
        raise click.ClickException("HORDE_DATABASE_URL is not set. (`horde up` starts a PostgreSQL of its own.)")
    _require_migrated(settings.database_url)
    with StopSignals() as signals:
        broker = BrokerThread(settings)
        try:
            if broker.start(signals.stop):
                click.echo(f"broker  {broker.url}")
            while not signals.stop.wait(1.0):
                broker.check()
        finally:
            broker.stop()
    if broker.error is not None:
        broker.check()


def _require_migrated(url: str) -> None:
    from alembic.script import ScriptDirectory

    from horde.db import migrate

    current = migrate.current(url)
    wanted = ScriptDirectory.from_config(migrate.config(url)).get_current_head()
    if current != wanted:
        raise click.ClickException(
            f"The database stands at {current or 'nothing'}, this version needs {wanted}. Run `horde db upgrade`."
        )
