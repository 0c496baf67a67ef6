"""Finds in the key index of a dynamic table beside the hash maps of PyPI.

    pytest ci/benchmarks/bench_dynamic_table.py

Random int64 keys; 256k keys are looked up in a map of exactly three quarters of our slots. Every call has
other keys, and after its time is taken every row number is checked (`honest`). Each contender gets its keys
in the form it likes best: the dict a list.

Contenders are what installs from PyPI for Python 3.11, answers for a whole array at once, and can take keys
later: Python's dict, numba's typed dict, pandas' hash table (through its factorizer, the only part of it that
grows), hirola and cykhash; and two maps of C++ where a compiler finds them (`cpp_maps`). Tried and left out:
arraymap (0.6 to 1.5 us a key); pyarrow's index_in, polars and duckdb, which build a table for every call;
vaex-core (wants the rest of vaex); getpy (does not install).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import Any

import cpp_maps
import numba
import numpy as np
import pytest
import torch
from cpp_maps import CppMap
from honest import Given, Rounds, time_rounds
from numba.typed import Dict

from tritonrec.embedding.key_index import KeyIndex

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = 1 << 16
LOOKUPS = 1 << 18
SLOTS = 1 << 20
ASKED = ("hits", "misses")


class Tritonrec:
    def __init__(self):
        self.index = KeyIndex()

    def prepare(self, keys: np.ndarray):
        return torch.from_numpy(keys)

    def insert(self, keys):
        return self.index.find_or_insert(keys)[0]

    def find(self, keys):
        return self.index.find(keys)


class PythonDict:
    def __init__(self):
        self.rows: dict[int, int] = {}

    def prepare(self, keys):
        return keys.tolist()

    def insert(self, keys):
        rows = self.rows
        return [rows.setdefault(key, len(rows)) for key in keys]

    def find(self, keys):
        rows = self.rows
        return [rows.get(key, -1) for key in keys]


@numba.njit(cache=True)
def typed_dict_insert(table, keys, rows):
    for i in range(len(keys)):
        row = table.get(keys[i], -1)
        if row < 0:
            row = len(table)
            table[keys[i]] = row
        rows[i] = row


@numba.njit(cache=True)
def typed_dict_find(table, keys, rows):
    for i in range(len(keys)):
        rows[i] = table.get(keys[i], -1)


class NumbaTypedDict:
    def __init__(self):
        self.table = Dict.empty(numba.types.int64, numba.types.int64)

    def prepare(self, keys):
        return keys

    def insert(self, keys):
        rows = np.empty(len(keys), np.int64)
        typed_dict_insert(self.table, keys, rows)
        return rows

    def find(self, keys):
        rows = np.empty(len(keys), np.int64)
        typed_dict_find(self.table, keys, rows)
        return rows


class Pandas:
    def __init__(self):
        from pandas._libs.hashtable import Int64Factorizer

        self.factorizer = Int64Factorizer(1)

    def prepare(self, keys):
        return keys

    def insert(self, keys):
        return self.factorizer.factorize(keys)

    def find(self, keys):
        return self.factorizer.table.lookup(keys)


class Hirola:
    def __init__(self):
        import hirola

        # grown at the load where ours grows: by its default of 0.9 its searches take twice as long
        self.table = hirola.HashTable(1024, np.int64, almost_full=(0.75, 2.0))

    def prepare(self, keys):
        return keys

    def insert(self, keys):
        return self.table.add(keys)

    def find(self, keys):
        return self.table.get(keys)


class Cykhash:
    """Has no find-or-insert for arrays: the new keys and their rows make a map, which is merged."""

    def __init__(self):
        import cykhash

        self.cykhash, self.table = cykhash, cykhash.Int64toInt64Map()

    def prepare(self, keys):
        return keys

    def insert(self, keys):
        rows = np.arange(len(self.table), len(self.table) + len(keys))
        self.cykhash.update_int64toint64map(self.table, self.cykhash.Int64toInt64Map_from_buffers(keys, rows))
        return rows

    def find(self, keys):
        rows = np.empty(len(keys), np.int64)
        self.cykhash.Int64toInt64Map_to(self.table, keys, rows, False, -1)
        return rows


CONTENDERS = {
    "tritonrec": Tritonrec,
    "python_dict": PythonDict,
    "numba_typed_dict": NumbaTypedDict,
    "pandas": Pandas,
    "hirola": Hirola,
    "cykhash": Cykhash,
    **{name: partial(CppMap, name) for name in cpp_maps.NAMES},
}
PACKAGES = ("tritonrec", "torch", "numba", "numpy", "pandas", "hirola", "cykhash")


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def random_keys(count: int, seed: int) -> np.ndarray:
    keys = np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count + count // 100 + 100))
    return np.random.default_rng(seed + 1).permutation(keys)[:count]


def filled(contender: Callable[[], Any], keys: np.ndarray):
    table = contender()
    for start in range(0, len(keys), BATCH):
        table.insert(table.prepare(keys[start : start + BATCH]))
    return table


class Questions:
    """Keys for three quarters of the slots, and what is asked of a table with them: other keys in each round.

    A few misses are among the hits and a few hits among the misses, so that no answer is known beforehand.
    """

    OTHERS = 16

    def __init__(self, slots: int):
        self.count = 3 * slots // 4
        self.all = random_keys(self.count + LOOKUPS, 0)
        self.keys = self.all[: self.count]

    def rounds(self, table, asked: str) -> Rounds:
        def rounds(number: int) -> Given:
            random = np.random.default_rng(5 + number)
            hits = random.integers(0, self.count, LOOKUPS)
            misses = random.permutation(LOOKUPS) + self.count
            places, others = (hits, misses) if asked == "hits" else (misses, hits)
            few = random.permutation(LOOKUPS)[: self.OTHERS]
            places[few] = others[few]

            def check(rows, _keys):
                expected = np.where(places < self.count, places, -1)
                assert np.array_equal(np.asarray(rows), expected), "wrong rows"

            return Given(table.find, (table.prepare(self.all[places]),), check)

        return rounds


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_find(benchmark, contender, asked):
    try:
        CONTENDERS[contender]()
    except ImportError as error:
        pytest.skip(str(error))
    questions = Questions(SLOTS)
    table = filled(CONTENDERS[contender], questions.keys)
    benchmark.group = f"key index find {asked}"
    benchmark.extra_info.update(
        ours=contender == "tritonrec",
        workload=f"{LOOKUPS:,} {asked} among {questions.count:,} keys, load 0.75",
        threads=1,
        versions=versions(),
    )
    time_rounds(benchmark, questions.rounds(table, asked), 16 * LOOKUPS)
