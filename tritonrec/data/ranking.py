"""Ranking metrics: HR@k and NDCG@k of the next item, AUC and GAUC of click and conversion models.

Leave-one-out by full ranking: each user's held-out item is ranked among all items of the catalogue that the
user has not seen in training::

    HR@k    = mean over users of [rank < k]                       rank 0 is the best
    NDCG@k  = mean over users of [rank < k] / log2(rank + 2)

Of two items with the same score the one that comes first in the catalogue is ranked above. The held-out item
is ranked even if the user has seen it before; if no user has trained it, it counts as a miss. No candidates
are sampled (Krichene and Rendle, "On sampled metrics for item recommendation", KDD 2020).

Group AUC (MTGRBoost, section 6.1; Zhu et al., "Optimized cost per click in Taobao display advertising", KDD
2017): the area under the ROC curve of each user's impressions, averaged over users with weight n(u), the
number of impressions::

    AUC(u)  = mean over pairs of a positive and a negative impression of u of [s+ > s-] + [s+ = s-] / 2
    GAUC    = sum of n(u) AUC(u) / sum of n(u)          over the users that have both kinds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonrec.data.batch import JaggedBatch
from tritonrec.data.impression_loader import ImpressionLoader
from tritonrec.data.impression_stream import ImpressionStream
from tritonrec.data.impressions import ImpressionBatch
from tritonrec.data.loader import EvaluationBatch, NextItemLoader
from tritonrec.data.sequences import NextItemStream
from tritonrec.data.splits import Part

ScoreFunction = Callable[[JaggedBatch], Tensor]
ImpressionScoreFunction = Callable[[ImpressionBatch], Tensor]
NextItems = NextItemLoader | NextItemStream


def evaluate(
    score_fn: ScoreFunction,
    loader: NextItems,
    ks: Sequence[int] = (10, 50),
    batch_size: int = 256,
    part: Part = "test",
    exclude_seen: bool = True,
) -> dict[str, float]:
    """``{"HR@10": ..., "NDCG@10": ..., ...}`` over all held-out items of a part of the loader's split.

    `score_fn` maps histories (`EvaluationBatch.history`, B users) to scores (B, I) of the items of
    `loader.catalogue`, in its order; greater is better. The result depends on `batch_size` only if the scores
    do. With `exclude_seen` the items before the held-out one do not compete with it; without it all items do,
    for logs in which users come back to what they know.

    Raises ValueError for scores of another shape, for NaN, for a k below 1, and for a part without items.
    """
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must hold numbers of at least 1, got {tuple(ks)}")
    batches = loader.evaluation_batches(batch_size, part)
    ranks = torch.cat(
        [target_ranks(score_fn(batch.history), batch, loader, exclude_seen) for batch in batches]
    ).tolist()
    metrics = {}
    for k in ks:
        hits = [rank for rank in ranks if rank < k]
        metrics[f"HR@{k}"] = len(hits) / len(ranks)
        metrics[f"NDCG@{k}"] = math.fsum(1 / math.log2(rank + 2) for rank in hits) / len(ranks)
    return metrics


def target_ranks(
    scores: Tensor, batch: EvaluationBatch, loader: NextItems, exclude_seen: bool = True
) -> Tensor:
    """(B,) int64 on the CPU: the number of items ranked above each user's held-out item.

    2**63 - 1, above any k, where the item is not in the catalogue.
    """
    users, items = len(batch.targets), loader.num_items
    if scores.shape != (users, items):
        raise ValueError(
            f"scores must be ({users}, {items}): users by catalogue; got shape {tuple(scores.shape)}"
        )
    scores = scores.detach().cpu()
    if bool(scores.isnan().any()):
        user, item = scores.isnan().nonzero()[0].tolist()
        raise ValueError(
            f"the score of user {int(batch.history.sample_ids[user])} "
            f"for item {int(loader.catalogue[item])} is NaN"
        )
    competes = torch.ones(users, items, dtype=torch.bool)
    if exclude_seen:
        competes[batch.seen_users, batch.seen_items] = False
    target = batch.targets.clamp(min=0)[:, None]
    target_score = scores.gather(1, target)
    first = torch.arange(items)[None, :] < target
    above = competes & ((scores > target_score) | ((scores == target_score) & first))
    return torch.where(batch.targets >= 0, above.sum(1), torch.iinfo(torch.int64).max)


def popularity_scores(loader: NextItems) -> ScoreFunction:
    """The popularity baseline: the score of an item is its number of occurrences in training sequences."""
    return lambda history: loader.popularity.expand(history.num_samples, -1)


class GroupAUC(NamedTuple):
    """GAUC, the number of its users, and the number of users left out because all their labels are equal."""

    value: float  # NaN where no user has both kinds
    users: int
    left_out: int


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve of scores (n,) against labels (n,) of 0 and 1; ties count half.

    NaN where all labels are equal. Raises the errors of `gauc`.
    """
    return gauc(torch.zeros_like(labels, dtype=torch.int64), scores, labels).value


