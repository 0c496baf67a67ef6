"""What injected faults do: to the program, the schedule, or the timing that brings them out.

A fault in a stage is a function of its own before, after or in place of the stage; like a stage it declares
what it is passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ... import ops
from ...data import JaggedBatch
from ...distributed import Communicator
from ...nn import RMSNorm
from ...nn.modules import GatedNorm
from ...pipeline import Edge, Program, Schedule, Task, Window
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
from .faults import case, fault
from .own_code import OwnLoop
from .variants import OWN_LOOP


def slow(stage: str, micro_batch: int | None = None) -> Callable[[Task], float]:
    """Hold `stage` back long enough for a stage that fails to wait for it to overtake."""

    def delay(task: Task) -> float:
        return 0.15 if task.stage == stage and micro_batch in (None, task.micro_batch) else 0.0

    return delay


def nothing() -> None:
    """A stage that does nothing."""


@fault(case(), delay=slow("write_back"))
def no_copy_of_kept_rows(program: Program) -> None:
    """Rows of K(t-1) & K(t) are not copied into the prefetch buffer."""
    program.replace("copy_kept_rows", nothing)


@fault(case())
def copy_of_wrong_rows(program: Program) -> None:
    """The copied rows land at other keys."""

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


@fault(
    case(mode="fwp", optimizer="sgd", consistency="window"),
    name="lost-gradient-at-window-consistency",
    what="as above, where the reference is the same cut run sequentially",
    alone=True,
)
@fault(case(mode="fwp", optimizer="sgd"), alone=True)
def lost_micro_batch_gradient(program: Program) -> None:
    """Embedding gradients of the last micro-batch are dropped."""
    _scaled(program, program.config.micro_batches - 1, 0)


@fault(case(mode="dbp", optimizer="rowwise_adagrad"), alone=True)
def gradient_added_twice(program: Program) -> None:
    """Embedding gradients of micro-batch 1 count twice."""
    _scaled(program, 1, 2)


def _update(
    context: Context, routes: Routes, owned: OwnedRows, sums: torch.Tensor, buffer: Buffer, step: int
) -> None:
    """Update the first table's rows from what has been summed so far."""
    gradient = context.sums.mean(sums, routes.row_normalizer)
    optimizer = context.tables.groups[0].optimizer
    optimizer.update(buffer[0], torch.arange(len(owned.tables[0].keys)), gradient, step)


@fault(case(mode="dbp", optimizer="sgd"), alone=True, source="dmlc/dgl#2596")
def update_inside_window(program: Program) -> None:
    """Rows are updated after the first micro-batch instead of once per window."""

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


@fault(case(micro_batches=2))
def float_sums(program: Program) -> None:
    """Contributions are added in float32 and rounded to fixed point afterwards."""

    def add_rows(values: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, name: str) -> None:
        if values.dtype == torch.int64:
            ops.segment_sum(values, rows, len(out), consistency="batch", out=out)
        else:
            out += ops.to_fixed_point(ops.segment_sum(values, rows, len(out), consistency="window"))

    program.sums.add = add_rows  # type: ignore[method-assign]
    flight = program.run_places[Dense].flight
    flight.reads_indexed_rows = lambda impls: False  # so all are added above


@fault(case())
def sums_of_four_bytes(program: Program) -> None:
    """Gradient sums are sent as int32 instead of in the bytes they need."""
    send = program.sums.send_to_owners

    def narrow(sent, over, parts, *rest) -> None:
        narrowed = [part._replace(values=part.values.to(torch.int32).to(torch.int64)) for part in parts]
        send(sent, over, narrowed, *rest)

    program.sums.send_to_owners = narrow  # type: ignore[method-assign, assignment]


@fault(case())
def stale_dense_parameter(program: Program) -> None:
    """Rank 1 misses one update of one parameter."""
    dense, update, windows = program.dense, program.dense.step, []

    def remember(window: Window) -> None:
        windows.append(window.step)

    def without_one(gradients: Mapping[str, torch.Tensor]) -> None:
        missed = next(iter(dense.parameters)) if windows[-1] == 2 and program.context.rank == 1 else None
        update({name: gradient for name, gradient in gradients.items() if name != missed})

    program.before("dense_update", remember)
    dense.step = without_one  # type: ignore[method-assign]


