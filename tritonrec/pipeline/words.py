"""A rank's digests in the header of a window, by which ranks see that they may differ (`run_agreement`)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import torch

from ..data.batch import Shard
from .model_call import CallerSettings

LOWEST = 32
"""Hashes of samples in a header: all of a small window, of a larger one enough to see a shared part."""


@dataclass(frozen=True)
class Words:
    """A rank's digests in the header of a window; 0: nothing to compare.

    Args:
        rows: of those that the caller has written, in a run's first window; alike on the ranks of a `shard`.
        lowest: `LOWEST` hashes of the window's samples, ascending, then zeros.
        rates: learning rates by what to call them, which are in the digest `settings`.
        loaders: of the settings of what divides the batches among the ranks. shards: these.
    """

    settings: int = 0
    state: int = 0
    samples: int = 0
    rows: int = 0
    shard: int = 0
    loaders: int = 0
    lowest: tuple[int, ...] = (0,) * LOWEST
    rates: Mapping[str, float | None] = field(default_factory=dict)
    shards: Sequence[Shard] = ()

    @property
    def row(self) -> list[int]:
        return [self.settings, self.state, self.samples, self.rows, self.shard, self.loaders, *self.lowest]

    @classmethod
    def of_row(cls, row: Sequence[int]) -> Words:
        """The words of a `row`."""
        return cls(row[0], row[1], row[2], row[3], row[4], row[5], tuple(row[6:]))


WIDTH = len(Words().row)
"""Numbers of a rank's words."""


def may_differ(rows: Sequence[Sequence[int]]) -> bool:
    """Whether any two ranks' words (`Words.row`) differ where they have to agree, or share samples."""
    found = [Words.of_row(row) for row in rows]
    for name in ("settings", "state", "loaders"):
        # 0: nothing to compare, as the state in a later window of a run.
        if len({getattr(each, name) for each in found} - {0}) > 1:
            return True
    # Equal within each shard: then there are as many pairs as shards.
    if len({(each.shard, each.rows) for each in found}) > len({each.shard for each in found}):
        return True
    samples = [each.samples for each in found if each.samples]
    if len({*samples}) < len(samples):
        return True
    owners = Counter(value for each in found for value in each.lowest if value)
    for each in found:
        shared = [owners[value] > 1 for value in each.lowest if value]
        # Where one epoch follows another without a border ranks may share a few. A part of a rank's are of a
        # shard that two have; most are of a loader with other settings.
        if sum(shared) > len(shared) // (8 if each.state else 2):
            return True
    return False


def words_of(
    settings: CallerSettings, state: int, batches: Sequence[Any], rates: Mapping[str, float | None]
) -> Words:
    """The words of a window of these batches; `state` as of `RunAgreement.begin`, 0 in a later window."""
    of_batches = [getattr(batch, "shard", None) for batch in batches]  # of a user's own batches none
    shards = [shard for shard in of_batches if shard is not None]
    # A step may have a sample that another step of the window, of the next epoch, has on another rank. So may
    # the same step where epochs have no borders; there the shards tell that ranks have parts of one.
    bordered = [shard is None or shard.bordered for shard in of_batches]
    hashes = _hashes([(batch.sample_ids, batch.step) for batch in compress(batches, bordered)])
    lowest = [0] * LOWEST
    if len(hashes):
        few = np.partition(hashes, LOWEST)[:LOWEST] if len(hashes) > LOWEST else hashes
        smallest = np.unique(few).tolist()
        lowest[: len(smallest)] = smallest
    # A sum over the samples has no order; the last bit keeps it from 0, which stands for none.
    samples = int(hashes.sum(dtype=np.int64)) | 1 if len(hashes) else 0
    return Words(
        digest(repr((settings, rates))),
        state,
        samples,
        loaders=digest(repr(shards)) if shards else 0,
        lowest=tuple(lowest),
        rates=rates,
        shards=shards,
    )


def words_of_end(rates: Mapping[str, float | None]) -> Words:
    """The words of a rank whose batches have ended."""
    return Words(settings=digest(repr(rates)), rates=rates)


def _hashes(samples: Sequence[tuple[torch.Tensor, int]]) -> np.ndarray:
    """Of ids (n,) int64 and their step: int64 hashes, none of which is 0 (the finalizer of splitmix64)."""
    # Steps have no fixed distance: ids that were made by multiplying with one (0x9E3779B97F4A7C15 is the
    # usual) would be those of the next step.
    at = [(ids.cpu().numpy().view(np.uint64), np.uint64(digest(str(step)))) for ids, step in samples]
    values = np.concatenate([np.empty(0, np.uint64), *(ids + of_step for ids, of_step in at)])
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((values ^ (values >> np.uint64(31))) | np.uint64(1)).view(np.int64)


def digest(text: str) -> int:
    """63 bits of a text, never 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 | 1
