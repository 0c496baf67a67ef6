"""Calls every op with hostile arguments: none may crash, hang, write elsewhere or differ from its reference.

    python ci/attack/ops.py --calls 10000 --seed 7 [--op NAME]
    python ci/attack/ops.py --calls 100000 --record ci/baselines/attack.json --minutes 60

Each op, at each of its doors (the function of `tritonrec.ops`, and the op of ``torch.ops``), has a
process of its own. With ``--record`` all ops take turns in one, `TURN` calls each, from where the file ends.
An accepted call is compared with ``impl="reference"`` on the same arguments. A call is a function of seed, op
and index, so ``--op NAME --seed 7 --index I`` repeats one and describes it. The exit status is 1 after a
crash, a hang, bytes that changed outside of what an op writes to, a difference, or a refusal that names no
argument.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import json
import mmap
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import Draw
from doors import DISTINCT, DRAWN, ROUNDED, Call, calls
from draws import bounds_of, chosen_by
from guarded import Arena
from hostile import Hostile, replace, spoil

from tritonrec.files import save_json
from tritonrec.harness.environment import environment
from tritonrec.ops import ExactSumError, HSTUMask

MEMORY = 2 << 30
"""Bytes that a worker may take beyond those it begins with; a larger allocation is an error, and cheap."""
IMPLS = bounds_of([0.6, 0.3, 0.1])
TURN = 1000
"""Calls of an op between two writes of the record."""
# names in errors that are no names of a schema
ALSO = ["beta", "momentum", "dropout", "temperature", "gradient of", "step counts", "next_row", "a sequence"]
ALSO += [field.name for field in fields(HSTUMask)]
PATIENCE = 300.0  # seconds without a call that returns
MOST_CRASHES = 5  # of an op, until it is left

Outcome = tuple[str, str]  # "accepted", "refused", "unnamed", "spoiled", "difference", and the reason


def hostile_call(call: Call, seed: int, index: int) -> tuple[Hostile, np.random.Generator]:
    rng = np.random.default_rng([seed, zlib.crc32(call.op.encode()), index])
    drawn = DRAWN[call.op](Draw(rng))
    arguments = {name: drawn[name] for name in call.names if name != "impl"}
    if "impl" in call.names:
        arguments["impl"] = chosen_by(rng, ("cpu", "auto", "reference"), IMPLS)
    return spoil(arguments, rng), rng


def attack(call: Call, seed: int, index: int, arenas: list[Arena]) -> Outcome:
    hostile, _ = hostile_call(call, seed, index)
    given, used = dict(hostile.arguments), []
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
    for name, kind in hostile.replaced.items():
        if isinstance(given[name], torch.Tensor):
            given[name] = replace(given[name], kind)
    copies = {n: v.detach().clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
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


def judge_refusal(call: Call, error: Exception, given: dict[str, Any]) -> Outcome:
    """A refusal names an argument; Python's own TypeError for what is no number at all passes."""
    text = f"{type(error).__name__}: {error}"
    named = any(name in str(error) for name in [*given, *ALSO]) or call.op in str(error)
    named |= isinstance(error, ExactSumError)  # by the name it was given
    plain = isinstance(error, TypeError) or out_of_memory(error)
    # torch's dispatcher refuses None for a tensor, and a copy of a negated view that is written to
    plain |= call.name.startswith("registered.") and bool(re.search("Expected Tensor|cloned_mutable", text))
    return ("refused" if named or plain else "unnamed"), text.splitlines()[0]


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or bool(re.search("(not enough|allocate) memory", str(error)))


