"""The signals that stop a process, and the one that the kernel sends at its parent's end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
