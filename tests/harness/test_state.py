"""Promise: one flipped bit anywhere is found, named and placed; equal runs are equal."""

import pytest
import torch

from tritonrec.embedding import FeatureConfig, HashTableCollection, RowOptimizer
from tritonrec.harness.verify.state import (
    Comparison,
    Difference,
    dense_state,
    earliest,
    loss_state,
    overlay,
    table_state,
)
from tritonrec.ops import owner_of
from tritonrec.pipeline import DenseModel

pytestmark = pytest.mark.every_case

KEYS = torch.tensor([5, -9, 2**63 - 1, 40, -(2**63), 0])


def run():
    torch.manual_seed(3)
    table = HashTableCollection([FeatureConfig("item", 2)], seed=1)
    table.load("item", KEYS, torch.randn(6, 6))
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    dense = DenseModel(layer, optimizer)
    losses = loss_state(torch.tensor([30, 10, 20]), torch.tensor([3.0, 1.0, 2.0]))
    return table, {**losses, **dense_state(dense), **table_state(table)}


def comparison(table, rank=0, world_size=1):
    return Comparison(table, rank, world_size)


def test_a_run_equals_itself():
    table, state = run()
    compared = comparison(table)
    compared.compare(0, state, state, final=True)
    assert compared.first is None
    assert compared.tensors_compared == 10  # losses, rows, weight and bias with two moments and a counter
    assert compared.bytes_compared == 4 * (3 + 36 + 3 * 6 + 1 + 3 * 2 + 1)
    assert compared.steps_seen == {(0, "loss"), (0, "dense"), (0, "table item")}


def test_rows_of_a_buffer_take_the_place_of_those_of_their_own_table():
    features = [FeatureConfig("user", 2), FeatureConfig("item", 2)]
    tables = HashTableCollection(features, RowOptimizer("sgd"), seed=1)
    for feature in features:
        tables.load(feature.name, torch.tensor([3, 5, 9]), torch.zeros(3, 2))
    (group,), state = tables.groups, table_state(tables)
    other, own = group.layout.names
    overlay(state, group, group.layout.pack(1, torch.tensor([9, 4, 5]), own), torch.arange(6.0).view(3, 2))
    assert state[f"table/{own}/rows"].tolist() == [[0, 0], [4, 5], [0, 1]]  # 4 is not there
    assert not state[f"table/{other}/rows"].any()


@pytest.mark.parametrize(
    ("name", "index", "tensor", "place"),
    [
        ("loss/values", (1,), "loss", [20]),
        ("dense/weight", (1, 2), "weight", [1, 2]),
        ("dense/bias/exp_avg_sq", (1,), "bias/exp_avg_sq", [1]),
        ("dense/bias/step", (), "bias/step", []),
        ("table/item/rows", (0, 5), "table item", [-(2**63), 5]),
        ("table/item/rows", (5, 0), "table item", [2**63 - 1, 0]),
    ],
)
def test_one_bit_is_found_and_placed(name, index, tensor, place):
    table, expected = run()
    got = {key: value.clone() for key, value in expected.items()}
    got[name].view(torch.int32)[index] ^= 1
    compared = comparison(table)
    compared.compare(7, expected, got, final=True)
    assert compared.first is not None
    assert (compared.first.step, compared.first.tensor, compared.first.index) == (7, tensor, place)
    assert compared.first.ulps == 1


def test_minus_zero_is_not_zero_and_a_nan_equals_itself():
    table, expected = run()
    expected["loss/values"][0], got = 0.0, {k: v.clone() for k, v in expected.items()}
    got["loss/values"][0] = -0.0
    compared = comparison(table)
    compared.compare(0, expected, got, final=True)
    assert compared.first is not None and compared.first.tensor == "loss"
    expected["loss/values"][0] = float("nan")
    again = comparison(table)
    again.compare(0, expected, expected, final=True)
    assert again.first is None


