"""Figures of docs/checkpoints.md: ``python tests/checkpoint/measure.py [rows]``, about a minute.

Bytes read over bytes needed when ranks load what another world size saved, and what a save costs the training
that goes on beside it.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch
from simulated import on_ranks, part_of, random_table, save_on

from tritonrec.checkpoint import Saver, load, save
from tritonrec.checkpoint.files import files_of, manifest_of, read_manifest

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


def saving_beside_training(directory: Path, table: dict[str, torch.Tensor]) -> None:
    """How long `Saver.save` keeps its caller, over the time until the checkpoint is whole."""
    for owned in (False, True):
        blocked, seconds = [], []
        with Saver(directory / f"owned-{owned}") as saver:
            for step in range(5):
                saver.save(step, {}, {"items": table}, {}, owned=owned)
                saver.wait()
                blocked.append(saver.blocked)
                seconds.append(saver.seconds)
        ratios = [part / whole for part, whole in zip(blocked, seconds, strict=True)]
        print(
            f"owned={owned}: blocked {median(blocked) * 1e3:.1f} ms of {median(seconds) * 1e3:.0f} ms, "
            f"ratio {median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
        )


def full_and_incremental(directory: Path, table: dict[str, torch.Tensor]) -> None:
    """Bytes and seconds of a delta of 1 % of the rows, over those of the full checkpoint."""
    began = time.perf_counter()
    base = save(directory, 1, {}, {"items": table}, {})
    full = time.perf_counter() - began
    some = {column: values[::100] for column, values in table.items()}
    began = time.perf_counter()
    delta = save(directory, 2, {}, {"items": some}, {}, base=base, erased={})
    print(
        f"delta of 1 % of the rows: {delta.bytes / base.bytes:.4f} of the bytes, "
        f"{(time.perf_counter() - began) / full:.3f} of the time"
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
        full_and_incremental(Path(place, "delta"), state)
        saving_beside_training(Path(place, "beside"), state)
        read_over_needed(Path(place, "elastic"), state)
