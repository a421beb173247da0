"""Who PostgreSQL's programs run as: ourselves, or as root an unprivileged account: initdb refuses root.

Nothing on the machine is changed for it: no account is made, no permission of a directory above ours is touched.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from horde.db.embedded.errors import EmbeddedPostgresError

PREFERRED_ACCOUNTS = ("postgres", "nobody")
INSTEAD = "or set HORDE_DATABASE_URL to a server of your own"
# PG* variables would redirect the programs, and the server need not see the broker's secrets.
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Account:
    """An entry of the user database; `switch` is True when we are root and become it for each program."""

    name: str
    uid: int
    gid: int
    switch: bool

    def run(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path = Path("/"),
        environment: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this account and wait for it; its output is captured, its status the caller's to read.

        Raises:
            OSError: the account may not execute it (PermissionError) or it isn't there.
        """
        return subprocess.run(
            [str(argument) for argument in arguments],
            cwd=cwd,
            env={
                **{name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
                "LC_ALL": "C",
                **(environment or {}),
            },
            input=stdin if stdin is not None else "",
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            # Ctrl-C at the terminal is ours to handle: it must not hit an initdb or a pg_ctl halfway.
            start_new_session=True,
            user=self.uid if self.switch else None,
            group=self.gid if self.switch else None,
            extra_groups=[] if self.switch else None,
        )

    def may_enter(self, directory: Path) -> bool:
        """Whether the account can read and traverse `directory`, as the kernel sees it."""
        return self.run(["/bin/sh", "-c", 'test -r "$1" && test -x "$1"', "sh", directory]).returncode == 0

    def may_traverse(self, directory: Path) -> bool:
        """Whether the account can reach entries of `directory` by name."""
        return self.run(["/bin/sh", "-c", 'test -x "$1"', "sh", directory]).returncode == 0

    def write(self, path: Path, text: str) -> None:
        """Write a file as the account, so that a link planted in its directory can't lead root astray."""
        done = self.run(["/bin/sh", "-c", 'umask 077 && cat > "$1"', "sh", path], stdin=text)
        if done.returncode != 0:
            raise EmbeddedPostgresError(f"The user {self.name} cannot write {path}: {done.stderr.strip()}.")


def choose_account(data: Path) -> Account:
    """The account for the cluster at `data` (which need not exist yet).

    An existing cluster is run by its owner: PostgreSQL accepts no other. A new one is ours, or, as root,
    `postgres` where that account exists, else `nobody`.

    Raises:
        EmbeddedPostgresError: no such account, someone else's cluster, or no way to become its owner.
    """
    owner = data.stat().st_uid if data.exists() else None
    if os.geteuid() != 0:
        return _ourselves(data, owner)
    if owner == 0:
        raise EmbeddedPostgresError(
            f"{data} belongs to root, and PostgreSQL refuses to run as root. "
            f"Give it to its user with `chown -R`, choose another data directory, {INSTEAD}."
        )
    account = _entry(owner, switch=True) if owner is not None else _unprivileged()
    try:
        account.run(["/bin/sh", "-c", ":"])
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedPostgresError(
            f"PostgreSQL refuses to run as root, and this process cannot become the user {account.name} ({error}). "
            f"Start as an ordinary user, {INSTEAD}."
        ) from error
    return account


def _ourselves(data: Path, owner: int | None) -> Account:
    uid = os.geteuid()
    if owner is not None and owner != uid:
        raise EmbeddedPostgresError(
            f"{data} belongs to the user {_name(owner)}. "
            "Start as that user or as root, or choose another data directory."
        )
    return _entry(uid, switch=False)


def _entry(uid: int, *, switch: bool) -> Account:
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        raise EmbeddedPostgresError(
            f"The user id {uid} has no entry in /etc/passwd, and PostgreSQL does not run without one. "
            f"Add an entry (containers: run as a named user), {INSTEAD}."
        ) from None
    return Account(entry.pw_name, uid, entry.pw_gid, switch)


def _unprivileged() -> Account:
    for name in PREFERRED_ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(name, entry.pw_uid, entry.pw_gid, switch=True)
    raise EmbeddedPostgresError(
        "PostgreSQL refuses to run as root, and there is neither a user postgres nor a user nobody to run it. "
        f"Start as an ordinary user, {INSTEAD}."
    )


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
