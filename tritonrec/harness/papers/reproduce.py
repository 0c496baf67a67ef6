"""Runs chosen by a figure's name, and what they gave beside the texts: tables, JSON, pictures."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import TimeElapsedColumn
from rich.table import Table

from ...files import atomic_write, save_json
from ...optional import pyplot
from ..environment import environment_of_times
from ..progress import CommandProgress
from ..shown import markdown, say
from . import TEXTS
from .page import PAGE, Figures, Row, between, rows_of
from .runs import RUNS, UnavailableError
from .tables import TABLES

RECORD, REPORT = "papers.json", "papers.md"
"""Files of a folder: the figures of every run so far, and its rows beside the texts."""
NUMBER = re.compile(r"(?<![\w@.-])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?(?=x?(?:[^\w]|$))")
"""Of a cell: 1,895.98, 94.07 %, -2.1e-3, 3.06x; not the 10 of HR@10, or the 2 of 2D-SP."""
LABEL = re.compile(r"\b[Nk] = [\d, and]+(?:\d|:)|\(.*?\)|± [\d.]+|[\d,.]+ (?:ranks?|NPUs|GPUs|workers)\b")
"""What only says where a number of a cell belongs."""


def rows() -> dict[str, list[Row]]:
    """The page's rows, by text."""
    text = PAGE.read_text(encoding="utf-8")
    return {name: rows_of(between(text, name)[1]) for name in TEXTS}


def chosen(words: Sequence[str]) -> list[str]:
    """The runs that `words` name: a run, a text, ``"all"``, or words of a row such as "Fig. 9".

    Raises ValueError for words that name none.
    """
    found: set[str] = set()
    for word in words:
        if word == "all":
            found.update(RUNS)
            continue
        made = {name: [row for row in each if row.run] for name, each in rows().items()}
        behind = r"(?!\d)" if word[-1:].isdigit() else r"(?!\w)"  # "Fig. 10" is in "Fig. 10a"
        asked = re.compile(rf"(?<!\w){re.escape(word)}{behind}", re.IGNORECASE)
        every = made.get(word) or [
            row for row in chain(*made.values()) if word.strip() and asked.search(row.item)
        ]
        runs = {word} if word in RUNS else {row.run.strip("`") for row in every}
        if not runs:
            raise ValueError(
                f"no run gives {word!r}: name a run, a text ({', '.join(TEXTS)}), all, or words of a row, "
                'such as "Fig. 9"; `tritonrec reproduce list` shows them'
            )
        found |= runs
    return [name for name in RUNS if name in found]


def print_list(console: Console) -> None:
    """The runs, with the rows that each gives and the seconds that it took where it was recorded."""
    table = Table("run", "s", "gives", title="tritonrec reproduce RUN, or words of a row")
    seconds = _recorded_seconds()
    for name in RUNS:
        given = [f"{text}: {row.item}" for text, row in _rows_of_run(name)]
        table.add_row(name, seconds.get(name, ""), "\n".join(given) or "a table of its own")
    console.print(table)


def reproduce(words: Sequence[str], folder: Path, console: Console) -> bool:
    """Do the runs that `words` name, print their rows, and write JSON, a report and pictures into `folder`.

    Figures of other runs that the folder has already stay. A run that this machine cannot do is named.
    Returns whether none has failed.
    """
    names = chosen(words)
    record = folder / RECORD
    known = _read(record) if record.exists() else {"rows": {}}
    failed, seconds = [], _recorded_seconds()
    folder.mkdir(parents=True, exist_ok=True)
    with CommandProgress(console, TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=f"{name} ({seconds.get(name, '?')} s where it was recorded)")
            began = time.perf_counter()
            try:
                figures = RUNS[name].measure()
            except UnavailableError as reason:
                say(console, f"{name} is left out: it {reason}")
                continue
            except (AssertionError, RuntimeError) as error:
                say(console, f"{name} failed: {error}")
                failed.append(name)
                continue
            finally:
                progress.advance(task)
            known["rows"][name] = {
                "environment": environment_of_times(),
                "seconds": round(time.perf_counter() - began, 1),
                "figures": figures,
            }
            save_json(known, record)
            _print_rows(name, known["rows"], console)
            if draw(name, known["rows"], folder / f"{name}.png"):
                say(console, f"picture in {folder / (name + '.png')}")
    with atomic_write(folder / REPORT) as part:
        part.write_text(report(known["rows"]), encoding="utf-8")
    say(console, f"figures in {record}, all rows in {folder / REPORT}")
    return not failed


