"""Times block sizes and warps on the GPU that is here: ``python ci/compile/tune.py [MODULE ...]``.

    python ci/compile/tune.py --emulate [MODULE ...]      without a GPU: which candidates may be timed

Each candidate stands in for the constants of a Triton file, or for the result of its `configuration`. The
cases of ci/compile/launches.py for the file's folder run for real, and each of their launches is timed
alone. A module's table is printed when the module is done, the fastest candidate first, and written into the
file of ``--json``, so that a run that is cut short keeps what it has measured. A person takes a winner over.

A candidate may be timed once its compiled kernels have run in the emulator (docs/emulator.md) without a race,
an access outside or a result that depends on the schedule: ci/baselines/tune.json names those that did, and
the Triton file that they ran with. A file that has changed since has to be emulated again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import launches
import torch

import tritonrec.kernels

# module -> what may be tried: each name's values, all combinations. Nothing here may depend on a batch.
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "silu.triton_silu": {"BLOCK": (512, 1024, 2048)},
    "fixed_point.triton_fixed_point": {"BLOCK": (512, 1024, 2048), "NUM_WARPS": (2, 4, 8)},
    "bucketize.triton_bucketize": {"BLOCK": (512, 1024, 2048), "NUM_WARPS": (4, 8)},
    "sum_of_squares.triton_sum_of_squares": {"BLOCK": (512, 1024, 2048), "NUM_WARPS": (2, 4, 8)},
    "hash_table.triton_hash_table": {"BLOCK": (64, 128, 256), "NUM_WARPS": (1, 2, 4, 8)},
    "unique.triton_unique": {"BLOCK": (128, 256, 512), "NUM_WARPS": (1, 2, 4, 8)},
    "rows.triton_rows": {"BLOCK_ROWS": (4, 8, 16, 32), "NUM_WARPS": (2, 4, 8)},
    "rows.triton_segment_sum": {"NUM_WARPS": (1, 2, 4)},
    "rows.triton_unsorted_sum": {"ROWS": (8, 16, 32), "NUM_WARPS": (1, 2, 4)},
    "packed_rows.triton_packed_rows": {"BLOCK_ROWS": (4, 8, 16), "NUM_WARPS": (2, 4, 8)},
    "sparse_optimizers.triton_sparse_optimizers": {"ELEMENTS": (512, 1024, 2048), "NUM_WARPS": (2, 4, 8)},
    "philox.triton_philox": {"COUNTERS": (128, 256, 512), "NUM_WARPS": (2, 4, 8)},
    "sampled_softmax.triton_softmax": {"TILE": (1024, 2048, 4096)},
    "linear.triton_linear": {
        "ROWS": (64, 128), "COLUMNS": (64, 128, 256), "num_warps": (4, 8), "num_stages": (3, 4),
    },
    "hstu_attention.triton_attention": {
        "BLOCK_M": (32, 64, 128), "BLOCK_N": (16, 32, 64), "num_warps": (4, 8), "num_stages": (2, 3),
    },
    "relative_aggregate.triton_relative": {"BLOCK_M": (32, 64), "BLOCK_N": (16, 32), "num_warps": (4, 8)},
}  # fmt: skip
PASSED = Path(__file__).resolve().parents[1] / "baselines" / "tune.json"
# What a program of one dimension calls the number of its elements.
ELEMENTS = ("BLOCK", "ELEMENTS", "COUNTERS")
WARP = 32


def candidates(module: str) -> Iterator[dict[str, int]]:
    """Combinations of a module's values that give every thread an element of its own.

    With more threads than elements several threads take one lane of an atomic, and programs race.
    """
    space = SPACES[module]
    for values in itertools.product(*space.values()):
        candidate = dict(zip(space, values, strict=True))
        threads = WARP * candidate.get("NUM_WARPS", 0)
        if all(candidate.get(name, threads) >= threads for name in ELEMENTS):
            yield candidate


@contextmanager
def configured(module: Any, candidate: dict[str, int]) -> Iterator[None]:
    """The module launches with a candidate: by its `configuration`, or by its constants."""
    if hasattr(module, "configuration"):
        original = module.configuration
        changed = {"configuration": lambda *given, **named: {**original(*given, **named), **candidate}}
    else:
        changed = dict(candidate)
    before = {name: getattr(module, name) for name in changed}
    for name, value in changed.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


@contextmanager
def noting_calls(calls: list[Callable[[], Any]]) -> Iterator[None]:
    """Every launch happens, and is noted as a call that repeats it."""
    before = launches.JIT.run

    def run(kernel, *args, **kwargs):
        calls.append(lambda: before(kernel, *args, **kwargs))
        return before(kernel, *args, **kwargs)

    launches.JIT.run = run
    try:
        yield
    finally:
        launches.JIT.run = before


def cases_of(name: str) -> list[Callable[[], Any]]:
    """The cases of a module's folder."""
    folder = name.partition(".")[0]
    names = ("gather_rows", "segment_sum") if folder == "rows" else (folder,)
    return [case for label, case in launches.CASES.items() if label.startswith(names)]


