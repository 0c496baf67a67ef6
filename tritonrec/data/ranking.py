"""Leave-one-out evaluation by full ranking: HR@k and NDCG@k.

For each user the held-out item competes with every item of the catalogue that the user has not seen in
training::

    HR@k    = mean over users of [rank < k]                       rank 0 is the best
    NDCG@k  = mean over users of [rank < k] / log2(rank + 2)

An item is ranked above another one with the same score if it comes first in the catalogue. Where the held-out
item was seen before, it competes all the same; where it was never trained by anyone, it counts as a miss. No
candidates are sampled (Krichene and Rendle, "On sampled metrics for item recommendation", KDD 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tritonrec.data.batch import JaggedBatch
from tritonrec.data.loader import EvaluationBatch, NextItemLoader

ScoreFunction = Callable[[JaggedBatch], Tensor]


def evaluate(
    score_fn: ScoreFunction, loader: NextItemLoader, ks: Sequence[int] = (10, 50), batch_size: int = 256
) -> dict[str, float]:
    """``{"HR@10": ..., "NDCG@10": ..., ...}`` over all users of the loader with an item held out.

    `score_fn` takes histories (`EvaluationBatch.history`, B users) and returns scores (B, I) for the items of
    `loader.catalogue` in its order; greater is better. The result does not depend on `batch_size` unless the
    scores do. Raises ValueError for scores of another shape, for NaN, and for a k below 1.
    """
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must hold numbers of at least 1, got {tuple(ks)}")
    batches = loader.evaluation_batches(batch_size)
    ranks = torch.cat([target_ranks(score_fn(batch.history), batch, loader) for batch in batches]).tolist()
    metrics = {}
    for k in ks:
        hits = [rank for rank in ranks if rank < k]
        metrics[f"HR@{k}"] = len(hits) / len(ranks)
        metrics[f"NDCG@{k}"] = math.fsum(1 / math.log2(rank + 2) for rank in hits) / len(ranks)
    return metrics


def target_ranks(scores: Tensor, batch: EvaluationBatch, loader: NextItemLoader) -> Tensor:
    """(B,) int64 on the CPU: how many items are ranked above each user's held-out item.

    2**63 - 1, which no k reaches, where that item is not in the catalogue.
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
    competes[batch.seen_users, batch.seen_items] = False
    target = batch.targets.clamp(min=0)[:, None]
    target_score = scores.gather(1, target)
    first = torch.arange(items)[None, :] < target
    above = competes & ((scores > target_score) | ((scores == target_score) & first))
    return torch.where(batch.targets >= 0, above.sum(1), torch.iinfo(torch.int64).max)


def popularity_scores(loader: NextItemLoader) -> ScoreFunction:
    """The baseline that recommends the same to everyone: how often an item occurs in training sequences."""
    return lambda history: loader.popularity.expand(history.num_samples, -1)
