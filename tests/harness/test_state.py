"""Promise: one flipped bit anywhere is found, named and placed; equal runs are equal."""

import pytest
import torch

from tritonrec.embedding import FeatureConfig, HashTableCollection
from tritonrec.harness.verify.state import (
    Comparison,
    Difference,
    dense_state,
    earliest,
    loss_state,
    table_state,
)
from tritonrec.ops import owner_of
from tritonrec.pipeline import DenseModel

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
    assert compared.steps_seen == {(0, "loss"), (0, "dense"), (0, "table")}


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
