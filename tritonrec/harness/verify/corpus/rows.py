"""Public bugs that train on wrong or stale rows: prefetches, caches, exchanges, indices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .... import ops
from ....data import Batch
from ....pipeline import Edge, Program
from ....pipeline.places import (
    Buffer,
    Context,
    DeviceSamples,
    Embeddings,
    OwnedRows,
    Routes,
    Tables,
)
from ....pipeline.stage import Read, Update, Write
from ..cases import HOSTILE
from ..injections import slow
from .bug import bug, case


@bug("meta-pytorch/torchrec#4503", case(), delay=slow("write_back"))
def prefetched_twice(program: Program) -> None:
    """A batch in flight is prefetched again, over the rows that it keeps from the batch before."""

    def again(owned: Read[OwnedRows], tables: Read[Tables], buffer: Update[Buffer]) -> None:
        for each, table, rows in zip(owned.tables, tables, buffer, strict=True):
            rows.copy_(table.gather(each.handles, each.keys))

    program.after("copy_kept_rows", again)


@bug(
    "meta-pytorch/torchrec#4497",
    case(),
    schedule=lambda schedule: schedule.without_edge("exchange", Edge("copy_kept_rows")).with_edges(
        "exchange", Edge("retrieve")
    ),
    delay=slow("sparse_update"),
)
def lookup_before_its_input(program: Program) -> None:
    """Rows are sent from the buffer before the kept ones have been copied into it."""


@bug(
    "meta-pytorch/torchrec#3306",
    case(optimizer="sgd"),
    schedule=lambda schedule: schedule.without_edge("compute", Edge("exchange", "same")).with_edges(
        "compute", Edge("retrieve")
    ),
    delay=slow("exchange"),
)
def forward_does_not_wait_for_prefetch(program: Program) -> None:
    """The forward pass does not wait for the rows of its micro-batch."""

    def zeros(context: Context, routes: Read[Routes], embeddings: Write[Embeddings]) -> None:
        sizes = zip(routes.tables, context.tables.groups, strict=True)
        embeddings.extend(torch.zeros(t.num_rows, g.table.dim, dtype=torch.float32) for t, g in sizes)

    program.after("retrieve", zeros)


@bug(
    "pytorch/FBGEMM#2843",
    case(mode="dbp"),
    schedule=lambda schedule: schedule.without_edge("write_back", Edge("sparse_update")).with_edges(
        "write_back", Edge("retrieve")
    ),
    delay=slow("sparse_update"),
)
def written_back_before_backward(program: Program) -> None:
    """Rows leave the buffer for their table before the backward pass has updated them."""


@bug("meta-pytorch/torchrec#4191", case())
def keys_in_recycled_memory(program: Program) -> None:
    """The memory of the received keys is given away while the lookup still reads its end."""

    def recycled(routes: Read[Routes]) -> Routes:
        received = []
        for each in routes.received:
            given = len(each.keys) // 4
            keys = torch.cat([each.keys[: len(each.keys) - given], each.keys[:given]])
            received.append(replace(each, keys=keys))
        return replace(routes, received=received)

    program.after("route", recycled)


@bug("meta-pytorch/torchrec#3870", case(optimizer="rowwise_adagrad"))
def preprocessed_for_another_batch(program: Program) -> None:
    """Features are preprocessed with what was cached for the batch that came before."""
    cached: list[torch.Tensor] = []

    def other(samples: Read[DeviceSamples]) -> DeviceSamples:
        first = samples[0]
        cached.append(first.features.values)
        values, before = first.features.values, cached[-2:][0]
        size = min(len(values), len(before))
        mixed = torch.cat([before[:size], values[size:]])
        return DeviceSamples([replace(first, features=replace(first.features, values=mixed)), *samples[1:]])

    program.after("h2d", other)


@bug("NVIDIA-Merlin/HugeCTR#183", case(mode="dbp", steps=12))
def offsets_of_the_batch_before(program: Program) -> None:
    """Offsets are not copied where a batch has as many ids as one before it."""
    known: dict[tuple[int, int], torch.Tensor] = {}

    def skipped(samples: Read[DeviceSamples]) -> DeviceSamples:
        parts: list[Batch] = []
        for part in samples:
            features = part.features
            size = len(features.values), len(features.offsets)
            offsets = known.setdefault(size, features.offsets)
            parts.append(replace(part, features=replace(features, offsets=offsets)))
        return DeviceSamples(parts)

    program.after("h2d", skipped)


@bug("NVIDIA/recsys-examples#468", case(steps=4))
def rows_addressed_by_slot(program: Program) -> None:
    """A row is read at the slot of its key in the hash table instead of at its own number."""
    for group in program.tables.groups:
        table, gather = group.table, group.table.gather

        def by_slot(handles, keys, initial=True, table=table, gather=gather):
            return gather((handles * 5 + 1) % max(len(table), 1), keys, initial)

        table.gather = by_slot  # type: ignore[method-assign]


@bug("pytorch/FBGEMM#6215", case(optimizer="sgd"))
def one_row_past_the_end(program: Program) -> None:
    """A bounds check lets the index behind the last row pass, which reads the row that lies there."""

    def past_the_end(buffer: Update[Buffer]) -> None:
        for rows in buffer:
            rows[-1:] = rows[:1]

    program.before("exchange", past_the_end)


@bug("meta-pytorch/torchrec#3673", case(mode="fwp"))
def columns_beyond_a_limit_are_zero(program: Program) -> None:
    """Columns of a row beyond what the kernel takes come back as zeros."""

    def cut_off(embeddings: Update[Embeddings]) -> None:
        for rows in embeddings:
            rows[:, rows.shape[1] // 2 :] = 0.0

    program.after("exchange", cut_off)


@bug("pytorch/FBGEMM#6096", case(variant="admission", steps=6))
def rows_after_a_missing_one_are_zero(program: Program) -> None:
    """At the first key without a row the loop ends, and the rows after it stay zero."""

    def ended(owned: Read[OwnedRows], buffer: Update[Buffer]) -> None:
        for each, rows in zip(owned.tables, buffer, strict=True):
            missing = (each.handles < 0).nonzero()
            if len(missing):
                rows[int(missing[0]) + 1 :] = 0.0

    program.after("copy_kept_rows", ended)


@bug("pytorch/pytorch#141816", case())
def rows_sent_against_their_strides(program: Program) -> None:
    """An all-to-all of rows that are not contiguous sends memory in its own order."""
    communication = program.communicators.communication
    all_to_all = communication.all_to_all

    def of_memory(values, *rest, **out):
        if values.is_floating_point() and values.dim() == 2:
            values = values.t().reshape(values.shape)
        return all_to_all(values, *rest, **out)

    communication.all_to_all = of_memory  # type: ignore[method-assign]


@bug("pytorch/FBGEMM#5994", case(data=HOSTILE, optimizer="sgd"))
def keys_of_32_bits(program: Program) -> None:
    """Keys pass through 32 bits on their way."""
    keys = program.tables.keys

    def truncated(lookups):
        return [each.to(torch.int32).to(torch.int64) for each in keys(lookups)]

    program.tables.keys = truncated  # type: ignore[method-assign]


@bug("alibaba/TorchEasyRec#472", case())
def row_offset_wraps_around(program: Program) -> None:
    """Row times width overflows its integer, here one of few bits, and another row is read."""
    for group in program.tables.groups:
        gather = group.table.gather

        def wrapped(handles, keys, initial=True, gather=gather):
            return gather(torch.where(handles < 0, handles, handles % 64), keys, initial)

        group.table.gather = wrapped  # type: ignore[method-assign]


@bug("meta-pytorch/torchrec#4086", case(variant="merged", optimizer="sgd"))
def every_feature_begins_at_zero(program: Program) -> None:
    """Offsets of features that share a tensor each start at its beginning."""
    tables = program.tables
    by_feature = tables.by_feature

    def from_zero(rows, lookups, **options):
        found = by_feature(rows, lookups, **options)
        for group, values in zip(tables.groups, rows, strict=True):
            values = values.gathered() if isinstance(values, ops.IndexedRows) else values
            names = [name for name, _member in group.features if isinstance(found[name], torch.Tensor)]
            found |= {name: values[: len(found[name])] for name in names}
        return found

    tables.by_feature = from_zero  # type: ignore[method-assign]


@bug("meta-pytorch/torchrec#3444", case(optimizer="rowwise_adagrad"))
def owner_by_another_count(program: Program) -> None:
    """One table's keys are dealt out by another number of buckets than its rows."""
    for group in program.tables.groups:
        group.layout.ids = lambda keys: keys + 1  # type: ignore[method-assign]


