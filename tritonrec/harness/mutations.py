"""Planted bugs: each breaks the promise in one place, and `tritonrec verify --mutations` must notice.

A bug in the schedule is run with the check switched off, so that its effect must show in the bits; whether
the check alone would have refused it is reported beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .. import ops
from ..data import JaggedBatch
from ..pipeline import Edge, Schedule, Task, Window, WindowProgram
from ..pipeline.routes import Leg
from .cases import Case
from .variants import RESTART


@dataclass(frozen=True)
class Plant:
    """How a bug is put in: by changing the program, the schedule, or the timing that brings it out."""

    program: Callable[[WindowProgram], None] | None = None
    schedule: Callable[[Schedule], Schedule] | None = None
    delay: Callable[[Task], float] | None = None


@dataclass(frozen=True)
class Mutation:
    """A planted bug and the case in which it must show."""

    name: str
    description: str
    case: Case
    plant: Plant


def plant(name: str) -> Plant:
    """The plant of the mutation called `name`."""
    return next(mutation.plant for mutation in MUTATIONS if mutation.name == name)


def _case(mode="nestpipe", world_size=2, micro_batches=3, optimizer="adam", consistency="batch") -> Case:
    return Case(mode, consistency, world_size, micro_batches, False, optimizer, steps=5)


def _no_synchronisation(program: WindowProgram) -> None:
    program.actions["synchronise"] = lambda window, _=None: None


def _wrong_rows(program: WindowProgram) -> None:
    def synchronise(window: Window, _: int | None = None) -> None:
        active = program._buffers[(window.number - 1) % 2]
        if active is not None:
            for before, table in zip(active.tables, window.tables, strict=True):
                here, there = ops.intersect(before.keys, table.keys)
                ops.scatter_rows(table.buffer, there, ops.gather_rows(before.buffer, here.flip(0)))

    program.actions["synchronise"] = synchronise


def _scale_leaving(window: Window, micro_batch: int, factor: int) -> None:
    """Multiply the gradients of the first table that leave with a micro-batch."""
    table = window.tables[0]
    assert table.gradients is not None
    table.gradients[table.asked.leaving.rows[micro_batch]] *= factor


def _lost_gradient(program: WindowProgram) -> None:
    add = program.actions["gradient_exchange"]

    def gradient_exchange(window: Window, micro_batch: int | None = None) -> None:
        if micro_batch == program.config.micro_batches - 1:
            _scale_leaving(window, micro_batch, 0)
        add(window, micro_batch)

    program.actions["gradient_exchange"] = gradient_exchange


def _gradient_twice(program: WindowProgram) -> None:
    add = program.actions["gradient_exchange"]

    def gradient_exchange(window: Window, micro_batch: int | None = None) -> None:
        if micro_batch == 1:
            _scale_leaving(window, micro_batch, 2)
        add(window, micro_batch)

    program.actions["gradient_exchange"] = gradient_exchange


def _update(program: WindowProgram, window: Window, step: int) -> None:
    """Update the first table's rows from what has been summed so far."""
    table = window.tables[0]
    assert table.row_gradient is not None
    gradient = program.sums.mean(table.row_gradient, window.row_terms)
    optimizer = program.tables.groups[0].optimizer
    optimizer.update(table.buffer, torch.arange(len(table.keys)), gradient, step)


def _update_inside_window(program: WindowProgram) -> None:
    add = program.actions["gradient_exchange"]

    def gradient_exchange(window: Window, micro_batch: int | None = None) -> None:
        add(window, micro_batch)
        if micro_batch == 0:
            sums = window.tables[0].row_gradient
            assert sums is not None
            _update(program, window, window.update + 1)
            sums.zero_()

    program.actions["gradient_exchange"] = gradient_exchange


def _float_sums(program: WindowProgram) -> None:
    def add_rows(values: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, name: str) -> None:
        if values.dtype == torch.int64:
            ops.segment_sum(values, rows, len(out), level="batch", out=out)
        else:
            out += ops.to_grid(ops.segment_sum(values, rows, len(out), level="window"))

    program.sums.add = add_rows  # type: ignore[method-assign]


def _sums_of_four_bytes(program: WindowProgram) -> None:
    exchange = program.sums.exchange

    def narrow(window, over, values, *rest) -> None:
        exchange(window, over, values.to(torch.int32).to(torch.int64), *rest)

    program.sums.exchange = narrow  # type: ignore[method-assign, assignment]


