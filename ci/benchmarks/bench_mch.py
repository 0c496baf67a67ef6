"""The keys of a dynamic table beside a fixed table that remaps ids (TorchRec's MCH; MTGRBoost, Table 3).

    python ci/benchmarks/bench_mch.py --json out/mch.json

The peer is TorchRec's `MCHManagedCollisionModule` (`bash ci/benchmarks/torchrec.sh`): a sorted array of
the ids it knows, at most `capacity`, binary search, all other ids on one shared row, and every few batches
the ids of the highest counts stay (LFU). Ids follow Zipf's law, and some of them, drawn alike, are
replaced by new ones with each batch. Both get the same batches by turns, on one thread; times are CPU
seconds, from ids to row numbers, with inserts, counts and evictions. Every row number is checked after its
time is taken (`honest`): ours is the place of the id's first occurrence among the distinct ids of the
stream; the peer's are equal for equal ids and differ for others, but for its one shared row, from one
eviction to the next. Every round has another stream. Bytes are of the structure of keys, and of rows of
`dim` float32: a fixed table has all of its rows at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from frame import options_of, record
from honest import Given, Round, refuse_impossible
from torchrec_peer import environment_beside_torchrec, find_torchrec

from tritonrec.embedding.key_index import KeyIndex

DIM = 64


class Managed:
    """TorchRec's own: `capacity` rows, and behind them one that all other ids share; LFU."""

    def __init__(self, capacity: int, every: int):
        from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

        policy = LFU_EvictionPolicy()
        self.module = MCHManagedCollisionModule(capacity + 1, torch.device("cpu"), policy, every)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Row numbers of the ids; those without a row of their own have `capacity`."""
        from torchrec import JaggedTensor

        lengths = torch.ones(len(ids), dtype=torch.int64)
        return self.module({"item": JaggedTensor(ids, lengths=lengths)})["item"].values()

    @property
    def nbytes(self) -> int:
        """Of ids, rows, counts, and the ids since the last eviction."""
        return sum(each.nbytes for each in (*self.module.buffers(), self.module._history_accumulator))


def batches(count: int, size: int, items: int, drift: int, seed: int) -> list[np.ndarray]:
    """Zipf ids; with each batch `drift` popularity ranks, drawn alike, get ids that were never there."""
    random = np.random.default_rng(seed)
    ids = np.arange(items, dtype=np.int64)
    weights = np.arange(1, items + 1) ** -1.05
    ends = np.cumsum(weights / weights.sum())
    found = []
    for number in range(count):
        ids[random.permutation(items)[:drift]] = items + number * drift + np.arange(drift)
        found.append(ids[np.searchsorted(ends, random.random(size))] * np.int64(0x9E3779B97F4A7C1))
    return found


def first_places(stream: list[np.ndarray]) -> list[np.ndarray]:
    """Of each id the place of its first occurrence among the distinct ids of the stream."""
    _, first, inverse = np.unique(np.concatenate(stream), return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    return np.split(place[inverse], np.cumsum([len(ids) for ids in stream])[:-1])


class Owners:
    """Which id has a row of the peer, between two evictions."""

    def __init__(self, capacity: int):
        self.ids, self.taken = np.zeros(capacity, np.int64), np.zeros(capacity, bool)

    def check(self, rows: np.ndarray, ids: np.ndarray) -> None:
        distinct, place, inverse = np.unique(ids, return_index=True, return_inverse=True)
        own = rows[place]
        assert np.array_equal(own[inverse], rows), "one id has two rows"
        distinct, own = distinct[own < len(self.ids)], own[own < len(self.ids)]
        assert len(np.unique(own)) == len(own), "two ids share a row"
        assert (self.ids[own] == distinct)[self.taken[own]].all(), "a row went to another id"
        self.ids[own], self.taken[own] = distinct, True


def measure(capacity: int, stream: list[np.ndarray], every: int, made: Callable[..., Any] = Managed) -> dict:
    """Both tables over the stream; the peer is `made` of capacity and batches between two evictions."""
    ours, peer = KeyIndex(), made(capacity, every)
    seconds: dict[str, list[float]] = {"ours": [], "peer": []}
    shared, seen, owners = 0, 0, Owners(capacity)

    def find_or_insert(ids):
        return ours.find_or_insert(ids)[0]

    for number, (ids, places) in enumerate(zip(stream, first_places(stream), strict=True)):
        if (number + 1) % every == 0:  # this call evicts
            owners = Owners(capacity)

        def check_ours(handles, _ids, places=places):
            assert np.array_equal(handles.numpy(), places), "not the row of the first occurrence"

        def check_peer(rows, ids, owners=owners):
            nonlocal shared
            owners.check(rows.numpy(), ids.numpy())
            shared += int((rows == capacity).sum())

        given = {
            "ours": Given(find_or_insert, (torch.from_numpy(ids.copy()),), check_ours),
            "peer": Given(peer, (torch.from_numpy(ids.copy()),), check_peer),
        }
        for name, each in given.items():
            one = Round(each, number)
            began = time.process_time()
            one.run()
            seconds[name].append(time.process_time() - began)
            one.finish()
        seen += len(ids)
    for name, each in seconds.items():
        refuse_impossible(name, min(each), 16 * min(map(len, stream)))  # ids in, rows out
    total = {name: sum(each) for name, each in seconds.items()}
    return {
        "capacity": capacity,
        "ids": seen,
        "distinct": len(ours),
        "ours_million_per_second": seen / total["ours"] / 1e6,
        "peer_million_per_second": seen / total["peer"] / 1e6,
        "ratio": total["peer"] / total["ours"],
        "on_the_shared_row": shared / seen,
        "ours_bytes": ours.nbytes + len(ours) * DIM * 4,
        "peer_bytes": peer.nbytes + capacity * DIM * 4,
    }


def main() -> None:
    args = options_of(
        __doc__, batches=40, size=32_768, capacities=(50_000, 200_000, 800_000), items=500_000, rounds=3,
        drift={"default": 1_000, "help": "items replaced with each batch"},
        every={"default": 10, "help": "batches between two evictions of the peer"},
    )  # fmt: skip
    find_torchrec()
    torch.set_num_threads(1)
    streams = [
        batches(args.batches, args.size, args.items, args.drift, seed=1 + number)
        for number in range(args.rounds)
    ]
    measure(1000, streams[0][:2], 1)  # compiles
    rows = []
    for capacity in args.capacities:
        every = [measure(capacity, stream, args.every) for stream in streams]
        row = {**every[0], "ratios": [each["ratio"] for each in every]}
        for name in ("ratio", "ours_million_per_second", "peer_million_per_second"):
            row[name] = statistics.median(each[name] for each in every)
        rows.append(row)
        print(
            f"capacity {capacity:9,}: {row['ours_million_per_second']:.1f} and "
            f"{row['peer_million_per_second']:.1f} M ids/s ({row['ratio']:.2f}x), "
            f"{row['on_the_shared_row']:.1%} of the peer's ids on the shared row, "
            f"{row['ours_bytes'] / 1e6:.0f} and {row['peer_bytes'] / 1e6:.0f} MB",
            flush=True,
        )
    record(args, environment_beside_torchrec(), rows=rows)


if __name__ == "__main__":
    main()
