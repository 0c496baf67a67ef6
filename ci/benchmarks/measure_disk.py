"""A step with a table on disk beside the same table in memory: time, bytes read and written, memory.

    python ci/benchmarks/measure_disk.py --rows 400000 --skews 0.8,1.05,1.2 --shares 0.5,0.1 --json FILE
    python ci/benchmarks/measure_disk.py --rows 400000 --shares 0.1 --peers mmap lmdb rocksdb

A table of rows of 64 weights and Adam's state (768 bytes) is filled, then trained in mode ``nestpipe`` on
bags of ids that are Zipf-distributed; popular ids lie anywhere in the file. Each placement has a process of
its own, in a memory cgroup (root and cgroup v1's memory controller; without it there is no limit, and the
output says so) of what it has before the table, the table's own memory and `--slack` MiB, the page cache
included. They take turns. All end at the same bits, which is checked first. `--peers` train in a plain loop
of torch over a store of rows (`disk_peers.py`) under the same limits; their losses are compared with ours. A
ratio is the median over rounds of that within a round: `ratio` of wall clock, `processor` of processor time.
`read` and `written`: bytes that reached the device, from ``/proc/self/io``, by those of the rows that missed
the memory, which is the least that can be read.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from disk_peers import STORES, trained
from frame import options_of, record
from resident import give_back, resident

from tritonrec import Communicators, FeatureConfig, HashTableCollection, RowOptimizer, Trainer, nn
from tritonrec.data import Batch, KeyedJaggedTensor
from tritonrec.data.jagged import Lookup, offsets_of
from tritonrec.embedding import Placement
from tritonrec.embedding.cached_storage import PLACE_BYTES

DIM, WIDTH = 64, 192
CGROUP = Path("/sys/fs/cgroup/memory")


def io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def limited(mebibytes: int) -> bool:
    try:
        group = CGROUP / f"tritonrec-{os.getpid()}"
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(mebibytes << 20))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        return True
    except OSError:
        return False


class Bags(torch.nn.Module):
    def __init__(self, depth: int):
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(depth))

    def forward(self, batch: Batch, rows: dict[str, torch.Tensor], seed: int) -> torch.Tensor:
        values, samples = rows["item"], torch.arange(batch.num_samples + 1)
        for layer in self.layers:
            values = torch.tanh(layer(values, samples))
        return values.sum(1)


def batch(step: int, options: argparse.Namespace, sums: np.ndarray) -> Batch:
    random = np.random.default_rng(step)
    ranks = np.searchsorted(sums, random.random(options.batch * options.bag) * sums[-1])
    ids = torch.from_numpy(ranks * 7_368_787 % options.rows)  # a prime: popular ids are anywhere
    lengths = torch.full((options.batch,), options.bag)
    lookup = Lookup(ids, offsets_of(lengths))
    samples = torch.arange(options.batch) + step * options.batch
    return Batch(step, samples, KeyedJaggedTensor.from_dict({"item": lookup}))


def peer(pipe: Connection, name: str, share: float, skew: float, options: argparse.Namespace) -> None:
    """The process of a peer, as `placed`."""
    torch.set_num_threads(1)
    whole = options.rows * (4 * WIDTH + PLACE_BYTES)
    memory = int(whole * share)
    sums = np.cumsum(np.arange(1, options.rows + 1) ** -skew)
    tables = HashTableCollection([FeatureConfig("item", DIM)], RowOptimizer("adam", lr=0.01))
    under = limited((memory + 40 * options.rows >> 20) + options.slack)
    before = resident()
    with tempfile.TemporaryDirectory(dir=options.path) as folder:
        store = STORES[name](Path(folder), options.rows, memory)
        for ids in torch.arange(options.rows).split(1 << 14):
            store.write(ids.numpy(), tables.initial_rows("item", ids).numpy())
        layers = torch.nn.ModuleList(torch.nn.Linear(DIM, DIM) for _ in range(options.depth))
        layers.load_state_dict(Bags(options.depth).layers.state_dict())
        steps = trained(store, layers, 0.01, (batch(step, options, sums) for step in range(1 << 20)))
        pipe.send(under)
        losses = []
        for count in iter(pipe.recv, 0):
            bytes_, began, worked = io(), time.perf_counter(), time.process_time()
            losses += [float(next(steps).mean()) for _ in range(count)]
            seconds, worked = time.perf_counter() - began, time.process_time() - worked
            now = io()
            pipe.send({
                "seconds": seconds / count, "processor": worked / count,
                "read_mib": (now["read_bytes"] - bytes_["read_bytes"]) / count / 2**20,
                "written_mib": (now["write_bytes"] - bytes_["write_bytes"]) / count / 2**20,
                "resident_mib": (resident() - before) / 2**20,
            })  # fmt: skip
        pipe.send((None, losses))


def placed(pipe: Connection, share: float, skew: float, options: argparse.Namespace) -> None:
    """The process of one placement: it trains so many steps whenever it is told to."""
    torch.set_num_threads(1)
    whole = options.rows * (4 * WIDTH + PLACE_BYTES)
    placement = Placement("host")
    if share:
        placement = Placement("disk", path=str(options.path), memory=str(int(whole * share)))
    feature = [FeatureConfig("item", DIM, pooling="sum")]
    tables = HashTableCollection(feature, RowOptimizer("adam", lr=0.01), placement=placement)
    model = Bags(options.depth)
    sums = np.cumsum(np.arange(1, options.rows + 1) ** -skew)
    index = 40 * options.rows  # bytes of keys and places, also while they grow
    under = bool(share) and limited((int(whole * share) + index >> 20) + options.slack)
    before = resident()
    for start in range(0, options.rows, 1 << 14):
        ids = torch.arange(start, min(start + (1 << 14), options.rows))
        tables.load("item", ids, tables.initial_rows("item", ids))
    table = tables.groups[0].table
    if share:
        # Linux counts all pages of a folio as written where one is, and the fill made large ones.
        file = table._rows._file._file.fileno()  # type: ignore[union-attr]
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Trainer(model, tables, optimizer, Communicators.local(), "nestpipe") as trainer:
        steps = trainer.run(batch(step, options, sums) for step in range(1 << 20))
        pipe.send(under)
        losses: list[float] = []
        for count in iter(pipe.recv, 0):
            counters, bytes_, began, worked = table.counters, io(), time.perf_counter(), time.process_time()
            losses += [float(next(steps).losses.mean()) for _ in range(count)]
            seconds, worked = time.perf_counter() - began, time.process_time() - worked
            after, now = table.counters, io()
            looked = after.found - counters.found
            missed = (after.disk_read - counters.disk_read) * 4 * WIDTH
            pipe.send({
                "seconds": seconds / count, "processor": worked / count, "rows": looked / count,
                "missed": (looked - after.cached + counters.cached) / looked if share else 0.0,
                "read": (now["read_bytes"] - bytes_["read_bytes"]) / max(missed, 1),
                "written": (now["write_bytes"] - bytes_["write_bytes"]) / max(missed, 1),
                "resident_mib": (resident() - before) / 2**20,
            })  # fmt: skip
    give_back()
    digest = hashlib.sha256()
    for part in torch.arange(options.rows).split(1 << 14):
        digest.update(table.gather(table.find(part), part).numpy().tobytes())
    pipe.send((digest.hexdigest(), losses))


def measured(skew: float, options: argparse.Namespace) -> tuple[bool, list[dict[str, Any]]]:
    """Whether there was a memory limit, and the figures of each placement."""
    fresh = multiprocessing.get_context("spawn")
    contenders = [("tritonrec", share) for share in (0.0, *options.shares)]
    contenders += [(name, share) for share in options.shares for name in options.peers or ()]
    pipes, processes = [], []
    for name, share in contenders:
        ours, theirs = fresh.Pipe()
        target, named = (peer, (name,)) if name in STORES else (placed, ())
        processes.append(fresh.Process(target=target, args=(theirs, *named, share, skew, options)))
        processes[-1].start()
        theirs.close()  # so that a process that was killed shows
        pipes.append(ours)
        under = ours.recv()  # EOFError: it could not be filled under its limit
    rounds: list[list[dict[str, Any]]] = []
    for _ in range(options.rounds + 1):
        rounds.append([])
        for pipe, (name, share) in zip(pipes, contenders, strict=True):
            pipe.send(options.steps)
            try:
                rounds[-1].append(pipe.recv())
            except EOFError:
                raise SystemExit(f"{name} at {share:.0%} has ended: more memory is its --slack") from None
    for pipe in pipes:
        pipe.send(0)
    ends = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    if len({digest for digest, _ in ends if digest}) > 1:
        raise SystemExit("the tables differ; no time is printed")
    for _, losses in ends:
        np.testing.assert_allclose(losses, ends[0][1], rtol=1e-3, atol=1e-4)
    found = []
    for number, (name, share) in enumerate(contenders):
        each = [one[number] for one in rounds[1:]]  # the first round compiles
        row = {key: median(one[key] for one in each) for key in each[0]}
        row |= {"of": name, "skew": skew, "share": share}
        ratios = {
            what: [one[number][what] / one[0][what] for one in rounds[1:]]
            for what in ("seconds", "processor")
        }
        row |= {"ratio": median(ratios["seconds"]), "processor": median(ratios["processor"])}
        row |= {"least": min(ratios["seconds"]), "most": max(ratios["seconds"])}
        found.append(row)
    return under, found


def main() -> None:
    options = options_of(
        __doc__, path=Path(tempfile.gettempdir()), rows=400_000, shares=(1.0, 0.3, 0.1, 0.05), skews=(1.05,),
        batch=2048, bag=4, depth=4, steps={"default": 10, "help": "of a round"}, rounds=4,
        slack={"default": 300, "help": "MiB of a process beside its table"},
        peers={"default": None, "nargs": "+", "choices": list(STORES), "help": "of such a loop"},
    )  # fmt: skip
    placements = []
    for skew in options.skews:
        under, found = measured(skew, options)
        print(f"Zipf {skew:g}: all rows equal in every bit; {'under' if under else 'WITHOUT'} a memory limit")
        for row in found:
            numbers = "  ".join(f"{key} {value:.4g}" for key, value in row.items() if key != "of")
            place = f"{row['share']:9.0%}" if row["share"] else "in memory"
            print(f"{row['of']:9s} {place}", numbers, flush=True)
        placements += found
    record(options, limited=under, placements=placements)


if __name__ == "__main__":
    main()
