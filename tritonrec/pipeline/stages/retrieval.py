"""Rows from the tables and from the buffer of the last batch (NestPipe, section IV.A, stage 4, and IV.B)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ...embedding.selection import Distinct, distinct, valid
from ...embedding.table import DynamicTable
from ...kernels import launch
from ..dist_plan import plan_output_dist
from ..places import (
    Buffer,
    Common,
    Context,
    KeptRows,
    OwnedRows,
    ReceivedKeys,
    RetrievalGroup,
    Routes,
    RowGradient,
    TableRows,
    Tables,
)
from ..reduce_scatter import ReplicaReductions, plan_replica_reductions
from ..stage import Edge, Idle, Kept, New, Previous, Read, Stale, Update, Write, stage
from ..streams import to_device, to_host
from ..window import LookupCounts, Window


# The prefetch buffer was batch t-2's: wait until its rows are written back and batch t-1 has copied from it.
# Rows of t-2 that t-1 does not use are then fresh in the tables. Rows of t-1 are stale there, and
# `copy_kept_rows` overwrites them. Rows of neither t-1 nor t can be evicted here, so their last update must
# have been written back.
@stage(
    lane="retrieval",
    after=(Edge("route"), Edge("write_back", batch=2), Edge("copy_kept_rows", batch=1)),
    moves=True,
)
def retrieve(
    context: Context,
    window: Window,
    routes: Read[Routes],
    before: Read[Previous[OwnedRows]] | None,
    retrieval: Update[RetrievalGroup],
    index: Update[Idle[Tables]],  # one place, three accesses: lookup evicts idle rows, or they make room for
    arriving: Update[New[Tables]],  # new ones, which come to where they are read,
    storage: Read[Stale[Tables]],  # and gather may read stale ones
    counts: LookupCounts,
) -> tuple[OwnedRows, Buffer, RowGradient, KeptRows | None]:
    """Deduplicate again, find or add the keys, copy their rows into the prefetch buffer.

    Tables first evict and demote rows where that is due. They spare the rows of this batch and of the last
    one, which are in the two buffers.
    """
    return _retrieve(
        context, window, routes, before, retrieval, index, arriving, storage, counts, only_new=False
    )


# Kept rows are not fetched. Other rows in a buffer were written back with the batch before.
@stage(
    lane="retrieval",
    after=(Edge("route"), Edge("write_back", batch=1), Edge("copy_kept_rows", batch=1)),
    moves=True,
    name="retrieve",
)
def retrieve_new_rows(
    context: Context,
    window: Window,
    routes: Read[Routes],
    before: Read[Previous[OwnedRows]] | None,
    retrieval: Update[RetrievalGroup],
    index: Update[Idle[Tables]],
    arriving: Update[New[Tables]],
    storage: Read[New[Tables]],
    counts: LookupCounts,
) -> tuple[OwnedRows, Buffer, RowGradient, KeptRows | None]:
    """`retrieve` for rows that stay in the buffers: rows shared with the last batch are not read."""
    return _retrieve(
        context, window, routes, before, retrieval, index, arriving, storage, counts, only_new=True
    )


@stage("copy", (Edge("retrieve"), Edge("sparse_update", batch=1)), moves=True, feature="dual_buffer")
def copy_kept_rows(
    context: Context,
    kept: Read[KeptRows] | None,
    active: Read[Kept[Previous[Buffer]]] | None,
    buffer: Write[Kept[Buffer]],
) -> None:
    """Copy the rows of K(t-1) & K(t) from the active into the prefetch buffer."""
    if kept is None or active is None:
        return
    for rows, source, target in zip(kept, active, buffer, strict=True):
        source_rows, target_rows = (to_device(each, context.device) for each in (rows.before, rows.now))
        launch.scatter_rows(target, target_rows, source, source_rows, rows.count)


def _retrieve(
    context: Context,
    window: Window,
    routes: Routes,
    before: OwnedRows | None,
    retrieval: RetrievalGroup,
    index: Tables,
    arriving: Tables,
    storage: Tables,
    counts: LookupCounts,
    only_new: bool,
) -> tuple[OwnedRows, Buffer, RowGradient, KeptRows | None]:
    """Both forms of `retrieve`, which read all rows or `only_new` ones.

    Two lists of distinct keys number the rows of a table. Without replicas they are one list::

        received from rank 0, 1   7 3 | 3 9     the output dist sends a row for each of them
        own                       7 3 9         numbers the sums that micro-batches fill
        received by replica 1     3 5
        every                     7 3 9 5       numbers the buffer: all replicas hold and update the same rows
    """

    def over_ranks(sizes: torch.Tensor) -> torch.Tensor:
        return retrieval.all_reduce(sizes, "table sizes", bounded=True)

    owned, buffer, gradient, kept = [], [], [], []
    reductions: list[ReplicaReductions] = []
    for number, (table, received) in enumerate(zip(storage, routes.received, strict=True)):
        if received.keys.device != table.device:
            received = _moved(received, table.device)
        keys, padded = received.keys, table.padded
        # The hash table of `every`, if any, finds the kept rows below.
        if received.distinct:
            own = every = Distinct(keys, torch.arange(keys.shape[0], device=keys.device), None)
        else:
            own = every = distinct(keys, padded, table=before is not None and not context.replicated)
        replica_rows: list[torch.Tensor] = []
        if context.replicated:
            every = distinct(torch.cat(received.replica_keys), padded, table=before is not None)
            replica_rows = list(every.inverse.split([len(each) for each in received.replica_keys]))
        # Adds missing keys, in the order of `every`; may evict rows of neither buffer first.
        reduce = over_ranks if retrieval.world_size > 1 else None
        found = index[number].lookup(every.keys, window.update, reduce, every.count, bring=False)
        arriving[number].bring(found.handles)
        common = None if before is None else _common(before.tables[number], every, padded)
        if common is not None:
            kept.append(common)
            counts.kept += len(common.now) if common.count is None else common.count
        if context.config.exchange.dedup not in ("lookup", "both"):
            rows = _fetch_received(context, table, received.keys, found.handles, own.inverse, counts)
        elif only_new and common is not None:
            rows = _fetch_new(context, table, every.keys, found.handles, common, counts)
        else:
            rows = _fetch(context, table, every.keys, found.handles, counts)
        buffer.append(rows)
        gradient.append(context.sums.zeros(own.keys.shape[0], table.dim))
        counts.lookups += 1
        counts.received += keys.shape[0]
        sent, gradients = plan_output_dist(
            own.inverse, received.splits, received.last_use, received.gradient_splits
        )
        if context.replicated:
            here = replica_rows[context.replica]
            # Distinct keys unless padded (`ReceivedKeys`); the output dist goes by every key received.
            if len(here) != len(own.inverse):
                here = here[own.inverse]
            sent, _gradients = plan_output_dist(here, received.splits, None)
            reductions.append(_reductions(context, replica_rows, every, received.replica_last_use, padded))
        sent, gradients = sent.to(context.device), gradients.to(context.device)
        low = found.low_precision
        owned.append(
            TableRows(every.keys, found.handles, every.count, low, sent, gradients, replica_rows, [])
        )
    if context.replicated:  # the split sizes of the reductions, once for all tables
        sizes = to_host(torch.stack([plan.sizes for plan in reductions])).tolist()
        plans = zip(owned, reductions, sizes, strict=True)
        owned = [replace(rows, reductions=plan.planned(each)) for rows, plan, each in plans]
    kept_rows = None if before is None else KeptRows(kept)
    return OwnedRows(owned), Buffer(buffer), RowGradient(gradient), kept_rows


def _fetch(
    context: Context, table: DynamicTable, keys: torch.Tensor, handles: torch.Tensor, counts: LookupCounts
) -> torch.Tensor:
    """The rows of the keys (K,) as a buffer (K, row width); an initial row where a handle is -1."""
    counts.read += (handles >= 0).sum() if table.padded else keys.shape[0]
    values = table.gather(handles, keys, initial=not (table.padded and table.admits_all))
    return to_device(values, context.device)


def _fetch_new(
    context: Context,
    table: DynamicTable,
    keys: torch.Tensor,
    handles: torch.Tensor,
    kept: Common,
    counts: LookupCounts,
) -> torch.Tensor:
    """`_fetch` but for the kept rows, which `copy_kept_rows` fills in."""
    size = len(keys)
    is_new = torch.ones(size + 1, dtype=torch.bool, device=keys.device)  # and one for kept rows of -1
    # kept.now ends with -1s in a padded list: they mark the extra last element, which is cut off.
    is_new[kept.now] = False
    is_new = is_new[:size]
    if table.padded:
        # The shape stays, so no host waits for a count; the copy overwrites what handle -1 reads.
        return _fetch(context, table, keys, torch.where(is_new, handles, -1), counts)
    new = is_new.nonzero().squeeze(1)
    values = _fetch(context, table, keys[new], handles[new], counts)
    rows = values.new_empty(size, values.shape[1])
    launch.scatter_rows(rows, to_device(new, context.device), values)
    return rows


def _common(before: TableRows, now: Distinct, padded: bool) -> Common:
    """The rows that the last window and this one share."""
    if padded:
        return Common(*launch.intersect_padded(before.keys, now.keys, before.count, now.count, now.table))
    there, here = launch.intersect(before.keys, now.keys)
    return Common(there, here, None)


def _moved(received: ReceivedKeys, device: torch.device) -> ReceivedKeys:
    """The keys in host memory, where the tables are; as they are, for tables on a device."""
    if device.type != "cpu":
        return received
    last_use = received.last_use
    return replace(
        received,
        keys=to_host(received.keys),
        last_use=None if last_use is None else to_host(last_use),
        replica_keys=[to_host(keys) for keys in received.replica_keys],
        replica_last_use=[to_host(last) for last in received.replica_last_use],
    )


def _fetch_received(
    context: Context,
    table: DynamicTable,
    keys: torch.Tensor,
    handles: torch.Tensor,
    inverse: torch.Tensor,
    counts: LookupCounts,
) -> torch.Tensor:
    """Without dedup before the lookup a row is read for every key received; those of one key are the same."""
    counts.read += len(inverse)
    values = to_device(table.gather(handles[inverse], keys), context.device)
    # first[k] = the first received position of distinct key k.
    first = torch.full_like(handles, max(len(inverse) - 1, 0))  # of no key in the padding
    first.scatter_reduce_(0, inverse, torch.arange(len(inverse), device=inverse.device), "amin")
    return launch.gather_rows(values, to_device(first, context.device))


def _reductions(
    context: Context,
    replicas: list[torch.Tensor],
    every: Distinct,
    last_use: list[torch.Tensor],
    padded: bool,
) -> ReplicaReductions:
    """Replicas reduce a row after its last use where `last_use` is given, else after the last micro-batch."""
    count, size, device = context.config.window_micro_batches, len(every.keys), every.keys.device
    # complete[k] = the micro-batch after which no rank of any replica uses row k: the latest over all
    # replicas, so that they agree. `count`, for what is padding, comes after the last: never.
    complete = torch.full((size,), count - 1, dtype=torch.int64, device=device)
    if last_use:
        complete.zero_().scatter_reduce_(0, torch.cat(replicas), torch.cat(last_use).long(), "amax")
    complete = torch.where(valid(size, every.count, device), complete, count)
    return plan_replica_reductions(replicas, complete, count, context.replica, padded)
