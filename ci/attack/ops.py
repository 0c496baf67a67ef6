"""Calls every op with hostile arguments: none may crash, hang, write elsewhere or differ from its reference.

    python ci/attack/ops.py --calls 10000 --seed 7 [--op NAME]

Each op has a process of its own, where its doors (the function of `tritonrec.ops`, the op of ``torch.ops``)
get the same calls. An accepted call is compared with ``impl="reference"`` on the same arguments. A call is a
function of seed, op and index, so ``--op NAME --seed 7 --index I`` repeats one and describes it. The exit
status is 1 after a crash, a hang, bytes that changed outside of what an op writes to, a difference, or a
refusal that names no argument.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import itertools
import json
import mmap
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import Draw
from doors import DRAWN, Call, calls
from draws import bounds_of, chosen_by
from guarded import Arena
from hostile import Hostile, replace, spoil
from verdicts import Outcome, comparable, compare, flat, judge_refusal, out_of_memory

MEMORY = 2 << 30
"""Bytes that a worker may take beyond those it begins with; a larger allocation is an error, and cheap."""
IMPLS = bounds_of([0.6, 0.3, 0.1])
PATIENCE = 300.0  # seconds without a call that returns
MOST_CRASHES = 5  # of an op, until it is left


def hostile_call(call: Call, seed: int, index: int) -> tuple[Hostile, np.random.Generator]:
    rng = np.random.default_rng([seed, zlib.crc32(call.op.encode()), index])
    drawn = DRAWN[call.op](Draw(rng))
    arguments = {name: drawn[name] for name in call.names if name != "impl"}
    if "impl" in call.names:
        arguments["impl"] = chosen_by(rng, ("cpu", "auto", "reference"), IMPLS)
    return spoil(arguments, rng), rng


class Draws:
    """The hostile calls of an op, drawn once for all of its doors."""

    def __init__(self, seed: int):
        self.seed, self.op, self.drawn = seed, "", dict[int, Hostile]()

    def of(self, call: Call, index: int) -> Hostile:
        if call.op != self.op:
            self.op, self.drawn = call.op, {}
        if index not in self.drawn:
            self.drawn[index], _ = hostile_call(call, self.seed, index)
        return self.drawn[index]

    def forget(self, index: int) -> None:
        """Draw this call again for the next door: this one gets tensors of it that are no copies."""
        del self.drawn[index]


def attack(call: Call, index: int, arenas: list[Arena], draws: Draws) -> Outcome:
    hostile = draws.of(call, index)
    given = {name: [*v] if isinstance(v, list) else v for name, v in hostile.arguments.items()}
    used = []
    function = call.doors[index % len(call.doors)]
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    groups = [hostile.together] * bool(hostile.together) + [[n] for n in tensors if n not in hostile.together]
    for names, arena in zip(groups, arenas, strict=False):
        placed = arena.place([given[name] for name in names])
        if placed is None:
            continue
        used.append(
            (arena, [tensor for name, tensor in zip(names, placed, strict=True) if name in call.written])
        )
        given.update(zip(names, placed, strict=True))
    unplaced = [name for name in tensors if given[name] is hostile.arguments[name]]
    if unplaced:
        draws.forget(index)
    for name, kind in hostile.replaced.items():
        if isinstance(given[name], torch.Tensor):
            given[name] = replace(given[name], kind)
    # of the other tensors the memory shows that they stay as they are
    changing = {*call.written, *hostile.together, *unplaced}
    copies = {
        n: v.detach().clone() if n in changing and isinstance(v, torch.Tensor) else v
        for n, v in given.items()
    }
    try:
        result = function(**given)
        error = None
    except Exception as caught:
        error = caught
    if any(arena.spoiled(of_arena) for arena, of_arena in used):
        return "spoiled", "bytes changed that the op does not write to"
    if error is not None:
        return judge_refusal(call, error, given)
    if given.get("impl") in (None, "reference") or not comparable(call, hostile, copies):
        return "accepted", ""
    try:
        expected = function(**{**copies, "impl": "reference"})
    except Exception as caught:
        if out_of_memory(caught):
            return "accepted", ""
        return "difference", f"the reference refuses: {type(caught).__name__}: {caught}"
    if isinstance(given.get("status"), torch.Tensor) and int(given["status"]):
        return "accepted", ""  # an error that is put off: the rest is void
    results = [*flat(result), *(given[name] for name in call.written)]
    references = [*flat(expected), *(copies[name] for name in call.written)]
    return compare(call, results, references)


def work(names: list[str], seed: int, begin: int, stop: int, progress: Path) -> None:
    """The first `stop` calls of each op, from `begin` of the first one; the running one in `progress`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of references: an overflow is an infinity
    torch.set_num_threads(1)
    arenas, every, draws = [Arena() for _ in range(24)], calls(), Draws(seed)
    gc.freeze()  # what was imported stays
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 16) as place:
        for number, name in enumerate(names):
            counts: collections.Counter[str] = collections.Counter()
            seen: dict[str, list[Any]] = {}
            for index in range(0 if number else begin, stop):
                place[:16] = number.to_bytes(8, "little") + index.to_bytes(8, "little")
                kind, reason = attack(every[name], index, arenas, draws)
                counts[kind] += 1
                if kind not in ("accepted", "refused"):
                    seen.setdefault(f"{kind}: {reason[:60]}", [index, reason])
            print(json.dumps({"op": name, **counts, "seen": list(seen.values())[:20]}), flush=True)


