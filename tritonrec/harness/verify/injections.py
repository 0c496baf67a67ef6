"""What injected faults do: to the program, the schedule, or the timing that brings them out.

A fault in a stage is a function of its own before, after or in place of the stage; like a stage it declares
what it is passed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ... import ops
from ...data import JaggedBatch
from ...distributed import Communicator
from ...nn import RMSNorm
from ...nn.modules import GatedNorm
from ...pipeline import Program, Schedule, Task, Window
from ...pipeline.dist_plan import RowDist
from ...pipeline.places import (
    Buffer,
    CommunicationGroup,
    Context,
    Dense,
    DenseMeans,
    Embeddings,
    GradientNorm,
    Gradients,
    Losses,
    MeanGradient,
    OwnedRows,
    ReduceGroup,
    RelaySums,
    Routes,
    RowGradient,
)
from ...pipeline.precision import rounded_rows
from ...pipeline.stage import From, Previous, Read, Update, Write
from ...pipeline.stages import gradient_norm
from ..job import Loader
from .own_code import OwnLoop
from .variants import tools


@dataclass(frozen=True)
class Injection:
    """How a fault is injected: by changing the program, the schedule, the timing that brings it out, or the
    loader of a rank.

    `tool` takes the place of a part of the case's tool, or changes it; the tool says which.
    With `alone` no two micro-batches share an exchange, for faults of a single one's.
    `loop` changes an `OwnLoop`, which has none of these.
    """

    program: Callable[[Program], None] | None = None
    loader: Callable[[Loader], None] | None = None
    schedule: Callable[[Schedule], Schedule] | None = None
    delay: Callable[[Task], float] | None = None
    loop: Callable[[OwnLoop], None] | None = None
    alone: bool = False
    tool: Any = None


def injection_of(name: str) -> Injection:
    """The injection of the fault called `name`, of the core, its corpus or a tool."""
    found: Injection = next(f.injection for f in tools().SELECTIONS[True, True] if f.name == name)
    return found


def nothing() -> None:
    """A stage that does nothing."""


def no_copy_of_kept_rows(program: Program) -> None:
    program.replace("copy_kept_rows", nothing)


def wrong_rows(program: Program) -> None:
    def copy_kept_rows(
        before: Read[Previous[OwnedRows]] | None,
        owned: Read[OwnedRows],
        active: Read[Previous[Buffer]] | None,
        buffer: Write[Buffer],
    ) -> None:
        if before is None or active is None:
            return
        for last, now, source, rows in zip(before.tables, owned.tables, active, buffer, strict=True):
            here, there = ops.intersect(last.keys, now.keys)
            ops.scatter_rows(rows, there, ops.gather_rows(source, here.flip(0)))

    program.replace("copy_kept_rows", copy_kept_rows)


def _scaled(program: Program, micro_batch_of: int, factor: int) -> None:
    """Multiply the gradients of the first table that are sent with a micro-batch."""

    def scale(micro_batch: int, routes: Read[Routes], gradients: Update[From[Gradients]]) -> None:
        if micro_batch == micro_batch_of:
            gradients[0][routes.tables[0].gradients.rows[micro_batch]] *= factor

    program.before("gradient_exchange", scale)


def lost_gradient(program: Program) -> None:
    _scaled(program, program.config.micro_batches - 1, 0)


def gradient_twice(program: Program) -> None:
    _scaled(program, 1, 2)


def _update(
    context: Context, routes: Routes, owned: OwnedRows, sums: torch.Tensor, buffer: Buffer, step: int
) -> None:
    """Update the first table's rows from what has been summed so far."""
    gradient = context.sums.mean(sums, routes.row_normalizer)
    optimizer = context.tables.groups[0].optimizer
    optimizer.update(buffer[0], torch.arange(len(owned.tables[0].keys)), gradient, step)


def update_inside_window(program: Program) -> None:
    def too_early(
        micro_batch: int,
        context: Context,
        window: Window,
        routes: Read[Routes],
        owned: Read[OwnedRows],
        row_gradient: Update[RowGradient],
        buffer: Update[Buffer],
    ) -> None:
        if micro_batch == 0:
            _update(context, routes, owned, row_gradient[0], buffer, window.update + 1)
            row_gradient[0].zero_()

    program.after("gradient_exchange", too_early)


