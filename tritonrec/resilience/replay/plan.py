"""Which micro-batches and rows are computed again, and when: the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Unit(NamedTuple):
    """A micro-batch of one rank in a window."""

    rank: int
    micro_batch: int


@dataclass(frozen=True)
class Plan:
    """The micro-batches of all ranks are counted in the order of updates, and each ``period``-th is due.

    Ranks take turns, and so do the places in a window. Rows are due in updates that have a micro-batch which
    is: as many that they are the same share of all rows of the run.

    Args:
        share: of the work, in (0, 1]. world_size: W. micro_batches: M, of a window.
        first_only: of a window only the first micro-batch may be due.
    """

    share: float
    world_size: int
    micro_batches: int
    first_only: bool = False

    @property
    def period(self) -> int:
        """Micro-batches of which one is due."""
        return max(round(1 / self.share), 1)

    @property
    def window(self) -> int:
        """Micro-batches of all ranks in a window."""
        return self.world_size * self.micro_batches

    @property
    def most_updates(self) -> int:
        """Updates within which every rank computes a micro-batch that is due."""
        return -(-self.period * self.world_size // self.window)

    def units(self, update: int) -> list[Unit]:
        """The micro-batches that are due in an update."""
        # Micro-batches of all updates so far, divided by the
        # period: the k-th due one falls into exactly one update.
        numbers = range(update * self.window // self.period, (update + 1) * self.window // self.period)
        places = 1 if self.first_only else self.micro_batches
        found = [Unit(k % self.world_size, k // self.world_size % places) for k in numbers]
        return list(dict.fromkeys(found))

    def rows(self, update: int) -> tuple[int, int] | None:
        """The first row that is due, and the step from one to the next; None where none is."""
        first = update * self.window // self.period
        if first == (update + 1) * self.window // self.period:
            return None
        every = min(self.window, self.period)
        return first % every, every
