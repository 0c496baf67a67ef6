"""Copies of a training's state in the memory of other ranks, for those that go on after a rank was lost."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from .. import checkpoint
from ..checkpoint import flatten, unflatten
from ..distributed import Communicator, Communicators
from ..embedding.state_check import check_state
from ..files.places import Place
from ..kernels import launch
from ..kernels.checksums import as_bytes
from ..pipeline.position import SupportsState, positions
from ..pipeline.recipe import Recipe, recipe_of, require_same
from ..pipeline.saver import DENSE, prepare, whole_or_nothing
from ..pipeline.trainer import Trainer

Columns = dict[str, torch.Tensor]
Tables = dict[str, Columns]


@dataclass(frozen=True)
class _Copy:
    """The state after `step` steps: parts of the tables by shard of `shards`, and what all ranks share."""

    step: int
    shards: int
    parts: dict[int, Tables]
    dense: tuple[Any, Columns]
    position: list[str] | None
    meta: dict[str, Any]
    recipe: Recipe


class PeerCopies:
    """Copies of a training in the host memory of its ranks. Made once, before `run_elastic`.

    `keep` takes this rank's shard of the tables, and sends a copy to the next rank; with replicas of the
    tables every shard is on several ranks already, and nothing is sent. `restore` gives the ranks that are
    left the newest state of which they have every shard, at any world size.

    A step that some ranks have finished and others have not cannot be undone in memory, because windows in
    flight have changed rows. So training goes back to the last `keep`, as to a checkpoint. A rank has the
    last two copies, since others may have died in the middle of the last: 4 shards (2 with replicas) and 2
    dense states.
    """

    def __init__(self) -> None:
        self._copies: deque[_Copy] = deque(maxlen=2)

    def keep(
        self, trainer: Trainer, meta: Mapping[str, Any] | None = None, loader: SupportsState | None = None
    ) -> None:
        """Keep the state after `next_step` steps. Collective.

        Args:
            meta: values of the caller's that JSON keeps unchanged. loader: its position is kept too.

        Raises RuntimeError while batches are in flight, TypeError for a state that is no tensor, number or
        text.
        """
        groups, step = trainer.communicators, trainer.next_step
        plain, tensors = flatten(trainer.dense.state_dict(), DENSE)
        position = None if loader is None else positions(groups, loader, step)
        parts = {groups.shard: trainer.tables.state()}
        if groups.replicas == 1 and groups.shards > 1:
            # A ring: rank r has shards r and r - 1, so no single loss takes both copies of a shard.
            parts[(groups.shard - 1) % groups.shards] = _pass_on(groups.shard_control, parts[groups.shard])
        dense = plain, {name: tensor.clone() for name, tensor in tensors.items()}
        self._copies.append(
            _Copy(step, groups.shards, parts, dense, position, dict(meta or {}), _recipe(trainer))
        )

    def restore(
        self,
        trainer: Trainer,
        directory: str | Place | None = None,
        accept: Callable[[dict[str, Any]], None] = lambda meta: None,
        loader: SupportsState | None = None,
        changed: Collection[str] = (),
    ) -> int:
        """Go on from the newest state, of the copies or in `directory`; returns its step. Collective.

        The tables have no rows yet. Without any state nothing is loaded, and the step is that of the trainer.

        Args:
            directory: of checkpoints, which may be empty. accept, loader, changed: see `Trainer.load`.
        """
        groups = trainer.communicators
        newest = max(checkpoint.steps(directory), default=-1) if directory is not None else -1
        mine = {"saved": newest, "shard": groups.shard, "copies": [_summary(each) for each in self._copies]}
        ranks = [json.loads(text) for text in groups.control.all_gather_texts(json.dumps(mine))]
        step, shards, holders = _newest_whole([rank["copies"] for rank in ranks])
        saved = ranks[0]["saved"]
        # Some ranks may have newer ones, which would take the place of those that all have.
        self._copies = deque((each for each in self._copies if each.step <= max(step, saved)), maxlen=2)
        if directory is not None and saved >= max(step, 0):
            return trainer.load(directory, accept, loader, changed)
        if step < 0:
            return trainer.next_step
        copy = next(each for each in self._copies if (each.step, each.shards) == (step, shards))
        parts = [copy.parts[shard] for shard, rank in holders.items() if rank == groups.rank]
        empty = trainer.tables.empty_state()
        with whole_or_nothing(groups) as checked:
            checked["step"] = step
            accept(dict(copy.meta))
            require_same(copy.recipe, _recipe(trainer), changed, "the copies")
            for part in parts:
                check_state(part, empty)
        rows = _redistribute(groups, parts, [rank["shard"] for rank in ranks], empty)
        with whole_or_nothing(groups) as checked:
            checked["step"] = step
            state = unflatten(*copy.dense)
            sizes = {name: len(columns["keys"]) for name, columns in rows.items()}
            read = partial(trainer.tables.prepare_parts, rows, sizes, lambda name: [rows[name]])
            load = prepare(groups, trainer.dense, state, read, loader, copy.position, changed)
        load()
        trainer.next_step = step
        self.keep(trainer, copy.meta, loader)  # for the next loss: shards were on lost ranks too
        return step


def _recipe(trainer: Trainer) -> Recipe:
    return recipe_of(trainer.tables, trainer.dense, trainer.config)


def _summary(copy: _Copy) -> tuple[int, int, list[int]]:
    return copy.step, copy.shards, sorted(copy.parts)


def _newest_whole(ranks: list[list[tuple[int, int, list[int]]]]) -> tuple[int, int, dict[int, int]]:
    """The newest step that all ranks have and all of whose shards are there, their number, and by shard a
    rank that has it.

    Step -1 where there is none.

    Args:
        ranks: for each rank step, number of shards, and own shards of its copies.
    """
    # Dense parameters are on every rank, so a step counts only where all ranks that are left have it.
    common = set.intersection(*({(step, shards) for step, shards, _ in copies} for copies in ranks))
    for step, shards in sorted(common, reverse=True):
        holders: dict[int, int] = {}
        for rank, copies in enumerate(ranks):
            for *copy, own in copies:
                for shard in own if copy == [step, shards] else []:
                    holders.setdefault(shard, rank)
        if len(holders) == shards:
            return step, shards, holders
    return -1, 0, {}


def _pass_on(over: Communicator, tables: Tables) -> Tables:
    """Send the state of tables to the next rank, and return that of the rank before."""
    return {name: _unpacked(over.ring_shift(_packed(columns)), columns) for name, columns in tables.items()}


def _redistribute(
    groups: Communicators, parts: list[Tables], shard_of: list[int], empty: Mapping[str, Mapping[str, Any]]
) -> Tables:
    """This rank's rows of tables, keys ascending, from the parts that all ranks have.

    Args:
        parts: of this rank to be sent; each row of the tables is in one rank's. shard_of: the new shard of
            each rank. empty: state of no rows.
    """
    over, found = groups.control, {}
    for name, none in empty.items():
        columns = {
            column: torch.cat([values, *(part[name][column] for part in parts)])
            for column, values in none.items()
        }
        owners = launch.owner_of(columns["keys"], groups.shards)
        packed = _packed(columns)
        places = [(owners == shard).nonzero().squeeze(1) for shard in shard_of]
        send = [len(each) for each in places]
        rows = _unpacked(over.all_to_all_counted(packed[torch.cat(places)], send), columns)
        order = torch.argsort(rows["keys"])
        found[name] = {column: values[order] for column, values in rows.items()}
    return found


def _packed(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Rows (n, ...) of all columns as bytes (n, bytes of a row)."""
    return torch.cat([as_bytes(each).view(len(each), _row_bytes(each)) for each in columns.values()], dim=1)


def _unpacked(packed: torch.Tensor, like: Mapping[str, torch.Tensor]) -> Columns:
    """The columns of `_packed`, shaped and typed as `like`."""
    found, begin = {}, 0
    for name, values in like.items():
        part = packed[:, begin : begin + _row_bytes(values)].flatten().clone()  # at an address of its own
        found[name] = part.view(values.dtype).view(len(packed), *values.shape[1:])
        begin += _row_bytes(values)
    return found


def _row_bytes(values: torch.Tensor) -> int:
    return values.element_size() * prod(values.shape[1:])
