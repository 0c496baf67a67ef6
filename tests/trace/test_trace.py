"""What is recorded can be read back unchanged, and stays a trace that Perfetto's rules allow."""

from __future__ import annotations

import shutil
import sys
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as TraceProto
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from tritonrec.trace import LANES, NullRecorder, Recorder, read, save_joined

pytestmark = pytest.mark.smoke

EDGES = [["exchange", "compute", 0, "same"], ["sparse_update", "copy_kept_rows", 1, "none"]]


def packets(path):
    proto = TraceProto()
    proto.ParseFromString(path.read_bytes())
    return proto.packet


def test_spans_counters_and_metadata_come_back(tmp_path):
    recorder = Recorder(1, 2, {"mode": "nestpipe", "edges": EDGES, "micro_batches": 2})
    recorder.metadata["consistency"] = "batch"
    with recorder.span("routing", "route", batch=0, keys=17) as args:
        args["bytes"] = 17 * 8
        args["ratio"] = 0.25
        args["sorted"] = True
        args["codec"] = "int64"
    with recorder.span("compute", "compute", batch=3, micro_batch=1):
        pass
    recorder.counter("load factor", 0.5)
    recorder.counter("load factor", 0.625)

    trace = read(recorder.save(tmp_path / "new folder" / "one.pftrace"))

    route, compute = trace.spans
    assert (route.rank, route.lane, route.name, route.batch, route.micro_batch) == (
        1,
        "routing",
        "route",
        0,
        None,
    )
    assert dict(route.args) == {
        "batch": 0, "keys": 17, "bytes": 136, "ratio": 0.25, "sorted": True, "codec": "int64"
    }  # fmt: skip
    assert (compute.lane, compute.batch, compute.micro_batch) == ("compute", 3, 1)
    assert route.start_ns <= route.end_ns <= compute.start_ns <= compute.end_ns
    assert [(c.rank, c.name, c.value) for c in trace.counters] == [
        (1, "load factor", 0.5),
        (1, "load factor", 0.625),
    ]
    assert trace.metadata == {
        "mode": "nestpipe", "edges": EDGES, "micro_batches": 2, "consistency": "batch", "world_size": 2
    }  # fmt: skip
    assert trace.ranks == (1,)


def test_an_exception_passes_and_is_recorded(tmp_path):
    recorder = Recorder(0, 1)
    with pytest.raises(KeyError), recorder.span("compute", "compute", batch=0):
        raise KeyError("lost")
    (span,) = read(recorder.save(tmp_path / "t")).spans
    assert span.args["error"] == "KeyError"


spans = st.lists(
    st.tuples(
        st.sampled_from(LANES),
        st.integers(0, 40),
        st.integers(0, 15),
        st.integers(0, 4),
        st.none() | st.integers(0, 3),
    ),
    max_size=30,
)


@given(spans)
def test_any_overlap_on_a_lane_survives(tmp_path_factory, made):
    recorder = Recorder(0, 1)
    for lane, start, duration, batch, micro_batch in made:
        recorder.add(lane, "s", start, start + duration, batch=batch, micro_batch=micro_batch)
    path = recorder.save(tmp_path_factory.mktemp("trace") / "t")

    got = [(s.lane, s.start_ns, s.end_ns - s.start_ns, s.batch, s.micro_batch) for s in read(path).spans]

    def order(span):
        return (*span[:4], -1 if span[4] is None else span[4])

    assert sorted(got, key=order) == sorted(made, key=order)
    for track in {p.track_event.track_uuid for p in packets(path) if p.HasField("track_event")}:
        times = [p.timestamp for p in packets(path) if p.track_event.track_uuid == track]
        assert times == sorted(times), "a track's packets must be in order of time"


def test_tracks_are_ordered_like_the_lanes(tmp_path):
    path = Recorder(2, 3).save(tmp_path / "t")
    tracks = [p.track_descriptor for p in packets(path) if p.HasField("track_descriptor")]
    (process,) = (track for track in tracks if track.HasField("process"))
    lanes = sorted((t for t in tracks if t.HasField("thread")), key=lambda t: t.sibling_order_rank)
    assert process.process.process_name == "rank 2"
    assert tuple(lane.name for lane in lanes) == LANES
    assert all(lane.thread.pid == process.process.pid and lane.parent_uuid == process.uuid for lane in lanes)
    assert all(a.thread.tid < b.thread.tid for a, b in pairwise(lanes))


