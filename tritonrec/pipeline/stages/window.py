"""The frozen window: rows are exchanged, micro-batches computed, nothing updated (NestPipe, section V)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ... import ops
from ...data import Batch
from ...distributed import Communicator
from ...kernels import launch
from ...nn.context import recording
from ..dist_plan import InputDist, RowDist
from ..flight import Flight
from ..places import (
    Buffer,
    CommunicationGroup,
    Context,
    Dense,
    DenseGradient,
    DeviceSamples,
    EarlyGradient,
    Embeddings,
    Gradients,
    Losses,
    MeanGradient,
    NodeGroup,
    Outputs,
    OwnedRows,
    RailGroup,
    ReduceGroup,
    Relayed,
    RelaySums,
    ReplicaGroup,
    Representations,
    Routes,
    RowGradient,
    WindowLosses,
)
from ..precision import DTYPES, Precision, rounded_rows, unscaled
from ..results import note_outputs
from ..stage import Edge, From, Read, Update, UpTo, Write, stage
from ..streams import to_device
from ..sums import NAME, Sent, all_to_all_of_tables
from ..window import LookupCounts, Window
from ..window_loss import BatchLoss, WindowLoss, gather

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
    _received(embeddings, context, routes.tables)
    # Its rows come with those of an earlier micro-batch (`ExchangeGroups`).
    if context.groups.rows_with[micro_batch] != micro_batch:
        return
    precision = context.config.exchange.precision
    if communication.world_size == 1 and context.device.type == "cpu" and precision == "float32":
        for rows, table, own, received in zip(owned.tables, routes.tables, buffer, embeddings, strict=True):
            slots = received[table.slots(micro_batch)]
            if slots.shape[0]:
                # A buffer row is weights, then optimizer state: the weights travel.
                torch.index_select(own[:, : slots.shape[1]], 0, rows.sent.rows[micro_batch], out=slots)
        return
    dists = [table.sent for table in owned.tables]
    _send(counts, communication, micro_batch, precision, buffer, dists, routes.tables, embeddings)
    counts.embedding_bytes = counts.row_bytes


# They wait for what the forms of one step wait for (`over_nodes`). A row that one rank of the node has later
# than another is `relayed` since the first of them.
@stage(lane="communication", name="exchange")
def exchange_over_nodes(
    micro_batch: int,
    context: Context,
    routes: Read[Routes],
    owned: Read[OwnedRows],
    buffer: Read[Buffer],
    node: Update[NodeGroup],
    rail: Update[RailGroup],
    relayed: Update[UpTo[Relayed]],
    embeddings: Write[Embeddings],
    counts: LookupCounts,
) -> None:
    """`exchange` in two steps: over the rail to the relays, and from these to the ranks of their node."""
    _received(embeddings, context, routes.tables)
    _received(relayed, context, [relay.dist for relay in routes.relays])
    if context.groups.rows_with[micro_batch] != micro_batch:
        return
    precision = context.config.exchange.precision
    dists, relays = [table.sent for table in owned.tables], [relay.dist for relay in routes.relays]
    _send(counts, rail, micro_batch, precision, buffer, dists, relays, relayed)
    # Bytes so far went between nodes.
    between = counts.row_bytes
    dists = [relay.sent for relay in routes.relays]
    _send(counts, node, micro_batch, precision, relayed, dists, routes.tables, embeddings)
    counts.embedding_bytes, counts.node_bytes = counts.row_bytes, counts.row_bytes - between


def _received(rows: list[torch.Tensor], context: Context, tables: Sequence[InputDist]) -> None:
    """Make what the exchanges of a window fill, once: by table (S, dim) in the precision of the exchange."""
    if rows:
        return
    for group, table in zip(context.tables.groups, tables, strict=True):
        dtype = DTYPES[context.config.exchange.precision]
        rows.append(torch.empty(table.num_rows, group.table.dim, dtype=dtype, device=context.device))


def _send(
    counts: LookupCounts,
    over: Communicator,
    micro_batch: int,
    precision: Precision,
    tables: Sequence[torch.Tensor],
    sent: Sequence[RowDist],
    received: Sequence[InputDist],
    outs: Sequence[torch.Tensor],
) -> None:
    """Send the rows of a micro-batch, of all tables in one message.

    Args:
        tables: (K, dim or more), rows of weights, maybe with state behind them, which does not travel.
        sent: which of them go where. received: which rows of `outs`, (S, dim) each, they are there.
    """
    rows = [
        rounded_rows(launch.gather_rows(table[:, : out.shape[1]], dist.rows[micro_batch]), precision)
        for table, out, dist in zip(tables, outs, sent, strict=True)
    ]
    splits = [dist.splits[micro_batch] for dist in sent]
    # Contiguous rows, grouped by rank: what arrives of a single table needs no further copy.
    slots = [out[dist.slots(micro_batch)] for out, dist in zip(outs, received, strict=True)]
    receive = [dist.splits[micro_batch] for dist in received]
    all_to_all_of_tables(counts, over, rows, splits, receive, slots)
    counts.rows += sum(sum(each) - each[over.rank] for each in splits)


@stage(lane="compute", after=(Edge("exchange", "same"), Edge("dense_update", batch=1)), feature="sees_window")
def represent(
    micro_batch: int,
    context: Context,
    window: Window,
    samples: Read[DeviceSamples],
    routes: Read[Routes],
    embeddings: Read[UpTo[Embeddings]],
    dense: Read[Dense],
    representations: Write[Representations],
) -> None:
    """What the samples of a micro-batch show to the others (GradCache, section 3.2, step 1)."""
    part, flight = samples[micro_batch], dense.flight
    inverses = [table.inverse[micro_batch] for table in routes.tables]
    rows, _leaves, _in_place, indexed = _rows_of(context, flight, embeddings, inverses)
    flight.dense.gather()
    with flight.calls, flight.accumulator.active():
        by_feature = context.tables.by_feature(rows, part.lookups(), indexed=indexed)
        representations[micro_batch] = flight.represent(
            part, by_feature, _seed(context, part), window.settings
        )


@stage(lane="compute", after=(Edge("represent", "all"),), feature="sees_window")
def window_loss(
    context: Context,
    window: Window,
    samples: Read[DeviceSamples],
    routes: Read[Routes],
    dense: Read[Dense],
    representations: Read[Representations],
    reduce: Update[ReduceGroup],
    dense_gradient: Update[DenseGradient],
    window_losses: Write[WindowLosses],
    counts: LookupCounts,
) -> None:
    """The losses of all micro-batches from what the samples of all ranks show, and the gradients of that
    (GradCache, section 3.2, step 2). Each batch of a window has a loss of its own.
    """
    flight, count = dense.flight, context.config.micro_batches
    exponent = dense.model.scale_exponent(routes.loss_normalizer, context.config.fraction_bits)
    # With accumulation a window has several batches, each with a loss over its own samples.
    for first in range(0, context.config.window_micro_batches, count):
        every = range(first, first + count)
        gathered = gather([representations[i] for i in every], reduce, counts)
        totals, parts, found = gathered.zeros(context.sums.exact), [samples[i] for i in every], []
        loss = BatchLoss(flight.model, gathered, _seed(context, parts[0]), window.settings, exponent)
        positions = gathered.positions.split([part.num_samples for part in parts])
        with flight.calls, flight.loss_guard.around(parts, loss, totals):
            for part, own in zip(parts, positions, strict=True):
                found.append(flight.window_loss(part, own, loss, totals))
        # Each sample has shown itself to the losses of all ranks: its gradient is the sum of what they found.
        others = gathered.of_candidates(totals, context.sums, reduce, counts)
        done = 0
        for i, (losses, own) in zip(every, found, strict=True):
            rows = slice(done, done + len(losses))
            # In the order of the micro-batches, as `gathered` has this rank's samples.
            gradients = {name: each + others[name][rows] for name, each in own.items()}
            window_losses[i] = WindowLoss(representations[i], losses, gradients)
            done += len(losses)


@stage(
    lane="compute",
    after=(Edge("exchange", "all"), Edge("window_loss"), Edge("dense_update", batch=1)),
    feature="early_dense",
    within="compute",
)
def early_gradients(
    bucket: int,
    samples: Read[DeviceSamples],
    routes: Read[Routes],
    embeddings: Read[Embeddings],
    dense: Read[Dense],
    early_gradient: Update[EarlyGradient],
) -> None:
    """The gradients of a bucket, which backward completes first (`EarlyDense`): a part of `compute`."""


@stage(lane="compute", after=(Edge("exchange", "same"), Edge("window_loss"), Edge("dense_update", batch=1)))
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
    window_losses: Read[WindowLosses] | None,
    losses: Write[Losses],
    outputs: Write[Outputs],
) -> None:
    """Forward and backward of one micro-batch; backward adds to `dense_gradient` by itself.

    A model that takes `ops.IndexedRows` gets them. Where gradients are summed exactly, pooled features are
    pooled from rows where they lie. Then backward adds the gradients of rows, too, to `gradients`. Otherwise
    rows are gathered, and each occurrence's gradient is added after backward. Where losses are of the whole
    global batch, backward starts from the gradients of what the samples show.
    """
    part, flight = samples[micro_batch], dense.flight
    flight.early.begin(last=micro_batch == context.config.window_micro_batches - 1)
    # The first micro-batch to run makes the sums of all.
    if not gradients:
        sizes = zip(embeddings, routes.tables, strict=True)
        gradients.extend(context.sums.zeros(table.num_rows, rows.shape[1]) for rows, table in sizes)
    inverses = [table.inverse[micro_batch] for table in routes.tables]
    seed = _seed(context, part)
    exponent = dense.model.scale_exponent(routes.loss_normalizer, context.config.fraction_bits)
    flight.dense.gather()  # also before the guard calls the model
    # Kernels lay a parameter out once for all micro-batches
    # of a window; of a single one nothing is used again.
    if micro_batch == 0 and context.config.window_micro_batches > 1:
        flight.accumulator.begin_window()
    with flight.calls, flight.guard.around(window, micro_batch, part, embeddings, inverses, seed, exponent):
        rows, leaves, in_place, indexed = _rows_of(context, flight, embeddings, inverses)
        # Only for rows that lie in place: backward then adds to `gradients` itself, row by row in fixed
        # point. Gathered occurrences get a plain gradient, which is added below.
        summed = flight.accumulator.rows(leaves, gradients, "embedding rows")
        with summed if in_place else nullcontext():
            with flight.accumulator.active():
                by_feature = context.tables.by_feature(rows, part.lookups(), indexed=indexed)
            given = None if window_losses is None else window_losses[micro_batch]
            with recording() as recorded:
                losses[micro_batch] = flight.train_micro_batch(
                    part, by_feature, seed, window.settings, exponent, given
                )
            if part.num_samples:
                note_outputs(outputs, micro_batch, recorded, context.config.micro_batches)
    for leaf, inverse, sums in zip(leaves, inverses, gradients, strict=True):
        if leaf.grad is not None:
            if in_place:
                raise TypeError(
                    "the model read ops.IndexedRows.values by itself, whose gradient has no exact sum: read "
                    "them by an op (ops.gather_rows, ops.sampled_softmax)"
                )
            context.sums.add(unscaled(leaf.grad, exponent), inverse, sums, NAME)


def _seed(context: Context, part: Batch) -> int:
    return ops.derive_seed(context.config.seed, DROPOUT_STREAM, part.step)


def _rows_of(
    context: Context, flight: Flight, embeddings: Embeddings, inverses: list[torch.Tensor]
) -> tuple[list[Any], list[torch.Tensor], bool, bool]:
    """By table the rows of a micro-batch, and the leaves that get their gradients; whether these lie in
    place, and whether the model gets `ops.IndexedRows`.
    """
    indexed = _takes_indexed_rows(context, flight, embeddings)
    pools = any(map(context.tables.pools, context.tables.groups))
    # The leaf is all rows received, (S, dim); an op reads it through `inverse`. Otherwise the leaf is one row
    # for each occurrence, (n, dim), gathered here.
    if indexed or (pools and context.sums.exact):
        # `data`: the exchange writes later micro-batches' rows meanwhile, which autograd takes for these
        leaves = [received.data.to(torch.float32).requires_grad_() for received in embeddings]
        return list(map(ops.IndexedRows, leaves, inverses)), leaves, True, indexed
    # Float32: with low-precision messages rows are widened once, here.
    taken = map(launch.gather_rows, embeddings, inverses)
    leaves = [occurrences.to(torch.float32).requires_grad_() for occurrences in taken]
    return leaves, leaves, False, indexed


def _takes_indexed_rows(context: Context, flight: Flight, embeddings: Embeddings) -> bool:
    """Whether the model gets `ops.IndexedRows`. Float32 sums have an order, which one op per table keeps."""
    impls = {ops.implementation("auto", each) for each in embeddings}
    if not flight.reads_indexed_rows(impls):
        return False
    if "triton" in impls:
        return context.sums.exact
    tables = context.tables
    return all(len(group.features) == 1 and not tables.pools(group) for group in tables.groups)


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
    if context.groups.gradients_with[micro_batch] != micro_batch:
        return
    if communication.world_size > 1:
        sent, received = ([each.gradients for each in tables] for tables in (routes.tables, owned.tables))
        _add(context, counts, communication, micro_batch, gradients, sent, row_gradient, received)
        return
    for table, own, sums, out in zip(routes.tables, owned.tables, gradients, row_gradient, strict=True):
        places = own.gradients.rows[micro_batch]
        # One rank owns all rows: the sums are added to where they belong without a message.
        if places.shape[0]:
            context.sums.add(table.gradients.of(sums, micro_batch), places, out, NAME)


# Sums leave a relay after the last micro-batch of any rank of the node that uses their row.
@stage(lane="communication", name="gradient_exchange")
def gradient_exchange_over_nodes(
    micro_batch: int,
    context: Context,
    routes: Read[Routes],
    owned: Read[OwnedRows],
    gradients: Read[Gradients],
    node: Update[NodeGroup],
    rail: Update[RailGroup],
    relay_sums: Update[From[RelaySums]],
    row_gradient: Update[From[RowGradient]],
    counts: LookupCounts,
) -> None:
    """`gradient_exchange` in two steps: relays add up those of their node, and send the sums on."""
    if not relay_sums:
        relays = zip(routes.relays, gradients, strict=True)
        relay_sums.extend(context.sums.zeros(relay.dist.num_rows, sums.shape[1]) for relay, sums in relays)
    if context.groups.gradients_with[micro_batch] != micro_batch:
        return
    sent, near = [each.gradients for each in routes.tables], [each.gradients for each in routes.relays]
    _add(context, counts, node, micro_batch, gradients, sent, relay_sums, near)
    counts.node_bytes = counts.row_bytes
    far, received = [each.dist.gradients for each in routes.relays], [each.gradients for each in owned.tables]
    _add(context, counts, rail, micro_batch, relay_sums, far, row_gradient, received)


def _add(
    context: Context,
    counts: LookupCounts,
    over: Communicator,
    micro_batch: int,
    sums: Sequence[torch.Tensor],
    sent: Sequence[RowDist],
    outs: Sequence[torch.Tensor],
    received: Sequence[RowDist],
) -> None:
    """Send the sums of a micro-batch, and add them to those of the ranks that they are sent to."""
    i = micro_batch
    parts = [
        Sent(own, of.rows[i], of.splits[i], out, to.rows[i], to.splits[i])
        for own, of, out, to in zip(sums, sent, outs, received, strict=True)
    ]
    context.sums.send_to_owners(counts, over, parts)
    counts.rows += sum(sum(part.input_splits) - part.input_splits[over.rank] for part in parts)


@stage(lane="replica", after=(Edge("gradient_exchange", "same"),), feature="replicated")
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
            torch.zeros(len(table.keys), group.table.dim, dtype=torch.float32, device=context.device)
            for table, group in sizes
        )
    for table, sums, means in zip(owned.tables, row_gradient, mean_gradient, strict=True):
        # Rows that no later micro-batch of any replica uses (`_reductions` in retrieval).
        reduction = table.reductions[micro_batch]
        if len(reduction.rows):
            complete = context.sums.all_reduce_mean(
                counts, replica, sums, reduction.plan, routes.row_normalizer
            )
            launch.scatter_rows(means, to_device(reduction.rows, context.device), complete)