def gauc(user_ids: Tensor, scores: Tensor, labels: Tensor) -> GroupAUC:
    """Group AUC of impressions: user_ids (n,) int64, scores (n,) of any float type, labels (n,) of 0 and 1.

    Pairs are counted in integers, so the order of the impressions does not matter. Raises ValueError for
    shapes that differ, for a NaN score, and for another label.
    """
    if not user_ids.shape == scores.shape == labels.shape or user_ids.dim() != 1:
        raise ValueError(
            f"user_ids, scores and labels must be (n,): got shapes "
            f"{tuple(user_ids.shape)}, {tuple(scores.shape)} and {tuple(labels.shape)}"
        )
    users, values, kinds = (t.detach().cpu().numpy() for t in (user_ids, scores.double(), labels.double()))
    for name, wrong in (("scores", np.isnan(values)), ("labels", (kinds != 0) & (kinds != 1))):
        if wrong.any():
            at = int(wrong.nonzero()[0][0])
            got = values[at] if name == "scores" else kinds[at]
            raise ValueError(f"{name}[{at}] of user {users[at]} is {got:g}")
    if len(users) == 0:
        return GroupAUC(math.nan, 0, 0)

    order = np.lexsort((values, users))
    users, values, positive = users[order], values[order], kinds[order] == 1
    is_new_user = np.append(True, users[1:] != users[:-1])
    is_new_score = is_new_user | np.append(True, values[1:] != values[:-1])
    user, tie = np.cumsum(is_new_user) - 1, np.cumsum(is_new_score) - 1

    negatives_before = np.append(0, np.cumsum(~positive))
    tie_starts, user_starts = is_new_score.nonzero()[0], is_new_user.nonzero()[0]
    tie_ends = np.append(tie_starts[1:], len(users))
    below = negatives_before[tie_starts[tie]] - negatives_before[user_starts[user]]
    level = negatives_before[tie_ends[tie]] - negatives_before[tie_starts[tie]]
    twice_won = np.add.reduceat(np.where(positive, 2 * below + level, 0), user_starts)
    positives = np.add.reduceat(positive.astype(np.int64), user_starts)
    impressions = np.diff(np.append(user_starts, len(users)))

    pairs = positives * (impressions - positives)
    both = pairs > 0
    if not both.any():
        return GroupAUC(math.nan, 0, len(pairs))
    areas = twice_won[both] / (2 * pairs[both])
    value = math.fsum(areas * impressions[both]) / int(impressions[both].sum())
    return GroupAUC(value, int(both.sum()), int((~both).sum()))


def evaluate_impressions(
    score_fn: ImpressionScoreFunction,
    loader: ImpressionLoader | ImpressionStream,
    batch_size: int = 256,
    part: Part = "test",
) -> dict[str, float]:
    """``{"GAUC/click": ..., "AUC/click": ..., ...}`` over the held-out impressions of a part.

    `score_fn` maps a batch to scores (Le, T); greater means more likely. Raises ValueError for scores of
    another shape, and the errors of `gauc`.
    """
    users, scores, labels = [], [], []
    for batch in loader.evaluation_batches(batch_size, part):
        found = score_fn(batch)
        if found.shape != batch.labels.shape:
            raise ValueError(
                f"scores must be {tuple(batch.labels.shape)}: exposed items by tasks; "
                f"got shape {tuple(found.shape)}"
            )
        users.append(batch.exposed_context("user_id"))
        scores.append(found.detach().cpu())
        labels.append(batch.labels)
    metrics = {}
    for column, task in enumerate(loader.tasks):
        task_scores, task_labels = torch.cat(scores)[:, column], torch.cat(labels)[:, column]
        metrics[f"GAUC/{task}"] = gauc(torch.cat(users), task_scores, task_labels).value
        metrics[f"AUC/{task}"] = auc(task_scores, task_labels)
    return metrics
