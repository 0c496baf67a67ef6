"""How fast hot rows come to rest while a DLRM trains, as in Slipstream's Fig. 3.

    python ci/benchmarks/slipstream_rest.py --json out/rest.json

Ten rows are drawn of those with at least a thousandth of a table's accesses, in a synthetic log of Criteo's
shape. A change is the distance between a row's values one fortieth of the training apart, over the row's
largest; a row is at rest from where all that follow are below a tenth. The paper's rows are at rest "in under
25 % of the training iterations".
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from frame import options_of, record

from tritonrec.distributed import Communicators
from tritonrec.harness.job import Job
from tritonrec.pipeline import Trainer, WindowConfig

PARTS, ROWS, AT_REST = 40, 10, 0.1
HOT = 1e-3
RULES = {"rowwise_adagrad": 0.01, "sgd": 0.1}


def hot_rows(job: Job, seed: int) -> list[tuple[str, int]]:
    """Table and id of rows drawn among the hot ones."""
    loader = job.loader(0, 1)
    lookups = [loader.batch(step).lookups() for step in range(40)]
    found = []
    for table in lookups[0]:
        ids, counts = np.unique(torch.cat([each[table].ids for each in lookups]).numpy(), return_counts=True)
        found += [(table, int(key)) for key in ids[counts >= HOT * counts.sum()]]
    drawn = np.random.default_rng(seed).choice(len(found), ROWS, replace=False)
    return [found[place] for place in drawn]


def changes(job: Job, rule: str, steps: int, rows: list[tuple[str, int]]) -> np.ndarray:
    """(rows, PARTS) distances between a row's values at the ends of each part of the training."""
    model, tables, optimizer = job.build(rule)
    loader, communicators = job.loader(0, 1), Communicators.local()

    def values() -> torch.Tensor:
        return torch.stack([
            tables.current_rows(table, torch.tensor([key], dtype=torch.int64))[0, : tables.dim_of(table)]
            for table, key in rows
        ])  # fmt: skip

    seen = [values()]
    ends = np.linspace(0, steps, PARTS + 1).astype(int)
    with Trainer(model, tables, optimizer, communicators, "sequential", WindowConfig()) as trainer:
        for first, last in pairwise(ends):
            for _ in trainer.run(loader.batch(step) for step in range(first, last)):
                pass
            seen.append(values())
    return torch.stack(seen).diff(dim=0).norm(dim=2).T.numpy()


def main() -> None:
    args = options_of(__doc__, samples=500_000, batch_size=256, epochs=2, seed=0)
    found = []
    for rule, lr in RULES.items():
        job = Job(f"criteo:samples={args.samples}", "dlrm", batch_size=args.batch_size, lr=lr, seed=args.seed)
        steps = args.epochs * job.loader(0, 1).steps_per_epoch
        rows = hot_rows(job, args.seed)
        relative = changes(job, rule, steps, rows)
        relative /= relative.max(1, keepdims=True)
        moving = relative >= AT_REST
        rest = [(PARTS - int(np.argmax(each[::-1]))) / PARTS for each in moving]
        early = relative[:, : PARTS // 4].sum(1) / relative.sum(1)
        found.append({
            "rule": rule, "lr": lr, "steps": steps, "rows": rows, "changes": relative.round(4).tolist(),
            "at_rest": rest, "moved_in_first_quarter": early.round(4).tolist(),
        })  # fmt: skip
        later = (np.median(relative[:, PARTS * share // 100 - 1]) for share in (25, 50, 100))
        print(
            f"{rule}, {steps} steps: rows at rest after {min(rest):.0%} to {max(rest):.0%} of the training, "
            f"median {np.median(rest):.0%}; {np.median(early):.0%} of a row's way in the first quarter; "
            f"changes at 25, 50, 100 %: {', '.join(f'{each:.2f}' for each in later)}"
        )
    record(args, rules=found)


if __name__ == "__main__":
    main()
