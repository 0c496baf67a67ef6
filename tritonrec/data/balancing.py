"""Load balancing between ranks: dynamic sequence batching, and partition of a global batch by cost.

Sequences differ in length, and a synchronous step takes as long as its slowest rank. Two remedies:

- `dynamic_batches` (MTGRBoost, section 5.1, Algorithm 1): each rank's batch has the number of samples that
  comes closest to a target number of tokens. The samples of a step depend on target and world size.
- `partition_samples` assigns the samples of one global batch by cost, the largest first, to the rank with the
  smallest sum so far. The batch has the same samples, and under ``"batch"`` consistency the same bits.

`TokenSpread` measures the remaining imbalance: a synchronous step waits for its longest rank, so ``ratio`` is
the time of dense computation over the time with equal work on all ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceCost:
    """Cost of a sequence of L tokens: ``linear * L + quadratic * L ** 2``.

    The default is that of HSTU layers of 64 columns: projections take 10 D**2 multiplications a token, and
    causal attention 2 D for each pair of tokens, so the ratio is 5 D = 320. ``quadratic=0`` counts tokens.
    Raises ValueError unless both are finite and not negative.
    """

    linear: float = 1.0
    quadratic: float = 1 / 320

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")

    def of(self, lengths: Tensor) -> Tensor:
        """(B,) float64 for `lengths` (B,) int64."""
        tokens = lengths.double()
        return self.linear * tokens + self.quadratic * tokens * tokens


def partition_samples(costs: Tensor, world_size: int) -> list[Tensor]:
    """Positions of the samples of each rank: `world_size` int64 tensors, each ascending, every sample in one.

    Greedy (longest processing time first): samples by descending cost (B,), of equal ones the earlier first,
    go to the rank with the smallest sum so far, of equal ones the lower rank. The largest sum is at most 4/3
    of the optimum (Graham 1969).

    Raises ValueError for a world size below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    order = torch.argsort(costs, descending=True, stable=True).tolist()
    values = costs.tolist()
    loads = [(0.0, rank) for rank in range(world_size)]
    parts: list[list[int]] = [[] for _ in range(world_size)]
    for place in order:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + values[place], rank))
        parts[rank].append(place)
    return [torch.tensor(sorted(places), dtype=torch.int64, device="cpu") for places in parts]


def dynamic_batches(chunks: Iterable[np.ndarray], target_tokens: int) -> Iterator[int]:
    """Yield the numbers of samples of the batches that Algorithm 1 cuts from chunks of lengths (n,) int64.

    Whole chunks are read until the buffer holds `target_tokens`. A batch is the leading samples whose tokens
    come closest to the target: fewer samples if two counts are equally close, and at least one. The rest
    stays in the buffer for the next batch, and the last rest is the last batch::

        target 10    chunks [4, 3, 5, 9], [2, 2]    yields 3 (12 tokens), 1 (9 tokens), 2 (4 tokens)

    By the paper's text no batch is yielded when the closest count is the whole buffer, and the algorithm does
    not end (target 10, buffer [3, 8]); here such a buffer is a batch. Raises ValueError for a target below 1.
    """
    if target_tokens < 1:
        raise ValueError(f"target_tokens must be at least 1, got {target_tokens}")
    waiting = np.empty(0, dtype=np.int64)
    for chunk in chunks:
        waiting = np.concatenate([waiting, chunk])
        sums = np.cumsum(waiting)
        taken, tokens = 0, 0
        while len(sums) and sums[-1] - tokens >= target_tokens:
            goal = tokens + target_tokens
            end = int(np.searchsorted(sums, goal)) + 1  # the first sum at or above the goal
            if end - 1 > taken and goal - sums[end - 2] <= sums[end - 1] - goal:
                end -= 1
            yield end - taken
            taken, tokens = end, int(sums[end - 1])
        waiting = waiting[taken:]
    if len(waiting):
        yield len(waiting)


class SupportsTokenCounts(Protocol):
    """A loader for `token_spread`."""

    def tokens_per_rank(self, step: int) -> Tensor: ...


@dataclass(frozen=True)
class TokenSpread:
    """Imbalance of the ranks' tokens; ratios of 1.0 and a spread of 0 are the best.

    ratio: sum over steps of the longest rank's tokens, divided by the sum of the mean over ranks.
    worst_ratio: largest ratio of a single step. spread: mean over steps of longest minus shortest rank.
    """

    ratio: float
    worst_ratio: float
    spread: float


def token_spread(loader: SupportsTokenCounts, steps: Iterable[int]) -> TokenSpread:
    """Measure `steps` of a loader over all ranks; raises ValueError for steps without tokens."""
    tokens = torch.stack([loader.tokens_per_rank(step) for step in steps]).double()
    tokens = tokens[tokens.sum(1) > 0]
    if len(tokens) == 0:
        raise ValueError("the steps hold no tokens")
    longest, mean = tokens.max(1).values, tokens.mean(1)
    return TokenSpread(
        ratio=float(longest.sum() / mean.sum()),
        worst_ratio=float((longest / mean).max()),
        spread=float((longest - tokens.min(1).values).mean()),
    )
