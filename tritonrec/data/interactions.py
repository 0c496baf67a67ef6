"""Interaction logs, and the sequence of each user that they hold.

A log of five rows becomes the sequences of two users (users in the order of their ids, events in the order of
time, rows of one timestamp in the order of the log)::

    user       [ 9,  4,  9,  9,  4]        user_ids    [ 4,           9         ]    (U,)
    item       [10, 20, 11, 12, 21]   ->   offsets     [ 0,           2,       5]    (U + 1,)
    timestamp  [ 5,  8,  1,  5,  2]        items       [21, 20,  11, 10, 12     ]    (N,)
                                           timestamps  [ 2,  8,   1,  5,  5     ]    (N,)

Dimensions: N interactions, U users.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class Sequences:
    """The items of every user in the order of time; the layout is drawn in the module's docstring."""

    user_ids: np.ndarray  # (U,) int64, ascending
    offsets: np.ndarray  # (U + 1,) int64
    items: np.ndarray  # (N,) int64
    timestamps: np.ndarray  # (N,) int64

    @property
    def lengths(self) -> np.ndarray:
        """(U,) int64, never 0."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Interactions:
    """A log: who met what, and when. Any int64 is a legal user, item or timestamp.

    `rating`, where there is one, is (N,) float64; next-item training takes every row whatever its rating.
    Raises ValueError when a column has another shape or dtype.
    """

    user: np.ndarray  # (N,) int64
    item: np.ndarray  # (N,) int64
    timestamp: np.ndarray  # (N,) int64
    rating: np.ndarray | None = None  # (N,) float64

    def __post_init__(self) -> None:
        columns = [("user", np.int64), ("item", np.int64), ("timestamp", np.int64), ("rating", np.float64)]
        for name, dtype in columns:
            column = getattr(self, name)
            if column is None and name == "rating":
                continue
            if column.dtype != dtype or column.shape != (len(self.user),):
                raise ValueError(
                    f"{name} must be {np.dtype(dtype).name} of shape ({len(self.user)},), "
                    f"got {column.dtype} of shape {column.shape}"
                )

    def __len__(self) -> int:
        return len(self.user)

    @cached_property
    def sequences(self) -> Sequences:
        """Per-user sequences, ordered by (timestamp, row of the log)."""
        order = np.lexsort((self.timestamp, self.user))  # stable: rows of one timestamp keep their order
        user_ids, starts = np.unique(self.user[order], return_index=True)
        offsets = np.append(starts, len(order)).astype(np.int64)
        return Sequences(user_ids, offsets, self.item[order], self.timestamp[order])
