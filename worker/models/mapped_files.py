"""Gives back the memory of weights that are needed no more: pages of their file, and what the allocator keeps.

Weights loaded in the number format of their safetensors file are the file's own pages. Whoever converts, packs or
quantises them reads every page, and the pages stay counted as memory of this process for as long as one tensor of the
file lives, copied or not: without this, such a model would take its size twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

# Pages are put out only if what they hold is safe elsewhere. The cheaper MADV_DONTNEED would destroy the content of
# whatever has taken the place of a mapping that ends between our look at the list and the call.
_PAGEOUT = 21
_RELEASE_SECONDS = 0.05
_RANGE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)$")


def release_mapped_weights() -> int:
    """Let go of the pages of all mapped safetensors files; those that are used again are read from the file again.

    Returns the bytes that it tried to let go. Nothing that was written to such pages is lost. Does nothing where there
    is no `/proc` (macOS, Windows), and for files that this user may not write to.
    """
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    released = 0
    for start, length, resident in _mappings(lines):
        if _advise(start, length):
            released += resident
    return released


def return_freed_memory() -> None:
    """Release mapped weights, and have the allocator return what it holds of freed ones."""
    release_mapped_weights()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def releasing_mapped_weights(every: float = _RELEASE_SECONDS) -> Iterator[None]:
    """Release them again and again while entered: for a loader that reads a file from end to end without a pause."""
    ended = threading.Event()

    def release() -> None:
        while not ended.wait(every):
            release_mapped_weights()

    releaser = threading.Thread(target=release, name="releaser", daemon=True)
    releaser.start()
    try:
        yield
    finally:
        ended.set()
        releaser.join()


def _mappings(lines: list[str]) -> list[tuple[int, int, int]]:
    """Start, length and resident bytes of each mapping of a safetensors file."""
    found: list[tuple[int, int, int]] = []
    start = end = 0
    wanted = False
    for line in lines:
        if header := _RANGE.match(line):
            start, end = int(header[1], 16), int(header[2], 16)
            wanted = header[3].removesuffix(" (deleted)").endswith(".safetensors")
        elif wanted and line.startswith("Rss:") and (resident := int(line.split()[1]) * 1024):
            found.append((start, end - start, resident))
    return found


def _advise(start: int, length: int) -> bool:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return os.name == "posix" and madvise(start, length, _PAGEOUT) == 0
