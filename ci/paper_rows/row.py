"""A row of docs/papers.md: a system, equation, figure or table of a text, and what stands here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Figures = Mapping[str, Any]
"""Run -> its figures, as ci/baselines/papers.json has them under ``rows``."""
State = Literal["works", "differs", "not here"]


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Args:
        item: of the text, with its number. here: what stands here, how it differs, or why it is not here.
        paper, ours: figures side by side; `ours` may be made of the figures of `run`.
        run: the run of `runs.RUNS` that shows it. link: the page or file with more.
    """

    item: str
    state: State
    here: str
    paper: str = ""
    ours: str | Callable[[Any], str] = ""
    run: str = ""
    link: str = ""

    def cells(self, figures: Figures) -> list[str]:
        """The line's cells; raises ValueError where its run has no figures."""
        ours = self.ours
        if callable(ours):
            if self.run not in figures:
                raise ValueError(
                    f"{self.item}: no figures of the run {self.run}: papers.py --only {self.run}"
                )
            ours = ours(figures[self.run]["figures"])
        shown = [f"`{self.run}`"] if self.run else []
        link = f"([{_title(self.link)}]({self.link}))" if self.link else ""
        here = " ".join(filter(None, (self.here, link)))
        return [self.item, self.state, here, self.paper, ours, *(shown or [""])]


def _title(link: str) -> str:
    page = link.partition("#")[0] or "papers.md"
    return page.rpartition("/")[2].removesuffix(".md")


def simulated(template: str, *keys: str) -> Callable[[Any], str]:
    """`Row.ours` of the simulator's cells, in `template`; a key is "table, row, column, workers cluster"."""
    return lambda figures: template.format(*(figures["cells"][key]["model"] for key in keys))


def only(rows: Iterable[Any], **values: object) -> Any:
    """The one row of a run's figures with these values; ValueError unless there is one."""
    (found,) = (row for row in rows if all(row[name] == value for name, value in values.items()))
    return found


def markdown(head: Sequence[str], align: str, lines: Iterable[Sequence[str]]) -> str:
    """A table; `align` has one of l and r for each column."""
    below = ["---" if side == "l" else "--:" for side in align]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, below, *lines))


def table(rows: list[Row], figures: Figures) -> str:
    """The table of a text."""
    head = ["of the text", "state", "here", "paper", "ours", "run"]
    return markdown(head, "llllll", (row.cells(figures) for row in rows))
