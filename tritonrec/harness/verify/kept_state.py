"""What injected faults do to kept state: tables, rows on disk, checkpoints, positions in a log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ... import ops
from ...data import Stream
from ...embedding.index_file import IndexFile
from ...embedding.key_index import KeyIndex
from ...embedding.row_file import RowFile
from ...pipeline import Edge, Program, Schedule, Window
from ...pipeline.places import Buffer, Context
from ...pipeline.stage import Update
from ..job import Loader
from .faults import case, fault
from .injections import nothing, slow
from .variants import RESTART, STREAM


@fault(case())
def initial_value_by_arrival(program: Program) -> None:
    """Initial rows depend on the order of arrival instead of the key."""
    table = program.tables.groups[0].table
    lookup = table.lookup

    def by_arrival(keys: torch.Tensor, *rest, **options):
        new, before = keys[table.find(keys) < 0], len(table)
        found = lookup(keys, *rest, **options)
        if new.numel():
            values = table.gather(table.find(new), new)
            places = torch.arange(before, before + len(new))
            values[:, : table.dim] = ops.initial_rows(table.seed, 0, places, table.dim, *table.scales)
            table.update(table.find(new), values)
        return found

    table.lookup = by_arrival  # type: ignore[method-assign]


@fault(case(variant="lazy-decay", steps=8), source="pytorch/FBGEMM#5908")
def missed_decay_forgotten(program: Program) -> None:
    """A row that missed updates decays once when it is updated again."""

    def updated_just_before(window: Window, buffer: Update[Buffer]) -> None:
        for rows in buffer:
            last = rows[:, -1]
            last.copy_(torch.where(last > 0, window.update, last))  # updates count from 1 there

    program.before("sparse_update", updated_just_before)


@fault(case(optimizer="rowwise_adam"))
def states_of_other_rows(program: Program) -> None:
    """Each row is updated with the optimizer state of the row before it."""

    def shifted(context: Context, buffer: Update[Buffer]) -> None:
        for rows, group in zip(buffer, context.tables.groups, strict=True):
            states = rows[:, group.table.dim :]
            states.copy_(states.roll(1, 0))

    program.before("sparse_update", shifted)


@fault(case(variant="scale", steps=12), of="schedule", delay=slow("write_back"))
def fetch_before_dropped_rows_are_written(schedule: Schedule) -> Schedule:
    """Retrieval of batch t does not wait until batch t-1 has written back the rows that it drops."""
    return schedule.without_edge("retrieve", Edge("write_back", batch=1))


@fault(case(variant="precision-tiers"))
def low_precision_rows_not_rounded(program: Program) -> None:
    """Rows in low precision stay float32 in the buffers."""
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


@fault(case(variant=RESTART, steps=8, restart=1), source="NVIDIA/recsys-examples#298")
def restart_without_scores(program: Program) -> None:
    """Scores and access counts start from zero after a restart."""

    def forgetful(rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: column for name, column in rows.items() if name in ("keys", "rows")}
        return {name: torch.zeros_like(column) for name, column in rows.items()} | kept

    load_rows_as(program.tables.groups[0].table, forgetful)


@fault(case(variant="fp16", steps=8, restart=1))
def restart_without_loss_scale(program: Program) -> None:
    """The scale of the loss begins anew after a restart."""
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


@fault(case(variant="merged"), source="NVIDIA-Merlin/HugeCTR#289")
def merged_tables_share_ids(program: Program) -> None:
    """Equal ids of two merged tables share a row."""
    for group in program.tables.groups:
        group.layout.pack = lambda member, ids, feature: ids  # type: ignore[method-assign]
        group.layout.pack_all = lambda members, ids, features: torch.cat(list(ids))  # type: ignore[method-assign]


@fault(case(variant="lfu", steps=8), source="pytorch/FBGEMM#5480")
def evicts_rows_in_a_buffer(program: Program) -> None:
    """Eviction takes rows that the window before still trains on."""
    table = program.tables.groups[0].table
    lookup = table.lookup

    def forgetful(keys, *rest, **options):
        pinned = table._metadata.pinned
        pinned.last = pinned.last[:0]
        return lookup(keys, *rest, **options)

    table.lookup = forgetful  # type: ignore[method-assign]


@fault(case(variant="lru", steps=8, storage="device"))
def evicts_by_the_pass_before(program: Program) -> None:
    """A device's table evicts as many rows as were too many one pass earlier."""
    table = program.tables.groups[0].table
    number = table._number
    last: dict[str, list[int] | None] = {}

    def stale(policy, step, all_reduce):
        now = number(policy, step, all_reduce)
        before, last[policy.column] = last.get(policy.column, now), now
        return before

    table._number = stale  # type: ignore[method-assign]


