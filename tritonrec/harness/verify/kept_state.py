"""What injected faults do to kept state: tables, rows on disk, checkpoints, positions in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ... import ops
from ...data import Stream
from ...embedding.row_file import RowFile
from ...pipeline import Program
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


Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def stale_page(program: Program) -> None:
    for file in _files(program):
        write, read, before, now = file.write, file.read, dict[int, torch.Tensor](), dict[int, torch.Tensor]()

        def noting(rows, memory, places, write: Move = write, before=before, now=now) -> None:
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                if row in now:
                    before[row] = now[row]
                now[row] = memory[place].clone()
            write(rows, memory, places)

        def stale(rows, memory, places, read: Move = read, before=before) -> None:
            read(rows, memory, places)
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                if row in before:
                    memory[place] = before[row]

        file.write, file.read = noting, stale  # type: ignore[method-assign]


def torn_write(program: Program) -> None:
    for file in _files(program):
        write, read = file.write, file.read

        def torn(rows, memory, places, write: Move = write, read: Move = read) -> None:
            values = memory[places]
            read(rows[:1], values, torch.zeros(1, dtype=torch.int64))
            half = values.shape[1] // 2
            values[:1, :half] = memory[places[:1], :half]
            write(rows, values, torch.arange(len(rows)))

        file.write = torn  # type: ignore[method-assign]


def lost_write_back(program: Program) -> None:
    for file in _files(program):
        write = file.write
        file.write = lambda rows, memory, places, write=write: write(rows[1:], memory, places[1:])  # type: ignore[method-assign,misc]


def wrong_offset(program: Program) -> None:
    for file in _files(program):
        read = file.read
        file.read = lambda rows, memory, places, read=read: read(rows + 1, memory, places)  # type: ignore[method-assign,misc]


def _files(program: Program) -> Iterator[RowFile]:
    for group in program.tables.groups:
        storage = group.table._rows._storage
        yield storage._file  # type: ignore[attr-defined]
