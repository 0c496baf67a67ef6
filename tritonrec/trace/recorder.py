"""Recording of a rank's spans and counters: tuples during training, Perfetto protobuf at the end.

Inside a step a span costs two clock reads and one list append (no lock: appending to a list is atomic).
`save` makes packets, tracks and flows. Times are ``time.perf_counter_ns``, one clock for all processes of a
host, so the files of its ranks can be joined without a shift.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Protocol

from ..files import atomic_write
from ..files.places import Place, place_of
from ..optional import require
from .events import LANES, CounterEvent, OperatorEvent, SpanEvent

_KNOWN_LANES = frozenset(LANES)


class SupportsRecording(Protocol):
    """The interface of `Recorder` and `NullRecorder` for the executor."""

    metadata: dict[str, Any]

    def span(
        self, lane: str, name: str, *, batch: int, micro_batch: int | None = None, **args: Any
    ) -> AbstractContextManager[dict[str, Any]]: ...

    def add(self, lane: str, name: str, start_ns: int, end_ns: int, *, batch: int) -> None: ...

    def counter(self, name: str, value: float) -> None: ...


class _Span:
    """An open slice; the end of its block, also by an exception, records it."""

    __slots__ = ("_args", "_events", "_lane", "_name", "_start")

    def __init__(self, events: list[SpanEvent], lane: str, name: str, args: dict[str, Any]) -> None:
        self._events = events
        self._lane = lane
        self._name = name
        self._args = args
        self._start = 0

    def __enter__(self) -> dict[str, Any]:
        self._start = perf_counter_ns()
        return self._args

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = perf_counter_ns()
        if kind is not None:
            self._args["error"] = kind.__name__
        self._events.append((self._lane, self._name, self._start, end, self._args))


class Recorder:
    """Records the spans and counters of one rank. All methods but `save` may be called from any thread.

    Args:
        rank: this process's rank, ``0 <= rank < world_size``.
        world_size: number of ranks of the run.
        metadata: JSON values stored in the file, for its analysis: ``mode``, ``consistency``,
            ``micro_batches``, and ``edges``, the schedule's dependencies as ``(from_stage, to_stage,
            batch_offset, micro_batch_rule)``, and ``done_by``, the micro-batches that share tasks (see
            `tritonrec.trace.analysis.check_edges`), and ``exchanges``, how many a window has, and why, in
            words. ``rank`` and ``world_size`` are added. The attribute may
            be changed until `save`.
    """

    def __init__(self, rank: int, world_size: int, metadata: Mapping[str, Any] | None = None) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
        self.rank = rank
        self.world_size = world_size
        self.metadata: dict[str, Any] = {**(metadata or {}), "rank": rank, "world_size": world_size}
        self._spans: list[SpanEvent] = []
        self._counters: list[CounterEvent] = []
        self._operators: list[OperatorEvent] = []

    def span(self, lane: str, name: str, *, batch: int, micro_batch: int | None = None, **args: Any) -> _Span:
        """Record the body of a ``with`` block as one slice called `name` on `lane`.

        The block gets the slice's annotations as a dict and may add to it, for example ``bytes`` and
        ``keys``. The type of an exception in the block is recorded under ``error``.
        """
        _check_lane(lane)
        args["batch"] = batch
        if micro_batch is not None:
            args["micro_batch"] = micro_batch
        return _Span(self._spans, lane, name, args)

    def add(
        self,
        lane: str,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        batch: int,
        micro_batch: int | None = None,
        **args: Any,
    ) -> None:
        """Record a slice with given times (perf_counter nanoseconds)."""
        _check_lane(lane)
        if end_ns < start_ns:
            raise ValueError(
                f"span {name!r} of batch {batch} ends at {end_ns}, before its start at {start_ns}"
            )
        args["batch"] = batch
        if micro_batch is not None:
            args["micro_batch"] = micro_batch
        self._spans.append((lane, name, start_ns, end_ns, args))

    def counter(self, name: str, value: float) -> None:
        """Record that the quantity `name` (load factor, bytes sent, ...) has `value` from now on."""
        self._counters.append((name, perf_counter_ns(), value))

    def operator(self, thread: str, name: str, start_ns: int, end_ns: int) -> None:
        """Record an operator of `thread` with its times (perf_counter nanoseconds).

        `thread` is the name of its lane, or any other name. Operators have tracks of their own, below the
        lane of the same name; `tritonrec.trace.analysis` ignores them.
        """
        if end_ns < start_ns:
            raise ValueError(f"operator {name!r} ends at {end_ns}, before its start at {start_ns}")
        self._operators.append((thread, name, start_ns, end_ns))

    def save(self, path: str | os.PathLike[str]) -> Place:
        """Write everything recorded as one Perfetto trace, atomically; open it at https://ui.perfetto.dev."""
        require("perfetto", "a trace")
        from .writer import serialise

        target = place_of(path)
        # Copies, because lanes that still run may append to the lists.
        events = list(self._spans), list(self._counters), list(self._operators)
        with atomic_write(target) as part, part.open("wb") as file:
            file.write(serialise(self.rank, self.metadata, *events))
        return target


class NullRecorder:
    """A `Recorder` that records nothing and reads no clock."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}

    def span(
        self, lane: str, name: str, *, batch: int, micro_batch: int | None = None, **args: Any
    ) -> _NullSpan:
        return _NullSpan()

    def add(self, lane: str, name: str, start_ns: int, end_ns: int, *, batch: int) -> None:
        return None

    def counter(self, name: str, value: float) -> None:
        return None


class _NullSpan:
    __slots__ = ()

    def __enter__(self) -> dict[str, Any]:
        return {}  # a new dict, since several threads may write to theirs

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def save_joined(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Place:
    """Join the files of several ranks into one.

    A trace is a repeated field of packets, and protobuf messages merge by concatenation. Ids of tracks, flows
    and sequences contain the rank, so they are unique. `out` is written atomically.
    """
    target = place_of(out)
    with atomic_write(target) as part, part.open("wb") as joined:
        for path in paths:
            with place_of(path).open("rb") as one:
                shutil.copyfileobj(one, joined)
    return target


def _check_lane(lane: str) -> None:
    if lane not in _KNOWN_LANES:
        raise ValueError(f"lane must be one of {', '.join(LANES)}, got {lane!r}")
