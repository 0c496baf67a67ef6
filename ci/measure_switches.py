"""What the window's switches and replicas of the tables save, in bytes and rows: counts, which no machine changes.

Trains the README's model on MovieLens-100K (128 samples, 32 negatives, Adam) for a few steps on 4 ranks, with
each switch on and off, and prints what travelled. Every run's losses are compared in every bit first.

    python ci/measure_switches.py [--steps 12] [--ranks 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.setup import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig

MODEL = HSTUConfig(dim=64, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.2)
JOB = Job("ml-100k", batch_size=128, num_negatives=32, sizes=MODEL, lr=3e-3)
MICRO_BATCHES = (1, 2, 4, 8)
PAYLOADS: dict[str, dict[str, bool]] = {
    "as in the paper": {},
    "clustered": {"clustering": True},
    "first use": {"first_use": True},
}


def train_rank(communicators: Communicators, config: WindowConfig, steps: int):
    """Counts, losses by sample, and rows with their ids of this rank's part."""
    model, tables, dense = JOB.build("adam")
    loader = JOB.loader(communicators.rank, communicators.world_size)
    biggest = Counter()
    with Trainer(model, tables, dense, communicators, "nestpipe", config) as trainer:
        for stage in ("exchange", "gradient_exchange"):
            action = trainer.program.actions[stage]

            def counted(window, micro_batch, stage=stage, action=action):
                action(window, micro_batch)
                biggest[stage, micro_batch] += window.sent_bytes

            trainer.program.actions[stage] = counted
        losses = [result.losses for result in trainer.run(loader.batch(step) for step in range(steps))]
        if config.average_every:
            trainer.sync()
        edges = biggest["exchange", 0] + biggest["gradient_exchange", config.window_micro_batches - 1]
        return {**vars(trainer.counts), "edge_bytes": edges}, torch.cat(losses), tables.export()["item"]


def measure(pool: RankPool, ranks: int, config: WindowConfig, steps: int, replicas: int = 1):
    """Counts of all ranks together, sum of the losses, and one copy of all rows by id."""
    parts = pool.run(train_rank, ranks, config, steps, replicas=replicas)
    counts = sum((Counter(each) for each, _, _ in parts), Counter())
    ids = torch.cat([ids for _, _, (ids, _) in parts[::replicas]])
    rows = torch.cat([rows for _, _, (_, rows) in parts[::replicas]])
    losses = torch.cat([losses for _, losses, _ in parts]).double().sum()
    return counts, float(losses), rows[ids.argsort()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console, ranks, steps = Console(), args.ranks, args.steps
    groupings = [g for g in range(1, ranks + 1) if ranks % g == 0]
    report: dict[str, list[dict[str, object]]] = {
        "payload": [],
        "skip_fetch": [],
        "taper": [],
        "replicas": [],
    }

    def config(count: int, **switches) -> WindowConfig:
        return WindowConfig(count, seed=JOB.seed, **switches)

    with RankPool([(ranks, g) for g in groupings]) as pool:
        whole, loss, rows = measure(pool, ranks, config(1), steps)

        def run(count: int, replicas: int = 1, **switches):
            counts, other_loss, other_rows = measure(pool, ranks, config(count, **switches), steps, replicas)
            if not switches.get("average_every"):
                assert other_loss == loss and torch.equal(rows, other_rows), (count, replicas, switches)
            return counts, other_loss, other_rows

        table = Table(title=f"rows and gradients exchanged, over the batch deduplicated, {ranks} ranks")
        table.add_column("")
        for count in MICRO_BATCHES:
            table.add_column(f"N = {count}", justify="right")
        for name, switches in PAYLOADS.items():
            ratios = []
            for count in MICRO_BATCHES:
                found = run(count, **switches)[0]
                ratios.append(found["row_bytes"] / whole["row_bytes"])
                report["payload"].append({"payload": name, "N": count, "over_deduplicated": ratios[-1],
                                          "key_bytes": found["key_bytes"] / whole["key_bytes"]})  # fmt: skip
            table.add_row(name, *(f"{ratio:.3f}" for ratio in ratios))
        console.print(table)

        table = Table(title="bytes of the first exchange and the last, which nothing hides, over all, N = 8")
        for name in ("taper", "plain", "first use", "first use, clustered"):
            table.add_column(name, justify="right")
        for taper in (1.0, 0.7, 0.5):
            shares = []
            for switches in ({}, {"first_use": True}, {"first_use": True, "clustering": True}):
                found = run(8, taper=taper, **switches)[0]
                shares.append(found["edge_bytes"] / found["row_bytes"])
                report["taper"].append({"taper": taper, **switches, "edge_share": shares[-1]})
            table.add_row(f"{taper}", *(f"{share:.1%}" for share in shares))
        console.print(table)

        table = Table(title="rows read from and written to the tables, per step")
        for name in ("skip_fetch", "read", "written", "kept in the buffers"):
            table.add_column(name, justify="right")
        for skip in (False, True):
            found = run(4, skip_fetch=skip)[0]
            row = {name: found[name] / steps for name in ("read", "written", "kept")}
            report["skip_fetch"].append({"skip_fetch": skip, **row})
            table.add_row(str(skip), *(f"{value:,.0f}" for value in row.values()))
        console.print(table)

        table = Table(
            title=f"{ranks} ranks: parts x copies of the tables, gradients added up or rows averaged"
        )
        for name in (
            "parts x copies",
            "replicas",
            "row bytes over 1D",
            "loss - exact",
            "largest weight - exact",
        ):
            table.add_column(name, justify="right")
        for replicas in groupings:
            for every in (0, 1, 4, steps) if replicas > 1 else (0,):
                found, other, values = run(4, replicas, first_use=True, average_every=every)
                dim = MODEL.dim
                row = {
                    "parts": ranks // replicas, "copies": replicas, "average_every": every,
                    "bytes_over_1d": found["row_bytes"] / whole["row_bytes"],
                    "loss_difference": (other - loss) / loss,
                    "weight_difference": float((values[:, :dim] - rows[:, :dim]).abs().max()),
                }  # fmt: skip
                report["replicas"].append(row)
                how = f"averaged every {every}, approximate" if every else "exact"
                table.add_row(
                    f"{ranks // replicas} x {replicas}", how, f"{row['bytes_over_1d']:.2f}",
                    f"{row['loss_difference']:+.2e}", f"{row['weight_difference']:.2e}",
                )  # fmt: skip
        console.print(table)
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
