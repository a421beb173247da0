"""Whether the postmaster named by a cluster's pid file is really alive, and where it listens.

A pid file outlives a killed server, and its number may by then belong to a zombie or to a stranger. PostgreSQL and
pg_ctl look at the number only, so a stranger of the same user would keep the server from starting for ever.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PID_FILE = "postmaster.pid"


class State(StrEnum):
    """What stands behind the pid file."""

    NONE = "no pid file"
    OURS = "a postmaster of this cluster"
    DEAD = "no such process, a zombie, or an unreadable file"
    STRANGER = "a live process that is no postmaster of this cluster"
    UNKNOWN = "a live process we may not look into: PostgreSQL has to decide"


@dataclass(frozen=True)
class Postmaster:
    """The lines of a pid file that matter; a server writes them one by one while it starts."""

    pid: int
    port: int | None
    socket_directory: str | None
    ready: bool


def read(data: Path) -> Postmaster | None:
    """The cluster's pid file, or None where there is none or it holds no pid."""
    try:
        lines = (data / PID_FILE).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not lines or not lines[0].strip().isdigit() or int(lines[0]) == 0:
        return None
    lines += [""] * (8 - len(lines))
    return Postmaster(
        pid=int(lines[0]),
        port=int(lines[3]) if lines[3].strip().isdigit() else None,
        socket_directory=lines[4] or None,
        ready=lines[7].strip() == "ready",
    )


def look(data: Path) -> State:
    """Judge the pid file of the cluster at `data` by what the kernel says of its process."""
    if not (data / PID_FILE).exists():
        return State.NONE
    postmaster = read(data)
    if postmaster is None:
        return State.DEAD
    if not Path("/proc/self").exists():
        return State.UNKNOWN if _exists(postmaster.pid) else State.DEAD
    process = Path(f"/proc/{postmaster.pid}")
    try:
        # The links of a zombie are gone although its number isn't.
        program = (process / "exe").readlink().name.removesuffix(" (deleted)")
        home = (process / "cwd").stat()
    except (FileNotFoundError, ProcessLookupError):
        return State.DEAD
    except PermissionError:
        return State.UNKNOWN
    return State.OURS if program == "postgres" and os.path.samestat(home, data.stat()) else State.STRANGER


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
