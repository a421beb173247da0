"""Takes groups of rows that have the same stages through them: on whole rows as long as nothing is ruled out, on short
rows of candidates from then on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from worker.engine.sampling import candidates as narrowing
from worker.engine.sampling import filters
from worker.engine.sampling.candidates import Candidates
from worker.engine.sampling.penalties import TokenHistory, penalise_candidates, penalise_rows
from worker.engine.sampling.rows import WholeRow, like, measure
from worker.engine.sampling.settings import SampleSettings, Stage

_RULES_NOTHING_OUT = frozenset({Stage.PENALTIES, Stage.TEMPERATURE})


def split(stages: tuple[Stage, ...]) -> tuple[tuple[Stage, ...], tuple[Stage, ...]]:
    """The stages before the first that rules tokens out, and the others."""
    early = next((i for i, stage in enumerate(stages) if stage not in _RULES_NOTHING_OUT), len(stages))
    return stages[:early], stages[early:]


def apply_to_rows(stages: tuple[Stage, ...], rows: Tensor, settings: Sequence[SampleSettings]) -> Tensor:
    """Penalties and temperatures on rows of the whole vocabulary, which they use up; one entry of `settings` a row."""
    for stage in stages:
        if stage is Stage.PENALTIES:
            penalise_rows(rows, _histories(settings))
        else:
            rows = _temperature(rows, settings)
    return rows


def apply_to_candidates(
    stages: tuple[Stage, ...], rows: Tensor, columns: Tensor, peak: Tensor, settings: Sequence[SampleSettings]
) -> list[Candidates]:
    """What is left of each row after `stages`, of which the first rules tokens out.

    Args:
        stages: at least one.
        rows: [rows, vocab], every largest logit finite.
        columns: the maxima of their columns.
        peak: the largest logits, in fp64 on the CPU.
        settings: one entry a row.
    """
    vocabulary = rows.shape[1]
    batches = []
    for batch in _first(stages[0], rows, columns, peak, settings):
        own = [settings[row] for row in batch.rows]
        for stage in stages[1:]:
            batch.logits = _apply(stage, batch, own, vocabulary)
        batches.append(batch)
    return batches


def _first(
    stage: Stage, rows: Tensor, columns: Tensor, peak: Tensor, settings: Sequence[SampleSettings]
) -> list[Candidates]:
    """Narrow the rows to candidates for `stage`, and apply it."""
    whole: WholeRow | None = None
    if stage in {Stage.TOP_P, Stage.TOP_A, Stage.TYPICAL}:
        whole = measure(rows, peak, entropy=stage is Stage.TYPICAL)
    batches: list[Candidates] = []
    for batch in _narrow(stage, rows, columns, peak, whole, _numbers(stage, settings)):
        own = [settings[row] for row in batch.rows]
        if stage is Stage.TAIL_FREE:
            batches += _tail_free(batch, rows, own)
        else:
            part = None if whole is None else WholeRow(whole.total[batch.rows], whole.entropy[batch.rows])
            batch.logits = _apply(stage, batch, own, rows.shape[1], part)
            batches.append(batch)
    return batches


def _narrow(
    stage: Stage, rows: Tensor, columns: Tensor, peak: Tensor, whole: WholeRow | None, numbers: Tensor
) -> list[Candidates]:
    match stage, whole:
        case Stage.TOP_P, WholeRow():
            return narrowing.narrow_to_mass(rows, columns, peak, whole, numbers)
        case Stage.TYPICAL, WholeRow():
            return narrowing.narrow_to_mass(rows, columns, peak, whole, numbers, 2 * whole.entropy)
        case Stage.TOP_A, WholeRow():
            bound = narrowing.top_a_bound(peak, whole, numbers)
        case Stage.TOP_K, _:
            bound = narrowing.top_k_bound(columns, rows, numbers)
        case Stage.MIN_P, _:
            bound = narrowing.min_p_bound(peak, numbers)
        case _:
            bound = narrowing.tail_free_bound(peak, columns)
    return narrowing.narrow(rows, columns, bound)


def _tail_free(batch: Candidates, rows: Tensor, settings: Sequence[SampleSettings]) -> list[Candidates]:
    z = _numbers(Stage.TAIL_FREE, settings)
    logits, certain = filters.tail_free_head(batch.logits, z)
    for undecided in batch.part(~certain):
        again = narrowing.everything(rows, undecided.rows)
        again.logits = filters.tail_free(again.logits, z[~certain])
        return [again, *Candidates(batch.rows, batch.ids, logits).part(certain)]
    batch.logits = logits
    return [batch]


def _apply(
    stage: Stage,
    batch: Candidates,
    settings: Sequence[SampleSettings],
    vocabulary: int,
    whole: WholeRow | None = None,
) -> Tensor:
    logits = batch.logits
    match stage:
        case Stage.PENALTIES:
            return penalise_candidates(logits, batch.ids, _histories(settings), vocabulary)
        case Stage.TEMPERATURE:
            return _temperature(logits, settings)
        case Stage.TOP_K:
            return filters.top_k(logits, _numbers(stage, settings))
        case Stage.TOP_A:
            return filters.top_a(logits, _numbers(stage, settings), whole)
        case Stage.TAIL_FREE:
            outside = vocabulary - logits.shape[1]
            return filters.tail_free(logits, _numbers(stage, settings), outside)
        case Stage.TYPICAL:
            return filters.typical(logits, _numbers(stage, settings), whole)
        case Stage.TOP_P:
            return filters.top_p(logits, _numbers(stage, settings), whole)
        case Stage.MIN_P:
            return filters.min_p(logits, _numbers(stage, settings))


def _temperature(rows: Tensor, settings: Sequence[SampleSettings]) -> Tensor:
    """`filters.temperature`; uses `rows` up."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    value = column([each.sampling.temperature for each in settings])
    spreads = [each.sampling.dynatemp_range for each in settings]
    if max(spreads) > 0:
        whole = measure(rows, rows.amax(-1), entropy=True)
        tokens = (rows > float("-inf")).sum(-1).cpu()
        exponent = column([each.sampling.dynatemp_exponent for each in settings])
        value = filters.dynamic_temperature(whole.entropy, tokens, value, column(spreads), exponent)
    smoothing = [each.sampling.smoothing_factor for each in settings]
    bent = like(column(smoothing), rows) if max(smoothing) > 0 else None
    if bent is None and float(value.min()) >= filters.COLDEST:
        return rows.div_(like(value, rows)[:, None])
    return filters.temperature(rows, like(value, rows), bent)


def _histories(settings: Sequence[SampleSettings]) -> list[TokenHistory]:
    return [each.history for each in settings if each.history is not None]


def _numbers(stage: Stage, settings: Sequence[SampleSettings]) -> Tensor:
    """The setting of each row that a stage is named after."""
    return torch.tensor([getattr(each.sampling, stage.value) for each in settings], dtype=torch.float64)
