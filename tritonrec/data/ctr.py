"""Samples of click models: one impression each, with dense features, one id per categorical feature, a label.

Three samples of two dense and two categorical features, so B = 3, F = 2 and C = 2::

    sample_ids          [ 70,          71,          72        ]     (B,)     rows of the log
    dense               [[0.0, 1.1],  [2.3, 0.0],  [0.7, 0.7]]      (B, F)   float32
    features["site"]    [ 10,          11,          10        ]     (B,)     one id for each sample
    features["device"]  [  4,           4,           5        ]     (B,)
    labels              [  1,           0,           0        ]     (B,)     clicked or not

A `ClickLog` holds dense features, ids and labels of a whole log, oldest row first; its last rows are for
test, and maybe some before for validation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.balancing import SequenceCost
from tritonrec.data.batch import Batch, check_binary, per_sample
from tritonrec.data.epochs import EpochLoader, check_at_least
from tritonrec.data.interactions import Interactions
from tritonrec.data.jagged import KeyedJaggedTensor, Lookup
from tritonrec.data.labels import check_labels, check_ratings, default_rule, default_threshold, rating_labels
from tritonrec.data.loader import LEAVE_ONE_OUT
from tritonrec.data.ranking import Scored, auc, one_by_one
from tritonrec.data.splits import NO_PART, Part, Split, check_part, rows_of
from tritonrec.settings import typed

HELD_OUT = 0.1
"""Share of a log that is held out."""


@dataclass(frozen=True)
class ClickLog:
    """Impressions in the order of time: rows for training, `validated` for validation, the rest for test.

    `label_rule` says what the labels were made of, where nobody has chosen it.

    Raises ValueError naming a column of another shape or dtype, a label that is neither 0 nor 1, a dense
    value that is not finite, and parts that are not in the log.
    """

    dense: np.ndarray  # (N, F) float32
    categories: np.ndarray  # (N, C) int64
    labels: np.ndarray  # (N,) int64
    features: tuple[str, ...]  # C names
    trained: int
    validated: int = 0
    label_rule: str = ""

    def __post_init__(self) -> None:
        rows = len(self.labels)
        for name, column, dtype, shape in (
            ("labels", self.labels, np.int64, (rows,)),
            ("dense", self.dense, np.float32, (rows, *self.dense.shape[1:2])),
            ("categories", self.categories, np.int64, (rows, len(self.features))),
        ):
            if column.dtype != dtype or column.shape != shape or (name == "dense" and column.ndim != 2):
                raise ValueError(
                    f"{name} must be {np.dtype(dtype)} of shape {shape}, got {column.dtype} {column.shape}"
                )
        if not self.features or len(set(self.features)) != len(self.features):
            raise ValueError(f"a log of clicks needs features with distinct names, got {self.features}")
        wrong = (self.labels != 0) & (self.labels != 1)
        if wrong.any():
            at = int(wrong.nonzero()[0][0])
            raise ValueError(f"labels must be 0 or 1: row {at} has {self.labels[at]}")
        if not np.isfinite(self.dense).all():
            row, place = (int(at[0]) for at in (~np.isfinite(self.dense)).nonzero())
            raise ValueError(
                f"dense values must be finite: row {row}, column {place} has {self.dense[row, place]}"
            )
        if not 1 <= self.trained <= rows:
            raise ValueError(f"trained must be in [1, {rows}], the rows of the log, got {self.trained}")
        if not 0 <= self.validated <= rows - self.trained:
            raise ValueError(f"validated must be in [0, {rows - self.trained}], got {self.validated}")

    def __len__(self) -> int:
        return len(self.labels)

    def divided(self, split: Split) -> ClickLog:
        """The log in the parts of a split: the default keeps `trained`, with validation less a tenth of it.

        Raises the errors of `splits.rows_of`.
        """
        if split == LEAVE_ONE_OUT:
            return self
        trained, validated = rows_of(split, len(self), self.trained, HELD_OUT)
        return replace(self, trained=trained, validated=validated)


def num_training_rows(rows: int) -> int:
    """Number of training rows of `rows` in the order of time: all but the last `HELD_OUT`, at least one."""
    return max(1, rows - math.ceil(rows * HELD_OUT))


@dataclass(frozen=True)
class ClickBatch(Batch):
    """Samples of click models; the layout is drawn in the module's docstring."""

    dense: Tensor = field(metadata=per_sample(torch.float32, dim=2))  # (B, F)
    labels: Tensor = field(metadata=per_sample())  # (B,)

    def lookups(self) -> dict[str, Lookup]:
        """(B,) ids for each feature."""
        features = self.features
        ids = features.values.split_with_sizes(features.length_per_key)
        return dict(zip(features.keys, map(Lookup, ids), strict=True))

    def validate(self) -> Self:
        """Return the batch itself, or raise a ValueError that names the field and the offending values."""
        super().validate()
        self.features.validate_unweighted()
        self.features.validate_dense(*self.features.keys)
        check_binary(self.labels)
        if not bool(torch.isfinite(self.dense).all()):
            row, column = (~torch.isfinite(self.dense)).nonzero()[0].tolist()
            raise ValueError(
                f"dense values must be finite: dense[{row}, {column}] = {float(self.dense[row, column])}"
            )
        return self


