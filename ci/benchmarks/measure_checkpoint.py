"""Saving and loading of a training, beside torch.save, safetensors and torch's distributed checkpoint.

    python ci/benchmarks/measure_checkpoint.py [--rows 1000000 10000000] [--dim 16] [--rounds 3] [--peers 1]

One rank, one table of rowwise AdaGrad, a model of a few numbers; peers write the same tensors and flush them.
All take turns, each into a new folder, and the least of the rounds counts. What was saved is loaded and
compared bit by bit before a figure is printed; ``export`` and ``import`` are those of `tritonrec.dcp`. Each
peak of memory is that of a process of its own, beyond the table, in sizes of the saved tensors. The peers'
load is ``torch.load`` and `HashTableCollection.load`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from frame import options_of, record
from resident import peak_from_here, resident
from safetensors.torch import save_file

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer, dcp

BLOCK = 1 << 18
PEAKS = "save", "load", "export", "import"
CHANGED = 0.01
"""Share of the rows in a delta."""


class Model(torch.nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.out = torch.nn.Linear(dim, 1)

    def forward(self, batch: Any, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.out(rows["item"]).square().mean(1)


def trainer_of(dim: int) -> Trainer:
    """Without rows."""
    model = Model(dim)
    tables = HashTableCollection([FeatureConfig("item", dim)], RowOptimizer("rowwise_adagrad"), seed=1)
    return Trainer(model, tables, torch.optim.SGD(model.parameters(), lr=0.1), Communicators.local())


def keys_of(numbers: torch.Tensor) -> torch.Tensor:
    """Ids all over the range, distinct for distinct numbers."""
    return numbers * 0x1E3779B97F4A7C15


def fill(tables: HashTableCollection, rows: int) -> None:
    """Random rows, a block at a time."""
    width, draw = tables.groups[0].table.row_width, torch.Generator().manual_seed(2)
    for numbers in torch.arange(rows).split(BLOCK):
        tables.load("item", keys_of(numbers), torch.rand(len(numbers), width, generator=draw))


def change(tables: HashTableCollection, rows: int, seed: int) -> None:
    """New values in `CHANGED` of the rows."""
    draw = torch.Generator().manual_seed(seed)
    table = tables.groups[0].table
    some = torch.randint(rows, (int(CHANGED * rows),), generator=draw).unique()
    handles = table.lookup(keys_of(some), seed).handles
    table.update(handles, torch.rand(len(some), table.row_width, generator=draw))


def same(one: HashTableCollection, other: HashTableCollection) -> bool:
    """Whether all keys and rows are, bit by bit."""
    (keys, rows), (other_keys, other_rows) = (each.export()["item"] for each in (one, other))
    return torch.equal(keys, other_keys) and torch.equal(rows.view(torch.int32), other_rows.view(torch.int32))


def flush(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def peers(state: dict[str, torch.Tensor]) -> dict[str, Callable[[Path], None]]:
    """By name a function that writes the tensors into a folder and flushes them."""

    def with_safetensors(folder: Path) -> None:
        save_file(state, folder / "state.safetensors")
        flush(folder)

    def with_torch(folder: Path) -> None:
        torch.save(state, folder / "state.pt")
        flush(folder)

    def with_dcp(folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=folder, no_dist=True)
        flush(folder)

    return {"safetensors": with_safetensors, "torch.save": with_torch, "DCP": with_dcp}


def seconds(call: Callable[[Path], Any], folder: Path) -> float:
    """Of a call with a new folder, which is removed."""
    folder.mkdir()
    os.sync()
    began = time.perf_counter()
    call(folder)
    taken = time.perf_counter() - began
    shutil.rmtree(folder)
    os.sync()
    return taken


def speeds(place: Path, rows: int, dim: int, rounds: int, with_peers: bool) -> dict[str, float]:
    """Seconds, least of the rounds."""
    trainer, twin = trainer_of(dim), trainer_of(dim)
    fill(trainer.tables, rows)
    trainer.save(place / "kept")
    twin.load(place / "kept")
    assert same(trainer.tables, twin.tables), "the saved rows are others"
    twin = trainer_of(dim)
    found: dict[str, list[float]] = {}

    def note(name: str, taken: float) -> None:
        found.setdefault(name, []).append(taken)

    def full_and_delta(folder: Path) -> None:
        with trainer.saver(folder, full_every=2) as saver:
            began = time.perf_counter()
            saver.save(1)
            note("blocked", time.perf_counter() - began)
            saver.wait()
            note("beside", time.perf_counter() - began)
            change(trainer.tables, rows, len(found["beside"]))
            began = time.perf_counter()
            saver.save(2)
            note("delta blocked", time.perf_counter() - began)
            saver.wait()
            note("delta", time.perf_counter() - began)

    def export(folder: Path) -> None:
        began = time.perf_counter()
        written = dcp.async_save(trainer, folder / "out")
        note("export blocked", time.perf_counter() - began)
        written.result()

    dcp.save(trainer, place / "exported")
    dcp.load(twin, place / "exported")
    assert same(trainer.tables, twin.tables), "the exported rows are others"
    twin = trainer_of(dim)
    for _ in range(rounds):
        note("export", seconds(export, place / "export"))
        note("save", seconds(lambda folder: trainer.save(folder), place / "ours"))
        if with_peers:
            state = dict(trainer.tables.state()["item"])
            for name, call in peers(state).items():
                note(name, seconds(call, place / "peer"))
            del state
        seconds(full_and_delta, place / "delta")
    trainer = twin = trainer_of(dim)
    plain = place / "state.pt"
    source = trainer_of(dim)
    source.load(place / "kept")
    torch.save(dict(source.tables.state()["item"]), plain)
    del source
    for _ in range(rounds):
        ours = trainer_of(dim)
        began = time.perf_counter()
        ours.load(place / "kept")
        note("load", time.perf_counter() - began)
        ours = trainer_of(dim)
        began = time.perf_counter()
        dcp.load(ours, place / "exported")
        note("import", time.perf_counter() - began)
        del ours
        peer = trainer_of(dim)
        began = time.perf_counter()
        state = torch.load(plain)
        peer.tables.load("item", state["keys"], state["rows"])
        note("torch.load and insert", time.perf_counter() - began)
        del peer, state
    shutil.rmtree(place / "kept")
    return {name: min(values) for name, values in found.items()}


def peak(what: str, place: Path, rows: int, dim: int) -> float:
    """In this process: bytes at most beyond those of the table, over the saved tensors' bytes."""

    small = trainer_of(dim)  # what a first call imports and compiles
    fill(small.tables, 1000)
    with small.saver(place / f"small-{what}", full_every=2) as saver:
        saver.save(1)
        change(small.tables, 1000, 1)
        saver.save(2)
    small.load(place / f"small-{what}")
    dcp.save(small, place / f"small-{what}-dcp")
    dcp.load(small, place / f"small-{what}-dcp")
    trainer = trainer_of(dim)
    if what in ("save", "export"):
        fill(trainer.tables, rows)
    before, stored = resident(), bytes_of(trainer)
    peak_from_here()
    if what == "save":
        trainer.save(place / "kept")
    elif what == "load":
        trainer.load(place / "kept")
    elif what == "export":
        dcp.save(trainer, place / "exported-again")
    else:
        dcp.load(trainer, place / "exported")
    beyond = resident("VmHWM") - before - (bytes_of(trainer) - stored)
    return beyond / (rows * (8 + 4 * trainer.tables.groups[0].table.row_width))