def digest(name: str) -> str:
    """Of the Triton file."""
    file = Path(tritonrec.kernels.__file__).parent / (name.replace(".", "/") + ".py")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def emulate(name: str) -> list[dict[str, int]]:
    """The candidates whose cases run without a fault in the emulator of sm_90, in three schedules."""
    from tritonrec.harness.emulator import Emulation, emulated

    module, good = importlib.import_module(f"tritonrec.kernels.{name}"), []
    for candidate in candidates(name):
        try:
            with emulated(Emulation("sm_90", schedules=3)), configured(module, candidate):
                for case in cases_of(name):
                    case()
        except Exception as error:  # of the compiler, or of the emulator
            print(f"{name} {candidate}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        else:
            good.append(candidate)
    return good


def passed(name: str) -> list[dict[str, int]]:
    """The candidates of a module that may be timed: they passed the emulator, with its file as it is now."""
    known = json.loads(PASSED.read_text()).get(name)
    if known is None or known["source"] != digest(name):
        print(f"{name} has to be emulated first: python ci/compile/tune.py --emulate {name}", file=sys.stderr)
        return []
    return [candidate for candidate in candidates(name) if candidate in known["passed"]]


def microseconds(name: str, candidate: dict[str, int]) -> float:
    """The sum of the medians of all launches in the cases of a module's folder."""
    from triton.testing import do_bench

    calls: list[Callable[[], Any]] = []
    module = importlib.import_module(f"tritonrec.kernels.{name}")
    with (
        launches.sized(65_539, 512),
        torch.device("cuda"),
        noting_calls(calls),
        configured(module, candidate),
    ):
        for case in cases_of(name):
            case()
    return 1e3 * sum(do_bench(call, return_mode="median") for call in calls)


def tune(names: list[str], path: Path | None) -> None:
    """Measure the candidates of each module; print and write its table before the next one begins."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        timed = []
        for candidate in passed(name):
            try:
                timed.append({**candidate, "microseconds": microseconds(name, candidate)})
            except Exception as error:  # a candidate may need more than a block can have
                print(f"{name} {candidate}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        tables[name] = sorted(timed, key=lambda row: row["microseconds"])
        for row in tables[name]:
            print(name, json.dumps(row), flush=True)
        if path is not None:
            path.write_text(json.dumps({"device": torch.cuda.get_device_name(), "tables": tables}, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("module", nargs="*", help=", ".join(SPACES))
    parser.add_argument("--emulate", action="store_true", help="brings ci/baselines/tune.json up to date")
    parser.add_argument("--json", type=Path, help="file for the tables, written after each module")
    arguments = parser.parse_args()
    if arguments.emulate:
        for name in arguments.module or SPACES:
            table = json.loads(PASSED.read_text()) if PASSED.exists() else {}
            table[name] = {"source": digest(name), "passed": emulate(name)}
            lines = [f"{json.dumps(each)}: {json.dumps(row)}" for each, row in sorted(table.items())]
            PASSED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
            print(f"{name}: {len(table[name]['passed'])} of {len([*candidates(name)])} pass", flush=True)
        return 0
    if not torch.cuda.is_available():
        parser.error("there is no GPU here to time candidates on")
    tune(arguments.module or list(SPACES), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