@fault(case(variant="fsdp"))
def parameters_of_the_last_window(program: Program) -> None:
    """Sharded parameters are not gathered again after an update."""
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


@fault(case(), source="meta-pytorch/torchtune#1875")
def local_token_count(program: Program) -> None:
    """Gradients are divided by this rank's tokens instead of the global batch's."""

    def local(window: Window, routes: Read[Routes]) -> Routes:
        return replace(routes, loss_normalizer=window.loss_terms, row_normalizer=window.loss_terms)

    program.after("route", local)


@fault(
    case(optimizer="sgd", variant="weight-decay"),
    name="schedule-per-micro-batch",
    what="the learning rate goes by micro-batches instead of updates",
    source="huggingface/accelerate#963",
)
@fault(case())
def bias_correction_per_micro_batch(program: Program) -> None:
    """Steps of Adam are counted by micro-batches."""

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


@fault(
    case(variant="fp16", steps=8),
    name="overflow-of-one-rank",
    what="each rank leaves an update out, and moves the scale of its loss, by its own gradients",
)
@fault(case(variant="recipe"), source="areal-project/AReaL#312")
def norm_of_one_rank(program: Program) -> None:
    """Each rank clips by the norm of its own rows."""

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


@fault(case(), delay=slow("compute"))
def one_buffer(program: Program) -> None:
    """Rows of batch t are loaded over those batch t-1 is training on."""

    def land_in_active(active: Update[Previous[Buffer]] | None, buffer: Read[Buffer]) -> None:
        if active is not None:
            # The rows land where batch t-1 is still training.
            busy, rows = active[0], buffer[0]
            count = min(len(busy), len(rows))
            busy[:count] = rows[:count]

    program.after("retrieve", land_in_active)


