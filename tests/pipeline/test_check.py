"""Promise: a schedule that could compute something else than its stages one after another is refused."""

from dataclasses import replace
from importlib import import_module
from itertools import product
from textwrap import indent

import pytest
from schedules import FORMS, NORM, REPLICAS, WINDOW_LOSS

from tritonrec.pipeline import DBP, FWP, NESTPIPE, SCHEDULES, Edge, Schedule, ScheduleError, check
from tritonrec.pipeline.exchange_groups import joined_groups
from tritonrec.pipeline.schedule import (
    SEQUENTIAL,
    with_early_dense,
    with_norm,
    with_replicas,
    with_window_loss,
)
from tritonrec.pipeline.stage import Stage

pytestmark = pytest.mark.smoke
check_module = import_module("tritonrec.pipeline.check")
schedule_module = import_module("tritonrec.pipeline.schedule")


@pytest.mark.parametrize("schedule", FORMS.values(), ids=FORMS)
def test_every_form_is_sound(schedule):
    """With more batches in flight, without an order of launches, with exchanges that micro-batches share."""
    for count in (1, 2, 8):
        for each in (schedule, replace(schedule, batches_in_flight=7), replace(schedule, ahead=())):
            check(each, count)
        for overlap, ordered in product({False, schedule.overlaps_window}, (False, True)):
            check(schedule, count, joined_groups(count, overlap, ordered).doers)


def needed():
    """Form, stage and edge, what stands in for the edge, and what is said then."""
    for form, stages in (("nestpipe", SCHEDULES["nestpipe"].stages), ("kept nestpipe", KEEPING)):
        for stage in stages:
            for edge in FORMS[form][stage.name].after:
                # `compute` and `dense_update` share a lane, whose order already keeps them apart.
                if (stage.name, edge.stage) != ("compute", "dense_update"):
                    yield form, stage.name, edge, None, "may still run|stale row|nobody"
    for form in REPLICAS:
        whole, own = Edge("replica_reduce", "all"), Edge("gradient_exchange", "same")
        yield form, "sparse_update", whole, Edge("compute", "all"), "mean_gradient"
        yield form, "replica_reduce", own, Edge("compute", "same"), "row_gradient"
    for form in NORM:
        yield form, "sparse_update", Edge("gradient_norm"), None, r"sparse_update\(0\) reads"
    for form in WINDOW_LOSS:
        yield form, "represent", Edge("exchange", "same"), None, "represent"


KEEPING = [FORMS["kept nestpipe"][name] for name in ("retrieve", "copy_kept_rows", "write_back")]
NEEDED = list(needed())


@pytest.mark.parametrize(
    ("form", "stage", "edge", "instead", "said"), NEEDED, ids=[f"{e[0]}: {e[2].stage}-{e[1]}" for e in NEEDED]
)
def test_every_edge_is_needed(form, stage, edge, instead, said):
    without = FORMS[form].without_edge(stage, edge)
    with pytest.raises(ScheduleError, match=said):
        check(without if instead is None else without.with_edges(stage, instead), 4)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("form", WINDOW_LOSS)
def test_a_loss_of_the_window_needs_its_stage_and_on_two_lanes_its_edges(form, count):
    schedule = WINDOW_LOSS[form]
    without = replace(schedule, stages=[each for each in schedule.stages if each.name != "window_loss"])
    with pytest.raises(ScheduleError, match="compute waits for window_loss, which never runs"):
        check(without, count)
    # one lane keeps their order without edges: on two lanes it takes them
    apart = schedule.with_stages(replace(schedule["window_loss"], lane="reduce"))
    check(apart, count)
    for stage, edge in [("window_loss", Edge("represent", "all")), ("compute", Edge("window_loss"))]:
        with pytest.raises(ScheduleError, match=f"to {stage}$"):
            check(apart.without_edge(stage, edge), count)


def test_the_schedule_is_drawn_in_the_source():
    every = with_norm(with_replicas(NESTPIPE))
    names = {stage.name for stage in with_early_dense(with_window_loss(every)).stages}
    assert names == {stage.name for stage in schedule_module.STAGES}
    assert indent(every.drawn(), "    ") in schedule_module.__doc__


def test_what_a_switch_adds_does_not_depend_on_the_order_of_switches():
    one, other = with_norm(with_replicas(DBP)), with_replicas(with_norm(DBP))
    for stage, same in zip(one.stages, other.stages, strict=True):
        assert set(stage.after) == set(same.after) and set(stage.touches) == set(same.touches)
        assert stage.name == same.name


def test_a_stage_waits_for_and_takes_nothing_from_a_stage_that_is_absent():
    for schedule in (FWP, DBP, NESTPIPE, SEQUENTIAL, with_replicas(FWP), with_norm(DBP)):
        names = {stage.name for stage in schedule.stages}
        assert {edge.stage for stage in schedule.stages for edge in stage.after} <= names
    update = {each: {a.place for a in each["sparse_update"].touches} for each in (FWP, with_norm(FWP))}
    assert update[with_norm(FWP)] - update[FWP] == {"mean_gradient", "gradient_norm"}


def test_a_table_of_lists_is_the_same_table():
    stages = [replace(each, after=list(each.after), touches=list(each.touches)) for each in FWP.stages]
    lists = Schedule("fwp", stages, 1, ahead=[])
    check(lists, 2)
    assert lists == FWP and hash(lists) == hash(FWP)
    unsound = replace(lists, stages=[*FWP.without_edge("write_back", Edge("sparse_update")).stages])
    with pytest.raises(ScheduleError, match="write_back"):
        check(unsound, 2)


