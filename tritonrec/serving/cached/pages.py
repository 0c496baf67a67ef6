"""Keys and values of users' tokens in pages of a device's memory, or the host's.

A page has room for `PAGE` consecutive tokens of one user, in every layer. With pages of 4 tokens::

    user "ann", 6 tokens, pages [2, 0]       page 0   a4 a5 .  .
    user "bob", 3 tokens, pages [1]          page 1   b0 b1 b2 .
                                             page 2   a0 a1 a2 a3

Where no page is free, the users who were not used for longest lose all of theirs. With pages of the host
behind those of a device they go there, and come back when their user does.
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
        memory: bytes of all pages. The host's are taken from the system when they are first written.
        layers: of the model. width: columns of a token's keys and values in a layer. dtype: of both.
        longest: most tokens of a user. device: of the pages. behind: bytes of the host's pages that take what
            these lose; 0: none.

    Raises CacheMemoryError where `memory`, or `behind`, has no room for a user of `longest` tokens.
    """

    def __init__(
        self,
        memory: int,
        layers: int,
        width: int,
        dtype: torch.dtype,
        longest: int,
        device: torch.device | str = "cpu",
        behind: int = 0,
    ):
        self.page_bytes = layers * PAGE * width * dtype.itemsize
        self.count, needed = memory // self.page_bytes, pages_of(longest)
        if self.count < needed:
            raise CacheMemoryError(
                f"one user of {longest} events needs {needed} pages of {self.page_bytes:,} bytes, "
                f"{needed * self.page_bytes:,} in all, and memory={memory:,} is less"
            )
        self.behind = Pages(behind, layers, width, dtype, longest) if behind else None
        self.store = torch.empty(layers, self.count * PAGE, width, dtype=dtype, device=device)
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
        """What is cached of a user, here or behind, which is no use of it."""
        here = self._cached.get(user)
        return self.behind.find(user) if here is None and self.behind is not None else here

    def take(self, user: Hashable, tokens: int, spared: Collection[Hashable]) -> Cached:
        """The user's entry, with pages for so many tokens; users that are not `spared` may lose theirs."""
        kept = None
        if user not in self._cached and self.behind is not None:
            kept = self.behind._leave(user)  # before others come there and take its pages
        cached = self._cached.setdefault(user, Cached())
        self._cached.move_to_end(user)
        while len(cached.pages) < pages_of(tokens):
            if not self._free:
                self._evict(next(each for each in self._cached if each != user and each not in spared))
                continue
            cached.pages.append(self._free.pop())
        if kept is not None:
            self._write(cached, *kept)
        return cached

    def drop(self, user: Hashable) -> None:
        """Forget a user, here and behind; one that is not here is no error."""
        cached = self._cached.pop(user, None)
        if cached is not None:
            self._free += cached.pages
        if self.behind is not None:
            self.behind.drop(user)

    def _evict(self, user: Hashable) -> None:
        """Free a user's pages; what is in them goes to the pages behind."""
        kept = None if self.behind is None else self._read(self._cached[user])
        self.drop(user)
        self.evicted += 1
        if self.behind is not None and kept is not None:
            self.behind._write(self.behind.take(user, kept[0].known, ()), *kept)

    def _leave(self, user: Hashable) -> tuple[Cached, Tensor] | None:
        """What is cached of a user, who is not here any more."""
        cached = self._cached.get(user)
        kept = None if cached is None else self._read(cached)
        self.drop(user)
        return kept

    def _read(self, cached: Cached) -> tuple[Cached, Tensor]:
        """A user's entry, and a copy of its keys and values (layers, known, width)."""
        return cached, self.store.index_select(1, self.rows(cached, cached.known).to(self.store.device))

    def _write(self, cached: Cached, before: Cached, values: Tensor) -> None:
        """Make an entry that has pages what `_read` gave."""
        rows = self.rows(cached, before.known).to(self.store.device)
        self.store.index_copy_(1, rows, values.to(self.store.device))
        cached.known = before.known
        cached.vector = None if before.vector is None else before.vector.to(self.store.device)

    def rows(self, cached: Cached, tokens: int) -> Tensor:
        """(tokens,) int64: the rows of ``store[layer]`` that hold a user's first tokens."""
        pages = torch.tensor(cached.pages, dtype=torch.int64, device="cpu")
        inside = torch.arange(PAGE, dtype=torch.int64, device="cpu")
        return (pages[:, None] * PAGE + inside).flatten()[:tokens]
