"""A bound of this process's memory that the kernel keeps: an allocation beyond it fails, and raises.

Linux gives memory when it is touched, and ends a process that touches more than there is. Its limit of a
process's data, private writable memory (RLIMIT_DATA, see getrlimit(2)), is looked at before: malloc returns
nothing then, which torch, numpy, numba and Python each turn into an error.
"""

from __future__ import annotations

import os
from pathlib import Path
from threading import Event, Thread

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_OWN = resource and resource.getrlimit(resource.RLIMIT_DATA)
"""The limits that this process began with."""
_LANES = 8
"""Threads at most that a first step starts, each with those of its parallel loops."""
_SPARE = 4
"""Stacks of threads that have ended, which the C library keeps (40 MB) and gives to new ones. A large step
starts OpenMP's in a thread that had small ones only, and OpenMP ends the process where one gets no stack.
"""


def bound_data(more: int) -> None:
    """Refuse this process more than `more` bytes beyond what it has allocated; never above its own limit.

    Nothing is bound beside an accelerator, whose driver reserves addresses that it never fills, nor where
    the kernel has no such limit.
    """
    statm = Path("/proc/self/statm")
    if not _OWN or torch.accelerator.is_available() or not statm.exists():
        return
    lift_bound()  # of the look before, which may have no room for the spare stacks
    go = Event()
    spare = [Thread(target=go.wait) for _ in range(_SPARE)]
    try:
        for each in spare:
            each.start()
    finally:
        go.set()
    for each in spare:
        each.join()
    # A lane may begin its parallel loops at any step: of 96 cores 768 MiB of stacks.
    more = max(more, 0) + stacks() // _LANES
    bound = int(statm.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE") + more
    soft, hard = _OWN
    resource.setrlimit(resource.RLIMIT_DATA, (bound if soft < 0 else min(bound, soft), hard))


def lift_bound() -> None:
    """Back to the limits that this process began with."""
    if _OWN:
        resource.setrlimit(resource.RLIMIT_DATA, _OWN)


def stacks() -> int:
    """Bytes of the stacks of threads that a first step starts: they are data, and hardly filled."""
    return _LANES * torch.get_num_threads() * (8 << 20)


def tells_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it was caused by, is an allocation that failed: torch has no type for it."""
    while error is not None:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False
