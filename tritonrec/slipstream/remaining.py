"""The epochs of a loader without dropped samples."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Generic

import torch

from ..data.epochs import BatchType, EpochLoader


class RemainingLoader(Generic[BatchType]):
    """Steps [start, stop) of `loader`, with the `kept` samples only, cut into batches again.

    Within an epoch samples keep their order; a batch has samples of one epoch only. With all samples kept the
    batches are the loader's own. Steps are numbered from `first_step`.

    Args:
        loader: of this rank; gives seed, rank and world size.
        kept: (S,) bool, by position in ``loader.sample_ids``.
        start, stop: steps of the loader. first_step: number of the first step; `start` by default.
    """

    def __init__(
        self,
        loader: EpochLoader[BatchType],
        kept: torch.Tensor,
        start: int,
        stop: int,
        first_step: int | None = None,
    ):
        if kept.shape != loader.sample_ids.shape or kept.dtype != torch.bool:
            raise ValueError(f"kept must be bool of shape {tuple(loader.sample_ids.shape)}, got {kept.shape}")
        if not 0 <= start <= stop:
            raise ValueError(f"needs 0 <= start <= stop, got {start} and {stop}")
        self.loader, self.kept, self.start, self.stop = loader, kept, start, stop
        self.first_step = start if first_step is None else first_step
        self._epochs: list[tuple[int, int, int]] = []  # epoch, and its steps from and to
        per = loader.steps_per_epoch
        while start < stop:
            epoch, first = divmod(start, per)
            last = min(first + stop - start, per)
            self._epochs.append((epoch, first, last))
            start += last - first
        counts = [len(self._order(part)) for part in self._epochs]
        self.num_inputs = sum(counts)
        size = loader.batch_size
        self._steps = [*accumulate([-(-count // size) for count in counts], initial=0)]
        self._recent: tuple[tuple[int, int, int], torch.Tensor] | None = None

    @property
    def num_steps(self) -> int:
        """Steps that are left."""
        return self._steps[-1]

    def samples(self, step: int) -> torch.Tensor:
        """(b,) int64 positions of the samples of all ranks at `step`, for `EpochLoader.make_batch`."""
        number = step - self.first_step
        if not 0 <= number < self.num_steps:
            raise IndexError(
                f"step must be in [{self.first_step}, {self.first_step + self.num_steps}), got {step}"
            )
        part = bisect_right(self._steps, number) - 1
        epoch = self._epochs[part]
        if self._recent is None or self._recent[0] != epoch:
            self._recent = epoch, self._order(epoch)
        size = self.loader.batch_size
        first = (number - self._steps[part]) * size
        return self._recent[1][first : first + size]

    def batch(self, step: int) -> BatchType:
        """This rank's samples of a step."""
        samples = self.samples(step)
        return self.loader.make_batch(step, samples[self.loader.rank :: self.loader.world_size])

    def _order(self, part: tuple[int, int, int]) -> torch.Tensor:
        epoch, first, last = part
        size = self.loader.batch_size
        order = self.loader.epoch_order(epoch)[first * size : last * size]
        return order[self.kept[order]]
