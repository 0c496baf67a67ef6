"""Reads the PTX that Triton makes: parameters, registers, statements with their source lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32,
    "s16x2": 32, "u16x2": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64,
}  # fmt: skip
"""Width of a type."""

WITHOUT_RESULT = {
    "st", "red", "bar", "barrier", "cp", "bra", "ret", "exit", "fence", "membar", "stmatrix", "trap",
}  # fmt: skip

_LOC = re.compile(r"\.loc\s+(\d+) (\d+) \d+(?:.*inlined_at (\d+) (\d+))?")
_REGISTER = re.compile(r"%[a-zA-Z_]\w*")


@dataclass(frozen=True)
class Parameter:
    """A parameter of the kernel and its place among them, in bytes."""

    name: str
    kind: str
    offset: int


@dataclass
class Statement:
    """One instruction.

    Args:
        parts: the opcode at its dots. operands: texts, braces and brackets kept.
        guard: ``(register, negated)`` of ``@%p``. places: (file, line), the innermost function first.
    """

    parts: list[str]
    operands: list[str]
    guard: tuple[str, bool] | None
    places: tuple[tuple[int, int], ...]
    text: str

    @property
    def name(self) -> str:
        return self.parts[0]

    @property
    def results(self) -> list[str]:
        """The registers that it writes."""
        if self.name in WITHOUT_RESULT or (self.name == "wgmma" and self.parts[1] != "mma_async"):
            return []
        return [r for r in _REGISTER.findall(self.operands[0])] if self.operands else []

    @property
    def sources(self) -> list[str]:
        """The registers that it reads; the old values of its results too, where they may stay."""
        first = 1 if self.results or (self.operands and self.operands[0] == "_") else 0
        found = [r for operand in self.operands[first:] for r in _REGISTER.findall(operand)]
        if self.guard:
            found += [self.guard[0], *self.results]
        if self.name == "wgmma":
            found += self.results
        return found


@dataclass
class Kernel:
    """A kernel's PTX, read.

    Args:
        threads: of a block. registers: prefix -> bits, `%rd` -> 64 for example.
        blocks: (label, statements) in the order of the text; a label may be "".
        files: number in `places` -> path. local_bytes: of each thread's stack.
    """

    name: str
    parameters: list[Parameter]
    threads: int
    registers: dict[str, int]
    blocks: list[tuple[str, list[Statement]]]
    files: dict[int, str]
    local_bytes: int = 0
    parameter_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        last = self.parameters[-1] if self.parameters else None
        self.parameter_bytes = last.offset + BITS[last.kind] // 8 if last else 0

    def bits(self, register: str) -> int:
        """Width of a register."""
        prefix = register.rstrip("0123456789")
        return self.registers[prefix] if prefix in self.registers else self.registers[register]

    def place(self, places: tuple[tuple[int, int], ...]) -> str:
        """``file.py:12``, in the kernel's own files where a function of Triton was inlined."""
        texts = []
        for file, line in places:
            path = Path(self.files.get(file, "?"))
            texts.append((f"{path.name}:{line}", "triton/language" in path.as_posix()))
        own = [text for text, library in texts if not library] or [text for text, _ in texts]
        return own[0] if own else "?"


def parse(ptx: str) -> Kernel:
    """The only kernel of a PTX module."""
    head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)", ptx, re.S)
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+)\s*,\s*(\d+))?", ptx)
    if head is None or threads is None:
        raise ValueError("the PTX has no `.entry` with `.reqntid`: give the PTX of one Triton kernel")
    parameters, offset = [], 0
    for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", head[2]):
        size = BITS[kind] // 8
        offset = -(-offset // size) * size
        parameters.append(Parameter(name, kind, offset))
        offset += size
    start = ptx.index("{", threads.end())
    lines = ptx[start + 1 :].splitlines()
    files = {int(n): path for n, path in re.findall(r'^\s*\.file\s+(\d+) "([^"]*)"', ptx, re.M)}
    blocks, registers, local = _body(lines)
    return Kernel(head[1], parameters, int(threads[1]), registers, blocks, files, local)


def _body(lines: list[str]) -> tuple[list[tuple[str, list[Statement]]], dict[str, int], int]:
    blocks: list[tuple[str, list[Statement]]] = [("", [])]
    registers: dict[str, int] = {}
    local, pending = 0, ""
    places: tuple[tuple[int, int], ...] = ()
    for line in lines:
        line = line.split("//")[0].strip()
        if not line:
            continue
        if line.startswith("$L__func_end") or (line == "}" and blocks[-1][1] and not pending):
            break
        if line.startswith(".loc"):
            found = _LOC.match(line)
            if found:
                numbers = [int(n) for n in found.groups() if n]
                places = tuple(zip(numbers[::2], numbers[1::2], strict=True))
            continue
        if line.startswith(".reg"):
            for kind, prefix, _ in re.findall(r"\.(\w+)\s+(%\w+)(<\d+>)?", line):
                registers[prefix] = BITS[kind]
            continue
        if line.startswith(".local"):
            local += int(re.search(r"\[(\d+)\]", line)[1])  # type: ignore[index]
            continue
        if line.startswith(".pragma") or (not pending and line in "{}"):
            continue
        label = re.match(r"^([$\w]+):$", line)
        if label and not pending:
            if not label[1].startswith(("$L__tmp", "$L__func", "$L__info")):
                blocks.append((label[1], []))
            continue
        pending = f"{pending} {line}".strip()
        while ";" in pending:
            one, pending = (part.strip() for part in pending.split(";", 1))
            if one:
                blocks[-1][1].append(_statement(one, places))
    return blocks, registers, local


def _statement(text: str, places: tuple[tuple[int, int], ...]) -> Statement:
    guard, rest = None, text
    if found := re.match(r"^@(!?)(%\w+)\s+(.*)$", text, re.S):
        guard, rest = (found[2], found[1] == "!"), found[3]
    opcode, _, arguments = rest.partition(" ") if " " in rest else (rest, "", "")
    return Statement(opcode.split("."), operands(arguments), guard, places, " ".join(text.split()))


def operands(text: str) -> list[str]:
    """The texts between commas, outside of braces and brackets."""
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return [*found, current.strip()] if current.strip() else found


def group(operand: str) -> list[str]:
    """``{%r1, %r2}`` as a list; one operand is a list of one."""
    return [part.strip() for part in operand[1:-1].split(",")] if operand.startswith("{") else [operand]
