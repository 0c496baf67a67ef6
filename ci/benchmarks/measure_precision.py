"""What 16 bits cost in accuracy and bytes: SASRec and HSTU on MovieLens-100K beside float32, several seeds.

Prints loss, NDCG@10 and HR@10 (leave one out, full ranking) after the same steps, the CPU time of a step, and
the bytes of exchanged rows on two ranks. A line of JSON for each run is appended as it ends, and runs that
the file has are not repeated.

    python ci/benchmarks/measure_precision.py --json precision.jsonl [--epochs 20] [--seeds 3]
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from frame import example, options_of
from rich.console import Console
from rich.table import Table

from tritonrec import FeatureConfig, HashTableCollection, RowOptimizer, nn
from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.settings import with_values

SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "bf16, rows in bf16": {"precision": "bf16", "exchange_precision": "bf16"},
}
MODELS, LR = ("sasrec", "hstu"), 3e-3


def parts_of(model: str, seed: int):
    """Model, tables, optimizer and job; batches of 128 samples with 32 negatives a token."""
    sizes = HSTUConfig(dim=64, layers=2, heads=2, qk_dim=32, v_dim=32, max_seq_len=50, dropout=0.2)
    job = Job(batch_size=128, num_negatives=32, lr=LR, seed=seed, sizes=sizes)
    if model == "hstu":
        return *job.build("adam"), job
    torch.manual_seed(seed)
    sasrec = example()
    encoder = nn.PaddedNextItem(sasrec.SASRec(), sasrec.LENGTH)
    nn.convert(encoder)
    tables = HashTableCollection([FeatureConfig("item", 64)], RowOptimizer("adam", job.lr), seed=seed)
    return encoder, tables, torch.optim.Adam(encoder.parameters(), job.lr, fused=True), job


def train(communicators: Communicators, model: str, setting: str, seed: int, epochs: int, steps: int = 0):
    """Metrics and the CPU seconds of a step; of `steps` steps, only the counts."""
    made, tables, optimizer, job = parts_of(model, seed)
    loader = job.epochs(communicators.rank, communicators.world_size)
    config = with_values(WindowConfig(4, seed=seed, max_grad_norm=1.0), SETTINGS[setting])
    count = steps or epochs * loader.steps_per_epoch
    with Trainer(made, tables, optimizer, communicators, "nestpipe", config) as trainer:
        clock, skipped, loss = time.process_time(), 0, []
        for result in trainer.run(loader.batch(step) for step in range(count)):
            skipped += result.skipped
            loss.append(result.loss)
        seconds = (time.process_time() - clock) / count
        if steps:
            return trainer.counts.embedding_bytes, trainer.counts.row_bytes
        found = trainer.evaluate(loader)
    last = statistics.fmean(loss[-loader.steps_per_epoch :])
    return {"loss": last, **found, "skipped": skipped, "cpu_seconds": seconds, "steps": count}


def print_rows(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="mean and standard deviation over the seeds")
    for name in ("model", "precision", "loss", "NDCG@10", "HR@10", "left out", "CPU ms a step", "row bytes"):
        table.add_column(name, justify="left" if name in ("model", "precision") else "right")
    for model in MODELS:
        for setting in SETTINGS:
            mine = [row for row in rows if (row["model"], row["setting"]) == (model, setting)]
            if not mine:
                continue
            words = []
            for name in ("loss", "NDCG@10", "HR@10"):
                values = [row[name] for row in mine]
                spread = statistics.stdev(values) if len(values) > 1 else float("nan")
                words.append(f"{statistics.fmean(values):.4f} ± {spread:.4f}")
            words.append(str(sum(row["skipped"] for row in mine)))
            words.append(f"{1000 * statistics.median(row['cpu_seconds'] for row in mine):.0f}")
            words.append(f"{mine[0]['embedding_bytes']:,}")
            table.add_row(model, setting, *words)
    console.print(table)


if __name__ == "__main__":
    needed = {"type": Path, "required": True}
    arguments = options_of(__doc__, json=needed, epochs=20, seeds=3)
    done = (
        [json.loads(line) for line in arguments.json.read_text().splitlines()]
        if arguments.json.exists()
        else []
    )
    torch.set_num_threads(1)
    sent = {}
    with RankPool([2]) as pool:
        for setting in SETTINGS:
            both = pool.run(train, 2, "hstu", setting, 0, 0, 4)
            sent[setting] = sum(each[0] for each in both) // 4
    for seed in range(arguments.seeds):
        for model in MODELS:
            for setting in SETTINGS:
                key = {"model": model, "setting": setting, "seed": seed, "epochs": arguments.epochs}
                if any(key.items() <= row.items() for row in done):
                    continue
                found = train(Communicators.local(), model, setting, seed, arguments.epochs)
                row = {**key, **found, "embedding_bytes": sent[setting], "torch": torch.__version__}
                done.append(row)
                with arguments.json.open("a") as file:
                    print(json.dumps(row), file=file)
    print_rows(done, Console(width=130))
