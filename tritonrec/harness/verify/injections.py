"""What injected faults do: to the program, the schedule, or the timing that brings them out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ... import ops
from ...data import JaggedBatch
from ...pipeline import Schedule, Task, Window, WindowProgram
from ...pipeline.routes import Leg


@dataclass(frozen=True)
class Injection:
    """How a bug is put in: by changing the program, the schedule, or the timing that brings it out."""

    program: Callable[[WindowProgram], None] | None = None
    schedule: Callable[[Schedule], Schedule] | None = None
    delay: Callable[[Task], float] | None = None


def no_copy_of_kept_rows(program: WindowProgram) -> None:
    program.actions["copy_kept_rows"] = lambda window, _=None: None


def wrong_rows(program: WindowProgram) -> None:
    def copy_kept_rows(window: Window, _: int | None = None) -> None:
        active = program._buffers[(window.number - 1) % 2]
        if active is not None:
            for before, table in zip(active.tables, window.tables, strict=True):
                here, there = ops.intersect(before.keys, table.keys)
                ops.scatter_rows(table.buffer, there, ops.gather_rows(before.buffer, here.flip(0)))

    program.actions["copy_kept_rows"] = copy_kept_rows


def _scale_leaving(window: Window, micro_batch: int, factor: int) -> None:
    """Multiply the gradients of the first table that leave with a micro-batch."""
    table = window.tables[0]
    assert table.gradients is not None
    table.gradients[table.asked.leaving.rows[micro_batch]] *= factor


def lost_gradient(program: WindowProgram) -> None:
    add = program.actions["gradient_exchange"]

    def gradient_exchange(window: Window, micro_batch: int | None = None) -> None:
        if micro_batch == program.config.micro_batches - 1:
            _scale_leaving(window, micro_batch, 0)
        add(window, micro_batch)

    program.actions["gradient_exchange"] = gradient_exchange


def gradient_twice(program: WindowProgram) -> None:
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


def update_inside_window(program: WindowProgram) -> None:
    add = program.actions["gradient_exchange"]

    def gradient_exchange(window: Window, micro_batch: int | None = None) -> None:
        add(window, micro_batch)
        if micro_batch == 0:
            sums = window.tables[0].row_gradient
            assert sums is not None
            _update(program, window, window.update + 1)
            sums.zero_()

    program.actions["gradient_exchange"] = gradient_exchange


def float_sums(program: WindowProgram) -> None:
    def add_rows(values: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, name: str) -> None:
        if values.dtype == torch.int64:
            ops.segment_sum(values, rows, len(out), consistency="batch", out=out)
        else:
            out += ops.to_fixed_point(ops.segment_sum(values, rows, len(out), consistency="window"))

    program.sums.add = add_rows  # type: ignore[method-assign]


def sums_of_four_bytes(program: WindowProgram) -> None:
    exchange = program.sums.exchange

    def narrow(window, over, values, *rest) -> None:
        exchange(window, over, values.to(torch.int32).to(torch.int64), *rest)

    program.sums.exchange = narrow  # type: ignore[method-assign, assignment]


def initial_by_arrival(program: WindowProgram) -> None:
    table = program.tables.groups[0].table
    lookup = table.lookup

    def by_arrival(keys: torch.Tensor, *rest):
        new, before = keys[table.find(keys) < 0], len(table)
        found = lookup(keys, *rest)
        if new.numel():
            values = table.gather(table.find(new), new)
            places = torch.arange(before, before + len(new))
            values[:, : table.dim] = ops.initial_rows(table.seed, 0, places, table.dim, table.scale)
            table.update(table.find(new), values)
        return found

    table.lookup = by_arrival  # type: ignore[method-assign,assignment]


def stale_dense_parameter(program: WindowProgram) -> None:
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


def local_token_count(program: WindowProgram) -> None:
    route = program.actions["route"]

    def local(window: Window, _: int | None = None) -> None:
        route(window)
        window.terms = window.row_terms = sum(batch.loss_terms for batch in window.batches)

    program.actions["route"] = local


def correction_per_micro_batch(program: WindowProgram) -> None:
    def sparse_update(window: Window, _: int | None = None) -> None:
        _update(program, window, (window.update + 1) * program.config.micro_batches)

    program.actions["sparse_update"] = sparse_update


def one_buffer(program: WindowProgram) -> None:
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


def dropout_by_position(program: WindowProgram) -> None:
    forward = program.model.forward

    def by_position(batch: JaggedBatch, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        return forward(replace(batch, sample_ids=torch.arange(batch.num_samples)), rows, seed)

    program.model.forward = by_position


def low_precision_not_rounded(program: WindowProgram) -> None:
    table = program.tables.groups[0].table
    table.round_low_precision = lambda values, low_precision: None  # type: ignore[method-assign]


def mean_over_one_batch(program: WindowProgram) -> None:
    route = program.actions["route"]

    def of_the_last(window: Window, _: int | None = None) -> None:
        route(window)
        window.terms = window.row_terms = max(window.terms // len(window.batches), 1)

    program.actions["route"] = of_the_last


def restart_without_scores(program: WindowProgram) -> None:
    table = program.tables.groups[0].table
    load_state = table.load_state

    def forgetful(state: dict[str, dict[str, torch.Tensor]]) -> None:
        rows = {name: column for name, column in state["rows"].items() if name in ("keys", "rows")}
        rows |= {name: torch.zeros_like(column) for name, column in state["rows"].items() if name not in rows}
        load_state({**state, "rows": rows})

    table.load_state = forgetful  # type: ignore[method-assign]


def ids_of_merged_tables_meet(program: WindowProgram) -> None:
    for group in program.tables.groups:
        group.layout.pack = lambda member, ids, feature: ids  # type: ignore[method-assign]


def rows_in_reverse(program: WindowProgram) -> None:
    route = program.actions["route"]

    def inverse_of_another(window: Window, _: int | None = None) -> None:
        route(window)
        for table in window.tables:
            table.asked.inverse[-1] = table.asked.inverse[-1].flip(0)

    program.actions["route"] = inverse_of_another


def evicts_rows_in_a_buffer(program: WindowProgram) -> None:
    table = program.tables.groups[0].table
    lookup = table.lookup

    def forgetful(keys, step, all_reduce=None):
        pinned = table._metadata.pinned
        pinned.last = pinned.last[:0]
        return lookup(keys, step, all_reduce)

    table.lookup = forgetful  # type: ignore[method-assign]


def gradients_leave_at_first_use(program: WindowProgram) -> None:
    route = program.actions["route"]

    def first_is_last(window: Window, _: int | None = None) -> None:
        route(window)
        for table in window.tables:
            slots = [table.asked.slots(i) for i in range(len(window.micro_batches))]
            rows = [torch.arange(each.start, each.stop) for each in slots]
            table.asked.leaving = Leg(rows, table.asked.arriving)
            table.received_last_use = None

    program.actions["route"] = first_is_last


def last_rows_stay_in_the_buffer(program: WindowProgram) -> None:
    program.finish = lambda window: None  # type: ignore[method-assign]


def dropped_rows_not_written_back(program: WindowProgram) -> None:
    bring_home = program._bring_home

    def only_at_the_end(window: Window, counted: Window, kept_by: Window | None = None) -> None:
        if kept_by is None:
            bring_home(window, counted)

    program._bring_home = only_at_the_end  # type: ignore[method-assign]


def replicas_keep_their_gradients(program: WindowProgram) -> None:
    def alone(window: Window, _: int | None = None) -> None:
        for table in window.tables:
            assert table.row_gradient is not None and table.mean_gradient is not None
            mean = program.sums.mean(table.row_gradient, window.row_terms)
            table.mean_gradient.zero_()[table.places[program.communicators.replica.rank]] = mean

    program.actions["replica_reduce"] = alone


def replicas_in_different_orders(program: WindowProgram) -> None:
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


def means_begin_at_zero(program: WindowProgram) -> None:
    """So that an update which comes too early has something to take."""
    retrieve = program.actions["retrieve"]

    def zeroed(window: Window, _: int | None = None) -> None:
        retrieve(window)
        for table in window.tables:
            assert table.mean_gradient is not None
            table.mean_gradient.zero_()

    program.actions["retrieve"] = zeroed


def replica_reduction_after_the_first_use(program: WindowProgram) -> None:
    meetings = program._meetings

    def too_early(table):
        table.replica_last_use = [torch.zeros_like(last) for last in table.replica_last_use]
        return meetings(table)

    program._meetings = too_early  # type: ignore[method-assign]


def slow(stage: str, micro_batch: int | None = None) -> Callable[[Task], float]:
    """Hold `stage` back long enough for whoever fails to wait for it to overtake."""

    def delay(task: Task) -> float:
        return 0.15 if task.stage == stage and micro_batch in (None, task.micro_batch) else 0.0

    return delay
