"""What injected faults do to rows on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ...embedding.row_file import RowFile
from ...pipeline import Program

Move = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def stale_page(program: Program) -> None:
    for file in _files(program):
        write, read, before, now = file.write, file.read, dict[int, torch.Tensor](), dict[int, torch.Tensor]()

        def noting(rows, memory, places, write: Move = write, before=before, now=now) -> None:
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                if row in now:
                    before[row] = now[row]
                now[row] = memory[place].clone()
            write(rows, memory, places)

        def stale(rows, memory, places, read: Move = read, before=before) -> None:
            read(rows, memory, places)
            for row, place in zip(rows.tolist(), places.tolist(), strict=True):
                if row in before:
                    memory[place] = before[row]

        file.write, file.read = noting, stale  # type: ignore[method-assign]


def torn_write(program: Program) -> None:
    for file in _files(program):
        write, read = file.write, file.read

        def torn(rows, memory, places, write: Move = write, read: Move = read) -> None:
            values = memory[places]
            read(rows[:1], values, torch.zeros(1, dtype=torch.int64))
            half = values.shape[1] // 2
            values[:1, :half] = memory[places[:1], :half]
            write(rows, values, torch.arange(len(rows)))

        file.write = torn  # type: ignore[method-assign]


def lost_write_back(program: Program) -> None:
    for file in _files(program):
        write = file.write
        file.write = lambda rows, memory, places, write=write: write(rows[1:], memory, places[1:])  # type: ignore[method-assign,misc]


def wrong_offset(program: Program) -> None:
    for file in _files(program):
        read = file.read
        file.read = lambda rows, memory, places, read=read: read(rows + 1, memory, places)  # type: ignore[method-assign,misc]


def _files(program: Program) -> Iterator[RowFile]:
    for group in program.tables.groups:
        storage = group.table._rows._storage
        yield storage._file  # type: ignore[attr-defined]
