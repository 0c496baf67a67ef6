"""A run's state on the disk: what training needs to go on with the same bits, at any world size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ... import checkpoint
from ...distributed import Communicators, check_ranks_agree
from ...embedding import DenseOptimizer, HashTableCollection


class RunSaver:
    """Saves a run beside its training; every `full_every`-th checkpoint is whole, the others hold changes.

    One replica of the tables is saved. The directory is this run's from here on (`checkpoint.Saver`). Use as
    a context manager: leaving it waits for the save under way.
    """

    def __init__(
        self,
        communicators: Communicators,
        directory: str | Path,
        tables: HashTableCollection,
        dense: DenseOptimizer,
        meta: Mapping[str, Any],
        full_every: int = 1,
    ):
        self.tables, self.dense, self.meta = tables, dense, meta
        self._incremental = full_every > 1
        self._saver: checkpoint.Saver | None = None
        if communicators.saves:
            self._saver = checkpoint.Saver(
                directory,
                rank=communicators.shard,
                world_size=communicators.shards,
                gather=communicators.checkpoint.all_gather_texts,
                full_every=full_every,
                context=lambda step: communicators.watch.doing(f"save({step})"),
            )

    def save(self, step: int) -> None:
        """Take the state after `step` steps, and return while it is being written. Collective.

        The pipeline must be empty: `Trainer.run` has come to its end.
        """
        if self._saver is None:
            return
        full = self._saver.next_is_full()
        dense = {name: rows.clone() for name, rows in self.dense.rows.items()}
        if full:
            if self._incremental:
                self.tables.track_changes()
            self._saver.save(step, dense, self.tables.state(), self.meta, owned=True)
        else:
            changed, erased = self.tables.take_changes()
            self._saver.save(step, dense, changed, self.meta, erased=erased, owned=True)

    def __enter__(self) -> RunSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._saver is not None:
            self._saver.__exit__(kind, *rest)


def restore(
    communicators: Communicators,
    directory: str | Path,
    tables: HashTableCollection,
    dense: DenseOptimizer,
    accept: Callable[[dict[str, Any]], None] = lambda meta: None,
) -> int:
    """Load this rank's part of the newest checkpoint; returns its step.

    `accept` gets the metadata of the run that saved, and raises where this one differs; nothing is loaded
    then.
    """
    loaded = checkpoint.load(directory, rank=communicators.shard, world_size=communicators.shards)
    accept(loaded.meta)
    dense.load(loaded.dense)
    tables.load_state(loaded.tables)
    check_ranks_agree(communicators.control, {"step of the checkpoint": loaded.step})
    return loaded.step
