"""Promise: ranks of a ``bls`` group that make different calls get an error on every rank that names both."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from thread_ranks import ThreadRanks
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch._subclasses import FakeTensorMode

from tritonrec.distributed import RankDiedError
from tritonrec.serving.bounded_lag import BoundedLagGroup, BoundedLagOptions, backend

WORLD = 3


class BlsRanks(ThreadRanks):
    """Groups of the backend in the place of gloo's."""

    def _in_threads(self, function):
        if function.__qualname__.startswith("_connect"):
            store, timeout = dist.HashStore(), timedelta(seconds=5)
            return super()._in_threads(
                lambda rank: BoundedLagGroup(store, rank, WORLD, timeout, BoundedLagOptions())
            )
        return super()._in_threads(function)


ranks = BlsRanks(WORLD)


def options(kind, **fields):
    opts = kind()
    for name, value in fields.items():
        setattr(opts, name, value)
    return opts


def rows(count, dtype=torch.float32):
    return torch.arange(count).to(dtype)


def gather(group, values, root=0):
    outputs = [[torch.empty_like(values) for _ in range(WORLD)]] if group.rank() == root else []
    return group.gather(outputs, [values], options(GatherOptions, rootRank=root))


def scatter(group, out, root=0):
    inputs = [[torch.ones_like(out) for _ in range(WORLD)]] if group.rank() == root else []
    return group.scatter([out], inputs, options(ScatterOptions, rootRank=root))


CALLS = {
    "allreduce": lambda group, values: group.allreduce([values]),
    "allreduce_coalesced": lambda group, values: group.allreduce_coalesced([values, rows(2)]),
    "broadcast": lambda group, values: group.broadcast([values], BroadcastOptions()),
    "reduce": lambda group, values: group.reduce([values], ReduceOptions()),
    "allgather": lambda group, values: group.allgather(
        [[torch.empty_like(values) for _ in range(WORLD)]], [values]
    ),
    "allgather_base": lambda group, values: group._allgather_base(values.repeat(WORLD), values),
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": lambda group, values: group.reduce_scatter([values], [[values.clone()] * WORLD]),
    "reduce_scatter_base": lambda group, values: group._reduce_scatter_base(values, values.repeat(WORLD)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", [rows(4), rows(3, torch.int32), rows(3, torch.float64)], ids=str)
def test_tensors_of_another_size_or_dtype_are_refused_on_every_rank(call, wrong):
    def run(group):
        CALLS[call](group, rows(3)).wait()
        CALLS[call](group, wrong.clone() if group.rank() == 1 else rows(3)).wait()

    for rank, error in enumerate(map(str, ranks.outcomes(run))):
        theirs, mine = (wrong, rows(3)) if rank != 1 else (rows(3), wrong)
        for each, who in ((theirs, f"rank {0 if rank == 1 else 1} calls"), (mine, f"and rank {rank} calls")):
            assert f"{who} {call}" in error, error
            assert f"{each.numel()} {str(each.dtype)[6:]}" in error, error


@pytest.mark.parametrize(
    ("first", "other", "named"),
    [
        (CALLS["allreduce"], CALLS["broadcast"], "broadcast root 0 of 3 float32"),
        (CALLS["allreduce"], lambda group, values: group.barrier(), "calls barrier"),
        (
            CALLS["broadcast"],
            lambda group, values: group.broadcast([values], options(BroadcastOptions, rootRank=1)),
            "broadcast root 1 of 3 float32",
        ),
        (
            CALLS["allreduce"],
            lambda group, values: group.allreduce(
                [values], options(AllreduceOptions, reduceOp=dist.ReduceOp.MAX)
            ),
            "allreduce MAX of 3 float32",
        ),
        (
            CALLS["reduce_scatter"],
            lambda group, values: group.reduce_scatter(
                [values], [[values] * WORLD], options(ReduceScatterOptions, reduceOp=dist.ReduceOp.PRODUCT)
            ),
            "reduce_scatter PRODUCT of 3 float32",
        ),
        (CALLS["gather"], lambda group, values: gather(group, values, 2), "gather root 2 of 3 float32"),
        (CALLS["scatter"], lambda group, values: scatter(group, values, 1), "scatter root 1 of 3 float32"),
    ],
)
def test_another_collective_root_or_reduction_is_refused_on_every_rank(first, other, named):
    def run(group):
        (other if group.rank() == 2 else first)(group, rows(3)).wait()

    assert all(named in str(outcome) for outcome in ranks.outcomes(run))


def test_a_rank_that_does_not_come_is_named():
    def run(group):
        group.check.timeout = timedelta(seconds=0.5)
        if group.rank() != 1:
            group.allreduce([rows(3)])

    outcomes = ranks.outcomes(run)
    assert any("rank 1 did not come to collective 0, allreduce" in str(outcome) for outcome in outcomes)
    assert all(isinstance(outcome, RankDiedError) for outcome in (outcomes[0], outcomes[2]))


def test_waiting_takes_the_callers_timeout():
    def run(group):
        if group.rank() == 1:
            return None
        work = group.alltoall_base(torch.empty(WORLD), torch.ones(WORLD), [], [])
        with pytest.raises(RankDiedError, match=r"within 0\.3 s"):
            work.wait(timedelta(seconds=0.3))
        return None

    try:
        outcomes = ranks.outcomes(run)
    finally:
        ranks.groups = []
    assert any(outcome is None for outcome in (outcomes[0], outcomes[2])), outcomes


def test_a_call_with_tensors_without_values_is_refused_by_its_name():
    with FakeTensorMode():
        fake = torch.empty(2)
    with pytest.raises(
        NotImplementedError, match=r"allreduce: a group of \w+ sends values, and a fake tensor"
    ):
        backend._delegate("allreduce")(None, [fake])
