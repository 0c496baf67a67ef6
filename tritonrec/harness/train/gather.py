"""State of all ranks together: counts, the digest, the trace."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import torch

from ...distributed import Communicator, Communicators
from ...embedding import HashTableCollection
from ...files.places import place_of
from ...trace import save_joined

DIGEST_ROWS = 1 << 16
"""Rows of a table that a digest reads at a time."""


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
    """SHA-256 over dense parameters, keys and rows with their states, independent of the sharding.

    Collective. Each rank holds the ids of all ranks, and of their rows `DIGEST_ROWS` at a time.
    """
    digest = hashlib.sha256()
    for name in sorted(dense):
        digest.update(name.encode())
        _add(digest, dense[name])
    for name, own in sorted(_ids(tables).items()):
        digest.update(name.encode())
        ids = torch.cat(communicators.shard_control.all_gather(own)).sort()[0]
        _add(digest, ids)
        for part in ids.split(DIGEST_ROWS) if len(ids) else ():
            first, last = torch.searchsorted(own, part[[0, -1]])
            here = own[first : last + int(torch.isin(part[-1:], own))]
            rows = tables.current_rows(name, here).cpu()
            found, rows = (
                torch.cat(communicators.shard_control.all_gather(values)) for values in (here, rows)
            )
            _add(digest, rows[found.argsort(stable=True)])
    return digest.hexdigest()


def _add(digest: hashlib._Hash, values: torch.Tensor) -> None:
    digest.update(values.cpu().contiguous().numpy().data)


def _ids(tables: HashTableCollection) -> dict[str, torch.Tensor]:
    """By logical table this rank's ids (n,) int64, ascending."""
    found = {}
    for group in tables.groups:
        members, ids = group.layout.unpack(group.table.keys().cpu())
        for member, name in enumerate(group.layout.names):
            found[name] = ids[members == member]
    return found