def comparable(call: Call, hostile: Hostile, given: dict[str, Any]) -> bool:
    """Whether the results are specified: lists without repeats, and for rounded ones, small numbers."""
    if set(hostile.replaced.values()) & {"meta", "requires_grad", "negated"}:
        return False
    for name in DISTINCT.get(call.op, ()):
        if len(given[name].unique()) < len(given[name]):
            return False
    if call.op.startswith("norm_") and _rows_without_variance(given["x"]):
        return False
    if call.op in ROUNDED:
        floats = [v for v in given.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if any(v.numel() and not v.abs().max() < 100 for v in floats):
            return False
        if call.op == "softmax_attention_backward" and not (given["total"] > 1e-3).all():
            return False  # a sum of exponentials, of which one is 1
        numbers = {n: v for n, v in given.items() if type(v) is float or (type(v) is int and abs(v) > 2**63)}
        return all(abs(v) < 100 and (name != "eps" or v > 1e-9) for name, v in numbers.items())
    return True


def _rows_without_variance(x: torch.Tensor) -> bool:
    """Whether a row is nearly constant: its norm multiplies the rounding of its mean by 1 / sqrt(eps)."""
    if x.dim() != 2 or x.numel() == 0 or x.shape[1] == 1:
        return False
    x = x.double()
    return bool((x.std(1, correction=0) < 1e-3 * x.abs().amax(1)).any())


def flat(result: Any) -> list[Any]:
    if isinstance(result, tuple | list):
        return [one for part in result for one in flat(part)]
    return [] if result is None else [result]


def compare(call: Call, results: list[Any], references: list[Any]) -> Outcome:
    for place, (got, expected) in enumerate(zip(results, references, strict=True)):
        if not isinstance(got, torch.Tensor):
            if got != expected:
                return "difference", f"result {place}: {got} for {expected}"
            continue
        if got.shape != expected.shape or got.dtype != expected.dtype:
            shapes = f"{got.shape} {got.dtype} for {expected.shape} {expected.dtype}"
            return "difference", f"result {place}: {shapes}"
        got, expected = got.detach(), expected.detach()
        if call.op in ROUNDED and got.is_floating_point():
            scale = float(expected.nan_to_num(0.0).abs().max()) if expected.numel() else 1.0
            near = torch.isclose(got, expected, rtol=1e-3, atol=1e-4 * max(scale, 1.0), equal_nan=True)
        elif call.op in ROUNDED:
            near = (got - expected).abs() < 2**26
        else:
            near = (got == expected) | ((got != got) & (expected != expected))
        if not near.all():
            at = near.logical_not().nonzero()[0].tolist()
            return "difference", f"result {place}{at}: {got[tuple(at)]} for {expected[tuple(at)]}"
    return "accepted", ""


def work(names: list[str], seed: int, begin: int, first: int, stop: int, progress: Path) -> None:
    """The calls [first, stop) of each op, [begin, stop) of the first one; the running one in `progress`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of references: an overflow is an infinity
    torch.set_num_threads(1)
    arenas, every = [Arena() for _ in range(24)], calls()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    with progress.open("r+b") as file, mmap.mmap(file.fileno(), 16) as place:
        for number, name in enumerate(names):
            counts: collections.Counter[str] = collections.Counter()
            seen: dict[str, list[Any]] = {}
            for index in range(first if number else begin, stop):
                place[:16] = number.to_bytes(8, "little") + index.to_bytes(8, "little")
                kind, reason = attack(every[name], seed, index, arenas)
                counts[kind] += 1
                if kind not in ("accepted", "refused"):
                    seen.setdefault(f"{kind}: {reason[:60]}", [index, reason])
            print(json.dumps({"op": name, **counts, "seen": list(seen.values())[:20]}), flush=True)


def supervise(names: list[str], seed: int, stop: int, progress: Path, first: int = 0) -> list[dict[str, Any]]:
    """Reports by op of the calls [first, stop), from workers that start again behind a call that ends one."""
    reports: dict[str, dict[str, Any]] = {
        name: {"op": name, "accepted": 0, "refused": 0, "seen": [], "crashes": []} for name in names
    }
    left, begin = list(names), first
    while left:
        progress.write_bytes(bytes(16))
        numbers = [seed, stop, first, begin]
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
            begin = first
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
            begin = first
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
        print(attack(call, seed, index, [Arena() for _ in range(24)]))
    except Exception:
        traceback.print_exc()


def bad(report: dict[str, Any]) -> bool:
    return bool(report["crashes"] or report["seen"])


class Record:
    """Counts by op that grow from run to run: JSON with the seed, and the calls of each op by their ends."""

    def __init__(self, file: Path, seed: int):
        self.file, self.document = file, {"seed": seed, "cpu_seconds": 0.0, "ops": {}}
        if file.exists():
            self.document = json.loads(file.read_text())
            if self.document["seed"] != seed:
                raise SystemExit(f"{file} has the calls of seed {self.document['seed']}, not of {seed}")

    def done(self, op: str) -> int:
        return self.document["ops"].get(op, {}).get("calls", 0)

    def add(self, reports: list[dict[str, Any]], stop: int, seconds: float) -> None:
        """Write that the calls below `stop` are done; those of a worker that died count in `calls`."""
        for report in reports:
            entry = self.document["ops"].setdefault(report["op"], {"calls": 0, "accepted": 0, "refused": 0})
            entry["calls"] = stop
            for kind in ("accepted", "refused"):
                entry[kind] += report[kind]
            if bad(report):
                entry.setdefault("defects", []).extend([*report["crashes"], *report["seen"]])
        self.document["cpu_seconds"] = round(self.document["cpu_seconds"] + seconds, 1)
        self.document["environment"] = environment()
        save_json(self.document, self.file)


def run_turns(names: list[str], seed: int, stop: int, record: Record, minutes: float) -> bool:
    """Turns of all ops, the ones behind first, until `stop` calls of each; whether nothing was found."""
    deadline, found = time.monotonic() + 60 * minutes, False
    with tempfile.TemporaryDirectory() as folder:
        while (first := min(map(record.done, names))) < stop and time.monotonic() < deadline:
            behind = [name for name in names if record.done(name) == first]
            last = min([first + TURN, stop, *(d for d in map(record.done, names) if d > first)])
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            reports = supervise(behind, seed, last, Path(folder) / "progress", first)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            record.add(reports, last, seconds)
            print(f"{len(behind)} ops, calls {first} to {last}: {seconds:.0f} s of the processor", flush=True)
            for report in filter(bad, reports):
                found = True
                for index, reason in [*report["crashes"], *report["seen"]]:
                    print(f"    {report['op']} call {index}: {reason}", flush=True)
    return not found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--op", action="append", help="a name, or the end of one; all without")
    parser.add_argument("--index", type=int, help="describe one call of --op")
    parser.add_argument("--together", action="store_true", help="all ops in one process, for a short run")
    parser.add_argument("--record", type=Path, help="JSON file of counts, to which this run adds")
    parser.add_argument("--minutes", type=float, default=1e9, help="with --record: begin no turn after these")
    parser.add_argument("--work", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.work:
        names, seed, stop, first, begin, progress = given.work
        work(names.split(","), int(seed), int(begin), int(first), int(stop), Path(progress))
        return 0
    every = calls()
    names = [n for n in every if not given.op or any(n == op or n.endswith("." + op) for op in given.op)]
    if given.index is not None:
        for name in names:
            describe(every[name], given.seed, given.index)
        return 0
    if given.record:
        record = Record(given.record, given.seed)
        return int(not run_turns(names, given.seed, given.calls, record, given.minutes))
    failed = False
    print(f"{'op':44} {'accepted':>9} {'refused':>9}")
    with tempfile.TemporaryDirectory() as folder:
        for group in [names] if given.together else [[name] for name in names]:
            for report in supervise(group, given.seed, given.calls, Path(folder) / "progress"):
                print(f"{report['op']:44} {report['accepted']:>9} {report['refused']:>9}", flush=True)
                for index, reason in [*report["crashes"], *report["seen"]]:
                    print(f"    call {index}: {reason}", flush=True)
                failed |= bad(report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
