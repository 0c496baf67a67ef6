"""The key table beside a dict, a pandas index and numba's typed dict.

    pytest ci/benchmarks/bench_hash_table.py

One thread, random int64 keys. `find` asks for 256k keys, half of them absent, in a table at a load of exactly
0.75; `insert` puts a million keys into an empty table, either of the final size at once, or grown from eight
slots at 0.75 in batches of 64k. Every round asks for or inserts other keys, and its output is checked
(`honest`): of an insert the rows, and what the table then finds. Freeing a table is not timed. Each contender
gets its keys in the form it likes best: the dict a list.
"""

import numba
import numpy as np
import pandas as pd
import pytest
import torch
from honest import Given, time_rounds
from numba.typed import Dict

from tritonrec.kernels.hash_table import hash_find, hash_grow, hash_insert

pytestmark = pytest.mark.usefixtures("one_thread")

# name: slots of ours; the table holds three quarters of them
FIND_SLOTS = {"1m_slots": 1 << 20, "64k_slots": 1 << 16}
LOOKUPS = 1 << 18
INSERTS = 1_000_000
BATCH = 1 << 16


def random_keys(count, seed):
    keys = np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count + count // 100 + 100))
    return np.random.default_rng(seed + 1).permutation(keys)[:count]


def grown(keys):
    """A table of ours that took `keys` batch by batch, and the rows they got."""
    table = torch.zeros(8, dtype=torch.int64), torch.full((8,), -1, dtype=torch.int32)
    rows, taken = [], 0
    for batch in keys.split(BATCH):
        while 4 * (taken + len(batch)) > 3 * len(table[0]):
            table = hash_grow(*table)
        batch_rows, inserted = hash_insert(*table, batch, taken)
        taken += int(inserted.sum())
        rows.append(batch_rows)
    return table, torch.cat(rows)


@numba.njit(cache=True)
def typed_dict_find(table, keys, rows):
    for i in range(len(keys)):
        rows[i] = table.get(keys[i], -1)


@numba.njit(cache=True)
def typed_dict_insert(table, keys, rows):
    for i in range(len(keys)):
        row = table.get(keys[i], -1)
        if row < 0:
            row = len(table)
            table[keys[i]] = row
        rows[i] = row


def new_typed_dict(size=0):
    return Dict.empty(numba.types.int64, numba.types.int64, n_keys=size)


# Contenders give how they want their keys, and the call.


def find_tritonrec(keys):
    table, _ = grown(torch.from_numpy(keys))
    return torch.from_numpy, lambda query: hash_find(*table, query)


def find_python_dict(keys):
    table = {key: row for row, key in enumerate(keys.tolist())}
    return np.ndarray.tolist, lambda query: [table.get(key, -1) for key in query]


def find_pandas_index(keys):
    index = pd.Index(keys)
    return np.asarray, index.get_indexer


def find_numba_typed_dict(keys):
    table, rows = new_typed_dict(), np.empty(LOOKUPS, np.int64)
    typed_dict_insert(table, keys, np.empty(len(keys), np.int64))

    def find(query):
        typed_dict_find(table, query, rows)
        return rows

    return np.asarray, find


# What inserts returns the rows, and how the table finds an array of keys, with which it is checked.


def insert_tritonrec(final_size):
    def insert(keys):
        if not final_size:
            table, rows = grown(keys)
        else:
            slots = 1 << (4 * len(keys) // 3 - 1).bit_length()
            table = torch.zeros(slots, dtype=torch.int64), torch.full((slots,), -1, dtype=torch.int32)
            rows = hash_insert(*table, keys, 0)[0]
        return rows, lambda query: hash_find(*table, torch.from_numpy(query))

    return torch.from_numpy, insert


def insert_python_dict(final_size):
    """A dict cannot be told its size."""

    def insert(keys):
        table: dict[int, int] = {}
        rows = [table.setdefault(key, len(table)) for key in keys]
        return rows, lambda query: [table.get(key, -1) for key in query.tolist()]

    return np.ndarray.tolist, insert


def insert_pandas_index(final_size):
    """An index and its first lookup: pandas builds its hash table then, always at its final size."""

    def insert(keys):
        index = pd.Index(keys)
        return index.get_indexer(keys), index.get_indexer

    return np.asarray, insert


def insert_numba_typed_dict(final_size):
    def insert(keys):
        table, rows = new_typed_dict(len(keys) if final_size else 0), np.empty(len(keys), np.int64)
        typed_dict_insert(table, keys, rows)

        def find(query):
            found = np.empty(len(query), np.int64)
            typed_dict_find(table, query, found)
            return found

        return rows, find

    return np.asarray, insert


def describe(contender, workload):
    return {
        "ours": contender.__name__.endswith("tritonrec"),
        "workload": workload,
        "threads": 1,
        "versions": {"torch": torch.__version__, "pandas": pd.__version__, "numba": numba.__version__},
    }


@pytest.mark.parametrize("slots", FIND_SLOTS)
@pytest.mark.parametrize(
    "contender",
    [find_tritonrec, find_python_dict, find_pandas_index, find_numba_typed_dict],
    ids=lambda f: f.__name__,
)
def test_find(benchmark, contender, slots):
    count = 3 * FIND_SLOTS[slots] // 4
    keys = random_keys(count + LOOKUPS // 2, 0)
    prepare, find = contender(keys[:count])

    def rounds(number):
        rng = np.random.default_rng(5 + number)
        absent = rng.permutation(np.arange(count, count + LOOKUPS // 2))
        lookups = rng.permutation(np.concatenate([rng.integers(0, count, LOOKUPS // 2), absent]))

        def check(rows, _query):
            assert np.array_equal(np.asarray(rows), np.where(lookups < count, lookups, -1)), "wrong rows"

        return Given(find, (prepare(keys[lookups]),), check)

    benchmark.group = f"hash_find {slots}"
    benchmark.extra_info.update(
        describe(contender, f"{LOOKUPS:,} lookups, half absent, {count:,} keys, load 0.75")
    )
    time_rounds(benchmark, rounds, least_bytes=16 * LOOKUPS)  # keys in, rows out


@pytest.mark.parametrize(
    "contender",
    [insert_tritonrec, insert_python_dict, insert_pandas_index, insert_numba_typed_dict],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("final_size", [True, False], ids=["final_size", "growing"])
def test_insert(benchmark, contender, final_size):
    prepare, insert = contender(final_size)
    random = random_keys(INSERTS, 0)

    def rounds(number):
        keys = random ^ np.int64((number + 1) * 0x9E3779B97F4A7C15 % 2**62)
        some = np.random.default_rng(number).integers(0, INSERTS, BATCH)

        def check(output, _keys):
            rows, find = output
            assert np.array_equal(np.asarray(rows), np.arange(INSERTS)), "wrong rows"
            assert np.array_equal(np.asarray(find(keys[some])), some), "the table does not hold what it took"

        return Given(insert, (prepare(keys.copy()),), check)

    benchmark.group = "hash_insert " + ("final_size" if final_size else "growing")
    size = "a table of the final size" if final_size else "a table grown from eight slots"
    benchmark.extra_info.update(describe(contender, f"{INSERTS:,} new keys into {size}"))
    time_rounds(benchmark, rounds, least_bytes=24 * INSERTS)  # keys in, rows out, keys into the table
