"""Promise: tables of near dims are kept in one, with zeros behind the narrow rows, and no bit tells."""

import numpy as np
import pytest
import torch

from tritonrec.data import Batch, KeyedJaggedTensor
from tritonrec.data.jagged import WeightedLookup
from tritonrec.distributed import Communicators, CorruptionError
from tritonrec.embedding import (
    DynamicTable,
    Eviction,
    FeatureConfig,
    HashTableCollection,
    KeyLayout,
    Placement,
    PrecisionTiers,
    RowOptimizer,
    TablePolicy,
)
from tritonrec.kernels.checksums import same_bits
from tritonrec.pipeline import Trainer, WindowConfig

DIMS = {"a": 9, "b": 10, "c": 17, "d": 18, "e": 20, "f": 37, "g": 3, "h": 4}
GROUPS = [("a", "b"), ("c", "d", "e"), ("f",), ("g",), ("h",)]
ALONE = [(name,) for name in DIMS]
POOLED = {"b": "mean", "d": "sum"}


class Sums(torch.nn.Module):
    """Losses that every column moves in its own way."""

    def forward(self, batch, rows, seed=0):
        assert all(each.is_contiguous() for each in rows.values())  # as rows of tables of their own are
        weights = (torch.arange(1, 1 + each.shape[1], dtype=torch.float32) for each in rows.values())
        return torch.tanh(sum((each * own).sum(1) for each, own in zip(rows.values(), weights, strict=True)))


