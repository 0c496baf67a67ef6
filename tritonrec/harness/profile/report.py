"""Where a profiled step's time went: lanes, the operators in them, and Python functions."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...pipeline import PIPELINED
from ...trace import LANES, Operator, Trace, read
from ...trace.analysis import Interval, RankSummary, intersection, length, summarise, union
from .flame import Function, Samples, count

OPERATORS_SHOWN, FUNCTIONS_SHOWN, LEAST_SHARE = 8, 12, 0.01


@dataclass
class LaneTimes:
    """Milliseconds per step of one lane, or of another thread, as the mean of the ranks.

    Attributes:
        busy: while the recorder saw a stage at work; 0 of a thread that is no lane.
        outside: the part of it in which no operator ran: Python, and waiting.
        own: operator -> its time without the operators it calls. calls: operator -> calls per step.
    """

    busy: float = 0.0
    outside: float = 0.0
    own: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def lane_times(trace: Trace, summaries: Sequence[RankSummary]) -> dict[str, LaneTimes]:
    """Times of each lane at work, in their order, then those of other threads that ran operators."""
    found = {lane: LaneTimes() for lane in LANES}
    for summary in summaries:
        _add_rank(trace, summary, 1 / (summary.steps * len(summaries)), found)
    return {lane: times for lane, times in found.items() if times.busy or times.own}


def _add_rank(trace: Trace, summary: RankSummary, share: float, found: dict[str, LaneTimes]) -> None:
    """Add a rank's times, each times `share`, over the stretch that its summary covers."""
    begin, end = summary.start_ns, summary.start_ns + summary.elapsed_ns
    ran: dict[str, list[Interval]] = {}
    for lane, operator, own in _by_lane(trace, summary.rank):
        if begin <= operator.start_ns < end:
            times = found.setdefault(lane, LaneTimes())
            times.own[operator.name] += own / 1e6 * share
            times.calls[operator.name] += share
            ran.setdefault(lane, []).append((operator.start_ns, operator.end_ns))
    for lane, busy in summary.busy_ns.items():
        spans = [span for span in trace.spans if span.rank == summary.rank and span.lane == lane]
        working = intersection(union((span.start_ns, span.end_ns) for span in spans), [(begin, end)])
        covered = length(intersection(working, union(ran.get(lane, []))))
        found[lane].busy += busy / 1e6 * share
        found[lane].outside += (busy - covered) / 1e6 * share


def _by_lane(trace: Trace, rank: int) -> Iterator[tuple[str, Operator, int]]:
    """(lane, operator, its nanoseconds without the operators it calls) of one rank.

    Where one thread runs several lanes, an operator belongs to the lane whose slice it begins in.
    """
    by_thread: dict[str, list[Operator]] = {}
    for operator in trace.operators:
        if operator.rank == rank:
            by_thread.setdefault(operator.thread, []).append(operator)
    in_turn = trace.metadata["mode"] not in PIPELINED
    together = trace.metadata.get("one_thread", [])
    slices = sorted(
        (s.start_ns, s.end_ns, s.lane)
        for s in trace.spans
        if s.rank == rank and (in_turn or s.lane in together)
    )
    for thread, ran in by_thread.items():
        for operator, own in zip(ran, own_times(ran), strict=True):
            before = bisect_right(slices, (operator.start_ns, float("inf"), "")) - 1
            inside = before >= 0 and operator.start_ns < slices[before][1]
            of_slice = inside and (in_turn or thread in together)
            yield slices[before][2] if of_slice else thread, operator, own


def own_times(operators: Sequence[Operator]) -> list[int]:
    """Nanoseconds of each operator without those it calls; all of one thread, callers before the called."""
    own = [operator.end_ns - operator.start_ns for operator in operators]
    callers: list[int] = []
    for index, operator in enumerate(operators):
        while callers and operators[callers[-1]].end_ns <= operator.start_ns:
            callers.pop()
        if callers:
            own[callers[-1]] -= operator.end_ns - operator.start_ns
        callers.append(index)
    return own


