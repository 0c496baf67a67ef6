"""``cvt``: between integers and floats of all widths."""

from __future__ import annotations

from .faults import UnsupportedError
from .lane import FLOATS, ROUNDING, Lane
from .ptx import BITS, Statement


def convert(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    to, source = parts[-2], parts[-1]
    modes, x = parts[1:-2], s.operands
    flush = "ftz" in modes
    if (to, source, modes) == ("tf32", "f32", ["rna"]):
        lane.put(x[0], rounded_to_tf32(lane, lane.get(x[1], 32)), 32)
        return
    if set(modes) & {"sat", "relu", "rz", "rm", "rp", "rna"}:
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    if to in ("bf16x2", "f16x2"):
        high, low = (rounded_to_half(lane, lane.get(each, 32), to[:-2]) for each in x[1:])
        wide = [lane.emit(f"zext i16 {half} to i32") for half in (high, low)]
        shifted = lane.emit(f"shl i32 {wide[0]}, 16")
        lane.put(x[0], lane.emit(f"or i32 {shifted}, {wide[1]}"), 32)
    elif source in ("bf16", "f16") and to in FLOATS:
        value = widened(lane, lane.get(x[1], 16), source)
        lane.put_float(x[0], value if to == "f32" else lane.emit(f"fpext float {value} to double"), to)
    elif to in ("bf16", "f16") and source == "f32":
        lane.put(x[0], rounded_to_half(lane, lane.get(x[1], 32), to), 16)
    elif to in FLOATS and source in FLOATS:
        value = lane.float(x[1], source, flush)
        f = FLOATS[to][0]
        to_integer = [m for m in modes if m in ROUNDING]
        if to == source and to_integer:
            value = lane.emit(f"call {f} @llvm.{ROUNDING[to_integer[0]]}.{to}({f} {value})")
        elif to != source:
            value = lane.emit(f"{'fpext' if to == 'f64' else 'fptrunc'} {FLOATS[source][0]} {value} to {f}")
        lane.put_float(x[0], value, to, flush)
    elif to in FLOATS and source in BITS and source[0] in "us":
        bits, code = BITS[source], "sitofp" if source[0] == "s" else "uitofp"
        value = lane.emit(f"{code} i{bits} {lane.get(x[1], bits)} to {FLOATS[to][0]}")
        lane.put_float(x[0], value, to)
    elif source in FLOATS and to in BITS and to[0] in "us":
        value, f = lane.float(x[1], source, flush), FLOATS[source][0]
        whole = next(m for m in modes if m in ROUNDING)
        value = lane.emit(f"call {f} @llvm.{ROUNDING[whole]}.{source}({f} {value})")
        code, bits = ("s" if to[0] == "s" else "u"), BITS[to]
        result = lane.emit(f"call i{bits} @llvm.fpto{code}i.sat.i{bits}.{source}({f} {value})")
        if (source == "f32" and bits == 64) or source == "f64":
            # a NaN gives the highest bit alone; of float32 to 32 bits, 0
            nan = lane.emit(f"fcmp uno {f} {value}, {value}")
            result = lane.emit(f"select i1 {nan}, i{bits} {-(2 ** (bits - 1))}, i{bits} {result}")
        lane.put(x[0], result, bits, to[0] == "s")
    elif to in BITS and source in BITS and to[0] in "usb" and source[0] in "usb":
        value = lane.get(x[1], BITS[source])
        value = lane.resize(value, BITS[source], BITS[to], source[0] == "s")
        lane.put(x[0], value, BITS[to], to[0] == "s")
    else:
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")


def widened(lane: Lane, half: str, kind: str) -> str:
    """The bits of a bfloat16 or float16 as a float."""
    if kind == "f16":
        return lane.emit(f"fpext half {lane.emit(f'bitcast i16 {half} to half')} to float")
    wide = lane.emit(f"shl i32 {lane.emit(f'zext i16 {half} to i32')}, 16")
    return lane.emit(f"bitcast i32 {wide} to float")


def rounded_to_tf32(lane: Lane, value: str) -> str:
    """float32 bits to those of a TF32: 10 binary digits behind the point, halves away from zero."""
    raised = lane.emit(f"and i32 {lane.emit(f'add i32 {value}, 4096')}, -8192")
    magnitude = lane.emit(f"and i32 {value}, 2147483647")
    nan = lane.emit(f"icmp ugt i32 {magnitude}, 2139095040")
    return lane.emit(f"select i1 {nan}, i32 2147475456, i32 {raised}")


def rounded_to_half(lane: Lane, value: str, kind: str) -> str:
    """float32 bits to the bits of a bfloat16 or float16."""
    if kind == "bf16":
        return lane.emit(f"call i16 @bf16(i32 {value})")
    single = lane.emit(f"bitcast i32 {value} to float")
    return lane.emit(f"bitcast half {lane.emit(f'fptrunc float {single} to half')} to i16")
