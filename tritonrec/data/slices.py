"""Slices in a run's trace for what a source of batches does: reading, decoding, sampling, collating.

A trainer reads its batches on the ``prefetch`` lane and collects the slices of each there. Anywhere else
`work` does nothing. A dataset of one's own may use it too::

    with work("decode"):
        image = decode(raw)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter_ns

Slices = list[tuple[str, int, int]]
"""(name, start, end) of each slice, in nanoseconds of ``time.perf_counter_ns``."""

_collected: ContextVar[Slices | None] = ContextVar("slices", default=None)


@contextmanager
def work(name: str) -> Iterator[None]:
    """The block is a slice called `name`, inside the slice of the batch that is being read."""
    slices = _collected.get()
    if slices is None:
        yield
        return
    start = perf_counter_ns()
    try:
        yield
    finally:
        slices.append((name, start, perf_counter_ns()))


@contextmanager
def collected() -> Iterator[Slices]:
    """Collect the slices of the block."""
    slices: Slices = []
    token = _collected.set(slices)
    try:
        yield slices
    finally:
        _collected.reset(token)