def bytes_of(trainer: Trainer) -> int:
    return sum(trainer.tables.groups[0].table.memory()[name] for name in ("key_structure", "fp32_values"))


def report(rows: int, dim: int, times: dict[str, float], peaks: dict[str, float]) -> dict[str, float]:
    payload = rows * (8 + 4 * (dim + 1)) / 2**20
    print(f"{rows:,} rows of {dim} and one state, {payload:,.0f} MiB")
    ratios = {f"save over {name}": times["save"] / times[name] for name in
              ("safetensors", "torch.save", "DCP") if name in times}  # fmt: skip
    ratios |= {
        "blocked by a save, of its time": times["blocked"] / times["beside"],
        "export over save": times["export"] / times["save"],
        "import over load": times["import"] / times["load"],
        "blocked by an export, of its time": times["export blocked"] / times["export"],
        "load over torch.load and insert": times["load"] / times["torch.load and insert"],
        "blocked by a delta of 1 %, of a save": times["delta blocked"] / times["beside"],
        "delta of 1 % over a save": times["delta"] / times["beside"],
    }
    ratios |= {f"memory of a {what}, in payloads": value for what, value in peaks.items()}
    for name, value in ratios.items():
        print(f"  {name:40} {value:8.3f}")
    print("  " + ", ".join(f"{name} {value:.3f} s" for name, value in times.items()), flush=True)
    return ratios


def main() -> None:
    options = options_of(
        __doc__, rows=[1_000_000, 4_000_000, 10_000_000], dim=16, rounds=3, peers=1,
        folder={"type": Path, "help": "where to write; a temporary one by default"},
        peak={"choices": PEAKS, "help": argparse.SUPPRESS},
    )  # fmt: skip
    if options.peak:
        print(peak(options.peak, options.folder, options.rows[0], options.dim))
        return
    written = {}
    for rows in options.rows:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            place = Path(name)
            times = speeds(place, rows, options.dim, options.rounds, bool(options.peers))
            peaks = {}
            for what in PEAKS:
                command = [sys.executable, __file__, "--rows", str(rows), "--dim", str(options.dim)]
                command += ["--folder", str(place), "--peak", what]
                peaks[what] = float(subprocess.check_output(command).split()[-1])
            written[rows] = {"seconds": times, "ratios": report(rows, options.dim, times, peaks)}
    record(options, rows=written)


if __name__ == "__main__":
    main()
