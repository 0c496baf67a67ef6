"""Promise: a table's place changes no bit: host memory, device memory, or host memory behind a cache."""

import copy
import threading
from tempfile import gettempdir
from types import SimpleNamespace

import pytest
import torch
from speeds import slow_except
from trainer_parts import DIM, Ranker, batches, optimizer_of, same, state, trained, trainer

from tritonrec.embedding import (
    DynamicTable,
    Eviction,
    FeatureConfig,
    HashTableCollection,
    Placement,
    PrecisionTiers,
    RowOptimizer,
    TablePolicy,
)
from tritonrec.embedding.evictor import Evictor
from tritonrec.embedding.precision import AccessCounter
from tritonrec.harness.verify.thread_ranks import run_ranks
from tritonrec.pipeline import DenseModel, LookupCounts
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
WINDOWS = {
    "plain": {},
    "first_use": {"first_use": True},
    "skip_fetch": {"skip_fetch": True},
    "both": {"first_use": True, "skip_fetch": True},
    "no_dedup": {"dedup": "none"},
    "at_the_owner": {"dedup": "lookup"},
}
CASES = [
    ("device", "nestpipe", "none", "both"), ("cached", "nestpipe", "none", "both"),
    ("device", "dbp", "all", "skip_fetch"), ("cached", "nestpipe", "all", "first_use"),
    ("device", "fwp", "admission", "no_dedup"), ("cached", "sequential", "lru", "plain"),
    ("disk", "nestpipe", "all", "both"), ("disk", "dbp", "tiers", "plain"),
    ("disk", "nestpipe", "lru", "no_dedup"),
    ("cached_on_disk", "nestpipe", "all", "both"), ("cached_on_disk", "dbp", "tiers", "plain"),
    ("cached_on_disk", "fwp", "lru", "no_dedup"), ("cached_on_disk", "sequential", "admission", "plain"),
    ("device", "nestpipe", "size", "both"), ("disk", "nestpipe", "size", "both"),
]  # fmt: skip


def at(storage):
    if storage == "disk":
        return Placement("disk", path=gettempdir(), memory="2KiB")
    if storage == "cached_on_disk":
        return Placement("cached", cache_rows=25, path=gettempdir(), memory="1KiB")
    return Placement(storage, cache_rows=25)


def parts(policy, placement=None):
    rule, model = RowOptimizer("adam", lr=0.05), Ranker()
    feature = FeatureConfig("item", DIM, policy=OVER_RANKS[policy])
    tables = HashTableCollection([feature], rule, seed=2, slots=8, chunk_rows=32, placement=placement)
    return model, tables, optimizer_of(model, rule.name, rule.lr)


@pytest.mark.parametrize(("storage", "mode", "policy", "window"), CASES)
def test_every_place_ends_at_the_bits_of_the_reference(storage, mode, policy, window):
    """Some of each; `tritonrec verify` has every mode in every place."""
    expected, losses = trained(parts(policy), "reference", "batch", batches())
    made = parts(policy, at(storage))
    got, results = trained(made, mode, "batch", batches(), **WINDOWS[window])
    assert same(got, expected)
    assert all(torch.equal(a.losses, b.losses) for a, b in zip(losses, results, strict=True))
    counters = made[1].groups[0].table.counters
    assert (counters.cached > 0) == (storage in ("cached", "disk", "cached_on_disk"))
    assert (counters.disk_read > 0 and counters.disk_written > 0) == (storage in ("disk", "cached_on_disk"))


@pytest.mark.parametrize("storage", ["device", "cached", "disk", "cached_on_disk"])
def test_what_a_device_counts_is_what_the_host_counts(storage):
    """One stage after another: in a pipeline moves between the tiers depend on the timing."""
    seen = []
    for placement in (None, at(storage)):
        made = parts("all", placement)
        trained(made, "sequential", "batch", batches())
        counters = vars(made[1].groups[0].table.counters)
        seen.append({name: count for name, count in counters.items() if name not in OF_CACHES})
    assert seen[0] == seen[1]


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
    expected, _ = trained(parts(policy), "reference", "batch", batches())
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
    made = [parts(policy, at(storage)) for _ in range(2)]

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


def test_a_state_moves_from_place_to_place_in_the_middle_of_a_run():
    expected, _ = trained(parts("all"), "reference", "batch", batches())
    state, dense, done = None, None, 0
    for storage, count in (("host", 2), ("device", 1), ("disk", 1), ("cached", 1), ("host", 1)):
        made = parts("all", at(storage))
        if state is not None:
            made[1].load_state(state)
            DenseModel(made[0], made[2]).load_state_dict(dense)
        got, _ = trained(made, "nestpipe", "batch", batches()[done : done + count])
        dense = copy.deepcopy(DenseModel(made[0], made[2]).state_dict())
        state, done = made[1].state(), done + count
    assert same(got, expected)


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
