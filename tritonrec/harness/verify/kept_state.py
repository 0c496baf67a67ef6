"""What injected faults do to kept state: tables, copies, checkpoints, exports, positions in a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ... import ops
from ...data import Stream
from ...pipeline import Program
from ...pipeline.places import OwnedRows
from ...pipeline.stage import Read
from ...resilience import PeerCopies
from ...serving import export
from ..job import Loader
from .injections import nothing


def initial_by_arrival(program: Program) -> None:
    table = program.tables.groups[0].table
    lookup = table.lookup

    def by_arrival(keys: torch.Tensor, *rest):
        new, before = keys[table.find(keys) < 0], len(table)
        found = lookup(keys, *rest)
        if new.numel():
            values = table.gather(table.find(new), new)
            places = torch.arange(before, before + len(new))
            values[:, : table.dim] = ops.initial_rows(table.seed, 0, places, table.dim, table.scale)
            table.update(table.find(new), values)
        return found

    table.lookup = by_arrival  # type: ignore[method-assign,assignment]


def low_precision_not_rounded(program: Program) -> None:
    table = program.tables.groups[0].table
    table.round_low_precision = lambda values, low_precision: None  # type: ignore[method-assign]


def load_rows_as(table: Any, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Each part of a checkpoint's rows is loaded as ``change(columns)``."""
    successor = table.successor

    def changed(rows: int = 0) -> Any:
        made = successor(rows)
        add_part = made.add_part
        made.add_part = lambda state: add_part(
            {group: change(columns) if group == "rows" else columns for group, columns in state.items()}
        )
        return made

    table.successor = changed


def restart_without_scores(program: Program) -> None:
    def forgetful(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: column for name, column in rows.items() if name in ("keys", "rows")}
        return {name: torch.zeros_like(column) for name, column in rows.items()} | kept

    load_rows_as(program.tables.groups[0].table, forgetful)


def restart_without_loss_scale(program: Program) -> None:
    scaler = program.dense.scaler
    assert scaler is not None
    scaler.load_state_dict = lambda state: None  # type: ignore[method-assign]


def stale_row_in_changes(program: Program) -> None:
    table = program.tables.groups[0].table
    take_changes = table._take_changes

    def without_one(reader):
        keys, handles, rest, erased = take_changes(reader)
        return keys[1:], handles[1:], rest, erased

    table._take_changes = without_one  # type: ignore[method-assign]


exported_in_float32 = partial(export, precision="float32")


def exported_with_an_expert_less(checkpoint: Any, out: Any, model: Any) -> None:
    model = deepcopy(model)
    model.head.top_k -= 1
    export(checkpoint, out, model)


def merged_tables_share_ids(program: Program) -> None:
    for group in program.tables.groups:
        group.layout.pack = lambda member, ids, feature: ids  # type: ignore[method-assign]
        group.layout.pack_all = lambda members, ids, features: torch.cat(list(ids))  # type: ignore[method-assign]


def evicts_rows_in_a_buffer(program: Program) -> None:
    table = program.tables.groups[0].table
    lookup = table.lookup

    def forgetful(keys, step, all_reduce=None, count=None):
        pinned = table._metadata.pinned
        pinned.last = pinned.last[:0]
        return lookup(keys, step, all_reduce, count)

    table.lookup = forgetful  # type: ignore[method-assign]


def evicts_by_the_pass_before(program: Program) -> None:
    table = program.tables.groups[0].table
    number = table._number
    last: dict[str, list[int]] = {}

    def stale(policy, step, all_reduce):
        now = number(policy, step, all_reduce)
        before, last[policy.column] = last.get(policy.column, now), now
        return before

    table._number = stale  # type: ignore[method-assign]


def last_rows_stay_in_the_buffer(program: Program) -> None:
    program.finish = lambda places: None  # type: ignore[method-assign]


def dropped_rows_not_written_back(program: Program) -> None:
    program.replace("write_back", nothing)


def bit_of_a_row_at_rest(program: Program) -> None:
    def flipped(owned: Read[OwnedRows]) -> None:
        table, handles = program.tables.groups[0].table, owned.tables[0].handles
        handles = handles[handles >= 0][:1]
        if program.context.rank == 1 and len(handles):
            storage: Any = table._rows
            values = storage._storage.gather(handles)
            values.view(torch.int32)[0, 1] ^= 1 << 12
            storage._storage.update(handles, values)

    program.after("write_back", flipped)


Parts = dict[int, dict[str, dict[str, torch.Tensor]]]
"""By shard, table and column what a copy holds, the rank's own shard first."""


def _parts_restored(copies: PeerCopies, change: Callable[[list[Parts]], Parts]) -> None:
    """Change the newest copy's parts, which `change` makes of those of all copies, before it is restored."""
    restore: Any = copies.restore

    def changed(*arguments: Any) -> int:
        if copies._copies:
            parts = change([copy.parts for copy in copies._copies])
            copies._copies.append(replace(copies._copies.pop(), parts=parts))
        return restore(*arguments)

    copies.restore = changed  # type: ignore[method-assign, assignment]


def _columns(parts: Parts, change: Callable[[str, str, torch.Tensor], torch.Tensor]) -> Parts:
    return {
        shard: {
            table: {name: change(table, name, column) for name, column in columns.items()}
            for table, columns in tables.items()
        }
        for shard, tables in parts.items()
    }


def copy_one_keep_late(copies: PeerCopies) -> None:
    _parts_restored(copies, lambda parts: parts[0])


def copy_of_the_wrong_rank(copies: PeerCopies) -> None:
    def mixed(parts: list[Parts]) -> Parts:
        own, *_ = parts[-1].values()

        def of_own(table: str, name: str, column: torch.Tensor) -> torch.Tensor:
            rows = own[table][name].repeat_interleave(2, 0)  # the neighbour may have more
            return column if name == "keys" else rows[: len(column)]

        return _columns(parts[-1], of_own)

    _parts_restored(copies, mixed)


def copy_without_a_key(copies: PeerCopies) -> None:
    _parts_restored(copies, lambda parts: _columns(parts[-1], lambda table, name, column: column[1:]))


def shard_read_by_two_ranks(loader: Loader) -> None:
    assert isinstance(loader, Stream)
    if loader.rank:
        loader.readers = [0, *loader.readers]


def position_one_batch_late(loader: Loader) -> None:
    assert isinstance(loader, Stream)
    load_state_dict, rows_of = loader.load_state_dict, loader.rows_of

    def late(state: Mapping[str, Any]) -> None:
        load_state_dict(state)
        loader.rows_of = lambda step: rows_of(step + 1)  # type: ignore[method-assign]

    loader.load_state_dict = late  # type: ignore[method-assign]
