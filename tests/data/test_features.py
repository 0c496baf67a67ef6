"""Features of known users and items are found, unknown ones have none, and bad tables are named."""

from __future__ import annotations

import numpy as np
import pytest

from tritonrec.data.interactions import Interactions, ItemGenres, UserFeatures

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_features_of_users():
    table = UserFeatures(ints(INT64_MIN, 4, 9), {"gender": ints(7, 2, 1)})
    found = table.of(ints(9, 5, INT64_MAX, INT64_MIN, 4, -1, 0))
    assert found["gender"].tolist() == [1, 0, 0, 7, 2, 0, 0]
    nobody = UserFeatures(ints(), {"gender": ints()})
    assert nobody.of(ints(0, 3))["gender"].tolist() == [0, 0]


def test_bags_of_items():
    table = ItemGenres(ints(10, 11, INT64_MAX), ints(0, 2, 2, 3), ints(1, 4, 2))
    starts, lengths = table.of(ints(INT64_MAX, 12, 10, 11, 9, 0))
    bags = [
        table.genres[start : start + length].tolist() for start, length in zip(starts, lengths, strict=True)
    ]
    assert bags == [[2], [], [1, 4], [], [], []]
    starts, lengths = ItemGenres(ints(), ints(0), ints()).of(ints(0, 1))
    assert lengths.tolist() == [0, 0] and starts.tolist() == [0, 0]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: UserFeatures(ints(4, 4), {}), r"user_ids must ascend: user_ids\[1\] = 4 comes after 4"),
        (lambda: UserFeatures(np.array([1.0]), {}), r"user_ids must be int64 of one dimension, got float64"),
        (lambda: UserFeatures(ints(4), {"age": ints(1, 2)}),
         r"'age' must be int64 of shape \(1,\), got .*\(2,\)"),
        (lambda: ItemGenres(ints(3, 1), ints(0, 0, 0), ints()), r"item_ids must ascend: .* 1 comes after 3"),
        (lambda: ItemGenres(ints(3), ints(0, 2), ints(1)), r"offsets must rise from 0 to 1 in 1 bags"),
        (lambda: ItemGenres(ints(3), ints(0), ints()), r"offsets must rise from 0 to 0 in 1 bags"),
        (lambda: ItemGenres(ints(3, 4), ints(0, 2, 1), ints(1)), r"offsets must rise"),
        (lambda: ItemGenres(ints(3), ints(0, 1), np.array([1.5])), r"genres must be int64 .* got float64"),
        (lambda: Interactions(ints(1), ints(2), ints(3), feedback={"like": ints(2)}),
         r"feedback 'like' must be 0 or 1, got 2 in row 0"),
        (lambda: Interactions(ints(1), ints(2), ints(3), feedback={"like": ints(1, 0)}),
         r"feedback 'like' must be int64 of shape \(1,\)"),
    ],
)  # fmt: skip
def test_a_bad_table_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
