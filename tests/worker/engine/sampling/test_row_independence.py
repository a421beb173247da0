"""A row of a batch gives exactly what it gives alone, whatever its neighbours are and ask for."""

from __future__ import annotations

from itertools import permutations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.engine.sampling.rows import OUT, random_rows
from worker.engine.interface import SamplerStep, Sampling
from worker.engine.sampling.batch_sampler import BatchSampler, SampleRow

VOCABULARY = 1537
ROWS = 33
EOS = (2, 900)


class EveryOther:
    def allowed(self, output):
        return None if len(output) % 3 == 0 else torch.arange(VOCABULARY) % 2 == len(output) % 2


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 40, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.0, 0.5, 0.95]),
    min_p=st.sampled_from([0.0, 0.0, 0.02]),
    top_a=st.sampled_from([0.0, 0.0, 0.3]),
    tail_free=st.sampled_from([1.0, 1.0, 0.9]),
    typical=st.sampled_from([1.0, 1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.1, 1.5]),
    repetition_range=st.sampled_from([0, 10]),
    repetition_slope=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    presence_penalty=st.sampled_from([0.0, -0.2]),
    smoothing_factor=st.sampled_from([0.0, 0.0, 0.2]),
    dynatemp_range=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((5, 4.0), (10**9, 1.0))]),
    banned_tokens=st.sampled_from([(), (1, 2, 3)]),
    min_tokens=st.sampled_from([0, 30]),
    ban_eos=st.booleans(),
    ignore_eos=st.booleans(),
    constraint=st.sampled_from([None, None, EveryOther()]),
    order=st.sampled_from([tuple(SamplerStep), *list(permutations(SamplerStep))[::1009]]),
)


@st.composite
def sample_rows(draw: st.DrawFn) -> list[SampleRow]:
    sampler = BatchSampler(VOCABULARY, EOS)
    rows = []
    for _ in range(ROWS):
        prepared = sampler.prepare(
            draw(SAMPLINGS),
            seed=draw(st.integers()),
            sample=draw(st.integers(0, 3)),
            stop_token_ids=draw(st.sampled_from([(), (7,)])),
            logprobs=draw(st.sampled_from([None, None, 0, 3])),
        )
        length = draw(st.integers(1, 60))
        token_ids = draw(st.randoms(use_true_random=False)).choices(range(VOCABULARY), k=length)
        rows.append(SampleRow(prepared, token_ids, draw(st.integers(0, length))))
    return rows


@given(rows=sample_rows(), seed=st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_every_row_of_a_mixed_batch_chooses_what_it_chooses_alone(rows, seed):
    sampler = BatchSampler(VOCABULARY, EOS)
    logits = random_rows(seed, ROWS, VOCABULARY) * torch.linspace(0.01, 3, ROWS)[:, None]
    logits[::5] = logits[::5].bfloat16().float()
    logits[3, 100] = float("nan")
    logits[7] = OUT
    logits[11, 1:] = OUT
    together = sampler.choose(logits, rows)
    alone = [sampler.choose(logits[place : place + 1], [row])[0] for place, row in enumerate(rows)]
    assert together == alone
    assert together[3].token_id is None
    assert together[7].token_id is None
    # shuffled company
    order = list(range(ROWS))[::-1]
    shuffled = sampler.choose(logits[order], [rows[place] for place in order])
    assert shuffled[::-1] == together


def test_a_batch_of_the_usual_mixes_at_full_width_chooses_what_the_rows_choose_alone():
    vocabulary = 49_152
    sampler = BatchSampler(vocabulary)
    mixes = (
        Sampling(temperature=0.0),
        Sampling(temperature=0.7),
        Sampling(temperature=0.7, top_p=0.9, top_k=40, repetition_penalty=1.1),
        Sampling(top_p=0.9),
        Sampling(typical=0.8),
        Sampling(tail_free=0.95, dynatemp_range=0.3),
    )
    logits = random_rows(1, rows=18, size=vocabulary, spread=3.0)
    rows = [SampleRow(sampler.prepare(mixes[place % 6], seed=place, logprobs=2), (5, 6, 7), 1) for place in range(18)]
    alone = [sampler.choose(logits[place : place + 1], [row])[0] for place, row in enumerate(rows)]
    assert sampler.choose(logits, rows) == alone
