"""NestPipe's dual-buffer synchronisation (IV.B): the rows that two batches share are found, and copied."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from ...kernels import launch
from ..lab.rounds import PLAN

ROUNDS, WARM_UP = 50, 5
STATES = 2
"""Of Adam, each as wide as a row."""


def synchronisation() -> dict[str, Any]:
    """Milliseconds of one rank of the lab's four, whose tables are in host memory: medians over batches."""
    job, world = PLAN.job, PLAN.ranks
    loader, times = job.loader(), []
    before, source = torch.empty(0, dtype=torch.int64), torch.empty(0, 0, dtype=torch.float32)
    for step in range(WARM_UP + ROUNDS):
        ids = torch.cat([each.ids for each in loader.batch(step).lookups().values()]).unique()
        keys = ids[launch.owner_of(ids, world) == 0]
        target = torch.zeros(len(keys), (1 + STATES) * job.sizes.dim, dtype=torch.float32)
        if len(before):
            began = time.perf_counter()
            there, here = launch.intersect(before, keys)
            found = time.perf_counter()
            launch.scatter_rows(target, here, source, there)
            times.append((len(keys), len(here), found - began, time.perf_counter() - found))
            assert torch.equal(before[there], keys[here]) and bool((target[here] == 1).all()), step
        before, source = keys, torch.ones_like(target)
    rows, shared, found_in, copied_in = (median(each) for each in zip(*times[WARM_UP:], strict=True))
    return {"rows": rows, "shared": shared, "intersection_ms": found_in * 1e3, "copy_ms": copied_in * 1e3}
