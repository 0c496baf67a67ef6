"""Equal work for every rank: dynamic sequence batching, and dealing one global batch by cost.

Sequences differ in length, and a synchronous step takes as long as its slowest rank. Two remedies:

- `dynamic_batches` (MTGRBoost, section 5.1, Algorithm 1): every rank takes as many samples as come closest to
  a target number of tokens. Batches differ in their number of samples, so what a step trains on changes with
  the target and the world size.
- `deal` hands out the samples of one global batch by cost, the longest first, each to the rank with the least
  so far. The batch stays the same set of samples, so under ``"batch"`` consistency the bits do too.

`TokenSpread` says what is left: a synchronous step waits for its longest rank, so ``ratio`` is the time that
dense computation takes over the time it would take if all ranks had as much to do.
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


def deal(costs: Tensor, world_size: int) -> list[Tensor]:
    """Places of the samples of each rank: `world_size` int64 tensors, each ascending, every sample in one.

    Greedy: by falling cost (B,), the earlier of two equal ones first, to the rank with the smallest sum so
    far, the lower one of equal ranks. The largest sum is at most 4/3 of the best possible (Graham 1969).

    Raises ValueError for a world size below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    order = torch.argsort(costs, descending=True, stable=True).tolist()
    values = costs.tolist()
    loads = [(0.0, rank) for rank in range(world_size)]
    dealt: list[list[int]] = [[] for _ in range(world_size)]
    for place in order:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + values[place], rank))
        dealt[rank].append(place)
    return [torch.tensor(sorted(places), dtype=torch.int64) for places in dealt]


def dynamic_batches(chunks: Iterable[np.ndarray], target_tokens: int) -> Iterator[int]:
    """Numbers of samples of the batches that Algorithm 1 cuts from chunks of sequence lengths (n,) int64.

    Whole chunks are read until the buffer holds `target_tokens`; the batch is as many samples from its front
    as come closest to the target, fewer if two counts are equally close, and at least one. What is left waits
    for the next chunk, and what is left at the end makes the last batch::

        target 10    chunks [4, 3, 5, 9], [2, 2]    yields 3 (12 tokens), 1 (9 tokens), 2 (4 tokens)

    The paper's text does not yield when the closest count is the whole buffer, and would then never go on
    (target 10, buffer [3, 8]); such a buffer is a batch here. Raises ValueError for a target below 1.
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


class Shards(Protocol):
    """What `token_spread` asks of a loader."""

    def tokens_per_rank(self, step: int) -> Tensor: ...


@dataclass(frozen=True)
class TokenSpread:
    """How unequal the ranks' tokens are: 1.0 and 0 are the best.

    ratio: sum over steps of the longest rank's tokens, over that of the mean rank's.
    worst_ratio: the largest of a single step. spread: mean over steps of longest minus shortest rank.
    """

    ratio: float
    worst_ratio: float
    spread: float


def token_spread(loader: Shards, steps: Iterable[int]) -> TokenSpread:
    """Measure `steps` of a loader, all ranks; a ValueError where they hold no token."""
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