class ClickSamples:
    """What a loader and a stream of clicks share: rows for training, and behind them those held out.

    Attributes:
        features, num_dense: names of the categorical features, and the number F of dense ones.
        trained: rows that are not held out. num_validation, num_held_out: rows for validation and test.
        label_rule: what the labels were made of, where nobody has chosen it.
    """

    features: tuple[str, ...]
    num_dense: int
    trained: int
    num_validation: int
    num_held_out: int
    label_rule: str = ""

    @property
    def click_rate(self) -> float:
        """Share of clicks among the rows that are not held out."""
        raise NotImplementedError

    def evaluation_batches(self, batch_size: int = 1024, part: Part = "test") -> Iterator[ClickBatch]:
        """The rows of a part in their order, at most `batch_size` at a time, as step 0."""
        raise NotImplementedError

    def rows_of_part(self, part: Part) -> tuple[int, int]:
        """[first, last) of the rows of a part; ValueError for another one."""
        border = self.trained + self.num_validation
        return (border, border + self.num_held_out) if check_part(part) == "test" else (self.trained, border)


@typed
class ClickLoader(ClickSamples, EpochLoader[ClickBatch]):
    """Training rows of a log, shuffled and sharded over ranks; sample ids are row numbers of the log.

    Args:
        log: see `ClickLog`.
        batch_size: samples of a global batch, over all ranks; the last batch of an epoch may have fewer.
        seed: int64; fixes the order of samples in every epoch.
        rank, world_size: of the shard that `batch` returns.
        balance: as `EpochLoader`; all samples have the same cost.
        rows: [first, last) of the training rows; by default all that are not held out.

    Raises ValueError for a number out of range, and where all labels are alike.
    """

    def __init__(
        self,
        log: ClickLog,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        balance: bool | SequenceCost = False,
        rows: tuple[int, int] | None = None,
    ) -> None:
        first, last = rows or (0, log.trained)
        if not 0 <= first < last <= log.trained:
            raise ValueError(f"rows must be a part of [0, {log.trained}), got [{first}, {last})")
        check_labels("click", log.labels[: log.trained])
        self.log, self.features, self.num_dense = log, log.features, log.dense.shape[1]
        self.trained, self.num_validation, self.label_rule = log.trained, log.validated, log.label_rule
        self.num_held_out = len(log) - log.trained - log.validated
        self._dense, self._categories = torch.from_numpy(log.dense), torch.from_numpy(log.categories)
        self._labels = torch.from_numpy(log.labels)
        sample_ids = torch.arange(first, last, device="cpu")
        super().__init__(sample_ids, torch.ones_like(sample_ids), batch_size, seed, rank, world_size, balance)

    def settings(self) -> dict[str, Any]:
        rows = [int(self.sample_ids[0]), int(self.sample_ids[-1]) + 1]
        return {**super().settings(), "features": list(self.features), "rows": rows}

    def content(self) -> tuple[Tensor, ...]:
        return self._dense, self._categories, self._labels

    @property
    def click_rate(self) -> float:
        return float(self.log.labels[: self.log.trained].mean())

    def categories(self) -> Tensor:
        """(S, C) int64: the ids of every sample, in the order of `sample_ids`."""
        return self._categories[self.sample_ids]

    def make_batch(self, step: int, samples: Tensor) -> ClickBatch:
        """The batch of the samples at positions `samples` (b,) int64 of `sample_ids`, in that order."""
        return self._rows(step, self.sample_ids[samples])

    def evaluation_batches(self, batch_size: int = 1024, part: Part = "test") -> Iterator[ClickBatch]:
        check_at_least("batch_size", batch_size, 1)
        first, last = self.rows_of_part(part)
        for rows in torch.arange(first, last, device="cpu").split(batch_size) if first < last else ():
            yield self._rows(0, rows)

    def _rows(self, step: int, rows: Tensor) -> ClickBatch:
        features = KeyedJaggedTensor.from_matrix(self.features, self._categories[rows])
        return ClickBatch(step, rows, features, self._dense[rows], self._labels[rows])


