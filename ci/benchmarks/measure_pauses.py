"""What a pause of a run costs, alone and with a save in it, and what a save in flight does, in steps.

    python ci/benchmarks/measure_pauses.py [--rounds 20] [--rows 100000]
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 ci/benchmarks/measure_pauses.py

README.md's model in mode nestpipe at N = 4, with a table of many rows. Stretches of steps with nothing in the
middle, a pause, a save in a pause, and a save in flight take turns. The least time of the rounds counts, by
the clock and of this process's processors. A stretch ends when its files are written.
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

EVERY = 16


def main() -> None:
    options = options_of(__doc__, rounds=20, rows=100_000)
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
        taken: dict[str, list[tuple[float, float]]] = {"none": [], "pause": [], "save": [], "in flight": []}
        longest = {kind: list[float]() for kind in taken}  # between two results of a stretch
        with (
            Trainer(model, tables, optimizer, ranks, "nestpipe", WindowConfig(4)) as trainer,
            trainer.saver(f"{folder}/run") as saver,
        ):
            list(trainer.run(loader.batch(step) for step in range(EVERY // 2)))
            for kind in [*taken] * (options.rounds + 1):
                first, began, used = trainer.next_step, time.perf_counter(), time.process_time()
                steps = (loader.batch(step) for step in range(first, first + EVERY))
                given = {"saver": saver, "save_every": EVERY} if kind == "in flight" else {}
                if kind in ("pause", "save"):
                    given = {"pause_every": EVERY}
                last, waits = began, []
                for result in trainer.run(steps, **given):
                    if kind == "save" and (result.step + 1) % EVERY == 0:
                        saver.save(result.step + 1)
                    waits.append(time.perf_counter() - last)
                    last += waits[-1]
                saver.wait()
                taken[kind].append((time.perf_counter() - began, time.process_time() - used))
                longest[kind].append(max(waits[1:]))
        if ranks.rank == 0:
            step, work = (min(each[1:]) / EVERY for each in zip(*taken["none"], strict=True))
            print(f"a step: {step * 1e3:.1f} ms, {work * 1e3:.1f} of processors; in steps, of each:")
            for kind in taken:
                clock, used = (min(each[1:]) for each in zip(*taken[kind], strict=True))
                more = (clock / step - EVERY, used / work - EVERY)
                wait = min(longest[kind][1:]) / step
                print(f"{kind:10} {more[0]:5.2f}  processors {more[1]:5.2f}  longest step {wait:5.2f}")


if __name__ == "__main__":
    main()
