"""Instructions of one lane: PTX in, LLVM out."""

from __future__ import annotations

import re
from collections.abc import Callable

from .conversions import convert, widened
from .faults import UnsupportedError
from .halves import KINDS, lower_halves
from .lane import FLOATS, Lane
from .ptx import BITS, Statement, group

_COMPARE = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
_TYPE = re.compile(r"[a-z]+\d+(x\d+)?")
_APPROXIMATE = {"ex2": "exp2", "lg2": "log2", "sin": "sin", "cos": "cos", "tanh": "tanh"}


def lower(lane: Lane, s: Statement) -> None:
    """Add the code of a statement that concerns its lane only."""
    parts, kind = s.parts, s.parts[-1]
    name = parts[0]
    if name not in _LOWER or not {part for part in parts[1:] if _TYPE.fullmatch(part)} <= BITS.keys():
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    _LOWER[name](lane, s, parts, kind)


def _move(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    bits = BITS[kind]
    to, source = s.operands
    if to.startswith("{"):
        value = lane.get(source, bits)
        step = bits // len(group(to))
        for i, part in enumerate(group(to)):
            if part != "_":
                shifted = lane.emit(f"lshr i{bits} {value}, {step * i}")
                lane.put(part, lane.emit(f"trunc i{bits} {shifted} to i{step}"), step)
    elif source.startswith("{"):
        step = bits // len(group(source))
        total = "0"
        for i, part in enumerate(group(source)):
            wide = lane.emit(f"zext i{step} {lane.get(part, step)} to i{bits}")
            shifted = lane.emit(f"shl i{bits} {wide}, {step * i}")
            total = lane.emit(f"or i{bits} {total}, {shifted}")
        lane.put(to, total, bits)
    else:
        lane.put(to, lane.get(source, bits), bits)


def _arithmetic(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    if kind in KINDS:
        lower_halves(lane, s)
    elif kind in FLOATS:
        _float(lane, s, parts, kind)
    elif kind in ("s16x2", "u16x2"):
        _pairs(lane, s, parts, kind)
    elif kind[0] in "us":
        _integer(lane, s, parts, kind)
    else:
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")


def _pairs(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    """Two integers of 16 bits in a register of 32."""
    if parts[0] not in ("add", "sub", "min", "max") or len(parts) > 2:
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    pair = "<2 x i16>"
    a, b = (lane.emit(f"bitcast i32 {lane.get(x, 32)} to {pair}") for x in s.operands[1:])
    if parts[0] in ("min", "max"):
        result = lane.emit(f"call {pair} @llvm.{kind[0]}{parts[0]}.v2i16({pair} {a}, {pair} {b})")
    else:
        result = lane.emit(f"{parts[0]} {pair} {a}, {b}")
    lane.put(s.operands[0], lane.emit(f"bitcast {pair} {result} to i32"), 32)


def _float(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    name, flush = parts[0], "ftz" in parts
    rounding = {p for p in parts[1:-1]} & {"rz", "rm", "rp", "sat"}
    if rounding:
        raise UnsupportedError(f"the emulator does not know the rounding of {s.text!r}")
    to, *sources = s.operands
    if name in ("min", "max"):
        bits = BITS[kind]
        a, b = (lane.get(x, bits) for x in sources)
        if flush:
            a, b = (lane.emit(f"call i32 @ftz(i32 {x})") for x in (a, b))
        helper = f"{name}{'_nan' if 'NaN' in parts else ''}_{kind}"
        lane.put(to, lane.emit(f"call i{bits} @{helper}(i{bits} {a}, i{bits} {b})"), bits)
        return
    f = FLOATS[kind][0]
    values = [lane.float(x, kind, flush) for x in sources]
    if name in ("fma", "mad"):
        a, b, c = values
        result = lane.emit(f"call {f} @llvm.fma.{kind}({f} {a}, {f} {b}, {f} {c})")
    else:
        code = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}[name]
        result = lane.emit(f"{code} {f} {values[0]}, {values[1]}")
    lane.put_float(to, result, kind, flush)


def _integer(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    name, bits, signed = parts[0], BITS[kind], kind[0] == "s"
    to, *sources = s.operands
    if name in ("mul", "mad") and "wide" in parts:
        wide = 2 * bits
        a, b = (lane.get(x, bits) for x in sources[:2])
        extend = "sext" if signed else "zext"
        if all(re.fullmatch(r"-?\d+", x) for x in (a, b)):
            raise UnsupportedError(f"the emulator expects a register in {s.text!r}")
        a = lane.emit(f"{extend} i{bits} {a} to i{wide}")
        b = lane.emit(f"{extend} i{bits} {b} to i{wide}")
        value = lane.emit(f"mul i{wide} {a}, {b}")
        if name == "mad":
            value = lane.emit(f"add i{wide} {value}, {lane.get(sources[2], wide)}")
        lane.put(to, value, wide)
        return
    values = [lane.get(x, bits, signed) for x in sources]
    if name in ("mul", "mad") and "hi" in parts:
        extend, wide = ("sext" if signed else "zext"), 2 * bits
        a, b = (lane.emit(f"{extend} i{bits} {x} to i{wide}") for x in values[:2])
        high = lane.emit(f"lshr i{wide} {lane.emit(f'mul i{wide} {a}, {b}')}, {bits}")
        value = lane.emit(f"trunc i{wide} {high} to i{bits}")
    elif name in ("min", "max"):
        function = f"@llvm.{'s' if signed else 'u'}{name}.i{bits}"
        value = lane.emit(f"call i{bits} {function}(i{bits} {values[0]}, i{bits} {values[1]})")
        if "relu" in parts:
            value = lane.emit(f"call i{bits} @llvm.smax.i{bits}(i{bits} {value}, i{bits} 0)")
    elif name in ("div", "rem"):
        helper = f"{'s' if signed else 'u'}{name}_i{bits}"
        value = lane.emit(f"call i{bits} @{helper}(i{bits} {values[0]}, i{bits} {values[1]})")
    elif "sat" in parts or "cc" in parts or name in ("addc", "subc"):
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    else:
        code = "mul" if name == "mad" else name
        value = lane.emit(f"{code} i{bits} {values[0]}, {values[1]}")
    if name == "mad" and "wide" not in parts:
        value = lane.emit(f"add i{bits} {value}, {values[2]}")
    lane.put(to, value, bits)


def _logic(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    bits = BITS[kind]
    a, b = (lane.get(x, bits) for x in s.operands[1:])
    lane.put(s.operands[0], lane.emit(f"{parts[0]} i{bits} {a}, {b}"), bits)


def _not(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    bits = BITS[kind]
    all_ones = "true" if bits == 1 else "-1"
    lane.put(s.operands[0], lane.emit(f"xor i{bits} {lane.get(s.operands[1], bits)}, {all_ones}"), bits)


def _negate(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    if kind in KINDS:
        lower_halves(lane, s)
        return
    bits, x = BITS[kind], lane.get(s.operands[1], BITS[kind])
    if kind[0] == "f":
        if "ftz" in parts:
            x = lane.emit(f"call i32 @ftz(i32 {x})")
        sign = -(2 ** (bits - 1))
        code = f"xor i{bits} {x}, {sign}" if parts[0] == "neg" else f"and i{bits} {x}, {-sign - 1}"
    elif parts[0] == "neg":
        code = f"sub i{bits} 0, {x}"
    else:
        code = f"call i{bits} @llvm.abs.i{bits}(i{bits} {x}, i1 false)"
    lane.put(s.operands[0], lane.emit(code), bits)


def _shift(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    bits = BITS[kind]
    to, source, by = s.operands
    value = lane.get(source, bits)
    code = "shl" if parts[0] == "shl" else "ashr" if kind[0] == "s" else "lshr"
    if by.startswith("%"):
        # more than the width counts as the width: zeros, or copies of the sign
        amount = lane.get(by, 32)
        large = lane.emit(f"icmp ugt i32 {amount}, {bits - 1}")
        small = lane.resize(lane.emit(f"select i1 {large}, i32 {bits - 1}, i32 {amount}"), 32, bits)
        result = lane.emit(f"{code} i{bits} {value}, {small}")
        if code != "ashr":
            result = lane.emit(f"select i1 {large}, i{bits} 0, i{bits} {result}")
    else:
        number = int(by, 0)
        if number >= bits and code != "ashr":
            result = lane.emit(f"add i{bits} 0, 0")
        else:
            result = lane.emit(f"{code} i{bits} {value}, {min(number, bits - 1)}")
    lane.put(to, result, bits)


def _funnel(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    to, a, b, by = s.operands
    n = lane.get(by, 32)
    if parts[2] == "wrap":
        n = lane.emit(f"and i32 {n}, 31")
    else:
        n = lane.emit(f"call i32 @llvm.umin.i32(i32 {n}, i32 32)")
    values = f"i32 {lane.get(a, 32)}, i32 {lane.get(b, 32)}, i32 {n}"
    lane.put(to, lane.emit(f"call i32 @shf_{parts[1]}({values})"), 32)


def _select(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    bits = BITS[kind]
    to, a, b, condition = s.operands
    p = lane.get(condition, 1)
    lane.put(to, lane.emit(f"select i1 {p}, i{bits} {lane.get(a, bits)}, i{bits} {lane.get(b, bits)}"), bits)


def _compare(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    how = parts[1]
    to, a, b = s.operands[:3]
    if len(s.operands) > 3 or "|" in to or kind.endswith("x2"):
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    if kind in FLOATS or kind in KINDS:
        if kind in KINDS:
            x, y = (widened(lane, lane.get(operand, 16), kind) for operand in (a, b))
        else:
            x, y = (lane.float(operand, kind, "ftz" in parts) for operand in (a, b))
        code = {"num": "ord", "nan": "uno"}.get(how)
        if code is None:
            code = ("u" if how.endswith("u") and len(how) == 3 else "o") + how[:2]
        result = lane.emit(f"fcmp {code} {'double' if kind == 'f64' else 'float'} {x}, {y}")
    else:
        bits = BITS[kind]
        x, y = lane.get(a, bits), lane.get(b, bits)
        sign = "s" if kind[0] == "s" else "u"
        code = _COMPARE.get(how) or (how if how in ("eq", "ne") else sign + how)
        result = lane.emit(f"icmp {code} i{bits} {x}, {y}")
    lane.put(to, result, 1)


def _approximate(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    flush = "ftz" in parts
    if kind not in FLOATS:
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    f = FLOATS[kind][0]
    x = lane.float(s.operands[1], kind, flush)
    if parts[0] in _APPROXIMATE:
        result = lane.emit(f"call float %fn_{_APPROXIMATE[parts[0]]}(float {x})")
    elif parts[0] == "rcp":
        result = lane.emit(f"fdiv {f} 1.0, {x}")
    else:
        result = lane.emit(f"call {f} @llvm.sqrt.{kind}({f} {x})")
        if parts[0] == "rsqrt":
            result = lane.emit(f"fdiv {f} 1.0, {result}")
    lane.put_float(s.operands[0], result, kind, flush)


def _bit_field(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    if BITS[kind] != 32:
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    name = f"{parts[0]}_{'b32' if parts[0] == 'bfi' else kind}"
    values = ", ".join(f"i32 {lane.get(x, 32)}" for x in s.operands[1:])
    lane.put(s.operands[0], lane.emit(f"call i32 @{name}({values})"), 32)


def _permute(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    if len(parts) > 2:
        raise UnsupportedError(f"the emulator does not know the instruction {s.text!r}")
    values = ", ".join(f"i32 {lane.get(x, 32)}" for x in s.operands[1:])
    lane.put(s.operands[0], lane.emit(f"call i32 @prmt({values})"), 32)


def _count(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    bits, x = BITS[kind], lane.get(s.operands[1], BITS[kind])
    if parts[0] == "brev":
        lane.put(s.operands[0], lane.emit(f"call i{bits} @llvm.bitreverse.i{bits}(i{bits} {x})"), bits)
        return
    extra = ", i1 false" if parts[0] == "clz" else ""
    name = {"popc": "ctpop", "clz": "ctlz"}[parts[0]]
    value = lane.emit(f"call i{bits} @llvm.{name}.i{bits}(i{bits} {x}{extra})")
    lane.put(s.operands[0], lane.resize(value, bits, 32), 32)


def _convert_address(lane: Lane, s: Statement, parts: list[str], kind: str) -> None:
    lane.put(s.operands[0], lane.get(s.operands[1], 64), 64)


_LOWER: dict[str, Callable[[Lane, Statement, list[str], str], None]] = {
    "mov": _move, "not": _not, "neg": _negate, "abs": _negate, "selp": _select, "setp": _compare,
    "cvt": convert, "cvta": _convert_address, "shf": _funnel, "prmt": _permute, "brev": _count,
    **dict.fromkeys(("add", "sub", "mul", "div", "fma", "mad", "min", "max", "rem"), _arithmetic),
    **dict.fromkeys(("and", "or", "xor"), _logic), **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys((*_APPROXIMATE, "rcp", "sqrt", "rsqrt"), _approximate),
    **dict.fromkeys(("bfe", "bfi"), _bit_field), **dict.fromkeys(("popc", "clz"), _count),
}  # fmt: skip
