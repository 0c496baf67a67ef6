"""Batches with about equal tokens on every rank, from a stream: Algorithm 1 of MTGRBoost (section 5.1).

A rank cuts its own samples, in the order in which its part of the stream has them. Epochs follow each other
without a border, so every rank always has a batch. Samples of a step depend on the target and the world size;
a position is one of each rank, for as many ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tritonrec.data.balancing import dynamic_batches
from tritonrec.data.batch import JaggedBatch
from tritonrec.data.epochs import check_at_least
from tritonrec.data.positions import check_same
from tritonrec.data.sequences import NextItemStream
from tritonrec.data.slices import work
from tritonrec.data.stream import cut, joined
from tritonrec.settings import counts_of, typed

if TYPE_CHECKING:
    import pyarrow as pa


@typed
class DynamicStream:
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
        return batch

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