def _initial_by_arrival(program: WindowProgram) -> None:
    table = program.tables.groups[0].table
    lookup = table.lookup

    def by_arrival(keys: torch.Tensor, *rest):
        new, before = keys[table.find(keys) < 0], len(table)
        found = lookup(keys, *rest)
        if new.numel():
            values = table.read(table.find(new), new)
            places = torch.arange(before, before + len(new))
            values[:, : table.dim] = ops.initial_rows(table.seed, 0, places, table.dim, table.scale)
            table.write(new, values)
        return found

    table.lookup = by_arrival  # type: ignore[method-assign,assignment]


def _stale_dense_parameter(program: WindowProgram) -> None:
    update = program.actions["dense_update"]

    def dense_update(window: Window, _: int | None = None) -> None:
        name = next(iter(window.dense))
        if window.step == 2 and program.communicators.rank == 1:
            kept = program.dense.rows[name].clone()
            parameter = program.dense.parameters[name].detach().clone()
            update(window)
            program.dense.rows[name].copy_(kept)
            program.dense.parameters[name].data.copy_(parameter)
        else:
            update(window)

    program.actions["dense_update"] = dense_update


def _local_token_count(program: WindowProgram) -> None:
    route = program.actions["route"]

    def local(window: Window, _: int | None = None) -> None:
        route(window)
        window.terms = window.row_terms = sum(batch.loss_terms for batch in window.batches)

    program.actions["route"] = local


def _correction_per_micro_batch(program: WindowProgram) -> None:
    def sparse_update(window: Window, _: int | None = None) -> None:
        _update(program, window, (window.update + 1) * program.config.micro_batches)

    program.actions["sparse_update"] = sparse_update


def _one_buffer(program: WindowProgram) -> None:
    retrieve = program.actions["retrieve"]

    def retrieve_into_active(window: Window, _: int | None = None) -> None:
        active = program._buffers[(window.number - 1) % 2]
        retrieve(window)
        if active is not None:
            # The rows land where batch t-1 is still training.
            busy, rows = active.tables[0].buffer, window.tables[0].buffer
            count = min(len(busy), len(rows))
            busy[:count] = rows[:count]

    program.actions["retrieve"] = retrieve_into_active


