"""What a pause of a run costs, alone and with a save in it, in steps.

    python ci/benchmarks/measure_pauses.py [--rounds 30] [--rows 100000]
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 ci/benchmarks/measure_pauses.py

README.md's model in mode nestpipe at N = 4, with a table of many rows. Stretches of steps without a pause,
with two, and with two saves take turns, and the least time of the rounds counts.
"""

from __future__ import annotations

import tempfile
import time

import torch
from frame import options_of

from tritonrec import FeatureConfig, HashTableCollection, RowOptimizer, Trainer, WindowConfig, ops
from tritonrec.data import NextItemLoader, load
from tritonrec.distributed import from_environment
from tritonrec.nn import HSTU, HSTUConfig

STEPS, EVERY = 10, 5


def main() -> None:
    options = options_of(__doc__, rounds=30, rows=100_000)
    with from_environment() as ranks, tempfile.TemporaryDirectory() as folder:
        log = load("zipf:users=4000,items=6000,seed=3")
        loader = NextItemLoader(log, 128, 50, 8, seed=0, rank=ranks.rank, world_size=ranks.world_size)
        torch.manual_seed(0)
        model = HSTU(HSTUConfig(dim=32, max_seq_len=50))
        tables = HashTableCollection([FeatureConfig("item", 32)], RowOptimizer("adam", lr=1e-2))
        keys = torch.arange(10**6, 10**6 + options.rows)
        own = keys[ops.owner_of(keys, ranks.world_size) == ranks.rank]
        tables.load("item", own, torch.rand(len(own), tables.groups[0].table.row_width, dtype=torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        (folder,) = ranks.control.all_gather_texts(folder)[:1]
        taken: dict[str, list[float]] = {"none": [], "pause": [], "save": []}
        blocked = []
        with (
            Trainer(model, tables, optimizer, ranks, "nestpipe", WindowConfig(4)) as trainer,
            trainer.saver(f"{folder}/run") as saver,
        ):
            for kind in [*taken] * (options.rounds + 1):
                began, first = time.perf_counter(), trainer.next_step
                steps = (loader.batch(step) for step in range(first, first + STEPS))
                for result in trainer.run(steps, pause_every=0 if kind == "none" else EVERY):
                    if kind == "save" and (result.step + 1) % EVERY == 0:
                        saver.wait()
                        asked = time.perf_counter()
                        saver.save(result.step + 1)
                        blocked.append(time.perf_counter() - asked)
                taken[kind].append(time.perf_counter() - began)
                saver.wait()
        plain, paused, saved = (min(each[1:]) for each in taken.values())
        if ranks.rank == 0:
            step = plain / STEPS
            each = [(paused - plain) * EVERY / STEPS, min(blocked), (saved - plain) * EVERY / STEPS]
            figures = ", ".join(f"{seconds / step:.2f}" for seconds in each)
            print(
                f"a step {step * 1e3:.1f} ms; in steps: a pause, a save's call, both and writing: {figures}"
            )


if __name__ == "__main__":
    main()