def float_sums(program: Program) -> None:
    def add_rows(values: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, name: str) -> None:
        if values.dtype == torch.int64:
            ops.segment_sum(values, rows, len(out), consistency="batch", out=out)
        else:
            out += ops.to_fixed_point(ops.segment_sum(values, rows, len(out), consistency="window"))

    program.sums.add = add_rows  # type: ignore[method-assign]
    flight = program.run_places[Dense].flight
    flight.reads_indexed_rows = lambda impls: False  # so all are added above


def sums_of_four_bytes(program: Program) -> None:
    send = program.sums.send_to_owners

    def narrow(sent, over, parts, *rest) -> None:
        narrowed = [part._replace(values=part.values.to(torch.int32).to(torch.int64)) for part in parts]
        send(sent, over, narrowed, *rest)

    program.sums.send_to_owners = narrow  # type: ignore[method-assign, assignment]


def stale_dense_parameter(program: Program) -> None:
    dense, update, windows = program.dense, program.dense.step, []

    def remember(window: Window) -> None:
        windows.append(window.step)

    def without_one(gradients: Mapping[str, torch.Tensor]) -> None:
        missed = next(iter(dense.parameters)) if windows[-1] == 2 and program.context.rank == 1 else None
        update({name: gradient for name, gradient in gradients.items() if name != missed})

    program.before("dense_update", remember)
    dense.step = without_one  # type: ignore[method-assign]


def parameters_of_the_last_window(program: Program) -> None:
    shards = program.dense.shards
    assert shards is not None
    gather, last = shards.gather, dict[str, torch.Tensor]()

    def stale() -> None:
        fresh = not shards.gathered
        gather()
        for name, parameter in program.model.named_parameters() if fresh else ():
            now = parameter.detach().clone()
            parameter.data.copy_(last.get(name, now))
            last[name] = now

    shards.gather = stale  # type: ignore[method-assign]


def local_token_count(program: Program) -> None:
    def local(window: Window, routes: Read[Routes]) -> Routes:
        return replace(routes, loss_normalizer=window.loss_terms, row_normalizer=window.loss_terms)

    program.after("route", local)


def correction_per_micro_batch(program: Program) -> None:
    def sparse_update(
        context: Context,
        window: Window,
        routes: Read[Routes],
        owned: Read[OwnedRows],
        row_gradient: Read[RowGradient],
        buffer: Update[Buffer],
    ) -> None:
        step = (window.update + 1) * context.config.micro_batches
        _update(context, routes, owned, row_gradient[0], buffer, step)

    program.replace("sparse_update", sparse_update)


def norm_of_one_rank(program: Program) -> None:
    def alone(
        context: Context,
        routes: Read[Routes],
        owned: Read[OwnedRows],
        row_gradient: Read[RowGradient],
        mean_gradient: Write[MeanGradient],
        means: Read[DenseMeans],
    ) -> GradientNorm:
        assert gradient_norm.function is not None
        single = ReduceGroup(Communicator())
        return gradient_norm.function(context, routes, owned, row_gradient, mean_gradient, means, single)

    program.replace("gradient_norm", alone)


def missed_decay_forgotten(program: Program) -> None:
    def updated_just_before(window: Window, buffer: Update[Buffer]) -> None:
        for rows in buffer:
            last = rows[:, -1]
            last.copy_(torch.where(last > 0, window.update, last))  # updates count from 1 there

    program.before("sparse_update", updated_just_before)


def states_of_other_rows(program: Program) -> None:
    def shifted(context: Context, buffer: Update[Buffer]) -> None:
        for rows, group in zip(buffer, context.tables.groups, strict=True):
            states = rows[:, group.table.dim :]
            states.copy_(states.roll(1, 0))

    program.before("sparse_update", shifted)


def one_buffer(program: Program) -> None:
    def land_in_active(active: Update[Previous[Buffer]] | None, buffer: Read[Buffer]) -> None:
        if active is not None:
            # The rows land where batch t-1 is still training.
            busy, rows = active[0], buffer[0]
            count = min(len(busy), len(rows))
            busy[:count] = rows[:count]

    program.after("retrieve", land_in_active)


