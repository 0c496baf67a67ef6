"""The tables of `tritonrec verify`, to be read on a terminal of eighty columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from .contract import Report


def print_report(report: Report, console: Console) -> None:
    """The contract table, the planted bugs, and the first difference if there is one."""
    if report.cases:
        console.print(_contract(report))
    if report.mutations:
        console.print(_planted(report))
    if report.smallest is not None:
        smallest = report.smallest
        console.print(f"[red]Smallest case that fails:[/] {smallest.case}")
        console.print(f"  {smallest.error or smallest.first_difference}", markup=False)
    line = []
    if report.cases:
        identical = sum(result.identical for result in report.cases)
        line.append(f"{identical} of {len(report.cases)} cases identical")
    if report.mutations:
        caught = sum(result.caught for result in report.mutations)
        line.append(f"{caught} of {len(report.mutations)} planted bugs caught")
    console.print(f"[{'green' if report.passed else 'red'}]{', '.join(line)}[/]")


def _contract(report: Report) -> Table:
    table = Table(
        title=f"Contract table on {report.job.data}: bit-identical to the reference?",
        caption="batch: equal to synchronous training of the whole batch in one process. window: equal to "
        "the same micro-batches on the same ranks, one stage after another. W ranks, N micro-batches, "
        "C key-centric clustering, D random delays, MB and s of comparison.",
        padding=(0, 0, 0, 1),
    )
    for name in ("mode", "level", "W", "N", "C", "D", "optimizer", "steps", "MB", "s", "result"):
        number = name in ("W", "N", "steps", "MB", "s")
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for result in report.cases:
        case = result.case
        outcome = "[green]identical[/]" if result.identical else "[red]differs[/]"
        table.add_row(
            case.mode, case.consistency, str(case.world_size), str(case.micro_batches),
            _mark(case.clustering), _mark(case.delay_seed is not None),
            case.optimizer.removeprefix("rowwise_"), str(case.steps), f"{result.bytes_compared / 1e6:.1f}",
            f"{result.seconds:.1f}", "[red]failed[/]" if result.error else outcome,
        )  # fmt: skip
    return table


def _planted(report: Report) -> Table:
    table = Table(title="Planted bugs: does the harness notice?", padding=(0, 0, 0, 1))
    table.caption = "bits: the run differs from its reference. check: the schedule check alone refuses it."
    for name in ("bug", "caught", "by", "bits part first at"):
        table.add_column(name, no_wrap=name == "bug", overflow="fold")
    for result in report.mutations:
        caught = "[green]yes[/]" if result.caught else "[red]NO[/]"
        table.add_row(result.mutation.name, caught, ", ".join(result.by), result.where)
    return table


def _mark(value: bool) -> str:
    return "x" if value else ""
