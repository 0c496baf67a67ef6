"""Arithmetic of float16 and bfloat16: in float32, or float64, then rounded to the half."""

from __future__ import annotations

from .conversions import rounded_to_half, widened
from .faults import UnsupportedError
from .lane import Lane
from .ptx import BITS, Statement

KINDS = ("f16", "bf16", "f16x2", "bf16x2")
_BINARY = {"add": "fadd", "sub": "fsub", "mul": "fmul"}
_FLUSHING = {"ftz", "sat", "relu", "NaN", "xorsign"}


def lower_halves(lane: Lane, s: Statement) -> None:
    """``add``, ``sub``, ``mul``, ``fma``, ``min``, ``max``, ``neg`` and ``abs`` of one or two halves."""
    name, kind = s.parts[0], s.parts[-1]
    if _FLUSHING & set(s.parts):
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    bits, half = BITS[kind], kind.removesuffix("x2")
    sources = [lane.get(operand, bits) for operand in s.operands[1:]]
    parts = []
    for shift in range(0, bits, 16):
        taken = []
        for source in sources:
            moved = lane.emit(f"lshr i{bits} {source}, {shift}") if shift else source
            taken.append(lane.resize(moved, bits, 16))
        parts.append(_compute(lane, name, half, taken, s))
    if bits == 16:
        lane.put(s.operands[0], parts[0], 16)
        return
    low, high = (lane.emit(f"zext i16 {part} to i32") for part in parts)
    lane.put(s.operands[0], lane.emit(f"or i32 {lane.emit(f'shl i32 {high}, 16')}, {low}"), 32)


def _compute(lane: Lane, name: str, half: str, sources: list[str], s: Statement) -> str:
    """One half, as its bits."""
    if name in ("neg", "abs"):
        return lane.emit(f"xor i16 {sources[0]}, -32768" if name == "neg" else f"and i16 {sources[0]}, 32767")
    values = [widened(lane, source, half) for source in sources]
    if name in ("min", "max"):
        bits = [lane.emit(f"bitcast float {value} to i32") for value in values]
        found = lane.emit(f"call i32 @{name}_f32(i32 {bits[0]}, i32 {bits[1]})")
        return rounded_to_half(lane, found, half)
    if name == "fma":
        a, b, c = (lane.emit(f"fpext float {value} to double") for value in values)
        total = lane.emit(f"call double @llvm.fma.f64(double {a}, double {b}, double {c})")
        result = lane.emit(f"fptrunc double {total} to float")
    elif name in _BINARY:
        result = lane.emit(f"{_BINARY[name]} float {values[0]}, {values[1]}")
    else:
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    return rounded_to_half(lane, lane.emit(f"bitcast float {result} to i32"), half)