def test_nested_slices_share_a_row_and_overlapping_ones_do_not(tmp_path):
    def rows(*pieces):
        recorder = Recorder(0, 1)
        for start, end in pieces:
            recorder.add("compute", "compute", start, end, batch=0)
        tracks = [p.track_descriptor.name for p in packets(recorder.save(tmp_path / "t"))]
        return [name for name in tracks if name.startswith("compute")]

    assert rows((0, 4), (0, 9), (4, 9), (9, 12)) == ["compute"]
    assert rows((0, 5), (4, 9), (5, 8)) == ["compute", "compute +1"]


def test_flows_join_the_stages_of_a_batch(tmp_path):
    recorder = Recorder(0, 1)
    recorder.add("routing", "route", 0, 1, batch=0)
    recorder.add("routing", "route", 1, 2, batch=1)
    for micro_batch in (0, 1):
        recorder.add(
            "communication", "exchange", 2 + micro_batch, 3 + micro_batch, batch=0, micro_batch=micro_batch
        )
        recorder.add("compute", "compute", 4 + micro_batch, 5 + micro_batch, batch=0, micro_batch=micro_batch)
    recorder.add("write_back", "write_back", 9, 10, batch=0)
    members: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for packet in packets(recorder.save(tmp_path / "t")):
        event = packet.track_event
        if event.type != TrackEvent.TYPE_SLICE_BEGIN:
            continue
        label = f"{event.name}@{packet.timestamp}"
        for flow in [*event.flow_ids, *event.terminating_flow_ids]:
            members.setdefault(flow, []).append(label)
        for flow in event.terminating_flow_ids:
            ends.setdefault(flow, []).append(label)
    assert sorted(sorted(flow) for flow in members.values()) == [
        ["compute@4", "exchange@2"],
        ["compute@4", "exchange@2", "route@0", "write_back@9"],
        ["compute@5", "exchange@3"],
        ["route@1"],
    ]
    assert sorted(ends.values()) == [["compute@4"], ["compute@5"], ["route@1"], ["write_back@9"]]


def test_joined_ranks_keep_apart(tmp_path):
    parts = []
    for rank in (1, 0):
        recorder = Recorder(rank, 2, {"mode": "dbp"})
        recorder.add("compute", "compute", 10 * rank, 10 * rank + 5, batch=rank)
        recorder.add("communication", "exchange", 0, 7, batch=0, micro_batch=0)
        recorder.add("communication", "exchange", 3, 9, batch=0, micro_batch=1)
        parts.append(recorder.save(tmp_path / f"{rank}.pftrace"))
    joined = save_joined(parts, tmp_path / "all.pftrace")
    trace = read(joined)
    assert trace.ranks == (0, 1)
    assert sorted((s.rank, s.start_ns) for s in trace.spans if s.lane == "compute") == [(0, 0), (1, 10)]
    uuids = [p.track_descriptor.uuid for p in packets(joined) if p.HasField("track_descriptor")]
    assert len(uuids) == len(set(uuids))
    flows = [set() for _ in parts]
    for packet in packets(joined):
        flows[packet.trusted_packet_sequence_id - 1].update(packet.track_event.flow_ids)
        flows[packet.trusted_packet_sequence_id - 1].update(packet.track_event.terminating_flow_ids)
    assert flows[0] and flows[0].isdisjoint(flows[1])


def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch):
    recorder = Recorder(0, 1)
    recorder.add("compute", "compute", 0, 5, batch=0)
    part = recorder.save(tmp_path / "part")
    before = part.read_bytes()
    out = tmp_path / "new" / "out"
    with pytest.raises(FileNotFoundError):
        save_joined([part, tmp_path / "absent"], out)
    assert list(out.parent.iterdir()) == []
    save_joined([part], out)
    with pytest.raises(FileNotFoundError):
        save_joined([part, part, tmp_path / "absent"], out)
    assert out.read_bytes() == before and list(out.parent.iterdir()) == [out]

    def interrupted(source, target):
        target.write(source.read(3))
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfileobj", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_joined([part], out)
    assert out.read_bytes() == before and list(out.parent.iterdir()) == [out]


