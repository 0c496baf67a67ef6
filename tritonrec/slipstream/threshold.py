"""The threshold T of the change of a stale row (Slipstream, section III.C).

    D  = share of the sampled inputs that T would drop                                   (2)
    sd = standard deviation of "dropped" over the sample, with m - 1 in the denominator  (3)
    D ± t * sqrt((I - m) / I * sd^2 / m)       m of I hot inputs are sampled             (4)

The paper has m in (3) and the number of all inputs in (4); the formulas above are right for a sample without
replacement from the I hot inputs. The paper does not define the optimal T: here it is the largest one that
drops, with the given confidence, at most the given share.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from ..settings import typed


class Interval(NamedTuple):
    """Student's t interval of a share."""

    low: float
    share: float
    high: float


class Threshold(NamedTuple):
    """T, the interval of its share of dropped hot inputs, and (T, interval) of every probe."""

    value: float
    interval: Interval
    probes: list[tuple[float, Interval]]


@lru_cache(maxsize=8)
def t_quantile(confidence: float, freedom: int) -> float:
    """t such that a Student's t variable with `freedom` degrees of freedom is in [-t, t] with `confidence`.

    With t = sqrt(f) tan u the density is proportional to cos(u) ** (f - 1); integrated by Simpson's rule.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(f"needs a confidence in (0, 1) and freedom from 1, got {confidence} and {freedom}")
    nodes = np.arange(4001)
    weights = np.where(nodes % 2, 4.0, 2.0)
    weights[[0, -1]] = 1.0
    norm = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    low, high = 0.0, 40.0
    while _inside(high, freedom, nodes, weights, norm) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        if _inside(middle, freedom, nodes, weights, norm) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _inside(t: float, freedom: int, nodes: np.ndarray, weights: np.ndarray, norm: float) -> float:
    """Probability of [-t, t]."""
    end = math.atan(t / math.sqrt(freedom))
    heights = np.cos(nodes * (end / (len(nodes) - 1))) ** (freedom - 1)
    return 2 * norm * end / (3 * (len(nodes) - 1)) * float((weights * heights).sum())


def interval(dropped: int, sampled: int, population: int, confidence: float) -> Interval:
    """The interval of the share dropped in the population, from a sample of `sampled` inputs.

    A sample of all inputs is exact; one of a single input gives [0, 1]. Raises ValueError for counts out of
    order.
    """
    if not 0 <= dropped <= sampled <= population or sampled < 1:
        raise ValueError(
            f"needs 0 <= dropped <= sampled <= population, and a sample; got {dropped}, {sampled} and "
            f"{population}"
        )
    share = dropped / sampled
    if sampled == population:
        return Interval(share, share, share)
    if sampled == 1:
        return Interval(0.0, share, 1.0)
    variance = share * (1 - share) * sampled / (sampled - 1)
    correction = (population - sampled) / population
    half = t_quantile(confidence, sampled - 1) * math.sqrt(correction * variance / sampled)
    return Interval(max(share - half, 0.0), share, min(share + half, 1.0))


@typed
def find_threshold(changes: torch.Tensor, population: int, most: float, confidence: float) -> Threshold:
    """The largest T that drops at most the share `most` of the population, by binary search over a sample.

    Args:
        changes: (m,) of the sampled inputs: T drops the inputs with smaller changes; infinite: no T does.
        population: I, size of the sampled population.
        most: in [0, 1]. confidence: of the interval, whose upper end may not exceed `most`.

    An empty sample gives 0, which drops nothing.
    """
    if not 0 <= most <= 1:
        raise ValueError(f"the share to drop must be in [0, 1], got {most}")
    if len(changes) == 0:
        return Threshold(0.0, Interval(0.0, 0.0, 0.0), [])
    changes = changes.double()
    finite = torch.unique(changes[changes.isfinite()])
    candidates = [*finite.tolist(), *(math.nextafter(last, math.inf) for last in finite[-1:].tolist())]
    probes: list[tuple[float, Interval]] = []

    def probe(value: float) -> Interval:
        found = interval(int((changes < value).sum()), len(changes), population, confidence)
        probes.append((value, found))
        return found

    best, found = 0.0, interval(0, len(changes), population, confidence)
    low, high = -1, len(candidates)  # the candidate at `low` drops few enough, the one at `high` too many
    while high - low > 1:
        middle = (low + high) // 2
        here = probe(candidates[middle])
        if here.high <= most:
            low, best, found = middle, candidates[middle], here
        else:
            high = middle
    return Threshold(best, found, probes)
