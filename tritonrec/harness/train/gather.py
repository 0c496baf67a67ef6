"""State of all ranks together: counts, the digest, the trace."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import torch

from ...distributed import Communicator, Communicators
from ...embedding import HashTableCollection
from ...files.places import place_of
from ...pipeline import rows_in_parts, whole_ids
from ...trace import save_joined


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
    for name, (own, ids) in sorted(whole_ids(communicators, tables).items()):
        digest.update(name.encode())
        _add(digest, ids)
        for _, rows in rows_in_parts(communicators, tables, name, own, ids, to_all=False):
            _add(digest, rows)
    first, whole = communicators.shard_control.all_gather_texts(f"{of_dense} {digest.hexdigest()}")[0].split()
    return whole if of_dense == first else hashlib.sha256(f"{of_dense} {whole}".encode()).hexdigest()


def _add(digest: hashlib._Hash, values: torch.Tensor) -> None:
    digest.update(values.cpu().contiguous().numpy().data)
