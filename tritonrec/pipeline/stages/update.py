"""The end of a window: one update from complete sums, and rows back to the tables (NestPipe, section IV)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...embedding.selection import select
from ...embedding.table import DynamicTable
from ...kernels import launch
from ..clipping import clamp, dropped, norm_of, scale_of, squares
from ..places import (
    Buffer,
    Context,
    Dense,
    DenseGradient,
    DenseMeans,
    EarlyGradient,
    EarlyMeans,
    GradientNorm,
    KeptRows,
    Losses,
    MeanGradient,
    OwnedRows,
    ReduceGroup,
    Routes,
    RowGradient,
    TableRows,
    Tables,
)
from ..reduce_scatter import DENSE_ROW, even_reduce_scatter
from ..stage import Dropped, Edge, Previous, Read, Update, Write, stage
from ..streams import to_device, to_host
from ..sums import NAME
from ..window import LookupCounts, Window


@stage(lane="reduce", after=(Edge("early_gradients", "same"),), feature="early_dense")
def early_dense_reduce(
    bucket: int,
    context: Context,
    routes: Read[Routes],
    reduce: Update[ReduceGroup],
    early_gradient: Update[EarlyGradient],
    means: Update[EarlyMeans],
    counts: LookupCounts,
) -> None:
    """`dense_reduce` of a bucket that backward completes first, beside the rest of the last backward."""
    own = early_gradient.take(bucket)
    counts.early += len(own)
    means.append((_mean_of_ranks(context, reduce, own, routes.loss_normalizer), own))


@stage(lane="reduce", after=(Edge("compute", "all"),))
def dense_reduce(
    context: Context,
    routes: Read[Routes],
    losses: Read[Losses],
    reduce: Update[ReduceGroup],
    dense_gradient: Update[DenseGradient],
    early: Read[EarlyMeans] | None,
) -> DenseMeans:
    """The mean dense gradients of all ranks, as one message of rows of `DENSE_ROW` values; and with them the
    mean loss. Of sharded parameters each rank gets those of its shards.
    """
    sums, normalizer = context.sums, routes.loss_normalizer
    total = sums.total(torch.cat([losses[i] for i in range(context.config.window_micro_batches)]))
    # The loss is the last value of the gradients' message: it costs no message of its own.
    own = torch.cat([dense_gradient.take(), total])
    means = _mean_of_ranks(context, reduce, own, normalizer)
    shards = dense_gradient.reduce_scatter_mean(sums, reduce, normalizer)
    gradients = means[:-1]
    if early is not None:  # of the parameters behind these, the last ones first
        gradients = torch.cat([gradients, *(each for each, _ in reversed(early))])
    elif len(shards):
        gradients = torch.cat([shards, gradients])
    return DenseMeans(sums.finite(gradients, dense_gradient.name_at), means[-1:], own, len(shards))


def _mean_of_ranks(context: Context, reduce: ReduceGroup, own: torch.Tensor, normalizer: int) -> torch.Tensor:
    """(S,) float32, the sums (S,) of all ranks over the normalizer."""
    sums = context.sums
    if reduce.world_size == 1:
        return sums.divide(own, normalizer)
    # As rows, so that sums of dense gradients are packed
    # and exchanged by the code that does it for tables.
    rows = torch.nn.functional.pad(own, (0, -len(own) % DENSE_ROW)).view(-1, DENSE_ROW)
    plan = even_reduce_scatter(len(rows), reduce.world_size, reduce.rank)
    means = sums.all_reduce_mean(None, reduce, rows, plan, normalizer, "dense gradients")
    return means.view(-1)[: len(own)]


@stage(
    lane="reduce",
    after=(Edge("gradient_exchange", "all"), Edge("replica_reduce", "all"), Edge("dense_reduce")),
    feature="clips",
)
def gradient_norm(
    context: Context,
    routes: Read[Routes],
    owned: Read[OwnedRows],
    row_gradient: Read[RowGradient],
    mean_gradient: Update[MeanGradient],
    means: Read[DenseMeans],
    reduce: Update[ReduceGroup],
) -> GradientNorm:
    """The norm of all gradients of the update, exact, with the mean gradients of this rank's rows.

    Replicas have the means from `replica_reduce`; those of one of them count.
    """
    config, own = context.config, []
    if not context.replicated:
        mean_gradient.extend(context.sums.mean(sums, routes.row_normalizer) for sums in row_gradient)
    for group, table, mean in zip(context.tables.groups, owned.tables, mean_gradient, strict=True):
        # All replicas have the same means of the same rows: each row counts once, on the first replica.
        if context.replica or not group.table.requires_grad:
            continue
        if not group.table.admits_all:  # what is not updated has no gradient
            admitted = to_device(table.handles >= 0, context.device)
            mean = torch.where(admitted.unsqueeze(1), mean, 0.0)
        own.append(clamp(mean, config))
    # Shards are of one rank each, and are added up over ranks
    # with the rows. What every rank has is added after.
    shards, replicated = means.parts
    own.append(clamp(shards, config))
    here = squares(own, context.device) + dropped(context.device)
    rows = reduce.all_reduce(here, "squares of the gradients", bounded=True)
    norm = norm_of(rows + squares([clamp(replicated, config)], context.device))
    return GradientNorm(norm, scale_of(norm, config))


@stage("compute", (Edge("gradient_exchange", "all"), Edge("replica_reduce", "all"), Edge("gradient_norm")))
def sparse_update(
    context: Context,
    window: Window,
    routes: Read[Routes],
    owned: Read[OwnedRows],
    row_gradient: Read[RowGradient],
    mean_gradient: Read[MeanGradient] | None,
    norm: Read[GradientNorm] | None,
    buffer: Update[Buffer],
) -> None:
    """Apply the rows' mean gradients, within their limits, to the active buffer, once per window."""
    # `dense_update` skips by the same norm, which all ranks have: no rank updates half of a model.
    if norm is not None and context.config.skips and norm.infinite:
        return
    if mean_gradient is None:
        means = (context.sums.mean(sums, routes.row_normalizer) for sums in row_gradient)
    else:
        means = (context.sums.finite(mean, NAME) for mean in mean_gradient)
    if norm is not None:
        means = (clamp(mean, context.config) * norm.scale for mean in means)
    update_rows(context, window.update + 1, owned, means, buffer)


