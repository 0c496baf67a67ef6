"""Keys and values of users' tokens in pages of host memory.

A page has room for `PAGE` consecutive tokens of one user, in every layer. With pages of 4 tokens::

    user "ann", 6 tokens, pages [2, 0]       page 0   a4 a5 .  .
    user "bob", 3 tokens, pages [1]          page 1   b0 b1 b2 .
                                             page 2   a0 a1 a2 a3

Where no page is free, the users who were not used for longest lose all of theirs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAGE = 64
"""Tokens of a page."""


class CacheMemoryError(ValueError):
    """The memory of a cache is less than what one user needs."""


def pages_of(tokens: int) -> int:
    """Pages that so many tokens need."""
    return -(-tokens // PAGE)


@dataclass
class Cached:
    """What is cached of a user.

    Args:
        pages: in the order of the tokens. known: first tokens whose keys and values are those of the history.
        vector: (d,) of the whole history, None before it is computed.
    """

    pages: list[int] = field(default_factory=list)
    known: int = 0
    vector: Tensor | None = None


class Pages:
    """Pages by user.

    Args:
        memory: bytes of all pages. They are taken from the system when they are first written.
        layers: of the model. width: columns of a token's keys and values in a layer. dtype: of both.
        longest: most tokens of a user.

    Raises CacheMemoryError where `memory` has no room for a user of `longest` tokens.
    """

    def __init__(self, memory: int, layers: int, width: int, dtype: torch.dtype, longest: int):
        self.page_bytes = layers * PAGE * width * dtype.itemsize
        self.count, needed = memory // self.page_bytes, pages_of(longest)
        if self.count < needed:
            raise CacheMemoryError(
                f"one user of {longest} events needs {needed} pages of {self.page_bytes:,} bytes, "
                f"{needed * self.page_bytes:,} in all, and memory={memory:,} is less"
            )
        self.store = torch.empty(layers, self.count * PAGE, width, dtype=dtype, device="cpu")
        self.evicted = 0
        self._free = list(range(self.count))[::-1]
        self._cached: OrderedDict[Hashable, Cached] = OrderedDict()  # least recently used first

    @property
    def used(self) -> int:
        """Pages that users have."""
        return self.count - len(self._free)

    def __len__(self) -> int:
        return len(self._cached)

    def find(self, user: Hashable) -> Cached | None:
        """What is cached of a user, which is no use of it."""
        return self._cached.get(user)

    def take(self, user: Hashable, tokens: int, spared: Collection[Hashable]) -> Cached:
        """The user's entry, with pages for so many tokens; users that are not `spared` may lose theirs."""
        cached = self._cached.setdefault(user, Cached())
        self._cached.move_to_end(user)
        while len(cached.pages) < pages_of(tokens):
            if not self._free:
                self.drop(next(each for each in self._cached if each != user and each not in spared))
                self.evicted += 1
                continue
            cached.pages.append(self._free.pop())
        return cached

    def drop(self, user: Hashable) -> None:
        """Forget a user; one that is not here is no error."""
        cached = self._cached.pop(user, None)
        if cached is not None:
            self._free += cached.pages

    def rows(self, cached: Cached, tokens: int) -> Tensor:
        """(tokens,) int64: the rows of ``store[layer]`` that hold a user's first tokens."""
        pages = torch.tensor(cached.pages, dtype=torch.int64, device="cpu")
        inside = torch.arange(PAGE, dtype=torch.int64, device="cpu")
        return (pages[:, None] * PAGE + inside).flatten()[:tokens]
