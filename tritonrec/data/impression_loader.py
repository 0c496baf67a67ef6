"""Batches of impressions from a rating or click log, as a pure function of (seed, step).

The last `max_exposed` events of every user are held out for evaluation. The others are cut, from the last one
backwards, into windows of `max_exposed` exposed items. A sample is one window with up to `max_history` events
before it, so every training event is exposed once in an epoch::

    events of a user    a   b   c   d   e   f   g       max_exposed = 2, max_history = 3
    windows            [a] [b   c] [d   e]              three samples,
    histories           -   a       a b c               the first one without a history
    held out                               [f   g]      for evaluation, with history c d e

Labels and actions come from the log's feedback columns, if any (KuaiRand): each column is a task, and bit i
of an event's action is its label of task i. Otherwise they come from the ratings: task ``click`` is a rating
of at least 4, task ``conversion`` a rating of 5, and the action is the rating, rounded down. A conversion is
always a click, so the two are the paper's CTR and CTCVR.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.balancing import SequenceCost
from tritonrec.data.epochs import EpochLoader, check_at_least
from tritonrec.data.impressions import ImpressionBatch, ImpressionSamples
from tritonrec.data.interactions import Interactions
from tritonrec.data.jagged import KeyedJaggedTensor, Lookup, token_indices
from tritonrec.data.labels import (
    CLICK_RATING,
    CONVERSION_RATING,
    check_labels,
    check_ratings,
    default_rule,
    default_threshold,
    rating_labels,
)
from tritonrec.data.loader import LEAVE_ONE_OUT
from tritonrec.data.splits import NO_PART, Part, Split, check_part
from tritonrec.settings import typed


@typed
class ImpressionLoader(ImpressionSamples, EpochLoader[ImpressionBatch]):
    """Windows of a log, sharded over ranks, and the last window of every user for evaluation.

    Sample ids are the positions of the windows' first exposed items in the log's `sequences`. The context is
    ``user_id`` and the log's user features.

    Args:
        interactions: the log, with ratings or feedback.
        batch_size: samples of a global batch, over all ranks; the last batch of an epoch may have fewer.
        max_history, max_exposed: largest number of events of a sample before and in its window.
        seed: int64; fixes the order of samples in every epoch.
        rank, world_size: of the shard that `batch` returns.
        balance: partition each global batch by cost (`EpochLoader`); the batch has the same samples.
        split: the events for training, validation and test; by default each user's last `max_exposed` are for
            test. Those of each part are cut into windows of their own.
        label_threshold: a rating of at least this is a click, and there is no task ``conversion``.

    Raises ValueError for a number out of range, for a log without labels, for ratings above 5 without a
    threshold, for a task whose labels are all alike, and when no user has more than `max_exposed` events.
    """

    def __init__(
        self,
        interactions: Interactions,
        batch_size: int,
        max_history: int,
        max_exposed: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        balance: bool | SequenceCost = False,
        split: Split = LEAVE_ONE_OUT,
        label_threshold: float | None = None,
    ) -> None:
        check_at_least("max_history", max_history, 0)
        check_at_least("max_exposed", max_exposed, 1)
        self.max_history, self.max_exposed = max_history, max_exposed
        sequences = interactions.sequences
        rows = sequences.rows
        labels, actions, self.tasks = _feedback(interactions, label_threshold)
        of_ratings = interactions.rating if label_threshold is not None or not interactions.feedback else None
        is_default = of_ratings is not None and label_threshold is None
        self.label_rule = default_rule(with_conversions=True) if is_default else ""
        self._check_tasks(labels, of_ratings, CLICK_RATING if label_threshold is None else label_threshold)
        self._items = torch.from_numpy(sequences.items)
        self._timestamps = torch.from_numpy(sequences.timestamps)
        self._labels, self._actions = torch.from_numpy(labels[rows]), torch.from_numpy(actions[rows])
        context = {"user_id": sequences.user_ids}
        if interactions.user_features is not None:
            context |= interactions.user_features.of(sequences.user_ids)
        self._context = {name: torch.from_numpy(context[name]) for name in sorted(context)}
        self.context, self.has_genres = tuple(self._context), interactions.genres is not None
        self._genres: tuple[Tensor, ...] | None = None
        if (genres := interactions.genres) is not None:
            self._genres = tuple(map(torch.from_numpy, (*genres.of(sequences.items), genres.genres)))

        self.split = split.resolved(sequences.timestamps)
        counts = self.split.counts(sequences.offsets, sequences.timestamps, max_exposed, 0)
        self._starts = torch.from_numpy(sequences.offsets[:-1])
        ends = self._starts + torch.from_numpy(counts[0])
        later = ends + torch.from_numpy(counts[1])
        self._parts: dict[Part, tuple[Tensor, Tensor]] = {
            "validation": (ends, later),
            "test": (later, torch.from_numpy(sequences.offsets[1:])),
        }
        self._users, begins, self._window_ends = self._windows(self._starts, ends)
        self._check_windows(torch.bincount(self._users, minlength=len(ends)))
        history = (begins - self._starts[self._users]).clamp(max=max_history)
        tokens = history + self._window_ends - begins + len(self._context)
        super().__init__(begins, tokens, batch_size, seed, rank, world_size, balance)

    def _check_tasks(self, labels: np.ndarray, rating: np.ndarray | None, threshold: float) -> None:
        """`labels` (N, T) of the log, and the ratings that they are made of, if they are."""
        if rating is not None:
            check_ratings(rating, threshold)
        for task, column in zip(self.tasks, labels.T, strict=True):
            check_labels(task, column)

    def _windows(self, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """User, first event and end of each window of the events [first, last) (U,), from the last back."""
        windows = -(-(last - first) // self.max_exposed)
        users = torch.repeat_interleave(torch.arange(len(windows), device="cpu"), windows)
        backwards, _ = token_indices(torch.zeros_like(windows), windows)
        ends = last[users] - backwards * self.max_exposed
        return users, torch.maximum(ends - self.max_exposed, first[users]), ends

    def settings(self) -> dict[str, Any]:
        sizes = {"max_history": self.max_history, "max_exposed": self.max_exposed}
        return {**super().settings(), **sizes, "split": str(self.split), "tasks": list(self.tasks)}

    def content(self) -> tuple[Tensor, ...]:
        events = self._items, self._timestamps, self._labels, self._actions
        return self._starts, *events, *self._context.values(), *(self._genres or ())

    def _check_windows(self, windows: Tensor) -> None:
        """`windows` (U,) of each user."""
        if int(windows.sum()) == 0:
            raise ValueError(
                f"none of the {len(windows)} users has more than max_exposed = {self.max_exposed} events, "
                "and that many are held out for evaluation"
            )

    def make_batch(self, step: int, samples: Tensor) -> ImpressionBatch:
        """The batch of the samples at positions `samples` (b,) int64 of `sample_ids`, in that order."""
        return self._cut(step, self._users[samples], self.sample_ids[samples], self._window_ends[samples])

    def evaluation_batches(self, batch_size: int = 256, part: Part = "test") -> Iterator[ImpressionBatch]:
        """As of its base, by the users' ids."""
        check_at_least("batch_size", batch_size, 1)
        users, begins, ends = self._windows(*self._parts[check_part(part)])
        if not len(users):
            raise ValueError(f"no event is held out for {part}: {NO_PART}")
        for own in torch.arange(len(users), device="cpu").split(batch_size):
            yield self._cut(0, users[own], begins[own], ends[own])

    def _cut(self, step: int, users: Tensor, begins: Tensor, ends: Tensor) -> ImpressionBatch:
        """Samples of `users` whose exposed events are those at ``begins[b] : ends[b]``."""
        lengths = (begins - self._starts[users]).clamp(max=self.max_history)
        past, history_offsets = token_indices(begins - lengths, lengths)
        shown, exposed_offsets = token_indices(begins, ends - begins)
        events = torch.cat([past, shown])
        features = {
            "history": Lookup(self._items[past], history_offsets),
            "exposed": Lookup(self._items[shown], exposed_offsets),
        }
        return ImpressionBatch(
            step=step,
            sample_ids=begins,
            features=KeyedJaggedTensor.from_dict(
                features | {name: Lookup(ids[users]) for name, ids in self._context.items()}
            ),
            history_actions=self._actions[past],
            timestamps=self._timestamps[events],
            labels=self._labels[shown],
            genres=self._bags(events),
            tasks=self.tasks,
        )

    def _bags(self, events: Tensor) -> KeyedJaggedTensor | None:
        if self._genres is None:
            return None
        starts, lengths, genres = self._genres
        ids, offsets = token_indices(starts[events], lengths[events])
        return KeyedJaggedTensor(("genre",), genres[ids], offsets)


def _feedback(
    interactions: Interactions, threshold: float | None
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Labels (N, T) int64, actions (N,) int64 and the names of the tasks, row by row of the log."""
    if interactions.feedback and threshold is None:
        labels = np.stack(list(interactions.feedback.values()), 1)
        return labels, (labels << np.arange(labels.shape[1])).sum(1), tuple(interactions.feedback)
    rating = interactions.rating
    if rating is None:
        raise ValueError(
            "the log has neither ratings nor feedback columns, which give the labels of impressions: "
            "train on the next item, or give the log a column 'rating'"
        )
    if not ((rating >= 0) & (rating < 2**53)).all():
        row = int((~((rating >= 0) & (rating < 2**53))).nonzero()[0][0])
        raise ValueError(f"ratings are ids of actions and must be in [0, 2**53): row {row} has {rating[row]}")
    tasks = {"click": rating_labels(rating, default_threshold(rating) if threshold is None else threshold)}
    if threshold is None:
        tasks["conversion"] = rating == CONVERSION_RATING
    labels = np.stack(list(tasks.values()), 1).astype(np.int64)
    return labels, rating.astype(np.int64), tuple(tasks)
