"""Promise: a ``bls`` group gives other calls on as they are, and refuses what has no values."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from thread_ranks import ThreadRanks
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


def test_a_group_without_options_has_the_usual_ones(monkeypatch):
    monkeypatch.setattr(backend, "BoundedLagGroup", lambda *given: given)
    opts = SimpleNamespace(store="store", group_rank=1, group_size=2, timeout=3)
    assert backend._create(opts, None) == ("store", 1, 2, 3, BoundedLagOptions())
    assert backend._create(opts, "mine") == ("store", 1, 2, 3, "mine")
