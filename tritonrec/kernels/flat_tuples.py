"""Kernels written with tuples, for a Triton that has none, as that of triton-ascend.

`taking_tuples` gives a kernel whose arguments may be tuples. Where Triton has tuples it is the kernel itself.
Where it has none, the syntax trees of the kernel and of its functions are rewritten, each tuple being the
numbers and pointers that it holds:

    def row_of(q_ptr, strides, layout):           def row_of(q_ptr, strides_0, strides_1, layout_ptr):
        walk = find(layout)                           walk_start, walk_count = find(layout_ptr)
        return q_ptr + walk.start * strides[1]        return q_ptr + walk_start * strides_1

and ``return Walk(start, count)`` becomes ``return (start, count)``. Which parameters are tuples, and of what
fields, is seen from a launch and followed through the calls. A tuple holds no tuple; it is read by field or
constant index, handed on, assigned, unpacked or returned. Whatever else a kernel does with one is a
`TupleError`, never another program.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import textwrap
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import triton.language as tl

Fields = tuple[str, ...]  # names of a tuple's items, "0", "1", ... where they have none

HAS_TUPLES = hasattr(tl, "tuple")


class TupleError(TypeError):
    """A kernel has a tuple where this module knows no way without."""


def taking_tuples(kernel: Any) -> Any:
    """`kernel`, to be launched by ``taking_tuples(kernel)[grid](...)`` with tuples among the arguments."""
    return kernel if HAS_TUPLES else Flat(kernel)


class Flat:
    """Launches a kernel with every tuple's items as arguments of their own."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return partial(self.launch, grid)

    def launch(self, grid: Any, *args: Any, **named: Any) -> None:
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | named
        tuples = {name: fields_of(value) for name, value in given.items() if isinstance(value, tuple)}
        single: dict[str, Any] = {}
        for name, value in given.items():
            names = names_of(name, tuples[name]) if name in tuples else [name]
            single |= zip(names, value if name in tuples else [value], strict=True)
        kernel, _ = flattened(self.kernel, tuple(tuples.items()))
        kernel[grid](**single)


def fields_of(value: tuple[Any, ...]) -> Fields:
    if any(isinstance(item, tuple) for item in value):
        raise TupleError(f"a tuple holds single values: {value}")
    return getattr(value, "_fields", None) or indices(len(value))


def indices(count: int) -> Fields:
    return tuple(map(str, range(count)))


def names_of(name: str, fields: Fields) -> list[str]:
    return [f"{name}_{field}" for field in fields]


