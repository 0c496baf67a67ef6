"""What the window's switches and replicas of the tables save, in bytes and rows; no machine changes counts.

Trains the README's model (128 samples, 32 negatives, Adam) for a few steps on 4 ranks, with each switch on
and off, and prints what travelled. The losses and rows of all exact runs are compared in every bit first.

    python ci/benchmarks/measure_switches.py [--data ml-100k] [--steps 12] [--ranks 4] [--json FILE]
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from frame import options_of, record
from rich.console import Console

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.harness.shown import table
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import ExchangeConfig, LookupCounts, Trainer, WindowConfig
from tritonrec.settings import with_values

MODEL = HSTUConfig(dim=64, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.2)
MICRO_BATCHES = (1, 2, 4, 8)
PAYLOADS: dict[str, dict[str, bool]] = {
    "as in the paper": {},
    "clustered": {"clustering": True},
    "first use": {"first_use": True},
}


def train_rank(communicators: Communicators, job: Job, config: WindowConfig, steps: int):
    """Counts, losses by sample, and rows with their ids of this rank's part.

    ``edge_bytes`` are those of the first exchange of rows and the last one of gradients, which nothing hides.
    """
    model, tables, optimizer = job.build("adam")
    loader = job.loader(communicators.rank, communicators.world_size)
    last = config.window_micro_batches - 1
    edge = 0
    with Trainer(model, tables, optimizer, communicators, "nestpipe", config) as trainer:

        def count_first(micro_batch: int, counts: LookupCounts) -> None:
            nonlocal edge
            edge += counts.row_bytes * (micro_batch == 0)

        def count_last(micro_batch: int, counts: LookupCounts) -> None:
            nonlocal edge
            edge += counts.row_bytes * (micro_batch == last)

        trainer.program.after("exchange", count_first)
        trainer.program.after("gradient_exchange", count_last)
        losses = [result.losses for result in trainer.run(loader.batch(step) for step in range(steps))]
        if config.average_every:
            trainer.sync()
        return {**vars(trainer.counts), "edge_bytes": edge}, torch.cat(losses), tables.export()["item"]


class Measured:
    """Runs of one job, each compared with the first."""

    def __init__(self, pool: RankPool, job: Job, ranks: int, steps: int):
        self.pool, self.job, self.ranks, self.steps = pool, job, ranks, steps
        self.whole, self.loss, self.rows = self._run(1, 1, {})

    def __call__(self, count: int, replicas: int = 1, **switches):
        """Counts of all ranks together, sum of the losses, and one copy of all rows by id."""
        found = self._run(count, replicas, switches)
        if not switches.get("average_every"):
            assert found[1] == self.loss and torch.equal(found[2], self.rows), (count, replicas, switches)
        return found

    def _run(self, count: int, replicas: int, switches: dict[str, Any]):
        plain = WindowConfig(count, seed=self.job.seed, exchange=ExchangeConfig(sharing="each"))
        config = with_values(plain, switches)
        parts = self.pool.run(train_rank, self.ranks, self.job, config, self.steps, replicas=replicas)
        counts = sum((Counter(each) for each, _, _ in parts), Counter())
        ids = torch.cat([ids for _, _, (ids, _) in parts[::replicas]])
        rows = torch.cat([rows for _, _, (_, rows) in parts[::replicas]])
        losses = torch.cat([losses for _, losses, _ in parts]).double().sort().values.sum()
        return counts, float(losses), rows[ids.argsort()]


def print_by_count(title: str, found: list[dict], value: str, digits: int, console: Console) -> None:
    """A row of each of `PAYLOADS`, a column of each number of micro-batches."""
    cells, width = [f"{row[value]:.{digits}f}" for row in found], len(MICRO_BATCHES)
    rows = [(name, *cells[at * width :][:width]) for at, name in enumerate(PAYLOADS)]
    console.print(table(title, ("", *(f"N = {count}" for count in MICRO_BATCHES)), rows))


def payload(run: Measured, console: Console) -> list[dict]:
    found = []
    for name, switches in PAYLOADS.items():
        for count in MICRO_BATCHES:
            counts = run(count, **switches)[0]
            shares = {each: counts[each] / run.whole[each] for each in ("rows", "key_bytes")}
            found.append({"payload": name, "N": count, "rows": shares["rows"], "keys": shares["key_bytes"]})
    title = f"rows and gradients exchanged, over the batch deduplicated, {run.ranks} ranks"
    print_by_count(title, found, "rows", 3, console)
    return found


def packed(run: Measured, console: Console) -> list[dict]:
    found = []
    for name, switches in PAYLOADS.items():
        for count in MICRO_BATCHES:
            counts = run(count, **switches)[0]
            values = counts["rows"] / 2 * MODEL.dim  # as many rows come as gradients go
            found.append({"packed": name, "N": count, "bytes": counts["row_bytes"] / values - 4})
    title = "bytes that a value of a gradient takes on its way, 8 as an int64, 4 as a float32"
    print_by_count(title, found, "bytes", 2, console)
    return found


def taper(run: Measured, console: Console) -> list[dict]:
    found, rows = [], []
    for ratio in (1.0, 0.7, 0.5):
        shares = []
        for switches in ({}, {"first_use": True}, {"first_use": True, "clustering": True}):
            shares.append(run(8, taper=ratio, **switches)[0]["edge_bytes"] / run.whole["row_bytes"])
            found.append({"taper": ratio, **switches, "edges": shares[-1]})
        rows.append((f"{ratio}", *(f"{share:.3f}" for share in shares)))
    title = "first and last exchange, which nothing hides, over the batch deduplicated, N = 8"
    console.print(table(title, ("taper", "as in the paper", "first use", "first use, clustered"), rows))
    return found


def skip_fetch(run: Measured, console: Console) -> list[dict]:
    found, rows = [], []
    for skip in (False, True):
        counts = run(4, skip_fetch=skip)[0]
        row = {name: counts[name] / run.steps for name in ("read", "written", "kept")}
        found.append({"skip_fetch": skip, **row})
        rows.append((str(skip), *(f"{value:,.0f}" for value in row.values())))
    columns = "skip_fetch", "read", "written", "kept in the buffers"
    console.print(table("rows of the tables, per step", columns, rows))
    return found


def replicas(run: Measured, console: Console) -> list[dict]:
    found, rows_shown, dim = [], [], MODEL.dim
    for _, copies, _nodes in run.pool.meshes:
        for every in (0, 1, 4, run.steps) if copies > 1 else (0,):
            counts, loss, rows = run(4, copies, first_use=True, average_every=every)
            far = float((rows[:, :dim] - run.rows[:, :dim]).abs().max())
            row = {
                "parts": run.ranks // copies, "copies": copies, "average_every": every,
                "bytes": counts["row_bytes"] / run.whole["row_bytes"],
                "loss": (loss - run.loss) / run.loss, "weights": far,
            }  # fmt: skip
            found.append(row)
            rows_shown.append((
                f"{row['parts']} x {copies}", f"averaged, every {every}" if every else "exact",
                f"{row['bytes']:.2f}", f"{row['loss']:+.2e}", f"{far:.2e}",
            ))  # fmt: skip
    title = f"{run.ranks} ranks: gradients of replicas added up, or rows averaged (approximate)"
    caption = "bytes over 1D; relative loss and largest weight against the exact run"
    columns = "parts x copies", "replicas", "bytes", "loss", "weights"
    console.print(table(title, columns, rows_shown, caption=caption))
    return found


def main() -> None:
    args = options_of(__doc__, data="ml-100k", steps=12, ranks=4)
    job = Job(args.data, batch_size=128, num_negatives=32, sizes=MODEL, lr=3e-3)
    meshes = [(args.ranks, copies) for copies in range(1, args.ranks + 1) if args.ranks % copies == 0]
    with RankPool(meshes) as pool:
        run = Measured(pool, job, args.ranks, args.steps)
        parts = {
            each.__name__: each(run, Console()) for each in (payload, packed, taper, skip_fetch, replicas)
        }
    record(args, **parts)


if __name__ == "__main__":
    main()
