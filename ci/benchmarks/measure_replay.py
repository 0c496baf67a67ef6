"""What replay costs: the processor time of its parts as shares of training's, and the bytes that it sends.

Two trainings, one with `Replay`, take turns in the same processes, with one thread for each lane. Parts are
timed on their own threads, so that a difference of a percent does not drown in the noise of whole runs; the
difference of the whole runs is printed beside them.

    OMP_NUM_THREADS=1 python ci/benchmarks/measure_replay.py [--world-size 2] [--share 0.0025] [--json FILE]
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from functools import wraps
from typing import Any

import torch
from frame import options_of, record

from tritonrec.distributed import Communicators, Ledger, RankPool
from tritonrec.embedding.row_checksums import RowChecksums
from tritonrec.embedding.row_storage import RowStorage
from tritonrec.harness.job import Job
from tritonrec.pipeline import Trainer, WindowConfig
from tritonrec.resilience import Replay

PARTS = {
    "computed again": "computed again, compared over ranks",
    "rows read": "checksums of rows as they are read",
    "rows written": "checksums of rows as they are written",
    "messages": "checksums of messages, at both ends",
}


def measure(communicators: Communicators, job: Job, share: float, micro_batches: int, rounds: int):
    """By round: processor seconds of a step with and without replay, of its parts, and bytes of both."""
    torch.set_num_threads(1)
    seconds: Counter[str] = Counter()
    _time(seconds, Ledger, "note", "messages")
    _time(seconds, RowChecksums, "write", "rows written")
    _time(seconds, RowStorage, "gather", "gather of rows")
    found = []
    for _round in range(rounds):
        for with_replay in (False, True):
            model, tables, optimizer = job.build("adam")
            loader = job.loader(communicators.rank, communicators.world_size)
            config = WindowConfig(micro_batches)
            replay = Replay(share)
            with Trainer(model, tables, optimizer, communicators, "nestpipe", config) as trainer, replay:
                if with_replay:
                    replay.attach(trainer)
                    assert replay.plan is not None
                    period = replay.plan.period
                else:
                    period = round(1 / share)
                # whole turns of the plan: every rank has been due as often as any other
                steps = -(-period // micro_batches)
                list(trainer.run(loader.batch(step) for step in range(steps)))
                before = Counter(replay.counts), Counter(vars(trainer.counts))
                seconds.clear()
                began = time.process_time()
                list(trainer.run(loader.batch(step) for step in range(steps, 2 * steps)))
                total = (time.process_time() - began) / steps
                own = Counter(replay.counts) - before[0]
                counts = Counter(vars(trainer.counts)) - before[1]
            parts = {name: each / steps for name, each in seconds.items()}
            parts["computed again"] = own["replay_microseconds"] / 1e6 / steps
            parts["rows read"] = own["check_microseconds"] / 1e6 / steps
            found.append(
                {
                    "replay": with_replay,
                    "seconds": total,
                    "parts": parts,
                    "bytes": (counts["row_bytes"] + counts["key_bytes"]) / steps,
                    "replay_bytes": own["replay_bytes"] / steps,
                    "rows": own["rows_checked"] / steps,
                }
            )
    return found


def _time(seconds: Counter[str], kind: type, name: str, part: str) -> None:
    """Add the processor time of a method's calls, on their threads."""
    method = getattr(kind, name)

    @wraps(method)
    def timed(*args: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return method(*args, **options)
        finally:
            seconds[part] += time.thread_time() - began

    setattr(kind, name, timed)


def summary(runs: list[dict[str, Any]], world_size: int, share: float) -> dict[str, Any]:
    """Medians over ranks and rounds; parts as shares of a step without replay."""
    plain = [run for run in runs if not run["replay"]]
    checked = [run for run in runs if run["replay"]]
    step = statistics.median(run["seconds"] for run in plain)
    parts = {name: statistics.median(run["parts"].get(name, 0.0) for run in checked) / step for name in PARTS}
    gather = statistics.median(run["parts"].get("gather of rows", 0.0) for run in plain)
    sent = statistics.mean(run["bytes"] for run in plain)
    return {
        "world_size": world_size,
        "share": share,
        "step_ms": 1e3 * step,
        "parts": parts,
        "sum": sum(parts.values()),
        "difference": statistics.median(run["seconds"] for run in checked) / step - 1,
        "rows_read_over_gather": parts["rows read"] * step / gather if gather else None,
        "rows": statistics.mean(run["rows"] for run in checked),
        "bytes": sent,
        "replay_bytes": statistics.mean(run["replay_bytes"] for run in checked),
    }


def main() -> None:
    args = options_of(
        __doc__, world_size=2, micro_batches=4, share=0.0025, data="ml-100k", batch_size=128, negatives=32,
        rounds=3,
    )  # fmt: skip
    job = Job(args.data, batch_size=args.batch_size, num_negatives=args.negatives, lr=3e-3)
    with RankPool([(args.world_size, 1)]) as pool:
        ranks = pool.run(measure, args.world_size, job, args.share, args.micro_batches, args.rounds)
    found = summary([run for rank in ranks for run in rank], args.world_size, args.share)
    print(json.dumps(found, indent=1))
    for name, text in PARTS.items():
        print(f"{100 * found['parts'][name]:6.2f} %  {text}")
    print(f"{100 * found['sum']:6.2f} %  of a step's processor time together, {found['step_ms']:.1f} ms")
    record(args, **found)


if __name__ == "__main__":
    main()
