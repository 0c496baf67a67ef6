"""Sections of a report, from the JSON documents that the commands write, and from traces.

Each function of a document takes it and its file's name, and raises KeyError, TypeError or AttributeError for
a document of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...trace import read
from ...trace.analysis import check_trace, summarise
from .digest import contract_digest
from .section import Picture, Section, Table

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
CASE_COLUMNS = (
    "mode", "consistency", "W", "N", "optimizer", "variant", "storage", "log", "steps", "result",
)  # fmt: skip


def contract(report: dict[str, Any], source: str) -> Section:
    """Cases of ``verify --json``: by mode and consistency, and one by one."""
    cases, made = report["cases"], report["environment"]
    kinds = dict.fromkeys((case["mode"], case["consistency"]) for case in cases)
    rows = []
    for mode, consistency in kinds:
        some = [case for case in cases if (case["mode"], case["consistency"]) == (mode, consistency)]
        ranks = sorted({case["world_size"] for case in some})
        counts = sorted({case["micro_batches"] for case in some})
        rows.append((
            mode, consistency, ", ".join(map(str, ranks)), ", ".join(map(str, counts)),
            str(len({case["variant"] for case in some} - {""})),
            f"{sum(map(_identical, some))} of {len(some)}",
        ))  # fmt: skip
    identical = sum(map(_identical, cases))
    return Section(
        "Contract",
        f"{identical} of {len(cases)} cases identical to their reference in every bit, after every step. "
        f"tritonrec {made['tritonrec']}, torch {made['torch']}, Python {made['python']}, {made['platform']}, "
        f"log {made['job']['data']}. Digest of the contract: "
        f"{contract_digest(report)}.",
        source,
        [
            Table(
                "By mode", ("mode", "consistency", "ranks", "micro-batches", "variants", "identical"), rows
            ),
            Table(
                "Every case",
                CASE_COLUMNS,
                [
                    (
                        case["mode"], case["consistency"], str(case["world_size"]),
                        str(case["micro_batches"]), case["optimizer"], case["variant"],
                        case.get("storage", "host"), case["data"], str(case["steps"]), _result(case),
                    )
                    for case in cases
                ],
                frozenset(number for number, case in enumerate(cases) if not _identical(case)),
                long=True,
            ),
        ],
        passed=identical == len(cases) > 0,  # a proof that was left out is none
    )  # fmt: skip


def _identical(case: dict[str, Any]) -> bool:
    return case["identical"] and not case["error"]


def _result(case: dict[str, Any]) -> str:
    return "identical" if _identical(case) else case["error"] or f"differs: {case['first_difference']}"


def faults(report: dict[str, Any], source: str) -> Section:
    """Injected faults of ``verify --inject-faults --json``."""
    found = report["faults"]
    caught = sum(fault["caught"] for fault in found)
    rows = [
        (
            fault["name"], fault.get("description", ""), "yes" if fault["caught"] else "NO",
            ", ".join(fault["by"]), fault.get("first_mismatch") or fault["evidence"],
        )
        for fault in found
    ]  # fmt: skip
    missed = frozenset(number for number, fault in enumerate(found) if not fault["caught"])
    return Section(
        "Injected faults",
        f"{caught} of {len(found)} faults that were put into the code caught: by bits that differ, or "
        "by the error that names them." if found else "The run injected none: add --inject-faults.",
        source,
        [Table("Faults", ("fault", "what is wrong", "caught", "by", "first"), rows, missed, long=True)]
        if found
        else [],
        passed=caught == len(found),
    )  # fmt: skip


def benchmarks(report: dict[str, Any], source: str) -> Section:
    """Ratios of ``bench --json``; losses are marked."""
    made, rows = report["provenance"], report["rows"]
    lost = frozenset(number for number, row in enumerate(rows.values()) if row["ratio"] < 1)
    versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
    return Section(
        "Benchmarks",
        f"{len(rows) - len(lost)} of {len(rows)} ratios are wins, {len(lost)} are losses. A ratio is a "
        f"peer's median time over ours in the same run on the same input. {made['machine']}, "
        f"{made['cores']} cores, {made.get('timer', 'wall')} clock; {versions}; "
        f"commit {made['commit']}; {made['date'][:10]}.",
        source,
        [
            Table(
                "Ratios",
                ("benchmark / peer", "ours", "peer", "ratio", "band"),
                [
                    (
                        name, _seconds(row.get("ours_seconds")), _seconds(row.get("peer_seconds")),
                        f"{row['ratio']:.2f}", f"{row['band']:.2f}",
                    )
                    for name, row in rows.items()
                ],
                lost,
                long=True,
            )
        ],
    )  # fmt: skip


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g} ms"


def compiled(report: dict[str, Any], source: str) -> Section:
    """The compile matrix: per kernel the most registers, stack and shared memory of its launches."""
    kernels, made = report["kernels"], report["provenance"]
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    for name, targets in kernels.items():
        by_kernel.setdefault(name.split()[0], []).append(targets)
    rows = [(name, *(_most(launches, target) for target in TARGETS)) for name, launches in by_kernel.items()]
    uncovered = report["uncovered"]
    # launchers choose tiles by architecture, so one may have a launch that others have not, but every kernel
    whole = sum(not any("error" in row for row in targets.values()) for targets in kernels.values())
    lacking = [
        f"{name} for {target}"
        for name, launches in by_kernel.items()
        for target in TARGETS
        if not any(target in each for each in launches)
    ]
    return Section(
        "Compiled kernels",
        f"{whole} of {len(kernels)} launches of {len(by_kernel)} kernels compile for "
        f"{', '.join(TARGETS)}, without a GPU. Triton {made['triton']}, ptxas {made['ptxas']}, "
        f"{made['date']}. Cells are registers of a "
        "thread / bytes of stack / bytes of shared memory, each the most of all launches."
        + (f" No launch reaches {', '.join(uncovered)}." if uncovered else "")
        + (f" There is no {', '.join(lacking)}." if lacking else ""),
        source,
        [Table("Kernels", ("kernel", *TARGETS), rows, long=True)],
        passed=not uncovered and not lacking and whole == len(kernels),
    )


def _most(launches: list[dict[str, Any]], target: str) -> str:
    found = [launch[target] for launch in launches if target in launch]
    if not found:
        return "-"
    return " / ".join(str(max(row[name] for row in found)) for name in ("registers", "stack", "shared"))


def lab(report: dict[str, Any], source: str) -> Section:
    """Modes over rate-limited links, of ``lab --json``."""
    made, emulated = report["environment"], report["emulated"]
    rows = [
        (
            row["mode"], ", ".join(f"{name} {value}" for name, value in row["switches"].items()),
            str(row["micro_batches"]), f"{row['step'] * 1e3:.0f} ms", f"{row['speedup']:.2f}",
            f"{row['exposed_ratio']:.1%}", f"{row['hidden_lookup'] or 0:.1%}", str(row["losses"]),
        )
        for row in report["rows"]
    ]  # fmt: skip
    slowed = emulated["seconds_per_step"]
    stages = f" Stages {', '.join(slowed)} are emulated." if slowed else ""
    return Section(
        "Overlap over slow links",
        f"{made['world_size']} ranks in network namespaces, links of {made['link_mbit_per_second']:g} "
        f"Mbit/s, {made['processors']} processors, {made['date'][:10]}.{stages} Every transfer is real.",
        source,
        [
            Table(
                "Modes",
                ("mode", "switches", "N", "step", "speedup", "exposed", "lookup hidden", "losses"),
                rows,
            )
        ],
    )


def simulated(report: dict[str, Any], source: str) -> Section:
    """Cells of the paper beside the model's, of ``simulate --json``."""
    cells, summary = report["cells"], report["summary"]
    unseen = summary["unseen"]
    missed = frozenset(
        number
        for number, cell in enumerate(cells)
        if not cell["fitted"] and abs(_error(cell)) > report["aim"]
    )
    return Section(
        "Simulator",
        f"{unseen['cells']} cells of the paper that the fit has not seen: median error "
        f"{unseen['median']:.1%}, worst {unseen['worst']:.1%}, {unseen['within']:.0%} within "
        f"{report['aim']:.0%}.",
        source,
        [
            Table(
                "Paper and model",
                ("table", "row", "workers", "column", "paper", "model", "error", "cell"),
                [
                    (
                        cell["table"], cell["row"], f"{cell['workers']:,} {cell['cluster'].upper()}s",
                        cell["column"], f"{cell['paper']:.2f}", f"{cell['model']:.2f}",
                        f"{_error(cell):+.1%}",
                        "fitted" if cell["fitted"] else "unseen",
                    )
                    for cell in cells
                ],
                missed,
                long=True,
            )
        ],
    )  # fmt: skip


