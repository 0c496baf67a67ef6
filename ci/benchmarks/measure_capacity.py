"""A table of many keys on one machine: filled while it trains, saved, killed, loaded by other ranks.

    python ci/benchmarks/measure_capacity.py --keys 200000000 --folder /data --json FILE

Every step of a batch of ``--batch`` ids has new ids but for a tenth, and updates all of their rows (dimension
16, sgd, a bag each). Steps are told by tenths of the growth, so that one that takes longer in a large table
shows. Then the rank saves, trains on and is killed with SIGKILL, and ranks of another number load what it
saved: rows of a sample of ids have to be those of the first process, in every bit. They train five steps,
and save what these changed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frame import options_of, record
from resident import resident

from tritonrec.capacity import peak_bytes
from tritonrec.data import Batch, KeyedJaggedTensor, Lookup
from tritonrec.distributed import Communicators, RankDiedError, RankPool
from tritonrec.embedding import FeatureConfig, HashTableCollection, Placement, RowOptimizer
from tritonrec.files import save_json
from tritonrec.host_memory import keep_freed_memory
from tritonrec.pipeline import Trainer, WindowConfig

DIM, SAMPLE, TURNS = 16, 200_000, 10
OLD = 0.1
"""Of a batch's ids, those that occurred before."""


class Sum(torch.nn.Module):
    """Losses that give each row a gradient of its own; what is measured is the table."""

    def forward(self, batch: Any, rows: dict[str, torch.Tensor], seed: int = 0) -> torch.Tensor:
        return torch.tanh(rows["id"].sum(1))


def ids_of(number: torch.Tensor) -> torch.Tensor:
    """Of a key by its number: anywhere in 62 bits."""
    return number * 0x1E3779B97F4A7C15 & (1 << 62) - 1


def batch(step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
    new = int(size * (1 - OLD))
    draw = np.random.default_rng(step)
    numbers = np.concatenate(
        [np.arange(step * new, (step + 1) * new), draw.integers(0, (step + 1) * new, size - new)]
    )
    ids = ids_of(torch.from_numpy(numbers))[rank::world]
    samples = torch.arange(size)[rank::world] + step * size
    lookup = Lookup(ids, torch.arange(len(ids) + 1))
    return Batch(step, samples, KeyedJaggedTensor.from_dict({"id": lookup}))


def trainer_of(communicators: Communicators, memory: str, folder: Path) -> Trainer:
    keep_freed_memory()
    torch.set_num_threads(1)
    place = Placement("disk", path=str(folder), memory=memory) if memory else Placement("host")
    tables = HashTableCollection(
        [FeatureConfig("id", DIM, pooling="sum")], RowOptimizer("sgd", lr=0.1), placement=place
    )
    return Trainer(Sum(), tables, None, communicators, "nestpipe", WindowConfig(1), trust_model=True)


def bytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def rows_of(trainer: Trainer) -> int:
    return sum(len(group.table) for group in trainer.tables.groups)


def sampled(trainer: Trainer, keys: int) -> torch.Tensor:
    """Rows of ids all over the table, of all ranks."""
    ids = ids_of(torch.arange(0, keys, max(1, keys // SAMPLE)))
    return trainer.tables.peek({"id": Lookup(ids, torch.arange(len(ids) + 1))}, trainer.rows_of_ranks().over)[
        "id"
    ]


def fill(communicators: Communicators, keys: int, size: int, memory: str, folder: Path) -> None:
    """The table grows to so many keys, is sampled and saved; the process trains on and is killed."""
    steps, before, turns = int(keys / (size * (1 - OLD))), resident(), []
    with trainer_of(communicators, memory, folder) as trainer:
        began = time.perf_counter()
        for turn in range(TURNS):
            seconds, last = [], time.perf_counter()
            turn_steps = range(steps * turn // TURNS, steps * (turn + 1) // TURNS)
            for _ in trainer.run(batch(each, size) for each in turn_steps):
                seconds.append(time.perf_counter() - last)
                last += seconds[-1]
            turns.append([float(np.quantile(seconds, each)) for each in (0.5, 0.9, 0.99, 1.0)])
            shown = ", ".join(f"{each * 1e3:.0f}" for each in turns[-1])
            print(f"{rows_of(trainer):13,} rows, ms a step at 50, 90, 99 and 100 %: {shown}", flush=True)
        filled, peak = time.perf_counter() - began, peak_bytes()
        torch.save(sampled(trainer, int(steps * size * (1 - OLD))), folder / "sample.pt")
        began = time.perf_counter()
        trainer.save(folder / "checkpoint")
        found = {
            "keys": rows_of(trainer), "steps": steps, "step_seconds": turns, "fill_seconds": filled,
            "before": before, "peak": peak, "save_seconds": time.perf_counter() - began,
            "peak_with_save": peak_bytes(),
        }  # fmt: skip
        save_json(found, folder / "filled.json")
        for result in trainer.run(batch(each, size) for each in range(steps, steps + 9)):
            if result.step == steps + 4:
                os.kill(os.getpid(), signal.SIGKILL)


def load(communicators: Communicators, size: int, memory: str, folder: Path) -> dict[str, Any]:
    saved = folder / "checkpoint"
    with (
        trainer_of(communicators, memory, folder) as trainer,
        trainer.saver(saved, full_every=0) as saver,
    ):
        began = time.perf_counter()
        trainer.load(saver)
        seconds = time.perf_counter() - began
        steps = trainer.next_step
        rows = sampled(trainer, int(steps * size * (1 - OLD)))
        same = torch.equal(rows, torch.load(folder / "sample.pt"))
        first = time.perf_counter()
        own = communicators.rank, communicators.world_size
        list(trainer.run(batch(each, size, *own) for each in range(steps, steps + 5)))
        trained = time.perf_counter()
        saver.save(steps + 5)
        saver.wait()
        changes = bytes_in(saved / f"step-{steps + 5:012d}")
        return {
            "load_seconds": seconds, "same": same, "five_steps_seconds": trained - first,
            "changes_seconds": time.perf_counter() - trained, "changes_bytes": changes,
            "rows": rows_of(trainer), "peak": peak_bytes(),
        }  # fmt: skip


def main() -> None:
    options = options_of(
        __doc__, keys=2_000_000, batch=65_536, ranks=2, memory="1GiB", folder=tempfile.gettempdir()
    )
    folder = Path(tempfile.mkdtemp(prefix="measure-capacity-", dir=options.folder))
    wait = timedelta(minutes=30)
    given = options.batch, options.memory, folder
    try:
        with RankPool([1], wait) as pool, suppress(RankDiedError):
            pool.run(fill, 1, options.keys, *given)
        found = json.loads((folder / "filled.json").read_text())
        print({name: value for name, value in found.items() if name != "step_seconds"}, flush=True)
        size = bytes_in(folder / "checkpoint")
        with RankPool([options.ranks], wait) as pool:
            loaded = pool.run(load, options.ranks, *given)
        for each in loaded:
            print(each, flush=True)
        if not all(each["same"] for each in loaded):
            raise SystemExit("rows differ after the load")
        record(options, filled=found, loaded=loaded, checkpoint_bytes=size)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
