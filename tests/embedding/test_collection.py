"""Promise: merging tables changes the number of lookups and no bit; an id that does not fit is named."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec import ops
from tritonrec.embedding import FeatureConfig, HashTableCollection, KeyLayout, RowOptimizer, TablePolicy
from tritonrec.embedding.bags import pool

INT64 = st.integers(-(2**63), 2**63 - 1)


class Lookup(NamedTuple):
    ids: torch.Tensor
    offsets: torch.Tensor | None = None


def lookup_of(*ids, offsets=None):
    return Lookup(torch.tensor(ids, dtype=torch.int64), None if offsets is None else torch.tensor(offsets))


@given(st.integers(2, 40), st.data())
def test_packed_keys_differ_between_tables_and_unpack_to_what_went_in(tables, data):
    layout = KeyLayout(tuple(f"t{number}" for number in range(tables)))
    assert 2**layout.bits >= tables + 1 > 2 ** (layout.bits - 1)  # k = ceil(log2(m + 1))
    limit = 2 ** (63 - layout.bits)
    ids = data.draw(st.lists(st.integers(0, limit - 1) | st.sampled_from([0, 1, limit - 1]), max_size=9))
    ids = torch.tensor(ids, dtype=torch.int64)
    seen = set()
    for member in range(tables):
        keys = layout.pack(member, ids, "f")
        assert keys.tolist() == [(member << (63 - layout.bits)) | id_ for id_ in ids.tolist()]
        assert (keys >= 0).all()
        members, back = layout.unpack(keys)
        assert members.tolist() == [member] * len(ids) and torch.equal(back, ids)
        assert not seen & set(keys.tolist())
        seen |= set(keys.tolist())


@given(st.lists(INT64 | st.sampled_from([-1, -(2**63), 2**63 - 1]), max_size=9))
def test_a_single_table_keeps_every_id(ids):
    ids = torch.tensor(ids, dtype=torch.int64)
    layout = KeyLayout(("one",))
    assert torch.equal(layout.pack(0, ids, "f"), ids)
    members, back = layout.unpack(ids)
    assert not members.any() and torch.equal(back, ids)


@pytest.mark.parametrize("wrong", [-1, -(2**63), 2**61, 2**63 - 1])
def test_an_id_that_does_not_fit_is_named_with_its_feature(wrong):
    layout = KeyLayout(("a", "b", "c"))
    layout.pack(2, torch.tensor([0, 2**61 - 1]), "price")
    with pytest.raises(ValueError, match=rf"feature 'price': id {wrong} does not fit .*merge=False"):
        layout.pack(1, torch.tensor([3, wrong, 5]), "price")
    with pytest.raises(ValueError, match=rf"feature 'price': id {wrong} does not fit .*merge=False"):
        ids = torch.tensor([0, 7]), torch.tensor([3, wrong, 5]), torch.tensor([wrong])
        layout.pack_all((2, 1, 1), ids, ("user", "price", "last"))


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2**61 - 1), max_size=5)), min_size=1))
def test_keys_of_all_features_are_those_of_each(drawn):
    layout = KeyLayout(("a", "b", "c"))
    members, ids = [member for member, _ in drawn], [torch.tensor(ids, dtype=torch.int64) for _, ids in drawn]
    apart = [layout.pack(member, each, "f") for member, each in zip(members, ids, strict=True)]
    assert torch.equal(layout.pack_all(members, ids, ["f"] * len(ids)), torch.cat(apart))


def features(**changes):
    return [
        FeatureConfig("user", 4, **changes),
        FeatureConfig("clicked", 6, table="item", **changes),
        FeatureConfig("bought", 6, table="item", **changes),
        FeatureConfig("genre", 6, pooling="mean", **changes),
        FeatureConfig("city", 4, **changes),
    ]


LOOKUPS = {
    "user": lookup_of(7, 3, 7),
    "clicked": lookup_of(7, 1, 7, 9),
    "bought": lookup_of(9, 100),
    "genre": lookup_of(7, 1, 7, offsets=[0, 2, 2, 3]),
    "city": lookup_of(3, 2**60 - 5),
}


def test_tables_of_one_dimension_merge_by_themselves():
    merged, apart = HashTableCollection(features()), HashTableCollection(features(), merge=False)
    assert [group.layout.names for group in merged.groups] == [("city", "user"), ("genre", "item")]
    assert [group.layout.names for group in apart.groups] == [("city",), ("genre",), ("item",), ("user",)]
    assert merged.table_names == apart.table_names == ["city", "genre", "item", "user"]


def test_the_order_of_the_features_does_not_matter():
    forward, backward = HashTableCollection(features()), HashTableCollection(features()[::-1])
    for a, b in zip(forward.groups, backward.groups, strict=True):
        assert a.layout.names == b.layout.names and a.features == b.features


def train(collection, steps=3):
    """Rows by feature of a few steps of SGD-like updates, and the tables at the end."""
    seen = []
    for step in range(steps):
        rows = []
        for group, keys in zip(collection.groups, collection.keys(LOOKUPS), strict=True):
            distinct, inverse, _ = ops.unique(keys)
            found = group.table.lookup(distinct, step)
            values = group.table.gather(found.handles, distinct)
            group.table.update(found.handles, values * 1.5)
            rows.append(values[inverse][:, : group.table.dim])
        seen.append(collection.by_feature(rows, LOOKUPS))
    return seen, collection.export()


def test_merging_changes_no_bit():
    (seen, tables), (expected, apart) = (
        train(HashTableCollection(features(), RowOptimizer("adam"), merge=merge, seed=5, slots=8))
        for merge in (True, False)
    )
    for one, other in zip(seen, expected, strict=True):
        assert one.keys() == other.keys() == LOOKUPS.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert tables.keys() == apart.keys()
    for name in tables:
        for one, other in zip(tables[name], apart[name], strict=True):
            assert torch.equal(one, other)
    assert tables["item"][0].tolist() == [1, 7, 9, 100] and tables["user"][0].tolist() == [3, 7]


def test_features_of_one_table_share_rows_and_others_do_not():
    rows = HashTableCollection(features(), seed=1).peek(LOOKUPS)
    assert torch.equal(rows["clicked"][3], rows["bought"][0])  # id 9 of table item
    assert not torch.equal(rows["clicked"][0], rows["genre"][2])  # id 7 of two tables of one dimension
    assert not torch.equal(rows["user"][1], rows["city"][0])


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
def test_rows_that_are_not_gathered_are_gathered_for_features_that_need_it(pooling, indexed):
    """The second and the third feature have a table alone, the first and the fourth have one together."""
    names = {"a": "t", "b": "u", "c": "v", "d": "t"}
    collection = HashTableCollection(
        [FeatureConfig(name, 2, table, pooling="none" if name == "b" else pooling)
         for name, table in names.items()],
        merge=False,
    )  # fmt: skip
    lookups = {name: lookup_of(*range(5 + n), offsets=[0, 2, 5 + n]) for n, name in enumerate(names)}
    where, plain = [], []
    for number, keys in enumerate(collection.keys(lookups)):
        rows = torch.randint(0, 4, (len(keys),), generator=torch.Generator().manual_seed(number))
        where.append(ops.IndexedRows(torch.arange(8.0).view(4, 2) + 10 * number, rows))
        plain.append(where[-1].gathered())
    found = collection.by_feature(where, lookups, indexed=indexed)
    expected = collection.by_feature(plain, lookups)
    assert set(found) == set(expected) == set(names)
    for name, rows in found.items():
        stays = indexed and (name == "b" or (name == "c" and pooling == "none"))
        assert isinstance(rows, ops.IndexedRows) == stays, name
        assert torch.equal(rows.gathered() if stays else rows, expected[name]), name


def test_pooling_adds_or_averages_the_rows_of_each_bag():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(6, 3, generator=generator)
    offsets = torch.tensor([0, 0, 4, 5, 5, 6])
    naive = torch.zeros(5, 3)
    for bag, (start, stop) in enumerate(pairwise(offsets)):
        for row in rows[start:stop]:
            naive[bag] += row
    assert torch.equal(pool(rows, offsets, "sum"), naive)
    lengths = torch.tensor([0, 4, 1, 0, 1]).clamp(min=1)[:, None]
    assert torch.equal(pool(rows, offsets, "mean"), naive / lengths)


def test_a_bag_keeps_its_bits_beside_any_other():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(300, 17, generator=generator) * 8
    offsets = torch.tensor([0, 100, 101, 101, 250, 300])
    whole = pool(rows, offsets, "mean")
    for bag in range(5):
        start, stop = offsets[bag], offsets[bag + 1]
        alone = pool(rows[start:stop], torch.tensor([0, int(stop - start)]), "mean")
        assert torch.equal(alone[0], whole[bag])


def test_pooled_rows_pass_their_gradient_to_every_id():
    rows = torch.randn(3, 2, requires_grad=True)
    cotangent = torch.tensor([[1.0, 2.0], [5.0, 7.0]])
    (pool(rows, torch.tensor([0, 1, 3]), "mean") * cotangent).sum().backward()
    assert torch.equal(rows.grad, torch.tensor([[1.0, 2.0], [2.5, 3.5], [2.5, 3.5]]))


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (FeatureConfig("b", 8, table="t"), "share table 't' but differ"),
        (FeatureConfig("b", 4, table="t", optimizer=RowOptimizer("sgd")), "features 'a' and 'b' share table"),
        (FeatureConfig("b", 4, table="t", policy=TablePolicy(admission=2)), "policy"),
        (FeatureConfig("a", 4, table="t"), "features need distinct names"),
    ],
)
def test_features_that_disagree_are_refused(second, named):
    with pytest.raises(ValueError, match=named):
        HashTableCollection([FeatureConfig("a", 4, table="t"), second])


def test_a_batch_of_other_features_is_refused():
    collection = HashTableCollection(features())
    with pytest.raises(ValueError, match=r"looks up features \['user'\], the tables serve"):
        collection.keys({"user": lookup_of(1)})
    without = {**LOOKUPS, "genre": lookup_of(1, 2)}
    with pytest.raises(ValueError, match="feature 'genre' is pooled, but its lookup has no offsets"):
        collection.peek(without)


def test_peek_adds_nothing():
    collection = HashTableCollection(features())
    collection.peek(LOOKUPS)
    assert all(len(ids) == 0 for ids, _ in collection.export().values())


def test_an_unknown_table_is_named():
    with pytest.raises(ValueError, match="there is no table 'x'; the tables are city, genre, item, user"):
        HashTableCollection(features()).load("x", torch.tensor([1]), torch.zeros(1, 4))


def test_a_row_may_have_a_single_value():
    assert FeatureConfig("item", dim=1).dim == 1
    with pytest.raises(ValueError, match="dim must be at least 1, got 0"):
        FeatureConfig("item", dim=0)
