"""Alembic without its command line: the same migrations for `horde up`, `horde db` and the tests."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext

from horde.db.database import sqlalchemy_url

# Beside the package, in a checkout as in an installation; not imported, since its environment imports our tables.
MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"


def config(url: str) -> Config:
    """Alembic's configuration for the database at `url`."""
    found = Config()
    found.set_main_option("script_location", str(MIGRATIONS))
    found.attributes["url"] = sqlalchemy_url(url)
    return found


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database at `url` to `revision`; nothing happens when it is there already."""
    command.upgrade(config(url), revision)


def downgrade(url: str, revision: str) -> None:
    """Take the database back to `revision` (`-1`: one step)."""
    command.downgrade(config(url), revision)


def current(url: str) -> str | None:
    """The revision the database stands at, or None for an empty one."""
    engine = sa.create_engine(sqlalchemy_url(url))
    try:
        with engine.connect() as connection:
            return MigrationContext.configure(connection).get_current_revision()
    finally:
        engine.dispose()