@cache
def flattened(
    kernel: Any, tuples: tuple[tuple[str, Fields], ...], called: bool = False
) -> tuple[Any, Fields | None]:
    """(`kernel` with a parameter for each field of those in `tuples`, the fields of what it returns).

    `kernel` itself where neither it nor what it calls has a tuple to rewrite. A function that is `called` by
    kernels gets a name of its own: Triton compiles two of one name and equal types once.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    before = ast.unparse(tree)
    rewriter = Rewriter(kernel, tree, dict(tuples))
    rewriter.visit(tree)
    # Nothing to rewrite: the kernel keeps its name, and with it what is compiled of it.
    if ast.unparse(tree) == before:
        return kernel, rewriter.returns
    if [ast.unparse(each) for each in tree.decorator_list] != ["triton.jit"]:
        raise rewriter.error(tree, "only a plain triton.jit is known")
    tree.decorator_list.clear()
    digest = hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]
    if called:
        tree.name += f"_{digest}"
    text = ast.unparse(tree) + "\n"
    # Triton reads a function's source from its file, for which linecache may stand in
    file = f"<{kernel.fn.__module__}.{kernel.fn.__name__} without tuples, {digest}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    scope = kernel.fn.__globals__ | rewriter.functions
    exec(compile(text, file, "exec"), scope)
    return type(kernel)(scope[tree.name]), rewriter.returns  # compiled or interpreted, as `kernel` is


class Rewriter(ast.NodeTransformer):
    """Rewrites one function in place; `returns` and `functions` say what it returns and newly calls."""

    def __init__(self, kernel: Any, tree: ast.FunctionDef, tuples: dict[str, Fields]) -> None:
        self.fn, self.kind, self.tuples = kernel.fn, type(kernel), tuples
        self.returns: Fields | None = None
        self.returned = False
        self.functions: dict[str, Any] = {}
        parameters = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        variables = parameters | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self.owners = dict.fromkeys(variables, "")  # of variables: the tuple whose item one holds
        self.single = parameters - set(tuples)  # variables that are no tuples
        if kernel.fn.__closure__:
            raise self.error(tree, "a function inside of another one")

    def error(self, node: ast.AST, why: str) -> TupleError:
        line = self.fn.__code__.co_firstlineno + getattr(node, "lineno", 1) - 1
        where = f"{self.fn.__code__.co_filename}:{line}, in {self.fn.__name__}"
        return TupleError(f"{where}: {why}: {ast.unparse(node).splitlines()[0]}")

    # where tuples come from

    def value(self, node: ast.expr) -> tuple[ast.expr, Fields | None]:
        """(`node` rewritten, its fields where it is a tuple)."""
        if isinstance(node, ast.Name) and node.id in self.tuples:
            fields = self.tuples[node.id]
            items: list[ast.expr] = [ast.Name(name, ast.Load()) for name in names_of(node.id, fields)]
            return ast.Tuple(items, ast.Load()), fields
        if isinstance(node, ast.Tuple):
            return self.tuple_of(node, node.elts), indices(len(node.elts))
        if isinstance(node, ast.Call):
            function = self.resolve(node.func)
            if isinstance(function, type) and issubclass(function, tuple):
                return self.construction(node, function)
            if isinstance(function, self.kind) and not function.fn.__module__.startswith("triton."):
                return self.call(node, function)
            return self.generic_visit(node), None  # type: ignore[return-value]
        return self.visit(node), None

    def resolve(self, node: ast.expr) -> Any:
        """The global that a name or a dotted name stands for, None where there is none."""
        if isinstance(node, ast.Name):
            return self.fn.__globals__.get(node.id)
        return getattr(self.resolve(node.value), node.attr, None) if isinstance(node, ast.Attribute) else None

    def construction(self, node: ast.Call, kind: Any) -> tuple[ast.expr, Fields]:
        fields: Fields = getattr(kind, "_fields", ())
        given = dict(zip(fields, node.args, strict=False)) | {word.arg: word.value for word in node.keywords}
        if set(given) != set(fields) or len(given) != len(node.args) + len(node.keywords):
            raise self.error(node, f"a tuple is made of all its fields, {', '.join(fields)}")
        return self.tuple_of(node, [given[field] for field in fields]), fields

    def tuple_of(self, node: ast.expr, items: list[ast.expr]) -> ast.Tuple:
        if any(isinstance(item, ast.Tuple | ast.Starred) for item in items):
            raise self.error(node, "a tuple holds single values")
        return ast.Tuple([self.visit(item) for item in items], ast.Load())

    def call(self, node: ast.Call, function: Any) -> tuple[ast.expr, Fields | None]:
        """A call of a kernel's function, to which tuples are handed on item by item."""
        starred: list[Any] = [arg for arg in node.args if isinstance(arg, ast.Starred)]
        starred += [word for word in node.keywords if word.arg is None]
        if starred or len(node.args) > len(function.arg_names):
            raise self.error(node, "arguments are handed on one by one, to as many parameters")
        tuples: dict[str, Fields] = {}
        by_place = zip(function.arg_names, node.args, strict=False)
        node.args = [value for name, arg in by_place for _, value in self.handed_on(name, arg, tuples)]
        node.keywords = [
            ast.keyword(name, value)
            for word in node.keywords
            for name, value in self.handed_on(str(word.arg), word.value, tuples)
        ]
        flat, returns = flattened(function, tuple(tuples.items()), called=True)
        if flat is not function:
            self.functions[flat.__name__] = flat
            node.func = ast.Name(flat.__name__, ast.Load())
        return node, returns

    def handed_on(
        self, name: str, arg: ast.expr, tuples: dict[str, Fields]
    ) -> Iterable[tuple[str, ast.expr]]:
        """The argument `name`, or the items of a tuple, which is noted in `tuples`."""
        value, fields = self.value(arg)
        if fields is None:
            return [(name, value)]
        if not isinstance(value, ast.Tuple):
            raise self.error(arg, "a returned tuple gets a name before it is handed on")
        tuples[name] = fields
        return zip(names_of(name, fields), value.elts, strict=True)

    # where they go

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [self.visit(each) for each in node.body]
        parameters: list[ast.arg] = []
        defaults: list[ast.expr | None] = [None] * (len(node.args.args) - len(node.args.defaults))
        values: list[ast.expr] = []
        for arg, default in zip(node.args.args, [*defaults, *node.args.defaults], strict=True):
            names = self.names(arg, arg.arg) if arg.arg in self.tuples else [arg.arg]
            parameters += [ast.arg(name, arg.annotation) for name in names]
            values += [] if default is None else [default] * len(names)
        node.args.args, node.args.defaults = parameters, values
        return node

    def names(self, node: ast.AST, name: str) -> list[str]:
        """The new variables of a tuple."""
        names = names_of(name, self.tuples[name])
        for each in names:
            # A kernel may have a variable with the name that a tuple's item would get.
            if self.owners.setdefault(each, name) != name:
                raise self.error(node, f"{each} is a variable beside the tuple {name}")
        return names

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        node.value, fields = self.value(node.value)
        target = node.targets[0]
        if fields is None:
            node.targets = [self.visit(each) for each in node.targets]
        elif isinstance(target, ast.Name) and len(node.targets) == 1:
            if target.id in self.single or self.tuples.setdefault(target.id, fields) != fields:
                raise self.error(node, f"{target.id} was something else before")
            names = self.names(node, target.id)
            node.targets = [ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())]
        elif isinstance(target, ast.Tuple) and len(node.targets) == 1 and len(target.elts) == len(fields):
            node.targets = [self.visit(target)]
        else:
            raise self.error(node, f"a tuple is assigned to one name, or this one to {len(fields)}")
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:
        fields = None
        if node.value is not None:
            node.value, fields = self.value(node.value)
        if self.returned and fields != self.returns:
            raise self.error(node, "another return has other fields, or no tuple")
        self.returns, self.returned = fields, True
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        node.value, _ = self.value(node.value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return self.item(node, node.attr)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return self.item(node, node.slice.value if isinstance(node.slice, ast.Constant) else None)

    def item(self, node: ast.Attribute | ast.Subscript, key: Any) -> ast.expr:
        """The variable of a field of a tuple."""
        if not isinstance(node.value, ast.Name) or node.value.id not in self.tuples:
            return self.generic_visit(node)  # type: ignore[return-value]
        fields = self.tuples[node.value.id]
        if isinstance(key, int) and isinstance(node, ast.Subscript) and key < len(fields):
            key = fields[key]
        if key not in fields or not isinstance(node.ctx, ast.Load):
            raise self.error(node, f"of {', '.join(fields)} one is read, by name or constant index")
        return ast.Name(names_of(node.value.id, (key,))[0], ast.Load())

    # nowhere else

    def visit_Call(self, node: ast.Call) -> ast.expr:
        value, fields = self.value(node)
        if fields is not None:
            raise self.error(node, "a returned tuple gets a name before it is used")
        return value

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in self.tuples:
            raise self.error(node, "a tuple is read by field, handed on, assigned or returned, no more")
        if isinstance(node.ctx, ast.Store):
            self.single.add(node.id)
        return node
