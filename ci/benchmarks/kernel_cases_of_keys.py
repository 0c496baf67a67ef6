"""Cases of `bench_kernels` on keys: dedup, intersection, routing, hash tables."""

from __future__ import annotations

import cpp_maps
import numpy as np
import pandas as pd
import torch
from kernel_cases import Case, case, moved, randperm, same, where_installed, zipf

from tritonrec import ops

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Ids times this are distinct, and neither their size nor their bits follow their popularity."""


def random_keys(count: int, seed: int) -> torch.Tensor:
    """Distinct keys from all over the range."""
    return (randperm(2 * count, seed)[:count] + 1) * GOLDEN


@case(
    "torch_unique", "numpy_unique", "pandas_factorize", *cpp_maps.NAMES,
    workloads={
        "zipf_1m": (1_000_000, 10_000_000, True), "distinct_1m": (1_000_000, 1_000_000, False),
        "micro_batch_50k": (50_000, 10_000_000, True),
    },
)  # fmt: skip
def unique(device, seed, count, catalogue, repeated):
    """numpy and torch sort; pandas hashes, and counts in a second call, which is timed with it."""
    keys = (zipf(count, catalogue, seed=seed) * GOLDEN if repeated else random_keys(count, seed)).to(device)
    expected = torch.unique(keys, return_counts=True)

    def by_numpy(keys):
        return tuple(map(torch.from_numpy, np.unique(keys.numpy(), return_inverse=True, return_counts=True)))

    def by_pandas(keys):
        inverse, distinct = pd.factorize(keys.numpy())
        counts = np.bincount(inverse, minlength=len(distinct))
        return tuple(map(torch.from_numpy, (distinct, inverse, counts)))

    def by_map(name):
        cpp_maps.library(name)
        return {name: lambda keys: tuple(map(torch.from_numpy, cpp_maps.unique(name, keys.numpy())))}

    def check(got, keys):
        distinct, inverse, counts = got
        order = torch.argsort(distinct)
        assert torch.equal(distinct[inverse], keys)
        assert torch.equal(distinct[order], expected[0]) and torch.equal(counts[order], expected[1])

    calls = {
        "tritonrec": ops.unique,
        "torch_unique": lambda keys: torch.unique(keys, return_inverse=True, return_counts=True),
    }
    if device.type == "cpu":
        calls |= {"numpy_unique": by_numpy, "pandas_factorize": by_pandas}
        for name in cpp_maps.NAMES:
            calls |= where_installed(lambda name=name: by_map(name))
    workload = f"{count:,} keys, {len(expected[0]):,} distinct"
    return Case(workload, (keys,), calls, check, moved(keys, keys, *expected))


@case(
    "numpy_intersect1d", "torch_isin", "torch_searchsorted", "python_dict",
    workloads={"100k_half": (100_000,), "10k_half": (10_000,)},
)  # fmt: skip
def intersect(device, seed, count):
    """Distinct keys, half of each buffer in the other; positions in both, peers in an order of their own."""
    keys = random_keys(2 * count, seed).to(device)
    left, right = keys[:count].clone(), keys[count // 2 : count // 2 + count].clone()

    def by_numpy(left, right):
        _, *found = np.intersect1d(left.numpy(), right.numpy(), assume_unique=True, return_indices=True)
        return tuple(map(torch.from_numpy, found))

    def by_isin(left, right):
        """isin on either side, then the matches of both sides brought together by sorting them."""
        of_left = torch.isin(left, right, assume_unique=True).nonzero().flatten()
        of_right = torch.isin(right, left, assume_unique=True).nonzero().flatten()
        return of_left[torch.argsort(left[of_left])], of_right[torch.argsort(right[of_right])]

    def by_sort(left, right):
        ascending, order = torch.sort(right)
        place = torch.searchsorted(ascending, left).clamp_(max=len(right) - 1)
        positions = (ascending[place] == left).nonzero().flatten()
        return positions, order[place[positions]]

    def by_dict(left, right):
        position_of = {key: position for position, key in enumerate(right.tolist())}
        matched = torch.tensor([position_of.get(key, -1) for key in left.tolist()])
        positions = (matched >= 0).nonzero().flatten()
        return positions, matched[positions]

    def check(got, left, right):
        assert torch.equal(left[got[0]], right[got[1]])
        assert torch.equal(got[0].sort().values, torch.arange(count // 2, count, device=device))

    calls = {"tritonrec": ops.intersect, "torch_isin": by_isin, "torch_searchsorted": by_sort}
    if device.type == "cpu":
        calls |= {"numpy_intersect1d": by_numpy, "python_dict": by_dict}
    workload = f"{count:,} and {count:,} keys, {count // 2:,} common"
    return Case(workload, (left, right), calls, check, moved(left, right) + 8 * count)


def murmur_torch(keys: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser in int64 arithmetic, whose products wrap as unsigned ones do."""
    h = keys
    for factor in (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64):
        h = (h ^ ((h >> 33) & 0x7FFFFFFF)) * factor
    return h ^ ((h >> 33) & 0x7FFFFFFF)


def owners_torch(keys: torch.Tensor, world_size: int) -> torch.Tensor:
    return (((murmur_torch(keys) >> 32) & 0xFFFFFFFF) * world_size) >> 32


