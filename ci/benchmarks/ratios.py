"""How many times faster ours is than each peer: ``python ci/benchmarks/ratios.py bench.json [more.json]``.

Reads pytest-benchmark's JSON and prints Markdown. In a group, the row with ``extra_info["ours"]`` is ours and
every other row is a peer on the same input. A ratio is the peer's median over ours; below 1 we lose, and the
row says so. Groups without a row of ours compare nothing and are left out. "Of a copy" is the time of a copy
of the bytes that any implementation moves at least, over the best time. Rows that measured a ratio
themselves, by alternating calls, carry it in ``extra_info`` under a name like ``batch_over_window``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def provenance(report: dict[str, Any]) -> str:
    """One line: the machine, the versions, the commit and the day of a report."""
    machine = report["machine_info"]
    cpu = machine["cpu"]
    versions = {"Python": machine["python_version"]}
    for row in report["benchmarks"]:
        versions.update(row["extra_info"].get("versions", {}))
    commit = report["commit_info"]
    changed = " with local changes" if commit.get("dirty") else ""
    return (
        f"{cpu.get('brand_raw', 'unknown CPU')}, {cpu.get('count', '?')} logical cores; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"commit {(commit.get('id') or 'unknown')[:7]}{changed}; {report['datetime'][:10]}"
    )


def groups(report: dict[str, Any]) -> dict[str, list[Row]]:
    """The rows by group, ours first and the peers from fastest to slowest; ValueError if two claim ours."""
    by_group: dict[str, list[Row]] = {}
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


def contender(row: Row) -> str:
    """What a row says, or its parameters without those that already name its group."""
    if name := row["extra_info"].get("contender"):
        return str(name)
    parts = [part for part in (row["param"] or row["name"]).split("-") if part not in row["group"].split()]
    return "-".join(parts) or "ours"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1:
            return (
                f"{seconds * scale:.3g} {unit}"
                if seconds * scale < 99.95
                else f"{seconds * scale:.0f} {unit}"
            )
    return f"{seconds * 1e9:.3g} ns"


def table(group: str, rows: list[Row]) -> list[str]:
    """The lines of one group's table; `rows` as `groups` orders them."""
    ours, *peers = rows
    lines = [f"### {group}", "", str(ours["extra_info"].get("workload", "")), ""]
    lines += ["| | threads | median | spread (IQR) | of a copy | ours is faster by |"]
    lines += ["|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        stats, extra = row["stats"], row["extra_info"]
        threads, share = extra.get("threads", ""), extra.get("of_a_copy", "")
        ratio = stats["median"] / ours["stats"]["median"]
        verdict = "" if row is ours else f"{ratio:.2f}" if ratio >= 1 else f"{ratio:.2f} (loss)"
        name = f"**{contender(row)}**" if row is ours else contender(row)
        times = f"{_time(stats['median'])} | {_time(stats['iqr'])}"
        lines.append(f"| {name} | {threads} | {times} | {share} | {verdict} |")
    return [*lines, "" if peers else "No peer was timed.\n"]


def alternating(report: dict[str, Any]) -> list[str]:
    """The lines of the table of ratios that benchmarks measured by alternating calls."""
    lines = ["### Ratios of alternating calls", "", "| | ratio | |", "|---|---|--:|"]
    for row in report["benchmarks"]:
        for name, value in row["extra_info"].items():
            if "_over_" in name:
                workload = row["extra_info"].get("workload", "")
                what = f"{row['name'].removeprefix('test_').partition('[')[0]}, {workload}"
                if direction := row["extra_info"].get("direction"):
                    what += f", {direction}"
                lines.append(f"| {what} | {name.replace('_', ' ')} | {value:.2f} |")
    return [*lines, ""] if len(lines) > 4 else []


def markdown(reports: list[dict[str, Any]]) -> str:
    """All tables of all reports, each report under its provenance."""
    lines = []
    for report in reports:
        lines += [provenance(report), ""]
        for group, rows in groups(report).items():
            lines += table(group, rows)
        lines += alternating(report)
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python ci/benchmarks/ratios.py REPORT.json [REPORT.json ...]")
    print(markdown([json.loads(Path(path).read_text()) for path in sys.argv[1:]]))