@fault(case(), source="ecmwf/anemoi-core#595")
def dropout_by_place(program: Program) -> None:
    """The dropout mask goes by a sample's place in its micro-batch instead of by the sample."""
    forward = program.model.forward

    def by_position(batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        return forward(replace(batch, sample_ids=torch.arange(batch.num_samples)), rows, seed)

    program.model.forward = by_position


@fault(case())
def plan_of_the_first_window(program: Program) -> None:
    """A model called without its modules draws the dropout of the first window again."""
    flight, seeds = program.run_places[Dense].flight, list[int]()
    train = flight.train_micro_batch

    def by_the_first(batch: JaggedBatch, rows: dict[str, Any], seed: int, *rest: Any) -> torch.Tensor:
        seeds.append(seed)
        return train(batch, rows, seeds[0] if isinstance(rows["item"], ops.IndexedRows) else seed, *rest)

    flight.train_micro_batch = by_the_first


@fault(case(variant="converted"))
def padded_to_the_longest(program: Program) -> None:
    """A converted model's micro-batch is padded to its longest sample."""
    body: Any = program.model.body
    shorter = copy(body)  # an attribute of the model itself that changes would be refused first

    def to_the_longest(rows: torch.Tensor, seq_offsets: torch.Tensor) -> torch.Tensor:
        shorter.max_seq_len = max(int(seq_offsets.diff().max()), 1)
        padded: torch.Tensor = shorter.forward(rows, seq_offsets)
        return padded

    body.forward = to_the_longest


@fault(case(variant="grm-product"))
def norm_before_the_gate(program: Program) -> None:
    """The layers of GRM norm attention alone, before the gate multiplies it."""
    for module in program.model.modules():
        if isinstance(module, GatedNorm):
            module.norm_product = False


@fault(case(variant="fuxi-rms"))
def rms_of_a_micro_batch(program: Program) -> None:
    """Rows of FuXi are normed by the mean square of their micro-batch."""
    for module in program.model.modules():
        if isinstance(module, RMSNorm):
            module.forward = partial(_over_all_rows, module.forward)  # type: ignore[method-assign]


def _over_all_rows(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    own = x.square().mean(1, keepdim=True)
    return forward(x) * (own / own.mean()).sqrt()


@fault(case(mode="sequential", variant=OWN_LOOP), of="loop")
def gradients_of_the_last_pass(loop: OwnLoop) -> None:
    """In a loop of one's own the rows forget the gradients of earlier backward passes of the step."""
    backward = loop.backward

    def forgetful(batch: JaggedBatch, seed: int) -> torch.Tensor:
        loop.row_optimizer.zero_grad()
        return backward(batch, seed)

    loop.backward = forgetful  # type: ignore[method-assign]


@fault(case(variant="weighted-bags"))
def weights_of_other_ids(program: Program) -> None:
    """In a micro-batch the weights of bags are one id late."""
    by_feature = program.tables.by_feature

    def shifted(rows: Any, lookups: Mapping[str, Any], **options: bool) -> dict[str, torch.Tensor]:
        moved = {name: each._replace(weights=each.weights.roll(1)) for name, each in lookups.items()}
        return by_feature(rows, moved, **options)

    program.tables.by_feature = shifted  # type: ignore[method-assign]


@fault(case(variant="accumulate", steps=6))
def accumulation_divides_by_one_batch(program: Program) -> None:
    """Accumulated gradients are divided by the loss count of one batch."""

    def of_the_last(window: Window, routes: Read[Routes]) -> Routes:
        normalizer = max(routes.loss_normalizer // len(window.batches), 1)
        return replace(routes, loss_normalizer=normalizer, row_normalizer=normalizer)

    program.after("route", of_the_last)


@fault(case(variant="exchange-bf16"))
def own_rows_not_rounded(program: Program) -> None:
    """Rows for a rank's own samples stay float32 where others get them in bfloat16."""

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


@fault(case(variant="whole-sums"))
def whole_sums_rounded(program: Program) -> None:
    """Sums that are sent whole are rounded to float32 on their way."""
    communication = program.communicators.communication
    exchange = communication.exchange

    def rounded(values, send, receive, out=None):
        if values.dtype == torch.int64 and values.dim() == 2:  # neither keys nor packed bytes
            values = values.float().long()
        return exchange(values, send, receive, out)

    communication.exchange = rounded  # type: ignore[method-assign]


@fault(case(variant="dedup-exchange"), source="meta-pytorch/torchrec#1895")
def rows_handed_out_in_reverse(program: Program) -> None:
    """After dedup the rows go back to the occurrences in the wrong order."""

    def inverse_of_another(routes: Read[Routes]) -> Routes:
        tables = [
            replace(table, inverse=[*table.inverse[:-1], table.inverse[-1].flip(0)])
            for table in routes.tables
        ]
        return replace(routes, tables=tables)

    program.after("route", inverse_of_another)


@fault(case(variant="first-use"), delay=slow("compute"), alone=True)
def gradients_leave_at_first_use(program: Program) -> None:
    """Gradients leave with the first micro-batch that uses a row, and miss what later ones add."""

    def first_is_last(context: Context, routes: Read[Routes]) -> Routes:
        tables = []
        for table in routes.tables:
            slots = [table.slots(i) for i in range(context.config.window_micro_batches)]
            rows = [torch.arange(each.start, each.stop) for each in slots]
            tables.append(replace(table, gradients=RowDist(rows, table.splits)))
        received = [replace(each, last_use=None, gradient_splits=each.splits) for each in routes.received]
        return replace(routes, tables=tables, received=received)

    program.after("route", first_is_last)


@fault(case(replicas=2))
def replicas_keep_their_gradients(program: Program) -> None:
    """Gradients are not added up over the replicas of a part."""

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


@fault(case(replicas=2))
def replicas_in_different_orders(program: Program) -> None:
    """Replicas hold the same rows in different orders when their gradients are added up."""

    def own_order(context: Context, routes: Read[Routes]) -> Routes:
        received = []
        for each in routes.received:
            first, *others = each.replica_keys
            if context.replica:  # two rows of one rank's part, so that no message has another length
                first = torch.cat([first[:2].flip(0), first[2:]])
            received.append(replace(each, replica_keys=[first, *others]))
        return replace(routes, received=received)

    program.after("route", own_order)


@fault(case(world_size=4, nodes=2))
def relay_hands_on_in_reverse(program: Program) -> None:
    """A relay hands the rows of its node on in the wrong order."""

    def reverse(routes: Update[Routes]) -> None:
        for relay in routes.relays:
            for rows in relay.sent.rows:
                rows.copy_(rows.flip(0))

    program.after("route", reverse)


@fault(case(world_size=4, nodes=2))
def relay_adds_to_another_row(program: Program) -> None:
    """A relay adds the gradients of one rank of its node to one row."""

    def another(routes: Update[Routes]) -> None:
        for relay in routes.relays:
            for rows, splits in zip(relay.gradients.rows, relay.gradients.splits, strict=True):
                rows[len(rows) - splits[-1] :] = rows[:1]

    program.after("route", another)


@fault(case(world_size=4, variant="first-use", nodes=2))
def sums_of_a_node_rounded(program: Program) -> None:
    """Sums that wait in a relay for a later micro-batch are rounded to float32."""

    def rounded(relay_sums: Update[From[RelaySums]], micro_batch: int) -> None:
        for sums in relay_sums:
            sums.copy_(sums.float())

    program.before("gradient_exchange", rounded)


@fault(
    case(replicas=2),
    schedule=lambda schedule: schedule.without_edge("sparse_update", Edge("replica_reduce", "all")),
    delay=slow("replica_reduce"),
)
def update_before_replica_reduction(program: Program) -> None:
    """Rows are updated without waiting for the gradients of other replicas.

    Means begin at zero, so that an update which comes too early has something to take.
    """

    def zeroed(context: Context, owned: Read[OwnedRows]) -> MeanGradient:
        sizes = zip(owned.tables, context.tables.groups, strict=True)
        return MeanGradient([torch.zeros(len(t.keys), g.table.dim, dtype=torch.float32) for t, g in sizes])

    program.after("retrieve", zeroed)


@fault(
    case(),
    schedule=lambda schedule: schedule.without_edge("dense_reduce", Edge("compute", "all")).with_edges(
        "dense_reduce", Edge("route")
    ),
    delay=slow("compute", 2),
    source="NVIDIA/Megatron-LM#1012",
)
def reduce_before_last_micro_batch(program: Program) -> None:
    """Dense gradients are reduced before the window's computation has ended.

    Losses begin at zero, so that a reduction which comes too early has something to send.
    """

    def zeroed(losses: Write[Losses]) -> None:
        for micro_batch in range(program.config.window_micro_batches):
            losses[micro_batch] = torch.zeros(1, dtype=torch.float32)

    program.after("route", zeroed)


@fault(case(variant="early-dense"))
def early_gradients_before_backward(program: Program) -> None:
    """The gradients that backward completes first are reduced before the last backward has completed them."""

    def at_once(micro_batch: int, dense: Read[Dense]) -> None:
        if micro_batch == program.config.window_micro_batches - 1:
            dense.flight.early.completed()
            time.sleep(0.15)  # the reduction has taken what there was

    program.before("compute", at_once)


@fault(case(variant="scale", replicas=2), delay=slow("gradient_exchange"))
def replica_reduction_after_the_first_use(program: Program) -> None:
    """Gradients are added up over the replicas before the last micro-batch that uses their rows."""

    def too_early(routes: Read[Routes]) -> Routes:
        received = [
            replace(each, replica_last_use=[torch.zeros_like(last) for last in each.replica_last_use])
            for each in routes.received
        ]
        return replace(routes, received=received)

    program.after("route", too_early)


@fault(case(), of="schedule", delay=slow("write_back"), source="meta-pytorch/torchrec#2598")
def read_before_write_back(schedule: Schedule) -> Schedule:
    """Retrieval of batch t does not wait for the write-back of batch t-2."""
    return schedule.without_edge("retrieve", Edge("write_back", batch=2))


@fault(case(), of="schedule", delay=slow("sparse_update"))
def copy_before_update(schedule: Schedule) -> Schedule:
    """Kept rows are copied without waiting for the update of batch t-1."""
    return schedule.without_edge("copy_kept_rows", Edge("sparse_update", batch=1))


@fault(case(variant="scale", replicas=2), of="schedule", delay=slow("gradient_exchange"))
def replica_reduction_before_the_gradients(schedule: Schedule) -> Schedule:
    """Replicas do not wait for the gradients of the micro-batch after which they are reduced."""
    # The rows are there to be reduced; only their gradients are not.
    without = schedule.without_edge("replica_reduce", Edge("gradient_exchange", "same"))
    return without.with_edges("replica_reduce", Edge("compute", "same"))
