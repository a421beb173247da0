"""Directories that are slow to make: made once, whole or not at all, whoever is killed while making them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def model_cache_dir() -> Path:
    """`$HORDE_MODEL_CACHE`, else `$XDG_CACHE_HOME/horde/models` (XDG_CACHE_HOME defaults to `~/.cache`)."""
    if chosen := os.environ.get("HORDE_MODEL_CACHE"):
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "horde" / "models"


def build_once(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The directory `root/name`, made by `build` if it is not there yet.

    It appears under its name only when `build` has returned and its files are on the disk. Several processes may ask
    at the same time: one builds, the others wait for it.

    Args:
        root: created if missing.
        name: of the directory; put into it whatever its content depends on.
        build: fills the empty directory it is given; may raise, then nothing stays behind.
    """
    finished = root / name
    if finished.is_dir():
        return finished
    root.mkdir(parents=True, exist_ok=True)
    with (root / f".{name}.lock").open("w") as lock:
        # The kernel drops this lock when its holder dies, so whatever half-built thing is seen under it is abandoned.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if finished.is_dir():
            return finished
        prefix = f".{name}.partial-"
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
