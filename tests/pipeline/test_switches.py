"""Promise: first use, taper and skipped fetches save bytes and reads; verify compares their bits."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from trainer_parts import batches, parts, same, state

from tritonrec.distributed import Communicators
from tritonrec.embedding import Eviction, PrecisionTiers, RowOptimizer, TablePolicy
from tritonrec.pipeline import (
    FWP,
    NESTPIPE,
    Edge,
    ExchangeConfig,
    ScheduleError,
    Trainer,
    WindowConfig,
    check,
    keep_rows,
    with_replicas,
)
from tritonrec.pipeline.places import Buffer, KeptRows
from tritonrec.pipeline.program import Program
from tritonrec.pipeline.stages.update import update_rows
from tritonrec.settings import with_values

POLICY = TablePolicy(Eviction("lru", capacity=40, every=2), admission=2, precision=PrecisionTiers(3, every=3))
TWO_BUFFERS = ("dbp", "nestpipe")


def run(mode, made=None, step_by_step=False, **window):
    made = made or parts()
    with Trainer(*made, Communicators.local(), mode, with_values(WindowConfig(seed=4), window)) as training:
        if step_by_step:
            for batch in batches():
                training.step(batch)
        else:
            list(training.run(batches()))
        return state(made), training.counts


def test_first_use_sends_what_one_micro_batch_would():
    _, whole = run("nestpipe", micro_batches=1)
    for count in (2, 4, 8):
        _, plain = run("nestpipe", micro_batches=count, dedup="exchange")
        _, first = run("nestpipe", micro_batches=count, first_use=True)
        assert first.exchanged == whole.exchanged < plain.exchanged


def test_one_rank_deduplicates_its_window_at_once_unless_sums_have_an_order():
    _, whole = run("nestpipe", micro_batches=1)
    _, at_once = run("nestpipe", micro_batches=4)
    _, in_order = run("nestpipe", micro_batches=4, consistency="window")
    assert at_once.exchanged == at_once.read == whole.exchanged < in_order.exchanged
    for counts in (at_once, in_order):  # one rank gets what it sends
        assert counts.received == counts.exchanged > 0


@pytest.mark.parametrize("mode", TWO_BUFFERS)
def test_rows_that_stay_are_neither_read_nor_written(mode):
    expected, plain = run(mode, micro_batches=2)
    got, skipped = run(mode, micro_batches=2, skip_fetch=True)
    assert same(got, expected) and skipped.kept == plain.kept > 0
    assert skipped.read == skipped.written == plain.read - plain.kept


@pytest.mark.parametrize("mode", TWO_BUFFERS)
def test_between_single_steps_all_rows_are_home(mode):
    expected, _ = run(mode, micro_batches=2)
    got, counts = run(mode, micro_batches=2, step_by_step=True, skip_fetch=True)
    assert same(got, expected) and counts.kept == 0


KEEPING = keep_rows(NESTPIPE)


def test_a_row_neither_fetched_nor_kept_and_a_row_lost_are_found():
    def without(stage, rows):
        return KEEPING._with(stage, touches=tuple(a for a in KEEPING[stage].touches if a.rows != rows))

    with pytest.raises(ScheduleError, match=r"exchange\(1, 0\) reads buffer\[1\], which holds no row"):
        check(without("copy_kept_rows", "kept"), 2)
    with pytest.raises(ScheduleError, match="never reaches the tables"):
        check(without("write_back", "dropped"), 2)


def test_gradients_that_leave_before_their_last_use_are_found():
    touches = tuple(replace(a, micro_batches="own") for a in NESTPIPE["gradient_exchange"].touches)
    early = tuple(replace(a, micro_batches="from") if a.place == "gradients" else a for a in touches)
    with pytest.raises(ScheduleError, match="gradients"):
        check(NESTPIPE._with("gradient_exchange", touches=early), 3)
    late = tuple(
        replace(a, micro_batches="from") if a.place == "embeddings" else a
        for a in NESTPIPE["compute"].touches
    )
    with pytest.raises(ScheduleError, match="embeddings"):
        check(NESTPIPE._with("compute", touches=late), 3)


def test_keeping_rows_needs_two_buffers():
    with pytest.raises(ValueError, match="'fwp' has no second buffer"):
        keep_rows(FWP)
    for mode in ("reference", "sequential"):
        with pytest.raises(ValueError, match="keeps no rows between batches"):
            Trainer(
                *parts(), Communicators.local(), mode, WindowConfig(exchange=ExchangeConfig(skip_fetch=True))
            )
    assert Edge("write_back", batch=1) in KEEPING["retrieve"].after


@pytest.mark.parametrize(
    "schedule", [keep_rows(NESTPIPE), with_replicas(NESTPIPE)], ids=["keeps", "replicas"]
)
def test_a_schedule_that_does_not_go_with_the_window_is_refused(schedule):
    with pytest.raises(ValueError, match="it must be made by schedule_of"):
        Trainer(*parts(), Communicators.local(), "nestpipe", WindowConfig(2), schedule=schedule)
    with pytest.raises(ValueError, match=r"keeps rows: False.*skip_fetch=True"):
        Trainer(
            *parts(),
            Communicators.local(),
            "nestpipe",
            WindowConfig(exchange=ExchangeConfig(skip_fetch=True)),
            schedule=NESTPIPE,
        )


def test_a_failed_window_leaves_no_gradient_behind():
    def trained(made):
        config = WindowConfig(2, "window", seed=4)
        with Trainer(*made, Communicators.local(), "nestpipe", config) as training:
            list(training.run(batches()))
        return state(made)

    made = parts()
    model, _, dense = made
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # what a window that failed half way has left
    assert same(trained((model, parts()[1], dense)), trained(parts()))


def test_rows_of_keys_that_are_not_admitted_stay_as_they_began():
    rows, handles = torch.zeros(3, 2), torch.tensor([0, -1, 1])
    group = SimpleNamespace(
        table=SimpleNamespace(admits_all=False, requires_grad=True), optimizer=RowOptimizer("sgd", lr=1.0)
    )
    owned = SimpleNamespace(keys=handles, handles=handles, count=None, low_precision=None)
    context = SimpleNamespace(device=rows.device, copies=1, tables=SimpleNamespace(groups=[group]))
    update_rows(context, 1, SimpleNamespace(tables=[owned]), [torch.ones(3, 2)], [rows])
    assert rows.tolist() == [[-1.0, -1.0], [0.0, 0.0], [-1.0, -1.0]]


class Noted(dict):
    """Places by kind."""

    errors = SimpleNamespace(active=nullcontext)


def test_a_stage_may_return_one_place_or_several():
    def one() -> Buffer:
        return ["rows"]

    def two() -> tuple[Buffer, KeptRows]:
        return ["rows"], ["kept"]

    program = SimpleNamespace(run_places={}, context=None, schedule=SimpleNamespace(name="mine"))
    for function, expected in ((one, {Buffer: ["rows"]}), (two, {Buffer: ["rows"], KeptRows: ["kept"]})):
        places = Noted()
        Program.bind(program, function, "retrieve")(places)
        assert places == expected
