"""Mutants of a Python file: one small edit each, made where the syntax tree says.

An edit swaps an operator, a constant, a condition or an argument, or leaves a statement out. What only speaks
is left alone: docstrings, annotations, messages of errors, decorators; so is what Triton compiles, unless
only that is wanted, and of numba what is written in its intermediate code.
"""

from __future__ import annotations

import ast
import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

COMPARISONS = {
    ast.Lt: ("<=", ">="), ast.LtE: ("<", ">"), ast.Gt: (">=", "<="), ast.GtE: (">", "<"),
    ast.Eq: ("!=",), ast.NotEq: ("==",), ast.In: ("not in",), ast.NotIn: ("in",),
    ast.Is: ("is not",), ast.IsNot: ("is",),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
COMPILED = {"jit", "overload", "intrinsic", "jit_kernel", "jit_for_any_alignment"}
"""Decorators of functions that neither Python runs nor numba compiles as they are."""


@dataclass(frozen=True)
class Mutant:
    """An edit of a file: the text [start, end) in it becomes `after`.

    `name` stays as it is while other lines change: it has the text of the edit's lines, and how many mutants
    of the same text come before.
    """

    file: str
    line: int
    operator: str
    start: int
    end: int
    before: str
    after: str
    lines: str = ""
    earlier: int = 0

    @property
    def name(self) -> str:
        what = f"{self.lines}:{self.after}:{self.earlier}"
        return f"{self.file}:{self.operator}:{hashlib.sha256(what.encode()).hexdigest()[:8]}"

    def applied(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Every mutant of `file`, relative to `root`, but for functions that Triton compiles.

    A few are no program, or the same one (`is_one`).
    """
    source = Path(root, file).read_text()
    found_at = _Finder(file, source).of(ast.parse(source))
    edits = {(each.start, each.end, each.after): each for each in found_at}
    found, seen = [], Counter[tuple[str, str, str]]()
    for each in edits.values():
        alike = each.operator, each.lines, each.after
        found.append(replace(each, earlier=seen[alike]))
        seen[alike] += 1
    return found


def is_one(mutant: Mutant, source: str) -> bool:
    """Whether the edit of its file's `source` gives valid Python, and another program."""
    try:
        changed = ast.parse(mutant.applied(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != _tree_of(source)


@lru_cache(maxsize=256)
def _tree_of(source: str) -> str:
    return ast.dump(ast.parse(source))


class _Finder:
    def __init__(self, file: str, source: str):
        self.file, self.source = file, source
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self.lines = source.splitlines(keepends=True)
        self.starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    def of(self, tree: ast.AST) -> Iterator[Mutant]:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
                continue
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if _compiled(node):
                    continue
                if isinstance(node, ast.ClassDef):
                    yield from self.of(ast.Module(node.body, []))
                    continue
                yield from self.of(ast.Module([*node.args.defaults, *node.body], []))
                continue
            if isinstance(node, ast.If) and _mentions(node.test, "TYPE_CHECKING"):
                continue
            if isinstance(node, ast.AnnAssign):
                if node.value is not None:
                    yield from self.of(ast.Module([node.value], []))
                continue
            yield from self.edits(node)
            yield from self.of(node)

    def edits(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            for after in COMPARISONS.get(type(node.ops[0]), ()):
                yield self.between(node, left, right, "compare", after)
        elif isinstance(node, ast.BinOp | ast.AugAssign):
            after = ARITHMETIC.get(type(node.op))
            if after and isinstance(node, ast.BinOp):
                if not _is_text(node.left) and not _is_text(node.right):
                    yield self.between(node, node.left, node.right, "arithmetic", after)
            elif after and isinstance(node, ast.AugAssign):
                yield self.between(node, node.target, node.value, "arithmetic", f"{after}=")
                yield self.whole(node, "statement", "pass")
        elif isinstance(node, ast.BoolOp):
            after = "or" if isinstance(node.op, ast.And) else "and"
            yield self.between(node, node.values[0], node.values[1], "boolean", after)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield self.whole(node, "negation", f"({self.text(node.operand)})")
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool):
                yield self.whole(node, "constant", str(not node.value))
            elif isinstance(node.value, int):
                yield self.whole(node, "constant", str(node.value + 1))
            elif isinstance(node.value, float):
                yield self.whole(node, "constant", repr(node.value * 2 + 1))
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield self.whole(node.test, "condition", "False")
            if not isinstance(node, ast.While):
                yield self.whole(node.test, "condition", "True")
        elif _does_something(node):
            yield self.whole(node, "statement", "pass")
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield self.whole(node.value, "return", "None")
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg is not None and isinstance(keyword.value, ast.Name):
                    yield self.whole(keyword.value, "argument", "None")
            if len(node.args) >= 2 and not any(isinstance(each, ast.Starred) for each in node.args):
                first, second = node.args[:2]
                swapped = f"{self.text(second)}, {self.text(first)}"
                yield self.span(node, self.at(first), self.at(second, end=True), "swap", swapped)
        elif isinstance(node, ast.Break):
            yield self.whole(node, "loop", "continue")
        elif isinstance(node, ast.Continue):
            yield self.whole(node, "loop", "break")

    def at(self, node: ast.AST, end: bool = False) -> int:
        """Position in the text; the tree counts columns in bytes."""
        line = node.end_lineno if end else node.lineno
        column = node.end_col_offset if end else node.col_offset
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def text(self, node: ast.AST) -> str:
        return self.source[self.at(node) : self.at(node, end=True)]

    def span(self, node: ast.AST, start: int, end: int, operator: str, after: str) -> Mutant:
        first = bisect_right(self.starts, start) - 1
        lines = self.source[self.starts[first] : self.starts[bisect_left(self.starts, end)]]
        edited = f"{start - self.starts[first]}:{lines.strip()}"
        return Mutant(self.file, node.lineno, operator, start, end, self.source[start:end], after, edited)

    def whole(self, node: ast.AST, operator: str, after: str) -> Mutant:
        return self.span(node, self.at(node), self.at(node, end=True), operator, after)

    def between(self, node: ast.AST, left: ast.AST, right: ast.AST, operator: str, after: str) -> Mutant:
        """The operator between two operands; brackets around them stay as they are."""
        start, end = self.at(left, end=True), self.at(right)
        words = self.source[start:end]
        stripped = words.strip(" ()\n\\")
        start += words.find(stripped)
        return self.span(node, start, start + len(stripped), operator, after)


def _does_something(node: ast.AST) -> bool:
    """Whether a statement is a call, or an assignment to a part of something."""
    if isinstance(node, ast.Assign):
        return any(isinstance(each, ast.Subscript | ast.Attribute) for each in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _compiled(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(_named(each) & COMPILED for each in node.decorator_list)


def _named(decorator: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(decorator) if isinstance(each, ast.Name)} | {
        each.attr for each in ast.walk(decorator) if isinstance(each, ast.Attribute)
    }


def _mentions(node: ast.expr, name: str) -> bool:
    return name in _named(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
