"""What the model itself thought of a token: log-probabilities of its raw logits, before any stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine.interface import TokenLogprob
from worker.engine.sampling.candidates import narrow, top_k_bound
from worker.engine.sampling.rows import measure

# JSON has no infinity: what the model rules out altogether is reported as this.
LOWEST_LOGPROB = -9999.0


def token_logprobs(
    rows: Tensor, columns: Tensor, chosen: Sequence[int], alternatives: Sequence[int]
) -> list[TokenLogprob]:
    """One report a row.

    Args:
        rows: [rows, vocab] fp32, raw, each with a finite largest logit.
        columns: their column maxima.
        chosen: the token of each row.
        alternatives: how many of its likeliest tokens each row reports; among equals the lower id comes first.
    """
    total = measure(rows, columns.amax(-1).cpu()).total
    ids = torch.tensor(chosen, device=rows.device)
    own = (rows.gather(1, ids[:, None])[:, 0].cpu().double() - total).tolist()
    top: list[tuple[tuple[int, float], ...]] = [()] * len(chosen)
    if max(alternatives, default=0) > 0:
        top = _likeliest(rows, columns, total, alternatives)
    return [
        TokenLogprob(token, max(value, LOWEST_LOGPROB), others)
        for token, value, others in zip(chosen, own, top, strict=True)
    ]


def _likeliest(
    rows: Tensor, columns: Tensor, total: Tensor, alternatives: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    wanted = torch.tensor(alternatives)
    found: list[tuple[tuple[int, float], ...]] = [()] * len(alternatives)
    for candidates in narrow(rows, columns, top_k_bound(columns, rows, wanted)):
        # Stable, and ids ascend: equals stay in the order of their ids.
        logits, order = candidates.logits.sort(descending=True, stable=True)
        ids = candidates.ids.gather(1, order)
        values = logits - total[candidates.rows, None]
        for place, row in enumerate(candidates.rows):
            count = max(0, alternatives[row])
            pairs = zip(ids[place, :count].tolist(), values[place, :count].tolist(), strict=True)
            # What is ruled out altogether fills short rows and is no alternative.
            found[row] = tuple((token, max(value, LOWEST_LOGPROB)) for token, value in pairs if value > float("-inf"))
    return found
