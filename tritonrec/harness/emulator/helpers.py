"""LLVM functions of instructions that LLVM has no single one for; a program contains those that it uses."""

from __future__ import annotations

import re

_TEXTS = {
    "ftz": """define internal i32 @ftz(i32 %a) alwaysinline {
  %e = and i32 %a, 2139095040
  %z = icmp eq i32 %e, 0
  %s = and i32 %a, -2147483648
  %r = select i1 %z, i32 %s, i32 %a
  ret i32 %r
}""",
    "bf16": """define internal i16 @bf16(i32 %a) alwaysinline {
  %m = and i32 %a, 2147483647
  %n = icmp ugt i32 %m, 2139095040
  %h = lshr i32 %a, 16
  %o = and i32 %h, 1
  %b = add i32 %a, 32767
  %c = add i32 %b, %o
  %d = lshr i32 %c, 16
  %t = trunc i32 %d to i16
  %r = select i1 %n, i16 32767, i16 %t
  ret i16 %r
}""",
    "bfe_u32": """define internal i32 @bfe_u32(i32 %a, i32 %p, i32 %l) alwaysinline {
  %q = and i32 %p, 255
  %m = and i32 %l, 255
  %w = zext i32 %a to i64
  %big = icmp ugt i32 %q, 31
  %q1 = select i1 %big, i32 63, i32 %q
  %q2 = zext i32 %q1 to i64
  %x = lshr i64 %w, %q2
  %full = icmp ugt i32 %m, 31
  %m1 = select i1 %full, i32 32, i32 %m
  %m2 = zext i32 %m1 to i64
  %one = shl i64 1, %m2
  %k = sub i64 %one, 1
  %y = and i64 %x, %k
  %r = trunc i64 %y to i32
  ret i32 %r
}""",
    "bfe_s32": """define internal i32 @bfe_s32(i32 %a, i32 %p, i32 %l) alwaysinline {
  %q = and i32 %p, 255
  %m = and i32 %l, 255
  %w = sext i32 %a to i64
  %big = icmp ugt i32 %q, 31
  %q1 = select i1 %big, i32 63, i32 %q
  %q2 = zext i32 %q1 to i64
  %x = ashr i64 %w, %q2
  %full = icmp ugt i32 %m, 31
  %m1 = select i1 %full, i32 32, i32 %m
  %m2 = zext i32 %m1 to i64
  %up = sub i64 64, %m2
  %none = icmp eq i32 %m, 0
  %up1 = select i1 %none, i64 0, i64 %up
  %y = shl i64 %x, %up1
  %z = ashr i64 %y, %up1
  %t = trunc i64 %z to i32
  %r = select i1 %none, i32 0, i32 %t
  ret i32 %r
}""",
    "bfi_b32": """define internal i32 @bfi_b32(i32 %a, i32 %b, i32 %p, i32 %l) alwaysinline {
  %q = and i32 %p, 255
  %m = and i32 %l, 255
  %big = icmp ugt i32 %q, 31
  %q1 = select i1 %big, i32 32, i32 %q
  %q2 = zext i32 %q1 to i64
  %full = icmp ugt i32 %m, 31
  %m1 = select i1 %full, i32 32, i32 %m
  %m2 = zext i32 %m1 to i64
  %one = shl i64 1, %m2
  %k = sub i64 %one, 1
  %k1 = shl i64 %k, %q2
  %k2 = trunc i64 %k1 to i32
  %w = zext i32 %a to i64
  %x = shl i64 %w, %q2
  %x1 = trunc i64 %x to i32
  %in = and i32 %x1, %k2
  %not = xor i32 %k2, -1
  %out = and i32 %b, %not
  %r = or i32 %in, %out
  ret i32 %r
}""",
    "prmt": """define internal i32 @prmt(i32 %a, i32 %b, i32 %s) {
  %b1 = zext i32 %b to i64
  %a1 = zext i32 %a to i64
  %b2 = shl i64 %b1, 32
  %w = or i64 %a1, %b2
  br label %loop
loop:
  %i = phi i32 [0, %0], [%next, %loop]
  %t = phi i32 [0, %0], [%sum, %loop]
  %four = shl i32 %i, 2
  %n = lshr i32 %s, %four
  %at = and i32 %n, 7
  %at8 = shl i32 %at, 3
  %at64 = zext i32 %at8 to i64
  %v = lshr i64 %w, %at64
  %v1 = trunc i64 %v to i8
  %u = zext i8 %v1 to i32
  %sg = ashr i8 %v1, 7
  %g = zext i8 %sg to i32
  %m = and i32 %n, 8
  %c = icmp eq i32 %m, 0
  %byte = select i1 %c, i32 %u, i32 %g
  %eight = shl i32 %i, 3
  %p = shl i32 %byte, %eight
  %sum = or i32 %t, %p
  %next = add i32 %i, 1
  %end = icmp eq i32 %next, 4
  br i1 %end, label %out, label %loop
out:
  ret i32 %sum
}""",
    "shf_l": """define internal i32 @shf_l(i32 %a, i32 %b, i32 %n) alwaysinline {
  %a1 = zext i32 %a to i64
  %b1 = zext i32 %b to i64
  %b2 = shl i64 %b1, 32
  %w = or i64 %a1, %b2
  %n1 = zext i32 %n to i64
  %x = shl i64 %w, %n1
  %y = lshr i64 %x, 32
  %r = trunc i64 %y to i32
  ret i32 %r
}""",
    "shf_r": """define internal i32 @shf_r(i32 %a, i32 %b, i32 %n) alwaysinline {
  %a1 = zext i32 %a to i64
  %b1 = zext i32 %b to i64
  %b2 = shl i64 %b1, 32
  %w = or i64 %a1, %b2
  %n1 = zext i32 %n to i64
  %x = lshr i64 %w, %n1
  %r = trunc i64 %x to i32
  ret i32 %r
}""",
}


