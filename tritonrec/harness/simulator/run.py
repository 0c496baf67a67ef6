"""`tritonrec simulate` and `tritonrec plan`: what the commands do once their options are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TimeElapsedColumn

from ..progress import CommandProgress
from ..shown import say, written
from . import cost_files, measured, planner, replay
from .cluster import Workload
from .curves import Point, all_workers, improvements, scaling, sweep
from .fit import fit
from .report import (
    print_advice,
    print_measured,
    print_points,
    print_replay,
    sweep_title,
)


def simulate(
    workload: Workload,
    table: str | None = None,
    workers: int | None = None,
    jitter: float = 0.0,
    json_file: Path | None = None,
    png: Path | None = None,
    console: Console | None = None,
) -> None:
    """Fit, print the paper's cells beside the model's, and write the requested files.

    Args:
        workload: the assumed keys.
        table: show only tables whose name contains this.
        workers: also simulate so many workers one by one.
        jitter: of their tasks, and of the curves' workers.
        json_file, png: where cells and curves go.
    """
    console = console or Console()
    found = replay.Replay(fit(workload=workload))
    print_replay(found, console, table)
    document = replay.as_json(found)
    steps, sizes = improvements(found.model), sweep(found.model)
    if table is None:
        print_points(steps, "Our improvements, one after another", console)
        print_points(sizes, sweep_title(), console)
    if png or json_file:
        with console.status("curves") as status:
            curve = scaling(found.model, jitter, progress=status.update)
        points = {"improvements": steps, "sweep": sizes, "scaling": curve}
        document |= {name: _points(some) for name, some in points.items()}
        if png:
            from .picture import draw

            about = f"jitter {jitter:.0%}, every worker simulated" if jitter else "identical workers"
            say(console, f"picture: {draw(curve, sizes, png, about)}")
    if workers:
        outcome, seconds = all_workers(found.model, workers, jitter)
        say(
            console,
            f"{workers:,} workers one by one, jitter {jitter:.0%}: NestPipe's step is "
            f"{outcome.step * 1e3:.0f} ms, {outcome.exposed_ratio:.1%} of its communication exposed; "
            f"simulated in {seconds:.2f} s",
        )
    written(document, json_file, console, "figures")


def simulate_measured(
    files: Sequence[Path], json_file: Path | None = None, console: Console | None = None
) -> None:
    """Predict measured runs: of reports of the lab each by itself, of traces all from the first.

    Raises ValueError for a file that is neither.
    """
    console = console or Console()
    reports = [file for file in files if file.suffix == ".json"]
    traces = [file for file in files if file.suffix != ".json"]
    rows: list[measured.MeasuredRow] = []
    for report in reports:
        found, unknown = measured.replay_lab(report)
        print_measured(found, unknown, console)
        rows += found
    if traces:
        found = measured.replay_traces(traces)
        print_measured(found, [], console)
        rows += found
    written({"measured": measured.as_json(rows)}, json_file, console, "figures")


def plan(
    costs: Path | None,
    trace: Path | None,
    world_size: int | None,
    json_file: Path | None = None,
    save_costs: Path | None = None,
    console: Console | None = None,
) -> None:
    """Search the plans for measured costs, given as a file or as a trace, and print the best."""
    console = console or Console()
    if (costs is None) == (trace is None):
        raise ValueError(
            "give the settings of a run, stage costs with --costs FILE, or a trace with --trace FILE"
        )
    known = cost_files.load(costs) if costs is not None else cost_files.from_trace(trace)  # type: ignore[arg-type]
    written(cost_files.as_json(known), save_costs, console, "costs")
    with CommandProgress(console, TimeElapsedColumn()) as progress:
        task = progress.add_task("simulating plans", total=None)
        advice = planner.search(
            known, world_size, lambda done, total: progress.update(task, completed=done, total=total)
        )
    print_advice(advice, console)
    written(planner.as_json(advice), json_file, console, "figures")


def _points(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [
        {**asdict(point), "exposed_ratio": point.outcome.exposed_ratio, "outcome": asdict(point.outcome)}
        for point in points
    ]
