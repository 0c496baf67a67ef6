"""Calls that another process has to answer, with a limit: it may have been stopped in the middle of anything.

A store's client waits for its answer without a limit of its own, and so do rendezvous that use it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

Result = TypeVar("Result")

READ_TIMEOUT = 2.0
"""Seconds for a store to answer where nothing depends on it; its process may be the one that stalled."""

LATE = 0.5
"""Seconds beyond a timeout for what has that timeout itself, and fails by it with a better message."""


_left: list[threading.Thread] = []
"""Threads of calls without an answer."""


@atexit.register
def join_left() -> None:
    """Wait for calls that end by themselves: one that returns while the interpreter ends aborts it."""
    until = time.monotonic() + READ_TIMEOUT
    for thread in _left:
        thread.join(max(0.0, until - time.monotonic()))


def within(seconds: float | timedelta, function: Callable[[], Result]) -> Result:
    """``function()``, called on a thread of its own; raises what it raises.

    Raises TimeoutError where it has not returned in time. Its thread, a daemon, then waits on.
    """
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    results: list[Result] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="limited call", daemon=True)
    thread.start()
    _left.append(thread)
    thread.join(seconds)
    if not thread.is_alive():  # also where a signal ends the wait above, it is left
        _left.remove(thread)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]
