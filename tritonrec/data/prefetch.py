"""Reading ahead on a background thread."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import TypeVar

Item = TypeVar("Item")


def prefetch(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """The same items in the same order, made on a thread that is up to `depth` of them ahead.

    An error in `items` is raised where its item would have come. Closing the generator, or dropping it, ends
    the thread after the item it is making. Raises ValueError for a depth below 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")
    return _prefetched(iter(items), depth)


def _prefetched(items: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    ready: SimpleQueue[tuple[str, object]] = SimpleQueue()
    room = Semaphore(depth)
    closed: list[bool] = []

    def make() -> None:
        while True:
            room.acquire()
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
            room.release()
            yield value  # type: ignore[misc]
    finally:
        closed.append(True)
        room.release()
        thread.join()
