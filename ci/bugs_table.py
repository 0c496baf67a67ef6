"""The table of docs/bugs.md, from the report of a run.

    tritonrec verify --corpus --data zipf --json out/corpus.json
    python ci/bugs_table.py out/corpus.json docs/bugs.md

Replaces what stands between the two marks in the page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BEGIN, END = "<!-- from the report -->", "<!-- to here -->"


def table(faults: list[dict]) -> str:
    """Rows of the faults that have a source, in the order of the report."""
    lines = ["| bug | thread | case | caught by | first |", "| --- | --- | --- | --- | --- |"]
    for fault in faults:
        if fault["source"] is None:
            continue
        repository, number = fault["source"].split("#")
        link = f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number})"
        by = ", ".join(fault["by"]) if fault["caught"] else "**nothing**"
        found = fault["first_mismatch"] or _stage(fault["evidence"])
        lines.append(f"| {fault['description']} | {link} | {_case(fault['case'])} | {by} | {found} |")
    return "\n".join(lines)


def _case(text: str) -> str:
    """What is special about a case: mode, optimizer and what it switches on."""
    words = text.split()
    usual = ("batch", "world_size=2", "N=3", "clustering=off", "on")
    return " ".join(word for word in words if word not in usual and not word.startswith("steps="))


def _stage(evidence: str) -> str:
    """The stage that an error names."""
    words = evidence.rpartition("stage ")[2].split()
    return f"error in {words[0]}" if words else evidence


def main(report: str, page: str) -> None:
    faults = json.loads(Path(report).read_text())["faults"]
    path = Path(page)
    before, rest = path.read_text().split(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{table(faults)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
