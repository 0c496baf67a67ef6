"""Interaction logs, the sequence of each user that they hold, and features of users and items beside them.

A log of five rows becomes the sequences of two users (users in the order of their ids, events in the order of
time, rows of one timestamp in the order of the log)::

    user       [ 9,  4,  9,  9,  4]        user_ids    [ 4,           9         ]    (U,)
    item       [10, 20, 11, 12, 21]   ->   offsets     [ 0,           2,       5]    (U + 1,)
    timestamp  [ 5,  8,  1,  5,  2]        items       [21, 20,  11, 10, 12     ]    (N,)
                                           timestamps  [ 2,  8,   1,  5,  5     ]    (N,)
                                           rows        [ 4,  1,   2,  0,  3     ]    (N,)

Two users with two features, and three items of which the second has no genre::

    user_ids   [ 4,  9]                   item_ids  [10, 11, 12]         (I,)
    gender     [ 2,  1]   (U,)            offsets   [ 0,  2,  2,  3]     (I + 1,)
    age        [ 3,  3]   (U,)            genres    [ 1,  4,      2]

Ids of values count from 1. A user or item without an entry has feature 0, or no genre.

Dimensions: N interactions, U users, I items.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np


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
    `fraction` orders rows of one timestamp: what was cut off the timestamps, in [0, 1). `time_unit` is
    that of the timestamps: s, ms, us, ns, ``"step"`` where they only order the events, empty where nobody has
    said.
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


@dataclass(frozen=True)
class UserFeatures:
    """Features of users. Raises ValueError when a column has another shape or dtype, or ids do not ascend."""

    user_ids: np.ndarray  # (U,) int64, ascending
    columns: dict[str, np.ndarray]  # feature -> (U,) int64

    def __post_init__(self) -> None:
        _check_ids("user_ids", self.user_ids)
        for name, column in self.columns.items():
            if column.dtype != np.int64 or column.shape != self.user_ids.shape:
                raise ValueError(
                    f"user feature {name!r} must be int64 of shape {self.user_ids.shape}, "
                    f"got {column.dtype} of shape {column.shape}"
                )

    @classmethod
    def of_words(cls, ids: np.ndarray, words: dict[str, list[str]]) -> UserFeatures:
        """Words of users in any order, numbered."""
        order = np.argsort(ids)
        return cls(ids[order], {name: numbered(own)[order] for name, own in words.items()})

    def of(self, users: np.ndarray) -> dict[str, np.ndarray]:
        """Every feature (n,) int64 of `users` (n,) int64; 0 for an unknown user."""
        places = _places(self.user_ids, users)
        return {name: np.append(column, 0)[places] for name, column in self.columns.items()}


@dataclass(frozen=True)
class ItemGenres:
    """Bags of genres. Raises ValueError when a field has another shape or dtype, or ids do not ascend."""

    item_ids: np.ndarray  # (I,) int64, ascending
    offsets: np.ndarray  # (I + 1,) int64
    genres: np.ndarray  # (G,) int64

    def __post_init__(self) -> None:
        _check_ids("item_ids", self.item_ids)
        for name, column in (("offsets", self.offsets), ("genres", self.genres)):
            if column.dtype != np.int64 or column.ndim != 1:
                raise ValueError(
                    f"{name} must be int64 of one dimension, got {column.dtype} of shape {column.shape}"
                )
        ends_right = len(self.offsets) == len(self.item_ids) + 1 and self.offsets[-1] == len(self.genres)
        if not ends_right or self.offsets[0] != 0 or (np.diff(self.offsets) < 0).any():
            raise ValueError(
                f"offsets must rise from 0 to {len(self.genres)} in {len(self.item_ids)} bags, "
                f"got {self.offsets[:5]} ... of length {len(self.offsets)}"
            )

    @classmethod
    def of_words(cls, ids: np.ndarray, bags: list[list[str]]) -> ItemGenres:
        """Bags of words of items in any order, numbered."""
        order = np.argsort(ids)
        words = [word for row in order for word in bags[row]]
        lengths = np.array([len(bags[row]) for row in order], dtype=np.int64)
        return cls(ids[order], np.append(0, np.cumsum(lengths)), numbered(words))

    def of(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start in `genres` and length of the bag of each of `items`: (n,) int64; length 0 if unknown."""
        places = _places(self.item_ids, items)
        return self.offsets[places], np.append(np.diff(self.offsets), 0)[places]


def numbered(words: list[str]) -> np.ndarray:
    """(n,) int64: the number of each word in the alphabetical order of distinct words, from 1."""
    return np.unique(np.array(words, dtype=str), return_inverse=True)[1].astype(np.int64) + 1


def _check_ids(name: str, ids: np.ndarray) -> None:
    if ids.dtype != np.int64 or ids.ndim != 1:
        raise ValueError(f"{name} must be int64 of one dimension, got {ids.dtype} of shape {ids.shape}")
    if (ids[1:] <= ids[:-1]).any():
        at = int((ids[1:] <= ids[:-1]).nonzero()[0][0])
        raise ValueError(f"{name} must ascend: {name}[{at + 1}] = {ids[at + 1]} comes after {ids[at]}")


def _places(known: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Positions of `ids` in `known`, which ascends; its length where absent."""
    places = np.searchsorted(known, ids)
    found = np.append(known, 0)[places] == ids
    return np.where(found, places, len(known))
