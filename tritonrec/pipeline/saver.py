"""A trainer's state on the disk: what training needs to go on with the same bits, at any world size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import checkpoint
from ..checkpoint import CheckpointStream, flatten, unflatten
from ..data import Vocabulary
from ..data.vocabulary import tensors_of, vocabularies_of
from ..distributed import Communicators, check_ranks_agree
from ..embedding import HashTableCollection
from .dense import DenseModel
from .position import LOADER, SupportsState, positions, set_position
from .precision import Precision

DENSE = "dense"
"""The key of the dense model's numbers and texts among a checkpoint's metadata."""
EMBEDDING = "embedding"
"""The key of `HashTableCollection.describe` there, by which an export knows weights from optimizer states."""
PRECISION = "dense_precision"
"""The key of the precision that the model was trained and evaluated in, there, for an export."""


class TrainingSaver:
    """Saves a training beside its steps; every `full_every`-th checkpoint is whole, the others hold changes.

    One replica of the tables is saved. The directory is this training's from here on (`checkpoint.Saver`).
    Use as a context manager: leaving it waits for the save under way.

    Args:
        directory: visible to all ranks. tables, dense: what is saved.
        meta: values of the caller's that JSON keeps unchanged, saved with every checkpoint.
        loader: its position is saved too. precision: of the model's arithmetic.
        vocabularies: gives those of the tables' ids at a save.
    """

    def __init__(
        self,
        communicators: Communicators,
        directory: str | Path,
        tables: HashTableCollection,
        dense: DenseModel,
        meta: Mapping[str, Any],
        full_every: int = 1,
        loader: SupportsState | None = None,
        precision: Precision = "float32",
        vocabularies: Callable[[], Mapping[str, Vocabulary]] = dict,
    ):
        for key in (DENSE, LOADER, EMBEDDING, PRECISION):
            if key in meta:
                raise ValueError(f"metadata of a checkpoint has the key {key!r}, which the trainer uses")
        self._communicators, self._loader, self._precision = communicators, loader, precision
        self.tables, self.dense, self.meta = tables, dense, meta
        self._vocabularies = vocabularies
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

    def save(self, step: int, meta: Mapping[str, Any] | None = None) -> None:
        """Take the state after `step` steps, and return while it is being written. Collective.

        Args:
            meta: more metadata, of this checkpoint alone.

        Raises RuntimeError while batches are in flight, TypeError for a state that is no tensor, number or
        text.
        """
        state = self.dense.state_dict()  # also where it is not written: sharded parameters are gathered
        at = {} if self._loader is None else {LOADER: positions(self._communicators, self._loader, step)}
        if self._saver is None:
            return
        plain, shared = flatten(state, DENSE)
        full = self._saver.next_is_full()
        dense = {name.removeprefix(f"{DENSE}/"): tensor.clone() for name, tensor in shared.items()}
        dense |= tensors_of(self._vocabularies())
        own = {DENSE: plain, EMBEDDING: self.tables.describe(), PRECISION: self._precision}
        values = {**self.meta, **(meta or {}), **at, **own}
        if full:
            if self._incremental:
                self.tables.track_changes()
            self._saver.save(step, dense, self.tables.state(), values, owned=True)
        else:
            changed, erased = self.tables.take_changes()
            self._saver.save(step, dense, changed, values, erased=erased, owned=True)

    def wait(self) -> None:
        """Wait for the save under way, and raise its error."""
        if self._saver is not None:
            self._saver.wait()

    def __enter__(self) -> TrainingSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        if self._saver is not None:
            self._saver.__exit__(kind, *rest)


def restore(
    communicators: Communicators,
    directory: str | Path,
    tables: HashTableCollection,
    dense: DenseModel,
    accept: Callable[[dict[str, Any]], None] = lambda meta: None,
    loader: SupportsState | None = None,
    vocabularies: dict[str, Vocabulary] | None = None,
) -> int:
    """Load this rank's part of the newest checkpoint; returns its step. Collective.

    `loader` goes on where the one of the training that saved was. `vocabularies` must extend those that were
    saved, and get those that are missing.

    `accept` gets the metadata of the training that saved, and raises where this one differs; nothing is
    loaded then. Raises ValueError for a checkpoint of something else, of another model, optimizer or table.
    """
    loaded = checkpoint.load(directory, rank=communicators.shard, world_size=communicators.shards)
    meta = dict(loaded.meta)
    plain, at = meta.pop(DENSE, None), meta.pop(LOADER, None)
    for key in (EMBEDDING, PRECISION):
        meta.pop(key, None)
    accept(meta)
    if plain is None:
        raise ValueError(f"the checkpoint in {directory} was not saved by a Trainer of this version")
    saved = vocabularies_of(loaded.dense)
    for name, before in saved.items():
        if vocabularies and name in vocabularies:
            vocabularies[name].check_extends(before, name)
    if loader is not None:
        set_position(communicators, loader, at)
    dense.load_state_dict(
        unflatten(plain, {f"{DENSE}/{name}": tensor for name, tensor in loaded.dense.items()})
    )
    tables.load_state(loaded.tables)
    if vocabularies is not None:
        vocabularies |= {name: each for name, each in saved.items() if name not in vocabularies}
    check_ranks_agree(communicators.control, {"step of the checkpoint": loaded.step})
    return loaded.step


def saved_vocabularies(directory: str | Path, step: int | None = None) -> dict[str, Vocabulary]:
    """The vocabularies in a checkpoint of a `Trainer`, by name, to read the next log with; {} without any.

    Args:
        step: of the checkpoint in `directory`, the newest by default.

    Raises `CheckpointError` where there is no checkpoint, or a damaged one.
    """
    return vocabularies_of(CheckpointStream(directory, step).dense())
