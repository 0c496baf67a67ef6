"""The frozen window: rows are exchanged, micro-batches computed, nothing updated (NestPipe, section V)."""

from __future__ import annotations

import torch

from ... import ops
from ...kernels import launch
from ..places import (
    Buffer,
    CommunicationGroup,
    Context,
    Dense,
    DenseGradient,
    DeviceSamples,
    Embeddings,
    Gradients,
    Losses,
    MeanGradient,
    OwnedRows,
    ReplicaGroup,
    Routes,
    RowGradient,
)
from ..precision import DTYPES, rounded_rows, unscaled
from ..stage import Edge, From, Read, Update, UpTo, Write, stage
from ..streams import to_device
from ..sums import NAME, counted_all_to_all
from ..window import LookupCounts, Window

DROPOUT_STREAM = 0x64726F70  # one Philox stream for dropout seeds


@stage(lane="communication", after=(Edge("copy_kept_rows"),))
def exchange(
    micro_batch: int,
    context: Context,
    routes: Read[Routes],
    owned: Read[OwnedRows],
    buffer: Read[Buffer],
    communication: Update[CommunicationGroup],
    embeddings: Write[Embeddings],
    counts: LookupCounts,
) -> None:
    """Send the rows that other ranks' micro-batch looks up, receive those of this rank's.

    In ``exchange_precision``, which rounds this rank's rows for itself too: no bit depends on who owns a row.
    """
    dims = [group.table.dim for group in context.tables.groups]
    precision = context.config.exchange_precision
    if not embeddings:
        sizes = zip(buffer, routes.tables, dims, strict=True)
        embeddings.extend(
            rows.new_empty(table.num_rows, dim, dtype=DTYPES[precision]) for rows, table, dim in sizes
        )
    for number, (table, dim) in enumerate(zip(routes.tables, dims, strict=True)):
        sent, slots = owned.tables[number].sent, embeddings[number][table.slots(micro_batch)]
        if communication.world_size == 1 and slots.is_cpu and precision == "float32":
            if not len(slots):
                continue
            torch.index_select(buffer[number][:, :dim], 0, sent.rows[micro_batch], out=slots)
            continue
        rows = rounded_rows(launch.gather_rows(buffer[number][:, :dim], sent.rows[micro_batch]), precision)
        splits = sent.splits[micro_batch]
        counted_all_to_all(counts, communication, rows, splits, table.splits[micro_batch], out=slots)
        counts.rows += sum(splits) - splits[communication.rank]
    counts.embedding_bytes = counts.row_bytes


@stage(lane="compute", after=(Edge("exchange", "same"), Edge("dense_update", batch=1)))
def compute(
    micro_batch: int,
    context: Context,
    window: Window,
    samples: Read[DeviceSamples],
    routes: Read[Routes],
    embeddings: Read[UpTo[Embeddings]],
    dense: Read[Dense],
    dense_gradient: Update[DenseGradient],
    gradients: Update[From[Gradients]],
    losses: Write[Losses],
) -> None:
    """Forward and backward of one micro-batch; backward adds to `dense_gradient` by itself."""
    part, rows = samples[micro_batch], []
    for table, received in zip(routes.tables, embeddings, strict=True):
        occurrences = launch.gather_rows(received, table.inverse[micro_batch])
        rows.append(occurrences.to(torch.float32).requires_grad_())
    seed = ops.derive_seed(context.config.seed, DROPOUT_STREAM, part.step)
    by_feature = context.tables.by_feature(rows, part.lookups())
    exponent = dense.model.scale_exponent(routes.loss_normalizer, context.config.fraction_bits)
    losses[micro_batch] = dense.flight.train_micro_batch(part, by_feature, seed, window.settings, exponent)
    if not gradients:
        sizes = zip(rows, routes.tables, strict=True)
        gradients.extend(context.sums.zeros(table.num_rows, leaf.shape[1]) for leaf, table in sizes)
    for leaf, table, sums in zip(rows, routes.tables, gradients, strict=True):
        if leaf.grad is not None:
            gradient = unscaled(leaf.grad, exponent)
            context.sums.add(gradient, table.inverse[micro_batch], sums, NAME)


@stage(lane="communication", after=(Edge("compute", "same"),))
def gradient_exchange(
    micro_batch: int,
    context: Context,
    routes: Read[Routes],
    owned: Read[OwnedRows],
    gradients: Read[Gradients],
    communication: Update[CommunicationGroup],
    row_gradient: Update[From[RowGradient]],
    counts: LookupCounts,
) -> None:
    """Send gradient rows to their owners and add them up there."""
    for number, sums in enumerate(gradients):
        sent, received = routes.tables[number].gradients, owned.tables[number].gradients
        if communication.world_size == 1:
            if not len(received.rows[micro_batch]):
                continue
            own = sent.of(sums, micro_batch)
            context.sums.add(own, received.rows[micro_batch], row_gradient[number], NAME)
            continue
        splits = sent.splits[micro_batch]
        context.sums.send_to_owners(
            counts, communication,
            sums, sent.rows[micro_batch], splits,
            row_gradient[number], received.rows[micro_batch], received.splits[micro_batch],
        )  # fmt: skip
        counts.rows += sum(splits) - splits[communication.rank]


@stage(lane="replica", after=(Edge("gradient_exchange", "same"),))
def replica_reduce(
    micro_batch: int,
    context: Context,
    routes: Read[Routes],
    owned: Read[OwnedRows],
    row_gradient: Read[RowGradient],
    replica: Update[ReplicaGroup],
    mean_gradient: Write[MeanGradient],
    counts: LookupCounts,
) -> None:
    """The mean gradients of the rows whose sums are complete on all replicas."""
    if not mean_gradient:
        sizes = zip(owned.tables, context.tables.groups, strict=True)
        mean_gradient.extend(
            torch.empty(len(table.keys), group.table.dim, dtype=torch.float32, device=context.device)
            for table, group in sizes
        )
    for table, sums, means in zip(owned.tables, row_gradient, mean_gradient, strict=True):
        reduction = table.reductions[micro_batch]
        if len(reduction.rows):
            complete = context.sums.all_reduce_mean(
                counts, replica, sums, reduction.plan, routes.row_normalizer
            )
            launch.scatter_rows(means, to_device(reduction.rows, context.device), complete)
