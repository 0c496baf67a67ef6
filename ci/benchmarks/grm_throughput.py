"""GRM's training throughput as MTGRBoost's techniques are added one at a time (its Figures 13 and 16).

    python ci/benchmarks/grm_throughput.py --json out/grm.json
    python ci/benchmarks/grm_throughput.py --sizes GRM-110G --ranks 1 --samples 2 --steps 1 --rounds 1
    python ci/benchmarks/grm_throughput.py --sizes small --ranks 4 --rate 100 --json out/grm_links.json

Settings take turns for some rounds, on the same samples: separate tables and no dedup, then merged tables,
dedup before the exchange, before the lookup, at both, and Algorithm 1's batches. Before a time is printed,
every setting but the last, which cuts other batches, must have the losses of the first in every bit. A row
has samples and tokens per second of wall time, CPU seconds of all ranks per 1,000 tokens, both as medians of
ratios to the first setting of the same round, and counts, which no other load changes. Ranks are processes of
this machine, so an exchange costs copies and no network; with `--rate` they are joined by links of so many
Mbit/s, as in `tritonrec lab`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from dataclasses import replace

import torch
from frame import options_of, record

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.harness.lab.rounds import ranks_in
from tritonrec.harness.network import Network
from tritonrec.nn import GRM_SIZES, HSTUConfig
from tritonrec.pipeline import ExchangeConfig, Trainer, WindowConfig

SIZES = {"small": {"dim": 64, "layers": 1, "heads": 2, "qk_dim": 32, "v_dim": 32}, **GRM_SIZES}
SETTINGS: dict[str, tuple[bool, str, bool]] = {
    "baseline": (False, "none", False),
    "+ merging": (True, "none", False),
    "+ dedup before the exchange": (True, "exchange", False),
    "+ dedup before the lookup": (True, "lookup", False),
    "+ both": (True, "both", False),
    "+ balancing": (True, "both", True),
}
"""Tables merged, `WindowConfig.dedup`, Algorithm 1's batches."""


def run_rank(communicators: Communicators, job: Job, dedup: str, steps: int) -> dict:
    """Counts, seconds and CPU seconds of `steps` steps after a first one, and losses by sample."""
    model, tables, optimizer = job.build("adam")
    loader = job.loader(communicators.rank, communicators.world_size)
    batches = [loader.batch(step) for step in range(steps + 1)]
    window = WindowConfig(1, seed=job.seed, exchange=ExchangeConfig(dedup=dedup))
    losses: list[tuple[int, float]] = []
    # The trainer would compare the model's bits again, within these few steps, for batches of another size.
    with Trainer(model, tables, optimizer, communicators, "sequential", window, trust_model=True) as trainer:
        for number, batch in enumerate(batches):
            if number == 1:
                communicators.control.all_reduce(torch.zeros(1, dtype=torch.float32), "start together")
                began, cpu, before = time.perf_counter(), time.process_time(), Counter(vars(trainer.counts))
            result = trainer.step(batch)
            losses += zip(result.sample_ids.tolist(), result.losses.tolist(), strict=True)
    counts = Counter(vars(trainer.counts))
    counts.subtract(before)
    tokens = [sum(len(lookup.ids) for lookup in batch.lookups().values()) for batch in batches[1:]]
    return {
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
        "samples": sum(batch.num_samples for batch in batches[1:]),
        "ids": sum(tokens),
        "longest": [len(batch.timestamps) for batch in batches[1:]],
        "counts": dict(counts),
        "losses": losses,
    }


