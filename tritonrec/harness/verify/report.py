"""The results of `tritonrec verify`: as a document, and as tables for a terminal of eighty columns."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from ...files import save_json
from ..devices import ARCHITECTURE, Target
from ..environment import environment
from ..job import Job
from .cases import CACHE_ROWS, DISK_MEMORY, Case
from .corpus import SOURCES
from .faults import Fault
from .state import Difference, as_json
from .variants import EACH, variant_of


@dataclass(frozen=True)
class CaseResult:
    """A case's outcome over all its ranks: `counts` of their lookups and tables, summed.

    `error` is set when it could not be run to its end, or proves nothing.
    """

    case: Case
    identical: bool
    first_difference: Difference | None = None
    tensors_compared: int = 0
    bytes_compared: int = 0
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class FaultResult:
    """Whether bits, a check or an error caught an injected fault, and the first mismatch."""

    fault: Fault
    caught: bool
    by: list[str]
    evidence: str
    where: str = ""


@dataclass
class Report:
    """The results of `tritonrec verify`."""

    job: Job
    cases: list[CaseResult] = field(default_factory=list)
    faults: list[FaultResult] = field(default_factory=list)
    smallest: CaseResult | None = None

    @property
    def passed(self) -> bool:
        """Every case identical and every fault caught, and at least one of them run."""
        outcomes = [r.identical for r in self.cases] + [r.caught for r in self.faults]
        return bool(outcomes) and all(outcomes)

    def as_json(self) -> dict[str, Any]:
        """The document that ``--json`` writes."""
        return {
            "environment": {
                **environment(),
                "job": self.job.as_json(),
                "emulated": ARCHITECTURE if self.job.target.emulated else None,
            },
            "cases": [
                {
                    **result.case.as_json(),
                    "data": result.case.job(self.job).data,
                    "identical": result.identical,
                    "tensors_compared": result.tensors_compared,
                    "bytes_compared": result.bytes_compared,
                    "first_difference": as_json(result.first_difference),
                    "counts": result.counts,
                    "error": result.error,
                    "seconds": round(result.seconds, 3),
                }
                for result in self.cases
            ],
            "faults": [
                {
                    "name": r.fault.name,
                    "description": r.fault.description,
                    "source": SOURCES.get(r.fault.name),
                    "case": str(r.fault.case),
                    "caught": r.caught,
                    "by": r.by,
                    "first_mismatch": r.where,
                    "evidence": r.evidence,
                }
                for r in self.faults
            ],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document whole or not at all."""
        save_json(self.as_json(), path)


def print_report(report: Report, console: Console) -> None:
    """The contract table, the injected faults, and the first difference if there is one."""
    for name, (title, columns, caption) in TABLES.items():
        results = [result for result in report.cases if _table_of(result.case) == name]
        if results:
            title = title.format(data=report.job.data, kernels=_kernels(report.job.target))
            if name == "variants":
                shown = dict.fromkeys(result.case.variant for result in results)
                caption = "; ".join(f"{each}: {variant_of(each).what}" for each in shown) + caption
            console.print(_cases_table(title, columns.split(), caption, results))
    if report.faults:
        console.print(_faults_table(report))
    if report.smallest is not None:
        smallest = report.smallest
        console.print(f"[red]Smallest case that fails:[/] {smallest.case}")
        console.print(f"  {smallest.error or smallest.first_difference}", markup=False)
    line = []
    if report.cases:
        identical = sum(result.identical for result in report.cases)
        line.append(f"{identical} of {len(report.cases)} cases identical")
    if report.faults:
        caught = sum(result.caught for result in report.faults)
        line.append(f"{caught} of {len(report.faults)} injected faults caught")
    console.print(f"[{'green' if report.passed else 'red'}]{', '.join(line)}[/]")


