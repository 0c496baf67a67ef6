"""Ten thousand steps in one go: does a rank's memory grow, or the number of files it holds open?

Trains a small model on two ranks with every switch on, over a made log that is read again and again, so that
the tables soon hold every key. Resident memory and open files of each rank are taken after a tenth of the
steps, when caches are warm, and at the end.

    python ci/benchmarks/soak.py [--steps 10000] [--ranks 2] [--json FILE]
"""

from __future__ import annotations

import gc
import os
import sys
import time

from frame import options_of, record
from resident import resident

from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import ExchangeConfig, Trainer, WindowConfig

SIZES = HSTUConfig(dim=8, layers=1, heads=1, qk_dim=8, v_dim=8, max_seq_len=8, dropout=0.1)
JOB = Job(
    "zipf:users=64,items=120,median_length=6,seed=2",
    batch_size=8,
    max_seq_len=8,
    num_negatives=1,
    sizes=SIZES,
)
WINDOW = WindowConfig(2, exchange=ExchangeConfig(first_use=True, taper=0.5, skip_fetch=True))
ALLOWED = 0.02
"""Growth of resident memory that the allocator's own arenas may show."""


def state() -> dict[str, int]:
    """Resident bytes, open files and threads of this process."""
    gc.collect()
    files, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return {"resident": resident(), "files": files, "threads": threads}


def soak(communicators: Communicators, steps: int) -> dict[str, dict[str, int]]:
    """States of this rank after a tenth of the steps and at the end."""
    loader = JOB.loader(communicators.rank, communicators.world_size)
    found: dict[str, dict[str, int]] = {}
    with Trainer(*JOB.build("adam"), communicators, "nestpipe", WINDOW) as trainer:
        for result in trainer.run(loader.batch(step) for step in range(steps)):
            if result.step + 1 == steps // 10:
                found["warm"] = state()
        found["end"] = state()
    return found


def main() -> int:
    args = options_of(__doc__, steps=10_000, ranks=2)
    began = time.perf_counter()
    with RankPool([args.ranks]) as pool:
        ranks = pool.run(soak, args.ranks, args.steps)
    code = 0
    for rank, found in enumerate(ranks):
        warm, end = found["warm"], found["end"]
        growth = end["resident"] / warm["resident"] - 1
        leaks = growth > ALLOWED or end["files"] > warm["files"] or end["threads"] > warm["threads"]
        code |= leaks
        memory = [f"{each['resident'] / 2**20:.1f} MiB" for each in (warm, end)]
        print(
            f"rank {rank}: {memory[0]} resident after {args.steps // 10:,} steps, {memory[1]} after "
            f"{args.steps:,} ({growth:+.2%}); open files {warm['files']}, {end['files']}; threads "
            f"{warm['threads']}, {end['threads']}: {'GROWS' if leaks else 'steady'}"
        )
    print(f"{(time.perf_counter() - began) / args.steps * 1e3:.2f} ms a step")
    record(args, ranks=ranks)
    return code


if __name__ == "__main__":
    sys.exit(main())
