"""Ranks as threads of one process, and states that can be compared bit by bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tritonrec import ops
from tritonrec.checkpoint import Checkpoint, Saved, load, save

Table = dict[str, torch.Tensor]

EXTREMES = [-(2**63), -(2**63) + 1, -1, 0, 1, 2**31, 2**32, 2**63 - 1]


class ThreadGather:
    """The `Gather` of threads that stand for ranks; a rank that leaves breaks it for the others."""

    def __init__(self, world_size: int):
        self.texts = [""] * world_size
        self.barrier = threading.Barrier(world_size)

    def gather(self, rank: int) -> Callable[[str], list[str]]:
        def exchange(text: str) -> list[str]:
            self.texts[rank] = text
            self.barrier.wait(20)
            texts = list(self.texts)
            self.barrier.wait(20)
            return texts

        return exchange


def on_ranks(world_size: int, work: Callable[[int, Callable[[str], list[str]]], Any]) -> list[Any]:
    """``work(rank, gather)`` on all ranks at once: for each its result, or the exception it raised."""
    group = ThreadGather(world_size)

    def run(rank: int) -> Any:
        try:
            return work(rank, group.gather(rank))
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))


def part_of(table: Table, rank: int, world_size: int) -> Table:
    mine = ops.owner_of(table["keys"], world_size) == rank
    return {column: values[mine] for column, values in table.items()}


def save_on(world_size: int, directory: Path, step: int, tables: dict[str, Table], **options) -> list[Saved]:
    """Save `tables` with every rank giving its part; the same of `erased`."""
    options = {"dense": {}, "meta": {}} | options
    erased = options.pop("erased", None)

    def work(rank, gather):
        own = {name: part_of(table, rank, world_size) for name, table in tables.items()}
        gone = {} if erased is None else {"erased": {}}
        for name, keys in (erased or {}).items():
            gone["erased"][name] = keys[ops.owner_of(keys, world_size) == rank]
        return save(
            directory, step, tables=own, rank=rank, world_size=world_size, gather=gather, **gone, **options
        )

    saved = on_ranks(world_size, work)
    for result in saved:
        if isinstance(result, Exception):
            raise result
    return saved


def load_on(world_size: int, directory: Path, **options) -> list[Checkpoint]:
    return [load(directory, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def whole(checkpoints: list[Checkpoint], name: str) -> Table:
    """The table that the ranks hold together, keys ascending, after a check that each holds its own."""
    for rank, checkpoint in enumerate(checkpoints):
        keys = checkpoint.tables[name]["keys"]
        assert bool((ops.owner_of(keys, len(checkpoints)) == rank).all())
        assert keys.tolist() == sorted(keys.tolist())
    columns = checkpoints[0].tables[name]
    joined = {c: torch.cat([checkpoint.tables[name][c] for checkpoint in checkpoints]) for c in columns}
    order = torch.argsort(joined["keys"])
    return {column: values[order] for column, values in joined.items()}


def random_table(seed: int, rows: int, width: int = 3, extremes: bool = True) -> Table:
    """Distinct keys of both signs in no order, with columns of three dtypes."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    keys[::3] >>= 50
    keys = torch.unique(torch.cat([keys, torch.tensor(EXTREMES)]) if extremes else keys)
    keys = keys[torch.randperm(len(keys), generator=generator)][:rows]
    return {
        "keys": keys,
        "rows": torch.randn(len(keys), width, generator=generator),
        "score": torch.randint(0, 2**40, (len(keys),), generator=generator),
        "heat": torch.randint(0, 256, (len(keys),), generator=generator).to(torch.uint8),
    }


def ascending(table: Table) -> Table:
    order = torch.argsort(table["keys"])
    return {column: values[order] for column, values in table.items()}


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(bits(left[name]) == bits(right[name]) for name in left)
