"""Interaction logs, and the sequence of each user that they hold.

A log of five rows becomes the sequences of two users (users in the order of their ids, events in the order of
time, rows of one timestamp in the order of the log)::

    user       [ 9,  4,  9,  9,  4]        user_ids    [ 4,           9         ]    (U,)
    item       [10, 20, 11, 12, 21]   ->   offsets     [ 0,           2,       5]    (U + 1,)
    timestamp  [ 5,  8,  1,  5,  2]        items       [21, 20,  11, 10, 12     ]    (N,)
                                           timestamps  [ 2,  8,   1,  5,  5     ]    (N,)
                                           rows        [ 4,  1,   2,  0,  3     ]    (N,)

Dimensions: N interactions, U users.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from tritonrec.data.features import ItemGenres, UserFeatures


@dataclass(frozen=True)
class Sequences:
    """The items of every user in the order of time; the layout is drawn in the module's docstring."""

    user_ids: np.ndarray  # (U,) int64, ascending
    offsets: np.ndarray  # (U + 1,) int64
    items: np.ndarray  # (N,) int64
    timestamps: np.ndarray  # (N,) int64
    rows: np.ndarray  # (N,) int64, where in the log each event stands

    @property
    def lengths(self) -> np.ndarray:
        """(U,) int64, never 0."""
        return np.diff(self.offsets)


@dataclass(frozen=True)
class Interactions:
    """A log: who met what, and when. Any int64 is a legal user, item or timestamp.

    `rating`, where there is one, is (N,) float64, and `feedback` tells for any number of tasks (``is_click``,
    ``long_view``) whether the user did it, as 0 or 1; next-item training takes every row whatever they say.
    `fraction` orders rows of one timestamp: what was cut off the timestamps, in [0, 1). `time_unit` is that
    of
    the timestamps: s, ms, us, ns, ``"step"`` where they only order the events, empty where nobody has said.
    `words` has the vocabulary of users and of items whose ids were words.
    Raises ValueError when a column has another shape or dtype, or feedback another value.
    """

    user: np.ndarray  # (N,) int64
    item: np.ndarray  # (N,) int64
    timestamp: np.ndarray  # (N,) int64
    rating: np.ndarray | None = None  # (N,) float64
    feedback: dict[str, np.ndarray] = field(default_factory=dict)  # task -> (N,) int64
    user_features: UserFeatures | None = None
    genres: ItemGenres | None = None
    fraction: np.ndarray | None = None  # (N,) float64
    time_unit: str = ""
    words: dict[str, Any] = field(default_factory=dict, compare=False)  # "user", "item" -> Vocabulary

    def __post_init__(self) -> None:
        columns: list[tuple[str, type, Any]] = [
            ("user", np.int64, self.user),
            ("item", np.int64, self.item),
            ("timestamp", np.int64, self.timestamp),
        ]
        columns += [(f"feedback {name!r}", np.int64, column) for name, column in self.feedback.items()]
        if self.rating is not None:
            columns.append(("rating", np.float64, self.rating))
        if self.fraction is not None:
            columns.append(("fraction", np.float64, self.fraction))
        for name, dtype, column in columns:
            if not isinstance(column, np.ndarray):
                raise ValueError(f"{name} must be an array of numpy, got {type(column).__name__}")
            if column.dtype != dtype or column.shape != (len(self.user),):
                raise ValueError(
                    f"{name} must be {np.dtype(dtype).name} of shape ({len(self.user)},), "
                    f"got {column.dtype} of shape {column.shape}"
                )
        for name, column in self.feedback.items():
            if not np.isin(column, (0, 1)).all():
                row = int((~np.isin(column, (0, 1))).nonzero()[0][0])
                raise ValueError(f"feedback {name!r} must be 0 or 1, got {column[row]} in row {row}")

    def __len__(self) -> int:
        return len(self.user)

    def in_time(self, *within: np.ndarray) -> np.ndarray:
        """(N,) int64: the rows in the order of time, or within groups of equal `within` (N,); stable."""
        fractions = () if self.fraction is None else (self.fraction,)
        return np.lexsort((*fractions, self.timestamp, *within))

    @cached_property
    def sequences(self) -> Sequences:
        """Per-user sequences, ordered by (timestamp, fraction, row of the log)."""
        order = self.in_time(self.user)
        users = self.user[order]
        starts = np.append(True, users[1:] != users[:-1]).nonzero()[0][: len(users)]
        offsets = np.append(starts, len(order)).astype(np.int64)
        return Sequences(users[starts], offsets, self.item[order], self.timestamp[order], order)
