"""From rows of the whole vocabulary to the few tokens that matter.

Sorting 32 rows of 50,000 logits takes longer than the rest of a step. So before a stage that rules tokens out, each row
gets a bound below which that stage is sure to rule out everything; what reaches the bound becomes a short row of
candidates, and the stage's formula works on those. The bounds are proven where they are computed: results are those of
the formula on the whole row. Where a distribution is so flat that the bound keeps most of it, the row stays long.

Candidates live on the CPU in fp64 whatever the device of the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.engine.sampling.rows import Slabs, WholeRow, like

# Bounds are lowered by this much (and by what fp32 rounds), so that rounding never costs a token its place.
_SLACK = 1e-3
_ROUNDING = 1e-6

# Rows of one batch of candidates are as long as the longest; beyond each of these lengths, rows get a batch of their own.
_LENGTHS = (64, 512, 4096, 32768)

# How far above the certain bound `narrow_to_mass` tries first: 20 times as likely.
_HOPE = math.log(20)

# `tail_free` looks at tokens down to this share of the likeliest, and at so many columns at least.
_TAIL_SHARE = 1e-5
_TAIL_COLUMNS = 64


@dataclass(slots=True)
class Candidates:
    """Tokens still in play, of some rows of a batch.

    Attributes:
        rows: which rows of the batch.
        ids: [len(rows), length] token ids, ascending; 0 where a row is shorter than the longest.
        logits: the same in fp64; -inf there.
    """

    rows: list[int]
    ids: Tensor
    logits: Tensor

    def part(self, chosen: Tensor) -> list[Candidates]:
        """The rows where `chosen` [len(rows)] is true; an empty list if there are none."""
        places = chosen.nonzero()[:, 0]
        if len(places) == len(self.rows):
            return [self]
        rows = [self.rows[place] for place in places.tolist()]
        return [Candidates(rows, self.ids[places], self.logits[places])] if rows else []


def top_k_bound(columns: Tensor, rows: Tensor, k: Tensor) -> Tensor:
    """At least k tokens reach the k-th largest of the column maxima, so the k likeliest do.

    Args:
        columns: [rows, width], the maxima of the columns.
        rows: the logits they were taken from.
        k: [rows].
    """
    k = k.clamp(1, rows.shape[1]).long()
    most = int(k.max())
    source = columns if most <= columns.shape[1] else rows
    return source.topk(most).values.gather(1, k.to(source.device)[:, None] - 1)[:, 0]


def min_p_bound(peak: Tensor, p: Tensor) -> Tensor:
    """The formula itself, in logits."""
    return _lower(peak + p.clamp(1e-300, 1.0).log(), peak)


def top_a_bound(peak: Tensor, whole: WholeRow, a: Tensor) -> Tensor:
    """The formula itself, in logits: p >= a * peak**2."""
    return _lower(2 * peak - whole.total + a.clamp(min=1e-300).log(), peak)


def narrow_to_mass(
    rows: Tensor, columns: Tensor, peak: Tensor, whole: WholeRow, mass: Tensor, certain_surprise: Tensor | None = None
) -> list[Candidates]:
    """Candidates for a stage that takes tokens until `mass` is reached.

    Taken from the likeliest down, a token less likely than (1 - mass) / vocabulary is never needed: it starts a tail of
    less than 1 - mass. That bound always holds. Most distributions reach `mass` far above it, so a higher one is tried
    first, and holds wherever the candidates it leaves reach `mass` by themselves.

    For `typical` the surprise must exceed twice the entropy as well: such a token is further from the entropy than any
    likelier one, so in the order of distance, too, only less likely tokens come after it.

    Args:
        rows: [rows, vocab].
        columns: the maxima of their columns.
        peak: their largest logits.
        whole: measured from them.
        mass: of each row.
        certain_surprise: tokens of less surprise than this are candidates in any case.
    """
    tail = ((1 - mass).clamp(min=1e-300) / rows.shape[1]).log()

    def bound(share: Tensor) -> Tensor:
        if certain_surprise is not None:
            share = torch.minimum(share, -certain_surprise * (1 + _ROUNDING))
        return _lower(whole.total + share, peak)

    done: list[Candidates] = []
    short: list[int] = []
    for batch in narrow(rows, columns, bound(tail + _HOPE)):
        reached = (batch.logits - whole.total[batch.rows, None]).exp().sum(-1) >= mass[batch.rows] + _ROUNDING
        short += [row for row, enough in zip(batch.rows, reached.tolist(), strict=True) if not enough]
        done += batch.part(reached)
    if short:
        where = torch.tensor(short)
        there = where.to(rows.device)
        for batch in narrow(rows[there], columns[there], bound(tail)[where]):
            batch.rows = [short[row] for row in batch.rows]
            done.append(batch)
    return done


def tail_free_bound(peak: Tensor, columns: Tensor) -> Tensor:
    """No proof: far enough down that `filters.tail_free_head` can nearly always decide."""
    count = min(_TAIL_COLUMNS, columns.shape[1])
    kth = columns.topk(count).values[:, -1].cpu().double()
    return torch.minimum(kth, _lower(peak + math.log(_TAIL_SHARE), peak))


def narrow(rows: Tensor, columns: Tensor, bound: Tensor) -> list[Candidates]:
    """The tokens at or above `bound` [rows], as few batches of rows of similar length."""
    return _arrange(*_reaching(rows, columns, bound), count=rows.shape[0])


def everything(rows: Tensor, which: list[int]) -> Candidates:
    """Some rows as they are, every token a candidate."""
    logits = rows[torch.tensor(which, device=rows.device)].cpu().double()
    return Candidates(which, torch.arange(rows.shape[1]).expand_as(logits), logits)


def _lower(bound: Tensor, peak: Tensor) -> Tensor:
    """Bound in fp64, lowered by the slack, never above the peak."""
    return torch.minimum(bound, peak) - _SLACK - _ROUNDING * peak.abs()


def _reaching(rows: Tensor, columns: Tensor, bound: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, id and logit of each token that reaches its row's bound; rows ascending, ids ascending within."""
    # Tokens that are out already never reach it.
    bound = like(bound, rows).clamp(min=torch.finfo(rows.dtype).min)
    count, vocabulary = rows.shape
    slabs = Slabs.of(vocabulary)
    row, column = (columns >= bound[:, None]).nonzero(as_tuple=True)
    depth = slabs.depth + 1
    if row.shape[0] * depth * 4 > count * vocabulary:
        flat = np.flatnonzero((rows >= bound[:, None]).cpu().numpy())
        chosen = rows.flatten()[torch.from_numpy(flat).to(rows.device)]
        return flat // vocabulary, flat % vocabulary, chosen.cpu().numpy()
    ids = column[:, None] + slabs.width * torch.arange(depth, device=rows.device)
    logits = rows[row[:, None], ids.clamp(max=vocabulary - 1)]
    keep = ((logits >= bound[row, None]) & (ids < vocabulary)).flatten().nonzero()[:, 0]
    places = (row[:, None] * vocabulary + ids).flatten()[keep].cpu().numpy()
    order = np.argsort(places)
    places = places[order]
    return places // vocabulary, places % vocabulary, logits.flatten()[keep].cpu().numpy()[order]


def _arrange(row: np.ndarray, ids: np.ndarray, logits: np.ndarray, count: int) -> list[Candidates]:
    lengths = np.bincount(row, minlength=count)
    starts = np.cumsum(lengths) - lengths
    place = np.arange(row.shape[0]) - starts[row]
    size = np.searchsorted(_LENGTHS, lengths)
    batches: list[Candidates] = []
    for each in np.unique(size):
        members = np.flatnonzero(size == each)
        shape = (members.shape[0], int(lengths[members].max()))
        new_row = np.zeros(count, dtype=np.int64)
        new_row[members] = np.arange(members.shape[0])
        inside = slice(None) if shape[0] == count else size[row] == each
        at = (new_row[row[inside]], place[inside])
        padded_ids, padded_logits = np.zeros(shape, dtype=np.int64), np.full(shape, -np.inf)
        padded_ids[at] = ids[inside]
        padded_logits[at] = logits[inside]
        batches.append(Candidates(members.tolist(), torch.from_numpy(padded_ids), torch.from_numpy(padded_logits)))
    return batches
