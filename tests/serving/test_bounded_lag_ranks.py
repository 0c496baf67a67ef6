"""Promise: groups of the backend ``bls`` do what torch.distributed promises; a rank that dies is an error."""

import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tritonrec.distributed import RankDiedError, RankPool
from tritonrec.serving.bounded_lag import BoundedLagAllToAll, BoundedLagGroup, BoundedLagOptions, register

pytestmark = pytest.mark.multi_rank
WORLD = 3
STEPS = 200
TIMEOUT = timedelta(seconds=30)


@pytest.fixture(scope="module")
def pool():
    with RankPool((WORLD,), TIMEOUT) as pool:
        yield pool


def all_collectives(communicators):
    """What the group delegates, then uneven all-to-alls that are waited for late and out of order."""
    register()
    register()
    rank = communicators.rank
    group = dist.new_group(None, TIMEOUT, "bls", BoundedLagOptions(bound=2))
    seen = {"backend": dist.get_backend(group)}
    value = torch.tensor([rank + 1])
    dist.all_reduce(value, group=group)
    seen["sum"] = value.item()
    value = torch.tensor([7 if rank == 1 else 0])
    dist.broadcast(value, 1, group=group)
    seen["broadcast"] = value.item()
    gathered = [torch.zeros(1) for _ in range(WORLD)]
    dist.all_gather(gathered, torch.tensor([float(rank)]), group=group)
    seen["gather"] = torch.cat(gathered).tolist()
    objects = [None] * WORLD
    dist.all_gather_object(objects, str(rank), group=group)
    seen["objects"] = objects
    came = torch.empty(WORLD)
    work = dist.all_to_all_single(came, torch.full((WORLD,), float(rank)), group=group, async_op=True)
    assert work.wait() is True and came.tolist() == list(range(WORLD))
    message = torch.tensor([10 * rank])
    if rank == 0:
        dist.send(message, 2, group=group)
    elif rank == 2:
        dist.recv(message, 0, group=group)
    seen["message"] = message.item()
    dist.barrier(group=group)
    gathered, scattered = torch.zeros(2, WORLD), torch.zeros(2, 1)
    gather = group.allgather_into_tensor_coalesced(
        list(gathered), list(torch.tensor([[rank], [10.0 * rank]]))
    )
    scatter = group.reduce_scatter_tensor_coalesced(
        list(scattered), list(torch.arange(2.0 * WORLD).view(2, WORLD) + rank)
    )
    assert gather.wait() and scatter.wait(TIMEOUT) and gather.is_completed()
    group.barrier(timeout=TIMEOUT).wait()
    seen["fake"] = []
    for collective in (dist.all_reduce, lambda x, group: dist.all_to_all_single(x, x, group=group)):
        try:
            with FakeTensorMode():
                collective(torch.ones(WORLD), group=group)
        except NotImplementedError as error:
            seen["fake"].append(str(error))
    seen["coalesced"] = gathered.tolist(), scattered.tolist()

    rows = [[100 * step + 10 * rank + to for to in range(WORLD) for _ in range(to)] for step in range(6)]
    works, outs = [], []
    for step in range(6):
        outs.append(torch.full((WORLD * rank,), -1))
        works.append(
            dist.all_to_all_single(
                outs[-1], torch.tensor(rows[step]), [rank] * WORLD, list(range(WORLD)), group, async_op=True
            )
        )
    seen["in flight"] = group.exchange.in_flight
    works[4].wait()
    seen["completed"] = [work.is_completed() for work in works]
    works[5].wait()
    seen["rows"] = [out.tolist() for out in outs]
    equal = torch.empty(WORLD)
    dist.all_to_all_single(equal, torch.arange(float(WORLD)) + 10 * rank, group=group)
    seen["equal"] = equal.tolist()
    try:
        dist.all_to_all_single(torch.empty(WORLD + 1), torch.empty(WORLD), group=group)
    except ValueError as error:
        seen["error"] = str(error)
    dist.destroy_process_group(group)
    return seen


@pytest.mark.slow
def test_a_group_of_the_backend_is_a_process_group(pool):
    for rank, seen in enumerate(pool.run(all_collectives, WORLD)):
        assert seen["backend"] == "bls" and seen["sum"] == 6 and seen["broadcast"] == 7
        assert seen["gather"] == [0, 1, 2] and seen["objects"] == ["0", "1", "2"]
        assert seen["fake"] == [
            f"{name}: a group of bls sends values, and a fake tensor has none"
            for name in ("allreduce", "all_to_all_single")
        ]
        assert seen["coalesced"] == ([[0, 1, 2], [0, 10, 20]], [[3 * rank + 3], [3 * rank + 12]])
        assert seen["message"] == (0 if rank == 2 else 10 * rank)
        assert seen["in flight"] == 3 and seen["completed"] == [True] * 5 + [False]
        assert seen["rows"] == [
            [100 * step + 10 * source + rank for source in range(WORLD) for _ in range(rank)]
            for step in range(6)
        ]
        assert seen["equal"] == [10 * source + rank for source in range(WORLD)]
        assert seen["error"] == "output has 4 rows, not a multiple of 3 ranks: give split sizes"


def gather_and_forget(communicators):
    """Gathers whose tensors only gloo's threads still hold: they need the interpreter's lock to drop them."""
    register()
    group = dist.new_group(None, TIMEOUT, "bls", BoundedLagOptions())
    for _ in range(STEPS):
        dist.all_gather([torch.zeros(1) for _ in range(WORLD)], torch.ones(1), group, async_op=True)
    last = torch.tensor([communicators.rank])
    dist.all_reduce(last, group=group)
    dist.destroy_process_group(group)
    return last.item()


def test_a_collective_does_not_wait_for_gloo_with_the_lock_of_python(pool):
    assert pool.run(gather_and_forget, WORLD) == [3, 3, 3]


def test_no_collective_reaches_its_backend_by_the_way_that_keeps_the_lock_of_python():
    trampoline = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/PyProcessGroup.hpp"
    names = re.findall(r"c10::intrusive_ptr<Work> (\w+)\(", trampoline.read_text())
    assert {"allgather", "barrier", "send"} <= set(names)
    assert [name for name in names if name not in vars(BoundedLagGroup)] == []


def die_on_the_way(communicators, victim, bound, transport):
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=10))
    exchange = BoundedLagAllToAll(group, bound, 64, timedelta(seconds=10), transport=transport)
    for step in range(20):
        if communicators.rank == victim and step == 7:
            os._exit(3)
        exchange.start(torch.ones(WORLD), [1] * WORLD)
    exchange.drain()


@pytest.mark.parametrize("transport", ["messages", "shared"])
def test_a_rank_that_dies_is_an_error_on_every_other(transport):
    with RankPool((WORLD,), TIMEOUT) as pool, pytest.raises(RankDiedError) as caught:
        pool.run(die_on_the_way, WORLD, 1, 2, transport)
    assert str(caught.value) == "rank 1 died (exit code 3)"
    others = re.split(r"^rank (\d):\n", caught.value.details, flags=re.MULTILINE)[1:]
    assert others[::2] == ["0", "2"]
    for own in others[1::2]:
        assert "RankDiedError: rank " in own
        if transport == "shared":
            assert "rank 1 is gone in exchange 7: its process has ended" in own
