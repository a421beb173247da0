"""Short rows of candidates leave exactly what the formulas leave of whole rows."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.sampling.rows import OUT, random_rows
from worker.engine.interface import SamplerStep, Sampling
from worker.engine.sampling import filters
from worker.engine.sampling.batch_sampler import BatchSampler
from worker.engine.sampling.candidates import Candidates
from worker.engine.sampling.penalties import penalise_rows
from worker.engine.sampling.rows import Slabs, WholeRow, column_maxima, measure, row_sums
from worker.engine.sampling.settings import SampleSettings
from worker.engine.sampling.stages import apply_to_candidates, apply_to_rows, split

VOCABULARY = 5003

# Sharp, usual, flat; as bfloat16 gives them, with many ties; with most of the vocabulary ruled out.
SHAPES = {
    "sharp": lambda seed, rows: random_rows(seed, rows, VOCABULARY, spread=8.0),
    "usual": lambda seed, rows: random_rows(seed, rows, VOCABULARY, spread=3.0),
    "flat": lambda seed, rows: random_rows(seed, rows, VOCABULARY, spread=0.01),
    "even": lambda seed, rows: torch.zeros(rows, VOCABULARY),
    "tied": lambda seed, rows: random_rows(seed, rows, VOCABULARY, spread=3.0).bfloat16().float().round(decimals=1),
    "masked": lambda seed, rows: random_rows(seed, rows, VOCABULARY).masked_fill(
        torch.arange(VOCABULARY) % 701 != seed % 701, OUT
    ),
}

FILTERS = {
    "top_k": st.sampled_from([1, 2, 40, 70, 1000, 10**6]),
    "top_a": st.sampled_from([0.001, 0.2, 1.0, 2.0]),
    "tail_free": st.sampled_from([0.0, 0.5, 0.95, 0.999999]),
    "typical": st.sampled_from([0.0, 0.2, 0.9, 0.9999]),
    "top_p": st.sampled_from([0.0, 1e-4, 0.5, 0.9, 0.999999]),
    "min_p": st.sampled_from([1e-9, 0.05, 0.999, 1.0]),
}
OTHERS = {
    "temperature": st.sampled_from([1.0, 0.1, 0.7, 3.0]),
    "dynatemp_range": st.sampled_from([0.0, 0.5]),
    "smoothing_factor": st.sampled_from([0.0, 0.2]),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "presence_penalty": st.sampled_from([0.0, 0.5]),
    "order": st.sampled_from(list(permutations(SamplerStep))[:: 5040 // 97]),
}


def prepare(sampling: Sampling) -> SampleSettings:
    prepared = BatchSampler(VOCABULARY).prepare(sampling, seed=0)
    if prepared.history is not None:
        prepared.history.update(range(0, VOCABULARY, 3), 100)
    return prepared


def by_the_formulas(logits: torch.Tensor, prepared: SampleSettings) -> torch.Tensor:
    """One whole row, every stage, nothing narrowed. `measure` has a test of its own: here both sides trust it."""
    sampling = prepared.sampling

    def number(value: float) -> torch.Tensor:
        return torch.tensor([value], dtype=logits.dtype)

    def narrowed_first(stage: str) -> dict[str, WholeRow]:
        if stage != late[0] or stage not in {"top_p", "top_a", "typical"}:
            return {}
        return {"whole": measure(logits.float(), logits.amax(-1), entropy=True)}

    early, late = split(prepared.stages)
    for stage in (*early, None, *late):
        match stage:
            case None:
                logits = logits.double()
            case "penalties":
                assert prepared.history is not None
                logits = logits.clone()
                penalise_rows(logits, [prepared.history])
            case "temperature":
                entropy = measure(logits, logits.amax(-1), entropy=True).entropy
                numbers = [sampling.temperature, sampling.dynatemp_range, sampling.dynatemp_exponent]
                value = filters.dynamic_temperature(
                    entropy, (logits > OUT).sum(-1), *(torch.tensor([each]).double() for each in numbers)
                )
                logits = filters.temperature(logits, value.to(logits.dtype), number(sampling.smoothing_factor))
            case "top_k":
                logits = filters.top_k(logits, torch.tensor([sampling.top_k]))
            case _:
                setting = number(getattr(sampling, stage))
                logits = getattr(filters, stage)(logits, setting, **narrowed_first(stage))
    return logits[0]


def by_the_sampler(logits: torch.Tensor, prepared: list[SampleSettings]) -> list[Candidates]:
    early, late = split(prepared[0].stages)
    rows = apply_to_rows(early, logits.clone(), prepared)
    columns = column_maxima(rows)
    return apply_to_candidates(late, rows, columns, columns.amax(-1).double(), prepared)


def check_agreement(logits: torch.Tensor, prepared: list[SampleSettings]) -> None:
    found = by_the_sampler(logits, prepared)
    assert sorted(row for batch in found for row in batch.rows) == list(range(len(prepared)))
    for batch in found:
        for place, row in enumerate(batch.rows):
            expected = by_the_formulas(logits[row : row + 1], prepared[row])
            inside = batch.logits[place] > OUT
            ids = batch.ids[place][inside]
            assert ids.tolist() == torch.nonzero(expected > OUT).flatten().tolist()
            torch.testing.assert_close(batch.logits[place][inside], expected[ids], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FILTERS)
@given(data=st.data(), seed=st.integers(0, 2**32))
@settings(max_examples=12, deadline=None)
def test_a_stage_leaves_what_it_leaves_of_the_whole_rows(name, shape, data, seed):
    values = data.draw(st.lists(FILTERS[name], min_size=1, max_size=4))
    prepared = [prepare(Sampling(**{name: value})) for value in values]
    check_agreement(SHAPES[shape](seed, len(values)), prepared)


@given(
    shapes=st.lists(st.sampled_from(sorted(set(SHAPES) - {"even", "tied"})), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
    chosen=st.fixed_dictionaries(OTHERS, optional=FILTERS).filter(lambda chosen: set(chosen) & set(FILTERS)),
)
@settings(max_examples=120)
def test_any_stages_in_any_order_leave_what_they_leave_of_the_whole_rows(shapes, seed, chosen):
    # Ties are left out: a temperature or a bent curve rounds differently in fp32 and fp64, and splits or joins them.
    logits = torch.cat([SHAPES[shape](seed + place, 1) for place, shape in enumerate(shapes)])
    prepared = [prepare(Sampling(**chosen)) for _ in shapes]
    if not split(prepared[0].stages)[1]:
        return
    check_agreement(logits, prepared)


def test_rows_of_very_different_lengths_do_not_stretch_each_other():
    logits = torch.cat([SHAPES["sharp"](1, 3), SHAPES["flat"](1, 1)])
    batches = by_the_sampler(logits, [prepare(Sampling(top_p=0.9))] * 4)
    assert batches[-1].rows == [3]
    assert batches[-1].logits.shape[1] > 4000
    assert all(batch.logits.shape[1] < 512 for batch in batches[:-1])


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 5, 64, 257, 4096, 4097, 49152])
def test_every_token_lies_in_exactly_one_column(vocabulary):
    slabs = Slabs.of(vocabulary)
    tail = vocabulary - slabs.depth * slabs.width
    assert 0 <= tail < max(2, slabs.width)
    tokens = torch.arange(vocabulary, dtype=torch.float32)[None]
    maxima = column_maxima(tokens)[0].long()
    assert (maxima % slabs.width).tolist() == list(range(slabs.width))
    assert int(maxima.max()) == vocabulary - 1
    assert float(row_sums(torch.ones(1, vocabulary))) == vocabulary


def test_a_number_that_is_none_shows_in_the_maxima():
    rows = torch.full((1, 257), OUT)
    for place in (0, 100, 256):
        rows[0, place] = float("nan")
        assert bool(column_maxima(rows).amax().isnan())
        rows[0, place] = OUT


def test_a_row_is_measured_alike_alone_and_in_company():
    rows = random_rows(5, rows=9, size=49152, spread=3.0)
    rows[3, ::2] = OUT
    peak = rows.amax(-1).double()
    together = measure(rows, peak, entropy=True)
    for row in range(9):
        alone = measure(rows[row : row + 1], peak[row : row + 1], entropy=True)
        assert float(alone.total) == float(together.total[row])
        assert float(alone.entropy) == float(together.entropy[row])
    exact = torch.distributions.Categorical(logits=rows.double())
    torch.testing.assert_close(together.total, rows.double().logsumexp(-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(together.entropy, exact.entropy(), rtol=0, atol=1e-5)
