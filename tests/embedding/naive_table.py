"""A second implementation of a table and its policies: dictionaries, loops over keys, one rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from tritonrec.embedding import TablePolicy


def rounded(row: np.ndarray, dim: int) -> np.ndarray:
    """Weights to float16, state to bfloat16: its 16 low bits go, ties to even."""
    bits = row[dim:].view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
    return np.concatenate(
        [row[:dim].astype(np.float16).astype(np.float32), bits.astype(np.uint32).view(np.float32)]
    )


@dataclass
class Entry:
    row: np.ndarray
    score: int
    uses: int = 0
    half: bool = False


class NaiveTable:
    """The rules of `DynamicTable`, key by key.

    Args:
        unpack: key -> (member, id). initial: key -> row. width: of a row, for sizes.
    """

    def __init__(
        self,
        policy: TablePolicy,
        dim: int,
        unpack: Callable[[int], tuple[int, int]],
        initial: Callable[[int], np.ndarray],
        width: int = 0,
    ):
        self.policy, self.dim, self.unpack, self.initial = policy, dim, unpack, initial
        self.width = width
        self._size = int(policy.precision.threshold) if policy.precision else 0  # a size is bytes here
        self.entries: dict[int, Entry] = {}
        self.waiting: dict[int, tuple[int, int]] = {}  # requests, and the step of the last one
        self.recent: set[int] = set()
        self.counters = dict.fromkeys(("found", "inserted", "rejected", "evicted", "promoted", "demoted"), 0)

    def lookup(self, keys: list[int], step: int) -> None:
        eviction, tiers = self.policy.eviction, self.policy.precision
        pinned, sizes = self.recent | set(keys), self._sizes()
        if eviction and step % eviction.every == 0:
            for key in self._victims(pinned, step):
                del self.entries[key]
                self.counters["evicted"] += 1
        if tiers and step % tiers.every == 0:
            for entry in self.entries.values():
                entry.uses //= 2
            free = [key for key in self.entries if key not in pinned]
            for key in self._least_used(free, sizes) if self._by_size else filter(self.low, free):
                entry = self.entries[key]
                if not entry.half:
                    entry.row, entry.half = rounded(entry.row, self.dim), True
                    self.counters["demoted"] += 1
        if step % self.policy.admission_window == 0:
            kept = step - self.policy.admission_window
            self.waiting = {key: (count, last) for key, (count, last) in self.waiting.items() if last >= kept}
        for key in keys:
            self._use(key, step)
        self.recent = {key for key in keys if key in self.entries}

    def _sizes(self) -> Counter[int]:
        return Counter(self.unpack(key)[0] for key in self.entries)

    @property
    def _by_size(self) -> bool:
        return self.policy.precision is not None and isinstance(self.policy.precision.threshold, str)

    def _least_used(self, free: list[int], sizes: Counter[int]) -> list[int]:
        """Of each table that has outgrown its size those that leave it there, one more at a time."""
        found = []
        for member, rows in sizes.items():
            mine = [key for key in free if self.unpack(key)[0] == member]
            mine.sort(key=lambda key: (self.entries[key].uses, self.unpack(key)[1]))
            low = 0
            while low < rows and 48 * rows + self.width * (4 * (rows - low) + 2 * low) > self._size:
                low += 1
            found += mine[:low]
        return found

    def _victims(self, pinned: set[int], step: int) -> list[int]:
        eviction = self.policy.eviction
        assert eviction is not None
        if eviction.policy != "lfu":
            for entry in self.entries.values():
                entry.score = step if entry.score < 0 else entry.score
        free = [key for key in sorted(self.entries) if key not in pinned]
        if eviction.ttl is not None:
            return [key for key in free if step - self.entries[key].score > eviction.ttl]
        assert eviction.capacity is not None
        victims = []
        for member in {self.unpack(key)[0] for key in self.entries}:
            mine = [key for key in free if self.unpack(key)[0] == member]
            mine.sort(key=lambda key: (self.entries[key].score, self.unpack(key)[1]))
            size = sum(self.unpack(key)[0] == member for key in self.entries)
            victims += mine[: max(0, size - eviction.capacity)]
        return victims

    def _use(self, key: int, step: int) -> None:
        if key in self.entries:
            self.counters["found"] += 1
        else:
            requests = self.waiting.get(key, (0, 0))[0] + 1
            self.waiting[key] = requests, step
            if requests < self.policy.admission:
                self.counters["rejected"] += 1
                return
            self._add(key)
            self.counters["inserted"] += 1
        entry = self.entries[key]
        entry.score = entry.score + 1 if self._lfu else step
        entry.uses = min(255, entry.uses + 1)

    @property
    def _lfu(self) -> bool:
        return self.policy.eviction is not None and self.policy.eviction.policy == "lfu"

    def _add(self, key: int) -> None:
        self.waiting.pop(key, None)
        self.entries[key] = Entry(self.initial(key), 0 if self._lfu else -1)

    def low(self, key: int) -> bool:
        """Whether the row is to be stored in 16 bits."""
        tiers = self.policy.precision
        if tiers is None or self._by_size or key not in self.entries:
            return False
        return self.entries[key].uses < tiers.threshold

    def row(self, key: int) -> np.ndarray:
        return self.entries[key].row if key in self.entries else self.initial(key)

    def write(self, key: int, row: np.ndarray, loaded: bool = False) -> None:
        entry = self.entries[key]
        half = self.low(key) or (loaded and self._by_size)
        half = half and rounded(row, self.dim).tobytes() == row.tobytes()
        self.counters["demoted"] += half and not entry.half
        self.counters["promoted"] += entry.half and not half
        entry.row, entry.half = row, half

    def load(self, key: int, row: np.ndarray) -> None:
        self.waiting.pop(key, None)
        if key not in self.entries:
            self._add(key)
        self.write(key, row, loaded=True)

    def erase(self, key: int) -> bool:
        self.waiting.pop(key, None)
        self.recent.discard(key)
        return self.entries.pop(key, None) is not None

    def restart(self) -> None:
        """A restarted table has done nothing yet, and stores each row in the form that holds it."""
        self.counters = dict.fromkeys(self.counters, 0)
        self.recent &= self.entries.keys()
        for key, entry in self.entries.items():
            half = self.low(key) or self._by_size
            entry.half = half and rounded(entry.row, self.dim).tobytes() == entry.row.tobytes()

    def state(self) -> dict[str, dict[int, tuple]]:
        """By group and key: score, uses, whether recent, row's bytes; or requests and the last step."""
        return {
            "rows": {
                key: (entry.score, entry.uses, key in self.recent, entry.row.tobytes())
                for key, entry in self.entries.items()
            },
            "candidates": dict(self.waiting),
        }


class Ranks:
    """Calls a function once for each of several ranks, at the same time, with a real sum over them."""

    def __init__(self, world_size: int):
        self.world_size = world_size
        self._pool = ThreadPoolExecutor(world_size)
        self._barrier = threading.Barrier(world_size)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * world_size
        self.sums = 0  # how many were made

    def __call__(self, function: Callable) -> list:
        """``[function(rank, all_reduce) for each rank]``; all_reduce is None for a single one."""
        if self.world_size == 1:
            return [function(0, None)]

        def run(rank: int):
            try:
                return function(rank, lambda part: self._sum(rank, part))
            except BaseException:
                self._barrier.abort()
                raise

        futures = [self._pool.submit(run, rank) for rank in range(self.world_size)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]

    def _sum(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = part.clone()
        self.sums += rank == 0
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        return part.copy_(total)  # in place, as `Communicator.all_reduce`

    def close(self) -> None:
        self._pool.shutdown()
