"""What `tritonrec simulate` and `tritonrec plan` print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

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
        console.print(
            f"{name.upper()}s: {cluster.compute_seconds * 1e3:.0f} ms of compute, lookup "
            f"{cluster.lookup_seconds * 1e3:.2f} ms * W ** {cluster.contention:.3f}, links "
            f"{cluster.bandwidth / 1e9:.1f} GB/s / S ** {cluster.contention:.3f}",
            highlight=False,
            soft_wrap=True,
        )


def _cells_table(name: str, cells: Sequence[ReplayedCell]) -> Table:
    table = Table(title=name, title_justify="left", padding=(0, 0, 0, 1))
    for column in ("row", "workers", "column"):
        table.add_column(column, justify="right" if column == "workers" else "left")
    for column in ("paper", "model", "error"):
        table.add_column(column, justify="right")
    table.add_column("")
    for cell in cells:
        style = "" if cell.within or cell.fitted else "yellow"
        table.add_row(
            cell.row,
            f"{cell.workers:,} {cell.cluster.upper()}s",
            cell.column,
            f"{cell.paper:.2f}",
            f"{cell.model:.2f}",
            f"{cell.error:+.1%}",
            "fitted" if cell.fitted else "unseen",
            style=style,
        )
    return table


def _summary_table(replay: Replay, tables: Sequence[str]) -> Table:
    table = Table(title="Sizes of the relative errors", title_justify="left", padding=(0, 0, 0, 1))
    for column in ("cells", "number", "median", "worst", f"within {AIM:.0%}"):
        table.add_column(column, justify="left" if column == "cells" else "right")
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
    for name, cells in groups.items():
        if cells:
            found = summarise(cells)
            row = (f"{found.median:.1%}", f"{found.worst:.1%}", f"{found.within:.0%}")
            table.add_row(name, str(found.cells), *row)
    return table


def print_points(points: Sequence[Point], title: str, console: Console) -> None:
    """Steps, communication and throughput of curves' points."""
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("plan")
    for column in ("workers", "N", "step ms", "comm. ms", "exposed ms", "lookup ms", "QPS 1e5"):
        table.add_column(column, justify="right")
    for point in points:
        seen = point.outcome
        table.add_row(
            point.method,
            f"{point.workers:,}",
            str(point.micro_batches),
            *(
                f"{seconds * 1e3:.1f}"
                for seconds in (seen.step, seen.communication, seen.exposed, seen.exposed_lookup)
            ),
            f"{point.queries_per_second / 1e5:.2f}",
        )
    console.print(table)


def sweep_title() -> str:
    """Of Fig. 9's table."""
    return f"Micro-batches of 256 to 16 samples on {SWEEP_WORKERS} workers (Fig. 9)"


def print_measured(rows: Sequence[MeasuredRow], unknown: Sequence[str], console: Console) -> None:
    """Measured beside predicted steps and exposed communication."""
    table = Table(title="Measured runs, ms per step", title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("run")
    for column in ("N", "step", "model", "error", "exposed", "model"):
        table.add_column(column, justify="right")
    table.add_column("")
    for row in rows:
        table.add_row(
            row.name,
            str(row.micro_batches),
            f"{row.step * 1e3:.1f}",
            f"{row.predicted_step * 1e3:.1f}",
            f"{row.error:+.1%}",
            f"{row.exposed * 1e3:.1f}",
            f"{row.predicted_exposed * 1e3:.1f}",
            "costs taken" if row.fitted else "unseen",
        )
    console.print(table)
    if unknown:
        console.print(f"not modelled: {', '.join(unknown)}", highlight=False, soft_wrap=True)


def print_advice(advice: Advice, console: Console) -> None:
    """The best plans with their expectation, and what that rests on."""
    title = f"Plans for {advice.world_size:,} ranks, ms per step"
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    table.add_column("plan")
    for column in ("N", "taper", "depth", "copies", "step", "exposed", "of all", "lookup", "gain"):
        table.add_column(column, justify="right")
    rows = [("sequential", ("1", "-", "1", "1"), advice.sequential, 1.0)]
    for place, found in enumerate(advice.candidates, 1):
        plan = found.plan
        depth = plan.schedule().batches_in_flight
        shape = (str(plan.micro_batches), f"{plan.taper:g}", str(depth), str(plan.replicas))
        switches = [name for name in ("first_use", "skip_fetch") if getattr(plan, name)]
        rows.append((" ".join([f"nestpipe, {place}", *switches]), shape, found.outcome, found.gain))
    for name, shape, seen, gain in rows:
        table.add_row(
            name,
            *shape,
            f"{seen.step * 1e3:.2f}",
            f"{seen.exposed * 1e3:.2f}",
            f"{seen.exposed_ratio:.1%}",
            f"{seen.exposed_lookup * 1e3:.2f}",
            f"{gain:.2f}x",
        )
    console.print(table)
    console.print(
        "N: micro-batches. taper: ratio of their sizes towards the ends. depth: batches in flight. copies: "
        "of the tables (2D). exposed: communication that no computation hides, and its share. lookup: "
        "exposed. gain: over sequential.",
        highlight=False,
        soft_wrap=True,
    )
    for each in advice.savings:
        before, after, saved = each.without, each.having, round(each.step, 3) + 0.0  # no -0.0
        console.print(
            f"{each.switch}: {'chosen' if each.chosen else 'not chosen'}; with it the best plan's step is "
            f"{after.step * 1e3:.2f} ms, without it {before.step * 1e3:.2f} ({saved:.1%} saved); sent "
            f"{after.sent / 1e6:.2f} MB and {before.sent / 1e6:.2f}; lookup, hidden or not, "
            f"{after.lookup * 1e3:.2f} ms and {before.lookup * 1e3:.2f}",
            highlight=False,
            soft_wrap=True,
        )
    for note in advice.notes:
        console.print(f"assumed: {note}", highlight=False, soft_wrap=True)
