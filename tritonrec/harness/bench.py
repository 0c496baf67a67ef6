"""Kernels beside their peers: runs the suites in ``ci/benchmarks``, keeps ratios, finds what got slower.

A ratio is a peer's median time over ours in the same run on the same input: above 1 we win. Times of two runs
on different machines, or on one that is busy, say little; a ratio within a run says more, and is what a
baseline holds. Its noise band comes from repeated runs (``--repeat``): the greatest ratio over the smallest,
but at least `LEAST_BAND` and what the quartiles of a single run leave open, since a few runs do not see all
the noise. A comparison fails where a ratio is below the baseline's median divided by the row's band; one or
two runs that see this are followed by as many as make `JUDGES`, and the median of all decides.

    python -m tritonrec.harness.bench REPORT.json [...]   the same table of reports of pytest-benchmark
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from ..distributed.signals import end_with_parent
from ..files import ScratchFolder, atomic_write
from ..files.places import read_document
from ..optional import require
from .shown import say, table

BENCHMARKS = "ci/benchmarks"
LEAST_BAND = 1.25
HOW = (
    "ratio: median over the repeats of peer's median time over ours; band: the greatest ratio of the repeats "
    f"over the smallest, at least {LEAST_BAND} and 1 + the first run's interquartile ranges over their "
    "medians; a comparison fails below ratio / band"
)
JUDGES = 3
"""Runs at least before a row is called slower."""
NOTHING_COLLECTED = 5
"""Pytest's exit status where no test was chosen."""
# Seconds of a benchmark that pytest-benchmark would run for one: all suites then take a few minutes.
SECONDS = "0.2"
# CPU seconds of the process hide what else runs on the machine, and add up threads.
TIMERS = {"wall": "time.perf_counter", "cpu": "time.process_time"}

Rows = dict[str, dict[str, Any]]


def checkout() -> Path:
    """The root of the source tree, which holds the suites: the package's own, or the one around this folder.

    Raises FileNotFoundError where there is none, and MissingPackageError without pytest-benchmark.
    """
    here, own = Path.cwd(), Path(__file__).resolve().parent.parent.parent
    root = next(
        (each for each in (own, here, *here.parents) if (each / BENCHMARKS / "bench_kernels.py").exists()),
        None,
    )
    if root is None:
        raise FileNotFoundError(
            f"tritonrec bench needs a checkout: neither {own} nor a folder around {here} has {BENCHMARKS}. "
            "Clone the repository, and call it in there"
        )
    require("pytest_benchmark", "tritonrec bench")
    return root


def suites(root: Path, only: str) -> list[Path]:
    """The files ``ci/benchmarks/bench_*.py`` whose name contains `only`, or all of them if none does."""
    files = sorted((root / BENCHMARKS).glob("bench_*.py"))
    return [path for path in files if only in path.stem.removeprefix("bench_")] or files