def run(pool: RankPool, ranks: int, job: Job, name: str, steps: int) -> dict:
    """One setting by all ranks: rates and counts of the whole."""
    merge, dedup, dynamic = SETTINGS[name]
    parts = pool.run(run_rank, ranks, replace(job, merge=merge, dynamic=dynamic), dedup, steps)
    counts = sum((Counter(part["counts"]) for part in parts), Counter())
    tokens = [list(each) for each in zip(*(part["longest"] for part in parts), strict=True)]
    total, seconds = sum(map(sum, tokens)), max(part["seconds"] for part in parts)
    return {
        "samples_per_second": sum(part["samples"] for part in parts) / seconds,
        "tokens_per_second": total / seconds,
        "cpu_per_1000_tokens": sum(part["cpu"] for part in parts) / total * 1e3,
        "lookups": counts["lookups"] / steps,
        "keys_exchanged": counts["exchanged"] / steps,
        "rows_read": counts["read"] / steps,
        "bytes": (counts["row_bytes"] + counts["key_bytes"]) / steps,
        "longest_over_mean": sum(map(max, tokens)) * ranks / max(total, 1),
        "losses": sorted(loss for part in parts for loss in part["losses"]),
    }


def measure(pool: RankPool, ranks: int, job: Job, steps: int, rounds: int) -> dict[str, dict]:
    """Every setting's medians over the rounds."""
    found: dict[str, list[dict]] = {name: [] for name in SETTINGS}
    for _ in range(rounds):
        for name in SETTINGS:
            row = run(pool, ranks, job, name, steps)
            found[name].append(row)
            if not SETTINGS[name][2]:
                assert row["losses"] == found["baseline"][0]["losses"], f"{name}: other losses"
    rows = {}
    for name, every in found.items():
        row = {key: value for key, value in every[0].items() if key != "losses"}
        for key in ("samples_per_second", "tokens_per_second", "cpu_per_1000_tokens"):
            ratios = [own[key] / base[key] for own, base in zip(every, found["baseline"], strict=True)]
            row[key] = statistics.median(own[key] for own in every)
            row[f"{key}_ratio"] = statistics.median(ratios)
            row[f"{key}_range"] = [min(ratios), max(ratios)]
        rows[name] = row
    return rows


def main() -> None:
    args = options_of(
        __doc__, data="ml-100k", ranks=(1, 2), steps=3, rounds=3,
        sizes={"default": ("small", "GRM-4G"), "help": f"some of {', '.join(SIZES)}"},
        samples={"default": 16, "help": "of the global batch"},
        tokens={"default": 50, "help": "of history, at most"},
        rate={"default": 0.0, "help": "Mbit/s of each rank's link; 0: none"},
    )  # fmt: skip
    if unknown := sorted({*args.sizes} - {*SIZES}):
        raise SystemExit(f"--sizes: no {', '.join(unknown)}; there are {', '.join(SIZES)}")
    if args.rate and len(args.ranks) > 1:
        raise SystemExit("--rate joins one number of ranks: name one (--ranks)")
    rows, links = [], args.rate and Network(*args.ranks, args.rate, os.getpid())
    with ranks_in(links) if links else RankPool(args.ranks) as pool:
        for size in args.sizes:
            model = HSTUConfig(**SIZES[size], max_seq_len=args.tokens, dropout=0.0)
            samples = args.samples * (8 if size == "small" else 1)
            job = Job(
                args.data, model="grm", batch_size=samples, max_seq_len=args.tokens, sizes=model, lr=1e-3
            )
            for count in args.ranks:
                for name, row in measure(pool, count, job, args.steps, args.rounds).items():
                    rows.append({"size": size, "ranks": count, "samples": samples, "setting": name, **row})
                    print(
                        f"{size:9} {count} ranks  {name:28} {row['tokens_per_second']:8.0f} tokens/s "
                        f"({row['tokens_per_second_ratio']:.2f})  CPU {row['cpu_per_1000_tokens_ratio']:.2f} "
                        f"lookups {row['lookups']:.0f}  keys {row['keys_exchanged']:.0f}  rows read "
                        f"{row['rows_read']:.0f}  MB {row['bytes'] / 1e6:.2f}  longest/mean "
                        f"{row['longest_over_mean']:.3f}",
                        flush=True,
                    )
    record(args, rows=rows)


if __name__ == "__main__":
    main()
