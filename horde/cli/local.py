"""What a data directory tells about the `horde up` that runs on it: where its broker listens, and its first user's key.

Two files, both readable by their owner only: `running.json`, there while it runs, and `first-user.json`, kept.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from horde.settings import Settings

RUNNING, FIRST_USER = "running.json", "first-user.json"
DEFAULT_BROKER = "http://127.0.0.1:7001"
ANONYMOUS_KEY = "0000000000"

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where `horde up` keeps its data.  [default: $HORDE_DATA_DIR, else /var/lib/horde as root, "
    "else ~/.local/share/horde]",
)


@dataclass(frozen=True)
class FirstUser:
    """The account that `horde up` makes at its first start; the local worker and `horde ask` use it."""

    id: int
    alias: str
    api_key: str


@dataclass(frozen=True)
class Running:
    """A broker started by `horde up`: its process and its address."""

    pid: int
    url: str


def settings_with(**options: Any) -> Settings:
    """The environment's settings, with the options that were given on the command line put over them."""
    return Settings(**{name: value for name, value in options.items() if value is not None})


def read_running(data_dir: Path) -> Running | None:
    """The `horde up` that runs on `data_dir`, or None; a file left by a killed one does not count."""
    content = _read(data_dir / RUNNING)
    try:
        running = Running(pid=int(content["pid"]), url=str(content["url"]))
        os.kill(running.pid, 0)
    except (KeyError, ValueError, ProcessLookupError, OverflowError):
        return None
    except PermissionError:
        return running
    return running


def write_running(data_dir: Path, running: Running) -> None:
    """Say that a broker runs here now."""
    _write(data_dir / RUNNING, asdict(running))


def forget_running(data_dir: Path) -> None:
    """Say that it has ended."""
    (data_dir / RUNNING).unlink(missing_ok=True)


def read_first_user(data_dir: Path) -> FirstUser | None:
    """The first user and its key, or None where there is none yet or it is another user's."""
    content = _read(data_dir / FIRST_USER)
    try:
        return FirstUser(id=int(content["id"]), alias=str(content["alias"]), api_key=str(content["api_key"]))
    except (KeyError, ValueError):
        return None


def write_first_user(data_dir: Path, user: FirstUser) -> None:
    """Keep the first user's key; the database holds only its hash."""
    _write(data_dir / FIRST_USER, asdict(user))


def find_broker(broker: str | None, api_key: str | None, data_dir: Path) -> tuple[str, str]:
    """Address and key to use: what was given, else those of the `horde up` on `data_dir`, else the anonymous key.

    The local key goes to the local broker only.
    """
    running = read_running(data_dir)
    url = (broker or (running.url if running else DEFAULT_BROKER)).rstrip("/")
    if api_key is None and running is not None and url == running.url:
        user = read_first_user(data_dir)
        api_key = user.api_key if user else None
    return url, api_key or ANONYMOUS_KEY


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Written aside and renamed, so that nobody reads half of it; never readable by others, not even for a moment."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(handle)
    aside.replace(path)