@bug(
    "NVIDIA/recsys-examples#292",
    case(data=HOSTILE, micro_batches=8, world_size=4, steps=6),
    says="RuntimeError: invalid configuration argument",
)
def no_keys_crash(program: Program) -> None:
    """A lookup of no keys launches a kernel of an empty grid, which is an error."""

    def launched(routes: Read[Routes]) -> None:
        if any(not len(rows) for table in routes.tables for rows in table.inverse):
            raise RuntimeError("invalid configuration argument")

    program.before("retrieve", launched)


@bug("pytorch/FBGEMM#1893", case(storage="cached", steps=6))
def cache_keeps_the_row_before_its_update(program: Program) -> None:
    """An update goes to host memory while the row is being cached, and the cache keeps the old one."""
    for group in program.tables.groups:
        storage: Any = group.table._rows._storage
        group.table._rows.update = storage._home.update  # type: ignore[method-assign]


@bug("pytorch/FBGEMM#2359", case(storage="cached", steps=6))
def cache_misses_counted_as_hits(program: Program) -> None:
    """Wrong statistics of misses: rows that are not cached are read from the cache."""
    for group in program.tables.groups:
        storage: Any = group.table._rows._storage
        place = storage._place
        gather = storage.gather

        def all_hit(handles, out=None, storage=storage, place=place, gather=gather):
            storage._place = lambda each: place(each).clamp(min=0)
            try:
                return gather(handles, out)
            finally:
                storage._place = place

        group.table._rows.gather = all_hit  # type: ignore[method-assign]
