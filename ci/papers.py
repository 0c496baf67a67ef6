"""Five texts beside what stands here: the runs, their figures, and the cells of docs/papers.md of them.

    python ci/papers.py                          every run, into ci/baselines/papers.json, then the page
    python ci/papers.py --only simulate --only lab
    python ci/papers.py --page                   the page from the JSON alone
    python ci/papers.py --list                   the runs and their commands

A run that this machine cannot do is named, and what it had recorded before stays, with its date.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from paper_rows import bounded_lag, mtgrboost, nestpipe, slipstream, two_dimensional
from paper_rows.page import Figures, markdown, with_figures
from paper_rows.runs import RUNS, UnavailableError
from paper_rows.tables import TABLES

from tritonrec.files import save_json
from tritonrec.harness.environment import environment_of_times

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "ci" / "baselines" / "papers.json"
DOCS = ROOT / "docs"
TEXTS = {
    "nestpipe": nestpipe.FIGURES,
    "mtgrboost": mtgrboost.FIGURES,
    "2d": two_dimensional.FIGURES,
    "bounded lag": bounded_lag.FIGURES,
    "slipstream": slipstream.FIGURES,
}
PAGES = {
    "papers.md": (*TEXTS, "runs"),
    "scale.md": ("clustering", "curves", "averaging"),
    "embedding.md": ("grm", "mch"),
    "lab.md": ("lab",),
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
            own, alone = (
                figures[name],
                run.command.replace("OUT", "FILE") or f"python ci/papers.py --only {name}",
            )
            lines.append(
                (f"`{name}`", f"{own['seconds']:.0f}", own["environment"]["date"][:10], f"`{alone}`")
            )
    return markdown(("run", "seconds", "date", "command"), "lrll", lines)


def page(name: str, text: str, figures: Figures) -> str:
    """`text` of the page with the tables between its marks replaced."""
    for mark in PAGES[name]:
        begin, end = f"<!-- {mark} -->\n", f"<!-- end {mark} -->"
        head, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise ValueError(f"{name} has no {begin.strip()} and {end}")
        before, _, rest = rest.partition(end)
        text = f"{head}{begin}{block(mark, before, figures)}\n{end}{rest}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", metavar="RUN", help="this run; repeat")
    parser.add_argument("--json", type=Path, default=RECORD, help="where the figures are, and go")
    parser.add_argument("--page", action="store_true", help="run nothing: write the page's tables")
    parser.add_argument("--list", action="store_true", help="print the runs and their commands")
    args = parser.parse_args()
    if args.list:
        for name, run in RUNS.items():
            print(f"{name:12} {run.command or 'computed here'}{'   (root)' if run.root else ''}")
        return 0
    if unknown := sorted(set(args.only or ()) - set(RUNS)):
        parser.error(f"--only: no run {', '.join(unknown)}; there are {', '.join(RUNS)}")
    record = json.loads(args.json.read_text()) if args.json.exists() else {"rows": {}}
    failed = 0
    for name in [] if args.page else args.only or RUNS:
        began = time.perf_counter()
        try:
            figures = RUNS[name].measure()
        except UnavailableError as reason:
            print(f"{name}: {reason}; what was recorded before stays", flush=True)
            continue
        except (AssertionError, RuntimeError) as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        seconds = time.perf_counter() - began
        record["rows"][name] = {
            "environment": environment_of_times(),
            "seconds": round(seconds, 1),
            "figures": figures,
        }
        save_json(record, args.json)
        print(f"{name}: {seconds:.0f} s", flush=True)
    if args.json == RECORD:
        for name in PAGES:
            (DOCS / name).write_text(page(name, (DOCS / name).read_text(), record["rows"]))
        print(f"tables written to {', '.join(PAGES)} of {DOCS}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
