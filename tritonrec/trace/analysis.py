"""Measurement of a trace: times of the lanes, hidden and exposed shares, and violations of the schedule.

All times are nanoseconds. A set of slices is the union of its intervals, so two simultaneous transfers count
once.

=====================  ==================================================================================
physical communication  time in which a rank communicates: communication, replica and reduce slices
exposed communication   the part of it in which the rank does not compute
hidden lookup           share of the prefetch, h2d, routing and retrieval time during which the rank's main
                        path (copy, compute, communication, reduce) was busy
=====================  ==================================================================================

The exposed ratio, exposed over physical, is what NestPipe's frozen window bounds by 1/N for N micro-batches
(NestPipe, section V-C).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from .events import LANES
from .reader import Span, Trace

LOOKUP_LANES = ("prefetch", "h2d", "routing", "retrieval")
COMMUNICATION_LANES = ("communication", "replica", "reduce")
MAIN_PATH_LANES = ("copy", "compute", *COMMUNICATION_LANES)
MICRO_BATCH_RULES = ("none", "same", "previous", "all")

Edge = tuple[str, str, int, str]
Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of points as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions."""
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The part of one union that lies outside the other."""
    if not left:
        return []
    edges = [left[0][0], *(edge for interval in right for edge in interval), left[-1][1]]
    gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2) if edges[i] < edges[i + 1]]
    return intersection(left, gaps)


def exposed(spans: Sequence[Span]) -> list[Interval]:
    """The intervals in which a rank communicated without computing; `spans` are the rank's slices."""
    return difference(_working(spans, COMMUNICATION_LANES), _working(spans, ["compute"]))


@dataclass(frozen=True)
class RankSummary:
    """Times of one rank over a number of whole steps.

    Attributes:
        rank: the rank.
        steps: number of measured steps; they begin at `start_ns` and take `elapsed_ns` in all.
        step_ns: median time from the end of one batch's computation to the end of the next one's.
        busy_ns: lane -> time in which the lane was busy.
        communication_ns: physical communication.
        exposed_ns: exposed communication.
        lookup_ns: lookup time. hidden_lookup_ns: its hidden part.
        transfers: communication slices of single micro-batches. transfers_overlapped: those during which
            another micro-batch of the same batch computed.
    """

    rank: int
    steps: int
    start_ns: int
    elapsed_ns: int
    step_ns: int
    busy_ns: dict[str, int]
    communication_ns: int
    exposed_ns: int
    lookup_ns: int
    hidden_lookup_ns: int
    transfers: int
    transfers_overlapped: int

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed over physical communication; None on a rank that never communicated."""
        return self.exposed_ns / self.communication_ns if self.communication_ns else None

    @property
    def hidden_lookup_ratio(self) -> float | None:
        """Share of the lookup time that was hidden; None on a rank that looked nothing up."""
        return self.hidden_lookup_ns / self.lookup_ns if self.lookup_ns else None


def summarise(spans: Sequence[Span], warmup: int = 1) -> list[RankSummary]:
    """Measure every rank from the end of its `warmup`-th computed batch to the end of its last one.

    The first batches compile kernels and fill the pipeline, and after the last one the pipeline drains.
    Slices are clipped to the measured interval.

    Args:
        spans: the slices of one or more ranks.
        warmup: batches left out, at least 1.

    Raises:
        ValueError: `warmup` is below 1, or a rank computed no batch after it.
    """
    if warmup < 1:
        raise ValueError(
            f"warmup must be at least 1, got {warmup}: a step is measured from the end of the previous one"
        )
    return [
        _summarise_rank(rank, [span for span in spans if span.rank == rank], warmup)
        for rank in sorted({span.rank for span in spans})
    ]


def _summarise_rank(rank: int, spans: list[Span], warmup: int) -> RankSummary:
    computed: dict[int, int] = {}  # batch -> end of its computation
    for span in spans:
        if span.lane == "compute":
            computed[span.batch] = max(computed.get(span.batch, span.end_ns), span.end_ns)
    ends = [computed[batch] for batch in sorted(computed)][warmup - 1 :]
    if len(ends) < 2:
        raise ValueError(
            f"rank {rank} computed {len(computed)} batches: none is left after {warmup} of warm-up"
        )
    stretch = [(ends[0], ends[-1])]

    def lanes(*names: str) -> list[Interval]:
        return intersection(_working(spans, names), stretch)

    looking_up = lanes(*LOOKUP_LANES)
    transfers = _transfers([span for span in spans if ends[0] <= span.start_ns < ends[-1]])
    return RankSummary(
        rank=rank,
        steps=len(ends) - 1,
        start_ns=ends[0],
        elapsed_ns=ends[-1] - ends[0],
        step_ns=int(median(after - before for before, after in pairwise(ends))),
        busy_ns={lane: length(lanes(lane)) for lane in LANES},
        communication_ns=length(lanes(*COMMUNICATION_LANES)),
        exposed_ns=length(intersection(exposed(spans), stretch)),
        lookup_ns=length(looking_up),
        hidden_lookup_ns=length(intersection(looking_up, lanes(*MAIN_PATH_LANES))),
        transfers=len(transfers),
        transfers_overlapped=sum(transfers),
    )


def _working(spans: Iterable[Span], lanes: Sequence[str]) -> list[Interval]:
    return union((span.start_ns, span.end_ns) for span in spans if span.lane in lanes)


def _transfers(spans: Iterable[Span]) -> list[bool]:
    """For each micro-batch's transfer, whether another micro-batch of its batch computed at the time."""
    of_batch: dict[int, list[Span]] = {}
    for span in spans:
        if span.micro_batch is not None:
            of_batch.setdefault(span.batch, []).append(span)
    return [
        any(
            other.lane == "compute"
            and other.micro_batch != transfer.micro_batch
            and max(other.start_ns, transfer.start_ns) < min(other.end_ns, transfer.end_ns)
            for other in batch
        )
        for batch in of_batch.values()
        for transfer in batch
        if transfer.lane == "communication"
    ]


