"""Made spans with known overlaps give the known figures, and a trace that breaks an edge goes red."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.pipeline.schedule import SCHEDULES, Which
from tritonrec.trace import LANES, Recorder, Span, Trace, read
from tritonrec.trace.analysis import (
    MICRO_BATCH_RULES,
    check_edges,
    check_trace,
    difference,
    intersection,
    length,
    summarise,
    union,
)

intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda i: (i[0], i[0] + i[1])))


def points(spans):
    return {point for start, end in spans for point in range(start, end)}


@given(intervals, intervals)
def test_interval_sums_count_every_moment_once(left, right):
    assert length(union(left)) == len(points(left))
    assert points(union(left)) == points(left)
    assert length(intersection(union(left), union(right))) == len(points(left) & points(right))
    assert points(difference(union(left), union(right))) == points(left) - points(right)


def made(*rows, rank=0):
    """Spans from (lane, name, start, end, batch[, micro_batch])."""
    return [Span(rank, *row) for row in rows]


# A step of two micro-batches after a warm-up batch, which computes until 10; the next one ends at 100.
#   compute        0----10    20--------40 (m0)      40------60 (m1)            80------100 (b2)
#   communication      12----------25 (m0) 28-33 (m1)    55----65 (gradients of m1)
#   reduce                                                   60----70
#   routing           5---12                       50----------62       72--78
#   write_back                                                                        95-----110
STEPS = made(
    ("compute", "compute", 0, 10, 0, 0),
    ("routing", "route", 5, 12, 1),
    ("communication", "exchange", 12, 25, 1, 0),
    ("compute", "compute", 20, 40, 1, 0),
    ("communication", "exchange", 28, 33, 1, 1),
    ("compute", "compute", 40, 60, 1, 1),
    ("routing", "route", 50, 62, 2),
    ("communication", "gradient_exchange", 55, 65, 1, 1),
    ("reduce", "dense_reduce", 60, 70, 1),
    ("retrieval", "retrieve", 72, 78, 2),
    ("compute", "compute", 80, 100, 2, 0),
    ("write_back", "write_back", 95, 110, 1),
)


def test_known_overlaps_give_known_figures():
    (summary,) = summarise(STEPS)
    assert (summary.rank, summary.steps, summary.elapsed_ns, summary.step_ns) == (0, 2, 90, 45)
    assert summary.busy_ns["compute"] == 20 + 20 + 20
    assert summary.busy_ns["communication"] == 13 + 5 + 10
    assert summary.busy_ns["write_back"] == 5, "what comes after the last computation is not of these steps"
    assert summary.communication_ns == 13 + 5 + 15, "gradient exchange and reduce overlap by 5"
    assert summary.exposed_ns == 8 + 0 + 10
    assert summary.exposed_ratio == pytest.approx(18 / 33)
    assert summary.lookup_ns == 2 + 12 + 6, "what batch 1 looked up before 10 belongs to the warm-up"
    assert summary.hidden_lookup_ns == 12, (
        "behind compute, exchange and reduce; 10 to 12 and 72 to 78 are bare"
    )
    assert summary.hidden_lookup_ratio == pytest.approx(12 / 20)
    assert (summary.transfers, summary.transfers_overlapped) == (3, 1), (
        "only the second exchange ran beside m0"
    )


def test_warm_up_is_left_out():
    (summary,) = summarise(STEPS, warmup=2)
    assert (summary.steps, summary.elapsed_ns, summary.transfers) == (1, 40, 0)
    assert summary.busy_ns["routing"] == 2
    with pytest.raises(ValueError, match="rank 0 computed 3 batches: none is left after 3 of warm-up"):
        summarise(STEPS, warmup=3)
    with pytest.raises(ValueError, match="warmup must be at least 1, got 0"):
        summarise(STEPS, warmup=0)


def test_ranks_do_not_hide_each_other():
    ticks = [("compute", "compute", 0, 1, 0), ("compute", "compute", 11, 12, 1)]
    alone = made(*ticks, ("communication", "exchange", 1, 11, 1, 0), rank=0)
    busy = made(*ticks, ("compute", "compute", 1, 11, 1, 1), rank=1)
    communicating, computing = summarise(alone + busy)
    assert communicating.exposed_ratio == 1.0
    assert computing.exposed_ratio is None and computing.hidden_lookup_ratio is None


def test_whatever_a_rank_does_beside_its_lookup_hides_it():
    """Copies, computation and every kind of communication; other lookups do not."""
    ticks = [("compute", "compute", 0, 1, 0), ("compute", "compute", 11, 12, 1)]
    hidden = {}
    for lane in LANES:
        (summary,) = summarise(made(*ticks, ("retrieval", "retrieve", 1, 9, 2), (lane, "beside", 4, 9, 1)))
        hidden[lane] = summary.hidden_lookup_ns
    main = "copy", "compute", "communication", "replica", "reduce"
    assert hidden == {lane: 5 * (lane in main) for lane in LANES}


def test_work_one_after_another_hides_nothing():
    spans = made(
        ("compute", "compute", 0, 1, 0, 0),
        ("prefetch", "prefetch", 1, 5, 1),
        ("routing", "route", 5, 9, 1),
        ("communication", "exchange", 9, 12, 1, 0),
        ("compute", "compute", 12, 20, 1, 0),
        ("communication", "exchange", 20, 22, 1, 1),
        ("compute", "compute", 22, 30, 1, 1),
        ("reduce", "dense_reduce", 30, 31, 1),
        ("compute", "dense_update", 31, 32, 1),
    )
    (summary,) = summarise(spans)
    assert (summary.exposed_ns, summary.exposed_ratio) == (6, 1.0)
    assert (summary.lookup_ns, summary.hidden_lookup_ns) == (8, 0)
    assert (summary.transfers, summary.transfers_overlapped) == (2, 0)


def perfect(schedule, batches=5, micro_batches=2, ranks=(0,)):
    """A run of `schedule` that does one task at a time, each 10 ns long: every edge is honoured."""
    return [
        Span(rank, schedule[task.stage].lane, task.stage, 10 * at, 10 * at + 10, task.batch, task.micro_batch)
        for rank in ranks
        for at, task in enumerate(t for batch in range(batches) for t in schedule.tasks(batch, micro_batches))
    ]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_serial_run_honours_every_edge(schedule, micro_batches):
    spans = perfect(schedule, micro_batches=micro_batches, ranks=(0, 1))
    report = check_edges(spans, schedule.edges(), micro_batches)
    assert report.honoured, (report.violations[:3], report.never_exercised)
    assert set(report.instances) == set(schedule.edges())


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_one_early_start_is_found_on_every_edge(schedule):
    spans = perfect(schedule, ranks=(0, 1))
    for edge in schedule.edges():
        from_stage, to_stage, offset, rule = edge
        victim = next(
            s
            for s in spans
            if s.rank == 1 and s.name == to_stage and s.batch == 3 and s.micro_batch in (None, 1)
        )
        awaited = max(
            s.end_ns
            for s in spans
            if s.rank == 1
            and s.name == from_stage
            and s.batch == 3 - offset
            and s.micro_batch in {"none": {None}, "same": {1}, "previous": {0}, "all": {0, 1}}[rule]
        )
        early = replace(victim, start_ns=awaited - 1)
        report = check_edges([early if s is victim else s for s in spans], [edge], 2)
        (violation,) = report.violations
        assert not report.honoured
        assert violation.successor is early and violation.predecessor.end_ns == awaited
        assert f"{to_stage} of batch 3" in str(violation) and "on rank 1 started 0.0 us before" in str(
            violation
        )


def test_a_lost_micro_batch_is_found():
    nestpipe = SCHEDULES["nestpipe"]
    spans = [s for s in perfect(nestpipe) if (s.name, s.batch, s.micro_batch) != ("gradient_exchange", 2, 1)]
    report = check_edges(spans, nestpipe.edges(), 2)
    assert [str(v) for v in report.violations] == [
        "sparse_update of batch 2 on rank 0 waits for gradient_exchange of batch 2, micro-batch 1 on rank 0, "
        "which was not recorded"
    ]


def test_a_task_that_does_the_work_of_others_is_what_their_successors_wait_for():
    nestpipe, doers = SCHEDULES["nestpipe"], {"exchange": (0, 1, 1), "gradient_exchange": (1, 1, 2)}
    spans = [s for s in perfect(nestpipe, micro_batches=3)
             if s.name not in doers or doers[s.name][s.micro_batch] == s.micro_batch]  # fmt: skip
    assert check_edges(spans, nestpipe.edges(), 3, doers).honoured
    assert len(check_edges(spans, nestpipe.edges(), 3).violations) == 10, "two tasks of five batches are lost"
    lost = [s for s in spans if (s.name, s.batch, s.micro_batch) != ("exchange", 2, 1)]
    assert len(check_edges(lost, nestpipe.edges(), 3, doers).violations) == 2, "of micro-batches 1 and 2"
    (exchange,) = (s for s in spans if (s.name, s.batch, s.micro_batch) == ("exchange", 2, 1))
    late = [replace(s, end_ns=s.end_ns + 10**6) if s is exchange else s for s in spans]
    waiting = {v.successor.micro_batch for v in check_edges(late, nestpipe.edges(), 3, doers).violations
               if v.successor.name == "compute"}  # fmt: skip
    assert waiting == {1, 2}


def test_where_the_first_micro_batch_does_all_the_work_none_has_a_previous_one():
    dbp, once = SCHEDULES["dbp"], {"exchange": (0, 0, 0), "gradient_exchange": (2, 2, 2)}
    spans = [s for s in perfect(dbp, micro_batches=3)
             if s.name not in once or once[s.name][s.micro_batch] == s.micro_batch]  # fmt: skip
    assert check_edges(spans, dbp.edges(), 3, once).honoured
    never = check_edges(spans, dbp.edges(), 3, {**once, "exchange": (0, 0, 2)}).never_exercised
    assert [edge[3] for edge in never] == ["previous"]


def test_a_repeated_stage_must_end_before_its_successor():
    spans = made(
        ("communication", "exchange", 0, 10, 0, 0),
        ("communication", "exchange", 10, 30, 0, 0),
        ("compute", "compute", 20, 40, 0, 0),
    )
    assert len(check_edges(spans, [("exchange", "compute", 0, "same")]).violations) == 1


def test_an_edge_never_exercised_proves_nothing():
    nestpipe = SCHEDULES["nestpipe"]
    report = check_edges(perfect(nestpipe, batches=2), nestpipe.edges(), 2)
    assert report.violations == []
    assert report.never_exercised == [("write_back", "retrieve", 2, "none")], "needs three batches"
    assert not report.honoured
    assert not check_edges(perfect(nestpipe), []).honoured, "no edges, no proof"
    assert not check_edges([], nestpipe.edges()).honoured


def test_a_recording_that_starts_late_has_no_false_alarms():
    nestpipe = SCHEDULES["nestpipe"]
    late = [s for s in perfect(nestpipe, batches=8) if s.batch >= 3]
    assert check_edges(late, nestpipe.edges(), 2).honoured


def test_edges_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="rule must be one of none, same, previous, all"):
        check_edges([], [("a", "b", 0, "next")])
    with pytest.raises(ValueError, match="batch that comes later"):
        check_edges([], [("a", "b", -1, "none")])
    with pytest.raises(ValueError, match="runs once per batch"):
        check_edges(made(("copy", "b", 0, 1, 0), ("copy", "a", 0, 1, 0)), [("a", "b", 0, "same")])


def test_rules_are_those_of_the_schedules():
    assert set(MICRO_BATCH_RULES) == set(get_args(Which))


def test_edges_survive_the_file(tmp_path):
    nestpipe = SCHEDULES["nestpipe"]
    recorder = Recorder(0, 1, {"edges": nestpipe.edges(), "micro_batches": 2})
    for s in perfect(nestpipe):
        recorder.add(s.lane, s.name, s.start_ns, s.end_ns, batch=s.batch, micro_batch=s.micro_batch)
    trace = read(recorder.save(tmp_path / "t"))
    report = check_trace(trace)
    assert report.honoured and set(report.instances) == set(nestpipe.edges())


def test_a_trace_is_checked_with_its_own_micro_batches_and_shared_tasks():
    spans = made(
        ("communication", "exchange", 0, 5, 0, 0),
        ("compute", "compute", 5, 9, 0, 0),
        ("compute", "compute", 9, 12, 0, 1),
        ("reduce", "dense_reduce", 12, 15, 0),
    )
    edges = [["exchange", "compute", 0, "same"], ["compute", "dense_reduce", 0, "all"]]

    def checked(**about):
        return check_trace(Trace(spans, [], {"edges": edges, **about}, (0,)))

    assert checked(micro_batches=2, done_by={"exchange": [0, 0]}).honoured
    (alone,) = checked(micro_batches=2).violations  # nobody says that micro-batch 0 did the work of 1
    assert alone.edge == tuple(edges[0]) and alone.micro_batch == 1 and alone.predecessor is None
    (lost,) = checked(micro_batches=3, done_by={"exchange": [0, 0, 0]}).violations
    assert lost.edge == tuple(edges[1]) and lost.micro_batch == 2


def test_a_slice_without_a_batch_is_refused(tmp_path):
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as TraceProto

    recorder, packets = Recorder(0, 1, {"edges": []}), TraceProto()
    recorder.add("compute", "compute", 1, 2, batch=0)
    file = recorder.save(tmp_path / "t")
    packets.ParseFromString(file.read_bytes())
    for packet in packets.packet:
        given = packet.track_event.debug_annotations if packet.HasField("track_event") else []
        for place in [place for place, each in enumerate(given) if each.name == "batch"]:
            del given[place]
    file.write_bytes(packets.SerializeToString())
    with pytest.raises(ValueError, match=r"slice 'compute' at .* ns has no batch"):
        read(file)


def test_exposed_time_is_that_of_the_measured_steps():
    late = [*STEPS, *made(("communication", "exchange", 120, 150, 3, 0), ("reduce", "dense_reduce", 2, 4, 0))]
    assert summarise(late)[0].exposed_ns == summarise(STEPS)[0].exposed_ns == 18
