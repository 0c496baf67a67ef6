"""Saves inside of a run: the state after a step, taken while later windows are in flight.

The parts of a state have their values of window s at moments of their own, and each is taken at its own::

    lookup of s      keys, scores, counts, keys that wait for admission; the lookup of s + 1 changes them
    dense update     the model, its optimizer, scheduler, average; the forward of s + 1 changes them
    write-back of s  rows: from here on one is copied before it changes; the write-back of s + 1 does

    retrieval    lookup s |keys|   lookup s + 1              lookup s + 2
    compute      ... s - 1         forward and backward s    update s |dense|   forward s + 1
    write_back                     s - 1                     s |rows|

Between keys and rows two windows are written, s - 1 and s, whose rows are part of the state: they are not
copied. What the lookup of s + 1 evicts meanwhile is of neither, has its values, and is copied. The lookup of
s + 2 waits for the write-back of s in every schedule that passes the check, for it may evict rows of s.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from ..embedding import HashTableCollection
from .dense import DenseModel
from .places import Dense, Tables, WindowPlaces
from .program import Program
from .saver import Taken, TrainingSaver
from .stage import Idle, Read, Write
from .window import WindowConfig


@dataclass
class StepSaves:
    """Saves of a run after each `every` steps; `drained`: nothing may be in flight then."""

    saver: TrainingSaver
    every: int
    drained: bool
    sync: Callable[[], None] | None

    def due(self, steps: int) -> bool:
        """Whether the state after so many steps is saved."""
        return steps % self.every == 0

    def pauses(self, steps: int) -> bool:
        """Whether no later window may begin before it is taken."""
        return self.drained and self.due(steps)

    def take_drained(self, steps: int) -> None:
        """Take it, where it is due and nothing may be in flight; nothing is."""
        if self.pauses(steps):
            if self.sync is not None:
                self.sync()
            self.saver.take(steps)


def saves_of(
    saver: TrainingSaver | None,
    every: int,
    config: WindowConfig,
    tables: HashTableCollection,
    dense: DenseModel,
    program: Program | None,
    sync: Callable[[], None] | None,
) -> StepSaves | None:
    """Of a run of a `program`, None for mode ``"reference"``; `sync` averages replicas, where they are.

    The stages take the states where they can, and what they take they have access to anyway: what was proven
    of the schedule holds. Warns where they cannot, and something could be in flight.

    Raises ValueError for a saver without `every`, or of another trainer.
    """
    config.check_pauses(every, "save_every")
    if (saver is None) != (every == 0):
        raise ValueError("a saver of a run and save_every= go together")
    if saver is None:
        return None
    saver.check_saves(tables)
    if program is None or not program.schedule.overlaps_batches:
        return StepSaves(saver, every, True, sync)
    reasons = {
        "tables are on a device": any(group.table.padded for group in tables.groups),
        "the model is on a device": any(not each.is_cpu for each in dense.parameters.values()),
        "parameters are sharded": dense.shards is not None,
        "replicas are averaged": sync is not None,
        "skip_fetch keeps rows in the buffers": program.schedule.keeps_rows,
    }
    reason = ", ".join(reason for reason, holds in reasons.items() if holds)
    if reason:
        warnings.warn(f"each save of this run empties the pipeline first: {reason}", stacklevel=4)
    elif not program.takes_states:
        program.takes_states = True
        for stage, taking in (("retrieve", take_rows), ("dense_update", take_dense), ("write_back", settle)):
            program.after(stage, taking)
    return StepSaves(saver, every, bool(reason), sync)


def take_rows(taken: Read[Taken] | None, tables: Read[Idle[Tables]]) -> None:
    if taken is not None:
        taken.take_rows(settled=False)


def take_dense(taken: Read[Taken] | None, dense: Read[Dense]) -> None:
    if taken is not None:
        taken.take_dense()


def settle(taken: Read[Taken] | None, tables: Write[Tables]) -> None:
    for table in tables if taken is not None else ():
        table.settle()


def hand_over(places: WindowPlaces) -> None:
    """A window is done: its saver writes what was taken, as soon as the caller has seen the result."""
    taken = places.get(Taken)
    if taken is not None:
        taken.saver.hand_over(taken)


def abandon(places: WindowPlaces) -> None:
    """A window will not be done: nothing reads what was taken for it."""
    taken = places.get(Taken)
    if taken is not None:
        taken.close()
