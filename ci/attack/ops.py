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
import faulthandler
import gc
import itertools
import sys
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import case_runner
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
PATIENCE = 300  # seconds of a call
MOST_CRASHES = 5  # of a worker's calls, until they are left


def hostile_call(call: Call, seed: int, index: int) -> tuple[Hostile, np.random.Generator]:
    rng = np.random.default_rng([seed, zlib.crc32(call.op.encode()), index])
    drawn = DRAWN[call.op](Draw(rng))
    arguments = {name: drawn[name] for name in call.names if name != "impl"}
    if "impl" in call.names:
        arguments["impl"] = chosen_by(rng, ("cpu", "auto", "reference"), IMPLS)
    return spoil(arguments, rng), rng


class Draws:
    """The last hostile call of an op, drawn once for all of its doors."""

    def __init__(self, seed: int):
        self.seed, self.last = seed, dict[tuple[str, int], Hostile]()

    def of(self, call: Call, index: int) -> Hostile:
        if (call.op, index) not in self.last:
            self.last = {(call.op, index): hostile_call(call, self.seed, index)[0]}
        return self.last[call.op, index]

    def forget(self) -> None:
        """Draw this call again for the next door: this one gets tensors of it that are no copies."""
        self.last = {}


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
        draws.forget()
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


def prepared(doors: list[Call], seed: int) -> Callable[[int], dict[str, Any]]:
    """What runs the case of a number: the calls of index 0 at each of the doors, then those of index 1."""
    faulthandler.enable()
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of references: an overflow is an infinity
    torch.set_num_threads(1)
    arenas, draws = [Arena() for _ in range(24)], Draws(seed)
    gc.freeze()  # what was imported stays

    def run_case(number: int) -> dict[str, Any]:
        index, door = divmod(number, len(doors))
        kind, reason = attack(doors[door], index, arenas, draws)
        return {"number": number, "kind": kind, "reason": reason}

    return run_case


def attack_doors(doors: list[Call], seed: int, calls: int) -> bool:
    """Whether so many calls at each of the doors are accepted or refused; prints counts and what is wrong."""
    counts: dict[str, Counter[str]] = {each.name: Counter() for each in doors}
    wrong: dict[tuple[str, str], str] = {}
    options = [word for each in doors for word in ("--op", each.name)]
    crashes = 0
    for case in case_runner.attack([__file__, "--seed", str(seed), *options], range(calls * len(doors))):
        index, door = divmod(case["number"], len(doors))
        name, kind, reason = doors[door].name, case["kind"], case.get("reason", "")
        if "ends" in case:  # of the worker
            kind, reason, crashes = "crash", case["ends"]["crash"], crashes + 1
        counts[name][kind] += 1
        if kind not in ("accepted", "refused"):
            wrong.setdefault((name, f"{kind}: {reason[:60]}"), f"    {name} call {index}: {kind}: {reason}")
        if crashes >= MOST_CRASHES:
            break
    for name, count in counts.items():
        print(f"{name:44} {count['accepted']:>9} {count['refused']:>9}", flush=True)
    print(*wrong.values(), sep="\n", end="\n" * bool(wrong), flush=True)
    return not wrong


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--op", action="append", help="a name, or the end of one; all without")
    parser.add_argument("--index", type=int, help="describe one call of --op")
    parser.add_argument("--together", action="store_true", help="all ops in one process, for a short run")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    every = calls()
    names = [n for n in every if not given.op or any(n == op or n.endswith("." + op) for op in given.op)]
    names.sort(key=lambda name: [*DRAWN].index(every[name].op))  # doors of an op share its draws
    doors = [every[name] for name in names]
    if given.work:
        doors = [every[name] for name in given.op]  # as they were given
        case_runner.run_all(case_runner.range_of(given.work), prepared(doors, given.seed), MEMORY, PATIENCE)
        return 0
    if given.index is not None:
        for door in doors:
            describe(door, given.seed, given.index)
        return 0
    print(f"{'op':44} {'accepted':>9} {'refused':>9}")
    by_op = [[*some] for _, some in itertools.groupby(doors, lambda door: door.op)]
    groups = [doors] if given.together else by_op
    return int(not all([attack_doors(some, given.seed, given.calls) for some in groups]))


if __name__ == "__main__":
    sys.exit(main())
