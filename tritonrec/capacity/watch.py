"""A training that outgrows its memory is warned of ahead, and ends with a checkpoint in time; a step that is
larger than what is left is an error.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ..room import Room, memory_left
from ..settings import in_bytes, typed
from .bound import bound_data, lift_bound, stacks, tells_of_memory
from .footprint import tables_added

if TYPE_CHECKING:
    from ..data import Batch
    from ..pipeline import StepResult, Trainer

MIB = 1 << 20


@typed
class MemoryWatch:
    """Looks at the memory that is left as tables grow, after steps of a training.

    How fast tables grow is their rows per step over the last looks. From it follows the step at which memory
    would end, doublings of the key structure included. It is printed once it is less than `ahead` steps
    away, and again each time that it is half as far; at `margin` steps, or where less than `reserve` is left,
    all ranks are asked to stop (`Communicators.stop`), and the caller saves.

    A single step may take more than is left, however few rows tables have. In `run` the kernel refuses this
    process more than its share of what was left at the last look, but for half of `reserve`: the allocation
    raises, where the kernel would end the process later (see `bound`).

    To keep a table below a size instead, evict (`Eviction`), store seldom used rows in 16 bits
    (`PrecisionTiers`), or place it elsewhere (`Placement`): those have the same bits on every machine, and
    what a watch decides depends on the machine.

    Args:
        trainer: whose tables grow.
        limit: bytes of this process; None: what machine and container leave, shared by its ranks.
        ahead: steps. margin: steps; a wish to stop is seen after up to twice those in flight.
        reserve: bytes left for a checkpoint, an evaluation and others on the machine.
        say: takes a warning.
        every: seconds between looks; a look costs 2 to 4 ms on two busy cores.

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
        self._next_look, self._warned, self._bounds = 0.0, math.inf, False
        self.ended = ""
        self._room = room = memory_left(limit)
        if room.left < reserve:
            raise MemoryError(
                f"{in_bytes(room.limit - room.left)} of the {in_bytes(room.limit)} of {room.of} are taken "
                f"before the first step, and {in_bytes(reserve)} are kept for a checkpoint"
            )

    def run(self, batches: Iterable[Batch], **given: Any) -> Iterator[StepResult]:
        """`Trainer.run` of what it is `given`, with a look after each step.

        Raises MemoryError for a step that needs more memory than is left; the last checkpoint is whole.
        """
        self._bounds = True
        self._bound(memory_left(self._limit), stacks())
        try:
            for result in self._trainer.run(batches, **given):
                self.on_step_end(result.step + 1)
                yield result
        except Exception as error:
            if not tells_of_memory(error):
                raise
            room = self._room
            raise MemoryError(
                f"step {self._trainer.next_step} or one read ahead needs more than this rank's share of the "
                f"{in_bytes(room.left)} that were left of {in_bytes(room.limit)} of {room.of} ({error}): use "
                "smaller batches, more micro-batches, fewer ranks here or rows on disk, and go on from the "
                "last checkpoint"
            ) from error
        finally:
            self._bounds = False
            lift_bound()

    def _bound(self, room: Room, more: int = 0) -> None:
        self._room = room
        share = room.left - min(self._reserve, max(room.left, 0)) // 2
        bound_data(share // self._ranks_of(room) + more)

    def on_step_end(self, step: int) -> None:
        """Look, where it is time: `step` steps are done."""
        now = time.monotonic()
        if self.ended:
            self._trainer.communicators.stop.set()
        elif now >= self._next_look:
            self._next_look = now + self._every
            room = memory_left(self._limit)
            self._look(step, room)
            if self._bounds:
                self._bound(room)

    def _look(self, step: int, room: Room) -> None:
        tables = self._trainer.tables
        rows = [len(group.table) for group in tables.groups]
        if self._looks and self._looks[-1][0] >= step:
            self._looks.clear()  # a run that was rolled back
        self._looks.append((step, rows))
        left = room.left - self._reserve
        away = self._steps_until(left // self._ranks_of(room))
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

    def _ranks_of(self, room: Room) -> int:
        """Those that share it."""
        groups = self._trainer.communicators
        return 1 if room.own else -(-groups.world_size // max(groups.machines, 1))

    def _rates(self) -> list[float]:
        """New rows a step, by table."""
        (first, before), (last, after) = self._looks[0], self._looks[-1]
        steps = max(last - first, 1)
        return [max(new - old, 0) / steps for old, new in zip(before, after, strict=True)]

    def _steps_until(self, left: int) -> int:
        """Steps until the tables have taken `left` bytes more, at most `ahead` + 1."""
        rates, tables, shards = self._rates(), self._trainer.tables, self._trainer.communicators.shards

        def fits(steps: int) -> bool:
            return tables_added(tables, [math.ceil(rate * steps) for rate in rates], shards) < left

        low, high = 0, self._ahead + 1
        if fits(high):
            return high
        while low < high:  # the first number of steps that do not fit
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(middle) else (low, middle)
        return low