@dataclass(frozen=True)
class Violation:
    """A violation of one dependency.

    Attributes:
        edge: the dependency.
        successor: the slice that should have waited.
        micro_batch: of the predecessor's slice.
        predecessor: the slice to wait for; None if it was not recorded.
    """

    edge: Edge
    successor: Span
    micro_batch: int | None
    predecessor: Span | None

    def __str__(self) -> str:
        stage, _, offset, _ = self.edge
        waiting = self.successor
        who = _label(waiting.name, waiting.batch, waiting.micro_batch, waiting.rank)
        whom = _label(stage, waiting.batch - offset, self.micro_batch, waiting.rank)
        if self.predecessor is None:
            return f"{who} waits for {whom}, which was not recorded"
        early = (self.predecessor.end_ns - waiting.start_ns) / 1e3
        return f"{who} started {early:.1f} us before the end of {whom}"


@dataclass(frozen=True)
class EdgeReport:
    """Result of `check_edges`.

    Attributes:
        instances: edge -> number of compared pairs of slices.
        violations: pairs out of order, and missing predecessors.
        never_exercised: edges without an instance in the trace, which are therefore not proven.
    """

    instances: dict[Edge, int]
    violations: list[Violation]
    never_exercised: list[Edge]

    @property
    def honoured(self) -> bool:
        """Whether there are edges, each was exercised, and none was violated."""
        return bool(self.instances) and not self.violations and not self.never_exercised


def check_trace(trace: Trace) -> EdgeReport:
    """`check_edges` of a trace that a trainer recorded, which has the schedule's edges in its metadata."""
    about = trace.metadata
    return check_edges(
        trace.spans, about.get("edges", []), about.get("micro_batches"), about.get("done_by", {})
    )


