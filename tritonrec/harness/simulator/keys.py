"""How many distinct keys a batch and its micro-batches have: the payload of every exchange.

Keys are drawn as `tritonrec.data.zipf` draws them: item of popularity rank r with a probability proportional
to ``r ** -exponent``; with probability `affinity` from the sample's own community (the ranks congruent to its
number), otherwise from all. A key drawn with rate x is in the micro-batch with probability 1 - exp(-x), so
with n_c draws by samples of community c, n = sum n_c, and ranks r of community c

    distinct = sum_c sum_r 1 - exp(-(n_c * affinity * p_own(r) + n * (1 - affinity) * p_all(r)))

Sums over up to 2**60 ranks are taken over logarithmic bins. A batch is a line from 0 to 1 along which
micro-batches are intervals. Plain micro-batches hold every community alike. Clustered ones (NestPipe, section
V.C) are cut from samples sorted by community, so that each holds few communities.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

BINS = 500
EXACT = 100_000


@dataclass(frozen=True)
class KeyModel:
    """The keys of one worker's batch.

    Args:
        draws: ids looked up by one worker's batch.
        items: vocabulary.
        exponent: of Zipf's law.
        communities: of users.
        affinity: share of draws from the own community.
    """

    draws: float
    items: int
    exponent: float = 1.05
    communities: int = 64
    affinity: float = 0.8

    def __post_init__(self) -> None:
        if self.draws < 0 or self.items < 1 or not 1 <= self.communities <= self.items:
            raise ValueError(
                f"{self.draws} draws of {self.items} items in {self.communities} communities: draws must not "
                "be negative, and communities be at least 1 and at most the items"
            )
        if not 0 <= self.affinity <= 1 or self.exponent < 0:
            raise ValueError(
                f"affinity is a share and the exponent not negative, got {self.affinity}, {self.exponent}"
            )

    def distinct(self, draws: np.ndarray) -> float:
        """Distinct keys in ``draws[c]`` draws by samples of each community c."""
        ranks, own, anyone = _probabilities(self.items, self.exponent, self.communities)
        levels, times = np.unique(np.asarray(draws, np.float64), return_counts=True)
        rate = levels[:, None] * self.affinity * own + draws.sum() * (1 - self.affinity) * anyone
        return float((times[:, None] * ranks * -np.expm1(-rate)).sum())

    def interval(self, begin: float, end: float, clustered: bool) -> float:
        """Distinct keys of the samples from `begin` to `end` of the batch."""
        if not clustered:
            each = np.full(self.communities, self.draws * (end - begin) / self.communities)
        else:
            edges = np.arange(self.communities + 1) / self.communities
            overlap = np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin)
            each = self.draws * np.maximum(overlap, 0)
        return self.distinct(each)

    def batch(self, workers: int = 1) -> float:
        """Distinct keys of the batches of so many workers together."""
        return self.distinct(np.full(self.communities, self.draws * workers / self.communities))

    def kept(self, workers: int) -> float:
        """Share of a batch's keys that the next batch has too, the batches of `workers` workers together."""
        once = self.batch(workers)
        return (2 * once - self.batch(2 * workers)) / once if once else 0.0

    def payload(self, fractions: tuple[float, ...], clustered: bool) -> list[float]:
        """Keys exchanged for each micro-batch, each deduplicated by itself."""
        return [self.interval(begin, end, clustered) for begin, end in _intervals(fractions)]

    def first_use(self, fractions: tuple[float, ...], clustered: bool) -> list[float]:
        """Keys exchanged for each micro-batch if each key is sent once, for the first that uses it.

        The sum is that of the whole batch. Gradients at the last use are the mirror image: reverse the
        fractions, and the result.
        """
        seen = [self.interval(0.0, end, clustered) for _, end in _intervals(fractions)]
        return [after - before for before, after in zip([0.0, *seen], seen, strict=False)]


def _intervals(fractions: tuple[float, ...]) -> list[tuple[float, float]]:
    ends = np.cumsum(fractions) / sum(fractions)
    return list(zip([0.0, *ends[:-1].tolist()], ends.tolist(), strict=True))


@lru_cache(maxsize=64)
def _probabilities(
    items: int, exponent: float, communities: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bins of one community's ranks: how many, and how often each is drawn from the community and from all.

    Rank r of a community is one of the ranks ``(r - 1) * communities + 1`` to ``r * communities`` of all.
    """
    size = items // communities
    edges = np.unique(np.geomspace(1, size + 1, BINS + 1).round()) - 1  # a bin holds the ranks (low, high]
    ranks = np.diff(edges)
    own, anyone = (_weight_up_to(edges * times, exponent) for times in (1, communities))
    return ranks, np.diff(own) / (own[-1] * ranks), np.diff(anyone) / (anyone[-1] * ranks * communities)


def _weight_up_to(rank: np.ndarray, exponent: float) -> np.ndarray:
    """Sum of r ** -exponent over r = 1 .. rank, exact up to `EXACT` and an integral beyond."""
    head = np.concatenate([[0.0], np.cumsum(np.arange(1, EXACT + 1) ** -exponent)])
    begin, beyond = EXACT + 0.5, np.maximum(rank, EXACT) + 0.5
    if exponent == 1:
        tail = np.log(beyond / begin)
    else:
        tail = (beyond ** (1 - exponent) - begin ** (1 - exponent)) / (1 - exponent)
    return head[np.minimum(rank, EXACT).astype(np.int64)] + tail
