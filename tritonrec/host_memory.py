"""Freed host memory stays with the process, because each step allocates the same buffers again."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's malloc.h
_KEPT = 1 << 30
_LARGE = 32 << 20  # from which glibc maps a block by itself
_WASTE = 4 << 20
_kept = False


def keep_freed_memory() -> None:
    """Let glibc keep up to 1 GiB of freed memory at the end of each heap; nothing happens elsewhere.

    By default glibc returns the end of a heap to the kernel once it is larger than twice the largest freed
    block, and every freed block of more than 32 MiB. The buffers of a training step are then unmapped and
    zeroed again by page faults in every step: up to a quarter of its time. So all blocks come from heaps
    here. For processes that belong to tritonrec: its commands and the ranks of a `RankPool`.
    """
    global _kept
    mallopt = _of_glibc("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
        _kept = True


def gives_back(size: int) -> bool:
    """Whether glibc gives a freed block of `size` bytes back to the kernel, as it does by default."""
    return not _kept and size >= _LARGE and _of_glibc("mallopt") is not None


def return_freed_memory(size: int) -> None:
    """Give freed memory back after all, once a block of `size` bytes is freed that no step allocates again.

    Blocks below 4 MiB are left, and so are processes that have not called `keep_freed_memory`. Below 32 MiB,
    which were left before, the freed key structures of a table of three million rows were 42 MiB.
    """
    if _kept and size >= _WASTE:
        trim = _of_glibc("malloc_trim")
        assert trim is not None
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
