"""A jagged batch keeps every token with its sample through selection, and bad layouts are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data.batch import JaggedBatch

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def make_batch(lengths: list[int], negatives: int = 2, step: int = 3) -> JaggedBatch:
    """A batch whose ids tell sample and position: 1000 * sample + position."""
    tokens = sum(lengths)
    ids = [1000 * sample + position for sample, length in enumerate(lengths) for position in range(length)]
    offsets = [sum(lengths[:sample]) for sample in range(len(lengths) + 1)]
    ids_tensor = torch.tensor(ids, dtype=torch.int64)
    return JaggedBatch(
        step=step,
        sample_ids=torch.arange(len(lengths)) * 7 - 3,
        offsets=torch.tensor(offsets, dtype=torch.int64),
        ids=ids_tensor,
        timestamps=ids_tensor * 2,
        labels=ids_tensor + 1,
        negatives=torch.arange(tokens * negatives).reshape(tokens, negatives) + 10**6,
    )


def test_layout_of_the_docstring():
    batch = make_batch([2, 0, 3]).validate()
    assert batch.num_samples == 3 and batch.num_tokens == 5 and batch.num_negatives == 2
    assert batch.offsets.tolist() == [0, 2, 2, 5]
    assert batch.lengths.tolist() == [2, 0, 3]
    assert batch.token_positions().tolist() == [0, 1, 0, 1, 2]
    assert batch.token_sample_ids().tolist() == [-3, -3, 11, 11, 11]


def test_occurrence_keys_are_ids_then_labels_then_negatives():
    batch = make_batch([1, 2], negatives=2)
    expected = [0, 1000, 1001, 1, 1001, 1002, *range(10**6, 10**6 + 6)]
    assert batch.lookups()["item"].ids.tolist() == expected


@pytest.mark.parametrize(
    "lengths", [[], [0], [0, 0, 0], [1]], ids=["empty", "one_empty", "all_empty", "one_token"]
)
def test_small_batches_are_legal(lengths):
    batch = make_batch(lengths).validate()
    assert batch.lookups()["item"].ids.shape == (sum(lengths) * 4,)
    assert batch.token_positions().tolist() == [0] * sum(lengths)
    everything = batch.select(torch.arange(len(lengths))).validate()
    assert torch.equal(everything.offsets, batch.offsets) and torch.equal(everything.ids, batch.ids)
    nothing = batch.select(torch.zeros(0, dtype=torch.int64)).validate()
    assert nothing.num_samples == 0 and nothing.num_tokens == 0 and nothing.num_negatives == 2


@given(st.data())
def test_select_moves_whole_samples(data):
    lengths = data.draw(st.lists(st.integers(0, 5), max_size=8))
    batch = make_batch(lengths)
    picks = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=10) if lengths else st.just([]))
    chosen = batch.select(torch.tensor(picks, dtype=torch.int64)).validate()

    tokens = [range(int(batch.offsets[pick]), int(batch.offsets[pick + 1])) for pick in picks]
    flat = [token for run in tokens for token in run]
    assert chosen.step == batch.step
    assert chosen.sample_ids.tolist() == [int(batch.sample_ids[pick]) for pick in picks]
    assert chosen.lengths.tolist() == [lengths[pick] for pick in picks]
    for name in ("ids", "timestamps", "labels", "negatives"):
        assert torch.equal(
            getattr(chosen, name), getattr(batch, name)[torch.tensor(flat, dtype=torch.int64)]
        ), name


@pytest.mark.parametrize("index", [-1, 3])
def test_select_refuses_an_index_outside(index):
    with pytest.raises(IndexError, match=rf"\[0, 3\).*{index}"):
        make_batch([2, 0, 3]).select(torch.tensor([0, index]))


BAD = {
    "unsorted": (
        dict(offsets=[0, 3, 2, 5]),
        r"offsets must not decrease: offsets\[2\] = 2 .*offsets\[1\] = 3",
    ),
    "negative": (dict(offsets=[0, -2, 2, 5]), r"offsets must not be negative: offsets\[1\] = -2"),
    "extreme": (dict(offsets=[0, INT64_MIN, INT64_MAX, 5]), r"offsets\[1\] = -9223372036854775808"),
    "late_start": (dict(offsets=[1, 2, 2, 5]), r"offsets must start at 0: offsets\[0\] = 1"),
    "short_end": (dict(offsets=[0, 2, 2, 4]), r"offsets\[3\] = 4, but ids has 5"),
    "long_end": (dict(offsets=[0, 2, 2, 6]), r"offsets\[3\] = 6, but ids has 5"),
    "no_offsets": (dict(offsets=[]), r"offsets .*empty tensor"),
    "samples": (dict(sample_ids=[1, 2]), r"sample_ids has 2 entries.*describe 3 samples"),
    "timestamps": (dict(timestamps=[1] * 4), r"timestamps has 4 rows, but ids has 5"),
    "labels": (dict(labels=[1] * 6), r"labels has 6 rows, but ids has 5"),
    "negatives": (dict(negatives=[[1, 2]]), r"negatives has 1 rows, but ids has 5"),
    "flat_negatives": (dict(negatives=[1] * 5), r"negatives must have 2 dimension.*\(5,\)"),
    "matrix_ids": (dict(ids=[[1] * 5]), r"ids must have 1 dimension.*\(1, 5\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_validate_names_the_field_and_the_values(case):
    changes, message = BAD[case]
    tensors = {name: torch.tensor(values, dtype=torch.int64) for name, values in changes.items()}
    with pytest.raises(ValueError, match=message):
        replace(make_batch([2, 0, 3]), **tensors).validate()


@pytest.mark.parametrize("name", ["sample_ids", "offsets", "ids", "timestamps", "labels", "negatives"])
def test_validate_names_a_wrong_dtype(name):
    batch = make_batch([2, 0, 3])
    with pytest.raises(ValueError, match=rf"{name} must be an int64 tensor, got torch.int32"):
        replace(batch, **{name: getattr(batch, name).int()}).validate()
    with pytest.raises(ValueError, match=rf"{name} must be an int64 tensor, got list"):
        replace(batch, **{name: [1]}).validate()
