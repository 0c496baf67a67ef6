"""State of all ranks together: counts, the digest, tables, the trace."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ...distributed import Communicator, Communicators
from ...embedding import HashTableCollection, RowOptimizer, TablePolicy
from ...files.places import place_of
from ...pipeline import RowsOfRanks
from ...trace import save_joined

PART_ROWS = 1 << 16
"""Rows that are gathered at a time."""


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
    for name, (own, ids) in sorted(whole_ids(over, tables).items()):
        digest.update(name.encode())
        _add(digest, ids)
        for _, rows in rows_in_parts(over, tables, name, own, ids, to_all=False):
            _add(digest, rows)
    first, whole = over.all_gather_texts(f"{of_dense} {digest.hexdigest()}")[0].split()
    return whole if of_dense == first else hashlib.sha256(f"{of_dense} {whole}".encode()).hexdigest()


def _add(digest: hashlib._Hash, values: torch.Tensor) -> None:
    digest.update(values.cpu().contiguous().numpy().data)


def whole_ids(
    over: Communicator, tables: HashTableCollection
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By logical table this rank's ids, and those of all ranks, (n,) int64 ascending. Collective."""
    whole = {}
    for group in tables.groups:
        members, ids = group.layout.unpack(group.table.keys().cpu())
        for member, name in enumerate(group.layout.names):
            own = ids[members == member]
            whole[name] = own, torch.cat(over.all_gather(own)).sort()[0]
    return whole


def rows_in_parts(
    over: Communicator,
    tables: HashTableCollection,
    table: str,
    own: torch.Tensor,
    ids: torch.Tensor,
    width: int | None = None,
    to_all: bool = True,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`PART_ROWS` ids at a time in ascending order, and their rows (n, width) in host memory. Collective.

    Args:
        own, ids: of the table, from `whole_ids`.
        width: values of a row; all with the optimizer state by default.
        to_all: False: only the first rank of the shards gets rows, others none.
    """

    def gathered(values: torch.Tensor) -> torch.Tensor:
        if to_all:
            return torch.cat(over.all_gather(values))
        return over.all_to_all_counted(values, [len(values)] + [0] * (over.world_size - 1))

    for part in ids.split(PART_ROWS) if len(ids) else ():
        first, end = torch.searchsorted(own, part[:1]), torch.searchsorted(own, part[-1:], right=True)
        here = own[int(first) : int(end)]
        values = tables.current_rows(table, here)[:, :width].cpu().contiguous()
        found = gathered(here)
        yield part, gathered(values)[found.argsort()]


def whole_tables(rows: RowsOfRanks) -> HashTableCollection:
    """Every rank's weights in tables of one process, in host memory, without policies. Collective."""
    over, tables = rows.over, rows.tables
    features = [
        replace(feature, policy=TablePolicy(), optimizer=None, placement=None)
        for feature in tables.features.values()
    ]
    whole = HashTableCollection(features, RowOptimizer("sgd"), merge=False, seed=tables.seed)
    for name, (own, ids) in whole_ids(over, tables).items():
        for part, weights in rows_in_parts(over, tables, name, own, ids, tables.dim_of(name)):
            whole.load(name, part, weights)
    return whole
