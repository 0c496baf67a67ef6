"""Batches with about equal tokens on every rank: Algorithm 1 of MTGRBoost over the samples of any loader.

An epoch's samples, in its shuffled order, are cut into chunks, and chunk c goes to rank c modulo the world
size. Every rank cuts its own batches (`balancing.dynamic_batches`), so their numbers of samples differ; the
loss is divided by the number of its terms over all ranks, as everywhere. A rank without further samples has
empty batches until the end of the epoch, and the next epoch begins with empty buffers: each sample is in one
batch of each epoch.

Epochs may differ in their number of steps, so the steps of all earlier epochs are counted to find a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from tritonrec.data.balancing import dynamic_batches
from tritonrec.data.epochs import BatchType, Endless, EpochLoader, check_at_least
from tritonrec.data.positions import check_same
from tritonrec.settings import typed


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

    def batch(self, step: int) -> BatchType:
        """This rank's batch; it may be empty."""
        return self.loader.make_batch(step, self._samples(step)[self.rank])

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
