"""Memory of a launch: its tensor arguments, and what the emulator keeps beside them."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass

import numpy as np
import torch

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""mmap's flag for memory that is counted when it is used; Python has no name for it."""
LARGE = 1 << 30
"""Bytes of an argument from which on a launch runs in one schedule: it is too large to copy and compare."""


@dataclass
class Argument:
    """A tensor argument: its name, and where its elements lie.

    Args:
        races: accesses without an order are declared harmless. varies: so is a result that depends on it.
    """

    name: str
    tensor: torch.Tensor
    begin: int
    end: int
    races: bool = False
    varies: bool = False

    def element(self, address: int) -> int:
        """Of the storage that begins with the tensor's first element."""
        return (address - self.begin) // self.tensor.element_size()


def argument(name: str, tensor: torch.Tensor, races: bool, varies: bool) -> Argument | None:
    """None for a tensor without elements."""
    if tensor.numel() == 0:
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return Argument(name, tensor, begin, begin + (last + 1) * tensor.element_size(), races, varies)


@dataclass
class Range:
    """Memory of arguments that overlap."""

    begin: int
    end: int
    item: int
    races: bool
    fresh: bool


def ranges_of(arguments: list[Argument], fresh: set[int]) -> list[Range]:
    """Overlapping arguments are one range. `fresh`: storages of ``torch.empty``, by address."""
    found: list[Range] = []
    for each in sorted(arguments, key=lambda a: a.begin):
        item = min(8, each.tensor.element_size())
        new = each.tensor.untyped_storage().data_ptr() in fresh
        if found and each.begin < found[-1].end:
            last = found[-1]
            last.end, last.item = max(last.end, each.end), min(last.item, item)
            last.races, last.fresh = last.races or each.races, last.fresh or new
        else:
            found.append(Range(each.begin, each.end, item, each.races, new))
    return found


class Arena:
    """Memory that launches use one after the other."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self.epoch = 0

    def take(self, name: str, size: int) -> int:
        """The address of `size` bytes, aligned to 128; zeros at first."""
        if name not in self._arrays or self._arrays[name].nbytes < size + 128:
            self._arrays[name] = np.zeros(size + 128, np.uint8)
        return -(-self._arrays[name].ctypes.data // 128) * 128

    def words(self, name: str, count: int) -> tuple[int, np.ndarray]:
        """`count` zeros of int64, and their address."""
        at = self.take(name, 8 * count)
        words = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(at))
        words[:] = 0
        return at, words


ARENA = Arena()


def zeros(size: int) -> np.ndarray:
    """Bytes that take memory only where they are used: an argument may span more than the machine has."""
    if size < LARGE:
        return np.zeros(size, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
