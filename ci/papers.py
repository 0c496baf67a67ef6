"""The tables of docs/papers.md and of other pages, from what `tritonrec reproduce` has written.

python ci/papers.py                          from ci/baselines/papers.json
python ci/papers.py reproduced/papers.json   after the runs of this file have been taken over into it
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tritonrec.files import save_json
from tritonrec.harness.papers import TEXTS
from tritonrec.harness.papers.page import Figures, between, markdown, with_figures
from tritonrec.harness.papers.runs import RUNS
from tritonrec.harness.papers.tables import TABLES

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "ci" / "baselines" / "papers.json"
DOCS = ROOT / "docs"
PAGES = {
    "papers.md": (*TEXTS, "runs"),
    "scale.md": ("clustering", "curves", "averaging"),
    "embedding.md": ("grm", "mch"),
    "lab.md": ("lab", "cluster-sizes"),
    "simulator.md": ("scaling",),
    "slipstream.md": ("frontier",),
}
"""Page -> the tables that it has between marks of their names."""


def block(name: str, before: str, figures: Figures) -> str:
    """A text's table with its figures, a run's, or the table of the runs, in the place of `before`."""
    if name in TEXTS:
        return with_figures(before, TEXTS[name], figures)
    if name in TABLES:
        return TABLES[name](figures[name]["figures"])
    lines = []
    for name, run in RUNS.items():
        if name in figures:
            own = figures[name]
            alone = run.command.replace("OUT", "FILE") or f"tritonrec reproduce {name}"
            lines.append(
                (f"`{name}`", f"{own['seconds']:.0f}", own["environment"]["date"][:10], f"`{alone}`")
            )
    return markdown(("run", "seconds", "date", "command"), "lrll", lines)


def page(name: str, text: str, figures: Figures) -> str:
    """`text` of the page with the tables between its marks replaced; ValueError where it has none."""
    for mark in PAGES[name]:
        before, inside, behind = between(text, mark)
        text = f"{before}{block(mark, inside, figures)}\n{behind}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("new", type=Path, nargs="?", help="runs that take the place of those recorded")
    new = parser.parse_args().new
    record = json.loads(RECORD.read_text())
    if new is not None:
        record["rows"] |= json.loads(new.read_text())["rows"]
        save_json(record, RECORD)
    for name in PAGES:
        (DOCS / name).write_text(page(name, (DOCS / name).read_text(), record["rows"]))
    print(f"tables written to {', '.join(PAGES)} of {DOCS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