@stage(lane="compute", after=(Edge("dense_reduce"), Edge("gradient_norm")), gathers=True)
def dense_update(
    context: Context, means: Read[DenseMeans], norm: Read[GradientNorm] | None, dense: Update[Dense]
) -> None:
    """Apply the dense gradients, within their limits."""
    if norm is None:
        dense.update(means.gradients)
    elif context.config.skips and norm.infinite:
        dense.model.skip()
    else:
        dense.update(clamp(means.gradients, context.config) * norm.scale)


@stage(lane="write_back", after=(Edge("sparse_update"),), moves=True)
def write_back(
    owned: Read[OwnedRows], buffer: Read[Buffer], tables: Write[Tables], counts: LookupCounts
) -> None:
    """Copy the updated rows to the tables."""
    for each, rows, table in zip(owned.tables, buffer, tables, strict=True):
        _write(table, each, rows, each.handles >= 0, counts)


@stage(
    lane="write_back", after=(Edge("retrieve"), Edge("sparse_update", batch=1)), moves=True, name="write_back"
)
def write_back_dropped_rows(
    before: Read[Previous[OwnedRows]] | None,
    active: Read[Dropped[Previous[Buffer]]] | None,
    kept: Read[KeptRows] | None,
    tables: Write[Dropped[Tables]],
    counts: LookupCounts,
) -> None:
    """`write_back` where rows stay in the buffers: those of the last window that this one does not have."""
    if before is None or active is None or kept is None:
        return
    for each, rows, common, table in zip(before.tables, active, kept, tables, strict=True):
        size = len(each.handles)
        # As in `retrieval._fetch_new`: padding of `common.before` is -1 and marks the extra element.
        dropped = torch.ones(size + 1, dtype=torch.bool, device=each.handles.device)  # and one for rows of -1
        dropped[common.before] = False
        _write(table, each, rows, dropped[:size] & (each.handles >= 0), counts)


def update_rows(
    context: Context, step: int, owned: OwnedRows, means: Iterable[torch.Tensor], buffer: Buffer
) -> None:
    """Apply mean gradients, by table (K, dim), to the rows of a buffer.

    The row of a key that is not admitted stays as it began. Rows in low precision are rounded to 16 bits
    here, so that storing and reading them changes nothing.
    """
    for group, table, rows, mean in zip(context.tables.groups, owned.tables, buffer, means, strict=True):
        # A buffer has its rows in the order of the keys, so row k of `mean` is for row k of `rows`.
        indices, count = torch.arange(table.keys.shape[0], device=context.device), table.count
        if not group.table.admits_all:
            admitted = select(table.handles >= 0, padded=count is not None)
            indices, count = to_device(admitted.positions, context.device), admitted.count
            mean = launch.gather_rows(mean, indices)
        if group.table.requires_grad:
            rule = group.optimizer if context.copies == 1 else group.optimizer.over_copies(context.copies)
            rule.update(rows, indices, mean, step, count)
        if table.low_precision is not None:
            group.table.round_low_precision(rows, table.low_precision)


def _write(
    table: DynamicTable, owned: TableRows, rows: torch.Tensor, chosen: torch.Tensor, counts: LookupCounts
) -> None:
    """Write the `chosen` (K,) bool of a buffer's rows (K, row width) to their table."""
    handles, low = owned.handles, owned.low_precision
    if table.padded:
        # Padded tables: the shape stays and handle -1 writes
        # nothing, so no host waits for the number of rows.
        table.update(torch.where(chosen, handles, -1), rows, low)
        counts.written += chosen.sum()
        return
    if not bool(chosen.all()):
        places = chosen.nonzero().squeeze(1)
        handles, rows = handles[places], launch.gather_rows(rows, to_device(places, rows.device))
        low = None if low is None else low[places]
    table.update(handles, to_host(rows), low)
    counts.written += handles.shape[0]
