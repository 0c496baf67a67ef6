"""What a report consists of, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """Cells are plain text. `bad` are numbers of rows that say something went wrong, or was lost."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    bad: frozenset[int] = frozenset()
    long: bool = False


@dataclass(frozen=True)
class Picture:
    caption: str
    png: bytes
    """The file's content."""


@dataclass(frozen=True)
class Section:
    """A subject: a sentence or two, tables, pictures, and the file that it was made from."""

    title: str
    text: str
    source: str
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    passed: bool = True