def check_edges(
    spans: Sequence[Span],
    edges: Iterable[Sequence[Any]],
    micro_batches: int | None = None,
    done_by: Mapping[str, Sequence[int]] | None = None,
) -> EdgeReport:
    """Check that every dependency of a schedule was honoured: predecessors end before successors start.

    An edge ``(from_stage, to_stage, batch_offset, rule)`` says that on each rank `to_stage` of batch t waits
    for `from_stage` of batch ``t - batch_offset``, of these micro-batches:

    ========  =============================================================
    none      `from_stage` runs once per batch
    same      the one with the successor's index
    previous  the one before the successor's; the first waits for nothing
    all       every one
    ========  =============================================================

    A predecessor that was not recorded is a violation (a lost micro-batch must not pass), unless its batch is
    earlier than the first one recorded.

    Args:
        spans: the slices of one or more ranks.
        edges: the dependencies, as tuples or as the lists that JSON makes of them.
        micro_batches: N; by default one more than the largest index recorded on the rank.
        done_by: of stages in which micro-batches share a task: [i] the micro-batch whose task does i's work.

    Raises:
        ValueError: an unknown rule, or an edge back in time.
    """
    instances = {_edge(edge): 0 for edge in edges}
    violations: list[Violation] = []
    counts = []
    for rank in sorted({span.rank for span in spans}):
        own = [span for span in spans if span.rank == rank]
        seen = max((span.micro_batch for span in own if span.micro_batch is not None), default=-1) + 1
        counts.append(micro_batches or seen)
        _check_rank(own, counts[-1], instances, violations, done_by or {})
    never = [edge for edge, number in instances.items() if not number]
    # the first micro-batch has no previous one, so neither has a stage in which it does the work of all
    alone = bool(counts) and max(counts) <= 1
    first = {stage for stage, doers in (done_by or {}).items() if set(doers) == {0}}
    never = [edge for edge in never if edge[3] != "previous" or not (alone or edge[1] in first)]
    return EdgeReport(instances, violations, never)


def _check_rank(
    spans: list[Span],
    micro_batches: int,
    instances: dict[Edge, int],
    violations: list[Violation],
    done_by: Mapping[str, Sequence[int]],
) -> None:
    first_batch = min(span.batch for span in spans)
    recorded: dict[tuple[str, int, int | None], list[Span]] = {}
    by_stage: dict[str, list[Span]] = {}
    for span in spans:
        recorded.setdefault((span.name, span.batch, span.micro_batch), []).append(span)
        by_stage.setdefault(span.name, []).append(span)
    for edge in instances:
        from_stage, to_stage, offset, rule = edge
        for successor in by_stage.get(to_stage, []):
            batch = successor.batch - offset
            if batch < first_batch:
                continue
            for micro_batch in _awaited(rule, successor.micro_batch, micro_batches):
                doer = micro_batch
                if micro_batch is not None and from_stage in done_by:
                    doer = done_by[from_stage][micro_batch]
                predecessors = recorded.get((from_stage, batch, doer), [])
                if not predecessors:
                    violations.append(Violation(edge, successor, micro_batch, None))
                    continue
                instances[edge] += 1
                latest = max(predecessors, key=lambda span: span.end_ns)
                if latest.end_ns > successor.start_ns:
                    violations.append(Violation(edge, successor, micro_batch, latest))


def _awaited(rule: str, micro_batch: int | None, micro_batches: int) -> list[int | None]:
    if rule == "none":
        return [None]
    if rule == "all":
        return list(range(micro_batches))
    if micro_batch is None:
        raise ValueError(f"rule {rule!r} on a stage that runs once per batch")
    index = micro_batch - (rule == "previous")
    return [index] if index >= 0 else []


def _edge(edge: Sequence[Any]) -> Edge:
    from_stage, to_stage, offset, rule = edge
    if rule not in MICRO_BATCH_RULES:
        raise ValueError(f"edge {tuple(edge)}: the rule must be one of {', '.join(MICRO_BATCH_RULES)}")
    if offset < 0:
        raise ValueError(f"edge {tuple(edge)}: a stage cannot wait for a batch that comes later")
    return from_stage, to_stage, offset, rule


def _label(stage: str, batch: int, micro_batch: int | None, rank: int) -> str:
    which = "" if micro_batch is None else f", micro-batch {micro_batch}"
    return f"{stage} of batch {batch}{which} on rank {rank}"
