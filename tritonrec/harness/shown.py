"""What commands show: tables on the console and as Markdown, and lines whose words are no markup."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..files import save_json

MANY = 5
"""Columns that stand closer together, for a terminal of eighty."""


def say(console: Console, text: str) -> None:
    """Lines as they are: nothing in them is markup, and a terminal folds them."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[str]],
    left: Collection[str] = (),
    fold: Collection[str] | None = None,
    caption: str = "",
) -> Table:
    """A table for a console. Cells may have markup.

    Args:
        left: names of the columns of words, beside the first one; the others are numbers, at the right.
        fold: names of the columns that may be folded where the terminal is narrow; by default those of words.
    """
    padding = (0, 1) if len(columns) < MANY else (0, 0, 0, 1)
    made = Table(title=title, title_justify="left", padding=padding, caption=caption or None)
    for number, name in enumerate(columns):
        words = not number or name in left
        whole = not words if fold is None else name not in fold
        made.add_column(name, justify="left" if words else "right", no_wrap=whole, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def markdown(columns: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """The lines of a table in Markdown; `align` has one of l and r for each column."""
    below = ["---" if side == "l" else "--:" for side in align]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, below, *rows))


def written(document: Any, path: str | os.PathLike[str] | None, console: Console, what: str) -> None:
    """Write a document of JSON where a file is named, and say so."""
    if path:
        save_json(document, path)
        say(console, f"{what} written to {path}")
