"""Errors that ops find in values on a device, put off to one read for many ops.

An op that adds in fixed point knows only on the device whether a value was too large. Where a `Deferred` is
active, the host does not wait to raise: it collects the codes, and `check` reads all of them at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_of_thread = threading.local()


class Deferred:
    """Codes of ops, in the order of their calls; threads may share it."""

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, Callable[[int], Exception]]] = []

    def add(self, code: torch.Tensor, error: Callable[[int], Exception]) -> None:
        """Collect `code`, () int64, whose error is ``error(code)`` where it is not 0."""
        self._found.append((code, error))

    def check(self) -> None:
        """Raise the error of the first code that is not 0; waits for the device, once."""
        found, self._found = self._found, []
        if not found:
            return
        for code, (_, error) in zip(torch.stack([code for code, _ in found]).tolist(), found, strict=True):
            if code:
                raise error(code)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, on this thread, ops put their errors off to this object."""
        before, _of_thread.deferred = current(), self
        try:
            yield
        finally:
            _of_thread.deferred = before


def current() -> Deferred | None:
    """What collects codes on this thread."""
    return getattr(_of_thread, "deferred", None)
