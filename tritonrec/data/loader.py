"""Next-item training batches as a pure function of (seed, step).

Each user is one sample. The last item of a user who has at least two is held out for evaluation; of the rest,
the last ``max_seq_len + 1`` items make a sequence and its labels::

    items of the user    10  11  12  13  14          max_seq_len = 3
    training items       10  11  12  13              14 is held out
    ids                  10  11  12
    labels                   11  12  13

A user without any (id, label) pair, that is with fewer than two training items, is in no training batch.
Loaders have no state between steps (`epochs`): negatives, too, come from a counter-based generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tritonrec.data.balancing import SequenceCost
from tritonrec.data.batch import JaggedBatch
from tritonrec.data.epochs import NEGATIVES, EpochLoader, check_at_least
from tritonrec.data.interactions import Interactions
from tritonrec.data.jagged import token_indices
from tritonrec.data.splits import NO_PART, Part, Split, held_out
from tritonrec.kernels.launch import random_indices
from tritonrec.settings import typed

LEAVE_ONE_OUT = Split()


@dataclass(frozen=True)
class EvaluationBatch:
    """Users to rank the whole catalogue for. B users, I items of the catalogue, S items seen in all.

    `history` has the last ``max_seq_len`` items of each user before the held-out one; a user with several is
    there once for each. It has no negatives, and its labels repeat its ids: it is not for training.
    """

    history: JaggedBatch
    targets: Tensor  # (B,) int64: position of the held-out item in the catalogue, -1 if it was never trained
    seen_users: Tensor  # (S,) int64: position of the user in this batch, and ...
    seen_items: Tensor  # (S,) int64: ... position in the catalogue of an item before the held-out one


def trained_part(
    step: int, sample_ids: Tensor, items: Tensor, timestamps: Tensor, first: Tensor, lengths: Tensor
) -> JaggedBatch:
    """The batch of the tokens from `first` on, (b,) each; a token's label is the item behind it."""
    tokens, offsets = token_indices(first, lengths)
    ids = items[tokens]
    none = ids.new_empty(len(ids), 0)
    return JaggedBatch.from_sequences(
        step, sample_ids, offsets, ids, timestamps[tokens], items[tokens + 1], none
    )


class NextItems:
    """What loaders and streams of next-item training share: negatives, and histories of held-out items."""

    seed: int
    max_seq_len: int
    num_negatives: int
    catalogue: Tensor
    popularity: Tensor
    label_rule = ""  # there are no labels that somebody makes

    def evaluation_batches(self, batch_size: int = 256, part: Part = "test") -> Iterator[EvaluationBatch]:
        """All held-out items of a part, at most `batch_size` at a time.

        Raises ValueError where nothing is held out for it, a stream at its end.
        """
        raise NotImplementedError

    @property
    def num_items(self) -> int:
        """Items of the `catalogue` (I,) int64: all items in training sequences, ascending.

        `popularity` (I,) int64 is the number of their occurrences.
        """
        return len(self.catalogue)

    def with_negatives(self, batch: JaggedBatch) -> JaggedBatch:
        """The batch with items drawn for each token."""
        tokens = batch.token_sample_ids(), batch.token_positions()
        drawn = random_indices(self.seed, NEGATIVES, batch.step, *tokens, self.num_negatives, self.num_items)
        return replace(batch, negatives=self.catalogue[drawn])

    def evaluated(
        self, sample_ids: Tensor, items: Tensor, timestamps: Tensor, starts: Tensor, before: Tensor
    ) -> EvaluationBatch:
        """The batch of the events at ``starts + before`` (b,), whose users have `before` events before."""
        kept = before.clamp(max=self.max_seq_len)
        tokens, offsets = token_indices(starts + before - kept, kept)
        ids = items[tokens]
        none = ids.new_empty(len(ids), 0)
        history = JaggedBatch.from_sequences(0, sample_ids, offsets, ids, timestamps[tokens], ids, none)
        seen, _ = token_indices(starts, before)
        users, places = (
            torch.repeat_interleave(torch.arange(len(starts), device="cpu"), before),
            self._places(items[seen]),
        )
        known = places >= 0
        return EvaluationBatch(history, self._places(items[starts + before]), users[known], places[known])

    def _places(self, items: Tensor) -> Tensor:
        """Positions of `items` in the catalogue, -1 where absent."""
        places = torch.searchsorted(self.catalogue, items).clamp(max=self.num_items - 1)
        return torch.where(self.catalogue[places] == items, places, -1)


