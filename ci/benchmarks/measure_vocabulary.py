"""Seconds in which ten million words become ids, beside Arrow's and pandas' ways: the best of three.

    python ci/benchmarks/measure_vocabulary.py [--rows N]

All ways give the same numbers, which is checked. Memory is that of the vocabulary alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tritonrec.data import Vocabulary, hashed_ids


def words(ids: np.ndarray) -> pa.Array:
    """``B123X`` of each id."""
    return pc.binary_join_element_wise("B", pa.array(ids.astype(np.int64)).cast(pa.string()), "X", "")


def best_of_three(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the last result."""
    times = []
    for _ in range(3):
        began = time.perf_counter()
        found = run()
        times.append(time.perf_counter() - began)
    return min(times), found


def main(rows: int) -> None:
    rng = np.random.default_rng(0)
    logs = {
        "all distinct": rng.permutation(7 * rows)[:rows] * 1237 % 10**10,
        "Zipf, exponent 1.2": np.minimum(rng.zipf(1.2, rows), 10**9),
        "a million words": rng.integers(0, 10**6, rows),
    }
    hashed_ids(Vocabulary(["compiles"]).words)
    for name, ids in logs.items():
        column = words(ids)
        series = pd.Series(pd.arrays.ArrowExtensionArray(column))
        ways: dict[str, Callable[[], Any]] = {
            "Vocabulary": lambda column=column: Vocabulary(column),
            "Arrow, dictionary_encode": lambda column=column: pc.dictionary_encode(column),
            "pandas, factorize": lambda series=series: pd.factorize(series),
            "hashed_ids": lambda column=column: hashed_ids(column),
        }
        found = {way: best_of_three(run) for way, run in ways.items()}
        made = found["Vocabulary"][1]
        numbers = made.encode(column)
        assert np.array_equal(numbers, found["pandas, factorize"][1][0])
        assert np.array_equal(numbers, found["Arrow, dictionary_encode"][1].indices.to_numpy())
        print(f"{name}: {rows:,} rows, {len(made):,} words, {made.nbytes / 1e6:.0f} MB")
        for way, (seconds, _) in found.items():
            print(f"  {way:26} {seconds:6.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Words as ids.")
    parser.add_argument("--rows", type=int, default=10_000_000)
    main(**vars(parser.parse_args()))