def clicks(steps=5, size=12):
    draw = torch.Generator().manual_seed(3)
    for step in range(steps):
        lengths = torch.ones(len(DIMS), size, dtype=torch.int64)
        for number, name in enumerate(DIMS):
            if name in POOLED:
                lengths[number] = torch.randint(0, 4, (size,), generator=draw)
        ids = torch.randint(0, 25, (int(lengths.sum()),), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
        sparse = KeyedJaggedTensor(list(DIMS), ids, offsets)
        samples = torch.arange(size) + step * size
        yield Batch(step, samples, sparse)


def collection(rule, merge=True, placement=None, **options):
    features = [
        FeatureConfig(
            name, dim, pooling=POOLED.get(name, "none"), scale=0.3 if name == "c" else None, **options
        )
        for name, dim in DIMS.items()
    ]
    return HashTableCollection(
        features, rule, merge=merge, seed=5, slots=16, chunk_rows=16, placement=placement or Placement()
    )


def trained(tables, mode="nestpipe", save=None, steps=5):
    window = WindowConfig(1 if mode == "reference" else 3, max_grad_norm=0.5)
    with Trainer(Sums(), tables, None, Communicators.local(), mode, window) as trainer:
        losses = [each.losses for each in trainer.run(clicks(steps))]
        if save:
            trainer.save(save)
    return losses


def same(one, other):
    assert one.keys() == other.keys()
    for name, columns in one.items():
        assert columns.keys() == other[name].keys()
        for column, values in columns.items():
            theirs = other[name][column]
            assert values.dtype == theirs.dtype and same_bits(values, theirs), (name, column)


def names(tables):
    return [group.layout.names for group in tables.groups]


RULES = {
    "sgd": RowOptimizer("sgd", 0.1, eps=0.0),
    "nesterov": RowOptimizer("momentum_sgd", 0.1, momentum=0.5, nesterov=True, weight_decay=0.1),
    "adagrad": RowOptimizer("adagrad", 0.1),
    "adamw": RowOptimizer("adamw", 0.1, weight_decay=0.1),
    "ftrl": RowOptimizer("ftrl", 0.1, l1=0.02),
}


@pytest.mark.parametrize("mode", ["nestpipe", "reference"])
@pytest.mark.parametrize("rule", RULES)
def test_near_dims_are_merged_and_no_bit_changes(rule, mode):
    tables, apart = collection(RULES[rule]), collection(RULES[rule], merge=False)
    assert names(tables) == GROUPS and names(apart) == ALONE
    losses, expected = trained(tables, mode), trained(apart, mode)
    assert all(same_bits(one, other) for one, other in zip(losses, expected, strict=True))
    same(tables.state(), apart.state())
    for name, dim in DIMS.items():
        ids, rows = tables.export()[name]
        assert rows.shape[1] == RULES[rule].row_width(dim) and len(ids) > 5
        assert same_bits(rows, apart.export()[name][1])


@pytest.mark.parametrize(
    "rule",
    [
        RowOptimizer("rowwise_adagrad"),
        RowOptimizer("lamb"),
        RowOptimizer("lars_sgd"),
        RowOptimizer("adam", eps=1e-50),
        RowOptimizer("adam", weight_decay=0.1, lazy_weight_decay=True),
        RowOptimizer.custom(lambda weight, state, gradient, step, lr: (weight + 1, state), 0),
    ],
)
def test_rows_whose_zeros_would_count_are_kept_apart(rule):
    assert names(collection(rule)) == ALONE


@pytest.mark.parametrize(
    "policy",
    [TablePolicy(Eviction("lru", capacity="4KiB")), TablePolicy(precision=PrecisionTiers("4KiB", 2))],
)
def test_a_size_in_bytes_counts_a_tables_own_columns(policy):
    assert names(collection(RULES["adagrad"], policy=policy)) == ALONE


@pytest.mark.parametrize("store", ["evicted", "tiers", "disk", "cached", "device"])
def test_policies_and_placements(store, tmp_path):
    options = {
        "evicted": {"policy": TablePolicy(Eviction("lru", capacity=16, every=2), admission=2)},
        "tiers": {"policy": TablePolicy(precision=PrecisionTiers(2, every=2))},
        "disk": {"placement": Placement("disk", path=str(tmp_path), memory="1MiB")},
        "cached": {"placement": Placement("cached", cache_rows=64)},
        "device": {"placement": Placement("device")},
    }[store]
    tables, apart = (collection(RULES["adamw"], merge, **options) for merge in (True, False))
    assert names(tables) == GROUPS
    trained(tables)
    trained(apart)
    same(tables.state(), apart.state())


@pytest.mark.parametrize(("merge", "store"), [(True, "host"), (False, "host"), (True, "disk")])
def test_a_checkpoint_is_of_logical_tables(merge, store, tmp_path):
    """Saved merged or apart it has the same rows, and is loaded into the other layout."""
    on_disk = {"placement": Placement("disk", path=str(tmp_path), memory="1MiB")} if store == "disk" else {}
    saved, loaded = collection(RULES["adagrad"], merge, **on_disk), collection(RULES["adagrad"], not merge)
    trained(saved, save=tmp_path / "one")
    window = WindowConfig(3, max_grad_norm=0.5)
    with Trainer(Sums(), loaded, None, Communicators.local(), "nestpipe", window) as trainer:
        trainer.load(tmp_path / "one")
    same(loaded.state(), saved.state())
    again = collection(RULES["adagrad"], not merge)
    again.load_state(saved.state())
    same(again.state(), saved.state())


def test_a_table_has_the_dim_and_scales_of_its_members():
    layout = KeyLayout(("a", "b"), (3, 4))
    assert DynamicTable(4, 8, layout=layout, scale=(0.1, 0.2)).scales == (0.1, 0.2)
    with pytest.raises(ValueError, match=r"tables \['a', 'b'\] need a dim each, got \[4\]"):
        KeyLayout(("a", "b"), (4,))
    assert DynamicTable(4, 8, scale=np.float32(0.5)).scales == (0.5,)
    for dim, scale in ((3, (0.1, 0.2)), (4, (0.1,)), (4, (0.1, 0.2, 0.3))):
        with pytest.raises(ValueError, match=rf"table a, b: dim {dim} and scales .* are not those of its"):
            DynamicTable(dim, 8, layout=layout, scale=scale)


def test_rows_are_read_and_written_by_logical_table():
    tables, apart = collection(RULES["adamw"]), collection(RULES["adamw"], merge=False)
    ids = torch.tensor([4, 9, 2**40])
    for name, dim in DIMS.items():
        assert tables.dim_of(name) == dim
        rows = tables.initial_rows(name, ids)
        assert rows.shape == (3, 3 * dim) and same_bits(rows, apart.initial_rows(name, ids))
        assert float(rows[:, :dim].abs().max()) <= (0.3 if name == "c" else dim**-0.5)
        written = torch.randn(3, 3 * dim, generator=torch.Generator().manual_seed(dim))
        tables.load(name, ids, written)
        assert same_bits(tables.current_rows(name, ids), written)
        tables.load_weights(name, ids[:2], written[1:, :dim])
        assert same_bits(tables.weights()[name][1], torch.stack([*written[1:, :dim], written[2, :dim]]))
        assert same_bits(tables.export()[name][1][:, dim:], written[:, dim:])
    assert tables.describe() == apart.describe()
    kept = tables.groups[1].table.export()[1].view(-1, 3, 20)
    assert kept.shape[0] == 9 and not kept[:3, :, 17:].any() and not kept[3:6, :, 18:].any()


def test_weights_of_bags_have_the_gradients_of_tables_apart():
    draw = torch.Generator().manual_seed(7)
    offsets = torch.arange(0, 41, 4)
    ids = {name: torch.randint(0, 30, (40,), generator=draw) for name in DIMS}
    weights = {name: torch.randn(40, generator=draw) for name in DIMS}
    found = []
    for merge in (True, False):
        features = [FeatureConfig(name, dim, pooling="sum") for name, dim in DIMS.items()]
        tables = HashTableCollection(features, RULES["sgd"], merge=merge, seed=2)
        leaves = {name: each.clone().requires_grad_() for name, each in weights.items()}
        rows = tables.peek({name: WeightedLookup(ids[name], offsets, leaves[name]) for name in DIMS})
        sum((each * torch.linspace(-1, 2, each.shape[1])).sum() for each in rows.values()).backward()
        found.append((rows, {name: leaf.grad for name, leaf in leaves.items()}))
    for name in DIMS:
        assert same_bits(found[0][0][name], found[1][0][name])
        assert same_bits(found[0][1][name], found[1][1][name]), name


def test_rows_of_another_width_are_named():
    tables = collection(RULES["adamw"])
    for width in (9, 26, 30):
        with pytest.raises(ValueError, match=rf"table 'a' takes rows \(1, 27\), got \(1, {width}\)"):
            tables.load("a", torch.tensor([1]), torch.zeros(1, width))


def test_averages_and_changes(tmp_path):
    made = []
    for merge in (True, False):
        tables = collection(RULES["sgd"], merge)
        tables.track_changes()
        trained(tables, steps=2)
        averaged = collection(RULES["sgd"], merge)
        averaged.lerp_(tables, 0.25)
        tables.requires_grad_(False)
        made.append((tables, averaged, tables.take_changes()))
    (tables, averaged, changes), (_, other, expected) = made
    same(averaged.state(), other.state())
    same(changes[0], expected[0])
    with pytest.raises(ValueError, match="table a is merged with b:"):
        tables.requires_grad_(True, "a")


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("merge", [True, False])
def test_weights_are_read_apart_from_the_optimizers_states(merge, path, tmp_path, monkeypatch):
    monkeypatch.setattr("tritonrec.embedding.table.PIECE", 7)
    placement = Placement("disk", path=str(tmp_path)) if path else Placement()
    tables = collection(RowOptimizer("adam"), merge, placement=placement)
    for name in DIMS:
        ids, width = torch.randperm(90)[:30], tables.state()[name]["rows"].shape[1]
        tables.load(name, ids, torch.randn(30, width))
    whole, weights = tables.state(), tables.state(optimizer=False)
    assert whole.keys() == weights.keys()
    for name, dim in DIMS.items():
        assert torch.equal(weights[name]["keys"], whole[name]["keys"])
        assert same_bits(weights[name]["rows"], whole[name]["rows"][:, :dim].contiguous())


def test_a_row_that_flipped_is_named_where_weights_are_read_apart(monkeypatch):
    monkeypatch.setattr("tritonrec.embedding.table.PIECE", 7)
    table = DynamicTable(4, 12, slots=16, chunk_rows=16)
    table.load(torch.arange(40), torch.rand(40, 12))
    table.keep_checksums(0)
    table.state(optimizer=False)
    table._rows._storage.update(table.find(torch.tensor([31])), torch.rand(1, 12))  # behind its back
    with pytest.raises(CorruptionError, match="the row of id 31"):
        table.state(optimizer=False)
