"""Recorded tuples to Perfetto packets: a process track per rank, a thread track per lane and one
for its operators, flows, counters.

Every id contains the rank, so the files of several ranks can be concatenated (`save_joined`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    CounterDescriptor,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

from .events import LANES, OPERATORS, CounterEvent, OperatorEvent, SpanEvent

METADATA_TRACK = "metadata"
METADATA_EVENT = "tritonrec"

_TRACKS_PER_RANK = 1 << 20  # track ids of a rank: its process, then all tracks below it
_THREADS_PER_RANK, _PER_LANE, _OPERATORS = 1_000_000, 200, 100  # a lane's rows, then those of its operators
_METADATA, _COUNTERS = 4_998 * _PER_LANE, 4_999 * _PER_LANE  # below all lanes
_BATCH_SHIFT, _RANK_SHIFT = 12, 48  # flow id = rank | batch + 1 | micro-batch + 1; zero is no flow


def serialise(
    rank: int,
    metadata: Mapping[str, Any],
    spans: list[SpanEvent],
    counters: list[CounterEvent],
    operators: list[OperatorEvent],
) -> bytes:
    """The bytes of a Perfetto trace of one rank."""
    return _Writer(rank).write(metadata, spans, counters, operators)


class _Writer:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.builder = TraceProtoBuilder()
        self.process = rank * _TRACKS_PER_RANK + 1
        self.last_track = self.process

    def write(
        self,
        metadata: Mapping[str, Any],
        spans: list[SpanEvent],
        counters: list[CounterEvent],
        operators: list[OperatorEvent],
    ) -> bytes:
        self._process_track()
        starts = [span[2] for span in spans] + [counter[1] for counter in counters]
        self._metadata(metadata, min(starts, default=0))
        flows = _flows(self.rank, spans)
        for order, lane in enumerate(LANES):
            rows = _rows(
                [(*span[1:], flow) for span, flow in zip(spans, flows, strict=True) if span[0] == lane]
            )
            for row, slices in enumerate(rows):
                track = self._thread_track(lane, order * _PER_LANE + row, row)
                self._slices(track, lane, slices)
        self._operators(operators)
        for name in dict.fromkeys(counter[0] for counter in counters):
            self._counter(name, [(at, value) for owner, at, value in counters if owner == name])
        return self.builder.serialize()

    def _track(self, name: str, order: int) -> Any:
        self.last_track += 1
        track = self._packet().track_descriptor
        track.uuid = self.last_track
        track.parent_uuid = self.process
        track.name = name
        track.sibling_order_rank = order
        return track

    def _process_track(self) -> None:
        track = self._packet().track_descriptor
        track.uuid = self.process
        track.process.pid = self.rank + 1  # 0 is the idle process to Perfetto
        track.process.process_name = f"rank {self.rank}"
        track.process.legacy_sort_index = self.rank
        track.child_ordering = TrackDescriptor.EXPLICIT

    def _thread_track(self, name: str, order: int, row: int) -> int:
        name = name if row == 0 else f"{name} +{row}"
        track = self._track(name, order)
        track.thread.pid = self.rank + 1
        track.thread.tid = (self.rank + 1) * _THREADS_PER_RANK + order
        track.thread.thread_name = name
        track.thread.legacy_sort_index = order
        return track.uuid

    def _operators(self, operators: list[OperatorEvent]) -> None:
        threads = dict.fromkeys((*LANES, *(thread for thread, *_ in operators)))
        for order, thread in enumerate(threads):
            own: list[_Slice] = [(*event[1:], {}, ([], [])) for event in operators if event[0] == thread]
            for row, slices in enumerate(_rows(own) if own else []):
                place = order * _PER_LANE + _OPERATORS + row
                self._slices(self._thread_track(thread + OPERATORS, place, row), "operator", slices)

    def _slices(self, track: int, category: str, slices: list[_Slice]) -> None:
        for at, opened in _nested(slices):
            packet = self._packet(at)
            packet.track_event.track_uuid = track
            if opened is None:
                packet.track_event.type = TrackEvent.TYPE_SLICE_END
                continue
            name, _, _, args, (continuing, ending) = opened
            packet.track_event.type = TrackEvent.TYPE_SLICE_BEGIN
            packet.track_event.name = name
            packet.track_event.categories.append(category)
            for key, value in args.items():
                _annotate(packet.track_event.debug_annotations.add(), key, value)
            packet.track_event.flow_ids.extend(continuing)
            packet.track_event.terminating_flow_ids.extend(ending)

    def _counter(self, name: str, values: list[tuple[int, float]]) -> None:
        track = self._track(name, _COUNTERS)
        track.counter.unit = CounterDescriptor.UNIT_UNSPECIFIED
        uuid = track.uuid
        for at, value in values:
            event = self._packet(at).track_event
            event.track_uuid = uuid
            event.type = TrackEvent.TYPE_COUNTER
            event.double_counter_value = float(value)

    def _metadata(self, metadata: Mapping[str, Any], at: int) -> None:
        uuid = self._track(METADATA_TRACK, _METADATA).uuid
        event = self._packet(at).track_event
        event.track_uuid = uuid
        event.type = TrackEvent.TYPE_INSTANT
        event.name = METADATA_EVENT
        for key, value in metadata.items():
            _annotate(event.debug_annotations.add(), key, json.dumps(value))

    def _packet(self, at: int | None = None) -> TracePacket:
        packet = self.builder.add_packet()
        packet.trusted_packet_sequence_id = self.rank + 1
        if at is not None:
            packet.timestamp = at
        return packet


# name, start ns, end ns, args, flows that continue after the slice and flows that end with it
_Slice = tuple[str, int, int, dict[str, Any], tuple[list[int], list[int]]]


def _rows(slices: list[_Slice]) -> list[list[_Slice]]:
    """Distribute slices over rows in which any two are nested or disjoint, as Perfetto needs them.

    Two transfers in flight overlap without nesting and cannot be on one track.
    """
    rows: list[list[_Slice]] = [[]]  # every lane has a track, also an idle one
    open_ends: list[list[int]] = [[]]  # per row, the ends of the slices open at this start, innermost last
    for piece in sorted(slices, key=lambda piece: (piece[1], -piece[2])):
        for ends in open_ends:
            while ends and ends[-1] <= piece[1]:
                ends.pop()
        fitting = (row for row, ends in enumerate(open_ends) if not ends or piece[2] <= ends[-1])
        row = next(fitting, len(rows))
        if row == len(rows):
            rows.append([])
            open_ends.append([])
        rows[row].append(piece)
        open_ends[row].append(piece[2])
    return rows


def _nested(slices: list[_Slice]) -> Iterator[tuple[int, _Slice | None]]:
    """In order of time, (time, slice) for an opened slice and (time, None) for the innermost one closed."""
    open_ends: list[int] = []
    for piece in slices:
        while open_ends and open_ends[-1] <= piece[1]:
            yield open_ends.pop(), None
        yield piece[1], piece
        open_ends.append(piece[2])
    while open_ends:
        yield open_ends.pop(), None


def _flows(rank: int, spans: list[SpanEvent]) -> list[tuple[list[int], list[int]]]:
    """Flow ids per span: flows that continue after it, and flows that end with it.

    The stages of a batch are one flow and those of each micro-batch another. The first micro-batch is in
    both, so that arrows lead from the table into the window.
    """
    members: list[list[int]] = []
    last: dict[int, int] = {}  # flow -> start of its last span
    for _, _, start, _, args in spans:
        whole = rank << _RANK_SHIFT | (args["batch"] + 1) << _BATCH_SHIFT
        micro_batch = args.get("micro_batch")
        if micro_batch is None:
            ids = [whole]
        elif micro_batch == 0:
            ids = [whole, whole | 1]
        else:
            ids = [whole | micro_batch + 1]
        members.append(ids)
        for flow in ids:
            last[flow] = max(last.get(flow, start), start)
    return [
        ([flow for flow in ids if last[flow] > start], [flow for flow in ids if last[flow] == start])
        for ids, (_, _, start, _, _) in zip(members, spans, strict=True)
    ]


def _annotate(annotation: Any, name: str, value: Any) -> None:
    annotation.name = name
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int):
        annotation.int_value = value
    elif isinstance(value, float):
        annotation.double_value = value
    else:
        annotation.string_value = str(value)
