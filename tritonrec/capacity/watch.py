"""A training that outgrows its memory is warned of ahead, and ends with a checkpoint in time."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..settings import in_bytes
from .footprint import tables_added
from .room import Room, memory_left

if TYPE_CHECKING:
    from ..pipeline import Trainer

MIB = 1 << 20


class MemoryWatch:
    """Looks at the memory that is left as tables grow, after steps of a training.

    How fast tables grow is their rows per step over the last looks. From it follows the step at which memory
    would end, doublings of the key structure included. It is printed once it is less than `ahead` steps
    away, and again each time that it is half as far; at `margin` steps, or where less than `reserve` is left,
    all ranks are asked to stop (`Communicators.stop`), and the caller saves.

    To keep a table below a size instead, evict (`Eviction`), store seldom used rows in 16 bits
    (`PrecisionTiers`), or place it elsewhere (`Placement`): those have the same bits on every machine, and
    what a watch decides depends on the machine.

    Args:
        trainer: whose tables grow.
        limit: bytes of this process; None: what machine and container leave, shared by its ranks.
        ahead: steps. margin: steps; a wish to stop is seen after up to twice those in flight.
        reserve: bytes left for a checkpoint, an evaluation and others on the machine.
        say: takes a warning.
        every: seconds between looks; a look costs about 0.1 ms.

    Attributes:
        ended: why the run was asked to stop, "" before.
    """

    def __init__(
        self,
        trainer: Trainer,
        limit: int | None = None,
        *,
        ahead: int = 1000,
        margin: int = 16,
        reserve: int = 256 * MIB,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
        every: float = 0.25,
    ):
        if min(ahead, margin, reserve) < 0:
            raise ValueError("ahead, margin and reserve of a MemoryWatch must not be negative")
        self._trainer, self._limit, self._say, self._every = trainer, limit, say, every
        self._ahead, self._margin, self._reserve = ahead, margin, reserve
        self._looks: deque[tuple[int, list[int]]] = deque(maxlen=32)  # step, rows by table
        self._next_look, self._warned = 0.0, math.inf
        self.ended = ""
        room = memory_left(limit)
        if room.left < reserve:
            raise MemoryError(
                f"{in_bytes(room.limit - room.left)} of the {in_bytes(room.limit)} of {room.of} are taken "
                f"before the first step, and {in_bytes(reserve)} are kept for a checkpoint"
            )

    def on_step_end(self, step: int) -> None:
        """Look, where it is time: `step` steps are done."""
        now = time.monotonic()
        if self.ended:
            self._trainer.communicators.stop.set()
        elif now >= self._next_look:
            self._next_look = now + self._every
            self._look(step, memory_left(self._limit))

    def _look(self, step: int, room: Room) -> None:
        tables = self._trainer.tables
        rows = [len(group.table) for group in tables.groups]
        if self._looks and self._looks[-1][0] >= step:
            self._looks.clear()  # a run that was rolled back
        self._looks.append((step, rows))
        left = room.left - self._reserve
        ranks = 1 if room.own else self._ranks_here()
        away = self._steps_until(left // ranks)
        if left <= 0 or away <= self._margin:
            self.ended = f"memory: {self._state(room, rows)}, at step {step}"
            self._trainer.communicators.stop.set()
            self._say(f"{self.ended}: stopping")
        elif away <= min(self._ahead, self._warned / 2):
            self._warned = away
            self._say(
                f"memory ends in about {away:,} steps, at step {step + away:,}: {self._state(room, rows)}; "
                "evict rows, store seldom used ones in 16 bits, or use more ranks"
            )

    def _state(self, room: Room, rows: list[int]) -> str:
        return (
            f"{in_bytes(room.left)} of {in_bytes(room.limit)} of {room.of} are left, tables have "
            f"{sum(rows):,} rows and grow by {sum(self._rates()):,.0f} a step"
        )

    def _ranks_here(self) -> int:
        groups = self._trainer.communicators
        return -(-groups.world_size // max(groups.machines, 1))

    def _rates(self) -> list[float]:
        """New rows a step, by table."""
        (first, before), (last, after) = self._looks[0], self._looks[-1]
        steps = max(last - first, 1)
        return [max(new - old, 0) / steps for old, new in zip(before, after, strict=True)]

    def _steps_until(self, left: int) -> int:
        """Steps until the tables have taken `left` bytes more, at most `ahead` + 1."""
        rates, tables = self._rates(), self._trainer.tables

        def fits(steps: int) -> bool:
            return tables_added(tables, [math.ceil(rate * steps) for rate in rates]) < left

        low, high = 0, self._ahead + 1
        if fits(high):
            return high
        while low < high:  # the first number of steps that do not fit
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(middle) else (low, middle)
        return low
