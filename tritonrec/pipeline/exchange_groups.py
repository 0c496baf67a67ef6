"""Which micro-batches of a window share an exchange.

A message costs the host some 0.1 to 0.3 ms whatever is in it, so a window of many small micro-batches pays
for messages more than for bytes. Rows are frozen in the window: those of a later micro-batch may come with an
earlier one's, and gradients may wait for a later one's. What has to stay is the overlap. Where exchanges run
beside the computation, groups double in size away from the exposed end::

    micro-batch         0     1     2     3     4     5     6     7
    rows come           [0]   [1]   [2     3]   [4     5     6     7]      4 exchanges, not 8
    gradients leave     [0     1     2     3]   [4     5]   [6]   [7]

Before the micro-batches 2**k to 2**(k+1) - 1 of N as many are computed as come with them. With C seconds of
computation and E of rows in a window, the group has come at 2**(k+1) E / N, and is used at E / N + 2**k C / N
or later: nothing waits longer than for single micro-batches where E is at most C / 2, which rows and
gradients together must keep to be hidden at all. The exposed ends stay one micro-batch long.

Where nothing overlaps, all rows come before the first micro-batch, and gradients leave after the last. That
is so, too, of processes on the CPU of one machine: no link carries a message while they compute, but the same
processors copy it, and a row once for each group that has it.

Micro-batches that share both exchanges share their rows, too: one comes once for all of them, and its
gradients are added up before they leave. In the drawing above these are 2 with 3, and 4 with 5. Sums with an
order leave with their own micro-batches, so there no two share both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class ExchangeGroups:
    """Which micro-batches of a window share an exchange; both lists ascend.

    Args:
        rows_with: [i] the micro-batch, i or one before it, with whose rows those of i come.
        gradients_with: [i] the micro-batch, i or one after it, with whose gradients those of i leave.
    """

    rows_with: tuple[int, ...]
    gradients_with: tuple[int, ...]

    @property
    def joined(self) -> bool:
        """Whether any two micro-batches share an exchange."""
        return any(each != i for both in (self.rows_with, self.gradients_with) for i, each in enumerate(both))

    def __str__(self) -> str:
        """As a trace says it: ``1 of rows and 1 of gradients a window of 4 micro-batches``."""
        rows, gradients = len({*self.rows_with}), len({*self.gradients_with})
        return f"{rows} of rows and {gradients} of gradients a window of {len(self.rows_with)} micro-batches"

    @property
    def doers(self) -> dict[str, tuple[int, ...]]:
        """By stage, [i] the micro-batch whose task does the work of i too (`Tasks`)."""
        return {"exchange": self.rows_with, "gradient_exchange": self.gradients_with}

    @property
    def sharing(self) -> list[int]:
        """How many micro-batches share both exchanges with each other, one run after the other."""
        both = list(zip(self.rows_with, self.gradients_with, strict=True))
        return [len(list(run)) for _, run in groupby(both)]

    @property
    def same(self) -> bool:
        """Whether micro-batches that share an exchange of rows share one of gradients, and the reverse."""
        return _starts(self.rows_with) == _starts(self.gradients_with)


def each_alone(micro_batches: int) -> ExchangeGroups:
    """Every micro-batch has exchanges of its own."""
    alone = tuple(range(micro_batches))
    return ExchangeGroups(alone, alone)


def joined_groups(micro_batches: int, overlap: bool, ordered: bool) -> ExchangeGroups:
    """Groups that cost no overlap.

    Args:
        overlap: exchanges run beside the computation of other micro-batches.
        ordered: sums of gradients have an order, that of their micro-batches, so these are not joined.
    """
    sizes = list(_doubling(micro_batches)) if overlap else [micro_batches]
    rows, gradients, start = [], list(range(micro_batches)), 0
    for size in sizes:
        rows += [start] * size
        start += size
    if not ordered:
        # The mirror image: large groups leave first, and the exposed last exchange has one micro-batch.
        gradients = [micro_batches - 1 - each for each in reversed(rows)]
    return ExchangeGroups(tuple(rows), tuple(gradients))


def _doubling(count: int) -> Iterator[int]:
    """1, 1, 2, 4, ..., the last as long as there is room."""
    size, left = 1, count
    yield min(size, left)
    left -= size
    while left > 0:
        yield min(size, left)
        left -= size
        size *= 2


def _starts(groups: tuple[int, ...]) -> list[int]:
    """The first micro-batch of each group."""
    return [i for i, each in enumerate(groups) if not i or groups[i - 1] != each]
