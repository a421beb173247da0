"""`horde`: the group of commands, and the one place where what went wrong becomes a sentence on stderr."""

from __future__ import annotations

import sys
from typing import Any

import click
from pydantic import ValidationError

from horde.cli.ask import ask
from horde.cli.database import db
from horde.cli.serve import serve
from horde.cli.status import status
from horde.cli.up import up
from horde.cli.user import user
from horde.errors import HordeError


class Horde(click.Group):
    """Shows errors that a person can act on without a traceback; anything else is a bug and keeps its own."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            click.ClickException: for every error with a sentence of its own.
        """
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except ValidationError as error:
            raise click.ClickException(_of_settings(error)) from error
        except HordeError as error:
            raise click.ClickException(error.message) from error
        except ModuleNotFoundError as error:
            sentence = _of_missing_package(error)
            if sentence is None:
                raise
            raise click.ClickException(sentence) from error
        except Exception as error:
            sentence = _of_database(error)
            if sentence is None:
                raise
            raise click.ClickException(sentence) from error


@click.group(cls=Horde, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="horde")
def horde() -> None:
    """A broker that lets volunteers lend their GPUs.

    `horde up` starts everything on this machine; `horde ask` puts it to use.
    """


for command in (up, serve, db, user, ask, status):
    horde.add_command(command)


def main() -> None:
    """The console script."""
    horde(prog_name="horde")


def _of_settings(error: ValidationError) -> str:
    problems = []
    for problem in error.errors():
        name = "_".join(str(part) for part in problem["loc"])
        problems.append(f"HORDE_{name.upper()}: {problem['msg']}")
    return "; ".join(problems) or str(error)


def _of_missing_package(error: ModuleNotFoundError) -> str | None:
    """A sentence for an installation that has the commands but not what a broker runs on."""
    package = (error.name or "").partition(".")[0]
    if package in {"", "horde", "migrations"}:
        return None
    return (
        f"{package} is not installed here. A broker needs `pip install 'horde[broker]'`, one with a worker "
        "`pip install 'horde[all]'`; only `horde ask` and `horde status` do without."
    )


def _of_database(error: Exception) -> str | None:
    """A sentence for an error of the embedded server or of a database that does not answer."""
    # Whoever raised one of these has imported it already; `horde ask` never pays for SQLAlchemy.
    if "sqlalchemy" not in sys.modules:
        return None
    from sqlalchemy.exc import ArgumentError, OperationalError

    from horde.db.embedded import EmbeddedPostgresError

    if isinstance(error, EmbeddedPostgresError):
        return str(error)
    if isinstance(error, OperationalError):
        return f"The database does not answer: {str(error.orig).strip()}"
    if isinstance(error, ArgumentError):
        return f"HORDE_DATABASE_URL is no database URL such as postgresql://user:password@host/name ({error})."
    return None
