"""Keys and rows beside the strongest peers: hash maps of C++, Polars, DuckDB and FBGEMM's embedding tables.

    bash ci/benchmarks/torchrec.sh                    # FBGEMM's CPU build, into out/torchrec
    pip install polars duckdb
    python ci/benchmarks/strong_peers.py --include DIR --include DIR --json FILE

`--include` names folders of headers: boost (1.81 or later; Debian's libboost1.81-dev) and
github.com/martinus/unordered_dense. A peer that is not there is skipped, and the report says why.

One thread and its processor time, which other processes on the machine disturb least. Contenders take turns;
a figure is the median of its calls. Every turn has other keys, ids or gradients, and every output is checked
after its time is taken (`honest`): of an insert the rows, and what the map then finds; freeing the map is not
timed. A peer may do less work: Polars and DuckDB count distinct keys and give no inverse.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["POLARS_MAX_THREADS"] = "1"  # read when it is imported

import numpy as np
import torch
from honest import Check, Given, Rounds, by_turns, flipped
from kernel_cases import moved, rows_moved, zipf

from tritonrec import ops
from tritonrec.embedding.key_index import KeyIndex
from tritonrec.harness.environment import environment_of_times

ROOT = Path(__file__).resolve().parents[2]
TABLE, DIM, LOOKUPS, BAG = 200_000, 64, 65_536, 8
MAP_KEYS, QUESTIONS = 3 << 18, 1 << 18
RATE, EPS = 0.1, 1e-8
OTHERS = 16
Calls = dict[str, Callable[..., Any]]


class Skipped(Exception):
    """A peer that cannot be measured here; says why."""


class CppMap:
    """One of the maps of hash_maps.cpp, compiled for this processor."""

    def __init__(self, name: str, folder: Path, include: list[Path]):
        library = folder / f"{name}.so"
        command = ["g++", "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", f"-D{name.upper()}"]
        command += [f"-I{each}" for each in include]
        command += [str(Path(__file__).with_name("hash_maps.cpp")), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise Skipped("there is no g++") from None
        if done.returncode:
            raise Skipped(next(line for line in done.stderr.splitlines() if "error" in line))
        self._calls = ctypes.CDLL(str(library))
        self._calls.make.restype = ctypes.c_void_p
        self._calls.unique.restype = ctypes.c_int64

    def _call(self, name: str, map_: int | None, keys: np.ndarray, *outputs: np.ndarray) -> int:
        first = () if map_ is None else (ctypes.c_void_p(map_),)
        pointers = [ctypes.c_void_p(each.ctypes.data) for each in outputs]
        size = ctypes.c_int64(len(keys))
        return getattr(self._calls, name)(*first, ctypes.c_void_p(keys.ctypes.data), size, *pointers)

    def filled(self, keys: np.ndarray) -> tuple[int, np.ndarray]:
        """A map that took the keys, to be released, and the rows they got."""
        map_, rows = self._calls.make(), np.empty(len(keys), np.int64)
        self._call("insert", map_, keys, rows)
        return map_, rows

    def find(self, map_: int, keys: np.ndarray) -> np.ndarray:
        rows = np.empty(len(keys), np.int64)
        self._call("find", map_, keys, rows)
        return rows

    def release(self, map_: int) -> None:
        self._calls.release(ctypes.c_void_p(map_))

    def unique(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        distinct, inverse, counts = (np.empty(len(keys), np.int64) for _ in range(3))
        count = self._call("unique", None, keys, distinct, inverse, counts)
        return distinct[:count], inverse, counts[:count]


def medians(contenders: dict[str, Rounds], rounds: int, least_bytes: int) -> dict[str, float]:
    """Median milliseconds of processor time of each contender."""
    seconds = by_turns(contenders, rounds, least_bytes)
    return {name: 1e3 * statistics.median(each) for name, each in seconds.items()}


def random_keys(count: int) -> np.ndarray:
    keys = np.unique(np.random.default_rng(3).integers(-(2**63), 2**63 - 1, count + 100))
    return np.random.default_rng(4).permutation(keys)[:count]


def fresh_keys(keys: np.ndarray, number: int) -> np.ndarray:
    return flipped(number, torch.from_numpy(keys))[0].numpy()


def inserts(maps: dict[str, CppMap], rounds: int) -> dict[str, float]:
    keys = random_keys(MAP_KEYS)

    def ours(keys):
        index = KeyIndex()
        rows = index.find_or_insert(torch.from_numpy(keys))[0]
        return rows, lambda some: index.find(torch.from_numpy(some)), lambda: None

    def theirs(keys, map_):
        full, rows = map_.filled(keys)
        return rows, lambda some: map_.find(full, some), lambda: map_.release(full)

    def rounds_of(call) -> Rounds:
        def given(number: int) -> Given:
            some = np.random.default_rng(number).integers(0, MAP_KEYS, QUESTIONS)

            def check(output, keys):
                rows, find, release = output
                assert np.array_equal(np.asarray(rows), np.arange(MAP_KEYS)), "wrong rows"
                assert np.array_equal(np.asarray(find(keys[some])), some), "it does not hold what it took"
                release()

            return Given(call, (fresh_keys(keys, number),), check)

        return given

    contenders = {"tritonrec": rounds_of(ours)}
    contenders |= {name: rounds_of(lambda keys, map_=map_: theirs(keys, map_)) for name, map_ in maps.items()}
    return medians(contenders, rounds, 24 * MAP_KEYS)  # keys in, rows out, keys into the map


def finds(maps: dict[str, CppMap], hit: bool, rounds: int) -> dict[str, float]:
    """A few keys are of the other kind, so that no answer is known beforehand."""
    every = random_keys(MAP_KEYS + QUESTIONS)
    keys, index = every[:MAP_KEYS], KeyIndex()
    index.find_or_insert(torch.from_numpy(keys))
    calls: Calls = {"tritonrec": lambda wanted: index.find(torch.from_numpy(wanted))}
    for name, map_ in maps.items():
        full = map_.filled(keys)[0]  # ends with the process
        calls[name] = lambda wanted, map_=map_, full=full: map_.find(full, wanted)

    def rounds_of(call) -> Rounds:
        def given(number: int) -> Given:
            random = np.random.default_rng(5 + number)
            hits = random.integers(0, MAP_KEYS, QUESTIONS)
            misses = random.permutation(QUESTIONS) + MAP_KEYS
            places, others = (hits, misses) if hit else (misses, hits)
            few = random.permutation(QUESTIONS)[:OTHERS]
            places[few] = others[few]

            def check(rows, _wanted):
                expected = np.where(places < MAP_KEYS, places, -1)
                assert np.array_equal(np.asarray(rows), expected), "wrong rows"

            return Given(call, (every[places],), check)

        return given

    return medians({name: rounds_of(call) for name, call in calls.items()}, rounds, 16 * QUESTIONS)


# How Polars and DuckDB want their keys, and the call.


def polars_call() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        import polars
    except ImportError as error:
        raise Skipped(str(error)) from None

    def call(frame):
        counted = frame.group_by("key", maintain_order=True).len()
        return counted["key"].to_numpy(), None, counted["len"].to_numpy()

    return lambda keys: polars.DataFrame({"key": keys}), call


def duckdb_call() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        import duckdb
    except ImportError as error:
        raise Skipped(str(error)) from None
    connection = duckdb.connect(config={"threads": 1})

    def registered(keys):
        connection.register("given", {"key": keys})
        return keys

    def call(_keys):
        counted = connection.execute("select key, count(*) as n from given group by key").fetchnumpy()
        return counted["key"], None, counted["n"]

    return registered, call


def uniques(
    maps: dict[str, CppMap], skipped: dict[str, str], keys: np.ndarray, rounds: int
) -> dict[str, float]:
    calls: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "tritonrec": (torch.from_numpy, ops.unique)
    }
    calls |= {name: (np.asarray, map_.unique) for name, map_ in maps.items()}
    for name, make in (("polars", polars_call), ("duckdb", duckdb_call)):
        try:
            calls[name] = make()
        except Skipped as error:
            skipped[name] = str(error)
    distinct_count = len(np.unique(keys))

    def rounds_of(name: str) -> Rounds:
        prepare, call = calls[name]

        def given(number: int) -> Given:
            fresh = fresh_keys(keys, number)
            expected, counts = np.unique(fresh, return_counts=True)

            def check(output, _given):
                distinct, inverse, number = (None if each is None else np.asarray(each) for each in output)
                order = np.argsort(distinct)
                assert np.array_equal(distinct[order], expected), "wrong keys"
                assert np.array_equal(number[order], counts), "wrong counts"
                assert inverse is None or np.array_equal(distinct[inverse], fresh), "wrong inverse"

            return Given(call, (prepare(fresh.copy()),), check)

        return given

    # keys in, the distinct keys with their counts out; not all give the inverse
    return medians({name: rounds_of(name) for name in calls}, rounds, 8 * len(keys) + 16 * distinct_count)


def fbgemm_table(pooling: str, weight: torch.Tensor):
    """A table of FBGEMM with the given weights and row-wise Adagrad, on the CPU."""
    sys.path.append(str(ROOT / "out" / "torchrec"))
    try:
        from fbgemm_gpu import split_embedding_configs as configs
        from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
    except ImportError as error:
        raise Skipped(str(error)) from None
    place = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
    table = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(*weight.shape, *place)], optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=RATE,
        eps=EPS, pooling_mode=training.PoolingMode[pooling],
    )  # fmt: skip
    table.split_embedding_weights()[0].copy_(weight)
    return table


def of_ids(
    calls: Calls,
    weight: torch.Tensor,
    exact: Callable[[torch.Tensor], torch.Tensor],
    check: Check,
    rounds: int,
) -> dict[str, float]:
    """Calls of the ids of a turn; `check` compares an output with ``exact(ids)``."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def rounds_of(call) -> Rounds:
        def given(number: int) -> Given:
            if number not in made:  # for all contenders of this turn
                made.clear()
                ids = zipf(LOOKUPS, TABLE, seed=number)
                made[number] = ids, exact(ids)
            ids, meant = made[number]
            return Given(call, (ids.clone(),), lambda got, _ids: check(got, meant))

        return given

    with torch.no_grad():
        ids = zipf(LOOKUPS, TABLE)
        least_bytes = rows_moved(weight, ids) + moved(exact(ids))
        return medians({name: rounds_of(call) for name, call in calls.items()}, rounds, least_bytes)


