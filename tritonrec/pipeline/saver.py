"""A trainer's state on the disk: what training needs to go on with the same bits, at any world size."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .. import checkpoint
from ..checkpoint import CheckpointStream, flatten, unflatten
from ..checkpoint.rows import close_rows
from ..data import Vocabulary
from ..data.vocabulary import tensors_of, vocabularies_of
from ..distributed import Communicators, check_ranks_agree
from ..embedding import HashTableCollection
from ..embedding.in_flight import check_trainable
from ..embedding.state_check import check_description
from ..files.places import Place, place_of
from ..settings import no_copy
from .dense import DenseModel
from .position import LOADER, SupportsState, position_of, positions
from .recipe import RECIPE, keep_settings, recipe_of, require_described, require_same, with_own_settings
from .stage import place
from .window import WindowConfig

DENSE = "dense"
"""The key of the dense model's numbers and texts among a checkpoint's metadata."""
EMBEDDING = "embedding"
"""The key of `HashTableCollection.describe` there, by which an export knows weights from optimizer states."""
PRECISION = "dense_precision"
"""The key of the precision that the model was trained and evaluated in, there, for an export."""
Source = str | Place | Callable[[], Any]
"""A directory of checkpoints, or what opens something else that is read as `CheckpointStream` is."""


@place("batch")
@dataclass
class Taken:
    """The state after `step` steps, as far as a saver has taken it.

    Args:
        values: what JSON keeps. dense, tables, erased: see `checkpoint.Saver.save`.
    """

    saver: TrainingSaver
    step: int
    values: dict[str, Any]
    full: bool = True
    dense: dict[str, torch.Tensor] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)
    erased: dict[str, Any] = field(default_factory=dict)

    def take_dense(self) -> None:
        """Take the dense part, as it is now."""
        self.saver._take_dense(self)

    def take_rows(self, settled: bool = True) -> None:
        """Take the tables as they are now; see `DynamicTable.snapshot`."""
        self.saver._take_rows(self, settled)

    def close(self) -> None:
        """Nothing will be written: rows are no more copied before they change."""
        close_rows(self.tables)


class TrainingSaver:
    """Saves a training beside its steps; every `full_every`-th checkpoint is whole, the others hold changes.

    One replica of the tables is saved. The directory is this training's from here on (`checkpoint.Saver`).
    Use as a context manager: leaving it waits for the save under way. ``Trainer.load(saver)`` loads from its
    directory, and the next save holds what changed since.

    Args:
        directory: visible to all ranks. tables, dense: what is saved.
        meta: values of the caller's that JSON keeps unchanged, saved with every checkpoint as they are then.
        loader: its position is saved too. config: of the training.
        vocabularies: gives those of the tables' ids at a save.
        write: as of `checkpoint.Saver`.
        check: raises where there is no one state to save.
    """

    __reduce_ex__ = no_copy("one alone writes into its folder; ask the trainer of the process for one")

    def __init__(
        self,
        communicators: Communicators,
        directory: str | Place,
        tables: HashTableCollection,
        dense: DenseModel,
        meta: Mapping[str, Any],
        full_every: int = 1,
        loader: SupportsState | None = None,
        config: WindowConfig | None = None,
        vocabularies: Callable[[], Mapping[str, Vocabulary]] = dict,
        write: Callable[..., Any] = checkpoint.save,
        check: Callable[[], None] = lambda: None,
    ):
        for key in (DENSE, LOADER, EMBEDDING, PRECISION, RECIPE):
            if key in meta:
                raise ValueError(f"metadata of a checkpoint has the key {key!r}, which the trainer uses")
        self._communicators, self._loader, self._config = communicators, loader, config or WindowConfig()
        self.tables, self.dense, self.meta = tables, dense, meta
        self._vocabularies, self._check = vocabularies, check
        self.directory, self._incremental = place_of(directory).absolute(), full_every != 1
        self._saver: checkpoint.Saver | None = None
        self._left = False
        self.taken: Taken | None = None  # of a run, to be written
        # All savers have one group: a save under way, of another one, ends before this one's collectives.
        self._turn = ExitStack()
        if communicators.saves:
            with communicators.checkpoint.turn:
                self._saver = checkpoint.Saver(
                    directory,
                    rank=communicators.shard,
                    world_size=communicators.shards,
                    gather=communicators.checkpoint.all_gather_texts,
                    full_every=full_every,
                    context=self._writing,
                    write=write,
                )

    def save(self, step: int, meta: Mapping[str, Any] | None = None) -> None:
        """Take the state after `step` steps, and return while it is being written. Collective.

        Args:
            meta: more metadata, of this checkpoint alone.

        Raises RuntimeError while batches are in flight, and where replicas have trained apart since they
        were averaged, TypeError for a state that is no tensor, number or text.
        """
        self.begin()
        self.dense.check_idle("state_dict")
        self.take(step)
        self.begin(meta)

    def take(self, step: int) -> None:
        """Take the state after `step` steps, which `begin` writes. Collective; RuntimeError as `save`."""
        self._check()
        taken = self.prepare(step)
        taken.take_dense()
        taken.take_rows()
        self.taken = taken

    def prepare(self, step: int) -> Taken:
        """Take what the batches before `step` determine; they were read, and no later one was. Collective.

        Waits for the save under way, and raises its error.
        """
        at = {} if self._loader is None else {LOADER: positions(self._communicators, self._loader, step)}
        taken = Taken(self, step, at)
        if self._saver is not None:
            with self._communicators.checkpoint.turn:
                taken.full = self._saver.next_is_full(step)
            taken.dense = tensors_of(self._vocabularies())
        return taken

    def begin(self, meta: Mapping[str, Any] | None = None) -> None:
        """Write what was taken, if there is something, with more metadata; returns meanwhile."""
        taken, self.taken = self.taken, None
        if taken is None or self._saver is None:
            return
        self._communicators.checkpoint.turn.acquire()
        turn = self._turn = ExitStack()
        turn.callback(self._communicators.checkpoint.turn.release)
        try:
            values = {**self.meta, **(meta or {}), **taken.values}  # the caller's mapping may raise
            self._saver.save(taken.step, taken.dense, taken.tables, values, owned=True, **taken.erased)
        except BaseException:
            turn.close()
            taken.close()
            self.lose()
            raise

    def hand_over(self, taken: Taken) -> None:
        """The state of a window that is done, for `begin` to write; nothing does once this saver was left."""
        if self._left:
            taken.close()
        else:
            self.taken = taken

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Around the work of the thread that writes, at whose end the turn of this save is over."""
        with self._turn, self._communicators.watch.doing(f"save({step})"):
            yield

    def _take_dense(self, taken: Taken) -> None:
        state = self.dense.state_dict()  # also where it is not written: sharded parameters are gathered
        if self._saver is None:
            return
        plain, shared = flatten(state, DENSE)
        taken.dense |= {name.removeprefix(f"{DENSE}/"): tensor.clone() for name, tensor in shared.items()}
        own = {DENSE: plain, EMBEDDING: self.tables.describe(), PRECISION: self._config.precision}
        taken.values |= {**own, RECIPE: recipe_of(self.tables, self.dense, self._config)}

    def _take_rows(self, taken: Taken, settled: bool) -> None:
        if self._saver is None:
            return
        if not taken.full:
            taken.tables, taken.erased["erased"] = self.tables.snapshot_of_changes(settled=settled)
            return
        if self._incremental:
            # The log of changes begins with the state that this checkpoint holds.
            self.tables.track_changes()
        taken.tables = self.tables.snapshot(settled)

    def lose(self) -> None:
        """Nothing is known of the changes since the last save: the next one is whole. By all ranks."""
        if self.taken is not None:
            self.taken.close()
            self.taken = None
        if self._saver is not None and self._incremental:
            self._saver.lose()

    def check_saves(self, tables: HashTableCollection) -> None:
        """Raise ValueError unless it is these tables that it saves."""
        if self.tables is not tables:
            raise ValueError("the saver is another trainer's: give its directory, or a saver of this one")

    def follow(self, stream: CheckpointStream) -> None:
        """Save changes of the checkpoint of this directory whose rows were just loaded, by all ranks."""
        if self._saver is not None and self._incremental:
            self.tables.track_changes()
            self._saver.follow(stream.saved, stream.layers)

    def wait(self) -> None:
        """Wait for the save under way, and raise its error."""
        self.begin()
        if self._saver is not None:
            self._saver.wait()

    def __enter__(self) -> TrainingSaver:
        self._left = False
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._left = True
        try:
            if kind is None:
                self.begin()
            elif self.taken is not None:
                self.taken.close()
        finally:
            if self._saver is not None:
                self._saver.__exit__(kind, *rest)


