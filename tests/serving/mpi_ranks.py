"""A rank of `test_bounded_lag_mpi`: ``mpiexec -n 3 python mpi_ranks.py STORE``; prints ``fine`` last."""

import sys
import time
from collections import deque
from datetime import timedelta

import torch
import torch.distributed as dist

from tritonrec.serving.bounded_lag import BoundedLagAllToAll, meeting
from tritonrec.serving.bounded_lag.mpi import MpiWindows, number_of_rank

PATIENCE = timedelta(seconds=20)


def rows_between(step, source, to):
    return torch.arange((step + 2 * source + to) % 5 * 3).view(-1, 3) + 1000 * step + 100 * source + 10 * to


def exchange_all(rank, world, bound, steps, delay, transport="mpi"):
    exchange = BoundedLagAllToAll(dist.group.WORLD, bound, 4 * 3 * 8, PATIENCE, transport=transport)
    started = deque()

    def check():
        step, handle = started.popleft()
        values, counts = handle.wait()
        expected = [rows_between(step, source, rank) for source in range(world)]
        assert counts == list(map(len, expected)) and torch.equal(values, torch.cat(expected)), step

    for step in range(steps):
        time.sleep(delay * rank * (step % 2))
        parts = [rows_between(step, rank, to) for to in range(world)]
        values = torch.cat(parts)
        started.append((step, exchange.start(values, list(map(len, parts)))))
        values.fill_(-1)
        assert isinstance(exchange._transport, MpiWindows) and exchange.largest_lag <= bound
        while len(started) > bound:
            check()
    exchange.drain()
    while started:
        check()


def error_of(start, capacity=64):
    exchange = BoundedLagAllToAll(dist.group.WORLD, 0, capacity, PATIENCE, transport="mpi")
    try:
        for number in range(3):
            start(exchange, number)
    except (RuntimeError, ValueError) as error:
        return str(error)
    raise AssertionError("no error")


def main(store):
    rank = number_of_rank()
    from mpi4py import MPI

    world = MPI.COMM_WORLD.size
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for bound in (0, 2):
        exchange_all(rank, world, bound, 25, 0.002)

    def other_dtype(exchange, number):
        exchange.start(torch.ones(world, dtype=torch.int32 if rank == 1 else torch.float32), [1] * world)

    meeting.host_words = lambda: (rank, 1)  # each on a host of its own
    exchange_all(rank, world, 2, 25, 0.002, "auto")

    error = error_of(other_dtype)
    assert "rank 1 sent 1 rows of 1 int32" in error or "and rank 1 expects any number of 1 int32" in error, (
        error
    )

    def other_count(exchange, number):  # rank 2 hears of it from the others
        receive = [1] * world
        receive[0] += rank == 1
        exchange.start(torch.ones(world), [1] * world, receive)

    error = error_of(other_count)
    assert "rank 0 sent 1 rows of 1 float32, and rank 1 expects 2 of 1 float32" in error, error
    large = 100_000

    def too_large(exchange, number):
        exchange.start(torch.ones(large * world), [large] * world, [large] * world)

    assert "a message of 400000 bytes does not fit a room of 65536" in error_of(too_large)
    dist.barrier()
    print("fine", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
