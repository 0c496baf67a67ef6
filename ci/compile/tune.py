"""Writes the tables of configurations: ``python ci/compile/tune.py KERNEL [KERNEL ...]``.

With a GPU, every candidate of every class is timed on it and the fastest rows are written for its
architecture, each with its time. Without one, or with ``--dry-run``, candidates are only compiled, for every
target, and ranked by what the compiler says. That is no measurement of speed. So the configuration that a
table already gives stays unless it spills, does not fit into shared memory, or uses narrower matrix
instructions than a candidate; then the candidate of the highest estimated occupancy takes its place. The
table says which of the two ways made it.

    python ci/compile/tune.py --all --dry-run --targets sm_90        rank by compile evidence
    python ci/compile/tune.py linear                                 time on the GPU that is here

A class is compiled and timed through the cases of launches.py: the launches that ask the table for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import compile_matrix
import launches
import torch
from compile_matrix import TARGETS

from tritonrec.kernels import tuned

# What may be tried, by kernel: each name's values, all combinations. Nothing here may depend on a batch.
SPACES: dict[str, dict[str, tuple[int, ...]]] = {
    "silu": {"BLOCK": (512, 1024, 2048), "num_warps": (2, 4, 8)},
    "norm_mul_dropout": {"num_warps": (1, 2, 4, 8)},
    "sampled_softmax": {"TILE": (1024, 2048, 4096), "num_warps": (2, 4, 8)},
    "linear": {"BLOCK": (32, 64, 128), "num_warps": (4, 8)},
    "hstu_attention": {
        "OWN": (32, 64, 128), "STEP": (16, 32, 64), "num_warps": (4, 8), "num_stages": (2, 3),
    },
    "relative_aggregate": {
        "OWN": (32, 64), "STEP": (16, 32), "num_warps": (4, 8), "num_stages": (2,),
    },
}  # fmt: skip
# registers of a multiprocessor, its most warps, its shared memory, the granule in which registers are given
PROCESSOR = {
    "sm_80": (65536, 64, 164 * 1024),
    "sm_90": (65536, 64, 228 * 1024),
    "sm_100": (65536, 64, 228 * 1024),
    "gfx942": (131072, 32, 64 * 1024),  # wavefronts of 64 lanes
}
EVIDENCE = (
    "compile evidence only, nothing was timed: the configuration in use, unless it spills, does not fit into "
    "shared memory or uses narrower matrix instructions than a candidate"
)


def occupancy(row: dict[str, Any], target: str) -> float:
    """Estimated share of a multiprocessor's warps that can be resident, by registers and shared memory."""
    registers, most_warps, shared = PROCESSOR[target]
    warps = row["config"].get("num_warps", 4)
    lanes = TARGETS[target][2]
    of_a_warp = -(-max(row["registers"], 1) * lanes // 256) * 256
    blocks = min(registers // (of_a_warp * warps), most_warps // warps, 32)
    if row["shared"]:
        blocks = min(blocks, shared // (row["shared"] + 1024))
    return min(1.0, blocks * warps / most_warps)


def candidates(kernel: str, klass: str) -> list[dict[str, int]]:
    """The configuration in use first, then the rest of the space."""
    now = tuned.rows(kernel, klass, "default")[0]["config"]
    space = {name: values for name, values in SPACES[kernel].items() if name in now}
    space |= {name: (value,) for name, value in now.items() if name not in space}
    every = [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
    return [now, *(config for config in every if config != now)]


class Notes(list):
    """Launches, each with the class that its launcher asked the table for last."""

    klass = ""

    def append(self, note: tuple[Any, ...]) -> None:
        super().append((self.klass, *note))


@contextmanager
def answering(kernel: str, config: dict[str, int], architecture: str, notes: Notes) -> Iterator[None]:
    """The table of `kernel` answers `config` for every class; `notes` learns which class asked."""
    before = tuned.config, tuned.architecture

    def answer(name, klass, device):
        notes.klass = klass if name == kernel else ""
        row = tuned.rows(name, klass, architecture)[0]["config"]
        return dict(config) if notes.klass and config.keys() == row.keys() else dict(row)

    tuned.config, tuned.architecture = answer, lambda device: architecture
    try:
        yield
    finally:
        tuned.config, tuned.architecture = before


def recorded(kernel: str, klass: str, config: dict[str, int], target: str) -> list[launches.Launch]:
    """What the cases launch for a class with `config`."""
    found = []
    for label, case in launches.CASES.items():
        if label.startswith(kernel):
            notes = Notes()
            with launches.recording(notes), answering(kernel, config, target, notes):
                case()
            found += [launches.note(note[0], label, *note[1:]) for asked, *note in notes if asked == klass]
    return found


def evidence(kernel: str, klass: str, config: dict[str, int], target: str) -> dict[str, Any]:
    """The worst of every launch that a class makes with a configuration."""
    rows = []
    for launch in recorded(kernel, klass, config, target):
        try:
            rows.append(compile_matrix.measure(launch, target))
        except Exception as error:
            return {"fails": f"{type(error).__name__}: {str(error)[:120]}"}
    if not rows:
        return {"fails": "no case of ci/compile/launches.py asks for this class"}
    worst = {what: max(row[what] for row in rows) for what in ("registers", "stack", "shared")}
    worst["matrix"] = min(row["matrix"] for row in rows)
    worst["kind"] = " ".join(sorted({row["kind"] for row in rows if row["kind"]}))
    worst["occupancy"] = round(min(occupancy(row, target) for row in rows), 3)
    return worst


def fits(row: dict[str, Any], target: str) -> bool:
    return "fails" not in row and row["stack"] == 0 and row["shared"] <= TARGETS[target][3]


def is_best(row: dict[str, Any], target: str) -> bool:
    """Fits, and uses the matrix unit, if at all, by the widest instructions that the target has."""
    return fits(row, target) and (target == "sm_80" or "mma.sync" not in row["kind"].split())


def rank_by_evidence(kernel: str, klass: str, target: str) -> list[dict[str, Any]]:
    """The configuration in use where it is good; else the first good candidate of the highest occupancy."""
    in_use, *others = candidates(kernel, klass)
    if not recorded(kernel, klass, in_use, target):
        return []  # default serves what no case compiles
    tried = [(in_use, evidence(kernel, klass, in_use, target))]
    if not is_best(tried[0][1], target):
        tried += [(config, evidence(kernel, klass, config, target)) for config in others]
    good = [pair for pair in tried if is_best(pair[1], target)] or [p for p in tried if fits(p[1], target)]
    if not good:
        good = [min(tried, key=lambda pair: pair[1].get("stack", 1 << 30))]
    config, row = good[0] if good[0][0] == in_use else max(good, key=lambda pair: pair[1]["occupancy"])
    return [{"config": config, "evidence": {**row, "compiled": len(tried)}}]


def rank_by_time(kernel: str, klass: str) -> list[dict[str, Any]]:
    """The fastest candidates on the GPU that is here: cases run for real, then each launch alone."""
    from triton.testing import do_bench

    target, timed = tuned.architecture(torch.device("cuda")), []
    for config in candidates(kernel, klass):
        notes = Notes()
        try:
            with launches.sized(65_539, 512), torch.device("cuda"), noting_calls(notes):
                for label, case in launches.CASES.items():
                    if label.startswith(kernel):
                        with answering(kernel, config, target, notes):
                            case()
            calls = [call for asked, call in notes if asked == klass]
            if not calls:
                return []
            times = [do_bench(call, return_mode="median") for call in calls]
        except Exception as error:  # a configuration may need more than a block can have
            print(f"{kernel} {klass} {config}: {type(error).__name__}: {str(error)[:200]}")
            continue
        row = {"microseconds": round(sum(times) * 1e3, 2), "launches": len(times), "gpu": gpu()}
        timed.append({"config": config, "evidence": row})
    return sorted(timed, key=lambda row: row["evidence"]["microseconds"])[: tuned.MOST_ROWS]


@contextmanager
def noting_calls(notes: Notes) -> Iterator[None]:
    """Every launch happens, and is noted as a call that repeats it."""
    before = launches.JIT.run

    def run(kernel, *args, **kwargs):
        notes.append((lambda: before(kernel, *args, **kwargs),))
        return before(kernel, *args, **kwargs)

    launches.JIT.run = run
    try:
        yield
    finally:
        launches.JIT.run = before


def gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def provenance() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    return {
        **compile_matrix.provenance(), "commit": commit.strip(), "machine": platform.machine(), "gpu": gpu(),
    }  # fmt: skip


def path_of(kernel: str) -> Path:
    return tuned.FOLDER / kernel / "tuned" / f"{kernel}.json"


def dump(table: dict[str, Any]) -> str:
    """JSON with one line for each row."""
    parts = []
    for architecture, classes in table["architectures"].items():
        inner = ",\n".join(
            f"   {json.dumps(klass)}: [\n" + ",\n".join(f"    {json.dumps(row)}" for row in rows) + "\n   ]"
            for klass, rows in classes.items()
        )
        parts.append(f"  {json.dumps(architecture)}: {{\n{inner}\n  }}")
    made = json.dumps(table.get("provenance", {}))
    head = f' "kernel": "{table["kernel"]}",\n "chosen_by": {json.dumps(table["chosen_by"])},\n'
    head += f' "provenance": {made},\n'
    return "{\n" + head + ' "architectures": {\n' + ",\n".join(parts) + "\n }\n}\n"


def job(arguments: tuple[str, str, str]) -> tuple[str, str, str, list[dict[str, Any]]]:
    kernel, klass, target = arguments
    return kernel, klass, target, rank_by_evidence(kernel, klass, target)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", nargs="*", choices=[*SPACES, []], help=", ".join(SPACES))
    parser.add_argument("--all", action="store_true", help="every kernel that has a table")
    parser.add_argument("--dry-run", action="store_true", help="rank by compile evidence, even with a GPU")
    parser.add_argument("--targets", default=",".join(TARGETS), help="of a dry run, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--print", action="store_true", help="print the tables instead of writing them")
    arguments = parser.parse_args()
    kernels = list(SPACES) if arguments.all else arguments.kernel
    if not kernels:
        parser.error("name a kernel, or --all")
    tables = {kernel: json.loads(path_of(kernel).read_text()) for kernel in kernels}
    classes = {kernel: list(table["architectures"]["default"]) for kernel, table in tables.items()}
    launches.modules()
    if torch.cuda.is_available() and not arguments.dry_run:
        here = tuned.architecture(torch.device("cuda"))
        how = f"{here}: timed by ci/compile/tune.py; other architectures: {EVIDENCE}"
        found = [(kernel, k, here, rank_by_time(kernel, k)) for kernel in kernels for k in classes[kernel]]
    else:
        how = EVIDENCE
        targets = arguments.targets.split(",")
        searched = [(kernel, k, target) for kernel in kernels for k in classes[kernel] for target in targets]
        with multiprocessing.get_context("fork").Pool(arguments.jobs) as pool:
            found = list(pool.imap(job, searched))
    for kernel, klass, target, rows in found:
        if rows:
            tables[kernel]["architectures"].setdefault(target, {})[klass] = rows
    for kernel, table in tables.items():
        table |= {"chosen_by": how, "provenance": provenance()}
        if arguments.print:
            print(dump(table))
        else:
            path_of(kernel).write_text(dump(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
