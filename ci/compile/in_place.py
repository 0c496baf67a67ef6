"""Whether a store may come before another thread's load of the same element, read from TTGIR.

    python ci/compile/in_place.py                          every launch that loads and stores one tensor
    python ci/compile/in_place.py --only sparse --targets sm_90

Where a tile has fewer elements than a program has threads, several threads load one element; where two
layouts need it, Triton loads it twice. A thread that stores the element must not come before any of these
loads. So between a load and a later store of one tensor there is a barrier (`tl.debug_barrier`), or both have
the same addresses in the same layout, in which every element belongs to one thread. Races that a kernel
declares (`kernels/races.py`) are its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from triton_ir import TARGETS, VALUE, Function, Operation, Region, check_launches, parse, texts_of

# Arguments that may be one tensor.
ONE_TENSOR = {"silu.backward_kernel": {"%dx_ptr": "%dy_ptr"}}
LOADS = ("tt.load", "ttg.async_copy_global_to_local")
LOOPS = ("scf.for", "scf.while")


def roots_of(function: Function) -> dict[str, str]:
    """Of each pointer, the argument it comes from; ``%x_ptr[]`` where its address was loaded from there."""
    roots = {name: name for name, kind in function.arguments.items() if kind.startswith("!tt.ptr")}
    spread(roots, function)
    made_by = {value: each for each in function.walk() for value in each.results}
    for operation in function.walk():
        if operation.name == "tt.int_to_ptr":
            roots[operation.results[0]] = loaded_from(operation.operands[0], made_by, roots) + "[]"
    spread(roots, function)
    return roots


def loaded_from(value: str, made_by: dict[str, Operation], roots: dict[str, str]) -> str:
    """The pointer argument behind which the first load on the way to an address reads, or the address."""
    ahead = [value]
    while ahead:
        made = made_by.get(ahead.pop(0))
        if made and made.name in LOADS:
            return roots[made.operands[0]]
        ahead += made.operands if made else []
    return value


def spread(roots: dict[str, str], function: Function) -> None:
    """Hand roots on to what is computed from their pointers."""
    changed = True
    while changed:  # until what loops carry round has arrived
        changed = False
        for operation in function.walk():
            pairs = list(carried(operation))
            if not operation.name.startswith(("tt.load", "tt.int_to_ptr", "scf.")):
                pairs += [(result, one) for result in operation.results for one in operation.operands]
            for result, one in pairs:
                if one in roots and result not in roots:
                    roots[result] = roots[one]
                    changed = True


def carried(operation: Operation) -> Iterator[tuple[str, str]]:
    """What a loop or a branch hands on: (name inside or behind it, value)."""
    skip = 3 if operation.name == "scf.for" else 0
    for region in operation.regions:
        inside = region.arguments[1 if skip else 0 :]
        yield from zip(inside, operation.operands[skip:], strict=False)
        last = region.operations[-1:]
        if last and last[0].name in ("scf.yield", "scf.condition"):
            values = last[0].operands[last[0].name == "scf.condition" :]
            if skip or operation.name == "scf.while":
                yield from zip(inside, values, strict=False)
            names = operation.results
            if len(names) == 1 and len(values) > 1:
                names = [f"{names[0]}#{i}" for i in range(len(values))]
            yield from zip(names, values, strict=False)


def one_owner(layout: str, shape: list[int]) -> bool:
    """Whether each element of a tile belongs to one thread only; False for layouts that are not read here."""
    found = re.match(
        r"#ttg\.blocked<\{sizePerThread = \[[\d, ]*\], threadsPerWarp = \[([\d, ]*)\], "
        r"warpsPerCTA = \[([\d, ]*)\]", layout,
    )  # fmt: skip
    if not found:
        return False
    lanes, warps = (map(int, numbers.split(",")) for numbers in found.groups())
    return all(size % (lane * warp) == 0 for size, lane, warp in zip(shape, lanes, warps, strict=True))


def regions_of(operation: Operation) -> list[Region]:
    """The blocks that hold it, from the inside."""
    found = []
    while operation.parent is not None:
        found.append(operation.parent)
        operation = operation.parent.owner
    return found


class Addresses:
    """Numbers of pointers: equal where the same is computed from the same arguments."""

    def __init__(self, function: Function, aliases: dict[str, str]) -> None:
        self.made_by = {value: each for each in function.walk() for value in each.results}
        self.aliases = aliases
        self.numbers: dict[object, int] = {}
        self.of: dict[str, int] = {}

    def number(self, value: str) -> int:
        if value not in self.of:
            made = self.made_by.get(value)
            key: object = self.aliases.get(value, value)
            if (
                made
                and not made.regions
                and made.name.startswith(("arith.", "tt."))
                and made.name not in LOADS
            ):
                what = re.sub(VALUE, "", made.text.partition(" = ")[2])
                key = what, made.results.index(value), *map(self.number, made.operands)
            self.of[value] = self.numbers.setdefault(key, len(self.numbers))
        return self.of[value]


class Kernel:
    """The loads, stores and barriers of a kernel in order of the text."""

    def __init__(self, text: str, aliases: dict[str, str]) -> None:
        function = parse(text)
        self.roots = {value: aliases.get(root, root) for value, root in roots_of(function).items()}
        self.addresses = Addresses(function, aliases)
        self.operations = list(function.walk())
        self.place = {id(operation): place for place, operation in enumerate(self.operations)}

    def named(self, *names: str) -> list[Operation]:
        return [operation for operation in self.operations if operation.name in names]

    def barrier_between(self, load: Operation, store: Operation) -> bool:
        """Whether every way from a load to a store passes a barrier; true where there is no way."""
        blocks = regions_of(load) + regions_of(store)
        around = {id(region) for region in blocks}
        begin, end = self.place[id(load)], self.place[id(store)]
        barriers = [self.place[id(one)] for one in self.named("ttg.barrier") if id(one.parent) in around]
        if begin < end:
            return any(begin < place < end for place in barriers)
        # the way leads round the innermost loop that holds both
        loop = next(
            (one.owner for one in regions_of(store) if one in regions_of(load) and one.owner.name in LOOPS),
            None,
        )
        if loop is None:
            return True
        inside = {self.place[id(one)] for one in loop.walk()}
        return any(place in inside and not end < place < begin for place in barriers)

    def overtaken(self) -> dict[str, list[str]]:
        """By argument, the loads that a store of another thread may overtake."""
        found: dict[str, list[str]] = {}
        for store in self.named("tt.store"):
            root = self.roots[store.operands[0]]
            for load in self.named(*LOADS):
                if self.roots.get(load.operands[0]) != root or self.barrier_between(load, store):
                    continue
                if not self.own(load, store):
                    found.setdefault(root.removeprefix("%"), []).append(
                        f"load at {load.source}, store at {store.source}"
                    )
        return found

    def own(self, load: Operation, store: Operation) -> bool:
        """Whether a thread stores what it alone has loaded."""
        found = [
            re.search(r" : tensor<([\dx]+)x!tt\.ptr<\w+>, (#ttg.*)>$", one.text) for one in (load, store)
        ]
        if not (found[0] and found[1]) or found[0].groups() != found[1].groups():
            return False  # two layouts; or one address, which all threads load
        shape = [int(one) for one in found[0][1].split("x")]
        addresses = {self.addresses.number(one.operands[0]) for one in (load, store)}
        return len(addresses) == 1 and one_owner(found[0][2], shape)


def faults_of(launch: Any, target: str) -> dict[str, list[str]]:
    """By argument, what is overtaken with the launch's alignment and with none."""
    aliases = ONE_TENSOR.get(launch.name, {})
    found: dict[str, list[str]] = {}
    for aligned in (launch.aligned, ()):
        text = texts_of(launch, TARGETS[target], "ttgir", aligned)["ttgir"]
        found |= Kernel(text, aliases).overtaken()
    declared = getattr(launch.kernel, "declared", {})
    return {name: where for name, where in found.items() if not declared.get(name, (False, False))[0]}


def check(launches: Iterable[Any], target: str) -> list[str]:
    return [
        f"{launch.key} for {target}, {name}: {pair}, with no barrier between"
        for launch in launches
        for name, pairs in faults_of(launch, target).items()
        for pair in dict.fromkeys(pairs)
    ]


if __name__ == "__main__":
    sys.exit(check_launches(__doc__, check, "loads may be overtaken by a store"))