def run_suites(root: Path, only: str, timer: str = "wall") -> dict[str, Any]:
    """pytest-benchmark's report of the suites, or of what in them is named `only`."""
    files = suites(root, only)
    with ScratchFolder() as folder:
        path = Path(folder) / "bench.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:randomly",
            "--timeout=600",
            *map(str, files),
        ]
        command += [f"--benchmark-max-time={SECONDS}", "--benchmark-min-rounds=5", f"--benchmark-json={path}"]
        command += [f"--benchmark-timer={TIMERS[timer]}"]
        if only and not any(only in file.stem for file in files):
            command += ["-k", only]
        # Inside a worker of pytest-xdist, pytest-benchmark would not time and leave no report.
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, env=own, preexec_fn=end_with_parent
        )
        if done.returncode == NOTHING_COLLECTED or "Wrong expression passed to '-k'" in done.stderr:
            known = ", ".join(file.stem.removeprefix("bench_") for file in suites(root, ""))
            raise ValueError(
                f"--only {only}: no suite and no benchmark has a name with it; the suites are {known}"
            )
        if done.returncode or not path.exists():
            raise RuntimeError(f"the benchmark suites failed:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        return json.loads(path.read_text())


def groups(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows by group, ours first and the peers from fastest to slowest; ValueError if two claim ours.

    Groups without a row of ours compare nothing and are left out.
    """
    by_group: dict[str, list[dict[str, Any]]] = {}
    for row in report["benchmarks"]:
        by_group.setdefault(row["group"] or "", []).append(row)
    compared = {}
    for group, rows in by_group.items():
        claims = sum(bool(row["extra_info"].get("ours")) for row in rows)
        if claims > 1:
            raise ValueError(f"group {group!r} has {claims} rows of ours: which one do the peers meet?")
        if claims:
            rows.sort(key=lambda row: (not row["extra_info"].get("ours"), row["stats"]["median"]))
            compared[group] = rows
    return compared


def contender(row: dict[str, Any]) -> str:
    """What a row says, or its parameters without those that already name its group."""
    if name := row["extra_info"].get("contender"):
        return str(name)
    parts = [part for part in (row["param"] or row["name"]).split("-") if part not in row["group"].split()]
    return "-".join(parts) or "ours"


def rows_of(report: dict[str, Any], timer: str = "wall") -> Rows:
    """``group / peer`` -> ratio and times of one run; of CPU seconds, those of one thread only."""
    rows: Rows = {}
    for group, (ours, *peers) in groups(report).items():
        for peer in peers:
            if timer == "cpu" and peer["extra_info"].get("threads", 1) != 1:
                continue
            mine, theirs = ours["stats"]["median"], peer["stats"]["median"]
            rows[f"{group} / {contender(peer)}"] = {
                "ratio": theirs / mine,
                "ours_seconds": mine,
                "peer_seconds": theirs,
                "spread": ours["stats"]["iqr"] / mine + peer["stats"]["iqr"] / theirs,
            }
            if "of_a_copy" in ours["extra_info"]:
                rows[f"{group} / {contender(peer)}"]["of_a_copy"] = ours["extra_info"]["of_a_copy"]
    for row in report["benchmarks"] if timer == "wall" else []:  # alternating calls take the wall's clock
        extra = row["extra_info"]
        for name, value in extra.items():
            if "_over_" in name:
                what = row["name"].removeprefix("test_").partition("[")[0]
                parts = [what, str(extra.get("workload", "")), str(extra.get("direction", ""))]
                label = " ".join(part for part in parts if part)
                rows[f"{label} / {name.partition('_over_')[2]} (alternating)"] = {"ratio": 1 / value}
    return rows


def provenance(report: dict[str, Any], timer: str) -> dict[str, Any]:
    """Machine, load, versions, commit, date, seed."""
    machine, commit = report["machine_info"], report["commit_info"]
    versions: dict[str, str] = {"python": machine["python_version"]}
    for row in report["benchmarks"]:
        versions |= row["extra_info"].get("versions", {})
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": machine["cpu"].get("brand_raw", "unknown"),
        "cores": machine["cpu"].get("count"),
        "gpu": gpu,
        "load": round(os.getloadavg()[0], 2),
        "timer": timer,
        "versions": versions | {"torch": torch.__version__},
        "commit": (commit.get("id") or "unknown")[:12],
        "dirty": bool(commit.get("dirty")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": 0,
    }


def summary(runs: list[Rows], made: dict[str, Any]) -> dict[str, Any]:
    """Repeated runs in one: the median ratio of each row, and the band in which it moved."""
    rows = {}
    for name in runs[0]:
        ratios = [run[name]["ratio"] for run in runs if name in run]
        band = max(LEAST_BAND, max(ratios) / min(ratios), 1 + runs[0][name].get("spread", 0))
        rows[name] = {**runs[0][name], "ratio": median(ratios), "ratios": ratios, "band": band}
    return {"provenance": made, "repeats": len(runs), "how": HOW, "rows": rows}


def load(path: Path, timer: str | None = None) -> dict[str, Any]:
    """A baseline; ValueError if it is none, or was timed by another clock than `timer`."""
    content = read_document(path, "baseline")
    try:
        report = json.loads(content)
    except (ValueError, RecursionError):  # no UTF-8, or no JSON
        report = None
    rows, made = (report.get(name) if isinstance(report, dict) else None for name in ("rows", "provenance"))
    if (
        not isinstance(made, dict)
        or not isinstance(rows, dict)
        or not rows
        or not all(map(_is_compared, rows.values()))
    ):
        raise ValueError(f"{path} is no baseline: write one with tritonrec bench --repeat 3 --json {path}")
    clock = made.get("timer", "wall")
    if timer not in (None, clock):
        raise ValueError(f"the baseline holds {clock} seconds, this run {timer}: add --timer {clock}")
    return report


def _is_compared(row: Any) -> bool:
    """Whether a row has a ratio to a peer, and the band in which it may move."""
    ratio, band = (row.get(name) if isinstance(row, dict) else None for name in ("ratio", "band"))
    if not (isinstance(ratio, (int, float)) and isinstance(band, (int, float))):
        return False
    return 0 < ratio < math.inf and 1 <= band < math.inf


def slower(before: dict[str, Any], now: dict[str, Any], only: str = "") -> list[str]:
    """Rows whose ratio fell out of the baseline's band, and rows that are gone, one line each."""
    found = []
    for name, old in before["rows"].items():
        new = now["rows"].get(name)
        if new is None:
            if not only:
                found.append(f"{name}: in the baseline ({old['ratio']:.2f}), not measured now")
        elif new["ratio"] < old["ratio"] / old["band"]:
            least = old["ratio"] / old["band"]
            found.append(
                f"{name}: {new['ratio']:.2f} times as fast as the peer now, {old['ratio']:.2f} in the "
                f"baseline (noise reaches down to {least:.2f})"
            )
    return found


def dump(report: dict[str, Any]) -> str:
    """JSON with a line for each row, numbers of four digits."""

    def short(value: Any) -> Any:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        return [short(item) for item in value] if isinstance(value, list) else value

    lines = [
        f"  {json.dumps(name)}: {json.dumps({key: short(value) for key, value in row.items()})}"
        for name, row in report["rows"].items()
    ]
    head = {key: value for key, value in report.items() if key != "rows"}
    return json.dumps(head)[:-1] + ',\n "rows": {\n' + ",\n".join(lines) + "\n }\n}\n"


def show(report: dict[str, Any], console: Console, before: dict[str, Any] | None = None) -> None:
    """The ratios as a table; a loss is called one.

    "Of a copy" is the time of a copy of the bytes that any implementation moves at least, over ours.
    """
    made = report["provenance"]
    columns = "what", "ours", "peer", "of a copy", "faster by", *(["baseline"] if before else [])
    rows = []
    for name, row in report["rows"].items():
        times = [f"{row[key] * 1e3:.3g} ms" if key in row else "" for key in ("ours_seconds", "peer_seconds")]
        ratio = f"{row['ratio']:.2f}" if row["ratio"] >= 1 else f"[red]{row['ratio']:.2f} loss[/]"
        old = before["rows"].get(name) if before else None
        share = str(row.get("of_a_copy", ""))
        rows.append(
            (name, *times, share, ratio, *([f"{old['ratio']:.2f}" if old else "new"] if before else []))
        )
    wins = sum(row["ratio"] >= 1 for row in report["rows"].values())
    title = f"{made['machine']}, {made['cores']} cores, load {made['load']}, {made['commit']}"
    console.print(table(title, columns, rows))
    console.print(f"{wins} of {len(report['rows'])} ratios are wins, {len(report['rows']) - wins} are losses")


def bench(
    only: str = "",
    repeat: int = 1,
    json_file: Path | None = None,
    compare: Path | None = None,
    timer: str = "wall",
    console: Console | None = None,
    run: Callable[[Path, str, str], dict[str, Any]] = run_suites,
) -> int:
    """Run, print, write, compare; 0, or 1 if a ratio fell out of its band.

    What cannot work is refused before anything runs.
    """
    console, root = console or Console(), checkout()
    before = load(compare, timer) if compare else None
    reports = [run(root, only, timer) for _ in range(repeat)]

    def summed() -> dict[str, Any]:
        return summary([rows_of(report, timer) for report in reports], provenance(reports[0], timer))

    now = summed()
    while before and len(reports) < JUDGES and slower(before, now, only):
        console.print(f"slower than the baseline: run again, {len(reports)} of {JUDGES} are done")
        reports.append(run(root, only, timer))
        now = summed()
    show(now, console, before)
    if json_file:
        with atomic_write(json_file) as part:
            part.write_text(dump(now))
    lines = slower(before, now, only) if before else []
    for line in lines:
        say(console, f"slower: {line}")
    return 1 if lines else 0


def main(files: list[str]) -> None:
    """Print the ratios of reports of pytest-benchmark."""
    for report in (json.loads(Path(file).read_text()) for file in files):
        show(summary([rows_of(report)], provenance(report, "of the report")), Console(width=150))


if __name__ == "__main__":
    main(sys.argv[1:])
