"""A report's tables as a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from ..shown import markdown
from .section import Section, Table

LEFT_OUT = ("Every case", "Kernels")
"""Titles of tables that only the HTML page has; docs/platforms.md has the kernels."""
ESCAPED = str.maketrans({"|": "\\|", "*": "\\*", "<": "&lt;", "\n": " "})
HEAD = """# Recorded results

This page has the figures that are committed as JSON, by `tritonrec report`; nothing in it is written by hand.
The HTML page (`--html`) also has every case, every kernel, the traces' pictures and charts over commits.
Bold rows are losses, misses or failures.

```
make results
```
"""


def page(sections: Sequence[Section]) -> str:
    """Markdown; rows that are bad are bold in their first cell."""
    parts = [HEAD]
    for each in sections:
        name = each.source.rpartition("/")[2]
        parts.append(f"## {each.title}\n\n{each.text}\n\nFrom [{name}](../{each.source}).\n")
        parts += [_table(table) for table in each.tables if table.title not in LEFT_OUT]
    return "\n".join(parts)


def _table(table: Table) -> str:
    rows = []
    for number, row in enumerate(table.rows):
        first, *others = (cell.translate(ESCAPED) for cell in row)
        rows.append([f"**{first}**" if number in table.bad else first, *others])
    return markdown(table.columns, "l" * len(table.columns), rows) + "\n"
