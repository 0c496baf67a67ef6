"""Plain all-to-alls of the ranks of `tritonrec serve-bench`: gloo, bls and MPI in turn (Fig. 6)."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist

from ...distributed import TIMEOUT, Communicators
from ...serving.bounded_lag import BoundedLagGroup, BoundedLagOptions, register

BUDGET_SECONDS, MOST_CALLS, WARM_UP = 0.15, 50, 2
REPEATED_BYTES = 2**15
"""From each rank in an all-to-all that is repeated, as in Fig. 6b."""
LONGEST_SECONDS = 60.0
"""Of the repetitions of one backend."""

Repetitions = dict[int, dict[str, float]]


@lru_cache(maxsize=2)
def bls_group(timeout: timedelta, capacity: int = 0) -> BoundedLagGroup:
    """The group of bls, which all ranks make together, and which is kept."""
    register()
    options: Any = BoundedLagOptions(capacity=capacity)
    return cast(BoundedLagGroup, dist.new_group(timeout=timeout, backend="bls", pg_options=options))


def time_collectives(
    size: int, seed: int, peer: Any = None, timeout: timedelta = TIMEOUT, capacity: int = 0
) -> dict[str, float]:
    """Seconds of one synchronous all-to-all with `size` bytes to each rank, by backend, alternating.

    Under ``gloo cpu`` and so on stand the seconds of this rank's processor that it took.

    What arrives is compared first, in all buffers. `peer` is an mpi4py communicator of the same ranks, or
    None; with a `capacity` bls is timed with it too, where its `auto` takes MPI then. Sizes are the same for
    all ranks and so is the number of calls, which the first rank's pace decides.
    """
    calls = _calls(size, seed + dist.get_rank(), peer, timeout, capacity)
    start = perf_counter()
    calls["gloo"]()
    pace = torch.tensor([perf_counter() - start], dtype=torch.float64)
    dist.broadcast(pace, 0)
    repeats = int(min(MOST_CALLS, max(1, BUDGET_SECONDS / pace.item())))
    seconds = {}
    for name, call in calls.items():
        dist.barrier()
        start, cpu = perf_counter(), time.process_time()
        for _ in range(repeats):
            call()
        seconds[name] = (perf_counter() - start) / repeats
        seconds[f"{name} cpu"] = (time.process_time() - cpu) / repeats
    return seconds


def time_repetitions(
    most: int, seed: int, peer: Any = None, timeout: timedelta = TIMEOUT, capacity: int = 0
) -> Repetitions:
    """Seconds of n all-to-alls in a row, of `REPEATED_BYTES` from each rank, for n = 1, 10, ..., `most`.

    By n and backend. A backend whose n calls would take longer than `LONGEST_SECONDS` is left out.
    """
    if most < 1:
        return {}
    world = dist.get_world_size()
    calls = _calls(REPEATED_BYTES // world, seed + dist.get_rank(), peer, timeout, capacity)
    found: Repetitions = {}
    count = 1
    while count <= most and calls:
        found[count] = {}
        for name in list(calls):
            dist.barrier()
            start = perf_counter()
            for _ in range(count):
                calls[name]()
            found[count][name] = perf_counter() - start
            pace = torch.tensor([found[count][name]], dtype=torch.float64)
            dist.broadcast(pace, 0)
            if pace.item() * 10 > LONGEST_SECONDS:
                del calls[name]
        count *= 10
    return found


def _calls(
    size: int, seed: int, peer: Any, timeout: timedelta, capacity: int
) -> dict[str, Callable[[], Any]]:
    """One all-to-all of `size` bytes to each rank by each backend, after calls that were compared."""
    world = dist.get_world_size()
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (world * size,), dtype=torch.uint8, generator=generator)
    counts, places = [size] * world, [at * size for at in range(world)]
    groups = {"bls": bls_group(timeout)}
    if capacity:
        by_mpi = bls_group(timeout, capacity)
        by_mpi.exchange.connect()
        groups |= {"bls by MPI": by_mpi} if by_mpi.exchange.transport == "mpi" else {}
    names = ["gloo", *groups, *["MPI"] * (peer is not None)]
    out = {name: torch.zeros_like(values) for name in names}
    calls: dict[str, Callable[[], Any]] = {"gloo": lambda: dist.all_to_all_single(out["gloo"], values)}
    for name, group in groups.items():
        calls[name] = partial(dist.all_to_all_single, out[name], values, group=group)
    if peer is not None:
        from mpi4py import MPI

        sent, received = ([each.numpy(), counts, places, MPI.BYTE] for each in (values, out["MPI"]))
        calls["MPI"] = lambda: peer.Alltoallv(sent, received)
    for name, call in calls.items():
        for _ in range(WARM_UP):
            out[name].zero_()
            call()
            if not torch.equal(out[name], out["gloo"]):
                raise RuntimeError(f"{name} and gloo disagree on what arrives, at {size} bytes to each rank")
    return calls


def of_ranks(ranks: list[dict[str, float]]) -> dict[str, list[float]]:
    """By backend the seconds of all ranks."""
    return {name: [each[name] for each in ranks] for name in ranks[0]}


def counts_of_ranks(ranks: list[Repetitions]) -> dict[int, dict[str, list[float]]]:
    """`of_ranks` by number of repetitions."""
    return {count: of_ranks([each[count] for each in ranks]) for count in ranks[0]}


def time_size(communicators: Communicators, size: int, seed: int) -> dict[str, float]:
    """`time_collectives`, as a rank of a pool runs it."""
    return time_collectives(size, seed, timeout=timedelta(seconds=communicators.watch.timeout))


def time_counts(communicators: Communicators, most: int, seed: int) -> Repetitions:
    """`time_repetitions`, as a rank of a pool runs it."""
    return time_repetitions(most, seed, timeout=timedelta(seconds=communicators.watch.timeout))
