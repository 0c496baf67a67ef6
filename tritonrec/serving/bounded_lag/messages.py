"""The messages of an exchange, none of which can overflow its receive buffer.

gloo ends a process that receives a longer message than its posted buffer. So the tag of a message encodes the
size of the buffer to post for it: bytes behind the header, rounded up to a power of two. Ranks that disagree
about a size use different tags; nothing is overwritten, and the header shows the difference::

    settings   once, before the first exchange     bound and capacity of the sender
    first      header and the leading bytes        buffer: `EAGER` or the capacity, the same on all ranks
    rest       further bytes, if any               buffer: for the rows that the receiver expects

The header and the leading bytes are one message, so a small exchange takes one message to each rank.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

HEADER = 64
"""Bytes before the rows: int64 number of the exchange, rows, values of a row, rows expected, 16 of dtype."""
EAGER = 2**16
"""Least number of bytes of rows that are sent with the header (MPI's eager protocol)."""
TAG = 0x626C7300
"""First tag of an exchange, far from the tags that people choose."""
SIZES = 64
"""Sizes of buffers: 2**0 to 2**63 bytes."""
LAST_TAG = 2**31 - 1
# Numbers that no exchange and no count of rows has.
NO_MESSAGE, UNKNOWN, FAILED = -1, -2, -3
"""In a header: no message received yet; any number of rows is expected; the rows are an error message."""


class SupportsMessages(Protocol):
    """A group of ranks with tagged messages, as `torch.distributed.ProcessGroup` and its backends."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int, /) -> Any: ...

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int, /) -> Any: ...


@dataclass(frozen=True)
class Layout:
    """Rows of one exchange: `dtype` and `width`, the values of a row."""

    dtype: torch.dtype
    width: int

    @classmethod
    def of(cls, values: torch.Tensor) -> Layout:
        """The layout of `values`, whose first dimension counts rows."""
        return cls(values.dtype, values.shape[1:].numel())

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.width} {_name(self.dtype)}"


class Header(NamedTuple):
    """Of a message: the exchange, its rows, and the rows that its sender expects in return (or `UNKNOWN`)."""

    number: int
    rows: int
    width: int
    expects: int
    dtype: tuple[int, int]

    @classmethod
    def of(cls, number: int, rows: int, layout: Layout, expects: int) -> Header:
        """The header of `rows` rows."""
        return cls(number, rows, layout.width, expects, _code(layout.dtype))

    def write(self, buffer: torch.Tensor) -> None:
        header_words(buffer)[:6] = *self[:4], *self.dtype

    @classmethod
    def read(cls, buffer: torch.Tensor) -> Header:
        return cls.of_words(header_words(buffer))

    @classmethod
    def of_words(cls, words: np.ndarray) -> Header:
        number, rows, width, expects, *dtype = words[:6].tolist()
        return cls(number, rows, width, expects, (dtype[0], dtype[1]))

    def matches(self, layout: Layout) -> bool:
        """Whether the message's rows have this layout."""
        return self.width == layout.width and self.dtype == _code(layout.dtype)

    @property
    def layout(self) -> str:
        """In the format of ``str(Layout)``."""
        name = np.array(self.dtype, np.int64).tobytes().rstrip(b"\0")
        return f"{self.width} {name.decode(errors='replace')}"


def header_words(buffer: torch.Tensor) -> np.ndarray:
    """A view of a buffer's header as int64."""
    return buffer.numpy()[:HEADER].view(np.int64)


@lru_cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache
def _code(dtype: torch.dtype) -> tuple[int, int]:
    """A dtype's name as two int64."""
    first, second = np.frombuffer(_name(dtype).encode()[:16].ljust(16, b"\0"), np.int64).tolist()
    return first, second


def buffer_size(size: int) -> int:
    """Bytes of the buffer for a message of `size` bytes: the next power of two."""
    return 1 << max(size - 1, 0).bit_length()


class Tags:
    """Tags from `first` on: one for the settings, and for each slot one for each size of both messages."""

    def __init__(self, first: int, slots: int):
        self.settings = first
        if first < 0 or first + slots * 2 * SIZES > LAST_TAG:
            raise ValueError(
                f"{slots} exchanges in flight take {slots * 2 * SIZES + 1} tags from {first} on, and tags "
                f"are 0 to {LAST_TAG}: choose a smaller bound or another tag"
            )

    def first(self, slot: int, size: int) -> int:
        """Tag of a message with a header and a buffer for `size` bytes of rows."""
        #     settings | slot 0: SIZES of first, SIZES of rest | slot 1: ...       the size 2**n has place n
        return self.settings + 1 + slot * 2 * SIZES + buffer_size(size).bit_length() - 1

    def rest(self, slot: int, size: int) -> int:
        """Tag of a message of `size` further bytes."""
        return self.first(slot, size) + SIZES


class Deadline:
    """A common deadline of several waits, `timeout` from now."""

    def __init__(self, timeout: timedelta):
        self.seconds = timeout.total_seconds()
        self._end = time.monotonic() + self.seconds

    @property
    def left(self) -> timedelta:
        """Remaining time, at least 1 ms: gloo takes 0 for no limit."""
        return timedelta(seconds=max(self._end - time.monotonic(), 0.001))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._end

    def stalled(self, peer: int, number: int) -> str:
        """The error of a rank that has sent nothing."""
        return f"rank {peer} did nothing about exchange {number} within {self.seconds:g} s: it stalled"


class Slot:
    """Buffers of one exchange in flight: one to and one from each rank, each with a header."""

    def __init__(self, world_size: int):
        self.send: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8, device="cpu")] * world_size
        self.receive = list(self.send)
        self.sending: list[tuple[int, Any]] = []

    @staticmethod
    def buffer(buffers: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """`buffers[rank]`, replaced by a larger one where it has fewer than `size` bytes."""
        if len(buffers[rank]) < size:
            buffers[rank] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return buffers[rank]