def dropout_by_position(program: Program) -> None:
    forward = program.model.forward

    def by_position(batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        return forward(replace(batch, sample_ids=torch.arange(batch.num_samples)), rows, seed)

    program.model.forward = by_position


def plan_of_the_first_window(program: Program) -> None:
    flight, seeds = program.run_places[Dense].flight, list[int]()
    train = flight.train_micro_batch

    def by_the_first(batch: JaggedBatch, rows: dict[str, Any], seed: int, *rest: Any) -> torch.Tensor:
        seeds.append(seed)
        return train(batch, rows, seeds[0] if isinstance(rows["item"], ops.IndexedRows) else seed, *rest)

    flight.train_micro_batch = by_the_first


def padded_to_the_longest(program: Program) -> None:
    body: Any = program.model.body
    forward = body.forward

    def to_the_longest(rows: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
        body.max_seq_len = max(int(seq_offsets.diff().max()), 1)
        padded: torch.Tensor = forward(rows, seq_offsets)
        return padded

    body.forward = to_the_longest


def norm_before_the_gate(program: Program) -> None:
    for module in program.model.modules():
        if isinstance(module, GatedNorm):
            module.norm_product = False


def rms_of_a_micro_batch(program: Program) -> None:
    for module in program.model.modules():
        if isinstance(module, RMSNorm):
            module.forward = partial(_over_all_rows, module.forward)  # type: ignore[method-assign]


def _over_all_rows(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    own = x.square().mean(1, keepdim=True)
    return forward(x) * (own / own.mean()).sqrt()


def gradients_of_the_last_pass(loop: OwnLoop) -> None:
    backward = loop.backward

    def forgetful(batch: JaggedBatch, seed: int) -> torch.Tensor:
        loop.row_optimizer.zero_grad()
        return backward(batch, seed)

    loop.backward = forgetful  # type: ignore[method-assign]


def weights_of_other_ids(program: Program) -> None:
    by_feature = program.tables.by_feature

    def shifted(rows: Any, lookups: Mapping[str, Any], **options: bool) -> dict[str, torch.Tensor]:
        moved = {name: each._replace(weights=each.weights.roll(1)) for name, each in lookups.items()}
        return by_feature(rows, moved, **options)

    program.tables.by_feature = shifted  # type: ignore[method-assign]


def mean_over_one_batch(program: Program) -> None:
    def of_the_last(window: Window, routes: Read[Routes]) -> Routes:
        normalizer = max(routes.loss_normalizer // len(window.batches), 1)
        return replace(routes, loss_normalizer=normalizer, row_normalizer=normalizer)

    program.after("route", of_the_last)


def own_rows_not_rounded(program: Program) -> None:
    def exchange(
        micro_batch: int,
        context: Context,
        routes: Read[Routes],
        owned: Read[OwnedRows],
        buffer: Read[Buffer],
        communication: Update[CommunicationGroup],
        embeddings: Write[Embeddings],
    ) -> None:
        tables = zip(routes.tables, owned.tables, context.tables.groups, buffer, strict=True)
        for number, (table, own, group, rows) in enumerate(tables):
            if not micro_batch:
                embeddings.append(torch.empty(table.num_rows, group.table.dim, dtype=torch.float32))
            splits = own.sent.splits[micro_batch]
            parts = [*rows[own.sent.rows[micro_batch], : group.table.dim].split(splits)]
            for rank, part in enumerate(parts):
                if rank != communication.rank:
                    parts[rank] = rounded_rows(part, context.config.exchange.precision).float()
            slots = embeddings[number][table.slots(micro_batch)]
            communication.all_to_all(torch.cat(parts), splits, table.splits[micro_batch], slots)

    program.replace("exchange", exchange)


def whole_sums_rounded(program: Program) -> None:
    communication = program.communicators.communication
    exchange = communication.exchange

    def rounded(values, send, receive, out=None):
        if values.dtype == torch.int64 and values.dim() == 2:  # neither keys nor packed bytes
            values = values.float().long()
        return exchange(values, send, receive, out)

    communication.exchange = rounded  # type: ignore[method-assign]


def rows_in_reverse(program: Program) -> None:
    def inverse_of_another(routes: Read[Routes]) -> Routes:
        tables = [
            replace(table, inverse=[*table.inverse[:-1], table.inverse[-1].flip(0)])
            for table in routes.tables
        ]
        return replace(routes, tables=tables)

    program.after("route", inverse_of_another)


def gradients_leave_at_first_use(program: Program) -> None:
    def first_is_last(context: Context, routes: Read[Routes]) -> Routes:
        tables = []
        for table in routes.tables:
            slots = [table.slots(i) for i in range(context.config.window_micro_batches)]
            rows = [torch.arange(each.start, each.stop) for each in slots]
            tables.append(replace(table, gradients=RowDist(rows, table.splits)))
        received = [replace(each, last_use=None, gradient_splits=each.splits) for each in routes.received]
        return replace(routes, tables=tables, received=received)

    program.after("route", first_is_last)


def replicas_keep_their_gradients(program: Program) -> None:
    def alone(
        context: Context,
        routes: Read[Routes],
        owned: Read[OwnedRows],
        row_gradient: Read[RowGradient],
        mean_gradient: Write[MeanGradient],
    ) -> None:
        mean_gradient.clear()
        for table, sums in zip(owned.tables, row_gradient, strict=True):
            own = context.sums.mean(sums, routes.row_normalizer)
            mean_gradient.append(own.new_zeros(len(table.keys), own.shape[1]))
            mean_gradient[-1][table.replicas[context.replica]] = own

    program.replace("replica_reduce", alone)


def replicas_in_different_orders(program: Program) -> None:
    def own_order(context: Context, routes: Read[Routes]) -> Routes:
        received = []
        for each in routes.received:
            first, *others = each.replica_keys
            if context.replica:  # two rows of one rank's part, so that no message has another length
                first = torch.cat([first[:2].flip(0), first[2:]])
            received.append(replace(each, replica_keys=[first, *others]))
        return replace(routes, received=received)

    program.after("route", own_order)


def relay_in_reverse(program: Program) -> None:
    def reverse(routes: Update[Routes]) -> None:
        for relay in routes.relays:
            for rows in relay.sent.rows:
                rows.copy_(rows.flip(0))

    program.after("route", reverse)


def relay_adds_to_another_row(program: Program) -> None:
    def another(routes: Update[Routes]) -> None:
        for relay in routes.relays:
            for rows, splits in zip(relay.gradients.rows, relay.gradients.splits, strict=True):
                rows[len(rows) - splits[-1] :] = rows[:1]

    program.after("route", another)


def node_sums_rounded(program: Program) -> None:
    def rounded(relay_sums: Update[From[RelaySums]], micro_batch: int) -> None:
        for sums in relay_sums:
            sums.copy_(sums.float())

    program.before("gradient_exchange", rounded)


def means_begin_at_zero(program: Program) -> None:
    """So that an update which comes too early has something to take."""

    def zeroed(context: Context, owned: Read[OwnedRows]) -> MeanGradient:
        sizes = zip(owned.tables, context.tables.groups, strict=True)
        return MeanGradient([torch.zeros(len(t.keys), g.table.dim, dtype=torch.float32) for t, g in sizes])

    program.after("retrieve", zeroed)


def losses_begin_at_zero(program: Program) -> None:
    """So that a reduction which comes too early has something to send."""

    def zeroed(losses: Write[Losses]) -> None:
        for micro_batch in range(program.config.window_micro_batches):
            losses[micro_batch] = torch.zeros(1, dtype=torch.float32)

    program.after("route", zeroed)


def replica_reduction_after_the_first_use(program: Program) -> None:
    def too_early(routes: Read[Routes]) -> Routes:
        received = [
            replace(each, replica_last_use=[torch.zeros_like(last) for last in each.replica_last_use])
            for each in routes.received
        ]
        return replace(routes, received=received)

    program.after("route", too_early)


def slow(stage: str, micro_batch: int | None = None) -> Callable[[Task], float]:
    """Hold `stage` back long enough for a stage that fails to wait for it to overtake."""

    def delay(task: Task) -> float:
        return 0.15 if task.stage == stage and micro_batch in (None, task.micro_batch) else 0.0

    return delay
