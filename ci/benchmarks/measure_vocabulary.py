"""Seconds in which ten million words become ids, beside Arrow's and pandas' ways: the best of three.

    python ci/benchmarks/measure_vocabulary.py [--rows N]

All ways give the same numbers, which is checked. Memory is that of the vocabulary alone.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from frame import by_turns, options_of

from tritonrec.data import Vocabulary, hashed_ids


def words(ids: np.ndarray) -> pa.Array:
    """``B123X`` of each id."""
    return pc.binary_join_element_wise("B", pa.array(ids.astype(np.int64)).cast(pa.string()), "X", "")


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
        ways = {
            "Vocabulary": lambda column=column: Vocabulary(column),
            "Arrow, dictionary_encode": lambda column=column: pc.dictionary_encode(column),
            "pandas, factorize": lambda series=series: pd.factorize(series),
            "hashed_ids": lambda column=column: hashed_ids(column),
        }
        made = ways["Vocabulary"]()
        numbers = made.encode(column)
        assert np.array_equal(numbers, ways["pandas, factorize"]()[0])
        assert np.array_equal(numbers, ways["Arrow, dictionary_encode"]().indices.to_numpy())
        print(f"{name}: {rows:,} rows, {len(made):,} words, {made.nbytes / 1e6:.0f} MB")
        for way, times in by_turns(ways, 3, warm=0).items():
            print(f"  {way:26} {min(times.wall):6.2f} s")


if __name__ == "__main__":
    main(options_of(__doc__, rows=10_000_000).rows)