def restore(
    communicators: Communicators,
    directory: Source,
    tables: HashTableCollection,
    dense: DenseModel,
    config: WindowConfig,
    accept: Callable[[dict[str, Any]], None] = lambda meta: None,
    loader: SupportsState | None = None,
    changed: Collection[str] = (),
    vocabularies: dict[str, Vocabulary] | None = None,
) -> Any:
    """Load this rank's part of the newest checkpoint; returns what was read. Collective.

    Everything is checked on every rank before anything is changed on one, see `whole_or_nothing`.
    `vocabularies` must extend those that were saved, and get those that are missing.

    `accept` gets the metadata of the training that saved, and raises where this one differs. Raises
    ValueError for a checkpoint of something else, of another model, optimizer or table, or of other settings
    (`require_same`).
    """
    with whole_or_nothing(communicators) as checked:
        check_trainable()
        stream = directory() if callable(directory) else CheckpointStream(directory)
        checked |= {"step": stream.step, "digest": stream.digest}
        meta = dict(stream.meta)
        tensors = stream.dense()
        plain, at, recipe = (meta.pop(key, None) for key in (DENSE, LOADER, RECIPE))
        described = meta.pop(EMBEDDING, None)
        meta.pop(PRECISION, None)
        accept(meta)
        if plain is None:
            raise ValueError(
                f"the checkpoint in {stream.directory} was not saved by a Trainer of this version"
            )
        state = unflatten(plain, {f"{DENSE}/{name}": tensor for name, tensor in tensors.items()})
        saved = vocabularies_of(tensors)
        for name in sorted(saved.keys() & (vocabularies or {}).keys()):
            vocabularies[name].check_extends(saved[name], name)  # type: ignore[index]
    load: Callable[[], None]
    with whole_or_nothing(communicators) as checked:  # of its own: sharded parameters are gathered in it
        checked["step"] = stream.step
        rows = partial(_read_rows, stream, communicators, tables)
        load = prepare(communicators, dense, state, rows, loader, at, changed)
        where = f"the checkpoint in {stream.directory}"
        if described is not None:
            check_description(described, stream.columns)
        require_same(recipe, recipe_of(tables, dense, config), changed, where)
        if described is not None and recipe is not None:  # or all is this training's, as the warning says
            require_described(described, tables.describe(), changed, where)
    load()
    if vocabularies is not None:
        vocabularies |= {name: each for name, each in saved.items() if name not in vocabularies}
    return stream


