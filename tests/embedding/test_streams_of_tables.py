"""Promise: lanes that share a table are ordered where they must be, and a lookup waits for no update.

Streams only note what was queued; the tensors are on the host, or have no memory at all.
"""

import threading
from contextlib import contextmanager

import pytest
import torch

from tritonrec.embedding import DynamicTable, Placement, PrecisionTiers, TablePolicy
from tritonrec.embedding.metadata import PinnedRows
from tritonrec.embedding.row_storage import Chunks
from tritonrec.embedding.shared_state import Replaceable, RowColumn, StreamLock

SOMEWHERE = torch.device("meta")  # a device that is not the host


class NotedStream:
    def __init__(self, name):
        self.name, self.events, self.waits, self.used = name, 0, [], []

    def record_event(self):
        self.events += 1
        return f"{self.name} {self.events}"

    def wait_event(self, event):
        self.waits.append(event)


@pytest.fixture
def on(monkeypatch):
    """``on(lane)``: inside, the current stream is the lane's, which it gives."""
    streams, current = {}, threading.local()

    @contextmanager
    def on(lane):
        before = getattr(current, "stream", None)
        current.stream = streams.setdefault(lane, NotedStream(lane))
        try:
            yield current.stream
        finally:
            current.stream = before

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: current.stream)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: stream.used.append(self), raising=False
    )
    return on


def used(stream, values):
    return any(each is values for each in stream.used)


def test_a_reader_waits_for_what_fills_a_column_and_its_memory_lasts(on):
    with on("retrieval"):
        column = RowColumn(torch.int32, end=2, device=SOMEWHERE)
        before = column._values.get()
        column.grow(5)
    handles = torch.empty(3, dtype=torch.int64, device=SOMEWHERE)
    with on("write_back") as stream:
        column[handles]
    grown = column._values._now[0]
    assert grown is not before and len(grown) == 6
    assert stream.waits == ["retrieval 2"] and used(stream, grown) and not used(stream, before)


def test_a_writer_waits_for_the_addresses_of_new_chunks(on, monkeypatch):
    made = []

    def addresses(chunks, device):
        made.append(torch.empty(len(chunks), dtype=torch.int64, device=device))
        return made[-1]

    monkeypatch.setattr("tritonrec.kernels.chunked_rows.addresses", addresses)
    with on("retrieval") as filling:
        chunks = Chunks(3, torch.float32, 2, SOMEWHERE, False, 1)
        chunks.grow(9)
    with on("write_back") as stream:
        assert chunks.addresses is made[-1]
    assert len(made) == 2 and stream.waits == [f"retrieval {filling.events}"]


def test_rows_that_are_pinned_no_more_last_until_queued_work_is_done(on):
    first, second, third = (torch.empty(2, dtype=torch.int64, device=SOMEWHERE) for _ in range(3))
    with on("retrieval") as stream:
        pinned = PinnedRows(SOMEWHERE)
        pinned.advance(first)
        pinned.advance(second)
        assert not used(stream, first)
        pinned.advance(third)
        assert used(stream, first)


def test_on_the_host_nothing_is_noted():
    values = torch.arange(3)
    assert Replaceable(values).get() is values


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("tiers", [None, PrecisionTiers(2, 3)])
@pytest.mark.parametrize("storage", ["device", "cached"])
def test_a_lookup_waits_for_an_update_before_it_only_where_both_write_metadata(on, storage, tiers, tracked):
    table = DynamicTable(3, slots=8, policy=TablePolicy(precision=tiers), placement=Placement(storage))
    if tracked:
        table.track_changes()
    keys = torch.arange(4)
    with on("retrieval"):
        handles = table.lookup(keys, 0).handles
    for owner, name in ((table, "_updating"), (table, "_lock"), (table._rows, "_lock")):
        setattr(owner, name, StreamLock(SOMEWHERE))
    with on("write_back"):
        table.update(handles, torch.ones(4, 3))
    with on("retrieval") as stream:
        table.lookup(keys, 1)
    assert any("write_back" in event for event in stream.waits) == (tracked or tiers is not None)
