"""Interval arithmetic over the TTIR of a kernel: the range of every integer, and what leaves 32 bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from triton_ir import Function, Operation, Region, variable

Interval = tuple[int, int]  # both ends belong to it
ROUNDS = 3  # of a loop, before what still grows is taken to grow up to a constant of the kernel


@dataclass(frozen=True)
class Fault:
    """An operation of 32 bits whose exact result may need more."""

    source: str  # file.py:12
    variable: str  # of the Python line, as far as Triton keeps its name
    operation: str
    reach: Interval

    def __str__(self) -> str:
        return f"{self.source}: {self.operation} of {self.variable or 'a value'} reaches {list(self.reach)}"


def width(kind: str) -> int:
    """32 for ``i32`` and ``tensor<8xi32>``; 0 for pointers and floats."""
    found = re.search(r"(?:^|x)i(\d+)(?:, #.*)?>?$", kind)
    return int(found[1]) if found else 0


def every(bits: int) -> Interval:
    return (0, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def join(one: Interval, other: Interval) -> Interval:
    return min(one[0], other[0]), max(one[1], other[1])


def corners(function: Callable[[int, int], int]) -> Callable[[Interval, Interval], Interval]:
    """Of a function that is monotone in either argument: its extremes are those of the ends."""

    def of(one: Interval, other: Interval) -> Interval:
        values = [function(x, y) for x in one for y in other]
        return min(values), max(values)

    return of


def quotient(one: Interval, other: Interval) -> Interval:
    """Rounded towards zero."""
    # divisors next to zero make the greatest quotients
    divisors = [y for y in (*other, 1, -1) if other[0] <= y <= other[1] and y]
    values = [abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x in one for y in divisors]
    return (min(values), max(values)) if values else one


def remainder(one: Interval, other: Interval) -> Interval:
    """With the sign of the dividend."""
    most = max(abs(other[0]), abs(other[1]), 1) - 1
    return max(min(one[0], 0), -most), min(max(one[1], 0), most)


def conjunction(one: Interval, other: Interval, bits: int) -> Interval:
    """x & y."""
    tops = [side[1] for side in (one, other) if side[0] >= 0]
    return (0, min(tops)) if tops else every(bits)


def disjunction(one: Interval, other: Interval, bits: int) -> Interval:
    """x | y, and x ^ y."""
    if min(one[0], other[0]) < 0:
        return every(bits)
    return 0, 2 ** max(one[1].bit_length(), other[1].bit_length()) - 1


def shifted_right(one: Interval, other: Interval, bits: int) -> Interval:
    """As unsigned numbers."""
    if one[0] < 0:
        one = 0, 2**bits - 1
    return one[0] >> min(max(other[1], 0), bits), one[1] >> min(max(other[0], 0), bits)


# exact results, whatever the width
EXACT: dict[str, Callable[[Interval, Interval], Interval]] = {
    "addi": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "subi": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "muli": corners(lambda x, y: x * y),
    "shli": corners(lambda x, y: x << min(max(y, 0), 64)),
    "shrsi": corners(lambda x, y: x >> min(max(y, 0), 64)),
    "divsi": quotient,
    "remsi": remainder,
    "maxsi": lambda x, y: (max(x[0], y[0]), max(x[1], y[1])),
    "minsi": lambda x, y: (min(x[0], y[0]), min(x[1], y[1])),
}
BITWISE: dict[str, Callable[[Interval, Interval, int], Interval]] = {
    "andi": conjunction, "ori": disjunction, "xori": disjunction, "shrui": shifted_right,
}  # fmt: skip
# operations whose results are numbers of their first operand
MOVES = {
    "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans", "tt.gather", "tt.split",
    "tt.addptr", "arith.extsi",
}  # fmt: skip


class Ranges:
    """The interval of each value of a kernel, and the `faults` met on the way.

    Args:
        arguments: range by name of an argument; any other has that of its type.
        loaded: range of what lies behind a pointer argument, by its name.
        limits: (source, variable) -> the range that a conversion to 32 bits, or a sum of these, is known to
            have; or None.
    """

    def __init__(
        self,
        function: Function,
        arguments: Callable[[str], Interval],
        loaded: Callable[[str], Interval | None],
        limits: Callable[[str, str], Interval | None],
    ) -> None:
        self.loaded, self.limits = loaded, limits
        self.of: dict[str, Interval] = {}
        self.bits: dict[str, int] = {}
        self.root: dict[str, str] = {}  # of a pointer, the argument that it comes from
        self.scalar: dict[str, str] = {}  # of a tensor with one number everywhere, that number
        self.quotients: dict[str, tuple[Interval, str]] = {}  # of x // y, the range of x, and y
        self.faults: set[Fault] = set()
        self.constants = {
            int(number)
            for operation in function.walk()
            if operation.name == "arith.constant"
            for number in re.findall(r"constant (?:dense<)?(-?\d+)\b(?!\.)", operation.text)
        }
        for name, kind in function.arguments.items():
            if bits := width(kind):
                low, high = arguments(name.removeprefix("%"))
                self.put(name, (max(low, every(bits)[0]), min(high, every(bits)[1])), bits)
            else:
                self.root[name] = name.removeprefix("%")
        self.run(function.body.regions[0])

    def put(self, name: str, reach: Interval, bits: int) -> None:
        self.of[name], self.bits[name] = reach, bits

    def copy(self, names: list[str], values: list[str]) -> None:
        """Each of `names` is the value beside it."""
        for name, value in zip(names, values, strict=True):
            if value in self.of:
                self.put(name, self.of[value], self.bits[value])
            if value in self.root:
                self.root[name] = self.root[value]

    def fault(self, operation: Operation, name: str, reach: Interval) -> None:
        variables = [variable(one) for one in operation.results]
        self.faults.add(Fault(operation.source, variables[0] if variables else "", name, reach))

    def run(self, region: Region) -> list[str]:
        """The values that the region hands on at its end."""
        for operation in region.operations:
            if operation.name in ("scf.yield", "scf.condition"):
                return operation.operands
            self.step(operation)
        return []

    def step(self, operation: Operation) -> None:
        if operation.name == "scf.for":
            self.loop(operation)
        elif operation.name == "scf.while":
            self.loop_while(operation)
        elif operation.name == "scf.if":
            branches = [self.run(region) for region in operation.regions]
            self.results(operation, *branches)
        else:
            self.compute(operation)

    def results(self, operation: Operation, *ways: list[str]) -> None:
        """The results are the values of one of the ways."""
        count = len(ways[0])
        names = operation.results
        if len(names) == 1 and count > 1:
            names = [f"{names[0]}#{i}" for i in range(count)]
        for way in ways:
            before = {name: self.of[name] for name in names if name in self.of}
            self.copy(names, way)
            if way is not ways[0]:
                for name, reach in before.items():
                    self.of[name] = join(reach, self.of[name])

    def loop(self, operation: Operation) -> None:
        low, high, by, *starts = operation.operands
        counter, *carried = operation.regions[0].arguments
        first, last = self.of[low][0], max(self.of[low][0], self.of[high][1] - 1)
        self.put(counter, (first, last), self.bits[low])
        beyond = last + self.of[by][1]
        if self.bits[low] == 32 and beyond > every(32)[1]:
            # the counter itself, which wraps before it is compared with the end
            self.faults.add(Fault(operation.source, variable(counter), "step", (first, beyond)))
        ends = self.until_stable(carried, starts, lambda: self.run(operation.regions[0]))
        self.results(operation, *([starts, ends] if ends else [starts]))

    def loop_while(self, operation: Operation) -> None:
        before, after = operation.regions
        passed: list[str] = []

        def again() -> list[str]:
            nonlocal passed
            passed = self.run(before)[1:]
            self.copy(after.arguments, passed)
            return self.run(after)

        self.until_stable(before.arguments, operation.operands, again)
        self.results(operation, passed)

    def until_stable(self, carried: list[str], starts: list[str], body: Callable[[], list[str]]) -> list[str]:
        """Run a body until what it carries round no longer grows."""
        self.copy(carried, starts)
        number, grows = 0, True
        while grows:
            ends, grows, number = body(), False, number + 1
            for name, end in zip(carried, ends, strict=True):
                if end not in self.of:
                    continue
                reach = join(self.of[name], self.of[end])
                if reach != self.of[name]:
                    grows = True
                    self.of[name] = reach if number < ROUNDS else self.wider(reach, self.bits[name])
        return ends

    def wider(self, reach: Interval, bits: int) -> Interval:
        """To the next constants of the kernel, or to the ends of the type: so loops come to an end."""
        low, high = every(bits)
        low = max((each for each in self.constants if low <= each <= reach[0]), default=low)
        high = min((each for each in self.constants if reach[1] <= each <= high), default=high)
        return low, high

    def compute(self, operation: Operation) -> None:
        name, operands = operation.name.removeprefix("arith."), operation.operands
        for one in operands:
            if one in self.root and operation.name in MOVES:
                for result in operation.results:
                    self.root[result] = self.root[one]
                return
        bits = 1 if name in ("cmpi", "cmpf") else width(operation.type)
        if operation.name in ("tt.load", "tt.atomic_rmw", "tt.atomic_cas"):
            self.load(operation)
            return
        if not bits or not operation.results:
            return
        if operation.name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
            self.scalar[operation.results[0]] = self.scalar.get(operands[0], operands[0])
        if name == "divsi":
            self.quotients[operation.results[0]] = self.of[operands[0]], self.number(operands[1])
        reach = self.exact(operation, name, bits)
        limit = None
        if bits == 32 and name in ("trunci", "addi"):
            limit = self.limits(operation.source, variable(operation.results[0]))
        if limit is not None:
            reach = max(reach[0], limit[0]), min(reach[1], limit[1])
        elif bits == 32 and name == "trunci":
            # a number that fits without its sign keeps its bits
            if reach[0] < every(32)[0] or reach[1] > 2**32 - 1:
                self.fault(operation, "conversion to 32 bits", reach)
        elif bits == 32 and (reach[0] < every(32)[0] or reach[1] > every(32)[1]):
            self.fault(operation, name, reach)
        if reach[0] < every(bits)[0] or reach[1] > every(bits)[1]:
            reach = every(bits)
        for result in operation.results:
            self.put(result, reach, bits)

    def number(self, value: str) -> str:
        """What two values share that are the same number everywhere."""
        value = self.scalar.get(value, value)
        low, high = self.of[value]
        return str(low) if low == high else value

    def exact(self, operation: Operation, name: str, bits: int) -> Interval:
        """The range of the exact result, which may need more bits than there are."""
        known = [self.of[one] for one in operation.operands if one in self.of]
        if name == "constant":
            numbers = re.findall(r"-?\b\d+\b", operation.text.partition("constant ")[2].partition(" : ")[0])
            numbers = [*map(int, numbers)] or [int("true" in operation.text)]
            return min(numbers), max(numbers)
        if operation.name == "tt.make_range":
            found = re.search(r"end = (\d+) : i32, start = (\d+)", operation.text)
            assert found, operation.text
            return int(found[2]), int(found[1]) - 1
        if operation.name == "tt.get_program_id":
            # a grid has up to 2**31 - 1 programs along x and 65,535 along the others
            return 0, 2**31 - 2 if " x " in operation.text else 65534
        if operation.name == "tt.get_num_programs":
            return 1, 2**31 - 1 if " x " in operation.text else 65535
        if name == "extui":
            source = self.bits[operation.operands[0]]
            return known[0] if known[0][0] >= 0 else (0, 2**source - 1)
        if (operation.name in MOVES or name == "trunci") and known:
            return known[0]
        if operation.name == "tt.join":
            return join(known[0], known[1])
        if name == "select" and len(known) == 3:
            return join(known[1], known[2])
        if name == "muli" and operation.operands[0] in self.quotients:
            whole, by = self.quotients[operation.operands[0]]
            if by == self.number(operation.operands[1]):
                return join(whole, (0, 0))  # x // y * y lies between x and 0
        if name in EXACT and len(known) == 2:
            return EXACT[name](known[0], known[1])
        if name in BITWISE and len(known) == 2:
            return BITWISE[name](known[0], known[1], bits)
        if operation.name in ("tt.reduce", "tt.scan") and known:
            return self.reduction(operation, known[0])
        return every(bits)

    def reduction(self, operation: Operation, reach: Interval) -> Interval:
        combined = {each.name.removeprefix("arith.") for each in operation.regions[0].operations}
        if "addi" not in combined:
            return reach
        axis = re.search(r"axis = (\d+)", operation.text)
        shape = re.search(r"\(tensor<([\dx]+)x", operation.text)
        assert axis and shape, operation.text
        count = int(shape[1].split("x")[int(axis[1])])
        return min(reach[0], reach[0] * count), max(reach[1], reach[1] * count)

    def load(self, operation: Operation) -> None:
        root = next((self.root[one] for one in operation.operands if one in self.root), "")
        found = re.search(r"ptr<i(\d+)>", operation.text)
        if not found or not operation.results:
            return
        bits = int(found[1])
        reach = (operation.name == "tt.load" and self.loaded(root)) or every(bits)
        # where the mask is false, the third operand is loaded
        if operation.name == "tt.load" and len(operation.operands) == 3:
            reach = join(reach, self.of[operation.operands[2]])
        self.put(operation.results[0], reach, bits)
