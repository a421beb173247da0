"""Directories and the lock of the embedded server: made passable or private as needed, and nobody else's touched."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from horde.db.embedded.errors import EmbeddedPostgresError
from horde.db.embedded.privileges import Account


def make_directory(path: Path) -> None:
    """Make `path` and its missing parents, passable for the server's user whatever our umask; touch no other."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    path.chmod(0o755)


def lock(path: Path) -> int:
    """Take the lock file at `path` for this process and answer its handle; closing it, or dying, lets go.

    Raises:
        EmbeddedPostgresError: another process holds it, or the file is closed to this user.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except PermissionError as error:
        raise EmbeddedPostgresError(
            f"{path} is closed to this user. Start as the user who made it, or choose another data directory."
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 32).decode("ascii", errors="replace").strip()
        os.close(handle)
        raise EmbeddedPostgresError(
            f"Another `horde up` (process {owner or 'unknown'}) is using {path.parent}. "
            "Stop it first, or choose another data directory (--data-dir)."
        ) from None
    os.truncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode("ascii"))
    return handle


def give(directory: Path, account: Account) -> None:
    """Make `account` the owner of a directory of ours, where we run it as somebody else."""
    if account.switch:
        os.chown(directory, account.uid, account.gid, follow_symlinks=False)


def is_private(directory: Path, account: Account) -> bool:
    """Whether `directory` is one (no link), the account's, and closed to everybody else."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == account.uid and stat.S_IMODE(found.st_mode) == 0o700


def sync_directory(path: Path) -> None:
    """Put the names in `path` on disk, so that a rename outlasts a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
