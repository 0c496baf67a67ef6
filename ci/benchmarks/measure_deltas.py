"""What publishing costs a training, how soon a delta is visible, its size, and what applying one takes.

    python ci/benchmarks/measure_deltas.py
    python ci/benchmarks/measure_deltas.py --every 50 --steps 200 --rows 1000000 --json FILE

An HSTU of two layers and 64 dimensions trains in mode "nestpipe" in this process, over a table of so many
rows; one follower polls a folder in another process. Stretches of `every` steps with and without a
publication take turns, so that a delta has the rows of twice as many steps. `held` is the time for which a
publication holds the caller's thread, and its share of a stretch, also of that thread's processor time over
that of a stretch; the ratio of the stretches' medians also has what the threads and the follower take from
the steps. Visible: from the moment at which the state was taken until the follower has it, by the clock of
one machine, also of publications after single steps.

Before, `LiveTable` alone, at so many rows of 64 columns: a delta of 1,000 known rows, of 1,000 new ones
behind the last, and of 1,000 in between, beside a copy of the table.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from frame import options_of, record

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer
from tritonrec.data import NextItemLoader, load
from tritonrec.nn import HSTU, HSTUConfig
from tritonrec.serving import ExportedTable
from tritonrec.serving.live import Follower, Publisher
from tritonrec.serving.live.replica import LiveTable
from tritonrec.serving.live.wire import unpack

DIM = 64


def follow(place: str, results: Any, end: Any) -> None:
    """Poll until `end` is set; by sequence number the seconds until it was visible."""
    torch.set_num_threads(1)
    follower = Follower.open(place)
    seen, applied = {}, []
    results.put("ready")
    while not end.is_set():
        began = time.perf_counter()
        if follower.poll():
            applied.append(time.perf_counter() - began)
            seen[follower.sequence] = follower.lag_seconds()
        time.sleep(0.01)
    results.put((seen, applied))


def measure_training(rows: int, batch: int, every: int, steps: int, more: int) -> dict[str, Any]:
    torch.manual_seed(1)
    model = HSTU(HSTUConfig(dim=DIM, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50))
    data = load(f"zipf:users=20000,items={rows},exponent=0.9,median_length=30,seed=3")
    loader = NextItemLoader(data, batch, 50, 8, 0)
    tables = HashTableCollection([FeatureConfig("item", DIM)], RowOptimizer("adam", lr=1e-3))
    ids = torch.arange(rows, dtype=torch.int64)
    tables.load_weights("item", ids, torch.zeros(rows, DIM, dtype=torch.float32))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    processes = multiprocessing.get_context("spawn")
    results, end = processes.Queue(), processes.Event()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "sink")
        with Trainer(model, tables, optimizer, Communicators.local()) as trainer:
            for _ in trainer.run(loader.batch(step) for step in range(5)):
                pass
            began = time.perf_counter()
            publisher = Publisher(trainer, place, every=every, snapshot_every=10**6)
            publisher.flush()
            snapshot = time.perf_counter() - began
            process = processes.Process(target=follow, args=(str(place), results, end))
            process.start()
            results.get()
            plain: list[float] = []
            published: list[float] = []
            held: list[float] = []
            held_cpu: list[float] = []
            plain_cpu: list[float] = []
            changed: list[tuple[int, int]] = []
            for stretch in range(2 * steps // every):
                first = trainer.next_step
                began, spent, own = time.perf_counter(), time.process_time(), time.thread_time()
                if stretch % 2:  # the threads' work falls into the steps that follow
                    publisher.publish()
                    held.append(time.perf_counter() - began)
                    held_cpu.append(time.thread_time() - own)
                for _ in trainer.run(loader.batch(step) for step in range(first, first + every)):
                    pass
                (published if stretch % 2 else plain).append(time.perf_counter() - began)
                plain_cpu += [time.process_time() - spent] * (1 - stretch % 2)
            of_stretches = publisher.sequence
            for _ in range(more):
                for _ in trainer.run([loader.batch(trainer.next_step)]):
                    pass
                publisher.publish()
            publisher.close()
            time.sleep(3.0)
            for path in sorted(place.glob("delta-*")):
                _, tensors = unpack(path.read_bytes(), path.name)
                if int(path.name[6:18]) > of_stretches:
                    continue
                changed.append((path.stat().st_size, len(tensors.get("table/item/ids", ()))))
            end.set()
            seen, applied = results.get()
            process.join()
    visible = sorted(seen.values())
    step = median(plain) / every
    return {
        "rows": rows, "batch": batch, "every": every, "step_ms": 1e3 * step,
        "held_ms": 1e3 * median(held), "held_share": sum(held) / (len(held) * median(plain)),
        "held_cpu_share": sum(held_cpu) / (len(held) * median(plain_cpu)),
        "stretch_ratio": median(published) / median(plain),
        "visible_p50_s": median(visible), "visible_p99_s": visible[int(0.99 * (len(visible) - 1))],
        "apply_ms": 1e3 * median(applied), "publications": len(held) + more, "seen": len(seen),
        "changed_rows": median(count for _, count in changed),
        "bytes_per_changed_row": median(size / max(count, 1) for size, count in changed),
        "delta_bytes": median(size for size, _ in changed), "snapshot_and_trace_s": snapshot,
    }  # fmt: skip


def measure_table(rows: int, rounds: int) -> dict[str, float]:
    draw = np.random.default_rng(1)
    ids = torch.arange(0, 2 * rows, 2, dtype=torch.int64)
    weights = torch.from_numpy(draw.standard_normal((rows, DIM)).astype(np.float32))
    live = LiveTable(ExportedTable(ids, weights, 1, 0, 0.1, "initial"))
    none, found = torch.empty(0, dtype=torch.int64), {}
    values = torch.ones(1000, DIM, dtype=torch.float32)
    top = 2 * rows
    for kind in ("known rows", "new rows behind", "new rows between", "copy of the table"):
        times = []
        for turn in range(rounds + 2):
            some = torch.from_numpy(np.sort(draw.choice(rows // 2, 1000, replace=False))) * 4
            if kind == "new rows behind":
                some = torch.arange(top, top + 1000, dtype=torch.int64)
                top += 1000
            if kind == "new rows between":
                some = some + 2 * (turn % 2) + 1
            began = time.perf_counter()
            if kind == "copy of the table":
                live.table.weights.clone()
            else:
                live.prepare(some, values, none)
                live.commit()
            if turn > 1:  # two buffers are filled first
                times.append(1e3 * (time.perf_counter() - began))
        found[kind] = median(times)
    return found


def main() -> None:
    given = options_of(
        __doc__, rows=1_000_000, batch=64, every=50, rounds=9,
        steps={"default": 400, "help": "with publications, and as many without"},
        more={"default": 200, "help": "publications after single steps, for p99"},
    )  # fmt: skip
    table = measure_table(given.rows, given.rounds)
    print("ms of a delta at", given.rows, "rows:", {name: round(each, 2) for name, each in table.items()})
    training = measure_training(given.rows, given.batch, given.every, given.steps, given.more)
    for name, value in training.items():
        print(f"{name:24} {value:.4g}")
    record(given, table_ms=table, training=training)


if __name__ == "__main__":
    main()
