"""What a first call costs: processor seconds of fresh processes, with no kernel on disk and with all.

    python ci/benchmarks/measure_first_calls.py [NAME=CHECKOUT ...] [--only unique] [--json FILE]

Seconds are those of one process after `import torch`: the imports of tritonrec and numba, compilation and the
call. `cold` begins with an empty folder for kernels, `warm` with the one that `cold` leaves; `kernels` is the
number of files in it. Processes of several checkouts alternate; medians are printed. A checkout may be a
folder into which `pip install --target` has put a wheel, whose kernels are then read.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from frame import record

ROOT = Path(__file__).resolve().parents[2]
COUNTED = """
import sys, time
import torch
sys.path.insert(0, sys.argv[2])
before = time.process_time()
exec(sys.argv[1])
print(time.process_time() - before)
"""
OPS = "from tritonrec import ops\n"
ATTENTION = """
q, k, v = (torch.randn(9, 2, 4, requires_grad=True) for _ in range(3))
ops.hstu_attention(q, k, v, torch.tensor([0, 4, 9]), 5, alpha=0.5, scaling_seqlen=5).sum().backward()
"""
EVERY_OP = """
import launches
from contextlib import suppress
def run(op, *arguments, **options):
    with suppress(ops.ExactSumError):
        return op(*arguments, **options, impl="cpu")
launches.run, launches.device_seed = run, lambda: 5  # the CPU takes numbers
for call in launches.CASES.values():
    call()
"""
STEP = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
PROGRAMS = {
    "`unique`": OPS + "ops.unique(torch.tensor([5, 3, 5]))",
    "attention, forward and backward": OPS + ATTENTION,
    "training step of README.md": STEP.replace("range(20)", "range(1)"),
    "all ops, each once": OPS + EVERY_OP,
    "`tritonrec warmup`": "from tritonrec.harness.warmup import warm_up; warm_up()",
}


def seconds(program: str, checkout: Path, kernels: str) -> float:
    """Processor time of the program in a fresh process."""
    cases = next(each for each in (checkout, ROOT) if (each / "ci/compile").is_dir()) / "ci/compile"
    chosen = {"PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": kernels, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, program, str(cases)], cwd=checkout, env={**os.environ, **chosen},
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def measure(checkouts: dict[str, Path], repetitions: int, only: str) -> dict[str, Any]:
    """Program -> checkout -> medians of `cold` and `warm`, and `kernels`."""
    found: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        if only not in name:
            continue
        taken: dict[str, list[tuple[float, float]]] = {checkout: [] for checkout in checkouts}
        found[name] = {checkout: {} for checkout in checkouts}
        for _ in range(repetitions):
            for checkout, path in checkouts.items():
                with tempfile.TemporaryDirectory() as kernels:
                    pair = [seconds(program, path, kernels) for _ in ("cold", "warm")]
                    taken[checkout].append((pair[0], pair[1]))
                    found[name][checkout]["kernels"] = len(list(Path(kernels).rglob("*.nbc")))
        for checkout, pairs in taken.items():
            cold, warm = (round(median(values), 2) for values in zip(*pairs, strict=True))
            found[name][checkout] |= {"cold": cold, "warm": warm}
            print(f"{name:32s} {checkout:8s}", found[name][checkout], flush=True)
    return found


def main() -> None:
    """Print, and write where a file is named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", nargs="*", metavar="NAME=CHECKOUT", help="this one by default")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names of what is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    named = dict(each.split("=", 1) for each in options.checkouts) or {"here": ROOT}
    checkouts = {name: Path(path).resolve() for name, path in named.items()}
    found = measure(checkouts, options.repetitions, options.only)
    record(options, processor_seconds=found)


if __name__ == "__main__":
    main()
