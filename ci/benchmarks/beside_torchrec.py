"""docs/examples/sasrec.py beside torchrec_sasrec.py there: lines, quality after equal steps, step time.

    bash ci/benchmarks/torchrec.sh                                             # installs TorchRec
    python ci/benchmarks/beside_torchrec.py --quality 3 --json FILE
    python ci/benchmarks/beside_torchrec.py --rounds 5 --ranks 1,2 --json FILE   # times, on an idle machine

Both scripts run as they are, by turns, in processes of their own with one thread. A step's time is that of an
epoch's steps, from the first batch to the evaluation, over their number: the median of all epochs but the
first, of the slowest rank. Quality is the NDCG@10 of the averaged weights after the same number of steps,
without early stopping; a seed is that of the data's order, the initial values and dropout. What FILE has
already stays.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from frame import example, options_of
from torchrec_peer import TORCHREC, environment_beside_torchrec

import tritonrec
from tritonrec import data
from tritonrec.files import save_json

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
SYSTEMS = {
    "TorchRec": ("torchrec_sasrec", {}),
    "nestpipe, N = 1": ("sasrec", {"mode": "nestpipe", "micro_batches": 1}),
    "nestpipe, N = 4": ("sasrec", {"mode": "nestpipe", "micro_batches": 4}),
}
NEVER = 0
"""The patience with which no training stops early; each evaluation is of the test items then."""


def clocks() -> tuple[float, float]:
    """Wall-clock and this process's CPU seconds."""
    return time.perf_counter(), time.process_time()


def run(system: str, folder: Path, source: str, epochs: int, seed: int, ranked: bool) -> None:
    """One training on this rank, in a fresh process; writes a row of each epoch into `folder`."""
    torch.set_num_threads(1)
    name, options = SYSTEMS[system]
    sys.path.insert(0, str(TORCHREC))
    module = example(name)
    starts, rows = [], []

    class Loader(data.NextItemLoader):
        def batch(self, step):
            if step % self.steps_per_epoch == 0:
                starts.append(clocks())
            return super().batch(step)

    def timed(evaluate):
        """`evaluate` (loader among its arguments), with a row of the epoch before it."""

        def measured(*arguments, **options):
            seconds = [end - start for end, start in zip(clocks(), starts[-1], strict=True)]
            found = evaluate(*arguments, **options) if ranked else {"HR@10": 0.0, "NDCG@10": 0.0}
            loader = next(value for value in arguments if isinstance(value, Loader))
            steps = loader.steps_per_epoch
            times = {"wall": seconds[0] / steps, "cpu": seconds[1] / steps}
            rows.append({"steps": steps * len(starts), **times, **found})
            return found

        return measured

    module.NextItemLoader = Loader
    module.evaluate = timed(data.evaluate)
    tritonrec.Trainer.evaluate = timed(tritonrec.Trainer.evaluate)
    module.main(folder / "out", source, epochs, NEVER, seed=seed, **options)
    (folder / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(rows))


def training(args: argparse.Namespace, system: str, ranks: int, epochs: int, seed: int, ranked: bool) -> list:
    """Rows of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [__file__, "--system", system, "--folder", folder, "--data", args.data]
        command += ["--epochs", str(epochs), "--seed", str(seed), *["--ranked"] * ranked]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            raise SystemExit(f"{system}, seed {seed}:\n{done.stderr[-3000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]


def code_lines(name: str) -> int:
    """Lines of an example that are neither empty nor a comment, without its docstring."""
    text = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2]
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def measure(args: argparse.Namespace) -> dict:
    """All that `args` wants."""
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    found: dict = {"lines": {name: code_lines(name) for name in ("sasrec", "torchrec_sasrec")}}
    found |= {
        name: [] if wanted else before.get(name, [])
        for name, wanted in (("quality", args.quality), ("times", args.rounds))
    }
    for seed in range(1, args.quality + 1):
        for system in ("TorchRec", "nestpipe, N = 1"):
            last = training(args, system, 1, args.epochs, seed, True)[0][-1]
            row = {"system": system, "seed": seed, **{k: last[k] for k in ("steps", "NDCG@10", "HR@10")}}
            print(row, flush=True)
            found["quality"].append(row)
    for ranks in args.ranks:
        for number in range(args.rounds):
            for system in SYSTEMS:
                epochs = training(args, system, ranks, args.timed_epochs, 0, False)
                row = {"system": system, "ranks": ranks, "round": number}
                for clock in ("wall", "cpu"):
                    row[clock] = max(statistics.median(e[clock] for e in rank[1:]) for rank in epochs)
                print(row, flush=True)
                found["times"].append(row)
    return found


def report(found: dict) -> None:
    """The table of docs/training.md."""
    lines = found["lines"]
    print(f"lines of code: {lines['sasrec']} beside {lines['torchrec_sasrec']} with TorchRec\n")
    if found["quality"]:
        print("| system | steps | NDCG@10 | HR@10 |\n| --- | --: | --: | --: |")
    for system in dict.fromkeys(row["system"] for row in found["quality"]):
        rows = [row for row in found["quality"] if row["system"] == system]
        means = [_spread([row[name] for row in rows]) for name in ("NDCG@10", "HR@10")]
        print(f"| {system} | {rows[0]['steps']} | {means[0]} | {means[1]} |")
    if found["times"]:
        print("\n| system | ranks | ms a step | TorchRec's over it | CPU ms a step | TorchRec's over it |")
        print("| --- | --: | --: | --: | --: | --: |")
    for ranks, system in dict.fromkeys((row["ranks"], row["system"]) for row in found["times"]):
        cells = []
        for clock in ("wall", "cpu"):
            mine, theirs = (
                [row[clock] for row in found["times"] if (row["ranks"], row["system"]) == (ranks, name)]
                for name in (system, "TorchRec")
            )
            ratios = [their / my for their, my in zip(theirs, mine, strict=True)]
            cells += [f"{statistics.median(mine) * 1e3:.0f}", f"{statistics.median(ratios):.2f}"]
        print(f"| {system} | {ranks} | {' | '.join(cells)} |")


def _spread(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {spread:.4f}"


def main() -> None:
    hidden = {"help": argparse.SUPPRESS}  # of the processes that train
    args = options_of(
        __doc__, data="ml-100k", timed_epochs=3, system=hidden, folder=hidden, seed=hidden,
        quality={"default": 0, "help": "seeds; 0: no quality"},
        epochs={"default": 30, "help": "of 8 steps on MovieLens-100K"},
        rounds={"default": 0, "help": "of step times; 0: none"},
        ranks={"default": (1,), "help": "world sizes between commas, of the step times"},
        table={"type": Path, "help": "print the tables of this file and end"},
        ranked={"action": "store_true", **hidden},
    )  # fmt: skip
    if args.system:
        run(args.system, Path(args.folder), args.data, args.epochs, int(args.seed), args.ranked)
        return
    if args.table:
        report(json.loads(args.table.read_text()))
        return
    found = measure(args)
    earlier = json.loads(args.json.read_text())["environment"] if args.json and args.json.exists() else {}
    commands = [*earlier.get("commands", []), " ".join(sys.argv)]
    environment = {**environment_beside_torchrec(), "commands": commands}
    if args.json:
        save_json({"environment": environment, **found}, args.json)
    report(found)


if __name__ == "__main__":
    main()