@fault(case(variant="skip-fetch"))
def last_rows_stay_in_the_buffer(program: Program) -> None:
    """Rows that stayed in a buffer are not written back when the pipeline drains."""
    program.finish = lambda places: None  # type: ignore[method-assign]


@fault(case(variant="scale", steps=8))
def dropped_rows_not_written_back(program: Program) -> None:
    """Rows that a batch drops are taken for kept ones and never written back."""
    program.replace("write_back", nothing)


@fault(
    case(variant="stream-grm"),
    of="loader",
    name="window-read-by-two-ranks",
    what="rank 1 also streams the windows of GRM that the first reader of rank 0 has",
    says="ranks 0 and 1 both train sample",
)
@fault(case(variant=STREAM), of="loader", says="ranks 0 and 1 both train sample")
def shard_read_by_two_ranks(loader: Loader) -> None:
    """Rank 1 also streams the rows of the first reader of rank 0."""
    assert isinstance(loader, Stream)
    if loader.rank:
        loader.readers = [0, *loader.readers]


@fault(case(variant=STREAM, steps=8, restart=1), of="loader")
def position_one_batch_late(loader: Loader) -> None:
    """After a restart a stream goes on one batch late."""
    assert isinstance(loader, Stream)
    load_state_dict, rows_of = loader.load_state_dict, loader.rows_of

    def late(state: Mapping[str, Any]) -> None:
        load_state_dict(state)
        loader.rows_of = lambda step: rows_of(step + 1)  # type: ignore[method-assign]

    loader.load_state_dict = late  # type: ignore[method-assign]


ON_DISK = case(storage="disk", steps=8)
Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


@fault(ON_DISK)
def disk_stale_page(program: Program) -> None:
    """Some rows are read from disk as they were at the write before the last one."""
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


@fault(ON_DISK)
def disk_torn_write(program: Program) -> None:
    """A row is written to disk but for its second half."""
    for file in _files(program):
        write, read = file.write, file.read

        def torn(rows, memory, places, write: Move = write, read: Move = read) -> None:
            values = memory[places]
            read(rows[:1], values, torch.zeros(1, dtype=torch.int64))
            half = values.shape[1] // 2
            values[:1, :half] = memory[places[:1], :half]
            write(rows, values, torch.arange(len(rows)))

        file.write = torn  # type: ignore[method-assign]


@fault(ON_DISK)
def disk_lost_write_back(program: Program) -> None:
    """A row leaves memory and is not written to disk."""
    for file in _files(program):
        write = file.write
        file.write = lambda rows, memory, places, write=write: write(rows[1:], memory, places[1:])  # type: ignore[method-assign,misc]


@fault(ON_DISK)
def disk_lost_keys(program: Program) -> None:
    """Half of the groups of keys that go first into a file are not written to disk."""
    for group in program.tables.groups:
        index = group.table._rows._index
        assert isinstance(index, KeyIndex)

        def structure(slots: int, made: Callable[[int], Any] = index._structure) -> Any:
            one = made(slots)
            if isinstance(one, IndexFile):

                def lost(groups: Any, there: Any, write: Callable[..., None] = one._write) -> None:
                    write(groups[len(groups) // 2 :], there[len(groups) // 2 :])
                    one._write = write  # type: ignore[method-assign]

                one._write = lost  # type: ignore[method-assign]
            return one

        index._structure = structure  # type: ignore[method-assign]


@fault(ON_DISK)
def disk_wrong_offset(program: Program) -> None:
    """Offsets in the file are cut to 32 bits, where every second row lies 2^32 rows further on."""
    for file in _files(program):
        size = file.row_bytes
        for name, move in (("read", file.read), ("write", file.write)):

            def cut(rows, memory, places, move: Move = move, size: int = size) -> None:
                further = rows // 2 + (rows % 2 << 32)
                move(further * size % 2**32 // size, memory, places)

            setattr(file, name, cut)


def _files(program: Program) -> Iterator[RowFile]:
    for group in program.tables.groups:
        yield group.table._rows._file  # type: ignore[misc]
