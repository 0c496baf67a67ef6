"""Results of a lab: a table in the shape of NestPipe's Table II, a JSON document, a picture."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from ...files import atomic_write
from ...optional import pyplot
from ..environment import environment
from ..shown import say, table
from .rounds import PROBES, LabConfig, Result, Row
from .settings import LOOKUP_SHARES

HOW_EMULATED = (
    "emulated: a stage does its real work on real data, then sleeps until its time is over; a micro-batch "
    "gets its share by samples. Transfers are real, over the limited links."
)


def print_report(result: Result, console: Console) -> None:
    """The tables, what their columns mean, and what in them is emulated."""
    plan, baseline = result.plan, result.rows[0]
    say(console, f"{_ranks(plan)}, links of {plan.rate:g} Mbit/s, {plan.job.data}")
    console.print(_table("Latency, ms per step", result.rows, LATENCY, baseline))
    console.print(_table("Hidden time, and sent bytes", result.rows, HIDING, baseline))
    lanes = dict.fromkeys(lane for row in result.rows for lane in row.figures.busy)
    shares: Columns = {lane: partial(_busy, lane) for lane in lanes}
    console.print(_table("Share of a step in which each lane is at work", result.rows, shares, baseline))
    if plan.nodes:
        title = "All that left a machine over its link, per step"
        console.print(_table(title, result.rows, LINKS, baseline))
    if copied := [row for row in result.rows if row.setting.replicas > 1]:
        title = "Replica reduction: part of comm., of physical and of MB"
        console.print(_table(title, copied, COPIES, baseline))
    for line in notes(result):
        say(console, line)


Columns = dict[str, Callable[[Row, Row], str]]

LATENCY: Columns = {
    "step": lambda row, _: f"{row.figures.step * 1e3:.1f}",
    "speedup": lambda row, _: f"{median(row.ratios):.2f}x",
    "lookup": lambda row, _: f"{row.figures.exposed_lookup * 1e3:.1f}",
    "comm.": lambda row, _: f"{row.figures.exposed * 1e3:.1f}",
    "compute": lambda row, _: f"{row.figures.compute * 1e3:.1f}",
    "copy": lambda row, _: f"{row.figures.row_copy * 1e3:.2f}",
}
HIDING: Columns = {
    "physical": lambda row, _: f"{row.figures.communication * 1e3:.1f}",
    "exposed": lambda row, _: f"{row.figures.exposed_ratio:.1%}",
    "hidden": lambda row, _: f"{row.figures.hidden_lookup:.1%}",
    "overlap": lambda row, _: f"{row.figures.overlap:.0%}",
    "payload": lambda row, baseline: f"{payload(row, baseline):.3f}",
    "MB": lambda row, _: f"{(row.figures.row_bytes + row.figures.key_bytes) / 1e6:.2f}",
}
LINKS: Columns = {
    "steps of a lookup": lambda row, _: "2" if row.setting.nodes > 1 else "1",
    "MB": lambda row, _: f"{row.figures.link_bytes / 1e6:.2f}",
    "over sequential": lambda row, baseline: f"{row.figures.link_bytes / baseline.figures.link_bytes:.2f}",
}
COPIES: Columns = {
    "copies": lambda row, _: str(row.setting.replicas),
    "physical": lambda row, _: f"{row.figures.replica * 1e3:.1f}",
    "exposed": lambda row, _: f"{row.figures.exposed_replica * 1e3:.1f}",
    "MB": lambda row, _: f"{row.figures.replica_bytes / 1e6:.2f}",
    "of MB": lambda row, _: f"{replica_share(row):.1%}",
}


def _table(title: str, rows: Sequence[Row], columns: Columns, baseline: Row) -> Table:
    every: Columns = {
        "mode": lambda row, _: row.setting.label, "N": lambda row, _: str(row.setting.micro_batches),
        **columns,
    }  # fmt: skip
    return table(title, [*every], [[cell(row, baseline) for cell in every.values()] for row in rows])


def _busy(lane: str, row: Row, baseline: Row) -> str:
    return f"{row.figures.busy.get(lane, 0.0):.0%}"


def _ranks(plan: LabConfig) -> str:
    return f"{plan.ranks} ranks" + f" on {plan.nodes} machines" * bool(plan.nodes)


def payload(row: Row, baseline: Row) -> float:
    """Rows sent, over those of the whole batch deduplicated, which is what the baseline sends."""
    return row.figures.rows / baseline.figures.rows if baseline.figures.rows else 1.0


def replica_share(row: Row) -> float:
    """Share of the bytes sent by a rank that goes to copies of its part of the tables."""
    sent = row.figures.row_bytes + row.figures.key_bytes
    return row.figures.replica_bytes / sent if sent else 0.0


def notes(result: Result) -> list[str]:
    """Notes below the table."""
    plan, first = result.plan, result.rows[0].figures
    spread = ", ".join(
        f"{row.setting} {min(row.ratios):.2f} to {max(row.ratios):.2f}" for row in result.rows[1:]
    )
    lines = [
        "lookup, comm.: exposed time. copy: of kept rows between the buffers. physical: a rank communicates, "
        "waits for others included. exposed: its share in which the rank does not compute. hidden: share of "
        "the lookup beside other work. overlap: exchanges beside computation. payload: rows sent, over those "
        "of the deduplicated batch. MB: sent by a rank per step.",
        f"sequential training spends {first.lookup / first.step:.1%} of a step in lookups and "
        f"{first.communication / first.step:.1%} in exchanges; {first.row_bytes / 1e6:.2f} MB of rows and "
        f"{first.key_bytes / 1e6:.2f} MB of keys leave a rank per step",
        f"losses of every step and sample: {'; '.join(losses(result))}",
        f"medians of {plan.rounds} interleaved rounds of {plan.steps} steps; speedups by round: {spread}",
    ]
    if drifting := [str(row.setting) for row in result.rows if row.setting.approximate]:
        lines.append(
            f"APPROXIMATE: {', '.join(drifting)}. Copies of the tables are averaged now and then, and differ "
            "in between; step and speedup are of mean times, since only some steps average"
        )
    if result.seconds:
        named = ", ".join(f"{stage} {seconds * 1e3:.1f} ms" for stage, seconds in result.seconds.items())
        tasks, overruns = (sum(getattr(row, name) for row in result.rows) for name in ("tasks", "overruns"))
        lines.append(f"EMULATED: {named} per step. {HOW_EMULATED}")
        lines.append(f"{overruns:,} of {tasks:,} emulated tasks took longer than they stand for")
    else:
        lines.append(f"nothing emulated; {plan.ranks} ranks share {os.cpu_count()} processors")
    return lines


def losses(result: Result) -> list[str]:
    """How each row's losses agree with the baseline's, rows of one outcome together."""
    outcomes: dict[str, list[str]] = {}
    for row in result.rows[1:]:
        outcomes.setdefault(row.losses, []).append(str(row.setting))
    if list(outcomes) == ["identical"]:
        return ["identical in every bit in all modes"]
    return [f"{outcome} of sequential: {', '.join(names)}" for outcome, names in outcomes.items()]


def as_json(result: Result) -> dict[str, Any]:
    """The document that ``--json`` writes; times in seconds, bytes per rank."""
    plan = result.plan
    return {
        "environment": _environment(plan),
        "emulated": {
            "seconds_per_step": result.seconds,
            "proportions": dict(plan.proportions),
            "how": HOW_EMULATED if result.seconds else "",
            "lookup_shares": LOOKUP_SHARES if plan.proportions else {},
            "probes": PROBES if plan.proportions else 0,
        },
        "rows": [
            {
                "mode": row.setting.mode,
                "micro_batches": row.setting.micro_batches,
                "switches": dict(row.setting.switches),
                "taper": row.setting.taper(plan.ranks),
                "replicas": row.setting.replicas,
                "nodes": row.setting.nodes,
                "approximate": row.setting.approximate,
                **asdict(row.figures),
                "speedup": median(row.ratios),
                "speedups": row.ratios,
                "exposed_ratio": row.figures.exposed_ratio,
                "hidden_lookup": row.figures.hidden_lookup,
                "overlap": row.figures.overlap,
                "payload": payload(row, result.rows[0]),
                "replica_share": replica_share(row),
                "losses": row.losses,
                "emulated_tasks": row.tasks,
                "overruns": row.overruns,
                "stages": {name: asdict(cost) for name, cost in row.costs.items()},
            }
            for row in result.rows
        ],
    }


def _environment(plan: LabConfig) -> dict[str, Any]:
    """Where the figures come from."""
    return {
        **environment(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "world_size": plan.ranks,
        "machines": plan.nodes or plan.ranks,
        "link_mbit_per_second": plan.rate,
        "steps": plan.steps,
        "rounds": plan.rounds,
        "job": plan.job.as_json(),
    }


PARTS = {
    "compute": "#e69f00",
    "exposed communication": "#d00000",
    "exposed lookup": "#009e73",
    "rest": "#d9d9d9",
}
HIDDEN = {"hidden communication": "#56b4e9", "hidden lookup": "#a8dcc6"}


def parts(row: Row) -> dict[str, float]:
    """Seconds of a step that its critical path shows, and those that hide beside it."""
    seen = row.figures
    shown = {
        "compute": seen.compute,
        "exposed communication": seen.exposed,
        "exposed lookup": seen.exposed_lookup,
    }
    return {
        **shown,
        "rest": max(0.0, seen.step - sum(shown.values())),
        "hidden communication": seen.communication - seen.exposed,
        "hidden lookup": seen.lookup - seen.exposed_lookup,
    }


def draw_report(result: Result, path: Path) -> None:
    """Two bars a row: what makes up its step, and below it, thinner, what runs beside it."""
    plt = pyplot()
    plan = result.plan
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.62 * len(result.rows)), layout="constrained")
    try:
        note: str | None = "of it between copies"
        for place, row in enumerate(result.rows):
            seconds = parts(row)
            for names, height, at in ((PARTS, 0.42, place), (HIDDEN, 0.2, place + 0.33)):
                left = 0.0
                for name, colour in names.items():
                    label = name if place == 0 else None
                    width = seconds[name] * 1e3
                    axes.barh(at, width, left=left, height=height, color=colour, label=label)
                    left += width
            if row.setting.replicas > 1:
                width = row.figures.exposed_replica * 1e3
                end = (seconds["compute"] + seconds["exposed communication"]) * 1e3
                bar = axes.barh(place, width, left=end - width, height=0.42, label=note, hatch="////")
                for patch in bar:
                    patch.set(facecolor=PARTS["exposed communication"], edgecolor="white")
                note = None
            end = max(row.figures.step, sum(seconds[name] for name in PARTS)) * 1e3
            axes.text(end, place, f" {median(row.ratios):.2f}x", va="center", fontsize=9)
        labels = [
            "\n".join([f"{row.setting.mode}, N = {row.setting.micro_batches}", *row.setting.words])
            for row in result.rows
        ]
        axes.set_yticks(range(len(labels)), labels, fontsize=9)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds per step; thin bars: what runs beside the step")
        emulated = "; emulated: " + ", ".join(result.seconds) if result.seconds else ""
        axes.set_title(f"{_ranks(plan)}, links of {plan.rate:g} Mbit/s{emulated}", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(PARTS) + len(HIDDEN), fontsize=8, frameon=False)
        with atomic_write(path) as part:
            figure.savefig(part, dpi=110, format="png")
    finally:
        plt.close(figure)
