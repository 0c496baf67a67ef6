"""Synthetic interaction logs with the shape of real ones: Zipf item popularity and long-tailed lengths.

The item of popularity rank r = 1, 2, ... is drawn with a probability proportional to r ** -exponent. Lengths
are log-normal, from 1 up to `max_length`. Users may form communities: with probability `affinity` an event
has an item of the user's community (the ranks congruent to it), otherwise any item.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from tritonrec.data.interactions import Interactions

# The most popular items have ids at the ends of the range and around zero, so that they are in every batch.
_EDGES = np.array([-(2**63), -1, 2**63 - 1, 0], dtype=np.int64)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # odd, so multiplying by it modulo 2**64 keeps ids distinct
Options = TypeVar("Options")


@dataclass(frozen=True)
class ZipfOptions:
    """Options of `generate`. Raises ValueError naming an option out of range."""

    users: int = 1000
    items: int = 5000
    exponent: float = 1.05
    median_length: float = 20.0
    sigma: float = 1.0  # of the logarithm of the lengths
    max_length: int = 500
    communities: int = 1
    affinity: float = 0.8
    extreme_ids: bool = False  # ids all over int64, negative ones and both ends included
    ratings: bool = False  # ratings from 1 to 5, higher for popular items
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("users", "items", "max_length", "communities"):
            if getattr(self, name) < 1:
                raise ValueError(f"zipf: {name} must be at least 1, got {getattr(self, name)}")
        if self.communities > self.items:
            raise ValueError(f"zipf: {self.communities} communities cannot share {self.items} items")
        for name in ("exponent", "sigma"):
            if not 0 <= getattr(self, name) < 100:
                raise ValueError(f"zipf: {name} must be in [0, 100), got {getattr(self, name)}")
        if not 0 < self.median_length < 1e9:
            raise ValueError(f"zipf: median_length must be in (0, 1e9), got {self.median_length}")
        if not 0 <= self.affinity <= 1:
            raise ValueError(f"zipf: affinity must be in [0, 1], got {self.affinity}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"zipf: seed must be in [0, 2**63), got {self.seed}")

    @classmethod
    def parse(cls, text: str) -> ZipfOptions:
        """Options from ``name=value,name=value``; an empty text gives the defaults."""
        return parsed(cls, text, "zipf: ")


def parsed(options: type[Options], text: str, title: str = "") -> Options:
    """`options`, a dataclass, from ``name=value,name=value``; ValueError, which begins with `title`."""
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(options)}  # type: ignore[arg-type]
    chosen: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in kinds:
            raise ValueError(f"{title}{part!r} is no option; known are {', '.join(kinds)}, as name=value")
        try:
            chosen[name] = _boolean(value) if kinds[name] is bool else kinds[name](value)
        except ValueError as error:
            raise ValueError(f"{title}{name}={value!r} is not a {kinds[name].__name__}") from error
    return options(**chosen)


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "1", "false", "0"):
        raise ValueError(text)
    return text.lower() in ("true", "1")


def generate(options: ZipfOptions) -> Interactions:
    """A log in the order of time; the same options give the same log.

    The first three users have 1, 2 and 3 events (at most `max_length`), so the shortest sequences always
    occur. Some events of a user share a timestamp.
    """
    random = np.random.Generator(np.random.Philox(options.seed))
    lengths = np.exp(np.log(options.median_length) + options.sigma * random.standard_normal(options.users))
    lengths = np.clip(np.rint(lengths), 1, options.max_length).astype(np.int64)
    shortest = np.arange(1, min(3, options.users) + 1)
    lengths[: len(shortest)] = np.minimum(shortest, options.max_length)
    user = np.repeat(np.arange(options.users), lengths)

    own = random.random(len(user)) < options.affinity
    community = user % options.communities
    sizes = (options.items - 1 - community) // options.communities + 1  # items of the user's community
    pick = random.random(len(user))
    rank = np.where(
        own,
        _zipf_rank(pick, sizes, options.exponent) * options.communities + community,
        _zipf_rank(pick, np.full_like(sizes, options.items), options.exponent),
    )

    gaps = random.integers(0, 5, len(user))
    first = np.repeat(random.integers(0, 100 * options.users, options.users), lengths)
    elapsed = np.cumsum(gaps)
    begins = np.repeat(np.cumsum(lengths) - lengths, lengths)
    timestamp = first + elapsed - elapsed[begins]

    in_time = np.argsort(timestamp, kind="stable")
    user, rank, timestamp = user[in_time], rank[in_time], timestamp[in_time]
    rating = None
    if options.ratings:
        liking = 4.5 - 2.0 * rank / options.items + random.standard_normal(len(rank))
        rating = np.clip(np.rint(liking), 1, 5).astype(np.float64)
    if options.extreme_ids:
        return Interactions(_spread(options.users)[user], _spread(options.items)[rank], timestamp, rating)
    return Interactions(user.astype(np.int64), rank.astype(np.int64), timestamp, rating)


def _zipf_rank(pick: np.ndarray, sizes: np.ndarray, exponent: float) -> np.ndarray:
    """Ranks in [0, sizes): the inverse of the cumulative Zipf distribution at `pick` in [0, 1)."""
    weights = np.arange(1, sizes.max(initial=1) + 1, dtype=np.float64) ** -exponent
    cumulative = np.cumsum(weights)
    rank = np.searchsorted(cumulative, pick * cumulative[sizes - 1], side="right")
    return np.minimum(rank, sizes - 1)


def _spread(count: int) -> np.ndarray:
    """(count,) distinct int64 ids all over the range, the edges first."""
    ids = (np.arange(count, dtype=np.uint64) * _SPREAD).view(np.int64)
    ids[: len(_EDGES)] = _EDGES[:count]
    return ids