def _division(bits: int) -> None:
    t, low = f"i{bits}", -(2 ** (bits - 1))
    for kind, name in (("s", "sdiv"), ("s", "srem"), ("u", "udiv"), ("u", "urem")):
        # PTX leaves a division by zero open; the least number by -1 would trap
        overflow = f"%o1 = icmp eq {t} %a, {low}\n  %o2 = icmp eq {t} %b, -1\n  %o = and i1 %o1, %o2"
        bad = f"{overflow}\n  %x = or i1 %z, %o" if kind == "s" else "%x = or i1 %z, %z"
        special = f"select i1 %z, {t} -1, {t} %a" if "div" in name else f"select i1 %z, {t} %a, {t} 0"
        _TEXTS[f"{name}_{t}"] = f"""define internal {t} @{name}_{t}({t} %a, {t} %b) {{
  %z = icmp eq {t} %b, 0
  {bad}
  %d = select i1 %x, {t} 1, {t} %b
  %q = {name} {t} %a, %d
  %s = {special}
  %r = select i1 %x, {t} %s, {t} %q
  ret {t} %r
}}"""


def _smaller_or_larger(bits: int, name: str, nan: bool) -> None:
    t, f = f"i{bits}", "float" if bits == 32 else "double"
    compare, zero = ("olt", "or") if name == "min" else ("ogt", "and")
    quiet = 0x7FFFFFFF if bits == 32 else 0x7FFFFFFFFFFFFFFF
    # -0 is below +0; a NaN gives the other operand, or with .NaN a NaN
    first = f"{t} {quiet}" if nan else f"{t} %b"
    second = f"{t} {quiet}" if nan else f"{t} %a"
    key = f"{name}{'_nan' if nan else ''}_f{bits}"
    _TEXTS[key] = f"""define internal {t} @{key}({t} %a, {t} %b) alwaysinline {{
  %x = bitcast {t} %a to {f}
  %y = bitcast {t} %b to {f}
  %c = fcmp {compare} {f} %x, %y
  %p = select i1 %c, {t} %a, {t} %b
  %e = fcmp oeq {f} %x, %y
  %z = {zero} {t} %a, %b
  %q = select i1 %e, {t} %z, {t} %p
  %nb = fcmp uno {f} %y, %y
  %v = select i1 %nb, {second}, {t} %q
  %na = fcmp uno {f} %x, %x
  %w = select i1 %na, {first}, {t} %v
  %nn = and i1 %na, %nb
  %r = select i1 %nn, {t} {quiet}, {t} %w
  ret {t} %r
}}"""


for _bits in (16, 32, 64):
    _division(_bits)
for _bits in (32, 64):
    for _name in ("min", "max"):
        for _nan in (False, True):
            _smaller_or_larger(_bits, _name, _nan)


def used(program: str) -> list[str]:
    """The texts of the helpers that `program` calls, and declarations of LLVM's own functions."""
    names = set(re.findall(r"@([a-z]\w*)\(", program))
    texts = [_TEXTS[name] for name in sorted(names & _TEXTS.keys())]
    intrinsics = {}
    for line in [*program.splitlines(), *(line for text in texts for line in text.splitlines())]:
        for result, name, arguments in re.findall(r"call (<.*?>|\S+) (@llvm\.[\w.]+)\(([^)]*)\)", line):
            kinds = ", ".join(argument.strip().rpartition(" ")[0] for argument in arguments.split(","))
            intrinsics[name] = f"declare {result} {name}({kinds})"
    return [*texts, *intrinsics.values()]
