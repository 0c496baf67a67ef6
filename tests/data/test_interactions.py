"""A log becomes one sequence per user in the order of (timestamp, row); a spec names exactly one source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonrec.data.interactions import Interactions
from tritonrec.data.sources import load

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def log(rows: list[tuple[int, int, int]]) -> Interactions:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return Interactions(*columns)


values = st.sampled_from([INT64_MIN, -1, 0, 1, 2, INT64_MAX])


@given(st.lists(st.tuples(values, values, values), max_size=20))
def test_sequences_equal_a_plain_sort(rows):
    sequences = log(rows).sequences
    expected = {
        user: sorted([(time, row) for row, (owner, _, time) in enumerate(rows) if owner == user])
        for user in sorted({user for user, _, _ in rows})
    }
    assert sequences.user_ids.tolist() == list(expected)
    for place, events in enumerate(expected.values()):
        span = slice(sequences.offsets[place], sequences.offsets[place + 1])
        assert sequences.items[span].tolist() == [rows[row][1] for _, row in events]
        assert sequences.timestamps[span].tolist() == [time for time, _ in events]


def test_a_column_of_another_shape_or_dtype_is_named():
    three = np.arange(3)
    with pytest.raises(ValueError, match=r"item must be int64 of shape \(3,\), got int64 of shape \(2,\)"):
        Interactions(three, three[:2], three)
    with pytest.raises(ValueError, match=r"timestamp must be int64 .*got float64"):
        Interactions(three, three, three.astype(np.float64))
    with pytest.raises(ValueError, match=r"rating must be float64 .*got int64"):
        Interactions(three, three, three, three)


@pytest.mark.parametrize("spec", ["", "ml-1m", "ml-100k:x", "csv", "csv:", "parquet:", "kuairand"])
def test_an_unknown_spec_lists_the_known_ones(spec):
    with pytest.raises(
        ValueError, match=r"unknown data .*ml-100k.*zipf.*csv:PATH.*parquet:PATH.*kuairand:PATH"
    ):
        load(spec)


def test_spec_of_a_file_and_of_a_generator(tmp_path):
    path = tmp_path / "a log: with a colon.csv"
    path.write_text("user,item,time\n7,8,9\n")
    assert load(f"csv:{path}").item.tolist() == [8]
    assert len(load("zipf:users=5,items=7,seed=3").sequences.user_ids) == 5
