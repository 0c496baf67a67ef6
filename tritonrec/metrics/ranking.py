"""Metrics of ranked lists; with the same bits for any number of ranks and in any order of users.

Of users with lists of k items, best first, r of which are relevant, and R relevant items in all; torchmetrics
has the same (``RetrievalHitRate(top_k=k)`` and so on)::

    HR@k        mean of [r > 0]                    recall@k    mean of r / R
    MRR@k       mean of 1 / place of the first relevant one, from 1; 0 without
    NDCG@k      mean of DCG / best DCG;  DCG = sum over relevant places i, from 1, of 1 / log2(i + 1)
    coverage@k  share of the catalogue that is in a list
    novelty@k   mean over listed items of -log2(popularity / all popularity), in bits

Popularity is a count of training, and 1 for an item without (Zhou et al., "Solving the apparent
diversity-accuracy dilemma of recommender systems", PNAS 2010). A user without relevant items counts as 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..data.epochs import digest_of
from ..data.ranking import checked_ks, list_terms
from ..distributed import Communicators
from ..settings import typed
from .sums import exact_sums, merged


@typed
class RankingMetrics:
    """Streaming metrics of ranked lists: call `update` with some users at a time, and `compute` at the end.

    Args:
        ks: lengths of lists, at least 1.
        popularity: (I,) int64, occurrences of each item of the catalogue in training, for coverage and
            novelty; None: neither.
        communicators: of the ranks, each with users of its own; None: this rank alone.
    """

    def __init__(
        self, ks: Sequence[int], popularity: Tensor | None = None, communicators: Communicators | None = None
    ):
        self.ks, self.popularity = checked_ks(ks), popularity
        if popularity is not None and (
            popularity.dim() != 1 or popularity.dtype != torch.int64 or bool((popularity < 0).any())
        ):
            shape = tuple(popularity.shape)
            raise ValueError(f"popularity must be (I,) int64 of at least 0, got {shape} {popularity.dtype}")
        self._control = (communicators or Communicators.local()).control
        self._sums = [0] * (1 + 4 * len(self.ks))
        items = 0 if popularity is None else len(popularity)
        self._listed = torch.zeros(len(self.ks), items, dtype=torch.int64, device="cpu")

    def update(self, hits: Tensor, relevant: Tensor, items: Tensor | None = None) -> None:
        """Take the lists of some users.

        Args:
            hits: (B, K) bool, whether an item of the list is relevant; K is at least the largest of `ks`.
            relevant: (B,) int64, how many items are, listed or not.
            items: (B, K) int64, their numbers in the catalogue; needed where `popularity` is given.

        Raises ValueError for other shapes or types, fewer relevant items than hits, and items out of range.
        """
        users, most = len(hits), max(self.ks)
        if hits.dtype != torch.bool or hits.dim() != 2 or hits.shape[1] < most or relevant.shape != (users,):
            raise ValueError(
                f"hits must be (B, {most} or more) bool and relevant (B,), got {tuple(hits.shape)} "
                f"{hits.dtype} and {tuple(relevant.shape)}"
            )
        for name, given in (("relevant", relevant), ("items", items)):
            if given is not None and (given.is_floating_point() or given.is_complex()):
                raise ValueError(f"{name} must be whole numbers, got {given.dtype}")
        hits, relevant = hits[:, :most].cpu().bool(), relevant.cpu()
        if bool((hits.sum(1) > relevant).any()):
            raise ValueError(
                f"user {int((hits.sum(1) > relevant).nonzero()[0])} has more hits than relevant items"
            )
        if self.popularity is not None:
            if items is None or items.shape[:1] != (users,) or items.dim() != 2 or items.shape[1] < most:
                raise ValueError(f"coverage and novelty need items (B, {most} or more)")
            listed = items[:, :most].cpu()
            if listed.numel() and not 0 <= int(listed.min()) <= int(listed.max()) < len(self.popularity):
                raise ValueError(f"items must lie in [0, {len(self.popularity)}), the catalogue")
        terms = [
            torch.ones(1, users, dtype=torch.float64, device="cpu"),
            list_terms(hits, relevant, self.ks).flatten(0, 1),
        ]
        if self.popularity is not None:
            for number, k in enumerate(self.ks):
                shown = listed[:, :k].flatten()
                self._listed[number] += torch.bincount(shown, minlength=len(self.popularity))
        [sums] = exact_sums(torch.cat(terms), [users])
        self._sums = [sum(each) for each in zip(self._sums, sums, strict=True)]

    def compute(self) -> dict[str, float]:
        """``{"HR@10": ..., "recall@10": ..., "MRR@10": ..., "NDCG@10": ..., ...}`` on every rank. Collective.

        {} before the first user. Raises RuntimeError where ranks have other settings.
        """
        known = None if self.popularity is None else digest_of(self.popularity.cpu())
        [[users, *sums]] = merged(self._control, f"(ks={tuple(self.ks)}, popularity={known})", [self._sums])
        if not users:
            return {}
        names = (f"{kind}@{k}" for k in self.ks for kind in ("HR", "recall", "MRR", "NDCG"))
        found = {name: value / users for name, value in zip(names, sums, strict=True)}
        if self.popularity is None:
            return found
        popularity = self.popularity.clamp(min=1).tolist()
        bits = [math.log2(sum(popularity)) - math.log2(count) for count in popularity]
        counts = self._control.all_reduce(self._listed.clone(), "listed items").tolist()
        for k, of_items in zip(self.ks, counts, strict=True):
            found[f"coverage@{k}"] = sum(count > 0 for count in of_items) / len(of_items)
            novelty = math.fsum(count * each for count, each in zip(of_items, bits, strict=True))
            found[f"novelty@{k}"] = novelty / sum(of_items)
        return found
