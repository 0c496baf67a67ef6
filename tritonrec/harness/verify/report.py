"""The results of `tritonrec verify`: as a document, and as tables for a terminal of eighty columns."""

from __future__ import annotations

import os
from collections.abc import Callable
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
    tables: dict[Callable[[Job, list[CaseResult]], Table], list[CaseResult]] = {
        _contract: [], _embedding: [], _storages: [], _meshes: [],
    }  # fmt: skip
    for result in report.cases:
        tables[_table_of(result.case)].append(result)
    for table, results in tables.items():
        if results:
            console.print(table(report.job, results))
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


def _table_of(case: Case) -> Callable[[Job, list[CaseResult]], Table]:
    """The table that shows a case."""
    if case.replicas > 1 or case.nodes > 1:
        return _meshes
    if case.storage != "host":
        return _storages
    return _contract if case.variant in ("", EACH) else _embedding


def _contract(job: Job, results: list[CaseResult]) -> Table:
    table = Table(
        title=f"Contract table on {job.data}{_kernels(job.target)}: bit-identical to the reference?",
        caption="batch: equal to synchronous training of the whole batch in one process. window: equal to "
        "the same micro-batches on the same ranks, one stage after another. W ranks, N micro-batches, "
        "E an exchange for each micro-batch (else they share some), C key-centric clustering, D random "
        "delays, MB and s of comparison. * on a made log of 35 users with negative and extreme ids.",
        padding=(0, 0, 0, 1),
    )
    for name in ("mode", "consistency", "W", "N", "ECD", "optimizer", "steps", "MB", "s", "result"):
        number = name in ("W", "N", "steps", "MB", "s")
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for result in results:
        case = result.case
        table.add_row(
            case.mode + "*" * bool(case.data), case.consistency, str(case.world_size),
            str(case.micro_batches), _letters(case), case.optimizer.removeprefix("rowwise_"), str(case.steps),
            f"{result.bytes_compared / 1e6:.1f}",
            f"{result.seconds:.1f}", _outcome(result),
        )  # fmt: skip
    return table


def _letters(case: Case) -> str:
    has = {"E": case.variant == EACH, "C": case.clustering, "D": case.delay_seed is not None}
    return "".join(letter if there else " " for letter, there in has.items())


def _embedding(_job: Job, results: list[CaseResult]) -> Table:
    table = Table(
        title="Embedding system: bit-identical to the reference?",
        caption="; ".join(f"{name}: {variant_of(name).what}" for name in _names(results))
        + ". W > W': saved half way by W ranks, continued by W'. Batch consistency, * consistency `window`.",
        padding=(0, 0, 0, 1),
    )
    for name in ("variant", "mode", "W", "N", "counts", "result"):
        table.add_column(name, justify="right" if name == "N" else "left", no_wrap=name != "counts")
    for result in results:
        case = result.case
        table.add_row(
            case.variant, case.mode + "*" * (case.consistency == "window"), _ranks(case),
            str(case.micro_batches), _counts(result), _outcome(result),
        )  # fmt: skip
    return table


def _storages(job: Job, results: list[CaseResult]) -> Table:
    table = Table(
        title=f"Tables on the device, cached there{_kernels(job.target)}, or on disk: bit-identical to the "
        "reference?",
        caption="device: keys, rows and optimizer state in the device's memory. cached: rows on the host, "
        f"{CACHE_ROWS} of them on the device. disk: rows in a file, {DISK_MEMORY} of them in memory. "
        "cached-disk: both, the file behind the cache. > W': "
        "saved half way by W ranks, continued by W' with another storage. Reference: tables in host memory. "
        "Batch consistency, * consistency `window`.",
        padding=(0, 0, 0, 1),
    )
    for name in ("storage", "mode", "W", "N", "optimizer", "variant", "counts", "s", "result"):
        table.add_column(name, justify="right" if name in ("N", "s") else "left", no_wrap=name != "counts")
    for result in results:
        case = result.case
        table.add_row(
            case.storage, case.mode + "*" * (case.consistency == "window"), _ranks(case),
            str(case.micro_batches), case.optimizer.removeprefix("rowwise_"), case.variant, _counts(result),
            f"{result.seconds:.1f}", _outcome(result),
        )  # fmt: skip
    return table


def _ranks(case: Case) -> str:
    return f"{case.world_size} > {case.restart}" if case.restart else str(case.world_size)


def _meshes(_job: Job, results: list[CaseResult]) -> Table:
    table = Table(
        title="Copies of the tables, and lookups over nodes: bit-identical to the reference?",
        caption="parts x copies: ranks that hold parts of the tables, times ranks that hold the same part "
        "(2D sparse parallelism, exact). ranks of nodes, M x L nodes: lookups in two steps. "
        "> W': saved half way, continued by W' ranks with one copy, in one step.",
        padding=(0, 0, 0, 1),
    )
    for name in ("mode", "ranks", "N", "optimizer", "variant", "counts", "s", "result"):
        table.add_column(name, justify="right" if name in ("N", "s") else "left", no_wrap=name != "counts")
    for result in results:
        case = result.case
        mesh = f"{case.world_size // case.replicas} x {case.replicas} copies"
        if case.nodes > 1:
            mesh = f"{case.nodes} x {case.world_size // case.nodes} nodes"
        variant = " ".join(filter(None, (case.variant, case.storage.removeprefix("host"))))
        table.add_row(
            case.mode, mesh + f" > {case.restart}" * bool(case.restart), str(case.micro_batches),
            case.optimizer.removeprefix("rowwise_"), variant, _counts(result), f"{result.seconds:.1f}",
            _outcome(result),
        )  # fmt: skip
    return table


def _counts(result: CaseResult) -> str:
    return ", ".join(f"{result.counts.get(name, 0):,} {name}" for name in result.case.shows)


def _names(results: list[CaseResult]) -> list[str]:
    return [*dict.fromkeys(result.case.variant for result in results)]


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
