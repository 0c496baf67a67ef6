"""Base of all training loaders: samples in a shuffled order, epoch after epoch, sharded over ranks.

Loaders have no state between steps: the order comes from a counter-based generator. So any rank can make any
step at any time, and a run resumed at step t gets the same batches. What the place of a loader
depends on is saved with its position, and compared when it goes on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.balancing import SequenceCost, partition_samples
from tritonrec.data.batch import Batch, Shard
from tritonrec.kernels.launch import random_indices
from tritonrec.settings import typed

# Streams of the counter-based generator: under one seed, shuffling and negatives share no number.
SHUFFLE, NEGATIVES = 0, 1

BatchType = TypeVar("BatchType")


class Endless(Generic[BatchType]):
    """A loader of steps, of which an iterator, or a length, would have to choose an end."""

    world_size: int
    _shard: Shard | None = None

    def __iter__(self) -> Iterator[BatchType]:
        raise TypeError(f"a {type(self).__name__} has no end: (loader.batch(step) for step in range(steps))")

    def __len__(self) -> int:
        raise TypeError(
            f"a {type(self).__name__} has no end: an epoch has loader.steps_per_epoch batches, and "
            "loader.num_samples samples"
        )

    def __bool__(self) -> bool:  # which would be the length
        return True

    def divided(self, batch: BatchType, bordered: bool = True) -> BatchType:
        """The batch of this rank, with the `Shard` that it is; of one rank alone as it is."""
        if self.world_size == 1 or not isinstance(batch, Batch):
            return batch
        if self._shard is None:
            settings = {**self.identity(), "world_size": self.world_size}
            self._shard = Shard({name: str(value) for name, value in settings.items()}, bordered)
        return replace(batch, shard=self._shard)

    def identity(self) -> dict[str, Any]:
        """What the batch of all ranks depends on, cheap to tell."""
        raise NotImplementedError


class EpochLoader(Endless[BatchType]):
    """Batches of samples in the order of an epoch, sharded over ranks.

    Args:
        sample_ids: (S,) int64, distinct; with the seed they decide the order.
        sample_tokens: (S,) int64, the length of each sample.
        batch_size: samples of a global batch, over all ranks; the last batch of an epoch may have fewer.
        seed: int64; fixes the order of samples in every epoch.
        rank, world_size: of the shard that `batch` returns.
        balance: partition each global batch by cost (`balancing.partition_samples`), True for the default
            `SequenceCost`; otherwise rank r has its samples r, r + world_size, ...

    Raises ValueError for a number out of range.
    """

    def __init__(
        self,
        sample_ids: Tensor,
        sample_tokens: Tensor,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        balance: bool | SequenceCost = False,
    ) -> None:
        check_at_least("batch_size", batch_size, 1)
        check_at_least("world_size", world_size, 1)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self.sample_ids, self.sample_tokens = sample_ids, sample_tokens
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self.cost = SequenceCost() if balance is True else balance or None
        self._digest: str | None = None
        self._recent_order: tuple[int, Tensor] | None = None

    def settings(self) -> dict[str, Any]:
        """What a step's batch depends on, beside `content`; ranks and balance change no global batch."""
        return {"kind": type(self).__name__, "batch_size": self.batch_size, "seed": self.seed}

    def identity(self) -> dict[str, Any]:
        # In the place of a digest of all data: sums of two columns.
        sums = self.num_samples, int(self.sample_ids.sum()), int(self.sample_tokens.sum())
        return {**self.settings(), "balance": self.cost, "samples (number, sum of ids, tokens)": sums}

    def content(self) -> tuple[Tensor, ...]:
        """The data that a step's batch depends on."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What a position depends on. The position itself is the step, at which `batch` begins anywhere."""
        if self._digest is None:
            self._digest = digest_of(*self.content())
        return {**self.settings(), "data": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError naming what differs from the loader of a `state_dict`."""
        check_same(state, self.state_dict())

    def make_batch(self, step: int, samples: Tensor) -> BatchType:
        """The batch of the samples at positions `samples` (b,) int64 of `sample_ids`, in that order."""
        raise NotImplementedError

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.sample_ids)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, the incomplete last one included."""
        return -(-self.num_samples // self.batch_size)

    def epoch_order(self, epoch: int) -> Tensor:
        """(S,) int64: positions of the samples in the order of `epoch`."""
        recent = self._recent_order
        if recent is None or recent[0] != epoch:
            ids = self.sample_ids
            words = random_indices(self.seed, SHUFFLE, epoch, ids, torch.zeros_like(ids), 1, 2**32)
            recent = self._recent_order = epoch, torch.argsort(words[:, 0], stable=True)
        return recent[1]

    @typed
    def global_batch(self, step: int) -> BatchType:
        """The batch of all ranks at `step` >= 0, counted over all epochs."""
        return self.make_batch(step, self._global_samples(step))

    @typed
    def batch(self, step: int) -> BatchType:
        """This rank's samples of the global batch, in its order; may be empty."""
        samples = self._global_samples(step)
        return self.divided(self.make_batch(step, samples[self._shards(samples)[self.rank]]))

    def global_size(self, step: int) -> tuple[int, int]:
        """Samples and tokens of the global batch."""
        samples = self._global_samples(step)
        return len(samples), int(self.sample_tokens[samples].sum())

    def tokens_per_rank(self, step: int) -> Tensor:
        """(world_size,) int64: tokens of each rank's batch."""
        samples = self._global_samples(step)
        tokens = self.sample_tokens[samples]
        return torch.stack([tokens[places].sum() for places in self._shards(samples)])

    def _global_samples(self, step: int) -> Tensor:
        check_at_least("step", step, 0)
        epoch, place = divmod(step, self.steps_per_epoch)
        return self.epoch_order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]

    def _shards(self, samples: Tensor) -> list[Tensor]:
        if self.cost is not None:
            return partition_samples(self.cost.of(self.sample_tokens[samples]), self.world_size)
        places = torch.arange(len(samples), device="cpu")
        return [places[rank :: self.world_size] for rank in range(self.world_size)]


def check_at_least(name: str, value: int, least: int) -> None:
    """Raise ValueError if `value` is below `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_same(state: Mapping[str, Any], own: Mapping[str, Any], what: str = "loader") -> None:
    """Raise ValueError naming all of `own` that a saved position has otherwise: its batches would be others.

    What an earlier version did not save is not compared.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"the position of a {what} is a mapping, got {type(state).__name__}")
    other = {name: value for name, value in own.items() if name in state and state[name] != value}
    if other:
        saved = ", ".join(f"{name} {state[name]}" for name in other)
        here = ", ".join(str(value) for value in other.values())
        raise ValueError(
            f"the position is one of a {what} with {saved}, and this one has {here}: use the same, or begin "
            "anew without the position"
        )


def digest_of(*columns: Tensor | np.ndarray) -> str:
    """Of the values, shapes and types of columns."""
    digest = hashlib.sha256()
    for column in columns:
        array = column.numpy() if isinstance(column, Tensor) else column
        digest.update(f"{array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]