def test_ranks_of_different_runs_are_refused(tmp_path):
    one = Recorder(0, 2, {"mode": "dbp"}).save(tmp_path / "0")
    for about, message in (
        ({"mode": "fwp"}, "mode is 'dbp' on rank 0, 'fwp' on rank 1"),
        ({"mode": "dbp", "replicas": 2}, "replicas is None on rank 0, 2 on rank 1"),
    ):
        two = Recorder(1, 2, about).save(tmp_path / "1")
        with pytest.raises(ValueError, match=f"different runs: {message}"):
            read(save_joined([one, two], tmp_path / "all"))


def test_files_that_are_no_traces_are_refused(tmp_path):
    recorder = Recorder(0, 1)
    recorder.add("compute", "compute", 0, 5, batch=0)
    whole = recorder.save(tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    cut.write_bytes(whole[:-3])
    with pytest.raises(ValueError, match="cut short"):
        read(cut)
    text = tmp_path / "text"
    text.write_text("user,item,timestamp\n")
    with pytest.raises(ValueError, match="not a"):
        read(text)
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    with pytest.raises(ValueError, match="no metadata"):
        read(empty)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "absent")


def test_a_slice_that_never_closes_is_refused(tmp_path):
    recorder = Recorder(0, 1)
    recorder.add("compute", "compute", 0, 5, batch=0)
    proto = TraceProto()
    proto.ParseFromString(recorder.save(tmp_path / "whole").read_bytes())
    end = next(i for i, p in enumerate(proto.packet) if p.track_event.type == TrackEvent.TYPE_SLICE_END)
    del proto.packet[end]
    (tmp_path / "open").write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match="'compute' of rank 0, opened at 0 ns, never closes"):
        read(tmp_path / "open")


def _changed_event(proto, kind):
    return next(p.track_event for p in proto.packet if p.track_event.type == kind)