@case("torch_stable_sort")
def bucketize(device, seed):
    keys = zipf(200_000, 1_000_000, seed=seed).to(device)
    owners = ops.owner_of(keys.cpu(), 8, impl="reference").to(device)
    order, counts = torch.sort(owners, stable=True).indices, torch.bincount(owners, minlength=8)

    def by_sort(keys):
        rank = owners_torch(keys, 8)
        return torch.sort(rank, stable=True).indices, torch.bincount(rank, minlength=8)

    def check(got, keys):
        assert torch.equal(got[0], order) and torch.equal(got[1], counts)

    calls = {"tritonrec": lambda keys: ops.bucketize(keys, 8), "torch_stable_sort": by_sort}
    return Case("200,000 Zipf keys to 8 ranks", (keys,), calls, check, moved(keys, order, counts))


@case()
def murmur(device, seed):
    keys = zipf(200_000, 1_000_000, seed=seed).to(device)
    exact = ops.owner_of(keys.cpu(), 8, impl="reference").to(device)
    calls = {"tritonrec": lambda keys: ops.owner_of(keys, 8), "torch": lambda keys: owners_torch(keys, 8)}
    return Case("owners of 200,000 keys", (keys,), calls, same(exact), moved(keys, exact))


def empty_table(slots: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.zeros(slots, dtype=torch.int64, device=device)
    return keys, torch.full((slots,), -1, dtype=torch.int32, device=device)


@case(
    "torch_searchsorted", "pandas_index", "python_dict", *cpp_maps.NAMES,
    workloads={"1m_slots": (1 << 20, 1 << 18), "64k_slots": (1 << 16, 1 << 18)},
)  # fmt: skip
def hash_find(device, seed, slots, lookups):
    """Half of the keys are absent; the table holds three quarters of its slots."""
    count = 3 * slots // 4
    every = random_keys(count + lookups // 2, 0).to(device)
    keys, table = every[:count], empty_table(slots, device)
    rows, _ = ops.hash_insert(*table, keys, 0)
    generator = torch.Generator().manual_seed(seed)
    present = torch.randint(count, (lookups // 2,), generator=generator)
    places = torch.cat([present, torch.arange(count, count + lookups // 2)])
    places = places[torch.randperm(lookups, generator=generator)].to(device)
    query = every[places]
    exact = torch.where(places < count, rows[places.clamp(max=count - 1)], -1)
    ascending, order = torch.sort(keys)

    def by_search(_keys, _rows, query):
        place = torch.searchsorted(ascending, query).clamp_(max=count - 1)
        return torch.where(ascending[place] == query, rows[order[place]], -1)

    def by_map(name):
        table = cpp_maps.CppMap(name)
        table.insert(keys.numpy())
        return {name: lambda _keys, _rows, query: table.find(query.numpy())}

    calls = {"tritonrec": ops.hash_find, "torch_searchsorted": by_search}
    prepare = {}
    if device.type == "cpu":
        index = pd.Index(keys.numpy())
        row_of = {key: row for row, key in enumerate(keys.tolist())}
        calls |= {
            "pandas_index": lambda _keys, _rows, query: index.get_indexer(query.numpy()),
            "python_dict": lambda _keys, _rows, query: [row_of.get(key, -1) for key in query],
        }
        prepare["python_dict"] = lambda keys, rows, query: (keys, rows, query.tolist())
        for name in cpp_maps.NAMES:
            calls |= where_installed(lambda name=name: by_map(name))
    workload = f"{lookups:,} lookups, half absent, {count:,} keys, load 0.75"
    return Case(workload, (*table, query), calls, same(exact), moved(query, exact), prepare=prepare)


@case("pandas_index", "python_dict", workloads={"final_size": (True,), "growing": (False,)})
def hash_insert(device, seed, final_size):
    """A million new keys, at once or in batches of 64k; pandas' table always has its final size."""
    count, batch = 1_000_000, 1 << 16
    keys = random_keys(count, seed).to(device)
    some = randperm(count, seed)[:batch].to(device)

    def ours(keys):
        table = empty_table(1 << 21 if final_size else 8, device)
        rows, taken = [], 0
        for part in keys.split(count if final_size else batch):
            while 4 * (taken + len(part)) > 3 * len(table[0]):
                table = ops.hash_grow(*table)
            rows.append(ops.hash_insert(*table, part, taken)[0])
            taken += len(part)
        return torch.cat(rows), lambda wanted: ops.hash_find(*table, wanted)

    def by_pandas(keys):
        index = pd.Index(keys.numpy())
        return index.get_indexer(keys.numpy()), lambda wanted: index.get_indexer(wanted.cpu().numpy())

    def by_dict(keys):
        table: dict[int, int] = {}
        rows = [table.setdefault(key, len(table)) for key in keys]
        return rows, lambda wanted: [table.get(key, -1) for key in wanted.tolist()]

    def check(got, _keys):
        rows, find = got
        rows = torch.as_tensor(rows).long()
        if device.type == "cpu":
            assert torch.equal(rows, torch.arange(count)), "wrong rows"
        assert torch.equal(torch.as_tensor(find(keys[some])).long(), rows[some]), "it lost what it took"

    calls, prepare = {"tritonrec": ours}, {}
    if device.type == "cpu":
        calls |= {"pandas_index": by_pandas, "python_dict": by_dict}
        prepare["python_dict"] = lambda keys: (keys.tolist(),)
    size = "a table of the final size" if final_size else "a table grown from eight slots"
    workload = f"{count:,} new keys into {size}"
    return Case(workload, (keys,), calls, check, 24 * count, prepare=prepare)