@typed
class NextItemLoader(NextItems, EpochLoader[JaggedBatch]):
    """Batches of next-item training, sharded over ranks, and of the evaluation of held-out items.

    Args:
        interactions: the log.
        batch_size: samples of a global batch, over all ranks; the last batch of an epoch may have fewer.
        max_seq_len: largest number of tokens of a sample.
        num_negatives: K, sampled uniformly from the catalogue for each token; one may equal the label.
        seed: int64; fixes the order of samples in every epoch, and all negatives.
        rank, world_size: of the shard that `batch` returns.
        balance: partition each global batch by cost (`EpochLoader`); the batch has the same samples.
        split: the events for training, validation and test; by default each user's last one is for test.

    Raises ValueError for a number out of range, and when no user has two training items.
    """

    def __init__(
        self,
        interactions: Interactions,
        batch_size: int,
        max_seq_len: int,
        num_negatives: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        balance: bool | SequenceCost = False,
        split: Split = LEAVE_ONE_OUT,
    ) -> None:
        check_at_least("max_seq_len", max_seq_len, 1)
        check_at_least("num_negatives", num_negatives, 0)
        self.max_seq_len, self.num_negatives = max_seq_len, num_negatives

        sequences = interactions.sequences
        self._user_ids = torch.from_numpy(sequences.user_ids)
        self._items = torch.from_numpy(sequences.items)
        self._timestamps = torch.from_numpy(sequences.timestamps)
        self._starts = torch.from_numpy(sequences.offsets[:-1])
        lengths = torch.from_numpy(sequences.lengths)
        self.split = split.resolved(sequences.timestamps)
        # A lone item is not held out: it has no history.
        self._counts = self.split.counts(sequences.offsets, sequences.timestamps)
        self._offsets, self._trained = sequences.offsets, torch.from_numpy(self._counts[0])
        self._samples = (self._trained >= 2).nonzero().flatten()
        if len(self._samples) == 0:
            needs = "three interactions that make one training token and one item to hold out"
            if split != LEAVE_ONE_OUT:
                needs = f"two training items that make one token, beside those that {split} holds out"
            raise ValueError(f"none of the {len(lengths)} users has the {needs}")
        sample_tokens = (self._trained[self._samples] - 1).clamp(max=max_seq_len)
        super().__init__(
            self._user_ids[self._samples], sample_tokens, batch_size, seed, rank, world_size, balance
        )
        tokens, _ = token_indices(self._starts, self._trained)
        self.catalogue, self.popularity = torch.unique(self._items[tokens], return_counts=True)

    def settings(self) -> dict[str, Any]:
        sizes = {"max_seq_len": self.max_seq_len, "num_negatives": self.num_negatives}
        return {**super().settings(), **sizes, "split": str(self.split)}

    def content(self) -> tuple[Tensor, ...]:
        return self._user_ids, torch.from_numpy(self._offsets), self._items, self._timestamps

    def make_batch(self, step: int, samples: Tensor) -> JaggedBatch:
        """The batch of the samples at positions `samples` (b,) int64 of `sample_ids`, in that order."""
        users, lengths = self._samples[samples], self.sample_tokens[samples]
        first = self._starts[users] + self._trained[users] - 1 - lengths
        batch = trained_part(step, self._user_ids[users], self._items, self._timestamps, first, lengths)
        return self.with_negatives(batch)

    def evaluation_batches(self, batch_size: int = 256, part: Part = "test") -> Iterator[EvaluationBatch]:
        """As of its base, by their users' ids."""
        check_at_least("batch_size", batch_size, 1)
        events = list(map(torch.from_numpy, held_out(self._offsets, *self._counts, part)))
        if not len(events[0]):
            raise ValueError(f"no event is held out for {part}: {NO_PART}")
        for users, before in zip(*(each.split(batch_size) for each in events), strict=True):
            ids, starts = self._user_ids[users], self._starts[users]
            yield self.evaluated(ids, self._items, self._timestamps, starts, before)
