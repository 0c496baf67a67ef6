"""Figures of docs/checkpoints.md: ``python tests/checkpoint/measure.py [rows]``, about a minute.

Bytes read over bytes needed when ranks load what another world size saved.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean

import torch
from simulated import on_ranks, part_of, random_table, save_on

from tritonrec.checkpoint import load, save
from tritonrec.checkpoint.files import manifest_of
from tritonrec.checkpoint.manifest import files_of, read_manifest

WIDTH = 64


def read_over_needed(directory: Path, table: dict[str, torch.Tensor]) -> None:
    """For each pair of world sizes the mean and the largest ratio of the first ranks, and their files."""
    print("saved by | loaded by: bytes read / bytes needed, mean and worst rank; files a rank opens")
    for saved_by in (1, 3, 8):
        save_on(saved_by, directory / str(saved_by), 1, {"items": table})
        files = sum(1 for _ in files_of(read_manifest(manifest_of(directory / str(saved_by), 1))))
        for world_size in (1, 2, 3, 5, 8, 16, 48, 64):
            ranks = range(min(world_size, 8))
            parts = [load(directory / str(saved_by), rank=rank, world_size=world_size) for rank in ranks]
            ratios = [part.bytes_read / part.bytes_needed for part in parts]
            opened = max(len(part.files) for part in parts)
            print(
                f"{saved_by:8} | {world_size:9}: {mean(ratios):.3f} {max(ratios):.3f}"
                f"   {opened} of {files} files"
            )


def writing_by_ranks(directory: Path, table: dict[str, torch.Tensor]) -> None:
    """The slices that each of three ranks writes, over a third of the table."""
    parts = [part_of(table, rank, 3) for rank in range(3)]

    def work(rank, gather):
        saved = save(directory, 1, {}, {"t": parts[rank]}, {}, rank=rank, world_size=3, gather=gather)
        return saved.bytes

    written = on_ranks(3, work)
    print(
        f"bytes written by each of 3 ranks, over a third: {[round(3 * b / sum(written), 3) for b in written]}"
    )


if __name__ == "__main__":
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    state = random_table(0, rows, WIDTH)
    size = sum(values.nbytes for values in state.values())
    print(f"{len(state['keys'])} rows, {size / 2**20:.0f} MiB, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as place:
        writing_by_ranks(Path(place, "ranks"), state)
        read_over_needed(Path(place, "elastic"), state)
