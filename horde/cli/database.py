"""`horde db`: bring a database to this version's tables, or say where it stands; and which database a command means."""

from __future__ import annotations

from pathlib import Path

import click

from horde.cli.local import data_dir_option, settings_with
from horde.settings import Settings


def find_database(settings: Settings) -> str:
    """`HORDE_DATABASE_URL`, else the server of the `horde up` that runs on the data directory.

    Raises:
        click.ClickException: neither is there.
    """
    if settings.database_url:
        return settings.database_url
    from horde.db.embedded import running_url

    url = running_url(settings.data_dir)
    if url is None:
        raise click.ClickException(
            f"No database: HORDE_DATABASE_URL is not set, and no `horde up` runs on {settings.data_dir} (--data-dir)."
        )
    return url


@click.group()
def db() -> None:
    """Migrations of the database (HORDE_DATABASE_URL, else the running `horde up`'s)."""


@db.command()
@data_dir_option
def upgrade(data_dir: Path | None) -> None:
    """Bring the database to this version's tables; nothing happens if it is there."""
    from horde.db import migrate

    url = find_database(settings_with(data_dir=data_dir))
    before = migrate.current(url)
    migrate.upgrade(url)
    after = migrate.current(url)
    click.echo(f"already at {after}" if before == after else f"{before or 'empty'} -> {after}")


@db.command()
@data_dir_option
def current(data_dir: Path | None) -> None:
    """Print the revision the database stands at."""
    from horde.db import migrate

    click.echo(migrate.current(find_database(settings_with(data_dir=data_dir))) or "empty")
