"""What is compiled now, and one line for the person who waits for it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

compiling: list[Callable[[], None]] = []
"""Called once each, when numba compiles a kernel that it does not find in its cache."""

SLOW_SECONDS = 1.0
"""Of compilation, all kernels together, after which one line says what is going on."""


def note_compilation() -> None:
    """Something is compiled now, that the steps to come will not compile again."""
    called, compiling[:] = list(compiling), []  # one that registers itself again waits for the next kernel
    for call in called:
        call()


@contextmanager
def announced() -> Iterator[None]:
    """For the time in which another process compiles what this one needs."""
    note_compilation()
    announcement.begin()
    try:
        yield
    finally:
        announcement.end()


class Announcement:
    """One line on standard error, of the first rank alone, where compilation takes long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0  # calls of the compiler, which calls itself
        self._left = SLOW_SECONDS
        self._began = 0.0
        self._timer: threading.Timer | None = None

    @property
    def under_way(self) -> bool:
        """Whether something is compiled now."""
        return self._running > 0

    def begin(self) -> None:
        with self._lock:
            self._running += 1
            if self._running == 1 and self._left > 0 and is_first_rank():
                self._began = time.monotonic()
                self._timer = threading.Timer(self._left, self._say)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0 and self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._left -= time.monotonic() - self._began

    def _say(self) -> None:
        with self._lock:
            self._left = 0.0
        print("tritonrec: compiling kernels, on the first run only, up to a minute", file=sys.stderr)


announcement = Announcement()


@cache
def say_once(line: str) -> None:
    """Print a line on standard error, once a process, in the first rank alone."""
    if is_first_rank():
        print(f"tritonrec: {line}", file=sys.stderr)


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks."""
    first = multiprocessing.current_process().name in ("MainProcess", "rank 0")
    return first and not int(os.environ.get("RANK") or 0)
