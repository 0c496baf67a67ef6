"""Prefetching on a background thread."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """Yield `items` in their order, produced by a thread that is up to `depth` items ahead.

    An error of `items` is raised in the place of its item. The thread ends after its current item when the
    generator is closed or deleted. Raises ValueError for a depth below 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    return _prefetched(iter(items), depth)


def _prefetched(items: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    ready: SimpleQueue[tuple[str, object]] = SimpleQueue()
    free = Semaphore(depth)
    closed: list[bool] = []

    def make() -> None:
        while True:
            free.acquire()
            if closed:
                return
            try:
                ready.put(("item", next(items)))
            except StopIteration:
                ready.put(("end", None))
                return
            except BaseException as error:
                ready.put(("error", error))
                return

    thread = Thread(target=make, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value  # type: ignore[misc]
            free.release()
            yield value  # type: ignore[misc]
    finally:
        closed.append(True)
        free.release()
        thread.join()
