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

    def arrange(self, part_of: Callable[[Tensor], np.ndarray], parts: int) -> None:
        """Put each row into the part (n,) that ``part_of(keys)`` gives for some of the keys (n,) int64."""
        ...

    def keys(self, part: int) -> Tensor:
        """Keys (n,) int64 of a part, in any order."""
        ...

    def read(self, part: int, order: np.ndarray) -> dict[str, Tensor]:
        """All columns of a part, its `keys` in this `order` (n,). Called once for each part."""
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

    def arrange(self, part_of: Callable[[Tensor], np.ndarray], parts: int) -> None:
        self._positions, self._bounds = sorted_into(part_of(self._columns["keys"]), parts)

    def keys(self, part: int) -> Tensor:
        return slices.take_rows(self._columns["keys"], self._of(part))

    def read(self, part: int, order: np.ndarray) -> dict[str, Tensor]:
        positions = self._of(part)[order]
        return {name: slices.take_rows(values, positions) for name, values in self._columns.items()}

    def close(self) -> None:
        pass

    def _of(self, part: int) -> np.ndarray:
        return self._positions[self._bounds[part] : self._bounds[part + 1]]


def sorted_into(numbers: np.ndarray, parts: int) -> tuple[np.ndarray, list[int]]:
    """Positions (n,) by part, and where each part begins, for the part `numbers` (n,) of rows."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")  # of 16 bits it counts, and compares nothing
    bounds = np.cumsum(np.bincount(numbers, minlength=parts))
    return order, [0, *bounds.tolist()]


def part_finder(cuts: list[int]) -> Callable[[Tensor], np.ndarray]:
    """Keys (n,) -> the number (n,) of the part of each; parts after the first begin at slices `cuts`."""
    part_of_slice = np.searchsorted(np.array(cuts, np.int64), np.arange(slices.SLICES), side="right")
    return lambda keys: part_of_slice[slices.slice_of(keys).numpy()]
