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
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritonrec import ops
from tritonrec.data.batch import JaggedBatch
from tritonrec.data.impressions import ImpressionBatch, ImpressionSamples
from tritonrec.data.loader import EvaluationBatch, NextItems
from tritonrec.data.splits import Part
from tritonrec.settings import typed

ScoreFunction = Callable[[JaggedBatch], Tensor]
ImpressionScoreFunction = Callable[[ImpressionBatch], Tensor]
Scored = Callable[[Iterable[Any], Callable[[Any], Tensor]], Iterator[tuple[Any, Tensor]]]
"""Who computes the scores: of batches and what scores one, each batch with its scores, in order."""
NO_RANK = 2**63 - 1
"""Of an item that is not in the catalogue."""
AT_A_TIME = 2**26
"""Scores that an evaluation has in memory, 256 MiB."""
LISTED = 2**21
"""Places of lists at a time: k may be the catalogue, and a place takes more memory than a score."""


def one_by_one(batches: Iterable[Any], score: Callable[[Any], Tensor]) -> Iterator[tuple[Any, Tensor]]:
    """A process by itself; ranks share them by `tritonrec.pipeline.RowsOfRanks.scored`."""
    return ((batch, score(batch)) for batch in batches)


@typed
def evaluate(
    score_fn: ScoreFunction,
    loader: NextItems,
    ks: Sequence[int] = (10, 50),
    batch_size: int | None = None,
    part: Part = "test",
    exclude_seen: bool = True,
) -> dict[str, float]:
    """``{"HR@10": ..., "NDCG@10": ..., ...}`` over all held-out items of a part of the loader's split.

    `score_fn` maps histories (`EvaluationBatch.history`, B users) to scores (B, I) of the items of
    `loader.catalogue`, in its order; greater is better. `batch_size` users are scored at a time: by default
    256, or fewer of a catalogue that is so large that theirs would be more than 2**26 scores. The result
    depends on it only if the scores do. With `exclude_seen` the items before the held-out one do not compete
    with it; without it all items do, for logs in which users come back to what they know.

    Raises ValueError for scores of another shape, for NaN, for a k below 1, and for a part without items.
    """
    ks = checked_ks(ks)
    if batch_size is None:
        batch_size = max(1, min(256, AT_A_TIME // max(loader.num_items, 1)))
    batches = loader.evaluation_batches(batch_size, part)
    ranked = (target_ranks(score_fn(each.history), each, loader, exclude_seen) for each in batches)
    return ranking_metrics(ranked, ks, loader.num_items)


def checked_ks(ks: Iterable[int]) -> tuple[int, ...]:
    """The lengths of lists. Raises TypeError for what is none, ValueError for one below 1 and for none."""
    try:
        given = tuple(ks)
        found = tuple(map(operator.index, given))
        if any(isinstance(k, bool) for k in given):
            raise TypeError
    except TypeError:
        raise TypeError(f"ks must hold whole numbers, as (10, 50), got {ks!r}") from None
    if not found or min(found) < 1:
        raise ValueError(f"ks must hold numbers of at least 1, got {found}")
    return found


def checked_scores(scores: Any, expected: tuple[int, ...], what: str) -> Tensor:
    """What a function of the caller's returned, on the CPU. TypeError for no tensor, ValueError for another
    shape."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a tensor {expected}: {what}; got {type(scores).__name__}")
    if scores.shape != expected:
        raise ValueError(f"scores must be {expected}: {what}; got shape {tuple(scores.shape)}")
    return scores.detach().cpu()


def ranking_metrics(ranks: Iterable[Tensor], ks: Sequence[int], items: int) -> dict[str, float]:
    """``{"HR@10": ..., "NDCG@10": ..., ...}`` of users' held-out items at `ranks` (b,) of so many items."""
    kept = [min(k, max(items, 1)) for k in ks]
    found = []
    for some in ranks:
        for few in some.split(max(1, LISTED // max(kept))):
            hits = few[:, None] == torch.arange(max(kept), dtype=torch.int64, device="cpu")
            found.append(list_terms(hits, torch.ones_like(few), kept))
    terms = torch.cat(found, 2)
    return {
        f"{kind}@{k}": math.fsum(terms[number, row].tolist()) / terms.shape[2]
        for number, k in enumerate(ks)
        for kind, row in (("HR", 0), ("NDCG", 3))
    }


def list_terms(hits: Tensor, relevant: Tensor, ks: Sequence[int]) -> Tensor:
    """HR, recall, MRR and NDCG of ranked lists, of the first k items of each: (len(ks), 4, B) float64.

    Args:
        hits: (B, K) bool, whether an item is relevant, best first; K is at least the largest of `ks`.
        relevant: (B,) int64, how many items are, listed or not; a list without any counts as 0.
    """
    discounts = torch.tensor(
        [1 / math.log2(rank + 2) for rank in range(hits.shape[1])], dtype=torch.float64, device="cpu"
    )
    found, gains, best = hits.cumsum(1), (hits * discounts).cumsum(1), discounts.cumsum(0)
    first = 1 / (hits.int().argmax(1) + 1).double()
    terms = []
    for k in ks:
        hit = found[:, k - 1].double()
        ideal = best[relevant.clamp(1, k) - 1]
        terms += [(hit > 0).double(), hit / relevant.clamp(min=1), first * (hit > 0), gains[:, k - 1] / ideal]
    return torch.stack(terms).view(len(ks), 4, -1)


class RankCounter:
    """Counts the items above each user's held-out one, some items of the catalogue at a time.

    Args:
        batches: whose U users are numbered on. own: (U,) scores of their held-out items.
        exclude_seen: items before the held-out one do not compete with it.
    """

    def __init__(
        self, batches: Sequence[EvaluationBatch], own: Tensor, loader: NextItems, exclude_seen: bool = True
    ):
        self._targets = torch.cat([each.targets for each in batches])
        self._samples = torch.cat([each.history.sample_ids for each in batches])
        self._own, self._loader = own, loader
        self._above, self._wrong = torch.zeros(len(own), dtype=torch.int64, device="cpu"), [-1, -1]
        first, pairs = 0, [torch.empty(0, dtype=torch.int64, device="cpu")]
        for each in batches if exclude_seen else ():
            pairs.append(each.seen_items * len(own) + each.seen_users + first)
            first += len(each.targets)
        pairs = torch.unique(torch.cat(pairs))  # ascending, so the items of a block are side by side
        self._seen_items, self._seen_users = pairs // max(len(own), 1), pairs % max(len(own), 1)

    def count(self, scores: Tensor, places: Tensor) -> None:
        """Take the scores (U, n) of the items at `places` (n,), ascending, of the catalogue."""
        from .numba_ranking import count_above

        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        bounds = torch.stack([places[0], places[-1] + 1]) if len(places) else places.new_zeros(2)
        start, stop = torch.searchsorted(self._seen_items, bounds).tolist()
        items, users = self._seen_items[start:stop], self._seen_users[start:stop]
        at = torch.searchsorted(places, items)
        here = places[at] == items
        split = torch.searchsorted(places, self._targets)
        numbers = (scores.contiguous(), self._own.to(scores.dtype), split, users[here], at[here], self._above)
        user, item = count_above(*(each.numpy() for each in numbers))
        if user >= 0 and self._wrong[0] < 0:
            self._wrong = [int(user), int(places[item])]

    def ranks(self, all_gather: Callable[[Tensor], list[Tensor]] = lambda own: [own]) -> Tensor:
        """(U,) int64: the number of items above each user's held-out one, added up over the ranks.

        2**63 - 1, above any k, where that is not in the catalogue. Raises ValueError for a score that is NaN.
        """
        found = all_gather(
            torch.cat([self._above, torch.tensor(self._wrong, dtype=torch.int64, device="cpu")])
        )
        for user, place in (each[-2:].tolist() for each in found):
            if user >= 0:
                raise ValueError(
                    f"the score of user {int(self._samples[user])} "
                    f"for item {int(self._loader.catalogue[place])} is NaN"
                )
        return torch.where(self._targets >= 0, sum(each[:-2] for each in found), NO_RANK)


def target_ranks(
    scores: Tensor, batch: EvaluationBatch, loader: NextItems, exclude_seen: bool = True
) -> Tensor:
    """(B,) int64 on the CPU: the number of items ranked above each user's held-out item.

    2**63 - 1, above any k, where the item is not in the catalogue.
    """
    users, items = len(batch.targets), loader.num_items
    scores = checked_scores(scores, (users, items), "users by catalogue")
    if items == 0:
        return torch.full((users,), NO_RANK, dtype=torch.int64, device="cpu")
    own = scores.gather(1, batch.targets.clamp(min=0)[:, None])[:, 0]
    counter = RankCounter([batch], own, loader, exclude_seen)
    counter.count(scores, torch.arange(items, device="cpu"))
    return counter.ranks()


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


def weighted_auc(scores: Tensor, labels: Tensor, weights: Tensor) -> float:
    """`auc` of samples with weights (n,) of at least 0, which are rounded to 2**-20.

    NaN where a kind has no weight. Raises the errors of `gauc`, and ValueError for another weight.
    """
    _validate(scores, labels, weights, "weights")
    wrong = ~(weights >= 0) | weights.isinf()
    if bool(wrong.any()):
        raise ValueError(f"weights must be finite and at least 0, got {float(weights[wrong][0]):g}")
    number, place = torch.unique(scores, return_inverse=True)
    grid = (weights.double() * 2.0**20).round().long()
    zero = torch.zeros(len(number), dtype=torch.int64, device=scores.device)
    positive = zero.index_add(0, place, torch.where(labels == 1, grid, 0))
    negative = zero.index_add(0, place, torch.where(labels == 1, 0, grid))
    twice_won = 2 * negative.cumsum(0) - negative  # a tie counts half
    pairs = int(positive.sum()) * int(negative.sum())
    won = sum(p * n for p, n in zip(positive.tolist(), twice_won.tolist(), strict=True) if p)
    return won / (2 * pairs) if pairs else math.nan


def gauc(user_ids: Tensor, scores: Tensor, labels: Tensor) -> GroupAUC:
    """Group AUC of impressions: user_ids (n,) int64, scores (n,) of any float type, labels (n,) of 0 and 1.

    Pairs are counted in integers, so the order of the impressions does not matter. Raises ValueError for
    shapes that differ, for a NaN score, and for another label.
    """
    _validate(scores, labels, user_ids, "user_ids")
    from .numba_ranking import count_pairs

    values, kinds = scores.detach().cpu(), labels.detach().cpu()
    if len(values) == 0:
        return GroupAUC(math.nan, 0, 0)
    numbers, groups = _numbered(user_ids.detach().cpu())
    packed = (numbers << 33 | _ascending(values) << 1 | kinds.long()).numpy().view(np.uint64)
    packed.sort()
    twice_won, positives, impressions = (np.zeros(groups, np.int64) for _ in range(3))
    count_pairs(packed, groups, twice_won, positives, impressions)

    pairs = positives * (impressions - positives)
    both = pairs > 0
    left_out = int((impressions > 0).sum() - both.sum())
    if not both.any():
        return GroupAUC(math.nan, 0, left_out)
    areas = twice_won[both] / (2 * pairs[both])
    value = math.fsum(areas * impressions[both]) / int(impressions[both].sum())
    return GroupAUC(value, int(both.sum()), left_out)


def _validate(scores: Tensor, labels: Tensor, others: Tensor, name: str) -> None:
    if not others.shape == scores.shape == labels.shape or scores.dim() != 1:
        raise ValueError(
            f"{name}, scores and labels must be (n,): got shapes "
            f"{tuple(others.shape)}, {tuple(scores.shape)} and {tuple(labels.shape)}"
        )
    for kind, found, wrong in (
        ("scores", scores, scores.isnan()),
        ("labels", labels, (labels != 0) & (labels != 1)),
    ):
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise ValueError(f"{kind}[{at}] is {float(found[at]):g}, where {name} is {others[at].item()}")


def _numbered(user_ids: Tensor) -> tuple[Tensor, int]:
    """(n,) int64 numbers of users from 0 on, in any order, and how many there are."""
    least, most = user_ids.aminmax()
    if least >= 0 and most < len(user_ids):
        return user_ids.long(), int(most) + 1
    found, inverse, _counts = ops.unique(user_ids.long())
    return inverse, len(found)


def _ascending(scores: Tensor) -> Tensor:
    """(n,) int64 from 0 to 2**32 - 1, in the order of the scores (n,), equal for equal ones."""
    if scores.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return torch.unique(scores, return_inverse=True)[1]
    bits = (scores.float() + 0.0).view(torch.int32).long()  # of the two zeros one
    return torch.where(bits < 0, 2**31 - 1 - (bits & 0x7FFFFFFF), bits + 2**31)


def evaluate_impressions(
    score_fn: ImpressionScoreFunction,
    loader: ImpressionSamples,
    batch_size: int = 256,
    part: Part = "test",
    scored: Scored = one_by_one,
) -> dict[str, float]:
    """``{"GAUC/click": ..., "AUC/click": ..., ...}`` over the held-out impressions of a part.

    `score_fn` maps a batch to scores (Le, T), greater where more likely; `scored` calls it. Raises ValueError
    for scores of another shape, and the errors of `gauc`.
    """
    users, scores, labels = [], [], []
    for batch, found in scored(loader.evaluation_batches(batch_size, part), score_fn):
        found = checked_scores(found, tuple(batch.labels.shape), "exposed items by tasks")
        users.append(batch.exposed_context("user_id"))
        scores.append(found)
        labels.append(batch.labels)
    metrics = {}
    for column, task in enumerate(loader.tasks):
        task_scores, task_labels = torch.cat(scores)[:, column], torch.cat(labels)[:, column]
        metrics[f"GAUC/{task}"] = gauc(torch.cat(users), task_scores, task_labels).value
        metrics[f"AUC/{task}"] = auc(task_scores, task_labels)
    return metrics
