"""An evaluation by ranks together beside one by a copy of all rows on each: processor time and memory.

    python ci/benchmarks/measure_evaluation.py --items 300000 --dim 128 --ranks 1,2

HSTU on a Zipf log of 3,000 users, whose catalogue are the items that occur. Metrics have to be equal, and are
compared first. Memory is what a rank's process has more than before, at most.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from frame import by_turns, options_of, over, record
from resident import give_back, resident

from tritonrec.capacity import peak_bytes
from tritonrec.data import evaluate
from tritonrec.distributed import Communicators, RankPool
from tritonrec.harness.job import Job
from tritonrec.harness.train.gather import whole_tables
from tritonrec.nn import HSTUConfig
from tritonrec.pipeline import Trainer, next_item_scores


def measure(
    communicators: Communicators, items: int, dim: int, rounds: int
) -> tuple[int, float, list[float]]:
    """Items of the catalogue, the time over that by copies, and MiB of both."""
    sizes = HSTUConfig(dim=dim, max_seq_len=20)
    data = f"zipf:users=3000,items={items},exponent=0.4,seed=3"
    job = Job(data, batch_size=64, max_seq_len=20, num_negatives=20, sizes=sizes)
    made, held_out = job.build("sgd"), job.epochs()
    with Trainer(*made, communicators, trust_model=True) as trainer:
        batches = job.loader(communicators.rank, communicators.world_size)
        list(trainer.run(map(batches.batch, range(40))))

        def by_copies() -> dict[str, float]:
            tables = whole_tables(trainer.rows_of_ranks())
            scores = next_item_scores(trainer.dense.evaluated.eval(), tables, held_out.catalogue)
            return evaluate(scores, held_out, (10,))

        calls = {"copies": by_copies, "together": lambda: trainer.evaluate(held_out)}
        times = by_turns(calls, rounds, same=dict.__eq__)
        memory = [taken(call) for call in calls.values()]
    return len(held_out.catalogue), over(times["together"].cpu, times["copies"].cpu), memory


def taken(call: Callable[[], object]) -> float:
    give_back()
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")
    call()
    return (peak_bytes() - before) / 2**20


def main() -> None:
    options = options_of(__doc__, items=300_000, dim=128, ranks=(1, 2), rounds=3)
    rows = []
    for ranks in options.ranks:
        with RankPool([ranks], timedelta(seconds=300)) as pool:
            found = pool.run(measure, ranks, options.items, options.dim, options.rounds)
        items, time, (copies, together) = max(found, key=lambda each: each[1])
        rows.append({"ranks": ranks, "items": items, "time": time, "copies": copies, "together": together})
        print(
            f"{ranks} ranks, {items:,} items: {time:.2f} of the processor time by copies; "
            f"{together:.0f} MiB, and {copies:.0f} by copies",
            flush=True,
        )
    record(options, rows=rows)


if __name__ == "__main__":
    main()