def supervise(names: list[str], seed: int, stop: int, progress: Path) -> list[dict[str, Any]]:
    """Reports by op of the first `stop` calls, from workers that start again behind a call that ends one."""
    reports: dict[str, dict[str, Any]] = {
        name: {"op": name, "accepted": 0, "refused": 0, "seen": [], "crashes": []} for name in names
    }
    left, begin = list(names), 0
    while left:
        progress.write_bytes(bytes(16))
        numbers = [seed, stop, begin]
        command = [sys.executable, __file__, "--work", ",".join(left), *map(str, numbers), str(progress)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        hung = watch(process, progress)
        out, err = process.communicate()
        for line in map(json.loads, out.splitlines()):
            report = reports[line["op"]]
            report["seen"] += line.pop("seen")
            for kind, count in line.items():
                if kind != "op":
                    report[kind] = report.get(kind, 0) + count
            left.remove(line["op"])
            begin = 0
        if not left:
            break
        if process.returncode == 0:
            raise RuntimeError(f"a worker ended early: {err[-2000:]}")
        raw = progress.read_bytes()
        index, op = int.from_bytes(raw[8:], "little"), left[0]
        reason = "hang" if hung else f"signal {-process.returncode}"
        if process.returncode > 0:
            reason = f"the attack itself failed: {err.strip().splitlines()[-1]}"
        reports[op]["crashes"].append([index, reason])
        begin = index + 1
        if len(reports[op]["crashes"]) >= MOST_CRASHES or begin >= stop:
            left.pop(0)
            begin = 0
    return list(reports.values())


def watch(process: subprocess.Popen, progress: Path) -> bool:
    """Whether the process had to be ended because one call did not return."""
    last, since = b"", time.monotonic()
    while process.poll() is None:
        now = progress.read_bytes()
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            process.kill()
            return True
        time.sleep(0.1)
    return False


def describe(call: Call, seed: int, index: int) -> None:
    """Print one call and what becomes of it."""
    hostile, _ = hostile_call(call, seed, index)
    print(f"{call.name} call {index}: {hostile.changes}")
    for name, value in hostile.arguments.items():
        if isinstance(value, torch.Tensor):
            some = value.flatten()[:12].tolist()
            value = f"{tuple(value.shape)} {value.dtype} strides {value.stride()} {some}"
        print(f"  {name}: {value}")
    try:
        print(attack(call, index, [Arena() for _ in range(24)], Draws(seed)))
    except Exception:
        traceback.print_exc()


def bad(report: dict[str, Any]) -> bool:
    return bool(report["crashes"] or report["seen"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--op", action="append", help="a name, or the end of one; all without")
    parser.add_argument("--index", type=int, help="describe one call of --op")
    parser.add_argument("--together", action="store_true", help="all ops in one process, for a short run")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.work:
        names, seed, stop, begin, progress = given.work
        work(names.split(","), int(seed), int(begin), int(stop), Path(progress))
        return 0
    every = calls()
    names = [n for n in every if not given.op or any(n == op or n.endswith("." + op) for op in given.op)]
    names.sort(key=lambda name: [*DRAWN].index(every[name].op))  # doors of an op share its draws
    if given.index is not None:
        for name in names:
            describe(every[name], given.seed, given.index)
        return 0
    failed = False
    print(f"{'op':44} {'accepted':>9} {'refused':>9}")
    with tempfile.TemporaryDirectory() as folder:
        by_op = [[*doors] for _, doors in itertools.groupby(names, lambda name: every[name].op)]
        for group in [names] if given.together else by_op:
            for report in supervise(group, given.seed, given.calls, Path(folder) / "progress"):
                print(f"{report['op']:44} {report['accepted']:>9} {report['refused']:>9}", flush=True)
                for index, reason in [*report["crashes"], *report["seen"]]:
                    print(f"    call {index}: {reason}", flush=True)
                failed |= bad(report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
