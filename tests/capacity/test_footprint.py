"""Promise: what a table will take for more rows is no less than what it then takes, and not far above."""

from dataclasses import replace

import pytest
import torch

from tritonrec import nn
from tritonrec.capacity import foretell, sizes_of, tables_added
from tritonrec.data import Batch, KeyedJaggedTensor, NextItemLoader, load
from tritonrec.data.jagged import Lookup, offsets_of
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

CHUNK = 64
POLICIES = {
    "none": None,
    "evicting": TablePolicy(Eviction("lru", capacity=1 << 20)),
    "tiers": TablePolicy(precision=PrecisionTiers(1, 1000)),
}


def taken(table):
    """Bytes of all that is in use: of rows those that exist, of the rest what is allocated."""
    sizes = table.memory()
    return sizes["key_structure"] + sizes["metadata"] + len(table) * 4 * table.row_width


@pytest.mark.every_case
@pytest.mark.parametrize("before", [0, 1, 700, 769, 3000])
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_of_a_table_that_grows(before, policy):
    policy, kept = POLICIES[policy], policy != "none"
    table = DynamicTable(5, 11, slots=8, chunk_rows=CHUNK, policy=policy)
    if before:
        table.lookup(torch.arange(before, dtype=torch.int64), 0)
    at_first, bounds = taken(table), {}
    for more in (1, 10, 300, 1000, 5000):
        bounds[more] = sizes_of(table).added(more), sizes_of(table).added(more, at_peak=False)
    highest, step = at_first, 1
    for first in range(before, before + 5000, 50):
        table.lookup(torch.arange(first, first + 50, dtype=torch.int64), step)
        step, highest = step + 1, max(highest, taken(table))
        more = len(table) - before
        if more in bounds:
            peak, end = bounds[more]
            assert highest - at_first <= peak
            assert end <= peak
            rows = more * 4 * table.row_width
            passes = sizes_of(table).passing * (policy == POLICIES["tiers"])
            assert rows <= end
            assert peak <= rows + 12 * 8 * len(table) + (32 * kept + passes) * len(table) + 512


def test_where_the_rows_are_decides():
    added = {}
    for storage in ("host", "device", "cached"):
        placement = Placement(storage, cache_rows=64)
        table = DynamicTable(4, 12, slots=8, chunk_rows=CHUNK, placement=placement)
        added[storage] = sizes_of(table).added(1000)
    assert added["device"] == 0 and added["cached"] == 1000 * 12 * 4
    # 768 keys begin the last doubling, which ends after 204 more, before all rows are there
    assert added["host"] == 972 * 12 * 4 + 12 * (2048 + 1024 - 8)


def test_rows_on_disk_take_the_memory_of_recent_ones(tmp_path):
    placement = Placement("disk", path=str(tmp_path), memory="8KiB")
    table = DynamicTable(4, 12, slots=8, chunk_rows=CHUNK, placement=placement)
    table.lookup(torch.arange(20, dtype=torch.int64), 0)
    assert sizes_of(table).values(20) == 20 * 48
    keys_of_host = DynamicTable(4, 12, slots=8, chunk_rows=CHUNK)
    keys_of_host.lookup(torch.arange(20, dtype=torch.int64), 0)
    keys = sizes_of(keys_of_host).added(5000, at_peak=False) - 5000 * 48
    more = sizes_of(table).added(5000, at_peak=False) - (8192 - 20 * 48)
    assert keys <= more <= keys + 16 * table.memory()["metadata"] * 16


def test_keys_on_disk_take_no_memory_beyond_theirs(tmp_path):
    placement = Placement("disk", path=str(tmp_path), memory="1KiB", index_memory="2KiB")
    table = DynamicTable(4, 12, slots=8, chunk_rows=CHUNK, placement=placement)
    in_memory, added = sizes_of(table), []
    for most in (in_memory.most_keys, None):
        each = replace(in_memory, most_keys=most, metadata=0, policies=0)
        added.append([each.added(rows, peak) for rows in (90, 5000) for peak in (True, False)])
    values = in_memory.values(5000)
    doubled = [values + 12 * (128 + 64 - 8), values + 12 * (128 - 8)]
    assert added == [
        [*doubled, doubled[0], values - 12 * 8], [*doubled, values + 12 * (12288 - 8), values + 12 * 8184]
    ]  # fmt: skip
    table.load(torch.arange(5000), torch.rand(5000, 12))
    assert sizes_of(table).keys == 0 and sizes_of(table).added(1 << 20) < 60 << 20


