"""Sequence-wise samples of click and conversion models (MTGRBoost, section 2): context, history, exposed.

A sample is a stretch of one user's events: features of the user, earlier events with their actions, and the
items exposed afterwards, each with one label per task. Three samples, the second one without a history and
the last one without exposed items (both legal), so B = 3, Lh = 3, Le = 3 and T = 2::

    sample_ids             [   70,      71,      72 ]        (B,)
    features["history"]
      offsets              [    0,       2,       2,    3]   (B + 1,)
      ids                  [10, 11,              12 ]        (Lh,)   offsets[b] : offsets[b + 1] is sample b
    features["exposed"]
      offsets              [    0,       1,       3,    3]   (B + 1,)
      ids                  [   20,  21, 22          ]        (Le,)
    features["gender"]     [    1,       2,       1 ]        (B,)    one id for each sample
    features["user_id"]    [    4,       9,       5 ]        (B,)
    history_actions        [ 3,  5,               1 ]        (Lh,)   id of the user's action
    timestamps             [ 5,  9,               4,         (Lh + Le,)
                              12,   6,  7           ]
    labels                 [    1,   0,  1          ]        (Le, T) of task click
                           [    0,   0,  1          ]                and of task conversion
    tasks                  ("click", "conversion")
    genres, one bag for each item of the history and then for each exposed item: (Lh + Le) bags
      items                  10  11  12  20  21  22
      offsets              [  0,  2,  3,  3,  4,  6,  7]     (Lh + Le + 1,)
      values               [1, 4, 2,      2, 1, 4,  3  ]     item 12 has none

A model reads a sample's tokens in the order context, history, exposed. A sample's loss is the sum over its
exposed items and tasks. An empty batch has the same features without rows.

Dimensions: B samples, Lh tokens of history, Le exposed tokens, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from tritonrec.data.batch import Batch, check_binary, per_token
from tritonrec.data.jagged import KeyedJaggedTensor, Lookup
from tritonrec.data.splits import Part

ITEMS = ("history", "exposed")  # the first two keys; the contextual features follow
RESERVED_NAMES = ("item", "action", "genre")  # names that a contextual feature cannot have


class ImpressionSamples:
    """What a loader and a stream of impressions share.

    Attributes:
        context, tasks: names. label_rule: what the labels were made of, where nobody has chosen it.
        has_genres: whether items have genres.
    """

    context: tuple[str, ...]
    tasks: tuple[str, ...]
    label_rule: str
    has_genres: bool

    def evaluation_batches(self, batch_size: int = 256, part: Part = "test") -> Iterator[ImpressionBatch]:
        """The held-out windows of a part, at most `batch_size` at a time, as step 0.

        Histories are the events before; users without any are included. Raises ValueError where nothing is
        held out for the part.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ImpressionBatch(Batch):
    """Samples of click and conversion models; the layout is drawn in the module's docstring."""

    history_actions: Tensor = field(metadata=per_token("history"))  # (Lh,)
    timestamps: Tensor = field(metadata=per_token(*ITEMS))  # (Lh + Le,)
    labels: Tensor = field(metadata=per_token("exposed", dim=2))  # (Le, T), each 0 or 1
    genres: KeyedJaggedTensor | None = field(metadata=per_token(*ITEMS, dtype=None))  # Lh + Le bags
    tasks: tuple[str, ...]  # names of the T tasks

    @property
    def context(self) -> tuple[str, ...]:
        """Names of the contextual features."""
        return self.features.keys[len(ITEMS) :]

    @property
    def history_items(self) -> Tensor:
        """(Lh,) int64."""
        return self.features.values[self.features.span("history")]

    @property
    def history_offsets(self) -> Tensor:
        """(B + 1,) int64."""
        return self.features.offsets[: self.num_samples + 1]

    @property
    def exposed_items(self) -> Tensor:
        """(Le,) int64."""
        return self.features.values[self.features.span("exposed")]

    @property
    def exposed_offsets(self) -> Tensor:
        """(B + 1,) int64, from 0."""
        return self.features.offsets[self.num_samples : 2 * self.num_samples + 1] - len(self.history_actions)

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples: B for each feature of the context, and Lh + Le."""
        return len(self.features.values)

    @property
    def lengths(self) -> Tensor:
        """(B,) int64: tokens of each sample, context included."""
        return self.features.lengths.sum(0)

    @property
    def loss_terms(self) -> int:
        """Le: one term for each exposed item, the sum over its tasks."""
        return len(self.labels)

    def lookups(self) -> dict[str, Lookup]:
        """Features ``item`` (Lh + Le ids, history first), ``action``, ``genre`` (bags), and the context's."""
        values, lengths = self.features.values, self.features.length_per_key
        found = {"item": Lookup(values[: lengths[0] + lengths[1]]), "action": Lookup(self.history_actions)}
        if self.genres is not None:
            found["genre"] = Lookup(self.genres.values, self.genres.offsets)
        _, _, *context = values.split_with_sizes(lengths)
        return found | dict(zip(self.context, map(Lookup, context), strict=True))

    def sample_keys(self) -> tuple[Tensor, Tensor]:
        """Offsets (B + 1,) and each sample's items, history first.

        Other features are left out: their tables are so small that every micro-batch looks up most of them.
        """
        return self.features.by_sample(*ITEMS)

    def exposed_context(self, name: str) -> Tensor:
        """(Le,) int64: a contextual feature of each exposed item's sample."""
        return torch.repeat_interleave(self.features[name].ids, self.features.lengths[1])

    def validate(self) -> Self:
        """Return the batch itself, or raise a ValueError that names the field and the offending values."""
        super().validate()
        self.features.validate_unweighted()
        if self.features.keys[:2] != ITEMS:
            raise ValueError(f"the first keys of features must be {ITEMS}, got {self.features.keys}")
        taken = [name for name in RESERVED_NAMES if name in self.context]
        if taken:
            raise ValueError(f"context cannot have a feature called {taken[0]!r}: the name is reserved")
        self.features.validate_dense(*self.context)
        if self.labels.shape[1] != len(self.tasks):
            raise ValueError(
                f"labels has {self.labels.shape[1]} columns, "
                f"but there are {len(self.tasks)} tasks: {self.tasks}"
            )
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks must have different names, got {self.tasks}")
        if self.genres is not None and self.genres.keys != ("genre",):
            raise ValueError(f"genres must have the one key 'genre', got {self.genres.keys}")
        check_binary(self.labels, self.tasks)
        return self
