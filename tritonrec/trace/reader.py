"""Reading a recorded trace with the bundled protobuf classes, without a trace processor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..files.places import RemotePath, read_document
from ..optional import require
from .events import LANES, OPERATORS

FOREIGN = "not a trace recorded by tritonrec"
MOST_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Span:
    """One slice. Times are nanoseconds on the recording host's clock; `args` are all its annotations."""

    rank: int
    lane: str
    name: str
    start_ns: int
    end_ns: int
    batch: int
    micro_batch: int | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a counter of a rank."""

    rank: int
    name: str
    time_ns: int
    value: float


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator run by a thread of a rank; a lane's thread has the lane's name."""

    rank: int
    thread: str
    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Trace:
    """Spans, counter samples and operators in order of time, and the metadata shared by all ranks.

    ``metadata["rank"]`` is dropped, since it differs between the ranks of a joined file; see `ranks`.
    """

    spans: list[Span]
    counters: list[Sample]
    metadata: dict[str, Any]
    ranks: tuple[int, ...]
    operators: list[Operator] = field(default_factory=list)


def read(path: str | os.PathLike[str] | RemotePath) -> Trace:
    """Read a trace written by `Recorder.save` or `save_joined`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not such a trace, is truncated, has a slice that never closes, or joins ranks
            of different runs.
    """
    require("perfetto", "a trace")
    from google.protobuf.message import DecodeError
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace as TraceProto

    packets = TraceProto()
    try:
        packets.ParseFromString(read_document(path, "trace"))
    except DecodeError as error:
        raise ValueError(f"{path} is not a Perfetto trace, or was cut short") from error
    try:
        return _Reader().read(packets.packet)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class _Reader:
    def __init__(self) -> None:
        self.rank_of: dict[int, int] = {}  # track -> rank
        self.lane_of: dict[int, str] = {}
        self.thread_of: dict[int, str] = {}  # of tracks of operators
        self.counter_of: dict[int, str] = {}
        self.open: dict[int, list[tuple[str, int, dict[str, Any]]]] = {}
        self.metadata: dict[int, dict[str, Any]] = {}
        self.spans: list[Span] = []
        self.counters: list[Sample] = []
        self.operators: list[Operator] = []

    def read(self, packets: Any) -> Trace:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

        for packet in packets:
            if packet.HasField("track_descriptor"):
                self._track(packet.track_descriptor)
            elif packet.HasField("track_event"):
                event, at = packet.track_event, packet.timestamp
                if event.type == TrackEvent.TYPE_SLICE_BEGIN:
                    self._open(event, at)
                elif event.type == TrackEvent.TYPE_SLICE_END:
                    self._close(event.track_uuid, at)
                elif event.type == TrackEvent.TYPE_COUNTER:
                    track = event.track_uuid
                    if track not in self.counter_of:
                        raise ValueError(f"a value at {at} ns is of no counter: {FOREIGN}")
                    self.counters.append(
                        Sample(self.rank_of[track], self.counter_of[track], at, event.double_counter_value)
                    )
                elif event.type == TrackEvent.TYPE_INSTANT:
                    self._keep_metadata(event)
        for track, left in self.open.items():
            if left:
                name, at, _ = left[-1]
                raise ValueError(
                    f"slice {name!r} of rank {self.rank_of[track]}, opened at {at} ns, never closes"
                )
        self.spans.sort(key=lambda span: (span.start_ns, span.end_ns, span.rank))
        self.counters.sort(key=lambda sample: sample.time_ns)
        self.operators.sort(key=lambda operator: (operator.start_ns, -operator.end_ns, operator.rank))
        ranks = tuple(sorted(self.metadata))
        return Trace(self.spans, self.counters, self._common_metadata(), ranks, self.operators)

    def _open(self, event: Any, at: int) -> None:
        name, track = _text(event.name), event.track_uuid
        if track not in self.rank_of:
            raise ValueError(f"slice {name!r}, opened at {at} ns, is of no rank: {FOREIGN}")
        self.open.setdefault(track, []).append((name, at, _arguments(event)))

    def _keep_metadata(self, event: Any) -> None:
        if event.track_uuid not in self.rank_of:
            raise ValueError(f"metadata of no rank: {FOREIGN}")
        values = _arguments(event)
        for name, value in values.items():
            if not isinstance(value, str):
                raise ValueError(f"metadata {name!r} is {value!r} and no JSON: {FOREIGN}")
        self.metadata[self.rank_of[event.track_uuid]] = {name: json.loads(values[name]) for name in values}

    def _track(self, track: Any) -> None:
        if track.HasField("process"):
            self.rank_of[track.uuid] = track.process.pid - 1
            return
        if track.parent_uuid not in self.rank_of:
            raise ValueError(f"track {track.name!r} belongs to no rank: {FOREIGN}")
        self.rank_of[track.uuid], name = self.rank_of[track.parent_uuid], _text(track.name)
        if track.HasField("counter"):
            self.counter_of[track.uuid] = name
        elif track.HasField("thread"):
            # A lane with overlapping slices has further rows, "communication +1" and so on.
            name = name.partition(" +")[0]
            if name.endswith(OPERATORS):
                self.thread_of[track.uuid] = name.removesuffix(OPERATORS)
            else:
                self.lane_of[track.uuid] = name

    def _close(self, track: int, at: int) -> None:
        thread = self.thread_of.get(track)
        if thread is None and self.lane_of.get(track) not in LANES:
            raise ValueError(f"a slice lies on no lane of a rank: {FOREIGN}")
        if not self.open.get(track):
            raise ValueError(f"a slice on {thread or self.lane_of[track]} ends at {at} ns that never started")
        name, start, args = self.open[track].pop()
        if thread is not None:
            self.operators.append(Operator(self.rank_of[track], thread, name, start, at))
            return
        if "batch" not in args:
            raise ValueError(f"slice {name!r} at {start} ns has no batch")
        rank, lane = self.rank_of[track], self.lane_of[track]
        self.spans.append(Span(rank, lane, name, start, at, args["batch"], args.get("micro_batch"), args))

    def _common_metadata(self) -> dict[str, Any]:
        if not self.metadata:
            raise ValueError(f"no metadata: {FOREIGN}")
        first = min(self.metadata)
        common = {name: value for name, value in self.metadata[first].items() if name != "rank"}
        for rank, values in self.metadata.items():
            for name in sorted((common.keys() | values.keys()) - {"rank"}):
                if common.get(name) != values.get(name):
                    raise ValueError(
                        f"ranks of different runs: {name} is {common.get(name)!r} on rank {first}, "
                        f"{values.get(name)!r} on rank {rank}"
                    )
        _check(common, max(self.metadata))
        return common


