"""Promise: recorded traces honour every dependency and show the overlap that each mode claims."""

import pytest
from rich.console import Console

from tritonrec.harness.verify.record_traces import MODES, record_traces
from tritonrec.trace import read
from tritonrec.trace.analysis import summarise

pytestmark = [pytest.mark.multi_rank, pytest.mark.slow]


@pytest.fixture(scope="module")
def directory(job, tmp_path_factory):
    directory = tmp_path_factory.mktemp("traces")
    console = Console(record=True, width=100)
    assert record_traces(job, str(directory), console)
    text = console.export_text()
    joined = "4 of rows and 4 of gradients a window of 4 micro-batches: exchanges is 'each'"
    assert f"exchanges of {', '.join(MODES)}: {joined}" in text
    assert text.count("honoured") == len(MODES) + 1 and "VIOLATED" not in text
    return directory


@pytest.mark.parametrize("mode", MODES)
def test_a_trace_and_a_picture_of_each_mode(directory, mode):
    trace = read(directory / f"{mode}.pftrace")
    assert trace.metadata["mode"] == mode and trace.metadata["world_size"] == 2
    assert {span.rank for span in trace.spans} == {0, 1}
    assert (directory / f"{mode}.png").stat().st_size > 10_000


def test_exchanges_run_beside_computation_only_where_windows_are_pipelined(directory):
    for mode in MODES:
        for rank in summarise(read(directory / f"{mode}.pftrace").spans):
            assert rank.transfers > 0
            assert (rank.transfers_overlapped > 0) == (mode in ("fwp", "nestpipe")), (mode, rank)


def test_lookup_is_hidden_only_where_batches_are_pipelined(directory):
    for mode in MODES:
        for rank in summarise(read(directory / f"{mode}.pftrace").spans):
            hidden = rank.hidden_lookup_ratio
            assert hidden is not None
            assert (hidden > 0) == (mode in ("dbp", "nestpipe")), (mode, rank)
