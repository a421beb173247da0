"""Picks the attention backend: the fastest that this machine, the device and the type of the cache allow."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from worker.engine.attention.backend import AttentionBackend, CacheShape
from worker.engine.attention.cpu import CpuKernelBackend
from worker.engine.attention.gather import GatherBackend
from worker.engine.attention.varlen import VarlenAttention, VarlenBackend, torch_varlen_attention
from worker.engine.attention.varlen_probe import fitting_block_size, refusals
from worker.engine.kernels.bindings import load_kernels

log = logging.getLogger(__name__)

AUTO = "auto"


class BackendUnusableError(Exception):
    """This machine or this cache does not allow it; the message says why not."""


def _kernels(shape: CacheShape) -> AttentionBackend:
    if shape.device.type != "cpu":
        raise BackendUnusableError(f"the C++ kernels are for CPUs, the model is on {shape.device}")
    if shape.dtype not in (torch.float32, torch.bfloat16):
        raise BackendUnusableError(f"the C++ kernels do not read {_name(shape.dtype)}")
    kernels = load_kernels()
    if kernels is None:
        raise BackendUnusableError("the C++ kernels are switched off or cannot be built here")
    return CpuKernelBackend(shape, kernels)


def _varlen(shape: CacheShape) -> AttentionBackend:
    attention = _varlen_attention(shape)
    refused = refusals(shape, attention)
    taken = set(shape.layers) - set(refused)
    if not taken:
        raise BackendUnusableError(f"PyTorch's varlen attention does not do it: {'; '.join(set(refused.values()))}")
    for layer, reason in refused.items():
        log.info("attention: layers of %s are gathered, varlen attention does not do them: %s", layer, reason)
    return VarlenBackend(shape, attention, taken)


def _varlen_attention(shape: CacheShape) -> VarlenAttention:
    if shape.device.type != "cuda" or torch.version.hip is not None:
        raise BackendUnusableError(f"varlen attention is for NVIDIA GPUs, the model is on {shape.device}")
    if shape.dtype not in (torch.bfloat16, torch.float16):
        raise BackendUnusableError(f"varlen attention does not read {_name(shape.dtype)}")
    try:
        return torch_varlen_attention()
    except ImportError as error:
        raise BackendUnusableError(f"this PyTorch has no varlen attention: {error}") from error


# Fastest first; the last one takes everything.
BACKENDS: dict[str, Callable[[CacheShape], AttentionBackend]] = {
    "kernels": _kernels,
    "varlen": _varlen,
    "gather": GatherBackend,
}
# Not worth a word in the log of any other device.
_ONLY_ON = {"varlen": "cuda"}


def choose_backend(shape: CacheShape, wanted: str = AUTO) -> AttentionBackend:
    """Make the backend for a cache, and say in the log which one it is, and why no faster one.

    Args:
        shape: of the cache.
        wanted: `auto`, or one of `BACKENDS`.

    Raises:
        BackendUnusableError: the wanted one can't be used here; never with `auto`.
        KeyError: there is none of that name.
    """
    reasons: list[str] = []
    auto = [name for name in BACKENDS if _ONLY_ON.get(name, shape.device.type) == shape.device.type]
    for name in auto if wanted == AUTO else [wanted]:
        try:
            backend = BACKENDS[name](shape)
        except BackendUnusableError as error:
            reasons.append(str(error))
        else:
            because = f" ({'; '.join(reasons)})" if reasons else ""
            log.info("attention: %s, %s on %s%s", backend.name, _name(shape.dtype), shape.device, because)
            return backend
    raise BackendUnusableError("; ".join(reasons))


def choose_block_size(shape: CacheShape, wanted: str = AUTO) -> int:
    """The block size to take in place of `shape.block_size`, which is what is wished for.

    Kernels may read larger blocks only. Where one is to be used that does, it is the smallest that it reads.

    Args:
        shape: of the cache, however many blocks it will have.
        wanted: as for `choose_backend`.
    """
    if wanted not in (AUTO, "varlen"):
        return shape.block_size
    try:
        attention = _varlen_attention(shape)
    except BackendUnusableError:
        return shape.block_size
    size = fitting_block_size(shape, attention)
    if size != shape.block_size:
        log.info("attention: blocks of %d tokens, as varlen attention does not read %d", size, shape.block_size)
    return size


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