def _check(about: dict[str, Any], last: int) -> None:
    """Raise ValueError for metadata by which nobody could read the slices of the ranks 0 to `last`."""
    count = about.get("micro_batches")
    for name, value, least in (
        ("world_size", about.get("world_size"), last + 1),
        ("micro_batches", count, 1),
    ):
        if (name in about or name == "world_size") and (
            type(value) is not int or not least <= value <= MOST_RANKS
        ):
            raise ValueError(f"{name} is {value!r}, and must be a whole number from {least}: {FOREIGN}")
    edges, done_by = about.get("edges", []), about.get("done_by", {})
    if not isinstance(edges, list) or not isinstance(done_by, dict):
        raise ValueError(f"the edges of the schedule are {str(edges)[:40]!r}: {FOREIGN}")
    for stage, doers in done_by.items():
        if not isinstance(doers, list) or len(doers) != count:
            raise ValueError(
                f"the {count} micro-batches of {stage} are done by {str(doers)[:40]!r}: {FOREIGN}"
            )


def _text(value: str | bytes) -> str:
    """A string of a message, which is bytes where they are no UTF-8."""
    if isinstance(value, bytes):
        raise ValueError(f"the name {value!r} is no UTF-8: {FOREIGN}")
    return value


def _arguments(event: Any) -> dict[str, Any]:
    values = {}
    for each in event.debug_annotations:
        kind = each.WhichOneof("value")
        if kind is None:
            raise ValueError(f"argument {each.name!r} of {event.name!r} has no value: {FOREIGN}")
        value = getattr(each, kind)
        values[_text(each.name)] = _text(value) if isinstance(value, bytes) else value
    return values