def _read_rows(
    stream: CheckpointStream, communicators: Communicators, tables: HashTableCollection
) -> Callable[[], None]:
    """Read this rank's rows; the function returned puts them in the place of those of the tables."""
    own = communicators.shard, communicators.shards
    columns = {
        name: {
            column: torch.empty(0, *shape, dtype=getattr(torch, dtype), device="cpu")
            for column, (dtype, shape) in of_table.items()
        }
        for name, of_table in stream.columns.items()
    }
    most = {name: stream.most_rows(name, *own) for name in columns}
    return tables.prepare_parts(columns, most, lambda name: stream.parts(name, *own))


def saved_vocabularies(directory: str | Place, step: int | None = None) -> dict[str, Vocabulary]:
    """The vocabularies in a checkpoint of a `Trainer`, by name, to read the next log with; {} without any.

    Args:
        step: of the checkpoint in `directory`, the newest by default.

    Raises `CheckpointError` where there is no checkpoint, or a damaged one.
    """
    return vocabularies_of(CheckpointStream(directory, step).dense())


def prepare(
    communicators: Communicators,
    dense: DenseModel,
    state: Mapping[str, Any],
    rows: Callable[[], Callable[[], None]],
    loader: SupportsState | None,
    at: list[str] | None,
    changed: Collection[str] = (),
) -> Callable[[], None]:
    """Check the parts of a state, and change nothing; the function returned loads them.

    Args:
        state: of `dense`. rows: checks those of the tables, and returns a function that loads them. at: what
            `positions` gave for the loader.
    """
    give_back = keep_settings(dense, changed)
    if "scheduler" in changed:
        own = [scheduler.state_dict() for scheduler in dense.schedulers]
        state = {**state, "schedulers": with_own_settings(state.get("schedulers"), own)}
    dense.check_state(state)
    position = None if loader is None else position_of(communicators, at)
    load_rows = rows()

    def load() -> None:
        if loader is not None:  # it checks the rest by itself, so it comes first
            before = loader.state_dict()
            try:
                loader.load_state_dict(position)  # type: ignore[arg-type]
            except BaseException:
                loader.load_state_dict(before)
                raise
        try:
            dense.load_state_dict(state)
        except BaseException:
            if loader is not None:
                loader.load_state_dict(before)
            raise
        give_back()
        load_rows()

    return load


@contextmanager
def whole_or_nothing(communicators: Communicators) -> Iterator[dict[str, Any]]:
    """Checks of one rank, after which all ranks go on, or all raise. Collective.

    Yields a mapping for the ``"step"`` that this rank would load, and what else must be that of all.
    """
    checked: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        yield checked
    except Exception as error:
        failure = error
    # Said by every rank, failed or not: a rank that raised at once would leave the others in the gather.
    mine = json.dumps({"failed": None if failure is None else str(failure)})
    said = communicators.control.all_gather_texts(mine)
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if words := json.loads(text).get("failed"):
            raise ValueError(f"nothing is loaded, because rank {rank} cannot: {words}")
    check_ranks_agree(
        communicators.control, {f"{name} of the checkpoint": value for name, value in checked.items()}
    )
