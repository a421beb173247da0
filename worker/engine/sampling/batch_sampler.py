"""Chooses the next token of every row of a batch, each row under its own settings, with its own random numbers.

    sampler = BatchSampler(vocabulary=49152, eos_token_ids=(2,))
    settings = sampler.prepare(Sampling(temperature=0.7, top_p=0.9), seed=1)
    choice = sampler.choose(logits, [SampleRow(settings, token_ids, prompt_length)])[0]

Rows with the same stages in the same order go through them together. A row's choice never depends on its neighbours,
and a row that cannot be sampled gets an error of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.interface import Sampling, TokenLogprob
from worker.engine.sampling.bans import ConstraintError, allowed_tokens, change_logits
from worker.engine.sampling.draws import draw_from_candidates, draw_from_rows, likeliest
from worker.engine.sampling.logprobs import token_logprobs
from worker.engine.sampling.randomness import uniform
from worker.engine.sampling.rows import column_maxima
from worker.engine.sampling.settings import SampleSettings, Stage
from worker.engine.sampling.stages import apply_to_candidates, apply_to_rows, split

_NOT_FINITE = "the model's output is not finite"
_NOTHING_LEFT = "no token is left to choose from"


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What a row of logits is for: settings from `prepare`, and prompt and output so far."""

    settings: SampleSettings
    token_ids: Sequence[int]
    prompt_length: int

    @property
    def output_tokens(self) -> int:
        """How many tokens of output there are."""
        return len(self.token_ids) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, with its log-probabilities if they were asked for; or else `error`: why there is none."""

    token_id: int | None
    error: str | None = None
    logprob: TokenLogprob | None = None


class BatchSampler:
    """Samples rows of one model's logits.

    Args:
        vocabulary: ids from here up exist in the model's output only as padding: they are never chosen, and have no
            part in any probability.
        eos_token_ids: what `ban_eos`, `ignore_eos` and `min_tokens` are about.
    """

    def __init__(self, vocabulary: int, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._vocabulary = vocabulary
        self._eos_token_ids = eos_token_ids

    def prepare(
        self,
        sampling: Sampling,
        *,
        seed: int,
        sample: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        logprobs: int | None = None,
    ) -> SampleSettings:
        """A sample's settings, to be kept as long as the sample; arguments as in `GenerationRequest`."""
        return SampleSettings(
            sampling,
            seed=seed,
            sample=sample,
            stop_token_ids=stop_token_ids,
            logprobs=logprobs,
            eos_token_ids=self._eos_token_ids,
            vocabulary=self._vocabulary,
        )

    @torch.inference_mode()
    def choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Choice]:
        """One choice a row.

        Args:
            logits: [len(rows), vocab or more], any float dtype, any device; not changed.
            rows: what each row is for.

        Raises:
            ValueError: the numbers of rows differ.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} samples")
        if not rows:
            return []
        raw = logits[:, : self._vocabulary].float()
        if raw.shape[1] < self._vocabulary:
            raw = torch.nn.functional.pad(raw, (0, self._vocabulary - raw.shape[1]), value=float("-inf"))
        batch = _Batch(raw, column_maxima(raw), rows)
        batch.run()
        return batch.choices()


class _Batch:
    """One call of `choose`. Each row ends up with a token or an error."""

    def __init__(self, raw: Tensor, columns: Tensor, rows: Sequence[SampleRow]) -> None:
        self._raw = raw
        self._columns = columns
        self._rows = rows
        self._tokens: dict[int, int] = {}
        self._errors: dict[int, str] = {}
        self._masks: dict[int, Tensor | None] = {}

    def run(self) -> None:
        groups: dict[tuple[bool, bool, tuple[Stage, ...]], list[int]] = {}
        sound = self._sound(range(len(self._rows)), self._columns.amax(-1))
        for index in sound:
            row = self._rows[index]
            settings = row.settings
            constraint = settings.sampling.constraint
            if constraint is not None:
                try:
                    output = row.token_ids[row.prompt_length :]
                    self._masks[index] = allowed_tokens(constraint, output, self._raw.shape[1])
                except ConstraintError as error:
                    self._errors[index] = str(error)
                    continue
            changed = self._masks.get(index) is not None or settings.changes_logits_after(row.output_tokens)
            groups.setdefault((settings.greedy, changed, settings.stages), []).append(index)
        for (greedy, changed, stages), members in groups.items():
            self._attempt(members, stages, greedy=greedy, changed=changed)

    def choices(self) -> list[Choice]:
        """Call after `run`."""
        reported = [i for i in sorted(self._tokens) if self._rows[i].settings.logprobs is not None]
        reports: dict[int, TokenLogprob] = {}
        if reported:
            rows, columns = self._raw, self._columns
            if len(reported) < len(self._rows):
                where = torch.tensor(reported, device=rows.device)
                rows, columns = rows[where], columns[where]
            chosen = [self._tokens[index] for index in reported]
            alternatives = [self._rows[index].settings.logprobs or 0 for index in reported]
            found = token_logprobs(rows, columns, chosen, alternatives)
            reports = dict(zip(reported, found, strict=True))
        return [
            Choice(self._tokens[index], None, reports.get(index))
            if index in self._tokens
            else Choice(None, self._errors[index])
            for index in range(len(self._rows))
        ]

    def _attempt(self, members: list[int], stages: tuple[Stage, ...], *, greedy: bool, changed: bool) -> None:
        try:
            self._sample(members, stages, greedy=greedy, changed=changed)
        except Exception as error:  # noqa: BLE001  settings nobody thought of must not fail the neighbours
            if len(members) == 1:
                self._errors[members[0]] = f"{type(error).__name__}: {error}"
                return
            for index in members:
                self._attempt([index], stages, greedy=greedy, changed=changed)

    def _sample(self, members: list[int], stages: tuple[Stage, ...], *, greedy: bool, changed: bool) -> None:
        """Choose for rows that have the same stages; nothing is noted down before all of them are through."""
        early, late = split(stages)
        logits, columns = self._raw, self._columns
        if len(members) < len(self._rows):
            where = torch.tensor(members, device=logits.device)
            logits, columns = logits[where], columns[where]
        elif changed or early:
            logits = logits.clone()
        if Stage.PENALTIES in stages:
            self._update_histories(members)
        settings = [self._rows[index].settings for index in members]
        if changed:
            output_tokens = [self._rows[index].output_tokens for index in members]
            change_logits(logits, settings, output_tokens, [self._masks.get(index) for index in members])
        if changed or early:
            logits = apply_to_rows(early, logits, settings)
            columns = column_maxima(logits)
            sound = self._sound(members, columns.amax(-1))
            if len(sound) < len(members):
                where = torch.tensor([members.index(index) for index in sound], dtype=torch.long, device=logits.device)
                members, logits, columns = sound, logits[where], columns[where]
        if members:
            self._tokens.update(self._choose(members, logits, columns, late, greedy=greedy))

    def _choose(
        self, members: list[int], logits: Tensor, columns: Tensor, late: tuple[Stage, ...], *, greedy: bool
    ) -> dict[int, int]:
        if greedy:
            return dict(zip(members, likeliest(logits, columns).tolist(), strict=True))
        points = torch.tensor([self._point(index) for index in members], dtype=torch.float64)
        peak = columns.amax(-1).cpu().double()
        if not late:
            return dict(zip(members, draw_from_rows(logits, peak, points).tolist(), strict=True))
        settings = [self._rows[index].settings for index in members]
        chosen: dict[int, int] = {}
        for candidates in apply_to_candidates(late, logits, columns, peak, settings):
            own = [members[row] for row in candidates.rows]
            drawn = dict(zip(own, draw_from_candidates(candidates, points[candidates.rows]).tolist(), strict=True))
            sound = self._sound(own, candidates.logits.amax(-1))
            chosen.update({index: drawn[index] for index in sound})
        return chosen

    def _sound(self, members: Sequence[int], peaks: Tensor) -> list[int]:
        """Those of `members` whose largest logit is a number; the others get their error."""
        sound: list[int] = []
        for index, peak in zip(members, peaks.tolist(), strict=True):
            if abs(peak) < float("inf"):
                sound.append(index)
            else:
                self._errors[index] = _NOTHING_LEFT if peak == float("-inf") else _NOT_FINITE
        return sound

    def _update_histories(self, members: list[int]) -> None:
        for index in members:
            row = self._rows[index]
            if row.settings.history is not None:
                row.settings.history.update(row.token_ids, row.prompt_length)

    def _point(self, index: int) -> float:
        row = self._rows[index]
        return uniform(row.settings.seed, row.settings.sample, row.output_tokens)