def _read(record: Path) -> dict[str, Any]:
    """The figures of a folder's runs; ValueError where the file is none of `reproduce`'s."""
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        known = None
    rows = known.get("rows") if isinstance(known, dict) else None
    if not isinstance(rows, dict) or not all(
        isinstance(row, dict) and row.keys() >= {"environment", "seconds", "figures"} for row in rows.values()
    ):
        raise ValueError(
            f"{record} was not written by tritonrec reproduce: name another --folder, or remove it"
        )
    return known


def report(figures: Figures) -> str:
    """Rows of the runs in `figures`, with what the text has and what the run gave, as Markdown."""
    parts = ["# The papers' figures, made again\n"]
    for name in (name for name in RUNS if name in figures):
        about = figures[name]
        lines = [(text, row.item, row.paper, row.ours) for text, row in made_rows(name, figures)]
        where = ", ".join(f"{about['environment'].get(key)}" for key in ("date", "platform", "processors"))
        parts.append(f"## {name}\n\n{about['seconds']} s; {where} processors\n")
        if lines:
            parts.append(markdown(("text", "item", "paper", "here"), "llll", lines) + "\n")
        if name in TABLES:
            parts.append(TABLES[name](about["figures"]) + "\n")
    return "\n".join(parts)


def made_rows(name: str, figures: Figures) -> Iterator[tuple[str, Row]]:
    """The rows of a run, with what it gave under "ours"."""
    for text, row in _rows_of_run(name):
        if row.item in TEXTS[text]:
            yield text, row._replace(ours=TEXTS[text][row.item](figures[name]["figures"]))


def numbers(cell: str) -> list[float]:
    """The numbers of a cell, without those that only label one."""
    return [float(found.replace(",", "")) for found in NUMBER.findall(LABEL.sub(" ", cell))]


def draw(name: str, figures: Figures, path: Path) -> bool:
    """Draw the run's numbers beside the text's, where both have as many; False where no row has."""
    pairs = [
        (f"{text}: {row.item}", numbers(row.paper), numbers(row.ours))
        for text, row in made_rows(name, figures)
        if numbers(row.paper) and len(numbers(row.paper)) == len(numbers(row.ours))
    ]
    if not pairs:
        return False
    plt = pyplot()
    figure, axes = plt.subplots(
        len(pairs), figsize=(8, 0.8 + 1.5 * len(pairs)), layout="constrained", squeeze=False
    )
    try:
        for axis, (item, paper, ours) in zip(axes[:, 0], pairs, strict=True):
            _bars(axis, item, {"paper": paper, "here": ours})
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2, fontsize=8)
        with atomic_write(path) as part:
            figure.savefig(part, dpi=130, format="png")
    finally:
        plt.close(figure)
    return True


def _bars(axis: Any, item: str, sides: Mapping[str, Sequence[float]]) -> None:
    """One row: the numbers of each side, in their order, relative to the text's."""
    scale = [abs(value) or 1.0 for value in sides["paper"]]  # a row may have shares and milliseconds
    for at, ((side, values), colour) in enumerate(zip(sides.items(), ("#777777", "#0072b2"), strict=True)):
        places = [place + 0.4 * at for place in range(len(values))]
        heights = [value / one for value, one in zip(values, scale, strict=True)]
        bars = axis.bar(places, heights, 0.38, color=colour, label=side)
        axis.bar_label(bars, [f"{value:,g}" for value in values], fontsize=7)
    axis.set_title(item, fontsize=8, loc="left")
    axis.margins(y=0.25)
    axis.set_xticks([])
    axis.set_yticks([0, 1], ["0", "paper"], fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _rows_of_run(name: str) -> list[tuple[str, Row]]:
    return [(text, row) for text, each in rows().items() for row in each if row.run.strip("`") == name]


def _recorded_seconds() -> dict[str, str]:
    """Seconds of each run where the page's figures were recorded."""
    lines = between(PAGE.read_text(encoding="utf-8"), "runs")[1].strip().splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name.strip("`"): seconds for name, seconds, *_ in cells}


def _print_rows(name: str, figures: Figures, console: Console) -> None:
    recorded = {row.item: row.ours for _, row in _rows_of_run(name)}
    table = Table("of the text", "paper", "recorded", "here", title=name)
    for text, row in made_rows(name, figures):
        table.add_row(f"{text}: {row.item}", row.paper, recorded[row.item], row.ours)
    if table.rows:
        console.print(table, markup=False)
    if name in TABLES:
        say(console, TABLES[name](figures[name]["figures"]))
