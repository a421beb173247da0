"""What is done to logits before any stage: bias, bans, the answer of a constraint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.engine.interface import TokenConstraint
from worker.engine.sampling.rows import like
from worker.engine.sampling.settings import SampleSettings


class ConstraintError(Exception):
    """A constraint raised, or its answer is no mask of this vocabulary."""


def allowed_tokens(constraint: TokenConstraint, output: Sequence[int], vocabulary: int) -> Tensor | None:
    """The constraint's mask, bool [vocabulary], or None.

    Raises:
        ConstraintError: there is no usable answer.
    """
    try:
        mask = constraint.allowed(output)
    except Exception as error:
        raise ConstraintError(f"the constraint failed: {type(error).__name__}: {error}") from error
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise ConstraintError(f"the constraint answered a {type(mask).__name__}")
    if mask.dtype != torch.bool or mask.shape != (vocabulary,):
        raise ConstraintError(f"the constraint answered {mask.dtype} of shape {tuple(mask.shape)}")
    return mask


def change_logits(
    logits: Tensor, settings: Sequence[SampleSettings], output_tokens: Sequence[int], masks: Sequence[Tensor | None]
) -> None:
    """Add the biases, then rule out what is banned or not allowed; in place.

    Args:
        logits: [rows, vocab].
        settings: of each row.
        output_tokens: how many each row has.
        masks: allowed tokens of each row, or None.
    """
    rows, ids = _flat([each.bias[0] for each in settings], logits)
    if rows.shape[0] > 0:
        logits[rows, ids] += like(torch.from_numpy(np.concatenate([each.bias[1] for each in settings])), logits)
    bans = [each.banned_after(count) for each, count in zip(settings, output_tokens, strict=True)]
    rows, ids = _flat(bans, logits)
    if rows.shape[0] > 0:
        logits[rows, ids] = float("-inf")
    for row, mask in enumerate(masks):
        if mask is not None:
            logits[row].masked_fill_(~mask.to(logits.device), float("-inf"))


def _flat(ids: list[np.ndarray], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Row and id of every entry."""
    rows = np.repeat(np.arange(len(ids)), [len(each) for each in ids])
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(np.concatenate(ids)).to(logits.device)
