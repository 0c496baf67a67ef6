"""The page of the papers: its rows, with the texts' own figures, and cells that are made from a run's.

`PAGE` is docs/papers.md, which the package has too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..shown import markdown

Figures = Mapping[str, Any]
"""Run -> its figures, as the papers.json of `tritonrec reproduce` has them under ``rows``."""
Made = Mapping[str, Callable[[Any], str]]
"""Item of a row -> what stands under "ours", of the figures of the row's run."""
PAGE = Path(__file__).with_name("papers.md")


class Row(NamedTuple):
    """One line of a table: a system, equation, figure or table of a text, and what stands here."""

    item: str
    state: str
    here: str
    paper: str
    ours: str
    run: str


def between(text: str, mark: str) -> tuple[str, str, str]:
    """What stands before, between and behind the marks of that name; ValueError where the page has none."""
    begin, end = f"<!-- {mark} -->\n", f"<!-- end {mark} -->"
    head, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"the page has no {begin.strip()} and {end}")
    inside, _, behind = rest.partition(end)
    return head + begin, inside, end + behind


def rows_of(table: str) -> list[Row]:
    """The rows below a table's two lines of head; ValueError for a line of other columns."""
    rows = []
    for line in table.strip().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != len(Row._fields):
            raise ValueError(f"a row has the columns {', '.join(Row._fields)}, got {line}")
        rows.append(Row(*cells))
    return rows


def with_figures(table: str, made: Made, figures: Figures) -> str:
    """The table, with the cells that are made; ValueError where one has no row, or its run no figures."""
    rows = rows_of(table)
    if missing := sorted(made.keys() - {row.item for row in rows}):
        raise ValueError(f"the page has no row {missing[0]}")
    lines = []
    for row in rows:
        if row.item in made:
            run = row.run.strip("`")
            if run not in figures:
                raise ValueError(f"{row.item}: no figures of the run {run}: tritonrec reproduce {run}")
            row = row._replace(ours=made[row.item](figures[run]["figures"]))
        lines.append(row)
    return markdown(["of the text", "state", "here", "paper", "ours", "run"], "llllll", lines)


def simulated(template: str, *keys: str) -> Callable[[Any], str]:
    """A cell of the simulator's, in `template`; a key is "table, row, column, workers cluster"."""
    return lambda figures: template.format(*(figures["cells"][key]["model"] for key in keys))


def only(rows: Iterable[Any], **values: object) -> Any:
    """The one row of a run's figures with these values; ValueError unless there is one."""
    (found,) = (row for row in rows if all(row[name] == value for name, value in values.items()))
    return found
