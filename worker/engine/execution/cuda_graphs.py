"""Decode steps recorded once for each of a few batch sizes and then replayed, which saves a GPU the launch of each kernel.

A step is replayed if each of its sequences computes one token and wants its logits, as most steps do. It is padded to
the next recorded size; padding writes its keys and values to the backend's scratch block. All other steps,
and all steps where recording failed, run as they do without. Recording itself is untested on hardware; the rest is
tested with a recorder that runs the step anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from worker.engine.attention.backend import InputBatch
from worker.engine.attention.hook import attending
from worker.engine.attention.varlen import PagedBatch, VarlenBackend
from worker.engine.execution.model_runner import ModelRunner

log = logging.getLogger(__name__)

# Does the same work on the same tensors again, with what they hold by then; gives the same output tensor each time.
Replay = Callable[[], Tensor]
# Records what a function does.
Recorder = Callable[[Callable[[], Tensor]], Replay]


def recorded_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, 16, then every eighth, up to `max_batch` itself."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, max_batch, 8)) if size < max_batch} | {max_batch})


class CudaRecorder:
    """Records CUDA graphs that share their memory; they may not run at the same time. Untested on hardware."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """Record.

        Raises:
            RuntimeError: the function does what can't be recorded, as waiting for the device.
        """
        with torch.cuda.device(self._device):
            # Libraries set themselves up at a first run, which can't be recorded.
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(2):
                    run()
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = run()
            self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class GraphRunner(ModelRunner):
    """A `ModelRunner` that replays decode steps once `record` has been called.

    Args:
        model: a `PreTrainedModel` that `probe` took.
        backend: holds the cache.
        max_batch: sequences in a step at most.
        context_length: tokens of a sequence at most.
        record: records a step; None: as CUDA graphs.
    """

    def __init__(
        self,
        model: Any,
        backend: VarlenBackend,
        *,
        max_batch: int,
        context_length: int,
        record: Recorder | None = None,
    ) -> None:
        super().__init__(model, backend)
        shape = backend.shape
        self._paged_backend = backend
        self._recorder = record or CudaRecorder(shape.device)
        self._replays: dict[int, Replay] = {}
        self._most_keys = context_length

        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=shape.device)

        self._token_ids, self._positions, self._slots = zeros(max_batch), zeros(max_batch), zeros(max_batch)
        self._rows = torch.arange(max_batch, device=shape.device)
        self._query_starts = torch.arange(max_batch + 1, dtype=torch.int32, device=shape.device)
        self._key_starts = zeros(max_batch + 1, dtype=torch.int32)
        self._key_lengths = zeros(max_batch, dtype=torch.int32)
        self._tables = zeros(max_batch, -(-context_length // shape.block_size), dtype=torch.int32)
        self._pad(0, max_batch)

    @property
    def recorded(self) -> tuple[int, ...]:
        """Batch sizes that are replayed, ascending."""
        return tuple(sorted(self._replays))

    def record(self) -> None:
        """Record a step of each size, the largest first, whose memory then serves the others.

        Where one fails, that is logged, and no smaller one is tried: smaller batches are padded to those that are there.
        """
        with torch.inference_mode():
            for size in reversed(recorded_sizes(len(self._token_ids))):
                self._pad(0, size)
                self._sum_lengths(size)
                try:
                    self._replays[size] = self._recorder(self._decode(size))
                except Exception as error:  # noqa: BLE001  whatever it is, the engine can do without
                    log.warning("decode steps of %d texts are not recorded: %s", size, str(error).split("\n")[0])
                    break
        if self._replays:
            log.info("decode steps are recorded for batches of %s", ", ".join(map(str, self.recorded)))

    def run(self, batch: InputBatch) -> Tensor:
        """See `ModelRunner.run`."""
        size = self._size_for(batch)
        if size is None:
            return super().run(batch)
        count = len(batch.context_lengths)
        with torch.inference_mode():
            self._fill(batch, size)
            # The next replay overwrites it.
            return self._replays[size]()[:count].clone()

    def _size_for(self, batch: InputBatch) -> int | None:
        """The smallest recorded size that holds the batch; None: it is not to be replayed."""
        count = len(batch.context_lengths)
        if not count == len(batch.token_ids) == len(batch.sampled_rows):
            return None
        if batch.block_tables.shape[1] > self._tables.shape[1]:
            return None
        return min((size for size in self._replays if size >= count), default=None)

    def _fill(self, batch: InputBatch, size: int) -> None:
        count, blocks = batch.block_tables.shape
        self._token_ids[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions)
        self._slots[:count].copy_(batch.slots)
        self._key_lengths[:count].copy_(batch.context_lengths)
        # What is left of longer tables behind these is never looked at.
        self._tables[:count, :blocks].copy_(batch.block_tables)
        self._pad(count, size)
        self._sum_lengths(size)

    def _pad(self, start: int, end: int) -> None:
        """Make these rows texts of one token, which lies at the beginning of the scratch block."""
        self._token_ids[start:end] = 0
        self._positions[start:end] = 0
        self._slots[start:end] = self._paged_backend.scratch_block * self._paged_backend.shape.block_size
        self._key_lengths[start:end] = 1
        self._tables[start:end, 0] = self._paged_backend.scratch_block

    def _sum_lengths(self, size: int) -> None:
        torch.cumsum(self._key_lengths[:size], 0, out=self._key_starts[1 : size + 1])

    def _decode(self, size: int) -> Callable[[], Tensor]:
        """A step over the first `size` rows of the tensors kept here."""
        nothing = torch.zeros(0, dtype=torch.int32)
        batch = InputBatch(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=nothing,
            context_lengths=nothing,
            block_tables=nothing,
            sampled_rows=self._rows[:size],
        )
        paged = PagedBatch(
            query_starts=self._query_starts[: size + 1],
            key_starts=self._key_starts[: size + 1],
            key_lengths=self._key_lengths[:size],
            block_tables=self._tables[:size],
            most_queries=1,
            most_keys=self._most_keys,
        )

        def run() -> Tensor:
            self._paged_backend.begin_paged(batch, paged)
            with attending(self._paged_backend):
                return self._logits(batch)

        return run