def test_missing_surplus_and_early_keys():
    table, expected = run()
    fewer = {
        **expected,
        "table/item/ids": expected["table/item/ids"][1:],
        "table/item/rows": expected["table/item/rows"][1:],
    }
    compared = comparison(table)
    compared.compare(0, expected, fewer, final=False)
    assert str(compared.first).startswith(
        f"step 0, table item[{-(2**63)}]: expected 'present', got 'missing'"
    )

    # A key of a later batch may be there before its time, as long as its row is initial.
    table.groups[0].table.lookup(torch.tensor([77]), 0)
    early = table_state(table)
    for final, fine in ((False, True), (True, False)):
        compared = comparison(table)
        compared.compare(0, expected, early, final=final)
        assert (compared.first is None) == fine
    early["table/item/rows"][early["table/item/ids"] == 77] += 1
    compared = comparison(table)
    compared.compare(0, expected, early, final=False)
    assert compared.first is not None and compared.first.index[0] == 77


def test_a_sample_may_be_in_a_step_twice():
    """As in streams whose epochs have no border: once on each of two ranks, or twice on one."""
    table, _ = run()
    expected = loss_state(torch.tensor([7, 4, 9, 4]), torch.tensor([7.0, 4.0, 9.0, 4.0]))

    def difference(ids, losses):
        compared = comparison(table, world_size=2)
        compared.compare(2, expected, loss_state(torch.tensor(ids), torch.tensor(losses)), final=False)
        return compared.first

    assert difference([9, 4], [9.0, 4.0]) is None
    assert difference([4, 7, 4], [4.0, 7.0, 4.0]) is None
    assert difference([], []) is None
    assert difference([4, 9], [4.5, 9.0]).index == [4]
    assert difference([4, 7, 4], [4.0, 7.0, 5.0]).index == [4]
    for surplus, ids in ((4, [4, 4, 4]), (9, [4, 9, 9]), (11, [7, 11]), (1, [1, 4])):
        found = difference(ids, [float(each) for each in ids])
        assert (found.index, found.expected, found.got) == ([surplus], "absent", "present")


def test_a_shard_is_compared_with_its_own_keys_only():
    table, whole = run()
    seen = 0
    for rank in range(3):
        mine = owner_of(whole["table/item/ids"], 3) == rank
        shard = {
            "table/item/ids": whole["table/item/ids"][mine],
            "table/item/rows": whole["table/item/rows"][mine],
        }
        compared = comparison(table, rank, 3)
        compared.compare(0, whole, shard, final=True)
        assert compared.first is None
        seen += int(mine.sum())
    assert seen == len(KEYS)


def test_every_table_is_compared():
    tables = HashTableCollection([FeatureConfig("item", 2), FeatureConfig("genre", 3)], seed=1)
    for name, width in (("item", 6), ("genre", 9)):
        tables.load(name, KEYS, torch.randn(6, width))
    expected = table_state(tables)
    compared = comparison(tables)
    compared.compare(0, expected, expected, final=True)
    assert compared.first is None and compared.tensors_compared == 2
    assert compared.steps_seen == {(0, "table item"), (0, "table genre")}
    for name in ("item", "genre"):
        got = {key: value.clone() for key, value in expected.items()}
        got[f"table/{name}/rows"][2, 1] += 1
        compared = comparison(tables)
        compared.compare(0, expected, got, final=True)
        assert compared.first is not None and compared.first.tensor == f"table {name}"


def test_only_what_is_compared_counts_as_seen():
    table, state = run()
    without_dense = {name: values for name, values in state.items() if not name.startswith("dense/")}
    compared = comparison(table)
    compared.compare(0, without_dense, without_dense, final=True)
    assert compared.steps_seen == {(0, "loss"), (0, "table item")}
    for expected, got, words in (
        (state, {**without_dense, "dense/bias": state["dense/bias"]}, ("present", "missing")),
        ({**without_dense, "dense/bias": state["dense/bias"]}, state, ("missing", "present")),
    ):
        compared = comparison(table)
        compared.compare(0, expected, got, final=True)
        first = compared.first
        assert first is not None and first.tensor == "bias/exp_avg" and (first.expected, first.got) == words


