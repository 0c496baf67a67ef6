"""What `tritonrec train --slipstream` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..shown import say, table

METRICS = ("AUC", "accuracy", "BCE")


def speedup(summary: dict[str, Any], run: dict[str, Any]) -> float:
    """CPU seconds of all inputs over those of the run, both after the classification."""
    return summary["runs"][0]["cpu_seconds"] / max(run["cpu_seconds"], 1e-9)


def net_speedup(summary: dict[str, Any], run: dict[str, Any]) -> float:
    """The same, with the time for snapshots, threshold and classification on the run's side."""
    spent = run["cpu_seconds"] + summary["overhead_cpu_seconds"]
    return summary["runs"][0]["cpu_seconds"] / max(spent, 1e-9)


def whole_speedup(summary: dict[str, Any], run: dict[str, Any]) -> float:
    """The same over the whole run: steps before the classification cost as those of all inputs after it."""
    exact = summary["runs"][0]
    before = exact["cpu_seconds"] / max(exact["steps"], 1) * summary["classify_at"]
    overhead = 0.0 if run["at_random"] else summary["overhead_cpu_seconds"]
    spent = before + run["cpu_seconds"] + overhead
    return (before + exact["cpu_seconds"]) / max(spent, 1e-9)


def sent(run: dict[str, Any]) -> int:
    """Bytes of keys, rows and gradients that left the ranks."""
    return run["counts"]["key_bytes"] + run["counts"]["row_bytes"]


def print_slipstream(summary: dict[str, Any], console: Console) -> None:
    """Tables of dropped inputs, saved time and lost accuracy."""
    job, snapshots = summary["job"], summary["snapshots"]
    online = f", the last {summary['online']:.0%} of the inputs online" if summary["online"] else ""
    console.print(
        f"Slipstream on {job['data']}, {summary['mode']} at {summary['world_size']} ranks{online}. "
        "APPROXIMATE unless the threshold is 0.",
        style="bold",
        highlight=False,
    )
    console.print(_dropped(summary))
    console.print(_work(summary))
    console.print(_quality(summary))
    exact = summary["runs"][0]
    left_out = snapshots["hot_rows_left_out"]
    say(
        console,
        f"{snapshots['hot_rows']:,} hot rows"
        f"{f', {left_out:,} more left out for want of memory' if left_out else ''}; "
        f"{snapshots['rows_judged']:,} of them were trained between the last two snapshots; snapshots take "
        f"{snapshots['bytes_of_largest_rank'] / 1e6:.2f} MB on the largest rank\n"
        f"classified before step {summary['classify_at']}; snapshots, threshold and classification took "
        f"{summary['overhead_cpu_seconds']:.2f} s of CPU time, all inputs afterwards "
        f"{exact['cpu_seconds']:.2f} s (net speed-up counts both)",
    )


def _dropped(summary: dict[str, Any]) -> Table:
    columns = "drop", "T", "rows stale", "hot inputs", "sample", "estimate at T", "dropped", "of all"
    rows = []
    for run in summary["runs"][1:]:
        if run["at_random"]:
            continue
        found = run["classification"]
        low, _share, high = found["interval"]
        rows.append((
            f"{run['drop']:.0%}", f"{found['threshold']:.3g}", f"{found['stale_rows']:,}",
            f"{found['hot_inputs']:,}", f"{found['sampled']:,}", f"{low:.1%} to {high:.1%}",
            f"{found['dropped_share_of_hot']:.1%}", f"{found['dropped'] / max(found['inputs'], 1):.1%}",
        ))  # fmt: skip
    return table("Classification", columns, rows, fold=())


def _work(summary: dict[str, Any]) -> Table:
    title = "Speed-up of the whole run; the rest is after the classification"
    columns = "drop", "whole", "inputs", "steps", "CPU s", "speed-up", "net", "rows read", "MB sent"
    rows = []
    for run in summary["runs"]:
        whole, after, net = (
            "1" if run["drop"] is None else f"{ratio(summary, run):.2f}x"
            for ratio in (whole_speedup, speedup, net_speedup)
        )
        rows.append((
            _name(run), whole, f"{run['inputs']:,}", f"{run['steps']:,}", f"{run['cpu_seconds']:.1f}", after,
            net, f"{run['counts']['read']:,}", f"{sent(run) / 1e6:.2f}",
        ))  # fmt: skip
    return table(title, columns, rows, fold=())


def _quality(summary: dict[str, Any]) -> Table:
    exact, rows = summary["runs"][0]["metrics"], []
    for run in summary["runs"]:
        cells = [_name(run)]
        for name in METRICS:
            value = run["metrics"][name]
            cells += [f"{value:.5f}", "" if run["drop"] is None else f"{value - exact[name]:+.5f}"]
        rows.append(cells)
    columns = "drop", *(each for name in METRICS for each in (name, "difference"))
    return table("Held out", columns, rows)


def _name(run: dict[str, Any]) -> str:
    return "none" if run["drop"] is None else f"{run['drop']:.0%}{' random' if run['at_random'] else ''}"
