"""The last step: one token of a distribution by one uniform number, through the inverse of its cumulated mass.

Tokens stand in the order of their ids and masses are added up in fp64 on the CPU. A token that is ruled out has no mass
and is never hit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.engine.sampling.candidates import Candidates
from worker.engine.sampling.rows import Slabs, like, slab_sums


def likeliest(rows: Tensor, columns: Tensor) -> Tensor:
    """The id of each row's largest logit, the lowest among equals; rows hold no NaN. [rows] on the CPU.

    On a CPU `columns`, the maxima of the columns, show where to look: `argmax` takes ten times as long there.
    """
    if rows.device.type != "cpu":
        return rows.argmax(-1).cpu()
    peak = columns.amax(-1)
    slabs = Slabs.of(rows.shape[1])
    row, column = (columns == peak[:, None]).nonzero(as_tuple=True)
    ids = column[:, None] + slabs.width * torch.arange(slabs.depth + 1)
    hit = (rows[row[:, None], ids.clamp(max=slabs.vocabulary - 1)] == peak[row, None]) & (ids < slabs.vocabulary)
    lowest = torch.where(hit, ids, slabs.vocabulary).amin(-1)
    return torch.full((rows.shape[0],), slabs.vocabulary).scatter_reduce(0, row, lowest, "amin")


def draw_from_rows(rows: Tensor, peak: Tensor, points: Tensor) -> Tensor:
    """Draw from whole rows whose largest logits are `peak`, by the uniform numbers `points`: ids, [rows] on the CPU.

    First the slab is found, by the sums of the slabs, then the token within it: a full cumulated sum is not needed.
    """
    weights = (rows - like(peak, rows)[:, None]).exp_()
    mass = slab_sums(weights)
    slab, point = _locate(mass, points * mass.sum(-1))
    slabs = Slabs.of(rows.shape[1])
    ids = slab[:, None] * slabs.width + torch.arange(slabs.width)
    inside = weights.gather(1, ids.clamp(max=slabs.vocabulary - 1).to(rows.device)).cpu().double()
    place, _ = _locate(inside.masked_fill(ids >= slabs.vocabulary, 0.0), point)
    return ids.gather(1, place[:, None])[:, 0]


def draw_from_candidates(candidates: Candidates, points: Tensor) -> Tensor:
    """The same for rows of candidates."""
    logits = candidates.logits
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    place, _ = _locate(weights, points * weights.sum(-1))
    return candidates.ids.gather(1, place[:, None])[:, 0]


def _locate(mass: Tensor, point: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulated `mass` [rows, places] first passes `point` [rows], and how far into that place it lies."""
    cumulated = mass.cumsum(-1)
    # `right`: a point of exactly 0 must not land on a place without mass at the front.
    place = torch.searchsorted(cumulated, point[:, None], right=True)
    # Sums of another order may round the point past the end.
    last = mass.shape[1] - 1 - (mass > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    place = torch.minimum(place, last)
    passed = cumulated.gather(1, place) - mass.gather(1, place)
    return place[:, 0], (point - passed[:, 0]).clamp(min=0.0)
