"""Rows to be written, part by part: of tensors, or of a table that goes on changing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
from torch import Tensor

from . import slices


class Rows(Protocol):
    """Rows of one table: their keys are known at once, their columns are read part by part.

    A save calls `arrange`, then `keys` and `read` once for each part, and `close` at the end.

    Attributes:
        like: the columns, of no rows.
    """

    like: Mapping[str, Tensor]

    def __len__(self) -> int: ...

    def arrange(self, sort: Callable[[Tensor], tuple[np.ndarray, list[int]]]) -> None:
        """Put the rows into parts.

        Args:
            sort: some of the keys (n,) int64 -> the order (n,) of these by part, and in this order where each
                part begins, with n at the end.
        """
        ...

    def keys(self, part: int) -> Tensor:
        """Keys (n,) int64 of a part, in any order."""
        ...

    def read(self, part: int, order: np.ndarray) -> dict[str, Tensor]:
        """All columns of a part, its `keys` in this `order` (n,), until the thread's next call; once each."""
        ...

    def close(self) -> None:
        """Nothing more will be read."""
        ...


class TensorRows:
    """`Rows` that lie in tensors (n, ...), which nobody changes meanwhile."""

    def __init__(self, columns: Mapping[str, Tensor]):
        self._columns = {name: values.detach().cpu().contiguous() for name, values in columns.items()}
        self.like: Mapping[str, Tensor] = {name: values[:0] for name, values in self._columns.items()}
        self._positions = np.empty(0, np.int64)  # of the rows, part after part
        self._bounds = [0]

    def __len__(self) -> int:
        return len(self._columns["keys"])

    def arrange(self, sort: Callable[[Tensor], tuple[np.ndarray, list[int]]]) -> None:
        self._positions, self._bounds = sort(self._columns["keys"])

    def keys(self, part: int) -> Tensor:
        return slices.take_rows(self._columns["keys"], self._of(part))

    def read(self, part: int, order: np.ndarray) -> dict[str, Tensor]:
        positions = self._of(part)[order]
        return {name: slices.take_rows(values, positions) for name, values in self._columns.items()}

    def close(self) -> None:
        pass

    def _of(self, part: int) -> np.ndarray:
        return self._positions[self._bounds[part] : self._bounds[part + 1]]


def sort_by_part(cuts: list[int]) -> Callable[[Tensor], tuple[np.ndarray, list[int]]]:
    """The argument of `Rows.arrange` for parts that begin at slice 0 and at the slices `cuts`, ascending."""
    part_of_slice = np.searchsorted(np.array(cuts, np.int64), np.arange(slices.SLICES), side="right")
    part_of_slice = part_of_slice.astype(np.uint8 if len(cuts) < 256 else np.uint16)  # for a radix sort

    def sort(keys: Tensor) -> tuple[np.ndarray, list[int]]:
        parts = np.take(part_of_slice, slices.slice_of(keys).numpy())
        counts = np.bincount(parts, minlength=len(cuts) + 1)
        return np.argsort(parts, kind="stable"), [0, *np.cumsum(counts).tolist()]

    return sort


def sources_of(tables: Mapping[str, Mapping[str, Tensor] | Rows]) -> dict[str, Rows]:
    """Rows of each table, by its name in order."""
    return {
        name: TensorRows(rows) if isinstance(rows, Mapping) else rows for name, rows in sorted(tables.items())
    }


def close_rows(tables: Mapping[str, Mapping[str, Tensor] | Rows]) -> None:
    """Close all `Rows` among the tables."""
    for rows in tables.values():
        if not isinstance(rows, Mapping):
            rows.close()