def test_a_race_of_retrieve_and_write_back_is_named():
    missing = NESTPIPE.without_edge("retrieve", Edge("write_back", batch=2))
    with pytest.raises(
        ScheduleError, match=r"retrieve\(4\) writes tables while write_back\(2\).*a row used by batches 2\)"
    ):
        check(missing, 2)


def test_without_the_copy_the_kept_rows_race():
    missing = NESTPIPE.without_stage("copy_kept_rows", instead="retrieve")
    with pytest.raises(ScheduleError, match="write_back"):
        check(missing, 2)


def test_stale_rows_that_nobody_overwrites_are_found():
    # All waits and lanes stay, but `copy_kept_rows` copies nothing.
    no_copy = NESTPIPE._with("copy_kept_rows", touches=())
    with pytest.raises(ScheduleError, match="stale row"):
        check(no_copy, 2)


def test_waiting_for_a_task_queued_behind_is_a_deadlock():
    stuck = NESTPIPE.with_edges("exchange", Edge("gradient_exchange", "previous"))
    with pytest.raises(ScheduleError, match="queued behind it"):
        check(stuck, 2)


def test_an_edge_to_no_stage_is_named():
    with pytest.raises(ScheduleError, match=r"compute waits for no_such_stage, which never runs"):
        check(NESTPIPE.with_edges("compute", Edge("no_such_stage")), 2)


@pytest.mark.parametrize(
    ("stage", "edge"),
    [
        ("retrieve", Edge("compute", "same", 2)),
        ("dense_reduce", Edge("compute")),
        ("h2d", Edge("route", "all")),
    ],
)
def test_an_edge_that_names_micro_batches_wrongly_is_refused(stage, edge):
    with pytest.raises(ScheduleError, match=f"{stage} waits for .* of {edge.stage}, which runs once per"):
        check(NESTPIPE.with_edges(stage, edge), 2)


def test_a_schedule_that_starts_no_batch_is_refused():
    with pytest.raises(ScheduleError, match="none starts"):
        check(replace(NESTPIPE, batches_in_flight=0), 2)


@pytest.mark.parametrize(
    ("missing", "instead", "message"),
    [
        ("write_back", "sparse_update", r"the update of batch 0 never reaches the tables"),
        ("exchange", "copy_kept_rows", r"compute\(0, 0\) reads embeddings\[0, 0\], which nobody has written"),
    ],
)
def test_a_missing_stage_is_found(missing, instead, message):
    schedule = NESTPIPE.without_stage(missing, instead)
    if missing == "exchange":
        edges = tuple(e for e in NESTPIPE["compute"].after if e.stage != "exchange")
        schedule = schedule._with("compute", after=(*edges, Edge("copy_kept_rows")))
    with pytest.raises(ScheduleError, match=message):
        check(schedule, 2)


@pytest.mark.parametrize("lane", ["routing", "lane_of_its_own"])
def test_collectives_of_one_group_are_issued_in_one_order(lane):
    with pytest.raises(ScheduleError, match="communication_group"):
        check(NESTPIPE._with("gradient_exchange", lane=lane), 2)


@pytest.mark.parametrize(
    ("like", "place", "race"),
    [
        ("gradient_exchange", "row_gradient", r"gradient_exchange\(0, 1\) writes row_gradient\[0, 1\]"),
        ("exchange", "embeddings", r"compute\(0, 1\) reads embeddings\[0, 0\]"),
    ],
)
def test_a_stage_beside_later_micro_batches_races_for_what_is_theirs_too(like, place, race):
    """Sums that a later exchange adds to, and rows that a later computation reads."""
    schedule = with_replicas(NESTPIPE)
    as_there = [each for each in schedule[like].touches if each.place == place]
    own = [each for each in schedule["replica_reduce"].touches if each.place != place]
    with pytest.raises(ScheduleError, match=rf"{race} while replica_reduce|replica_reduce.* while {race}"):
        check(schedule._with("replica_reduce", touches=(*own, *as_there)), 2)


def test_removing_an_edge_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="has no edge"):
        FWP.without_edge("compute", Edge("write_back"))


def test_dbp_finishes_a_micro_batch_before_the_next():
    order = [str(task) for task in DBP.tasks(0, 2)]
    assert order.index("gradient_exchange(0, 0)") < order.index("exchange(0, 1)")
    order = [str(task) for task in NESTPIPE.tasks(0, 2)]
    assert order.index("exchange(0, 1)") < order.index("compute(0, 0)")


@pytest.mark.parametrize("moves", [False, True])
def test_micro_batches_are_alike_unless_rows_move_with_each(moves, monkeypatch):
    """So a window of many takes no longer to check than one of a few."""
    counts = []
    for name in ("_no_race", "_launches_in_turn", "_same_values"):
        monkeypatch.setattr(check_module, name, lambda tasks, *given: counts.append(tasks.micro_batches))
    stages = (
        Stage("gather", "a", (), (), moves=True),
        Stage("compute", "b", (), (), per_micro_batch=True, moves=moves),
    )
    check(Schedule(f"moves {moves}", stages, 1), 1000)
    assert counts == [1000 if moves else check_module.MICRO_BATCHES] * 3
