"""Promise: what is proven of a schedule holds for any number of batches, in flight too, and micro-batches."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from tritonrec.pipeline import (
    FWP,
    NESTPIPE,
    SCHEDULES,
    Edge,
    Schedule,
    ScheduleError,
    Task,
    Tasks,
    check,
    keep_rows,
)
from tritonrec.pipeline.check import (
    _accesses,
    _after_batch,
    _happens_before,
    _most_batches,
    _no_race,
    _reaches_the_tables,
    _run_task,
    _same_values,
    _state,
)
from tritonrec.pipeline.schedule import with_early_dense, with_norm, with_replicas
from tritonrec.pipeline.stage import Access, Stage

TABLES = [*SCHEDULES.values(), keep_rows(NESTPIPE), with_replicas(NESTPIPE), with_norm(FWP)]
TABLES.append(with_early_dense(NESTPIPE))


def remembers(distance, waits):
    """A table whose second stage reads what the first has written `distance` batches before."""
    write = Stage("write", "a", (), (Access("write", "log", "batch"),))
    read = Stage(
        "read", "b", (Edge("write", batch=waits),), (Access("read", "log", "batch", batch=distance),)
    )
    return Schedule("remembers", (write, read), batches_in_flight=12)


@pytest.mark.parametrize("distance", [1, 4, 7, 11])
def test_an_edge_that_is_missing_at_a_distance_of_batches_is_found(distance):
    check(remembers(distance, distance), 1)
    with pytest.raises(ScheduleError, match=rf"read\({distance}\) reads log\[0\] while write\(0\)"):
        check(remembers(distance, distance + 1), 1)


def test_a_read_so_far_back_that_nobody_has_written_it_is_found():
    with pytest.raises(ScheduleError, match=r"read\(7\) reads lost\[0\], which nobody has written"):
        lost = (Access("read", "lost", "batch", batch=7),)
        check(remembers(7, 7)._with("read", touches=lost), 1)


@pytest.mark.parametrize("batches_in_flight", [1, 7])
def test_the_number_of_batches_in_flight_hides_no_missing_edge(batches_in_flight):
    missing = NESTPIPE.without_edge("retrieve", Edge("write_back", batch=2))
    with pytest.raises(ScheduleError, match="write_back"):
        check(replace(missing, batches_in_flight=batches_in_flight), 9)


def test_stages_that_move_rows_between_micro_batches_are_followed_through_all_of_them():
    touches = (
        Access("read", "rows", "micro_batch", micro_batches="up_to"),
        Access("write", "rows", "micro_batch"),
    )
    schedule = Schedule("moves", (Stage("move", "a", (), touches, True, moves=True),), 1)
    with pytest.raises(ScheduleError, match=r"move\(0, 0\) reads rows\[0, 0\], which nobody has written"):
        check(schedule, 9)


def random_table(seed):
    """A table of up to six stages, some per micro-batch, with any edges and accesses; seldom a sound one."""
    random = Random(seed)
    kinds = [False] * random.randint(0, 2) + [True] * random.randint(1, 3) + [False] * random.randint(0, 2)
    names = [f"s{n}" for n in range(len(kinds))]
    places = {"run": ("tables", "x"), "batch": ("y", "z"), "micro_batch": ("u", "v")}

    def access(per_micro_batch, first):
        per = random.choice(("run", "run", "batch", "micro_batch"))
        mode = "write" if first else random.choice(("read", "read", "update", "write"))
        if per == "run":
            rows = random.choice(("none", "batch", "kept", "idle"))
            return Access(mode, random.choice(places[per]), per, rows)
        if per == "batch":
            back = random.choice((0, 0, 1, 3)) if mode == "read" else 0
            return Access(mode, random.choice(places[per]), per, batch=back)
        which = random.choice(("own", "up_to", "from", "all")) if per_micro_batch else "all"
        return Access(mode, random.choice(places[per]), per, micro_batches=which)

    def edges(n, many):
        for m in range(n):
            if random.random() < 0.6:
                which = random.choice(("same", "same", "previous", "all")) if kinds[m] and many else "all"
                yield Edge(names[m], which if kinds[m] else "none")
        for m in range(len(kinds)):
            if random.random() < 0.3:
                which = random.choice(("same", "all")) if kinds[m] and many else "all"
                yield Edge(names[m], which if kinds[m] else "none", random.choice((1, 1, 2)))

    stages = tuple(
        Stage(
            name, random.choice("aab"), tuple(edges(n, many)),
            tuple(access(many, n == 0) for _ in range(random.randint(1, 2))), many,
        )
        for n, (name, many) in enumerate(zip(names, kinds, strict=True))
    )  # fmt: skip
    return Schedule(f"random {seed}", stages, 4, early=random.random() < 0.5)


def races(schedule, micro_batches, batches):
    """Whether two tasks race, by looking at every use of a row over so many batches."""
    tasks = [task for batch in range(batches) for task in schedule.tasks(batch, micro_batches)]
    before = _happens_before(Tasks(schedule, micro_batches), tasks)
    for used_by in product((False, True), repeat=batches):
        touched = []
        for task in tasks:
            use = (task.batch > 0 and used_by[task.batch - 1], used_by[task.batch])
            found = _accesses(schedule, task, *use, micro_batches)
            touched.append({(location, access.mode != "read") for access, location, _ in found})
        for n, task in enumerate(tasks):
            for m in range(n):
                if not before[task] >> m & 1 and any(
                    here == there and (writes or wrote)
                    for here, writes in touched[n]
                    for there, wrote in touched[m]
                ):
                    return True
    return False


def refused(function, *args):
    try:
        function(*args)
    except ScheduleError as error:
        return "may still run" in str(error) or str(error)
    return False


@pytest.mark.parametrize(
    ("tables", "micro_batches"),
    [(8, 2), pytest.param(60, 4, marks=pytest.mark.slow), pytest.param(25, 9, marks=pytest.mark.slow)],
)
def test_a_race_anywhere_is_one_among_the_batches_and_micro_batches_looked_at(tables, micro_batches):
    verdicts = []
    for seed in range(tables):
        schedule = random_table(seed)
        try:
            expected = races(schedule, micro_batches, 7)
        except ScheduleError:  # a stage waits for one behind it
            continue
        few = Tasks(schedule, min(micro_batches, 3))
        assert refused(_no_race, few, _most_batches(schedule)) == expected, schedule
        verdicts.append(expected)
    assert {True, False} == set(verdicts)  # the tables are of both kinds


def test_more_micro_batches_and_batches_show_no_further_race():
    for seed in range(40):
        schedule = random_table(seed)
        few = refused(_no_race, Tasks(schedule, 3), _most_batches(schedule))
        assert refused(_no_race, Tasks(schedule, 6), 9) == few, schedule


BROKEN = [
    NESTPIPE._with("copy_kept_rows", touches=()),
    NESTPIPE.without_stage("write_back", "sparse_update"),
    keep_rows(NESTPIPE)._with("copy_kept_rows", touches=()),
    keep_rows(NESTPIPE)._with("write_back", touches=()),
]


@pytest.mark.parametrize("schedule", [*TABLES, *BROKEN], ids=lambda each: each.name)
def test_the_states_that_are_followed_stand_for_every_use_of_a_row(schedule):
    def every_use(batches):
        for used_by in product((False, True), repeat=batches):
            values = {}, {}
            for last in range(batches):
                values = _after_batch(Tasks(schedule, 2), used_by[: last + 1], *values)
                _reaches_the_tables(schedule, used_by[: last + 1], values[1])

    few = refused(_same_values, Tasks(schedule, 2))
    assert bool(few) == bool(refused(every_use, 6)) == (schedule in BROKEN)


def test_what_reads_a_place_leaves_its_value():
    values = {("log", 0): "written"}
    assert _run_task(remembers(1, 1), Task("read", 1), (True, True), values, 1, False) == ("written",)
    assert values == {("log", 0): "written"}


def test_places_that_no_later_batch_reads_are_no_part_of_a_state():
    schedule, uses = remembers(2, 2), (True, True, True)
    nothing = _state(schedule, uses, {}, {})
    assert _state(schedule, uses, {("log", 0): "a"}, {}) == nothing
    assert _state(schedule, uses, {("log", 1): "a"}, {}) != nothing


def test_a_row_that_no_batch_has_used_is_in_a_state_of_its_own():
    states = [_state(NESTPIPE, (*uses, *[False] * 4)[:5], {}, {}) for uses in ((), (True,) * 4, (True,) * 5)]
    assert len(set(states)) == 3