def _dropout_by_position(program: WindowProgram) -> None:
    forward = program.model.forward

    def by_position(batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        return forward(replace(batch, sample_ids=torch.arange(batch.num_samples)), rows, seed)

    program.model.forward = by_position


def _cold_rows_not_rounded(program: WindowProgram) -> None:
    program.tables.groups[0].table.round_cold = lambda values, cold: None  # type: ignore[method-assign]


def _mean_over_one_batch(program: WindowProgram) -> None:
    route = program.actions["route"]

    def of_the_last(window: Window, _: int | None = None) -> None:
        route(window)
        window.terms = window.row_terms = max(window.terms // len(window.batches), 1)

    program.actions["route"] = of_the_last


def _restart_without_scores(program: WindowProgram) -> None:
    table = program.tables.groups[0].table
    load_state = table.load_state

    def forgetful(state: dict[str, dict[str, torch.Tensor]]) -> None:
        rows = {name: column for name, column in state["rows"].items() if name in ("keys", "rows")}
        rows |= {name: torch.zeros_like(column) for name, column in state["rows"].items() if name not in rows}
        load_state({**state, "rows": rows})

    table.load_state = forgetful  # type: ignore[method-assign]


def _ids_of_merged_tables_meet(program: WindowProgram) -> None:
    for group in program.tables.groups:
        group.layout.pack = lambda member, ids, feature: ids  # type: ignore[method-assign]


def _rows_in_reverse(program: WindowProgram) -> None:
    route = program.actions["route"]

    def inverse_of_another(window: Window, _: int | None = None) -> None:
        route(window)
        for table in window.tables:
            table.asked.inverse[-1] = table.asked.inverse[-1].flip(0)

    program.actions["route"] = inverse_of_another


def _evicts_rows_in_a_buffer(program: WindowProgram) -> None:
    table = program.tables.groups[0].table
    lookup = table.lookup

    def forgetful(keys, step, all_reduce=None):
        table._sweeps.recent = table._sweeps.recent[:0]
        return lookup(keys, step, all_reduce)

    table.lookup = forgetful  # type: ignore[method-assign]


def _gradients_leave_at_first_use(program: WindowProgram) -> None:
    route = program.actions["route"]

    def first_is_last(window: Window, _: int | None = None) -> None:
        route(window)
        for table in window.tables:
            slots = [table.asked.slots(i) for i in range(len(window.micro_batches))]
            rows = [torch.arange(each.start, each.stop) for each in slots]
            table.asked.leaving = Leg(rows, table.asked.arriving)
            table.received_last_use = None

    program.actions["route"] = first_is_last


def _last_rows_stay_in_the_buffer(program: WindowProgram) -> None:
    program.finish = lambda window: None  # type: ignore[method-assign]


def _dropped_rows_not_written_back(program: WindowProgram) -> None:
    bring_home = program._bring_home

    def only_at_the_end(window: Window, counted: Window, kept_by: Window | None = None) -> None:
        if kept_by is None:
            bring_home(window, counted)

    program._bring_home = only_at_the_end  # type: ignore[method-assign]


def _replicas_keep_their_gradients(program: WindowProgram) -> None:
    def alone(window: Window, _: int | None = None) -> None:
        for table in window.tables:
            assert table.row_gradient is not None
            mean = program.sums.mean(table.row_gradient, window.row_terms)
            table.mean_gradient = torch.zeros(len(table.keys), mean.shape[1])
            table.mean_gradient[table.places[program.communicators.replica.rank]] = mean

    program.actions["replica_reduce"] = alone


def _replicas_in_different_orders(program: WindowProgram) -> None:
    distinct = program._distinct

    def own_order(table):
        found = distinct(table)
        order = torch.arange(len(table.keys))
        if program.communicators.replica.rank:  # two rows of one share, so that no message has another length
            order[:2] = order[:2].flip(0)
        table.keys = table.keys[order]
        table.places = [torch.argsort(order)[places] for places in table.places]
        return found

    program._distinct = own_order  # type: ignore[method-assign]


def _means_begin_at_zero(program: WindowProgram) -> None:
    """So that an update which comes too early has something to take."""
    retrieve = program.actions["retrieve"]

    def zeroed(window: Window, _: int | None = None) -> None:
        retrieve(window)
        for group, table in zip(program.tables.groups, window.tables, strict=True):
            table.mean_gradient = torch.zeros(len(table.keys), group.table.dim)

    program.actions["retrieve"] = zeroed


def _slow(stage: str, micro_batch: int | None = None) -> Callable[[Task], float]:
    """Hold `stage` back long enough for whoever fails to wait for it to overtake."""

    def delay(task: Task) -> float:
        return 0.15 if task.stage == stage and micro_batch in (None, task.micro_batch) else 0.0

    return delay


MUTATIONS = [
    Mutation(
        "no-buffer-synchronisation",
        "rows of K(t-1) & K(t) are not copied into the prefetch buffer",
        _case(),
        Plant(_no_synchronisation),
    ),
    Mutation(
        "synchronisation-of-wrong-rows",
        "the copied rows land at other keys",
        _case(),
        Plant(_wrong_rows),
    ),
    Mutation(
        "read-before-write-back",
        "retrieval of batch t does not wait for the write-back of batch t-2",
        _case(),
        Plant(
            schedule=lambda schedule: schedule.without_edge("retrieve", Edge("write_back", batch=2)),
            delay=_slow("write_back"),
        ),
    ),
    Mutation(
        "synchronise-before-update",
        "the buffers are synchronised without waiting for the update of batch t-1",
        _case(),
        Plant(
            schedule=lambda schedule: schedule.without_edge("synchronise", Edge("sparse_update", batch=1)),
            delay=_slow("sparse_update"),
        ),
    ),
    Mutation(
        "reduce-before-last-micro-batch",
        "dense gradients are reduced before the window's computation has ended",
        _case(),
        Plant(
            schedule=lambda schedule: schedule.without_edge("dense_reduce", Edge("compute", "all")),
            delay=_slow("compute", 2),
        ),
    ),
    Mutation(
        "lost-micro-batch-gradient",
        "embedding gradients of the last micro-batch are dropped",
        _case(mode="fwp", optimizer="sgd"),
        Plant(_lost_gradient),
    ),
    Mutation(
        "gradient-added-twice",
        "embedding gradients of micro-batch 1 count twice",
        _case(mode="dbp", optimizer="rowwise_adagrad"),
        Plant(_gradient_twice),
    ),
    Mutation(
        "update-inside-window",
        "rows are updated after the first micro-batch instead of once per window",
        _case(mode="dbp", optimizer="sgd"),
        Plant(_update_inside_window),
    ),
    Mutation(
        "float-sums",
        "contributions are added in float32 and rounded to the grid afterwards",
        _case(micro_batches=2),
        Plant(_float_sums),
    ),
    Mutation(
        "sums-of-four-bytes",
        "gradient sums travel as int32 instead of in the bytes they need",
        _case(),
        Plant(_sums_of_four_bytes),
    ),
    Mutation(
        "initial-value-by-arrival",
        "initial rows depend on the order of arrival instead of the key",
        _case(),
        Plant(_initial_by_arrival),
    ),
    Mutation(
        "stale-dense-parameter",
        "rank 1 misses one update of one parameter",
        _case(),
        Plant(_stale_dense_parameter),
    ),
    Mutation(
        "local-token-count",
        "gradients are divided by this rank's tokens instead of the global batch's",
        _case(),
        Plant(_local_token_count),
    ),
    Mutation(
        "bias-correction-per-micro-batch",
        "Adam counts micro-batches instead of steps",
        _case(),
        Plant(_correction_per_micro_batch),
    ),
    Mutation(
        "one-buffer",
        "rows of batch t are loaded over those batch t-1 is training on",
        _case(),
        Plant(_one_buffer, delay=_slow("compute")),
    ),
    Mutation(
        "dropout-by-place",
        "the dropout mask goes by a sample's place in its micro-batch instead of by the sample",
        _case(),
        Plant(_dropout_by_position),
    ),
    Mutation(
        "ids-of-merged-tables-meet",
        "equal ids of two merged tables share a row",
        replace(_case(), variant="merged"),
        Plant(_ids_of_merged_tables_meet),
    ),
    Mutation(
        "rows-handed-out-in-reverse",
        "after dedup the rows go back to the occurrences in the wrong order",
        replace(_case(), variant="dedup-exchange"),
        Plant(_rows_in_reverse),
    ),
    Mutation(
        "evicts-rows-in-a-buffer",
        "a sweep takes rows that the window before still trains on",
        replace(_case(), variant="lfu", steps=8),
        Plant(_evicts_rows_in_a_buffer),
    ),
    Mutation(
        "cold-rows-not-rounded",
        "rows kept in half precision stay float32 in the buffers",
        replace(_case(), variant="heat"),
        Plant(_cold_rows_not_rounded),
    ),
    Mutation(
        "accumulation-divides-by-one-batch",
        "accumulated gradients are divided by the terms of one batch",
        replace(_case(), variant="accumulate", steps=6),
        Plant(_mean_over_one_batch),
    ),
    Mutation(
        "restart-without-scores",
        "scores and heat start from zero after a restart",
        replace(_case(), variant=RESTART, steps=8, restart=1),
        Plant(_restart_without_scores),
    ),
    Mutation(
        "gradients-leave-at-first-use",
        "gradients leave with the first micro-batch that uses a row, and miss what later ones add",
        replace(_case(), variant="first-use"),
        Plant(_gradients_leave_at_first_use),
    ),
    Mutation(
        "last-rows-stay-in-the-buffer",
        "rows that stayed in a buffer do not come home when the pipeline runs empty",
        replace(_case(), variant="skip-fetch"),
        Plant(_last_rows_stay_in_the_buffer),
    ),
    Mutation(
        "dropped-rows-not-written-back",
        "rows that a batch does without are taken for kept ones and never written back",
        replace(_case(), variant="scale", steps=8),
        Plant(_dropped_rows_not_written_back),
    ),
    Mutation(
        "fetch-before-dropped-rows-are-home",
        "retrieval of batch t does not wait until batch t-1 has brought home what it does without",
        replace(_case(), variant="scale", steps=12),
        Plant(
            schedule=lambda schedule: schedule.without_edge("retrieve", Edge("write_back", batch=1)),
            delay=_slow("write_back"),
        ),
    ),
    Mutation(
        "replicas-keep-their-gradients",
        "gradients are not added up over the replicas of a part",
        replace(_case(), replicas=2),
        Plant(_replicas_keep_their_gradients),
    ),
    Mutation(
        "replicas-in-different-orders",
        "replicas hold the same rows in different orders when their gradients are added up",
        replace(_case(), replicas=2),
        Plant(_replicas_in_different_orders),
    ),
    Mutation(
        "update-before-replicas-meet",
        "rows are updated without waiting for the gradients of other replicas",
        replace(_case(), replicas=2),
        Plant(
            _means_begin_at_zero,
            schedule=lambda schedule: schedule.without_edge("sparse_update", Edge("replica_reduce")),
            delay=_slow("replica_reduce"),
        ),
    ),
    Mutation(
        "lost-gradient-at-window-level",
        "as above, where the reference is the same cut run in turn",
        _case(mode="fwp", optimizer="sgd", consistency="window"),
        Plant(_lost_gradient),
    ),
]