@typed
def clicks_from_ratings(
    log: Interactions, label_threshold: float | None = None, split: Split = LEAVE_ONE_OUT
) -> ClickLog:
    """Clicks from a rating log: a rating of at least `label_threshold` is a click (MovieLens as CTR).

    Features are ``item``, ``user``, the log's user features, and, if the log has genres, ``genres``, one id
    for each set of genres. The two dense features are log(1 + n) of the number n of earlier ratings of the
    item, and by the user.

    Args:
        label_threshold: by default the log's feedback ``click`` says what was clicked, where it has one, and
            else 4 is the threshold, of ratings of up to 5.
        split: by default the last `HELD_OUT` of every user's ratings are for test, with validation as many
            before.

    Raises ValueError for a log without ratings, for higher ones without a threshold, and where all labels are
    alike.
    """
    labels, rule = _clicks_of(log, label_threshold)
    in_time = log.in_time()
    user, item, labels = log.user[in_time], log.item[in_time], labels[in_time]
    earlier = [_earlier(ids) for ids in (item, user)]
    columns = {"item": item, "user": user}
    if log.user_features is not None:
        columns |= log.user_features.of(user)
    if log.genres is not None:
        starts, lengths = log.genres.of(item)
        sets = [tuple(log.genres.genres[a : a + n]) for a, n in zip(starts, lengths, strict=True)]
        numbers = {bag: number for number, bag in enumerate(sorted(set(sets)))}
        columns["genres"] = np.array([numbers[bag] for bag in sets], dtype=np.int64)
    if split.by == "leave-one-out":
        split = Split("ratio", HELD_OUT if split.has_validation else 0, HELD_OUT)
    of_users = np.argsort(user, kind="stable")
    _users, which, counts = np.unique(user, return_inverse=True, return_counts=True)
    times = log.timestamp[in_time]
    offsets = np.append(0, np.cumsum(counts))
    trained, validated = split.resolved(times).counts(offsets, times[of_users])
    part = (earlier[1] >= trained[which]).astype(np.int64) + (earlier[1] >= (trained + validated)[which])
    order = np.argsort(part, kind="stable")
    names = tuple(sorted(columns))
    dense = np.log1p(np.stack(earlier, 1)).astype(np.float32)[order]
    ids = np.stack([columns[name] for name in names], 1).astype(np.int64)[order]
    return ClickLog(dense, ids, labels[order], names, int((part == 0).sum()), int((part == 1).sum()), rule)


def _clicks_of(log: Interactions, label_threshold: float | None) -> tuple[np.ndarray, str]:
    """(N,) int64: whether each row is a click; and the rule, where nobody has chosen it."""
    if label_threshold is None and "click" in log.feedback:
        return log.feedback["click"], ""
    if log.rating is None:
        raise ValueError("the log has no ratings, which are needed as clicks: give it a column 'rating'")
    threshold = default_threshold(log.rating) if label_threshold is None else label_threshold
    check_ratings(log.rating, threshold)
    rule = default_rule() if label_threshold is None else ""
    return rating_labels(log.rating, threshold).astype(np.int64), rule


def _earlier(ids: np.ndarray) -> np.ndarray:
    """(n,) int64: the number of earlier occurrences of each id."""
    order = np.argsort(ids, kind="stable")
    arranged = ids[order]
    starts = np.append(True, arranged[1:] != arranged[:-1]).nonzero()[0]
    lengths = np.diff(np.append(starts, len(ids)))
    earlier = np.empty(len(ids), np.int64)
    earlier[order] = np.arange(len(ids)) - np.repeat(starts, lengths)
    return earlier


class ClickPredictions(NamedTuple):
    """Rows of a part in their order: ids (n,) int64, probabilities (n,) float64, labels (n,) int64."""

    sample_ids: Tensor
    probabilities: Tensor
    labels: Tensor


def click_predictions(
    predict: Callable[[ClickBatch], Tensor],
    loader: ClickSamples,
    part: Part = "test",
    scored: Scored = one_by_one,
) -> ClickPredictions:
    """What `predict` says of the held-out rows of a part; see `evaluate_clicks`, whose errors are raised."""
    first, last = loader.rows_of_part(part)
    if first == last:
        raise ValueError(f"the log has no rows held out for {part}: {NO_PART}")
    ids, scores, labels = [], [], []
    for batch, found in scored(loader.evaluation_batches(part=part), predict):
        found = found.detach().cpu()
        if found.shape != batch.labels.shape:
            raise ValueError(f"predictions must be {tuple(batch.labels.shape)}, got {tuple(found.shape)}")
        ids.append(batch.sample_ids)
        scores.append(found.double())
        labels.append(batch.labels)
    return ClickPredictions(torch.cat(ids), torch.cat(scores), torch.cat(labels))


def evaluate_clicks(
    predict: Callable[[ClickBatch], Tensor],
    loader: ClickSamples,
    part: Part = "test",
    scored: Scored = one_by_one,
) -> dict[str, float]:
    """``{"AUC": ..., "accuracy": ..., "BCE": ...}`` over the held-out rows of a part.

    `predict` maps a batch to probabilities (B,), and `scored` calls it. A probability of 0.5 or more predicts
    a click. BCE is the mean cross entropy in nats, with probabilities clamped to [1e-7, 1 - 1e-7]. AUC is NaN
    where all labels of the part are alike. Raises ValueError where nothing is held out, and for predictions
    of another shape.
    """
    _, p, y = click_predictions(predict, loader, part, scored)
    sure = p.clamp(1e-7, 1 - 1e-7)
    entropies = -torch.where(y == 1, sure.log(), (1 - sure).log())
    return {
        "AUC": auc(p, y),
        "accuracy": float(((p >= 0.5) == (y == 1)).double().mean()),
        "BCE": math.fsum(entropies.tolist()) / len(y),
    }