def same(got: torch.Tensor, meant: torch.Tensor) -> None:
    assert torch.equal(got, meant), "other rows"


def close(got: torch.Tensor, meant: torch.Tensor) -> None:
    torch.testing.assert_close(got, meant, rtol=1e-5, atol=1e-5)


def lookups(rounds: int) -> dict[str, float]:
    """Rows of ids, one by one."""
    weight = torch.randn(TABLE, DIM)
    table, offsets = fbgemm_table("NONE", weight), torch.arange(LOOKUPS + 1)
    calls: Calls = {
        "tritonrec": lambda ids: ops.gather_rows(weight, ids),
        "fbgemm": lambda ids: table(ids, offsets),
        "torch": lambda ids: torch.nn.functional.embedding(ids, weight),
    }
    return of_ids(calls, weight, lambda ids: weight[ids], same, rounds)


def pooled(rounds: int) -> dict[str, float]:
    """Sums of bags of eight rows, of which the table is read once and no row is written."""
    weight = torch.randn(TABLE, DIM)
    table, offsets = fbgemm_table("SUM", weight), torch.arange(0, LOOKUPS + 1, BAG)
    bags = torch.arange(LOOKUPS) // BAG
    calls: Calls = {
        "tritonrec": lambda ids: ops.segment_sum(weight, bags, LOOKUPS // BAG, source=ids),
        "fbgemm": lambda ids: table(ids, offsets),
        "torch": lambda ids: torch.nn.functional.embedding_bag(ids, weight, offsets[:-1], mode="sum"),
    }
    return of_ids(
        calls, weight, lambda ids: weight.double()[ids].view(-1, BAG, DIM).sum(1).float(), close, rounds
    )


class FusedUpdate:
    """The gradient of each looked-up row, summed by id, then one row-wise Adagrad update of each row."""

    def __init__(self, name: str, weight: torch.Tensor, ids: torch.Tensor):
        self.name, self.ids, self.weight = name, ids, weight.clone()
        self.state = torch.zeros(len(weight), 1)
        if name == "fbgemm":
            self.table = fbgemm_table("NONE", weight)
            self.weight = self.table.split_embedding_weights()[0]
            self.offsets = torch.arange(len(ids) + 1)

    def forward(self) -> torch.Tensor | None:
        """What comes before the clock starts."""
        return self.table(self.ids, self.offsets) if self.name == "fbgemm" else None

    def update(self, output: torch.Tensor | None, gradient: torch.Tensor) -> None:
        if output is not None:
            output.backward(gradient)
            return
        distinct, inverse, _ = ops.unique(self.ids)
        consistency = "batch" if self.name.endswith("exact") else "window"
        sums = ops.segment_sum(gradient, inverse, len(distinct), consistency=consistency)
        if consistency == "batch":
            sums = ops.from_fixed_point(sums)
        ops.sparse_rowwise_adagrad(self.weight, self.state, distinct, sums, RATE, EPS)


class ExactUpdate:
    """The same update in float64, turn by turn."""

    def __init__(self, weight: torch.Tensor, ids: torch.Tensor):
        self.ids, self.weight, self.state = ids, weight.double(), torch.zeros(len(weight), 1).double()
        self.number = -1

    def after(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """The weights after the update of a turn, which is made once."""
        if number > self.number:
            sums = torch.zeros_like(self.weight).index_add_(0, self.ids, gradient.double())
            self.state += sums.square().mean(1, keepdim=True)
            self.weight -= RATE * sums / (self.state.sqrt() + EPS)
            self.number = number
        return self.weight


def updates(rounds: int) -> dict[str, float]:
    weight, ids = torch.randn(TABLE, DIM), zipf(LOOKUPS, TABLE)
    names = "tritonrec", "fbgemm", "tritonrec, exact"
    exact = ExactUpdate(weight, ids)

    def rounds_of(side: FusedUpdate) -> Rounds:
        def given(number: int) -> Given:
            gradient = torch.randn(LOOKUPS, DIM, generator=torch.Generator().manual_seed(number)) * 0.1

            def check(_output, _forward, gradient):
                meant = exact.after(number, gradient)
                torch.testing.assert_close(side.weight.double(), meant, rtol=1e-3, atol=1e-4)

            return Given(side.update, (side.forward(), gradient), check, writes=(0,))

        return given

    contenders = {name: rounds_of(FusedUpdate(name, weight, ids)) for name in names}
    gradient_bytes = 4 * LOOKUPS * DIM
    return medians(contenders, rounds, gradient_bytes + 2 * rows_moved(weight, ids))


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--include", type=Path, action="append", default=[], help="a folder of C++ headers")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the report")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    skipped: dict[str, str] = {}
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        maps = {}
        for name in ("boost", "ankerl"):
            try:
                maps[name] = CppMap(name, Path(folder), arguments.include)
            except Skipped as error:
                skipped[name] = str(error)
        rounds = arguments.rounds
        rows[f"inserting {MAP_KEYS:,} keys into an empty map"] = inserts(maps, rounds)
        for asked in ("hits", "misses"):
            rows[f"{QUESTIONS:,} {asked} among {MAP_KEYS:,} keys"] = finds(maps, asked == "hits", rounds)
        for workload, keys in (
            ("1,000,000 Zipf keys", zipf(1_000_000, 10_000_000)),
            ("1,000,000 distinct keys", torch.from_numpy(random_keys(1_000_000))),
        ):
            rows[f"`unique`, {workload}"] = uniques(maps, skipped, keys.numpy(), rounds)
    for workload, measure in (
        (f"lookup, {LOOKUPS:,} Zipf rows of {TABLE:,}, dim {DIM}", lookups),
        (f"pooled sums of {BAG} rows, {LOOKUPS:,} ids", pooled),
        (f"gradients of {LOOKUPS:,} rows into a row-wise Adagrad update", updates),
    ):
        try:
            rows[workload] = measure(rounds)
        except Skipped as error:
            skipped["fbgemm"] = str(error)
    for workload, times in rows.items():
        peers = ", ".join(f"{name} {each / times['tritonrec']:.2f}" for name, each in times.items())
        print(f"{workload}: {times['tritonrec']:.3g} ms; time over ours: {peers}")
    for name, reason in skipped.items():
        print(f"{name} skipped: {reason}")
    if arguments.json:
        report = {
            "environment": {
                **environment_of_times(),
                "versions": {
                    name: version(name)
                    for name in ("tritonrec", "torch", "numba", "polars", "duckdb", "fbgemm-gpu-cpu")
                },
            },
            "milliseconds": rows, "skipped": skipped,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
