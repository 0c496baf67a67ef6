"""Promise: a table's place changes no bit: host memory, device memory, or host memory behind a cache."""

import threading
from tempfile import gettempdir
from types import SimpleNamespace

import pytest
import torch
from speeds import slow_except
from trainer_parts import batches, parts, same, state, trained, trainer

from tritonrec.embedding import (
    DynamicTable,
    Eviction,
    Placement,
    PrecisionTiers,
    TablePolicy,
)
from tritonrec.embedding.evictor import Evictor
from tritonrec.embedding.precision import AccessCounter
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import LookupCounts
from tritonrec.pipeline.places import ReceivedKeys
from tritonrec.pipeline.stages import input_dist, retrieval

POLICIES = {
    "none": TablePolicy(),
    "lru": TablePolicy(Eviction("lru", capacity=30, every=2)),
    "admission": TablePolicy(admission=2),
    "tiers": TablePolicy(precision=PrecisionTiers(2, 3)),
    "all": TablePolicy(Eviction("lru", capacity=30, every=2), admission=2, precision=PrecisionTiers(2, 3)),
}
OVER_RANKS = {
    **POLICIES,
    "lfu": TablePolicy(Eviction("lfu", capacity=30)),
    "ttl": TablePolicy(Eviction("ttl", ttl=1)),
    "size": TablePolicy(Eviction("lru", capacity=60, every=3), precision=PrecisionTiers("4KiB", every=2)),
}
OF_CACHES = "cached", "disk_read", "disk_written"


def at(storage):
    if storage == "disk":
        return Placement("disk", path=gettempdir(), memory="2KiB")
    if storage == "cached_on_disk":
        return Placement("cached", cache_rows=25, path=gettempdir(), memory="1KiB")
    return Placement(storage, cache_rows=25)


@pytest.mark.parametrize("storage", ["device", "cached", "disk", "cached_on_disk"])
def test_every_place_has_the_bits_and_counts_of_the_host(storage):
    """One stage after another: in a pipeline moves between the tiers depend on the timing."""
    made, expected = parts(policy=OVER_RANKS["all"], placement=at(storage)), parts(policy=OVER_RANKS["all"])
    assert same(*(trained(each, "sequential", "batch", batches())[0] for each in (made, expected)))
    counters, plain = (vars(each[1].groups[0].table.counters) for each in (made, expected))
    assert [name for name in OF_CACHES if counters[name]] == [
        name for name in OF_CACHES if (name == "cached" and storage != "device") or "disk" in storage
    ]
    assert plain | {name: counters[name] for name in OF_CACHES} == counters


CHOSEN = [
    (storage, policy)
    for policy in ("lru", "lfu", "ttl", "tiers", "all", "size")
    for storage in ("device", "cached")
]


@pytest.mark.parametrize(
    ("storage", "policy"), slow_except([("device", "all"), ("cached", "lfu"), ("cached", "size")], CHOSEN)
)
def test_two_ranks_choose_as_one_and_foresee_how_many_rows(storage, policy, monkeypatch):
    """Only the first pass of a run has no lookup before it that could send the number."""
    expected, _ = trained(parts(policy=OVER_RANKS[policy]), "reference", "batch", batches())
    number, late = DynamicTable._number, []
    looked = threading.local()

    def noted(table, of, step, all_reduce):
        looked.now = False
        result = number(table, of, step, all_reduce)
        late.extend([step] * looked.now)
        return result

    monkeypatch.setattr(DynamicTable, "_number", noted)
    for kind in (Evictor, AccessCounter):

        def looks(*arguments, found=kind.foresee):
            looked.now = True
            return found(*arguments)

        monkeypatch.setattr(kind, "foresee", looks)
    made = [parts(policy=OVER_RANKS[policy], placement=at(storage)) for _ in range(2)]

    def rank(communicators):
        own = made[communicators.rank]
        with trainer(own, "nestpipe", communicators=communicators) as training:
            list(training.run(batches(rank=communicators.rank, world_size=2)))
        return state(own)

    first, second = run_ranks(2, rank)
    keys, order = torch.cat([first[0], second[0]]).sort()
    assert same([keys, torch.cat([first[1], second[1]])[order], *first[2:]], expected)
    assert late == [0] * len(late) and len(late) == 2 * (1 + (policy in ("all", "size")))
    counters = [each[1].groups[0].table.counters for each in made]
    assert all(each.evicted + each.demoted for each in counters)
    assert policy != "size" or all(each.evicted and each.demoted for each in counters)


def replicas_of(count):
    """The routing of `count` replicas that have received the same."""
    return SimpleNamespace(world_size=count, all_gather=lambda values: [values] * count)


def test_replicas_share_distinct_keys_with_their_last_use_and_count_the_bytes():
    keys, last = torch.tensor([5, 3, 5, 5]), torch.tensor([1, 4, 7, 2], dtype=torch.uint8)
    for padded, expected, use in ((False, [5, 3], [7, 4]), (True, [5, 3, 5, 5], [1, 4, 7, 2])):
        counts = LookupCounts()
        received = ReceivedKeys([], [], keys, last, [], [])
        shared = input_dist._share_with_replicas(received, replicas_of(3), counts, padded)
        assert [each.tolist() for each in shared.replica_keys] == [expected] * 3
        assert [each.tolist() for each in shared.replica_last_use] == [use] * 3
        assert counts.key_bytes == 2 * (8 + 1) * len(expected)


def test_keys_go_to_the_host_for_tables_that_are_there(monkeypatch):
    monkeypatch.setattr(retrieval, "to_host", lambda tensor: ("on the host", tensor))
    received = ReceivedKeys([], [], 1, 2, [3, 4], [5])
    assert retrieval._moved(received, torch.device("cuda")) is received
    moved = retrieval._moved(received, torch.device("cpu"))
    found = moved.keys, moved.last_use, *moved.replica_keys, *moved.replica_last_use
    assert found == tuple(("on the host", each) for each in (1, 2, 3, 4, 5))
    assert retrieval._moved(ReceivedKeys([], [], 1, None, [], []), torch.device("cpu")).last_use is None