def test_a_table_that_is_demoted_by_a_size_has_it_until_all_is_in_16_bits():
    made = DynamicTable(4, 12, policy=TablePolicy(precision=PrecisionTiers("6000", every=1)))
    for step in range(14):
        made.lookup(torch.arange(5) + 5 * step, step)
    sizes, stored = sizes_of(made), 48 * len(made) - made.memory()["saved_by_fp16"]
    assert 0 <= sizes.values(65) + 5 * 48 - stored < 24  # and the rows since the last pass
    assert [sizes.values(n) for n in (10, 62, 63, 83, 84, 200)] == [480, 2976, 2976, 2016, 2016, 4800]


@pytest.mark.parametrize(
    ("policy", "passing", "beyond", "kept"),
    [
        (TablePolicy(Eviction("lru", capacity=100)), 60, 200, 16),
        (TablePolicy(Eviction("lfu", capacity=100)), 80, 200, 0),
        (TablePolicy(Eviction("ttl", ttl=9)), 0, 0, 0),
        (TablePolicy(precision=PrecisionTiers(2, 10)), 60, 0, 0),
        (TablePolicy(precision=PrecisionTiers("19200", 10)), 60, 2 * 200, 0),
    ],
)
def test_a_pass_that_looks_at_all_rows_has_bytes_for_each(policy, passing, beyond, kept):
    features = [FeatureConfig(name, 4, policy=policy) for name in "ab"]
    tables = HashTableCollection(features, RowOptimizer("adam", lr=0.1), slots=8, chunk_rows=CHUNK)
    sizes = sizes_of(tables.groups[0].table)
    assert (sizes.passing, sizes.beyond, sizes.kept) == (passing, beyond, kept)
    assert sizes.saving(10) == 10 * 21
    on_disk = replace(sizes, most=1 << 20)  # a file beyond 64 MiB is copied in its order, 32 MiB at a time
    rows = (1 << 26) // sizes.row_bytes
    assert on_disk.saving(rows) == 21 * rows and on_disk.saving(rows + 1) == 30 * (rows + 1) + (96 << 20)
    without = replace(sizes, passing=0, kept=0)
    for shards, rows in ((1, beyond), (1, beyond + 1), (4, beyond // 4), (4, beyond // 4 + 1)):
        one, other = sizes.shard(shards), without.shard(shards)
        passes = rows > beyond // shards
        assert one.added(rows) - other.added(rows) == passes * (passing + kept) * rows
        assert one.added(rows, at_peak=False) - other.added(rows, at_peak=False) == passes * kept * rows
        began = [replace(each, rows=5000, keys=12 * 16384) for each in (one, other)]
        assert began[0].added(10) - began[1].added(10) == passing * 10 + kept * 5010


def test_of_all_tables_of_a_rank():
    rule = RowOptimizer("adam", lr=0.1)
    tables = HashTableCollection([FeatureConfig("a", 4), FeatureConfig("b", 8)], rule, slots=8)
    by_table = [sizes_of(group.table).added(rows) for group, rows in zip(tables.groups, (10, 5), strict=True)]
    assert tables_added(tables, (10, 5)) == sum(by_table) > max(by_table)


def merged(**where):
    features = [FeatureConfig("a", 15, table="x"), FeatureConfig("b", 16), FeatureConfig("c", 3)]
    return HashTableCollection(features, RowOptimizer("adam", lr=0.1), slots=8, chunk_rows=CHUNK, **where)


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)
        self.linear.bias.requires_grad_(False)


def made(rule, device):
    with torch.device(device):
        model = Tower()
    return model, rule(model.parameters(), lr=0.1)


@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_model_that_is_nowhere_has_the_bytes_of_one_that_trains(rule, world_size):
    """Of a rank that has its share of the rows."""
    count = 1000
    found = foretell(*made(rule, "meta"), merged(), {"x": count, "b": 50, "c": 70}, world_size)
    model, optimizer = made(rule, "cpu")
    for each in model.parameters():
        each.grad = torch.ones_like(each) if each.requires_grad else None
    optimizer.step()
    state = {name: each.nbytes for name, each in model.state_dict().items()}
    assert found.dense == sum(state.values())
    assert found.gradients == found.dense - state["linear.bias"] - sum(
        size for name, size in state.items() if "running" in name or "batches" in name
    )
    assert found.dense_states == sum(each.nbytes for by in optimizer.state.values() for each in by.values())
    shares = [(-(-(count + 50) // world_size), 16), (-(-70 // world_size), 3)]  # 15 columns lie in 16
    assert found.rows == sum(4 * dim * rows for rows, dim in shares) and found.states == 2 * found.rows
    tables = merged()
    for group, (rows, _) in zip(tables.groups, shares, strict=True):
        assert len(group.layout.names) == 1 + (rows > 100)
        for part in torch.arange(rows).split(50):
            group.table.lookup(part, 0)
    assert found.keys == sum(group.table.memory()["key_structure"] for group in tables.groups)
    assert found.saving == 16 * sum(rows for rows, _ in shares)
    assert 0 <= found.doubling < found.keys and (found.doubling or world_size > 1)
    assert found.total == sum(vars(found).values())


def test_what_is_foretold_of_rows_on_disk_is_their_memory(tmp_path):
    place = Placement("disk", path=str(tmp_path), memory="6KiB")
    found = foretell(*made(torch.optim.Adam, "meta"), merged(placement=place), {"x": 9000, "b": 0, "c": 1})
    assert found.rows + found.states == 6144 + 4 * 9 and abs(found.rows - 2048 - 4 * 3) <= 1


class Bags(torch.nn.Module):
    """A bag and rows of their own through a layer that keeps its input twice, once as a view."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 4)

    def forward(self, batch, rows, seed):
        samples = torch.arange(batch.num_samples + 1, device=rows["bag"].device)
        hidden = torch.tanh(self.first(rows["bag"], samples))
        return (self.last(hidden, samples) * hidden[:, :4]).sum(1) + nn.sum_by_sample(
            rows["own"].square().sum(1), batch.features["own"].offsets
        )


def of_bags():
    lengths, draw = torch.tensor([2, 0, 3, 1, 4]), torch.Generator().manual_seed(1)

    def lookup():
        return Lookup(torch.randint(0, 50, (10,), generator=draw), offsets_of(lengths))

    features = KeyedJaggedTensor.from_dict({"bag": lookup(), "own": lookup()})
    configs = [FeatureConfig("bag", 6, pooling="sum"), FeatureConfig("own", 3)]
    return Batch(0, torch.arange(5), features), configs


def of_items():
    loader = NextItemLoader(load("zipf:users=40,items=80,seed=3"), 12, max_seq_len=9, num_negatives=5, seed=0)
    return loader.batch(0), [FeatureConfig("item", 8)]


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (Bags, of_bags),
        (
            lambda: nn.HSTU(nn.HSTUConfig(dim=8, heads=2, qk_dim=4, v_dim=5, max_seq_len=9)),
            of_items,
        ),
        (lambda: nn.SASRec(nn.SASRecConfig(dim=8, heads=2, layers=1, max_seq_len=9)), of_items),
    ],
)
def test_activations_are_what_a_forward_keeps(make, given):
    """Of the same model, batch and rows on the CPU, each address once."""
    (batch, features), kept = given(), {}
    tables = HashTableCollection(features, RowOptimizer("sgd", lr=0.1))
    model = make()
    rows = {
        each.name: torch.randn(
            len(batch.lookups()[each.name].ids) if each.pooling == "none" else batch.num_samples, each.dim,
            requires_grad=True, dtype=torch.float32,
        )
        for each in features
    }  # fmt: skip

    def keep(saved):
        kept[saved.untyped_storage().data_ptr()] = saved
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        losses = model(batch, rows, 0)
    assert losses.requires_grad
    own = {each.untyped_storage().data_ptr() for each in model.parameters()}
    expected = sum(each.untyped_storage().nbytes() for at, each in kept.items() if at not in own)
    with torch.device("meta"):
        nowhere = make()
    optimizer, counts = torch.optim.SGD(nowhere.parameters(), lr=0.1), dict.fromkeys(tables.table_names, 10)
    found = foretell(nowhere, optimizer, tables, counts, batch=batch)
    assert found.activations == expected > 0
    assert foretell(nowhere, optimizer, tables, counts).activations == 0


def test_a_forward_that_asks_for_values_is_refused():
    class Asking(Bags):
        def forward(self, batch, rows, seed):
            return super().forward(batch, rows, seed) * float(rows["bag"].detach().sum())

    batch, features = of_bags()
    with torch.device("meta"):
        model = Asking()
    tables = HashTableCollection(features, RowOptimizer("sgd", lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"forward asks for values, .* leave batch= out, or try"):
        foretell(model, optimizer, tables, {"bag": 1, "own": 1}, batch=batch)


def test_a_model_that_is_somewhere_and_other_tables_are_refused():
    with pytest.raises(ValueError, match=r"the model is on cpu: make it .* torch.device\('meta'\)"):
        foretell(*made(torch.optim.Adam, "cpu"), merged(), {"x": 1, "b": 1, "c": 1})
    for rows in ({"x": 1, "b": 1}, {"x": 1, "b": 1, "c": -1}, {"a": 1, "b": 1, "c": 1}):
        with pytest.raises(
            ValueError, match=r"rows of the tables \['b', 'c', 'x'\] are needed, at least 0, got"
        ):
            foretell(*made(torch.optim.Adam, "meta"), merged(), rows)
