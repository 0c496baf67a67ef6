"""The signals that stop a process, and the one that the kernel sends at its parent's end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(parent: int | None = None) -> None:
    """On Linux, let the kernel kill this process when the thread that started it ends, even if it is stopped.

    `parent` is a process id: this process ends at once where its parent is another one, hence has ended.
    """
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


@contextmanager
def held_back() -> Iterator[None]:
    """Around the start of a process: `STOP_SIGNALS`, which a terminal sends to all, wait in it for `let_in`.

    While it imports, Python would answer them with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # whose own start, within that of the process, would let them in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_in(action: signal.Handlers) -> None:
    """In the started process: those that came are forgotten, and those to come are for `action`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for number in STOP_SIGNALS:
        signal.signal(number, action)
