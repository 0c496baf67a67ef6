"""`tritonrec trace FILE`: where the time of a recorded run went, and whether its schedule was kept."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.table import Table

from ..trace import LANES, Trace, read
from ..trace.analysis import EdgeReport, RankSummary, check_trace, summarise
from .shown import say, table, written

SHOWN_VIOLATIONS = 10


def trace_report(
    path: str | os.PathLike[str],
    png: str | os.PathLike[str] | None = None,
    json_out: str | os.PathLike[str] | None = None,
    console: Console | None = None,
) -> int:
    """Print the figures of a trace, and write the requested picture or figures.

    Args:
        path: a trace of one rank, or of several joined.
        png: where the timeline of a few steps goes.
        json_out: where the printed figures go.
        console: printed to; the terminal by default.

    Returns:
        0; 1 when an edge of the schedule was violated or never exercised; 2 when the file cannot be read.
    """
    console = console or Console()
    try:
        trace = read(path)
        report = check_trace(trace)
    except (OSError, ValueError) as error:
        console.print("[red]cannot read the trace:[/red] ", end="")
        say(console, str(error))
        return 2

    console.print(_headline(trace), soft_wrap=True)
    if "exchanges" in trace.metadata:
        say(console, f"exchanges: {trace.metadata['exchanges']}")
    try:
        summaries = summarise(trace.spans)
    except ValueError as error:  # too few batches to measure; the edges can be checked all the same
        console.print("[yellow]no figures:[/yellow] ", end="")
        say(console, str(error))
        summaries = []
    if summaries:
        console.print(_busy_table(summaries))
        console.print(_overlap_table(summaries))
    _print_edges(console, report)

    written(_as_json(trace, summaries, report), json_out, console, "figures")
    if png is not None:
        from ..trace.timeline import draw

        say(console, f"timeline: {draw(trace, png)}")
    return 0 if report.honoured or not report.instances else 1


def _headline(trace: Trace) -> str:
    about = trace.metadata
    batches = {span.batch for span in trace.spans}
    missing = sorted(set(range(about["world_size"])) - set(trace.ranks))
    parts = [
        f"[bold]{about.get('mode', 'unnamed mode')}[/bold]",
        f"consistency {about['consistency']}" if "consistency" in about else "",
        f"world size {about['world_size']}",
        f"[yellow]without ranks {', '.join(map(str, missing))}[/yellow]" if missing else "",
        f"{about['micro_batches']} micro-batches" if "micro_batches" in about else "",
        f"{len(batches)} batches",
        f"{len(trace.spans)} slices",
    ]
    return ", ".join(part for part in parts if part)


def _busy_table(summaries: list[RankSummary]) -> Table:
    rows = [
        (lane, *(_per_step(summary.busy_ns[lane], summary) for summary in summaries))
        for lane in LANES
        if any(summary.busy_ns[lane] for summary in summaries)
    ]
    return table("Busy time per step (ms)", ("lane", *_ranks(summaries)), rows)


def _overlap_table(summaries: list[RankSummary]) -> Table:
    rows = {
        "steps measured": [str(s.steps) for s in summaries],
        "step time, median": [f"{s.step_ns / 1e6:.3f}" for s in summaries],
        "physical communication": [_per_step(s.communication_ns, s) for s in summaries],
        "exposed communication": [_per_step(s.exposed_ns, s) for s in summaries],
        "exposed ratio": [_percent(s.exposed_ratio) for s in summaries],
        "lookup": [_per_step(s.lookup_ns, s) for s in summaries],
        "hidden lookup": [_percent(s.hidden_lookup_ratio) for s in summaries],
        "transfers beside computation": [f"{s.transfers_overlapped} of {s.transfers}" for s in summaries],
    }
    cells = [(name, *values) for name, values in rows.items()]
    return table("Overlap per step (ms)", ("", *_ranks(summaries)), cells)


def _ranks(summaries: list[RankSummary]) -> list[str]:
    return [f"rank {summary.rank}" for summary in summaries]


def _print_edges(console: Console, report: EdgeReport) -> None:
    if not report.instances:
        console.print("edges: this mode declares none, so there is no order to check")
        return
    compared = f"{sum(report.instances.values())} instances"
    if report.honoured:
        console.print(f"[green]edges: all {len(report.instances)} honoured[/green] in {compared}")
        return
    violations = f"{len(report.violations)} violation{'' if len(report.violations) == 1 else 's'}"
    console.print(f"[red]edges: {violations}[/red] in {compared}")
    for violation in report.violations[:SHOWN_VIOLATIONS]:
        say(console, f"  {violation}")
    if len(report.violations) > SHOWN_VIOLATIONS:
        console.print(f"  and {len(report.violations) - SHOWN_VIOLATIONS} more")
    for from_stage, to_stage, offset, rule in report.never_exercised:
        which = "" if rule == "none" else f" ({rule} micro-batch)"
        say(
            console,
            f"  edge never exercised: {from_stage} of batch t-{offset}{which} before {to_stage} of batch t; "
            "record more batches",
        )


def _as_json(trace: Trace, summaries: list[RankSummary], report: EdgeReport) -> dict[str, Any]:
    return {
        "metadata": {name: value for name, value in trace.metadata.items() if name != "edges"},
        "ranks": [
            {
                "rank": s.rank,
                "steps": s.steps,
                "step_ms": s.step_ns / 1e6,
                "busy_ms_per_step": {lane: busy / 1e6 / s.steps for lane, busy in s.busy_ns.items()},
                "communication_ms_per_step": s.communication_ns / 1e6 / s.steps,
                "exposed_ms_per_step": s.exposed_ns / 1e6 / s.steps,
                "exposed_ratio": s.exposed_ratio,
                "lookup_ms_per_step": s.lookup_ns / 1e6 / s.steps,
                "hidden_lookup_ratio": s.hidden_lookup_ratio,
                "transfers": s.transfers,
                "transfers_overlapped": s.transfers_overlapped,
            }
            for s in summaries
        ],
        "edges": [
            {"from": before, "to": after, "batches_back": offset, "micro_batches": rule, "instances": seen}
            for (before, after, offset, rule), seen in report.instances.items()
        ],
        "violations": [str(violation) for violation in report.violations],
        "never_exercised": [list(edge) for edge in report.never_exercised],
        "honoured": report.honoured,
    }


def _per_step(nanoseconds: int, summary: RankSummary) -> str:
    return f"{nanoseconds / 1e6 / summary.steps:.3f}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"
