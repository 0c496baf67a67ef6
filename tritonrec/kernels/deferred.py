"""Errors that ops find in values on a device, put off to one read for many ops.

An op that adds in fixed point knows only on the device whether a value was too large. Where a
`DeferredErrors` is active, the host does not wait to raise: it collects the positions of bad values, and
`check` looks at all of them at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_of_thread = threading.local()
NONE = 2**63 - 1
"""Greater than any position: a program that found no bad value."""


def first_bad(positions: torch.Tensor) -> torch.Tensor:
    """() int64, 1 + the smallest of the positions (n,) that programs found, 0 where all found `NONE`."""
    first = positions.min()
    return torch.where(first == NONE, 0, first + 1)


class DeferredErrors:
    """Positions of bad values that ops found, in the order of their calls; threads may share it.

    Args:
        drops: an ArithmeticError is not raised, also where its values are on the host; `dropped` tells of it,
            for a caller that makes no use of the results then.
    """

    def __init__(self, drops: bool = False) -> None:
        self.drops = drops
        self._found: list[tuple[torch.Tensor, Callable[[int], Exception]]] = []
        self._dropped = False

    def refuse(self, error: Exception) -> None:
        """Raise `error`, or drop it."""
        if not self.drops or not isinstance(error, ArithmeticError):
            raise error
        self._dropped = True

    def dropped(self, device: torch.device) -> torch.Tensor:
        """() bool, whether an error was dropped up to now, or is to be of those that are put off."""
        found = torch.full((), self._dropped, dtype=torch.bool, device=device)
        kept = []
        for positions, error in self._found:
            # error(1) is made for its type alone.
            if self.drops and isinstance(error(1), ArithmeticError):
                found = found | (positions != NONE).any()
            else:
                kept.append((positions, error))
        self._found, self._dropped = kept, False
        return found

    def add(self, positions: torch.Tensor, error: Callable[[int], Exception]) -> None:
        """Collect `positions` (n,) int64, `NONE` where nothing is bad; the error is that of `first_bad`."""
        self._found.append((positions, error))

    def check(self) -> None:
        """Raise the error of the first call that found a bad value; waits for the device, once."""
        found, self._found = self._found, []
        if not found or bool((torch.cat([positions for positions, _ in found]) == NONE).all()):
            return
        for positions, error in found:
            if code := int(first_bad(positions)):
                self.refuse(error(code))

    def repeat(self) -> None:
        """Put the same errors off again, to what collects them on this thread, by what the positions are now.

        For work that wrote the same tensors a second time. Where nothing collects, errors are raised.
        """
        collecting = current() or DeferredErrors()
        for positions, error in self._found:
            # A copy: the next replay writes to the same tensor.
            collecting.add(positions.clone(), error)
        if collecting is not current():
            collecting.check()

    def active(self) -> _Active:
        """Inside, on this thread, ops put their errors off to this object."""
        return _Active(self)


class _Active:
    """A class and no generator, which takes three times as long to enter: every task of a step does."""

    __slots__ = ("_before", "_deferred")

    def __init__(self, deferred: DeferredErrors) -> None:
        self._deferred = deferred

    def __enter__(self) -> None:
        self._before, _of_thread.deferred = current(), self._deferred

    def __exit__(self, *error: object) -> None:
        _of_thread.deferred = self._before


def current() -> DeferredErrors | None:
    """What collects codes on this thread."""
    return getattr(_of_thread, "deferred", None)


def refuse(error: Exception) -> None:
    """Raise `error`, unless what collects errors on this thread drops it."""
    collecting = current()
    if collecting is None:
        raise error
    collecting.refuse(error)
