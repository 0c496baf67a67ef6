"""The key index of a dynamic table beside the hash maps of PyPI: speed, memory, and how long a growth stalls.

    pytest ci/benchmarks/bench_dynamic_table.py               find
    python ci/benchmarks/bench_dynamic_table.py --json FILE   ten million inserts, stalls, memory, find

Random int64 keys, one thread, and its processor time, which counts page faults but not what other processes
run meanwhile. Inserts come in batches of 64k to a map that grows, each contender in a process
of its own, where resident memory is measured; the processes take turns, and medians over the rounds are
reported. Find asks for 256k keys in a map of exactly three quarters of our slots, contenders by turns in one
process. Every call has other keys, and after its time is taken every row number is checked (`honest`). Each
contender gets its keys in the form it likes best: the dict a list.

Contenders are what installs from PyPI for Python 3.11, answers for a whole array at once, and can take keys
later: Python's dict, numba's typed dict, pandas' hash table (through its factorizer, the only part of it that
grows), hirola and cykhash; and two maps of C++ where a compiler finds them (`cpp_maps`). Tried and left out:
arraymap (0.6 to 1.5 us a key); pyarrow's index_in, polars and duckdb, which build a table for every call;
vaex-core (wants the rest of vaex); getpy (does not install).
"""

from __future__ import annotations

import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import cpp_maps
import numba
import numpy as np
import pytest
import torch
from cpp_maps import CppMap
from frame import options_of, record
from honest import Given, Round, Rounds, by_turns, refuse_impossible, time_rounds
from numba.typed import Dict
from resident import give_back, peak_from_here, resident

from tritonrec.embedding.key_index import KeyIndex

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH = 1 << 16
LOOKUPS = 1 << 18
FIND_SLOTS = {"1m_slots": 1 << 20, "16m_slots": 1 << 24}
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


def installed() -> list[str]:
    names = []
    for name, contender in CONTENDERS.items():
        try:
            contender()
            names.append(name)
        except ImportError as error:
            print(f"{name} is not there: {error}", file=sys.stderr)
    return names


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
    questions = Questions(FIND_SLOTS["1m_slots"])
    table = filled(CONTENDERS[contender], questions.keys)
    benchmark.group = f"key index find {asked}"
    benchmark.extra_info.update(
        ours=contender == "tritonrec",
        workload=f"{LOOKUPS:,} {asked} among {questions.count:,} keys, load 0.75",
        threads=1,
        versions=versions(),
    )
    time_rounds(benchmark, questions.rounds(table, asked), 16 * LOOKUPS)


def insert_all(name: str, count: int) -> dict[str, object]:
    """Insert `count` new keys batch by batch; run in a process of its own."""
    contender = CONTENDERS[name]
    warm = filled(contender, random_keys(3 * BATCH, 7))
    warm.find(warm.prepare(random_keys(BATCH, 7)))
    del warm
    keys = random_keys(count, 0)
    give_back()
    before, table, calls = resident(), contender(), []
    peak_from_here()
    for start in range(0, count, BATCH):
        batch = keys[start : start + BATCH]
        expected = np.arange(start, start + len(batch))

        def check(rows, _batch, expected=expected):
            assert np.array_equal(np.asarray(rows), expected), "wrong rows"

        one = Round(Given(table.insert, (table.prepare(batch.copy()),), check), start // BATCH)
        begin = time.thread_time()
        one.run()
        calls.append(time.thread_time() - begin)
        one.finish()
    del one
    give_back()
    taken, peak = resident() - before, resident("VmHWM") - before
    sample = np.random.default_rng(2).integers(0, count, BATCH)
    assert np.array_equal(np.asarray(table.find(table.prepare(keys[sample]))), sample)
    full_calls = calls[: count // BATCH]
    refuse_impossible(name, min(full_calls), 24 * BATCH)  # keys in, rows out, keys into the table
    longest = max(range(len(calls)), key=calls.__getitem__)
    return {
        "ns_per_key": 1e9 * sum(calls) / count,
        "million_keys_per_second": count / sum(calls) / 1e6,
        "bytes_per_key": taken / count,
        "peak_bytes_per_key": peak / count,
        "median_call_ms": 1e3 * statistics.median(full_calls),
        "p99_call_ms": 1e3 * float(np.quantile(full_calls, 0.99)),
        "longest_call_ms": 1e3 * max(calls),
        "longest_call_at_key": longest * BATCH,
        "longest_over_median": max(calls) / statistics.median(full_calls),
    }


def compare_inserts(names: list[str], count: int, rounds: int) -> dict[str, dict[str, float]]:
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            command = [sys.executable, __file__, "--insert", name, "--keys", str(count)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            measured[name].append(json.loads(done.stdout))
    return {
        name: {field: statistics.median(one[field] for one in runs) for field in runs[0]}
        for name, runs in measured.items()
    }


def compare_finds(names: list[str], slots: int, rounds: int) -> dict[str, dict[str, float]]:
    """Nanoseconds per key, medians of calls that take turns."""
    questions = Questions(slots)
    tables = {name: filled(CONTENDERS[name], questions.keys) for name in names}
    result: dict[str, dict[str, float]] = {}
    for asked in ASKED:
        contenders = {name: questions.rounds(table, asked) for name, table in tables.items()}
        seconds = by_turns(contenders, rounds, 16 * LOOKUPS)
        result[asked] = {name: 1e9 * statistics.median(all_of) / LOOKUPS for name, all_of in seconds.items()}
    return result


def main() -> None:
    insert = {"choices": CONTENDERS, "help": "run one contender here and print its figures"}
    arguments = options_of(__doc__, keys=10_000_000, rounds=3, find_rounds=15, insert=insert)
    torch.set_num_threads(1)
    if arguments.insert:
        print(json.dumps(insert_all(arguments.insert, arguments.keys)))
        return
    names = installed()
    np.ones(1 << 28)  # so that a virtual machine's host has backed the memory before anyone is timed
    inserts = compare_inserts(names, arguments.keys, arguments.rounds)
    finds = {size: compare_finds(names, slots, arguments.find_rounds) for size, slots in FIND_SLOTS.items()}
    index = filled(Tritonrec, random_keys(3 << 18, 0)).index
    report = {
        "versions": versions(),
        "workload": {"batch": BATCH, "lookups": LOOKUPS},
        "insert": inserts,
        "find_ns_per_key_at_load_0.75": finds,
        "metadata_bytes_per_key_at_load_0.75": index.nbytes / len(index),
    }
    print(f"{'':18s}{'M keys/s':>9s}{'B/key':>8s}{'peak':>8s}{'median ms':>11s}{'longest':>9s}{'x':>7s}")
    for name, row in inserts.items():
        print(
            f"{name:18s}{row['million_keys_per_second']:9.2f}{row['bytes_per_key']:8.1f}"
            f"{row['peak_bytes_per_key']:8.1f}{row['median_call_ms']:11.2f}{row['longest_call_ms']:9.1f}"
            f"{row['longest_over_median']:7.1f}"
        )
    for size, by_question in finds.items():
        for asked, by_name in by_question.items():
            best = min(value for name, value in by_name.items() if name != "tritonrec")
            print(
                f"find {asked} {size}: "
                + ", ".join(f"{name} {value:.1f} ns" for name, value in by_name.items())
                + f"; the best peer takes {best / by_name['tritonrec']:.2f} times as long as ours"
            )
    record(arguments, **report)


if __name__ == "__main__":
    main()