def _error(cell: dict[str, Any]) -> float:
    return cell["model"] / cell["paper"] - 1


def traces(files: Sequence[Path], source: str) -> Section:
    """Figures of rank 0 in each trace; ValueError naming the file that is none."""
    rows, pictures, bad = [], [], set()
    for number, file in enumerate(files):
        try:
            trace = read(file)
            about = trace.metadata
            edges = check_trace(trace)
            ours = summarise(trace.spans)[0]
        except ValueError as error:
            raise ValueError(f"{file} is no trace of a run: {error}") from error
        if edges.instances and not edges.honoured:
            bad.add(number)
        rows.append((
            about.get("mode", file.stem), str(about["world_size"]), f"{ours.step_ns / 1e6:.1f} ms",
            _percent(ours.exposed_ratio), _percent(ours.hidden_lookup_ratio),
            "VIOLATED" if number in bad else f"{sum(edges.instances.values()):,} honoured",
        ))  # fmt: skip
        png = file.with_suffix(".png")
        if png.is_file():
            pictures.append(Picture(str(about.get("mode", file.stem)), png=png.read_bytes()))
    return Section(
        "Traces",
        "Exposed: share of the communication during which a rank does not compute. Hidden: share of the "
        "lookup beside other work. Edges: dependencies of the schedule, seen honoured in the recorded order.",
        source,
        [Table("Modes", ("mode", "ranks", "step", "exposed", "hidden", "edges"), rows, frozenset(bad))],
        pictures,
        passed=not bad,
    )


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"
