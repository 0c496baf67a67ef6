"""Figures of a run from its trace and its counts: per step and rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from statistics import mean, median

from ...trace import read
from ...trace.analysis import LANES, check_trace, summarise
from ...trace.reader import Span
from ..network import LabError
from .run import LabRun

WARMUP = 2
"""Batches left out: the pipeline is full after them."""


@dataclass(frozen=True)
class Figures:
    """Seconds per step, mean over the ranks; bytes that left a rank per step, mean over the ranks.

    Attributes:
        step: from the end of one batch's computation to the end of the next one's, median; of approximate
            runs the mean, as they average after some steps only. mean_step: the mean of any.
        lookup, exposed_lookup: time of the lookup lanes, and the part beside which nothing else was at work.
        communication, exposed: physical and exposed communication.
        compute: time of the compute lane. row_copy: of the dual buffer.
        transfers, overlapped: exchanges of micro-batches per step, and those beside computation.
        row_bytes, key_bytes: embeddings and gradients; keys.
        rows: rows of embeddings and of gradients that left a rank, mean of the two, without the replica
            reduction.
        replica, exposed_replica, replica_bytes: communication, its exposed part and bytes between copies of
            the tables (2D sparse parallelism); they are part of the figures above.
        link_bytes: of all kinds that left a machine over its link, per step, mean over the machines.
        kept: share of a batch's rows that the buffer of the batch before has, with two buffers; otherwise 0.
        busy: lane -> share of the time in which it is at work, of lanes that are at all.
    """

    step: float
    lookup: float
    exposed_lookup: float
    communication: float
    exposed: float
    compute: float
    row_copy: float
    transfers: float
    overlapped: float
    row_bytes: float
    key_bytes: float
    rows: float
    mean_step: float
    replica: float
    exposed_replica: float
    replica_bytes: float
    link_bytes: float
    kept: float
    busy: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_ratio(self) -> float:
        """Exposed over physical communication."""
        return self.exposed / self.communication if self.communication else 0.0

    @property
    def hidden_lookup(self) -> float:
        """Share of the lookup that ran beside other work."""
        return 1 - self.exposed_lookup / self.lookup if self.lookup else 0.0

    @property
    def overlap(self) -> float:
        """Share of the exchanges that ran beside computation."""
        return self.overlapped / self.transfers if self.transfers else 0.0


def figures(run: LabRun) -> Figures:
    """Measure a run.

    Raises `LabError` if a dependency of the schedule was not honoured.
    """
    trace = read(run.trace)
    if trace.metadata["edges"]:
        report = check_trace(trace)
        if not report.honoured:
            unseen = f"edges never exercised: {report.never_exercised}; run more steps"
            raise LabError(f"{run.setting}: {report.violations[0] if report.violations else unseen}")
    ranks = summarise(trace.spans, WARMUP)
    reductions = summarise([span for span in trace.spans if span.lane in ("compute", "replica")], WARMUP)

    def per_step(values: Sequence[int]) -> float:
        return mean(value / rank.steps for value, rank in zip(values, ranks, strict=True)) / 1e9

    done = run.steps * len(ranks)
    median_step = median(rank.step_ns for rank in ranks) / 1e9
    mean_step = per_step([rank.elapsed_ns for rank in ranks])
    elapsed = sum(rank.elapsed_ns for rank in ranks)
    busy = {lane: sum(rank.busy_ns[lane] for rank in ranks) / elapsed for lane in LANES}
    first = min(span.batch for span in trace.spans)
    later = sum(span.args["keys"] for span in trace.spans if span.name == "retrieve" and span.batch > first)
    return Figures(
        step=mean_step if run.setting.approximate else median_step,
        lookup=per_step([rank.lookup_ns for rank in ranks]),
        exposed_lookup=per_step([rank.lookup_ns - rank.hidden_lookup_ns for rank in ranks]),
        communication=per_step([rank.communication_ns for rank in ranks]),
        exposed=per_step([rank.exposed_ns for rank in ranks]),
        compute=per_step([rank.busy_ns["compute"] for rank in ranks]),
        row_copy=per_step([rank.busy_ns["copy"] for rank in ranks]),
        transfers=mean(rank.transfers / rank.steps for rank in ranks),
        overlapped=mean(rank.transfers_overlapped / rank.steps for rank in ranks),
        row_bytes=run.counts["row_bytes"] / done,
        key_bytes=run.counts["key_bytes"] / done,
        rows=run.counts["rows"] / done / 2,
        mean_step=mean_step,
        replica=per_step([rank.communication_ns for rank in reductions]),
        exposed_replica=per_step([rank.exposed_ns for rank in reductions]),
        replica_bytes=sum(s.args.get("bytes", 0) for s in trace.spans if s.lane == "replica") / done,
        link_bytes=run.link_bytes / run.steps,
        kept=run.counts["kept"] / later if later else 0.0,
        busy={lane: share for lane, share in busy.items() if share},
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds."""
    lanes = {lane: median(one.busy.get(lane, 0.0) for one in rounds) for lane in rounds[0].busy}
    names = [each.name for each in fields(Figures) if each.name != "busy"]
    return Figures(**{name: median(getattr(one, name) for one in rounds) for name in names}, busy=lanes)


@dataclass(frozen=True)
class StageCost:
    """A stage's cost: `tasks` per step and rank, median seconds of a task, mean bytes of one that sends."""

    lane: str
    tasks: float
    seconds: float
    bytes: float | None


def stage_costs(spans: Sequence[Span]) -> dict[str, StageCost]:
    """Costs by stage over the measured steps of all ranks."""
    first = sorted({span.batch for span in spans})[WARMUP]
    measured = [span for span in spans if span.batch >= first]
    steps = len({(span.rank, span.batch) for span in measured})
    costs = {}
    for name in dict.fromkeys(span.name for span in measured):
        own = [span for span in measured if span.name == name]
        sent = [span.args["bytes"] for span in own if "bytes" in span.args]
        seconds = median(span.duration_ns for span in own) / 1e9
        costs[name] = StageCost(own[0].lane, len(own) / steps, seconds, mean(sent) if sent else None)
    return costs
