"""Public bugs of dynamic tables: new rows, eviction, frequencies, admission."""

from __future__ import annotations

import torch

from ....pipeline import Program
from .bug import bug, case


@bug("pytorch/FBGEMM#4006", case(), says="is not finite and has no exact sum")
def new_rows_are_not_initialised(program: Program) -> None:
    """A new row holds whatever lay in its memory, here not a number."""
    for group in program.tables.groups:
        width = group.table.row_width
        _begin_with(
            group.table,
            lambda keys, width=width: torch.full((len(keys), width), torch.nan, dtype=torch.float32),
        )


@bug("DeepRec-AI/DeepRec#1023", case(mode="dbp"))
def new_rows_keep_an_old_state(program: Program) -> None:
    """A new row's weights are initialised, and its optimizer state is what lay there."""
    for group in program.tables.groups:
        table, initial = group.table, group.table.initial_rows

        def dirty(keys, table=table, initial=initial):
            values = initial(keys)
            values[:, table.dim :] = 1e-3
            return values

        _begin_with(table, dirty)


@bug("tensorflow/recommenders-addons#496", case(optimizer="sgd"))
def all_new_rows_are_alike(program: Program) -> None:
    """The initializer returns the same values for every key."""
    for group in program.tables.groups:
        initial = group.table.initial_rows
        _begin_with(
            group.table, lambda keys, initial=initial: initial(keys[:1]).expand(len(keys), -1).contiguous()
        )


@bug("NVIDIA/recsys-examples#467", case(variant="lfu", steps=40))
def new_key_inherits_a_frequency(program: Program) -> None:
    """A new key in the place of an erased one begins with that one's frequency."""
    evictor = program.tables.groups[0].table._evictor
    assert evictor is not None

    def without_reset(handles, keys) -> None:
        evictor._sizes += evictor._layout.count(keys, handles >= 0)

    evictor.add = without_reset  # type: ignore[method-assign]


@bug("NVIDIA/recsys-examples#176", case(variant="precision-tiers", steps=8))
def frequency_counted_twice(program: Program) -> None:
    """The access to a row is counted at its prefetch and once more at its use."""
    counter = program.tables.groups[0].table._precision
    assert counter is not None
    record = counter.record

    def twice(keys, handles, step) -> None:
        record(keys, handles, step)
        record(keys, handles, step)

    counter.record = twice  # type: ignore[method-assign]


@bug("NVIDIA/recsys-examples#198", case(variant="lfu", steps=16))
def prefetch_counts_on_one_rank(program: Program) -> None:
    """A rank that prefetches counts the accesses of its rows twice, and other rows are evicted."""
    evictor = program.tables.groups[0].table._evictor
    assert evictor is not None
    record = evictor.record

    def twice(keys, handles, step) -> None:
        record(keys, handles, step)
        if program.context.rank:
            record(keys, handles, step)

    evictor.record = twice  # type: ignore[method-assign]


@bug("DeepRec-AI/DeepRec#931", case(variant="admission", steps=6))
def frequency_by_feature(program: Program) -> None:
    """A key that several features share is counted once for each, and admitted too early."""
    candidates = program.tables.groups[0].table._candidates
    assert candidates is not None
    count = candidates.count

    def shared(keys, step, number=None):
        handles = candidates._add(keys, number)
        counts = candidates._columns["counts"]
        counts[handles] = counts[handles] + (keys % 3 == 0).to(torch.int32)
        return count(keys, step, number)

    candidates.count = shared  # type: ignore[method-assign]


@bug("NVIDIA-Merlin/HierarchicalKV#242", case(variant="lru", steps=8))
def evictions_counted_too_early(program: Program) -> None:
    """Evictions are counted before it is known that they happen: the table takes itself for smaller."""
    evictor = program.tables.groups[0].table._evictor
    assert evictor is not None
    remove = evictor.remove

    def twice(keys, which) -> None:
        remove(keys, which)
        remove(keys, which)

    evictor.remove = twice  # type: ignore[method-assign]


@bug("meta-pytorch/torchrec#4371", case(variant="ttl", steps=8))
def time_to_live_never_ends(program: Program) -> None:
    """Every access of any row refreshes the time of a row that nobody uses."""
    evictor = program.tables.groups[0].table._evictor
    assert evictor is not None

    def refreshed(keys, handles, step) -> None:
        evictor.values.rows.fill_(step)

    evictor.record = refreshed  # type: ignore[method-assign]


def _begin_with(table, initial) -> None:
    """New rows of `table` get ``initial(keys)``; those of keys without a row stay right."""
    table._rows._initial_rows = initial