DAMAGES = {
    "argument 'batch' of 'compute' has no value": (
        TrackEvent.TYPE_SLICE_BEGIN, lambda event: event.debug_annotations[0].ClearField("int_value")
    ),
    "metadata 'mode' is 7 and no JSON": (
        TrackEvent.TYPE_INSTANT,
        lambda event: setattr(next(a for a in event.debug_annotations if a.name == "mode"), "int_value", 7),
    ),
    "metadata of no rank": (TrackEvent.TYPE_INSTANT, lambda event: setattr(event, "track_uuid", 999)),
    "is of no counter": (TrackEvent.TYPE_COUNTER, lambda event: setattr(event, "track_uuid", 999)),
    "slice 'compute', opened at 0 ns, is of no rank": (
        TrackEvent.TYPE_SLICE_BEGIN, lambda event: setattr(event, "track_uuid", 999)
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", DAMAGES)
def test_a_damaged_event_is_refused_by_the_file_and_what_it_lacks(tmp_path, message):
    recorder = Recorder(0, 1, {"mode": "dbp"})
    recorder.add("compute", "compute", 0, 5, batch=0)
    recorder.counter("rows", 3)
    proto = TraceProto()
    proto.ParseFromString(recorder.save(tmp_path / "whole").read_bytes())
    kind, damage = DAMAGES[message]
    damage(_changed_event(proto, kind))
    (tmp_path / "damaged").write_bytes(proto.SerializeToString())
    with pytest.raises(ValueError, match=f"damaged: .*{message}.*not a trace recorded by tritonrec"):
        read(tmp_path / "damaged")


@pytest.mark.parametrize("name", ["mode", "compute", "rows", "batch"])
def test_names_that_are_no_text_are_refused(tmp_path, name):
    """Of metadata, of slices with their lane, of counters and of arguments."""
    recorder = Recorder(0, 1, {"mode": "dbp"})
    recorder.add("compute", "compute", 0, 5, batch=0)
    recorder.counter("rows", 3)
    whole = recorder.save(tmp_path / "whole").read_bytes()
    word = name.encode()
    assert word in whole
    (tmp_path / "damaged").write_bytes(whole.replace(word, b"\xf4" + word[1:]))
    with pytest.raises(ValueError, match=r"damaged: the name .* is no UTF-8: not a trace recorded"):
        read(tmp_path / "damaged")


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        Recorder(2, 2)
    with pytest.raises(ValueError, match="lane must be one of prefetch"):
        Recorder(0, 1).span("gpu", "compute", batch=0)
    with pytest.raises(ValueError, match="before its start"):
        Recorder(0, 1).add("compute", "compute", 5, 4, batch=0)


def test_threads_lose_nothing(tmp_path):
    recorder = Recorder(0, 1)
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def work(lane):
            for batch in range(500):
                with recorder.span(lane, lane, batch=batch) as args:
                    args["keys"] = batch

        threads = [threading.Thread(target=work, args=(lane,)) for lane in LANES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switching)
    got = read(recorder.save(tmp_path / "t")).spans
    assert sorted((s.lane, s.batch) for s in got) == sorted((lane, b) for lane in LANES for b in range(500))
    assert all(s.args["keys"] == s.batch for s in got)


def test_recording_keeps_only_tuples_until_the_end():
    """What makes a span cheap: one tuple appended, packets made by `save` alone."""
    recorder = Recorder(0, 1)
    with recorder.span("compute", "compute", batch=0, micro_batch=2):
        pass
    ((lane, name, start, end, args),) = recorder._spans
    assert (lane, name, args) == ("compute", "compute", {"batch": 0, "micro_batch": 2})
    assert isinstance(start, int) and isinstance(end, int)


def test_the_null_recorder_has_the_same_interface():
    recorder = NullRecorder()
    recorder.metadata["mode"] = "dbp"
    recorder.counter("load factor", 1.0)
    with recorder.span("compute", "compute", batch=0, micro_batch=1, keys=2) as args:
        args["bytes"] = 3
    with pytest.raises(KeyError), recorder.span("compute", "compute", batch=0):
        raise KeyError("passes through")


def test_operators_have_tracks_below_their_lanes_and_disturb_no_slice(tmp_path):
    recorder = Recorder(1, 2)
    recorder.add("compute", "compute", 10, 50, batch=0)
    recorder.add("communication", "exchange", 5, 20, batch=0)
    made = [
        ("compute", "aten::linear", 10, 40), ("compute", "aten::mm", 10, 30), ("main", "aten::exp", 3, 3),
        ("compute", "aten::mm", 30, 40), ("routing", "tritonrec::unique", 11, 13),
    ]  # fmt: skip
    spans = read(recorder.save(tmp_path / "without")).spans
    for operator in made:
        recorder.operator(*operator)
    path = recorder.save(tmp_path / "with")

    trace = read(path)
    assert trace.spans == spans and trace.ranks == (1,)
    found = [(o.thread, o.name, o.start_ns, o.end_ns) for o in trace.operators]
    assert found == [made[2], made[0], made[1], made[4], made[3]]  # callers before the called
    assert {operator.rank for operator in trace.operators} == {1}
    tracks = [p.track_descriptor for p in packets(path) if p.HasField("track_descriptor")]
    names = [t.name for t in sorted(tracks, key=lambda t: t.sibling_order_rank) if t.HasField("thread")]
    expected = list(LANES)
    for lane in ("routing", "compute"):
        expected.insert(expected.index(lane) + 1, f"{lane} operators")
    assert names == [*expected, "main operators"]
    assert len({t.thread.tid for t in tracks if t.HasField("thread")}) == len(names)


def test_an_operator_that_ends_before_it_starts_is_an_error():
    with pytest.raises(ValueError, match="'aten::mm' ends at 3, before its start at 4"):
        Recorder(0, 1).operator("compute", "aten::mm", 4, 3)


@pytest.mark.parametrize(
    "told",
    [
        *({"world_size": value} for value in ("x", 0, 1, 2.5, None, 2**21)),
        *({"micro_batches": value} for value in ("a", 0, -4, 2.5)),
        {"edges": 3},
        {"done_by": [0]},
        {"micro_batches": 3, "done_by": {"exchange": [0, 0]}},
    ],
)
def test_metadata_by_which_nobody_could_read_the_slices_is_refused(tmp_path, told):
    recorder = Recorder(1, 2)
    with recorder.span("compute", "compute", batch=0):
        pass
    recorder.metadata.update(told)
    with pytest.raises(ValueError, match="not a trace recorded by tritonrec"):
        read(recorder.save(tmp_path / "t"))
