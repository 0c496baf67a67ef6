"""Promise: a table's place changes no bit: host memory, device memory, or host memory behind a cache."""

import copy

import pytest
import torch
from speeds import slow_except
from trainer_parts import DIM, Ranker, batches, optimizer_of, same, trained

from tritonrec.embedding import (
    Eviction,
    FeatureConfig,
    HashTableCollection,
    Placement,
    PrecisionTiers,
    RowOptimizer,
    TablePolicy,
)
from tritonrec.pipeline import DenseModel

POLICIES = {
    "none": TablePolicy(),
    "lru": TablePolicy(Eviction("lru", capacity=30, every=2)),
    "admission": TablePolicy(admission=2),
    "tiers": TablePolicy(precision=PrecisionTiers(2, 3)),
    "all": TablePolicy(Eviction("lru", capacity=30, every=2), admission=2, precision=PrecisionTiers(2, 3)),
}
WINDOWS = {
    "plain": {},
    "first_use": {"first_use": True},
    "skip_fetch": {"skip_fetch": True},
    "both": {"first_use": True, "skip_fetch": True},
    "no_dedup": {"dedup": "none"},
    "at_the_owner": {"dedup": "lookup"},
}
CASES = [
    (storage, mode, policy, window)
    for storage in ("device", "cached")
    for mode in ("sequential", "dbp", "fwp", "nestpipe")
    for policy in POLICIES
    for window, config in WINDOWS.items()
    if mode in ("dbp", "nestpipe") or not config.get("skip_fetch")
]
QUICK = [
    ("device", "nestpipe", "none", "both"), ("cached", "nestpipe", "none", "both"),
    ("device", "dbp", "all", "skip_fetch"), ("cached", "nestpipe", "all", "first_use"),
    ("device", "fwp", "admission", "no_dedup"), ("cached", "sequential", "lru", "plain"),
]  # fmt: skip


def parts(policy, placement=None):
    rule, model = RowOptimizer("adam", lr=0.05), Ranker()
    feature = FeatureConfig("item", DIM, policy=POLICIES[policy])
    tables = HashTableCollection([feature], rule, seed=2, slots=8, chunk_rows=32, placement=placement)
    return model, tables, optimizer_of(model, rule.name, rule.lr)


@pytest.mark.parametrize(("storage", "mode", "policy", "window"), slow_except(QUICK, CASES))
def test_every_place_ends_at_the_bits_of_the_reference(storage, mode, policy, window):
    expected, losses = trained(parts(policy), "reference", "batch", batches())
    made = parts(policy, Placement(storage, cache_rows=25))
    got, results = trained(made, mode, "batch", batches(), **WINDOWS[window])
    assert same(got, expected)
    assert all(torch.equal(a.losses, b.losses) for a, b in zip(losses, results, strict=True))
    counters = made[1].groups[0].table.counters
    assert (counters.cached > 0) == (storage == "cached")


@pytest.mark.parametrize("storage", ["device", "cached"])
def test_what_a_device_counts_is_what_the_host_counts(storage):
    """One stage after another: in a pipeline moves between the tiers depend on the timing."""
    seen = []
    for placement in (None, Placement(storage, cache_rows=25)):
        made = parts("all", placement)
        trained(made, "sequential", "batch", batches())
        counters = vars(made[1].groups[0].table.counters)
        seen.append({name: count for name, count in counters.items() if name != "cached"})
    assert seen[0] == seen[1]


def test_a_state_moves_from_place_to_place_in_the_middle_of_a_run():
    expected, _ = trained(parts("all"), "reference", "batch", batches())
    state, dense, done = None, None, 0
    for storage, count in (("host", 2), ("device", 1), ("cached", 2), ("host", 1)):
        made = parts("all", Placement(storage, cache_rows=25))
        if state is not None:
            made[1].load_state(state)
            DenseModel(made[0], made[2]).load_state_dict(dense)
        got, _ = trained(made, "nestpipe", "batch", batches()[done : done + count])
        dense = copy.deepcopy(DenseModel(made[0], made[2]).state_dict())
        state, done = made[1].state(), done + count
    assert same(got, expected)
