"""The code of one lane: registers are LLVM integers, floats are bits until an instruction computes."""

from __future__ import annotations

import re
from collections.abc import Callable

from .faults import UnsupportedError

FLOATS = {"f32": ("float", 32), "f64": ("double", 64)}
"""LLVM's name and the bits of a float."""
ROUNDING = {"rmi": "floor", "rpi": "ceil", "rzi": "trunc", "rni": "rint"}
"""PTX's roundings to an integer."""
SPECIAL = {
    "%tid.x": "%tid", "%tid.y": "0", "%tid.z": "0", "%laneid": "%lane32", "%warpid": "%warp_index",
    "%ctaid.x": "%block_x", "%ctaid.y": "%block_y", "%ctaid.z": "%block_z", "%ntid.x": "%threads",
    "%ntid.y": "1", "%ntid.z": "1", "%nctaid.x": "%grid_x", "%nctaid.y": "%grid_y", "%nctaid.z": "%grid_z",
}  # fmt: skip


class Lane:
    """The code of one lane of a segment, as it grows."""

    def __init__(self, bits: Callable[[str], int], load: Callable[[str, Lane], str]):
        self.out: list[str] = []
        self.now: dict[str, str] = {}
        self.written: set[str] = set()
        self.bits = bits
        self.guard: str | None = None
        self.suffix = ""
        self._load = load
        self._count = 0

    def emit(self, code: str) -> str:
        """A new value."""
        self._count += 1
        name = f"%v{self.suffix}_{self._count}"
        self.out.append(f"  {name} = {code}")
        return name

    def register(self, name: str) -> str:
        """The value of a register, in its own width."""
        if name not in self.now:
            self.now[name] = self._load(name, self)
        return self.now[name]

    def get(self, operand: str, bits: int, signed: bool = False) -> str:
        """An operand as an integer of `bits`."""
        if operand in SPECIAL:
            value, width = SPECIAL[operand], 32
            if value == "%tid":
                value = f"%tid{self.suffix}"
            if value == "%lane32":
                value = f"%lane{self.suffix}"
        elif operand.startswith("%"):
            value, width = self.register(operand), self.bits(operand)
        else:
            return constant(operand, bits)
        return self.resize(value, width, bits, signed)

    def resize(self, value: str, width: int, bits: int, signed: bool = False) -> str:
        if width == bits:
            return value
        how = "trunc" if bits < width else "sext" if signed else "zext"
        return self.emit(f"{how} i{width} {value} to i{bits}")

    def put(self, register: str, value: str, bits: int, signed: bool = False) -> None:
        """Write an integer of `bits` to a register, where the guard holds."""
        if register == "_":
            return
        width = self.bits(register)
        value = self.resize(value, bits, width, signed)
        if self.guard is not None:
            old = self.register(register)
            value = self.emit(f"select i1 {self.guard}, i{width} {value}, i{width} {old}")
        self.now[register] = value
        self.written.add(register)

    def float(self, operand: str, kind: str, flush: bool = False) -> str:
        name, bits = FLOATS[kind]
        value = self.get(operand, bits)
        if flush and kind == "f32":
            value = self.emit(f"call i32 @ftz(i32 {value})")
        return self.emit(f"bitcast i{bits} {value} to {name}")

    def put_float(self, register: str, value: str, kind: str, flush: bool = False) -> None:
        name, bits = FLOATS[kind]
        result = self.emit(f"bitcast {name} {value} to i{bits}")
        if flush and kind == "f32":
            result = self.emit(f"call i32 @ftz(i32 {result})")
        self.put(register, result, bits)


def constant(text: str, bits: int) -> str:
    """An immediate operand as LLVM writes it."""
    if text == "global_smem":
        return "0"
    if found := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", text):
        number = int(found[1], 16)
    else:
        try:
            number = int(text.rstrip("U"), 0)
        except ValueError:
            raise UnsupportedError(f"the emulator does not know the operand {text!r}") from None
    number &= (1 << bits) - 1
    if bits > 1 and number >> (bits - 1):
        number -= 1 << bits
    return str(number) if bits > 1 else ("true" if number else "false")
