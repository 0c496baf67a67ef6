"""What `tritonrec simulate` and `tritonrec plan` print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..shown import say, table
from .curves import SWEEP_WORKERS, Point
from .measured import MeasuredRow
from .planner import Advice
from .replay import AIM, Replay, ReplayedCell, summarise


def print_replay(replay: Replay, console: Console, only: str | None = None) -> None:
    """Tables of paper, model and error; errors over the unseen cells; the constants.

    Raises ValueError where no table's name contains `only`.
    """
    tables = dict.fromkeys(cell.table for cell in replay.cells)
    chosen = [name for name in tables if only is None or only.lower() in name.lower()]
    if not chosen:
        raise ValueError(f"no table's name contains {only!r}; the tables are {', '.join(tables)}")
    for name in chosen:
        cells = [cell for cell in replay.cells if cell.table == name]
        console.print(_cells_table(name, cells))
    console.print(_summary_table(replay, chosen))
    for name, cluster in replay.model.clusters.items():
        say(
            console,
            f"{name.upper()}s: {cluster.compute_seconds * 1e3:.0f} ms of compute, lookup "
            f"{cluster.lookup_seconds * 1e3:.2f} ms * W ** {cluster.contention:.3f}, links "
            f"{cluster.bandwidth / 1e9:.1f} GB/s / S ** {cluster.contention:.3f}",
        )


def _cells_table(name: str, cells: Sequence[ReplayedCell]) -> Table:
    rows = [
        (
            cell.row, f"{cell.workers:,} {cell.cluster.upper()}s", cell.column, f"{cell.paper:.2f}",
            f"{cell.model:.2f}", f"{cell.error:+.1%}", "fitted" if cell.fitted else "unseen",
        )
        for cell in cells
    ]  # fmt: skip
    made = table(name, ("row", "workers", "column", "paper", "model", "error", ""), rows, ("column", ""))
    for row, cell in zip(made.rows, cells, strict=True):
        row.style = None if cell.within or cell.fitted else "yellow"
    return made


def _summary_table(replay: Replay, tables: Sequence[str]) -> Table:
    unseen = replay.unseen()
    groups = {
        "fitted": [cell for cell in replay.cells if cell.fitted],
        "unseen": unseen,
        **{f"  {name}": [cell for cell in unseen if cell.table == name] for name in tables},
    }
    # What is left of a latency that is nearly hidden is a small part of a step; steps are what one plans by.
    whole = ("step ms", "QPS 1e5", "speedup", "scaling %", "utilization %")
    groups["  of whole steps"] = [cell for cell in unseen if cell.column in whole]
    groups["  of their parts"] = [cell for cell in unseen if cell.column not in whole]
    found = {name: summarise(cells) for name, cells in groups.items() if cells}
    rows = [
        (name, str(each.cells), f"{each.median:.1%}", f"{each.worst:.1%}", f"{each.within:.0%}")
        for name, each in found.items()
    ]
    columns = "cells", "number", "median", "worst", f"within {AIM:.0%}"
    return table("Sizes of the relative errors", columns, rows)


def print_points(points: Sequence[Point], title: str, console: Console) -> None:
    """Steps, communication and throughput of curves' points."""
    columns = "plan", "workers", "N", "step ms", "comm. ms", "exposed ms", "lookup ms", "QPS 1e5"
    rows = []
    for point in points:
        seen = point.outcome
        seconds = seen.step, seen.communication, seen.exposed, seen.exposed_lookup
        rows.append((
            point.method, f"{point.workers:,}", str(point.micro_batches),
            *(f"{each * 1e3:.1f}" for each in seconds), f"{point.queries_per_second / 1e5:.2f}",
        ))  # fmt: skip
    console.print(table(title, columns, rows))


def sweep_title() -> str:
    """Of Fig. 9's table."""
    return f"Micro-batches of 256 to 16 samples on {SWEEP_WORKERS} workers (Fig. 9)"


def print_measured(rows: Sequence[MeasuredRow], unknown: Sequence[str], console: Console) -> None:
    """Measured beside predicted steps and exposed communication."""
    cells = [
        (
            row.name, str(row.micro_batches), f"{row.step * 1e3:.1f}", f"{row.predicted_step * 1e3:.1f}",
            f"{row.error:+.1%}", f"{row.exposed * 1e3:.1f}", f"{row.predicted_exposed * 1e3:.1f}",
            "costs taken" if row.fitted else "unseen",
        )
        for row in rows
    ]  # fmt: skip
    columns = "run", "N", "step", "model", "error", "exposed", "model", ""
    console.print(table("Measured runs, ms per step", columns, cells, ("",)))
    if unknown:
        say(console, f"not modelled: {', '.join(unknown)}")


def print_advice(advice: Advice, console: Console) -> None:
    """The best plans with their expectation, and what that rests on."""
    rows = [("sequential", ("1", "-", "1", "1"), advice.sequential, 1.0)]
    for place, found in enumerate(advice.candidates, 1):
        plan = found.plan
        depth = plan.schedule().batches_in_flight
        shape = (str(plan.micro_batches), f"{plan.taper:g}", str(depth), str(plan.replicas))
        switches = [name for name in ("first_use", "skip_fetch") if getattr(plan, name)]
        rows.append((" ".join([f"nestpipe, {place}", *switches]), shape, found.outcome, found.gain))
    cells = [
        (
            name, *shape, f"{seen.step * 1e3:.2f}", f"{seen.exposed * 1e3:.2f}", f"{seen.exposed_ratio:.1%}",
            f"{seen.exposed_lookup * 1e3:.2f}", f"{gain:.2f}x",
        )
        for name, shape, seen, gain in rows
    ]  # fmt: skip
    columns = "plan", "N", "taper", "depth", "copies", "step", "exposed", "of all", "lookup", "gain"
    console.print(table(f"Plans for {advice.world_size:,} ranks, ms per step", columns, cells))
    say(
        console,
        "N: micro-batches. taper: ratio of their sizes towards the ends. depth: batches in flight. copies: "
        "of the tables (2D). exposed: communication that no computation hides, and its share. lookup: "
        "exposed. gain: over sequential.",
    )
    for each in advice.savings:
        before, after, saved = each.without, each.having, round(each.step, 3) + 0.0  # no -0.0
        say(
            console,
            f"{each.switch}: {'chosen' if each.chosen else 'not chosen'}; with it the best plan's step is "
            f"{after.step * 1e3:.2f} ms, without it {before.step * 1e3:.2f} ({saved:.1%} saved); sent "
            f"{after.sent / 1e6:.2f} MB and {before.sent / 1e6:.2f}; lookup, hidden or not, "
            f"{after.lookup * 1e3:.2f} ms and {before.lookup * 1e3:.2f}",
        )
    for note in advice.notes:
        say(console, f"assumed: {note}")