HALF_WAY = "saved half way by W ranks, continued by W'"
TABLES = {
    "contract": (
        "Contract table on {data}{kernels}", "mode consistency W N ECD optimizer steps MB s result",
        "batch: equal to synchronous training of the whole batch in one process. window: equal to "
        "the same micro-batches on the same ranks, one stage after another. W ranks, N micro-batches, "
        "E an exchange for each micro-batch (else they share some), C key-centric clustering, D random "
        "delays, MB and s of comparison. * on a made log of 35 users with negative and extreme ids.",
    ),
    "variants": (
        "Embedding system", "variant mode W N counts result",
        f". W > W': {HALF_WAY}. Batch consistency, * consistency `window`.",
    ),
    "storages": (
        "Tables on the device, cached there{kernels}, or on disk",
        "storage mode W N optimizer variant counts s result",
        "device: keys, rows and optimizer state in the device's memory. cached: rows on the host, "
        f"{CACHE_ROWS} of them on the device. disk: rows in a file, {DISK_MEMORY} of them in memory. "
        f"cached-disk: both, the file behind the cache. > W': {HALF_WAY} with another storage. Reference: "
        "tables in host memory. Batch consistency, * consistency `window`.",
    ),
    "meshes": (
        "Copies of the tables, and lookups over nodes", "mode ranks N optimizer variant counts s result",
        "parts x copies: ranks that hold parts of the tables, times ranks that hold the same part "
        "(2D sparse parallelism, exact). ranks of nodes, M x L nodes: lookups in two steps. "
        "> W': saved half way, continued by W' ranks with one copy, in one step.",
    ),
}  # fmt: skip
"""Title, columns and caption of each table of cases."""


def _table_of(case: Case) -> str:
    """The table that shows a case."""
    if case.replicas > 1 or case.nodes > 1:
        return "meshes"
    if case.storage != "host":
        return "storages"
    return "contract" if case.variant in ("", EACH) else "variants"


def _cases_table(title: str, columns: list[str], caption: str, results: list[CaseResult]) -> Table:
    table = Table(title=f"{title}: bit-identical to the reference?", caption=caption, padding=(0, 0, 0, 1))
    rows = [_cells(result) for result in results]
    for name in columns:
        numbers = all(row[name].replace(".", "").isdigit() for row in rows)
        table.add_column(name, justify="right" if numbers else "left", no_wrap=name != "counts")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _cells(result: CaseResult) -> dict[str, str]:
    """What stands in each column for a case."""
    case, table = result.case, _table_of(result.case)
    starred = {"contract": bool(case.data), "meshes": False}.get(table, case.consistency == "window")
    mesh = f"{case.world_size // case.replicas} x {case.replicas} copies"
    if case.nodes > 1:
        mesh = f"{case.nodes} x {case.world_size // case.nodes} nodes"
    marks = {"E": case.variant == EACH, "C": case.clustering, "D": case.delay_seed is not None}
    variant = case.variant
    if table == "meshes":
        variant = " ".join(filter(None, (variant, case.storage.removeprefix("host"))))
    restart = f" > {case.restart}" if case.restart else ""
    return {
        "mode": case.mode + "*" * starred, "consistency": case.consistency, "storage": case.storage,
        "W": f"{case.world_size}{restart}", "ranks": mesh + restart, "N": str(case.micro_batches),
        "ECD": "".join(letter if there else " " for letter, there in marks.items()),
        "optimizer": case.optimizer.removeprefix("rowwise_"), "steps": str(case.steps), "variant": variant,
        "counts": _counts(result), "MB": f"{result.bytes_compared / 1e6:.1f}",
        "s": f"{result.seconds:.1f}", "result": _outcome(result),
    }  # fmt: skip


def _counts(result: CaseResult) -> str:
    return ", ".join(f"{result.counts.get(name, 0):,} {name}" for name in result.case.shows)


def _outcome(result: CaseResult) -> str:
    if result.error:
        return "[red]failed[/]"
    return "[green]identical[/]" if result.identical else "[red]differs[/]"


def _faults_table(report: Report) -> Table:
    table = Table(title="Injected faults: does the harness notice?", padding=(0, 0, 0, 1))
    table.caption = (
        "bits: the run differs from its reference. error: it ends in one, and catches a fault that says so. "
        "check: the schedule check alone refuses it."
    )
    for name in ("fault", "caught", "by", "first mismatch"):
        table.add_column(name, no_wrap=name == "fault", overflow="fold")
    for result in report.faults:
        caught = "[green]yes[/]" if result.caught else "[red]NO[/]"
        table.add_row(result.fault.name, caught, ", ".join(result.by), result.where)
    return table


def _kernels(target: Target) -> str:
    """What the steps run on, where it was chosen."""
    words = [] if target.impl == "auto" else [f"impl {target.impl}"]
    words += [f"emulated {ARCHITECTURE}"] if target.emulated else []
    words += [] if target.device == "cpu" else [target.device]
    return f" ({', '.join(words)})" if words else ""
