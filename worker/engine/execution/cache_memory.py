"""How many blocks the cache gets: from a budget in bytes, or from what the machine has to spare.

To be asked when the model is loaded and warm, so that its own needs are no longer among what is free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from worker.engine.attention.backend import CacheShape, LayerShape

_CPU_SHARE = 0.5
# Where the memory is the accelerator's own, nobody else waits for it.
_DEVICE_SHARE = 0.9
# Where the system tells nothing.
_ASSUMED_FREE = 4 << 30
# With less room than this for a text, or than the model's context if that is less, the engine is of no use.
_USEFUL_TOKENS = 256
# Room for each of a batch by default: few texts are longer, and those that are find the room that others leave.
_USUAL_TOKENS = 2048


class CacheMemoryError(Exception):
    """Too little memory for a cache that is of use; the message says what to do."""


def cache_shape(
    layers: tuple[LayerShape, ...],
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
    max_batch: int,
    budget: int | None = None,
    reserved: int = 0,
) -> CacheShape:
    """The pools that a budget pays for.

    Args:
        layers: from `probe`.
        block_size: tokens a block.
        dtype: of keys and values.
        device: where they lie.
        context_length: most tokens of a sequence.
        max_batch: sequences that run side by side.
        budget: bytes; None: room for `max_batch` texts of a usual length and for one of the longest, as far as a share
            of what is free goes.

    Raises:
        CacheMemoryError: not even one text of a useful length fits, or the host has less free than the budget.
    """
    one_block = CacheShape(layers, 1, block_size, dtype, device).bytes_per_block
    per_sequence = -(-context_length // block_size)
    if budget is None:
        memory = max(0, free_memory(device) - reserved)
        usual = -(-min(context_length, _USUAL_TOKENS) // block_size)
        blocks = min(memory // one_block, max(max_batch * usual, per_sequence))
    else:
        memory = budget
        _check_free(memory, device)
        blocks = memory // one_block
    needed = min(per_sequence, -(-_USEFUL_TOKENS // block_size))
    if blocks < needed:
        raise CacheMemoryError(
            f"a cache of {_in_words(memory)} holds {blocks * block_size or 'no'} tokens of this model, and one text needs "
            f"room for {needed * block_size}: {-(-needed * one_block // 2**20)} MiB; give --kv-cache-memory more, "
            "or take a smaller model"
        )
    return CacheShape(layers, blocks, block_size, dtype, device)


def _check_free(budget: int, device: torch.device) -> None:
    """The system promises more than there is, and ends the process when the promise is called in."""
    if device.type == "cpu" and budget > (free := free_on_host()):
        raise CacheMemoryError(
            f"--kv-cache-memory asks for {_in_words(budget)}, and {_in_words(free)} are free on this machine; "
            "give it less, or leave it out"
        )


def _in_words(size: int) -> str:
    for factor, unit, least in ((2**30, "GiB", 10), (2**20, "MiB", 1), (2**10, "KiB", 1)):
        if size >= least * factor:
            return f"{size // factor} {unit}"
    return f"{size} bytes"


def free_memory(device: torch.device) -> int:
    """Bytes that a cache may take by default: a share of what is free on the device now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _DEVICE_SHARE)
    return int(free_on_host() * _CPU_SHARE)


def free_on_host(root: Path = Path("/")) -> int:
    """Bytes free on this machine, and free within the control groups (containers) that this process is in.

    Args:
        root: where the file system begins that `proc` and `sys` are in.
    """
    return min([_free_in_system(root), *_free_in_control_groups(root)])


def _free_in_system(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        # No word of what is free: half of what there is.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return _ASSUMED_FREE


def _free_in_control_groups(root: Path) -> Iterator[int]:
    """For each group with a limit, from our own up to the outermost one; versions 1 and 2 of the kernel's interface."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _free_up_from(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            yield from _free_up_from(base, path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _free_up_from(base: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    group = base / path.lstrip("/")
    for directory in (group, *(parent for parent in group.parents if parent.is_relative_to(base))):
        try:
            most = int((directory / limit).read_text(encoding="ascii"))
            used = int((directory / usage).read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue  # no such group as seen from in here, or "max": no limit
        yield max(0, most - used + _reclaimable(directory))


def _reclaimable(directory: Path) -> int:
    """Pages of files that were read: they count as used and give way at once."""
    try:
        lines = (directory / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
