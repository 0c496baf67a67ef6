"""Batches with about equal tokens on every rank: Algorithm 1 of MTGRBoost (section 5.1) over any loader.

An epoch's samples, in its shuffled order, are cut into chunks, and chunk c goes to rank c modulo the world
size. Every rank cuts its own batches (`balancing.dynamic_batches`), so their numbers of samples differ; the
loss is divided by the number of its terms over all ranks, as everywhere. A rank without further samples has
empty batches until the end of the epoch, and the next epoch begins with empty buffers: each sample is in one
batch of each epoch.

Epochs may differ in their number of steps, so the steps of all earlier epochs are counted to find a step.

From a stream a rank cuts its own samples, in the order in which its part of the stream has them. Epochs
follow each other without a border, so every rank always has a batch. Samples of a step depend on the target
and the world size; a position is one of each rank, for as many ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.balancing import dynamic_batches
from tritonrec.data.batch import JaggedBatch
from tritonrec.data.epochs import BatchType, Endless, EpochLoader, check_at_least, check_same
from tritonrec.data.sequences import NextItemStream
from tritonrec.data.slices import work
from tritonrec.data.stream import cut, joined
from tritonrec.settings import counts_of, typed

if TYPE_CHECKING:
    import pyarrow as pa


@typed
class DynamicBatchLoader(Endless[BatchType]):
    """The samples of `loader` in batches of about `target_tokens` tokens a rank; a function of (seed, step).

    Args:
        loader: source of samples, seed, rank, world size and evaluation.
        target_tokens: N of Algorithm 1; by default the mean length times the loader's samples per rank.
        chunk_samples: samples of a chunk.

    Raises ValueError for a number below 1.
    """

    def __init__(
        self, loader: EpochLoader[BatchType], target_tokens: int | None = None, chunk_samples: int = 8
    ) -> None:
        if target_tokens is None:
            total = int(loader.sample_tokens.sum()) * loader.batch_size
            target_tokens = max(total // (loader.num_samples * loader.world_size), 1)
        check_at_least("target_tokens", target_tokens, 1)
        check_at_least("chunk_samples", chunk_samples, 1)
        self.loader, self.target_tokens, self.chunk_samples = loader, target_tokens, chunk_samples
        self.rank, self.world_size = loader.rank, loader.world_size
        self._lock = Lock()
        self._first_steps = [0]  # of each epoch planned so far, and of the next one
        self._recent_plan: tuple[int, list[list[Tensor]]] | None = None

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.loader.num_samples

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the first epoch; see `steps_of` for the others."""
        return self.steps_of(0)

    def steps_of(self, epoch: int) -> int:
        """Steps of `epoch`: the largest number of batches of a rank."""
        return max(len(batches) for batches in self._plan(epoch))

    def state_dict(self) -> dict[str, Any]:
        """What a position depends on; the position itself is the step."""
        own = {"target_tokens": self.target_tokens, "chunk_samples": self.chunk_samples}
        return {**own, "world_size": self.world_size, "loader": self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError naming what differs from the loader of a `state_dict`; nothing is changed."""
        own = self.state_dict()
        check_same(state, {name: value for name, value in own.items() if name != "loader"})
        self.loader.load_state_dict(state.get("loader", {}))

    def identity(self) -> dict[str, Any]:
        own = {"target_tokens": self.target_tokens, "chunk_samples": self.chunk_samples}
        return {**self.loader.identity(), **own}

    def batch(self, step: int) -> BatchType:
        """This rank's batch; it may be empty."""
        return self.divided(self.loader.make_batch(step, self._samples(step)[self.rank]))

    def global_batch(self, step: int) -> BatchType:
        """The batches of all ranks, end to end."""
        return self.loader.make_batch(step, torch.cat(self._samples(step)))

    def global_size(self, step: int) -> tuple[int, int]:
        """Samples and tokens of the batches of all ranks."""
        samples = torch.cat(self._samples(step))
        return len(samples), int(self.loader.sample_tokens[samples].sum())

    def tokens_per_rank(self, step: int) -> Tensor:
        """(world_size,) int64: tokens of each rank's batch."""
        return torch.stack([self.loader.sample_tokens[samples].sum() for samples in self._samples(step)])

    def _samples(self, step: int) -> list[Tensor]:
        """Positions of each rank's samples in the loader's `sample_ids`."""
        check_at_least("step", step, 0)
        with self._lock:
            while self._first_steps[-1] <= step:
                self._first_steps.append(self._first_steps[-1] + self.steps_of(len(self._first_steps) - 1))
            epoch = bisect_right(self._first_steps, step) - 1
        place = step - self._first_steps[epoch]
        nothing = torch.empty(0, dtype=torch.int64, device="cpu")
        return [batches[place] if place < len(batches) else nothing for batches in self._plan(epoch)]

    def _plan(self, epoch: int) -> list[list[Tensor]]:
        """Samples of the batches of every rank."""
        recent = self._recent_plan
        if recent is None or recent[0] != epoch:
            chunks = self.loader.epoch_order(epoch).split(self.chunk_samples)
            ranks = [chunks[rank :: self.world_size] for rank in range(self.world_size)]
            recent = self._recent_plan = epoch, [self._batches(own) for own in ranks]
        return recent[1]

    def _batches(self, chunks: tuple[Tensor, ...]) -> list[Tensor]:
        if not chunks:
            return []
        lengths = (self.loader.sample_tokens[chunk].numpy() for chunk in chunks)
        return list(torch.cat(chunks).split(list(dynamic_batches(lengths, self.target_tokens))))


@typed
class DynamicStream(Endless[JaggedBatch]):
    """The samples of `stream` in batches of about `target_tokens` tokens a rank; an endless iterator.

    Args:
        stream: its batches are read one after another, and cut anew.
        target_tokens: N of Algorithm 1.

    Attributes:
        step: of the next batch.

    Raises ValueError for a target below 1, and while reading for an epoch in which this rank has no tokens.
    """

    def __init__(self, stream: NextItemStream, target_tokens: int) -> None:
        check_at_least("target_tokens", target_tokens, 1)
        self.stream, self.target_tokens = stream, target_tokens
        self.rank, self.world_size = stream.rank, stream.world_size
        self._ranks: list[DynamicStream] = []
        self._begin(0, 0, 0)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of the stream in an epoch; here there are about as many."""
        return self.stream.steps_per_epoch

    def __iter__(self) -> Iterator[JaggedBatch]:
        return self

    def __next__(self) -> JaggedBatch:
        count = next(self._cuts)
        ids, tables = [], []
        while count:
            step, first, numbers, table = self._waiting[0]
            taken = min(count, len(numbers) - first)
            ids.append(numbers[first : first + taken])
            tables.append(cut(table, first, first + taken))
            self._waiting[0] = step, first + taken, numbers, table
            if first + taken == len(numbers):
                self._waiting.pop(0)
            count -= taken
        with work("collate"):
            batch = self.stream.collate(self.step, torch.from_numpy(np.concatenate(ids)), joined(tables))
        self.step += 1
        return self.divided(batch, bordered=False)

    def identity(self) -> dict[str, Any]:
        return {**self.stream.identity(), "target_tokens": self.target_tokens}

    def batch(self, step: int) -> JaggedBatch:
        """This rank's next batch. Raises ValueError where `step` is not the next one."""
        if step != self.step:
            raise ValueError(f"batches cut by tokens come one after another: {self.step} is next, not {step}")
        return next(self)

    def global_batch(self, step: int) -> JaggedBatch:
        """The batches of all ranks, end to end, which this rank then reads alone."""
        if not self._ranks:
            parts = [self.stream.of_rank(rank, self.world_size) for rank in range(self.world_size)]
            self._ranks = [DynamicStream(part, self.target_tokens) for part in parts]
        return JaggedBatch.concat([each.batch(step) for each in self._ranks])

    def state_dict(self) -> dict[str, Any]:
        """The position of this rank: the first row that is in no batch yet, and the stream's settings."""
        at, first = self._waiting[0][:2] if self._waiting else self._at
        place = {"step": self.step, "stream_step": at, "row": first, "target_tokens": self.target_tokens}
        return {**place, "rank": self.rank, "world_size": self.world_size, "stream": self.stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position of this rank; ValueError for one of another target, rank or stream."""
        own = {name: getattr(self, name) for name in ("target_tokens", "rank", "world_size")}
        check_same(state, own, "stream")
        step, stream_step, row = counts_of(state, "step", "stream_step", "row")
        self.stream.load_state_dict(state.get("stream", {}))
        self._begin(step, stream_step, row)

    def begin_at(self, step: int) -> None:
        """Read from the first row on, with batches numbered from `step` on: another log of a run."""
        self._begin(step, 0, 0)

    def _begin(self, step: int, stream_step: int, row: int) -> None:
        self.step, self._at = step, (stream_step, row)  # the first row that was not read
        self._waiting: list[tuple[int, int, np.ndarray, pa.Table]] = []  # step, first row left, ids, rows
        self._cuts = dynamic_batches(self._chunks(stream_step, row), self.target_tokens)

    def _chunks(self, step: int, row: int) -> Iterator[np.ndarray]:
        """Tokens of the samples of each step of the stream, which then wait; from `row` of `step` on."""
        # the rest of a step, then a whole epoch: what one epoch has first the next may have last
        empty, most = 0, 2 * self.stream.steps_per_epoch
        while empty < most:
            numbers, table = self.stream.rows_of(step)
            tokens = self.stream.tokens_of(table)[row:]
            if len(numbers) > row:
                self._waiting.append((step, row, numbers, table))
            empty = 0 if tokens.any() else empty + 1
            step, row = step + 1, 0
            self.stream.step, self._at = step, (step, 0)
            yield tokens
        raise ValueError(f"rank {self.rank} has an epoch without tokens: use fewer ranks, or longer rows")
