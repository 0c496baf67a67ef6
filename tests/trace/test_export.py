"""The picture shows every lane that worked."""

from dataclasses import replace

import numpy
import pytest
from matplotlib import image

from tritonrec.trace import Recorder, Span, Trace, read, save_joined
from tritonrec.trace.timeline import STAGE_COLOURS, _times, _title, _window, draw

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


def test_a_window_that_is_not_there_is_refused(trace, tmp_path):
    draw(trace, tmp_path / "t.png", first=3, steps=9)
    with pytest.raises(ValueError, match=r"batch 7 was not computed in this trace; it has \[0, 1, 2, 3\]"):
        draw(trace, tmp_path / "t.png", first=7)
    with pytest.raises(ValueError, match="no batch was computed"):
        draw(type(trace)([], [], {}, ()), tmp_path / "t.png")


@pytest.mark.parametrize(
    ("computed", "drawn"), [(1, [0]), (3, [0, 1, 2]), (4, [1, 2, 3]), (9, [3, 4, 5])], ids=str
)
def test_the_middle_is_drawn_without_the_first_batch_where_there_are_others(trace, computed, drawn):
    (one, *_) = (span for span in trace.spans if span.lane == "compute")
    assert _window([replace(one, batch=batch) for batch in range(computed)], None, 3) == drawn


def test_one_batch_can_be_drawn(trace, tmp_path):
    only = [s for s in trace.spans if s.batch == 0]
    assert STAGE_COLOURS["compute"] in colours(draw(type(trace)(only, [], {}, (0, 1)), tmp_path / "t.png"))


def test_a_picture_begins_at_the_first_end_of_the_batch_before_and_its_title_has_the_figures():
    """Rank 0 ends batch 0 at 20 and rank 1 at 30; of 10 ns of communication on each, rank 1 hides 5."""
    spans = [
        Span(rank, lane, lane, start, end, batch, 0)
        for rank, lane, start, end, batch in (
            (0, "compute", 5, 20, 0), (1, "compute", 5, 30, 0),
            (0, "communication", 30, 40, 1), (1, "communication", 40, 50, 1),
            (0, "compute", 40, 60, 1), (1, "compute", 45, 65, 1),
            (0, "routing", 20, 24, 1), (1, "routing", 50, 54, 1),
        )
    ]  # fmt: skip
    assert _times(spans, [1]) == (20, 65) and _times(spans, [0, 1]) == (5, 65)
    title = _title(Trace(spans, [], {"mode": "dbp"}, (0, 1)), [1])
    assert "dbp   ·   world size 2   ·   batches 1 to 1" in title
    assert title.endswith("exposed communication 75%   ·   hidden lookup 50%")
