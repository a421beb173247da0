"""Directories that are slow to make: made once, whole or not at all, whoever is killed while making them."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class NoCacheError(OSError):
    """There is no place to keep anything; the message says why and what to do."""


def model_cache_dir() -> Path:
    """`$HORDE_MODEL_CACHE`, else `$XDG_CACHE_HOME/horde/models` (XDG_CACHE_HOME defaults to `~/.cache`).

    For a user without a home directory it lies among the temporary files, which may be cleared at any time.

    Raises:
        NoCacheError: that user has no safe place there either.
    """
    try:
        if chosen := os.environ.get("HORDE_MODEL_CACHE"):
            return Path(chosen).expanduser()
        xdg = os.environ.get("XDG_CACHE_HOME")
        return (Path(xdg) if xdg else Path.home() / ".cache") / "horde" / "models"
    except RuntimeError:
        return _temporary_cache() / "models"


def _temporary_cache() -> Path:
    directory = Path(tempfile.gettempdir()) / f"horde-cache-{os.getuid()}"
    log.warning("this user has no home directory: %s is used; HORDE_MODEL_CACHE names a better place", directory)
    directory.mkdir(mode=0o700, exist_ok=True)
    facts = directory.lstat()
    # Anybody can make something of that name there, and what lies in it is loaded and run.
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise NoCacheError(f"{directory} is not a directory of this user alone; set HORDE_MODEL_CACHE")
    return directory


def _anything(_: Path) -> bool:
    return True


def build_once(root: Path, name: str, build: Callable[[Path], None], sound: Callable[[Path], bool] = _anything) -> Path:
    """The directory `root/name`, made by `build` if it is not there yet.

    It appears under its name only when `build` has returned and its files are on the disk. Several processes may ask
    at the same time: one builds, the others wait for it.

    Args:
        root: created if missing.
        name: of the directory; put into it whatever its content depends on.
        build: fills the empty directory it is given; may raise, then nothing stays behind.
        sound: whether a directory that is there already can be used; one that cannot is built anew.
    """
    finished = root / name
    if finished.is_dir() and sound(finished):
        return finished
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        # The kernel drops this lock when its holder dies, so whatever half-built thing is seen under it is abandoned.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if finished.is_dir() and sound(finished):
            return finished
        prefix = f".{name}.partial-"
        if finished.is_dir():
            log.warning("%s is damaged; it is made anew", finished)
            # Moved first: whoever looks meanwhile finds all of it or nothing.
            finished.rename(Path(tempfile.mkdtemp(prefix=prefix, dir=root)) / "damaged")
        for abandoned in root.glob(f"{prefix}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            build(partial)
            _flush(partial)
            partial.rename(finished)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return finished


def _flush(directory: Path) -> None:
    """Bring content to the disk before its name: after a power cut the name must not lead to empty files."""
    for path in [*directory.rglob("*"), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