def print_profile(trace_file: Path, flame: Path | None, cost: float, console: Console) -> None:
    """Print the tables of a trace with operators, and of a flame graph where there is one.

    `cost` is the CPU time of the steps over that of steps without torch.profiler.
    """
    trace = read(trace_file)
    summaries = summarise(trace.spans)
    about, step = trace.metadata, sum(s.step_ns for s in summaries) / len(summaries) / 1e6
    console.print(
        f"[bold]{about['mode']}[/bold], consistency {about['consistency']}, world size "
        f"{about['world_size']}, N = {about['micro_batches']}: {summaries[0].steps} steps, the "
        f"median {step:.1f} ms; CPU time {cost:.2f} times that without torch.profiler",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_lane_table(lane_times(trace, summaries), step))
    if flame is not None:
        console.print(_function_table(count(flame.read_bytes())))
    console.print(f"trace: {trace_file}, for https://ui.perfetto.dev", highlight=False, soft_wrap=True)
    if flame is not None:
        console.print(f"flame graph: {flame}, for a browser", highlight=False, soft_wrap=True)


def _lane_table(lanes: dict[str, LaneTimes], step: float) -> Table:
    table = Table(
        title="Lanes and their operators, ms per step, mean of the ranks",
        title_justify="left",
        caption="lanes work side by side; an operator's time is without those it calls; outside operators: "
        "Python and waits; operators without a library's name are tritonrec's. torch.profiler makes those "
        "lanes longer that call many operators.",
        caption_justify="left",
    )
    table.add_column("lane")
    for name in ("busy", "operator", "own", "calls"):
        table.add_column(name, justify="left" if name == "operator" else "right", overflow="fold")
    for lane, times in lanes.items():
        rows = _operator_rows(times, step)
        busy = f"{times.busy:.2f}" if times.busy else "-"
        first, *others = rows or [("", "", "")]
        table.add_row(lane, busy, *first)
        for row in others:
            table.add_row("", "", *row)
    return table


def _operator_rows(times: LaneTimes, step: float) -> list[tuple[str, str, str]]:
    """Operators that take most of a lane, then all others together, then the time outside of operators."""
    least = LEAST_SHARE * step
    longest = sorted(times.own, key=lambda name: -times.own[name])[:OPERATORS_SHOWN]
    shown = [name for name in longest if times.own[name] >= least]
    rows = [
        (name.removeprefix("tritonrec::"), f"{times.own[name]:.2f}", f"{times.calls[name]:.1f}")
        for name in shown
    ]
    left = [name for name in times.own if name not in shown]
    if left:
        name = f"{len(left)} {'other' if shown else 'operator'}{'s' * (len(left) > 1)}"
        own, calls = (sum(counts[each] for each in left) for counts in (times.own, times.calls))
        rows.append((name, f"{own:.2f}", f"{calls:.1f}"))
    if times.busy:
        rows.append(("outside operators", f"{times.outside:.2f}", ""))
    return rows


def _function_table(samples: Samples) -> Table:
    table = Table(
        title=f"Python functions, by {samples.working:,} samples of py-spy; {samples.waiting:,} waits are "
        "left out",
        title_justify="left",
        caption="own: samples in the function itself; total: with its callees",
        caption_justify="left",
    )
    table.add_column("function (file)", overflow="fold")
    table.add_column("own", justify="right")
    table.add_column("total", justify="right")
    for each in samples.functions[:FUNCTIONS_SHOWN]:
        shares = (f"{count / samples.working:.1%}" for count in (each.own, each.total))
        table.add_row(_in_a_line(each), *shares)
    return table


def _in_a_line(function: Function) -> str:
    """``_launch.run (hstu_attention/__init__.py:240)``: a file with the one folder that tells it apart."""
    name = function.name.replace(".<locals>", "")
    return f"{name} ({'/'.join(function.place.split('/')[-2:])})"
