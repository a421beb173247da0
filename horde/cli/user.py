"""`horde user`: accounts, made by whoever can reach the database."""

from __future__ import annotations

import json
from pathlib import Path

import click

from horde.cli.database import find_database
from horde.cli.local import data_dir_option, settings_with

ROLES = ("trusted", "moderator", "admin")


@click.group()
def user() -> None:
    """Accounts (in HORDE_DATABASE_URL, else the running `horde up`'s database)."""


@user.command()
@click.argument("name")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, help="May be given several times.")
@click.option("--kudos", type=click.IntRange(min=0), default=0, show_default=True, help="Kudos to start with.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: id, username, alias, api_key.")
@data_dir_option
def create(name: str, roles: tuple[str, ...], kudos: int, as_json: bool, data_dir: Path | None) -> None:
    """Make an account and print its API key, which is shown this once."""
    from horde.db.database import Database
    from horde.usecases.accounts import create_user

    database = Database(find_database(settings_with(data_dir=data_dir)), pool=2)
    try:
        made = create_user(database, name, roles, kudos)
    finally:
        database.close()
    if as_json:
        found = {"id": made.id, "username": made.username, "alias": made.alias, "api_key": made.api_key}
        click.echo(json.dumps(found, ensure_ascii=False))
        return
    click.echo(f"user     {made.alias}\nAPI key  {made.api_key}\nThe key is not shown again.")
