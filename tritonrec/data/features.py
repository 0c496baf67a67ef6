"""Features of users and items beside the log: one id per user feature, a bag of genres per item.

Two users with two features, and three items of which the second has no genre::

    user_ids   [ 4,  9]                   item_ids  [10, 11, 12]         (I,)
    gender     [ 2,  1]   (U,)            offsets   [ 0,  2,  2,  3]     (I + 1,)
    age        [ 3,  3]   (U,)            genres    [ 1,  4,      2]

Ids of values count from 1. A user or item without an entry has feature 0, or no genre.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
