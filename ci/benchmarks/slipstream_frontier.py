"""Slipstream's speed against its loss of accuracy over several seeds, beside random dropping.

    python ci/benchmarks/slipstream_frontier.py --json out/frontier.json
    python ci/benchmarks/slipstream_frontier.py --seeds 5 --plans half

MovieLens-100K, DLRM, five epochs in 1,770 steps. `half` classifies after half of them, `early` after a
warm-up of 2 % as in the paper and three snapshots, together 3 %. A difference is to the exact run of the
same seed, which has seen the same inputs up to the classification; intervals are Student's at 95 % over the
seeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from frame import options_of, record

from tritonrec.harness.serve.rounds import interval
from tritonrec.harness.slipstream.report import whole_speedup

COMMAND = (
    "train --model dlrm --data ml-100k --dim 16 --batch-size 256 --optimizer rowwise_adagrad --lr 0.01 "
    "--steps 1770 --slipstream --control"
)
PLANS = {
    "half": "--warmup 700 --snapshot-every 70 --drop 0.3,0.6,0.9",
    "early": "--warmup 35 --snapshot-every 6 --drop 0.6,0.9",
}
POINTS = ("accuracy", "AUC")


def run(plan: str, seed: int) -> dict[str, Any]:
    """The JSON of one `tritonrec train --slipstream`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = f"{COMMAND} {PLANS[plan]} --seed {seed} --json {out}".split()
        subprocess.run(
            [sys.executable, "-m", "tritonrec", *words], check=True, stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def points(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each approximate run its speed, and its metrics minus the exact run's, in points of a hundred."""
    exact, *others = document["runs"]
    before = document["classify_at"] / (document["classify_at"] + exact["steps"])
    return [
        {
            "drop": each["drop"],
            "at_random": each["at_random"],
            "inputs": before + (1 - before) * each["inputs"] / exact["inputs"],
            "whole_speedup": whole_speedup(document, each),
            **{name: 100 * (each["metrics"][name] - exact["metrics"][name]) for name in POINTS},
        }
        for each in others
    ]


def summary(found: dict[str, list[list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """By plan and run: mean and half the interval's width over the seeds."""
    rows = []
    for plan, seeds in found.items():
        for of_seeds in zip(*seeds, strict=True):
            row = {"plan": plan, "seeds": len(of_seeds)}
            row |= {name: of_seeds[0][name] for name in ("drop", "at_random")}
            for name in ("inputs", "whole_speedup", *POINTS):
                row[name] = list(interval([each[name] for each in of_seeds]))
            rows.append(row)
    return rows


def main() -> None:
    plan = {"choices": PLANS, "default": [*PLANS]}
    args = options_of(__doc__, plans=plan, seeds=3)
    if args.seeds < 2:
        raise SystemExit(f"an interval needs two seeds, got {args.seeds}")
    found = {plan: [points(run(plan, seed)) for seed in range(1, args.seeds + 1)] for plan in args.plans}
    rows = summary(found)
    for row in rows:
        values = ", ".join(
            "{} {:.2f} ± {:.2f}".format(name, *row[name]) for name in ("inputs", "whole_speedup", *POINTS)
        )
        print(f"{row['plan']:6} {row['drop']:.0%} {'at random' if row['at_random'] else 'stale':10} {values}")
    record(args, rows=rows, seeds=found)


if __name__ == "__main__":
    main()
