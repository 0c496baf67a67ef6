"""Triton's own forms of a launch, TTIR and TTGIR, made without a GPU and read into a tree of operations."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = r"%[\w$.-]+"
VALUE = NAME + r"(?:#\d+)?"  # one of the results of an operation with several
TARGETS = {"sm_80": 80, "sm_90": 90}


@dataclass
class Operation:
    """One operation. A value is a string that no other value of the function has."""

    name: str  # arith.addi
    results: list[str]
    operands: list[str]
    text: str  # the line, locations resolved away
    source: str  # file:line of the Python expression, of the innermost function where calls are inlined
    regions: list[Region] = field(default_factory=list)
    parent: Region | None = None

    @property
    def type(self) -> str:
        """The type of its results, as it is printed: ``tensor<32x1xi64>``, ``i32``."""
        made = self.text.rpartition(" : ")[2]
        return made.rpartition(" -> ")[2].rpartition(" to ")[2].strip().strip("()")

    def walk(self) -> Iterator[Operation]:
        """This operation and those inside, in order of the text."""
        yield self
        for region in self.regions:
            for operation in region.operations:
                yield from operation.walk()


@dataclass
class Region:
    """A block of operations: the body of a loop, a branch, what a reduction does with two elements."""

    owner: Operation
    arguments: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)


@dataclass
class Function:
    """A kernel: its arguments with their types, and its body."""

    arguments: dict[str, str]
    body: Operation

    def walk(self) -> Iterator[Operation]:
        yield from self.body.walk()


def texts_of(
    launch: Any, architecture: int, upto: str, aligned: Collection[tuple[int, ...]] | None = None
) -> dict[str, str]:
    """Every form of a launch up to stage `upto` ("ttir", "ttgir"), for an NVIDIA architecture (80, 90).

    `aligned`: paths of the arguments that 16 divides, in the place of the launch's own.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", architecture, 32)
    backend = make_backend(target)
    options = backend.parse_options(dict(launch.options))
    attributes = {
        path: [["tt.divisibility", 16]] for path in (launch.aligned if aligned is None else aligned)
    }
    source = ASTSource(launch.kernel, launch.signature, launch.constants, attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    metadata = {"hash": "0", "target": target, **options.__dict__}
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    texts = {}
    for name, stage in stages.items():
        module = stage(module, metadata)
        texts[name] = str(module)
        if name == upto:
            return texts
    raise ValueError(f"a launch has the stages {', '.join(stages)}, got {upto!r}")


def parse(text: str) -> Function:
    """The only function of a module."""
    return Reader(text).function


class Reader:
    def __init__(self, text: str) -> None:
        self.places = {m[1]: m[2] for m in re.finditer(r"^(#loc\w*) = loc\((.*)\)$", text, re.M)}
        self.encodings = dict(re.findall(r"^(#\w+) = (#ttg.*)$", text, re.M))
        self.seen: dict[str, int] = {}
        self.scopes: list[dict[str, str]] = [{}]
        begin = text.index("tt.func ")
        head, _, rest = text[begin:].partition("\n")
        arguments = re.findall(rf"({NAME}): (!?[\w.<>]+)", head)
        self.body = Operation("tt.func", [], [], head, "")
        region = Region(self.body)
        self.body.regions.append(region)
        self.function = Function({self.define(name): kind for name, kind in arguments}, self.body)
        self.open = [region]
        for line in rest.splitlines():
            self.line(line.strip())
            if not self.open:
                break

    def define(self, name: str) -> str:
        """A value's own name: siblings may use one name in the text."""
        number = self.seen[name] = self.seen.get(name, 0) + 1
        self.scopes[-1][name] = name if number == 1 else f"{name}~{number}"
        return self.scopes[-1][name]

    def use(self, name: str) -> str:
        base, mark, number = name.partition("#")
        for scope in reversed(self.scopes):
            if base in scope:
                return scope[base] + mark + number
        raise ValueError(f"the text uses {name} before it defines it")

    def uses(self, text: str) -> list[str]:
        return [self.use(name) for name in re.findall(VALUE, text)]

    def line(self, line: str) -> None:
        if not line:
            return
        if line.startswith("^"):
            self.open[-1].arguments = [self.define(n) for n in re.findall(rf"({NAME}):", line)]
        elif line.startswith("}"):
            self.close(line)
        else:
            self.operation(line)

    def close(self, line: str) -> None:
        owner = self.open.pop().owner
        self.scopes.pop()
        if line.endswith("{"):  # } else {, or } do {
            self.enter(owner)
        elif self.open:
            owner.source = self.source(line) or owner.source
            if line.startswith("})"):
                owner.text += self.plain(line)
            # results are visible behind the operation, not inside
            owner.results = [self.define(name) for name in owner.results]

    def enter(self, owner: Operation) -> None:
        region = Region(owner)
        owner.regions.append(region)
        self.open.append(region)
        self.scopes.append({})

    def operation(self, line: str) -> None:
        left, _, right = line.partition(" = ")
        if not left.startswith("%") or "(" in left:
            left, right = "", line
        if counted := re.fullmatch(rf"({NAME}):(\d+)", left):
            names = [counted[1]]
        else:
            names = re.findall(NAME, left)
        found = re.match(r'"?([a-z_]+\.[\w.]+)"?', right)
        name = found[1] if found else right.split()[0]
        opens = line.endswith("{")
        arguments = []
        if name in ("scf.for", "scf.while"):
            pairs = re.findall(rf"({NAME}) = ({VALUE})", right)
            operands = [self.use(value) for _, value in pairs]
            arguments = [key for key, _ in pairs]
            if name == "scf.for":
                # the pattern above also finds the counter with its lower bound
                counter, *bounds = re.findall(
                    rf"scf\.for .*?({NAME}) = ({VALUE}) to ({VALUE}) step ({VALUE})", right
                )[0]
                operands = [*map(self.use, bounds), *operands[1:]]
                arguments = [counter, *arguments[1:]]
        else:
            operands = self.uses(right)
        operation = Operation(
            name, names, operands, self.plain(right), self.source(line), parent=self.open[-1]
        )
        self.open[-1].operations.append(operation)
        if opens:
            self.enter(operation)
            self.open[-1].arguments = [self.define(argument) for argument in arguments]
        else:
            operation.results = [self.define(one) for one in names]

    def plain(self, line: str) -> str:
        """The line without its location, layouts written out."""
        text = re.sub(r" loc\(.*\)$", "", line)
        return re.sub(r"#\w+", lambda found: self.encodings.get(found[0], found[0]), text)

    def source(self, line: str) -> str:
        """``file.py:12``, of the innermost function that is not Triton's own."""
        found = re.search(r" loc\((.*)\)$", line)
        path, _, number = self.resolve(found[1] if found else "").partition(":")
        return f"{Path(path).name}:{number}" if number else ""

    def resolve(self, place: str) -> str:
        """``/folder/file.py:12`` of the text of a location, "" where Triton has none."""
        place = self.places.get(place, place)
        if direct := re.match(r'"([^"]+\.py)":(\d+):\d+', place):
            return f"{direct[1]}:{direct[2]}"
        if call := re.match(r"callsite\((.*) at (.*)\)$", place):
            callee = self.resolve(call[1])
            return callee if callee and "/triton/language/" not in callee else self.resolve(call[2])
        # a name for a location, or several that became one
        inner = re.match(r'"[^"]*"\((.*)\)$', place) or re.match(r"fused(?:<.*>)?\[(#\w+)", place)
        return self.resolve(inner[1]) if inner else ""


def variable(value: str) -> str:
    """The Python variable that a value is named after: ``%lanes_25~2`` -> ``lanes``; "" without one."""
    return re.sub(r"(^\d+)?(_\d+)?(~\d+)?(#\d+)?$", "", value.removeprefix("%"))


def check_launches(
    description: str | None, check: Callable[[list[Any], str], list[str]], summary: str
) -> int:
    """The command of a check of every launch for every target: prints what it finds; the exit status."""
    import launches

    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose label contains this")
    parser.add_argument("--targets", default=",".join(TARGETS), help="separated by commas")
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"--targets takes some of {', '.join(TARGETS)}, got {', '.join(sorted(unknown))}")
    found = [line for target in targets for line in check(launches.launches(target, arguments.only), target)]
    print(*found, f"{len(found)} {summary}", sep="\n")
    return 1 if found else 0
