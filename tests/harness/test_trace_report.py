"""`tritonrec trace` says what a trace shows, and fails when the schedule was not kept."""

import io
import json

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from tritonrec.harness.trace_report import trace_report
from tritonrec.trace import Recorder

EDGES = [("exchange", "compute", 0, "same"), ("compute", "copy_kept_rows", 1, "all")]


def record(path, batches=4, early_ns=0, edges=EDGES):
    """Batches of two micro-batches, 40 us each: exchange, then compute; one compute starts early."""
    recorder = Recorder(0, 2, {"mode": "nestpipe", "consistency": "batch", "micro_batches": 2})
    if edges is not None:
        recorder.metadata["edges"] = edges
    for batch in range(batches):
        at = batch * 40_000
        recorder.add("copy", "copy_kept_rows", at, at + 2_000, batch=batch)
        for micro_batch in (0, 1):
            start = at + 5_000 + 10_000 * micro_batch
            early = early_ns if (batch, micro_batch) == (2, 1) else 0
            recorder.add(
                "communication", "exchange", start, start + 10_000, batch=batch, micro_batch=micro_batch
            )
            recorder.add(
                "compute",
                "compute",
                start + 10_000 - early,
                start + 20_000,
                batch=batch,
                micro_batch=micro_batch,
            )
    return recorder.save(path)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


def test_a_trace_its_table_and_its_picture_say_which_exchanges_ran_and_why(tmp_path, console, monkeypatch):
    path, said = tmp_path / "t", "1 of rows and 2 of gradients a window of 2 micro-batches: for a reason"
    recorder = Recorder(0, 1, {"mode": "fwp", "micro_batches": 2, "exchanges": said})
    recorder.add("compute", "compute", 0, 1_000, batch=0, micro_batch=0)
    recorder.save(path)
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, text, **options: titles.append(text))
    trace_report(path, png=tmp_path / "t.png", json_out=tmp_path / "t.json", console=console)
    assert f"exchanges: {said}\n" in console.file.getvalue()
    assert titles[0].endswith(f"\nexchanges: {said}")
    assert json.loads((tmp_path / "t.json").read_text())["metadata"]["exchanges"] == said


def test_a_kept_schedule_passes_and_its_figures_are_right(tmp_path, console):
    code = trace_report(
        record(tmp_path / "t"),
        png=tmp_path / "t.png",
        json_out=tmp_path / "out" / "t.json",
        console=console,
    )
    text = console.file.getvalue()
    assert code == 0
    assert "edges: all 2 honoured in 14 instances" in text
    assert "without ranks 1" in text
    assert "│ exposed ratio                │  50.0% │" in text
    assert "│ transfers beside computation │ 3 of 6 │" in text
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((tmp_path / "out" / "t.json").read_text())
    assert figures["honoured"] is True
    assert figures["ranks"][0]["step_ms"] == 0.04
    assert figures["ranks"][0]["exposed_ms_per_step"] == 0.01
    assert [edge["instances"] for edge in figures["edges"]] == [8, 6]


def test_a_violated_edge_fails(tmp_path, console):
    code = trace_report(record(tmp_path / "t", early_ns=3_500), json_out=tmp_path / "t.json", console=console)
    sentence = (
        "compute of batch 2, micro-batch 1 on rank 0 started 3.5 us before the end of exchange of batch 2, "
        "micro-batch 1 on rank 0"
    )
    assert code == 1
    assert "edges: 1 violation in" in console.file.getvalue() and sentence in console.file.getvalue()
    assert json.loads((tmp_path / "t.json").read_text())["violations"] == [sentence]


def test_an_edge_never_exercised_fails(tmp_path, console):
    assert trace_report(record(tmp_path / "t", batches=1), console=console) == 1
    assert (
        "edge never exercised: compute of batch t-1 (all micro-batch) before copy_kept_rows of batch t"
        in console.file.getvalue()
    )
    assert "no figures: rank 0 computed 1 batches" in console.file.getvalue()


def test_a_mode_without_edges_says_so(tmp_path, console):
    assert trace_report(record(tmp_path / "t", edges=None), console=console) == 0
    assert "declares none" in console.file.getvalue()


def test_an_unreadable_file_is_one_line(tmp_path, console):
    assert trace_report(tmp_path / "no[/markup]", console=console) == 2
    (tmp_path / "log.csv").write_text("user,item\n")
    assert trace_report(tmp_path / "log.csv", console=console) == 2
    assert len(console.file.getvalue().splitlines()) == 2
