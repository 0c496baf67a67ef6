"""CPU kernels on several threads: ranges of independent work, as many at a time as torch has threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

Result = TypeVar("Result")
THREAD_COST = 10_000_000  # floating-point operations that are worth a thread


def over_ranges(run: Callable[[int, int], Result], count: int, cost: float, step: int = 1) -> list[Result]:
    """Call ``run(start, stop)`` on ranges that cover [0, count); results in the order of the ranges.

    `run` releases the GIL and writes disjoint outputs, so the cut cannot show in the result. `cost` is
    the number of floating-point operations in all: below some millions a second thread costs more than it
    saves, and the caller runs everything itself. Ranges start at multiples of `step`.
    """
    threads = min(torch.get_num_threads(), int(cost // THREAD_COST), count // max(step, 1))
    if threads <= 1:
        return [run(0, count)]
    cuts = [count * i // threads // step * step for i in range(threads)] + [count]
    futures = [_pool(os.getpid(), threads).submit(run, cuts[i], cuts[i + 1]) for i in range(1, threads)]
    first = run(cuts[0], cuts[1])
    return [first, *(future.result() for future in futures)]


@lru_cache(maxsize=8)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    # The process is in the key because a forked child inherits the pool object but not its threads.
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="tritonrec-kernel")
