"""The picture shows every lane that worked; the Kineto files carry the same slices in microseconds."""

from __future__ import annotations

import json

import numpy
import pytest
from matplotlib import image

from tritonrec.trace import LANES, Recorder, read, save_joined
from tritonrec.trace.kineto import export
from tritonrec.trace.timeline import STAGE_COLOURS, draw

MILLISECOND = 1_000_000


@pytest.fixture
def trace(tmp_path):
    """Two ranks, four batches of two micro-batches; the first exchange is bare, the second hidden."""
    parts = []
    for rank in (0, 1):
        recorder = Recorder(rank, 2, {"mode": "nestpipe", "micro_batches": 2})
        for batch in range(4):
            at = 1000 * MILLISECOND + batch * 40 * MILLISECOND + rank * MILLISECOND

            def add(lane, name, start, end, micro_batch=None, at=at, batch=batch, recorder=recorder):
                recorder.add(
                    lane,
                    name,
                    at + start * MILLISECOND,
                    at + end * MILLISECOND,
                    batch=batch,
                    micro_batch=micro_batch,
                )

            add("communication", "exchange", 0, 10, 0)
            add("compute", "compute", 10, 20, 0)
            add("communication", "exchange", 10, 20, 1)
            add("compute", "compute", 20, 40, 1)
            add("retrieval", "retrieve", 12, 30)
        parts.append(recorder.save(tmp_path / f"{rank}"))
    return read(save_joined(parts, tmp_path / "joined"))


def colours(path):
    """Colour -> number of pixels that have exactly it."""
    pixels = (image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    values, counts = numpy.unique(pixels, axis=0, return_counts=True)
    return {
        "#{:02x}{:02x}{:02x}".format(*value): int(count) for value, count in zip(values, counts, strict=True)
    }


def test_the_picture_shows_what_was_recorded(trace, tmp_path):
    seen = colours(draw(trace, tmp_path / "folder" / "t.png"))
    for stage in ("exchange", "compute", "retrieve"):
        assert seen.get(STAGE_COLOURS[stage], 0) > 2000, stage
    for stage in ("write_back", "dense_reduce"):
        assert STAGE_COLOURS[stage] not in seen, f"{stage} was not recorded"
    # In the steps drawn, computation takes 30 of 40 ms, retrieval 18.
    compute, retrieve = seen[STAGE_COLOURS["compute"]], seen[STAGE_COLOURS["retrieve"]]
    assert compute / retrieve == pytest.approx(30 / 18, rel=0.1)


def test_exposed_communication_is_underlined(trace, tmp_path):
    red = "#d00000"
    bare = colours(draw(trace, tmp_path / "bare.png"))[red]
    hidden = [s for s in trace.spans if s.name != "exchange" or s.micro_batch == 1]
    legend_only = colours(draw(type(trace)(hidden, [], trace.metadata, (0, 1)), tmp_path / "hidden.png"))[red]
    assert bare > 2 * legend_only


def test_kineto_files_hold_every_slice(trace, tmp_path):
    paths = export(trace, tmp_path / "kineto")
    assert [path.name for path in paths] == ["rank_0.json", "rank_1.json"]
    for rank, path in enumerate(paths):
        content = json.loads(path.read_text())
        assert content["distributedInfo"] == {"rank": rank, "world_size": 2}
        assert content["baseTimeNanoseconds"] == 1000 * MILLISECOND
        slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
        assert len(slices) == 4 * 5
        first = min(slices, key=lambda event: event["ts"])
        assert first == {
            "ph": "X",
            "cat": "user_annotation",
            "name": "## exchange ##",
            "pid": rank,
            "tid": LANES.index("communication"),
            "ts": 1000.0 * rank,
            "dur": 10_000.0,
            "args": {"batch": 0, "micro_batch": 0},
        }
        names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
        assert names == dict(enumerate(LANES))
