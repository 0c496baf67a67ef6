"""State of all ranks together: counts, the digest, tables, the trace."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ...checkpoint.rows import Rows, TensorRows, close_rows
from ...distributed import Communicator, Communicators
from ...embedding import HashTableCollection, RowOptimizer, TablePolicy
from ...files.places import place_of
from ...pipeline import RowsOfRanks
from ...trace import save_joined

PART_BYTES = 8 << 20
"""Of rows that are gathered at a time; there are a few copies of them."""


def totals(communicator: Communicator, counts: dict[str, int]) -> dict[str, int]:
    """The counts of all its ranks together."""
    values = communicator.all_reduce(torch.tensor([*counts.values()], dtype=torch.int64), "counts")
    return dict(zip(counts, values.tolist(), strict=True))


def table_totals(communicators: Communicators, tables: HashTableCollection) -> dict[str, int]:
    """Rows, bytes and counts of the tables of all ranks."""
    sums: Counter[str] = Counter()
    for group in tables.groups:
        table = group.table
        sums.update({"rows": len(table), **vars(table.counters), **table.memory()})
        sums["value_bytes"] += 4 * table.row_width * len(table) - table.memory()["saved_by_fp16"]
    return totals(communicators.shard_control, sums)


def _barrier(communicators: Communicators) -> None:
    communicators.control.all_reduce(torch.zeros(1, dtype=torch.float32), "barrier")


def save_trace(communicators: Communicators, recorder, path: str | Path) -> None:
    """Write what the recorders of all ranks hold to one file; collective."""
    parts = [f"{path}.rank{rank}" for rank in range(communicators.world_size)]
    recorder.save(parts[communicators.rank])
    _barrier(communicators)
    if communicators.rank == 0:
        save_joined(parts, path)
        for part in parts:
            place_of(part).unlink()


def state_digest(
    communicators: Communicators, tables: HashTableCollection, dense: dict[str, torch.Tensor]
) -> str:
    """SHA-256 over dense parameters, keys and rows with states, independent of the sharding. Collective.

    One rank computes it: rows are sent once, and not to every rank. A rank whose dense parameters are others
    than that one's has another digest.
    """
    digest = hashlib.sha256()
    for name in sorted(dense):
        digest.update(name.encode())
        _add(digest, dense[name])
    of_dense = digest.hexdigest()
    over = communicators.shard_control
    for name, ids, parts in rows_of_all(over, tables, to_all=False):
        digest.update(name.encode())
        _add(digest, ids)
        for rows in parts:
            _add(digest, rows)
    first, whole = over.all_gather_texts(f"{of_dense} {digest.hexdigest()}")[0].split()
    return whole if of_dense == first else hashlib.sha256(f"{of_dense} {whole}".encode()).hexdigest()


def _add(digest: hashlib._Hash, values: torch.Tensor) -> None:
    digest.update(values.cpu().contiguous().numpy().data)


def rows_of_all(
    over: Communicator, tables: HashTableCollection, to_all: bool = True
) -> Iterator[tuple[str, torch.Tensor, Iterator[torch.Tensor]]]:
    """Logical tables, ids of all ranks (n,) int64, ascending, and their rows in parts of `PART_BYTES`.

    Rows (k, row_width) are in host memory. Collective, and so is each part: take all of a table before the
    next one. Unless `to_all` the first of the ranks alone gets rows, and others none.
    """
    ids_here: dict[str, torch.Tensor] = {}
    for group in tables.groups:
        members, ids = group.layout.unpack(group.table.keys().cpu())
        ids_here |= {name: ids[members == member] for member, name in enumerate(group.layout.names)}
    snapshot = tables.snapshot()  # which reads a table on disk in the order of its file
    try:
        for name, own in sorted(ids_here.items()):
            rows, ids = snapshot[name], torch.cat(over.all_gather(own)).sort()[0]
            yield name, ids, _parts(over, TensorRows(rows) if isinstance(rows, dict) else rows, ids, to_all)
    finally:
        close_rows(snapshot)


def _parts(over: Communicator, rows: Rows, ids: torch.Tensor, to_all: bool) -> Iterator[torch.Tensor]:
    firsts = ids[:: max(1, PART_BYTES // (4 * rows.like["rows"].shape[1]))].numpy()

    def sort(some: torch.Tensor) -> tuple[np.ndarray, list[int]]:
        part = np.searchsorted(firsts, some.numpy(), side="right") - 1
        return part.argsort(kind="stable"), [0, *np.bincount(part, minlength=len(firsts)).cumsum().tolist()]

    def gathered(values: torch.Tensor) -> torch.Tensor:
        if to_all:
            return torch.cat(over.all_gather(values))
        return over.all_to_all_counted(values, [len(values)] + [0] * (over.world_size - 1))

    rows.arrange(sort)
    for part in range(len(firsts)):
        own = rows.read(part, rows.keys(part).numpy().argsort())
        order = gathered(own["keys"]).argsort()
        yield gathered(own["rows"])[order]


def whole_tables(rows: RowsOfRanks) -> HashTableCollection:
    """Every rank's weights in tables of one process, in host memory, without policies. Collective."""
    features = [
        replace(feature, policy=TablePolicy(), optimizer=None, placement=None)
        for feature in rows.tables.features.values()
    ]
    whole = HashTableCollection(features, RowOptimizer("sgd"), merge=False, seed=rows.tables.seed)
    for name, ids, parts in rows_of_all(rows.over, rows.tables):
        start = 0
        for values in parts:
            end = start + len(values)
            whole.load(name, ids[start:end], values[:, : rows.tables.dim_of(name)])
            start = end
    return whole