def test_other_shapes_and_dtypes_differ_though_the_values_are_equal():
    table, expected = run()
    for name in ("loss/values", "dense/weight", "table/item/rows"):
        for change in (torch.Tensor.double, lambda values: values.unsqueeze(-1)):
            compared = comparison(table)
            compared.compare(0, expected, {**expected, name: change(expected[name])}, final=True)
            assert compared.first is not None and compared.first.ulps is None
            assert str(expected[name].dtype) in compared.first.expected


def test_the_first_difference_of_a_run_is_kept_whatever_comes_first():
    table, expected = run()
    wrong = {name: values + 1 for name, values in expected.items() if "ids" not in name}
    got = {**expected, **wrong}
    compared = comparison(table)
    for step, parts in ((2, "loss"), (1, "table"), (1, "dense"), (3, "loss")):
        compared.compare(step, expected, {k: v for k, v in got.items() if k.startswith(parts)}, final=True)
    assert compared.first is not None and (compared.first.step, compared.first.tensor) == (1, "bias")


def test_used_rows_are_compared_in_each_step_and_all_rows_in_the_last():
    """Where tables evict or admit, a later batch may have changed what a step has not used."""
    table, state = run()
    used, other = KEYS[:3], KEYS[3:].sort().values
    expected = {**state, "table/item/used": used}
    at = torch.searchsorted(state["table/item/ids"], other)
    got = {**state, "table/item/rows": state["table/item/rows"].clone()}
    got["table/item/rows"][at] += 1
    for final, fine in ((False, True), (True, False)):
        compared = comparison(table)
        compared.compare(0, expected, got, final=final)
        assert (compared.first is None) is fine
    got["table/item/rows"][torch.searchsorted(state["table/item/ids"], used[1])] += 1
    compared = comparison(table)
    compared.compare(0, expected, got, final=False)
    assert compared.first is not None and compared.first.index[0] == -9


def test_exports_scores_and_predictions_are_judged():
    table, state = run()
    ids, weights = state["table/item/ids"], state["table/item/rows"][:, :2]
    names = ["export of item", "scores, exported", "predictions, served with k = 3"]

    plain = HashTableCollection([FeatureConfig("item", 2)], RowOptimizer("sgd", 0.1), seed=1)

    def judged(ids, weights, scores, predictions):
        compared = comparison(plain)  # rows of weights alone, as an export's
        compared.compare_weights(4, state, "item", ids, weights)
        compared.compare_part(4, names[1], torch.ones(2, 3), scores)
        compared.compare_part(4, names[2], torch.ones(2), predictions)
        assert compared.steps_seen == {(4, name) for name in names}
        return compared.first

    right = ids, weights, torch.ones(2, 3), torch.ones(2)
    assert judged(*right) is None
    more = torch.tensor([12345])  # with the row that it would begin with
    surplus = torch.cat([ids, more]), torch.cat([weights, table.initial_rows("item", more)[:, :2]])
    for place, tensor in (
        ((surplus[0], surplus[1]), "table item, exported"),
        ((ids[1:], weights[1:]), "table item, exported"),
        ((ids, weights + (torch.arange(2) == 1)), "table item, exported"),
    ):
        first = judged(*place, *right[2:])
        assert first is not None and (first.step, first.tensor) == (4, tensor)
    assert judged(*right[:2], torch.ones(2, 3) * 2, right[3]).tensor == "scores, exported"
    assert judged(*right[:3], torch.zeros(2)).tensor == names[2]


def test_earliest_goes_by_step_then_loss_dense_table():
    def at(step, tensor):
        return Difference(step, tensor, [0], 0.0, 1.0, None)

    found = [at(2, "loss"), at(1, "table item"), None, at(1, "weight")]
    assert earliest(found) == at(1, "weight")
    assert earliest([None, None]) is None


def test_ulps_count_across_zero():
    table, expected = run()
    expected["loss/values"][0] = 1e-45
    got = {**expected, "loss/values": expected["loss/values"].clone()}
    got["loss/values"][0] = -1e-45
    compared = comparison(table)
    compared.compare(0, expected, got, final=True)
    assert compared.first is not None and compared.first.ulps == 2
