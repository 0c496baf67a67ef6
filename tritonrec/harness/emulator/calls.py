"""Instructions of a warp: the function of the runtime, and each lane's operands and results."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .faults import UnsupportedError
from .layout import IO_DATA
from .ptx import BITS, Statement, group
from .runtime.atomics import KINDS, OPERATIONS
from .runtime.atomics import code as atomic_code
from .runtime.collectives import REDUCTIONS, SHUFFLES, VOTES
from .runtime.tensor_cores import KINDS as FACTORS
from .runtime.tensor_cores import TERMS

_ADDRESS = re.compile(r"^\[\s*([%$\w.]+)\s*(?:\+\s*(-?\d+))?\s*\]$")


@dataclass
class Call:
    """One instruction of a warp.

    Args:
        function: of the runtime. statement: the instruction. argument: the function's `a`.
        inputs, outputs: (operand, bits) of each lane, one after the other.
        address: (register or symbol, offset, bits), or None.
        in_place: outputs lie where the inputs lie, so that a lane that does not take part keeps its values.
        together: all lanes must have come. barrier: the warp waits for its block.
    """

    function: str
    statement: Statement
    argument: int = 0
    inputs: list[tuple[str, int]] = field(default_factory=list)
    outputs: list[tuple[str, int]] = field(default_factory=list)
    address: tuple[str, int, int] | None = None
    in_place: bool = False
    together: bool = False
    barrier: bool = False
    site: int = 0
    place: int = 0

    @property
    def input_bytes(self) -> int:
        """Of one lane."""
        return sum(bits for _, bits in self.inputs) // 8

    @property
    def output_bytes(self) -> int:
        return sum(bits for _, bits in self.outputs) // 8

    @property
    def shared_bytes(self) -> int | None:
        """The smallest piece of shared memory that it accesses; None if it accesses none."""
        if self.function in ("load_matrix", "store_matrix", "multiply_group"):
            return 2
        if self.function == "copy_async":
            return self.argument
        if self.address is None or self.address[2] != 32:
            return None
        return (self.outputs or self.inputs)[0][1] // 8

    @property
    def outputs_at(self) -> int:
        return IO_DATA + (0 if self.in_place else 32 * self.input_bytes)

    @property
    def io_bytes(self) -> int:
        """Of the buffer that the runtime sees."""
        return -(-(self.outputs_at + 32 * max(self.output_bytes, 0 if self.outputs else 1)) // 16) * 16


IGNORED = {"fence", "membar", "pragma"}
CALLED = {
    "ld", "st", "atom", "red", "cp", "shfl", "redux", "vote", "ldmatrix", "stmatrix", "mma", "wgmma", "bar",
    "barrier",
}  # fmt: skip


def address_of(operand: str, bits: int) -> tuple[str, int, int]:
    found = _ADDRESS.match(operand)
    if found is None:
        raise UnsupportedError(f"the emulator does not know the address {operand!r}")
    return found[1], int(found[2] or 0), bits


def space_of(s: Statement) -> str:
    """Of memory: global, shared, param or local."""
    for part in s.parts[1:]:
        name = part.split("::")[0]
        if name in ("global", "shared", "param", "local", "const"):
            return name
    return "generic"


def call_of(s: Statement) -> Call | None:
    """The call of an instruction of a warp; None where it has nothing to do."""
    made = _MAKE[s.name](s)
    if s.guard and made is not None and made.together:
        raise UnsupportedError(f"the emulator does not know the predicated instruction {s.text!r}")
    return made


def unknown(s: Statement) -> UnsupportedError:
    return UnsupportedError(f"the emulator does not know the instruction {s.text!r}")


def _loads(s: Statement) -> Call:
    space, bits = _global_or_shared(s), BITS[s.parts[-1]]
    values = [(r, bits) for r in group(s.operands[0])]
    # the old values go in, because a lane whose predicate is false keeps them
    before = values if s.guard else [("", bits)] * len(values)
    address = address_of(s.operands[1], 64 if space == "global" else 32)
    size = bits // 8 * len(values)
    return Call(f"{space}_load", s, size, before, values, address, in_place=True)


def _stores(s: Statement) -> Call:
    space, bits = _global_or_shared(s), BITS[s.parts[-1]]
    values = [(r, bits) for r in group(s.operands[1])]
    address = address_of(s.operands[0], 64 if space == "global" else 32)
    return Call(f"{space}_store", s, bits // 8 * len(values), values, [], address)


def _global_or_shared(s: Statement) -> str:
    space = space_of(s)
    if space not in ("global", "shared"):
        raise unknown(s)
    return space


def _atomics(s: Statement) -> Call:
    kind = s.parts[-1]
    operation = next((p for p in s.parts if p in OPERATIONS), None)
    bits, space = BITS[kind], _global_or_shared(s)
    letter = "f" if kind in ("f32", "f64") else kind[0]
    if operation is None or bits not in (32, 64) or letter not in KINDS or "x2" in kind:
        raise unknown(s)
    if letter == "f" and operation != "add":
        raise unknown(s)
    first = 0 if s.name == "red" else 1
    values = [(x, bits) for operand in s.operands[first + 1 :] for x in group(operand)]
    count = 1 if operation == "cas" else len(values)
    address = address_of(s.operands[first], 64 if space == "global" else 32)
    argument = atomic_code(operation, letter, bits // 8, count, space == "shared")
    if s.name == "red":
        return Call("atomic", s, argument, values, [], address)
    outputs = [(x, bits) for x in group(s.operands[0])]
    if len(outputs) != 1:
        raise unknown(s)
    return Call("atomic", s, argument, values, outputs, address)


def _copies(s: Statement) -> Call | None:
    if s.parts[1] != "async" or "bulk" in s.parts or "mbarrier" in s.parts:
        raise unknown(s)
    if s.parts[2] == "commit_group":
        return Call("commit_copies", s)
    if s.parts[2] == "wait_group":
        return Call("wait_copies", s, int(s.operands[0], 0))
    if s.parts[2] == "wait_all":
        return Call("wait_copies", s, -1)
    size = int(s.operands[2], 0)
    given = s.operands[3] if len(s.operands) > 3 else str(size)
    to = address_of(s.operands[0], 32)
    inputs = [(f"[{to[0]}+{to[1]}]", 32), (given, 32)]
    return Call("copy_async", s, size, inputs, [], address_of(s.operands[1], 64))


def _shuffle(s: Statement) -> Call:
    to, *values = s.operands
    targets = to.split("|") if "|" in to else [to, "_"]
    inputs = [(x, 32) for x in values[:3]]
    return Call(
        "shuffle", s, SHUFFLES.index(s.parts[2]), inputs, [(targets[0], 32), (targets[1], 32)], together=True
    )


def _redux(s: Statement) -> Call:
    if s.parts[2] not in REDUCTIONS or s.parts[-1] not in ("u32", "s32", "b32"):
        raise unknown(s)
    how = REDUCTIONS.index(s.parts[2]) + (8 if s.parts[-1] == "s32" else 0)
    to, value, members = s.operands
    return Call("reduce", s, how, [(value, 32), (members, 32)], [(to, 32)], together=True)


def _vote(s: Statement) -> Call:
    to, value, members = s.operands
    how = VOTES.index(s.parts[2])
    return Call("vote", s, how, [(value, 32), (members, 32)], [(to, 32)], together=True)


def _load_matrix(s: Statement) -> Call:
    outputs = [(r, 32) for r in group(s.operands[0])]
    if "m8n8" not in s.parts:
        raise unknown(s)
    how = len(outputs) + (8 if "trans" in s.parts else 0)
    return Call("load_matrix", s, how, [], outputs, address_of(s.operands[1], 32), together=True)


def _store_matrix(s: Statement) -> Call:
    inputs = [(r, 32) for r in group(s.operands[1])]
    if "m8n8" not in s.parts:
        raise unknown(s)
    how = len(inputs) + (8 if "trans" in s.parts else 0)
    return Call("store_matrix", s, how, inputs, [], address_of(s.operands[0], 32), together=True)


def _multiply(s: Statement) -> Call:
    kinds = s.parts[6:]
    if len(kinds) != 4 or kinds[1] not in FACTORS or kinds[1] != kinds[2] or kinds[3] != "f32":
        raise unknown(s)
    if s.parts[3] != f"m16n8{TERMS[kinds[1]]}":
        raise unknown(s)
    d, a, b, c = (group(operand) for operand in s.operands)
    inputs = [(x, 32) for x in (*a, *b, *c)]
    return Call("multiply", s, FACTORS.index(kinds[1]), inputs, [(x, 32) for x in d], together=True)


def _multiply_group(s: Statement) -> Call | None:
    if s.parts[1] != "mma_async":
        # a product is taken where it is issued, so there is nothing to wait for
        return None
    shape = re.fullmatch(r"m64n(\d+)(k\d+)", s.parts[4])
    if shape is None or s.parts[5] != "f32" or shape[2] != TERMS.get(s.parts[6]) or s.parts[6] != s.parts[7]:
        raise unknown(s)
    columns = int(shape[1])
    d, a, b, keep = s.operands[:4]
    in_registers = a.startswith("{")
    signs, turns = s.operands[4:6], [int(x, 0) for x in s.operands[6:]]
    # TF32 has no operands for it
    turn_a, turn_b = (0, 0) if not turns else (0, turns[0]) if in_registers else turns
    how = columns | FACTORS.index(s.parts[6]) << 12 | int(in_registers) << 14 | turn_a << 15 | turn_b << 16
    how |= int(int(signs[0], 0) < 0) << 17 | int(int(signs[1], 0) < 0) << 18
    inputs = [(keep, 32), ("0" if in_registers else a, 64), (b, 64)]
    inputs += [(x, 32) for x in (group(a) if in_registers else ["0"] * 4)]
    inputs += [(x, 32) for x in group(d)]
    return Call("multiply_group", s, how, inputs, [(x, 32) for x in group(d)], together=True)


def _barrier(s: Statement) -> Call | None:
    if s.parts[1] == "warp":
        return Call("", s, together=True)
    if s.parts[1:] not in (["sync"], ["sync", "aligned"], ["cta", "sync"], ["cta", "sync", "aligned"]):
        raise unknown(s)
    if len(s.operands) > 1 or s.operands[0] != "0":
        raise UnsupportedError(f"the emulator knows barrier 0 of all threads only, not {s.text!r}")
    return Call("", s, together=True, barrier=True)


_MAKE = {
    "ld": _loads, "st": _stores, "atom": _atomics, "red": _atomics, "cp": _copies, "shfl": _shuffle,
    "redux": _redux, "vote": _vote, "ldmatrix": _load_matrix, "stmatrix": _store_matrix, "mma": _multiply,
    "wgmma": _multiply_group, "bar": _barrier, "barrier": _barrier,
}  # fmt: skip


def data_address(operand: str) -> tuple[str, int] | None:
    """``[%r1+8]`` among the inputs stands for the address itself."""
    if operand.startswith("["):
        name, offset, _ = address_of(operand, 32)
        return name, offset
    return None
