"""A program file of `torch.export` that runs no code when it is loaded: checked, then written anew.

torch loads such a file with ``pickle`` where it finds one, evaluates the text of symbolic sizes and guards as
Python, resolves the names of operators anywhere in ``torch``, and makes Python source of the graph's names.
So a file of unknown origin is a program. Here it is data: of an archive only these members are taken, each
one stored as it is, and torch reads an archive that is made of them::

    NAME/models/model.json                               the graph, of names, operators and expressions below
    NAME/data/weights/model_weights_config.json          shapes of the values in weight_0, weight_1, ...
    NAME/data/constants/model_constants_config.json      of tensor_0, tensor_1, ...
    NAME/data/sample_inputs/model.pt                     empty: torch has a pickle there
    NAME/archive_format, archive_version, byteorder, .data/version, .data/serialization_id
"""

from __future__ import annotations

import ast
import io
import json
import re
import zipfile
from collections.abc import Collection, Iterator
from math import prod
from typing import Any

import torch

NAMESPACES = ("aten", "prims", "tritonrec")
"""Of ``torch.ops``: what a program may call."""

_HIGHER_ORDER = {"wrap_with_autocast", "wrap_with_set_grad_enabled", "cond"}
_OTHER_CALLS: dict[str, set[str]] = {
    "_operator": {
        "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "invert", "le", "lshift", "lt", "mod",
        "mul", "ne", "neg", "not_", "or_", "pos", "pow", "rshift", "sub", "truediv", "xor",
    },
    "math": {"ceil", "cos", "exp", "floor", "log", "log2", "pow", "sin", "sqrt", "tan", "tanh", "trunc"},
    "torch": {"sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_sum"},
}  # fmt: skip
_REFUSED_OPS = {"from_file"}  # opens any file
_BINARY_NAMES = {"__and__", "__or__", "__xor__", "__lshift__", "__rshift__"}

_FUNCTIONS = {
    "Abs", "Add", "And", "CeilDiv", "CeilToInt", "CleanDiv", "Eq", "Equality", "ExprCondPair", "FloatPow",
    "FloatTrueDiv", "FloorDiv", "FloorToInt", "Ge", "GreaterThan", "Gt", "Identity", "IntTrueDiv", "Integer",
    "IsNonOverlappingAndDenseIndicator", "LShift", "Le", "LessThan", "Lt", "Max", "Min", "Mod",
    "ModularIndexing", "Mul", "Ne", "Not", "Or", "Piecewise", "Pow", "PowByNatural", "PythonMod", "RShift",
    "Rational", "RoundDecimal", "RoundToInt", "StrictGreaterThan", "StrictLessThan", "Symbol", "ToFloat",
    "TruncToFloat", "TruncToInt", "Unequality", "Where", "ceiling", "floor",
}  # fmt: skip
_POWERS = {"Pow", "PowByNatural", "FloatPow", "LShift"}
_CONSTANTS = {"true", "false", "oo", "inf"}
_ASSUMPTIONS = {"positive", "integer", "nonnegative", "real", "finite", "nonzero", "negative"}
_SIZES = {"size", "stride", "storage_offset"}
_OPERATORS: tuple[type, ...] = (
    ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod,
    ast.UnaryOp, ast.USub, ast.UAdd, ast.Not,
)  # fmt: skip
LONGEST_EXPRESSION, DEEPEST_EXPRESSION, LARGEST_POWER = 4096, 40, 16

_WORD = re.compile(r"[A-Za-z0-9_.+:-]*")
_SUM = re.compile(r"[\w*/-]+( [+*/-] [\w*/-]+)+")
"""Whose range torch writes too, ``s0 + 1`` of offsets beside samples: left out, as that of s0 implies it."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Those of torch.export.pt2_archive.constants, whose import takes as long as torch's.
MODEL, SAMPLES = "models/model.json", "data/sample_inputs/model.pt"
CONFIGS = {
    "data/weights/model_weights_config.json": "weight_",
    "data/constants/model_constants_config.json": "tensor_",
}
"""By document of tensors how the names of their members begin, behind the folder of the document."""
_TENSORS = [rf"{re.escape(name.rpartition('/')[0])}/{prefix}\d+" for name, prefix in CONFIGS.items()]
_MEMBER = re.compile(
    "|".join(
        [*map(re.escape, (MODEL, SAMPLES, *CONFIGS, "archive_format", "archive_version", "byteorder")),
         r"\.data/(version|serialization_id)", *_TENSORS]
    )
)  # fmt: skip


class RefusedProgramError(ValueError):
    """A program file that could run code when it is loaded, or is none of ours; the message says where."""


def vetted(content: bytes, namespaces: Collection[str] = (), *, drop_samples: bool = False) -> bytes:
    """An archive with the same program, of checked members alone; the argument for `torch.export.load`.

    Args:
        content: of a file of `torch.export.save`.
        namespaces: of ``torch.ops`` that the program may call besides `NAMESPACES`.
        drop_samples: leave sample inputs, a pickle, out instead of refusing them.

    Raises RefusedProgramError naming the member and what is wrong in it. Nothing of the file is run.
    """
    members = _members(content)
    if members.get(SAMPLES) and not drop_samples:
        raise RefusedProgramError(
            f"{SAMPLES} is a pickle, which runs code when it is loaded: export the model again"
        )
    members[SAMPLES] = b""
    for name in (MODEL, *CONFIGS):
        if name not in members:
            raise RefusedProgramError(f"{name} is missing")
    for name, prefix in CONFIGS.items():
        config = _json(members, name)
        _check_payload(name, prefix, config, members)
        members[name] = json.dumps(config).encode()
    model = _json(members, MODEL)
    if not isinstance(model, dict) or "graph_module" not in model:
        raise RefusedProgramError(f"{MODEL} is no program of torch.export")
    try:
        model = _checked(model, "", {*NAMESPACES, *namespaces})
    except RecursionError:
        raise RefusedProgramError(f"{MODEL} is nested too deeply") from None
    members[MODEL] = json.dumps(model).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(f"model/{name}", (1980, 1, 1, 0, 0, 0)), data)
    return buffer.getvalue()


def _members(content: bytes) -> dict[str, bytes]:
    """Members by name, without the folder they are all in."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.infolist()
            root = entries[0].filename.partition("/")[0] if entries else ""
            found: dict[str, bytes] = {}
            for entry in entries:
                folder, _, name = entry.filename.partition("/")
                if folder != root or not re.fullmatch(r"[\w.-]+", root) or not _MEMBER.fullmatch(name):
                    raise RefusedProgramError(f"unknown member {entry.filename[:200]!r}")
                if name in found:
                    raise RefusedProgramError(f"member {name} is there twice")
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(content):
                    raise RefusedProgramError(f"member {name} is compressed, and torch stores members")
                if entry.external_attr >> 16 & 0o170000 not in (0, 0o100000):
                    raise RefusedProgramError(f"member {name} is a link or a special file")
                found[name] = archive.read(entry)
            if sum(map(len, found.values())) > len(content):
                raise RefusedProgramError("its members overlap")
    except RefusedProgramError:
        raise
    except Exception as error:  # zipfile raises many types for damaged archives
        raise RefusedProgramError(f"it is no archive of torch.export: {error}") from error
    return found


def _json(members: dict[str, bytes], name: str) -> Any:
    try:
        return json.loads(members[name])
    except (ValueError, RecursionError) as error:
        raise RefusedProgramError(f"{name} is no JSON: {error}") from error


def _check_payload(where: str, prefix: str, config: Any, members: dict[str, bytes]) -> None:
    """Tensors that lie in members of the archive, on the processor, and in their bytes."""
    folder = where.rpartition("/")[0]
    entries = config.get("config") if isinstance(config, dict) else None
    if not isinstance(entries, dict):
        raise RefusedProgramError(f"{where} has no config of tensors")
    for name, entry in entries.items():
        place = f"{where}: {name!r}"
        if not _WORD.fullmatch(name) or not isinstance(entry, dict):
            raise RefusedProgramError(f"{place} is no tensor")
        if entry.get("use_pickle") is not False:
            raise RefusedProgramError(f"{place} is a pickle, which runs code when it is loaded")
        file, meta = entry.get("path_name"), entry.get("tensor_meta")
        if not (isinstance(file, str) and re.fullmatch(rf"{prefix}\d+", file)):
            raise RefusedProgramError(f"{place} is in {file!r}, which is no member of {prefix}N")
        if f"{folder}/{file}" not in members or not isinstance(meta, dict):
            raise RefusedProgramError(f"{place}: {folder}/{file} or its shape is missing")
        try:
            sizes = [each["as_int"] for each in meta["sizes"]]
            numbers = [
                *sizes,
                *(each["as_int"] for each in meta["strides"]),
                meta["storage_offset"]["as_int"],
            ]
            device = meta["device"]["type"]
        except (KeyError, TypeError) as error:
            raise RefusedProgramError(f"{place} has no sizes, strides, offset and device ({error})") from None
        if device != "cpu" or not all(type(each) is int and 0 <= each < 1 << 40 for each in numbers):
            raise RefusedProgramError(f"{place} is on {device!r}, or has sizes out of range")
        if prod(sizes) > 0 and not members[f"{folder}/{file}"]:
            raise RefusedProgramError(f"{place} has {prod(sizes)} values in an empty member")
        _checked(meta, "", set())


def _checked(value: Any, key: str, namespaces: set[str], in_call: bool = False) -> Any:
    """`value` without metadata of nodes; RefusedProgramError for a text that torch would run.

    Args:
        in_call: of the arguments of an operator, whose texts torch takes as they are; a text that is an input
            of the program becomes part of a condition in Python.
    """
    if isinstance(value, list):
        return [_checked(each, key, namespaces, in_call) for each in value]
    if isinstance(value, str):
        return value if in_call and key in ("as_string", "as_strings") else _text(value, key, namespaces)
    if not isinstance(value, dict):
        return value
    if value.get("as_custom_obj") or value.get("custom_obj") or value.get("custom_obj_values"):
        raise RefusedProgramError(f"{MODEL} has an object of another library, which a pickle would hold")
    found, is_call = {}, "target" in value and "inputs" in value
    for name, each in value.items():
        if key == "range_constraints" and _SUM.fullmatch(name):
            continue
        if not _WORD.fullmatch(name):
            raise RefusedProgramError(f"{MODEL} has the name {name[:80]!r}")
        if name == "metadata":  # where in the source a node was made: for nobody here
            each = {}
        at = "operator" if name == "target" and is_call else name
        inside = (in_call or (is_call and name == "inputs")) and name != "as_graph"
        found[name] = _checked(each, at, namespaces, inside)
    return found


def _text(text: str, key: str, namespaces: set[str]) -> str:
    if key in ("operator", "as_operator"):
        check_operator(text, namespaces)
    elif key == "expr_str":
        return check_expression(text)
    elif key == "guards_code":
        return check_expression(text, guard=True)
    elif key in ("in_spec", "out_spec"):
        _check_treespec(text)
    elif not _WORD.fullmatch(text):
        raise RefusedProgramError(f"{MODEL} has {text[:80]!r} as {key}")
    return text


def check_operator(name: str, namespaces: Collection[str] = NAMESPACES) -> None:
    """Raise RefusedProgramError unless `name` is of an operator that a program may call."""
    parts = name.split(".")
    if all(_NAME.fullmatch(each) for each in parts):
        head, *rest = parts
        if len(parts) == 2 and rest[0] in _OTHER_CALLS.get(head, ()):
            return
        if parts[:3] == ["torch", "ops", "higher_order"] and len(parts) == 4 and parts[3] in _HIGHER_ORDER:
            return
        if parts[:2] == ["torch", "ops"] and len(parts) == 5 and parts[2] in namespaces:
            op, overload = parts[3:]
            hidden = op.startswith("__") and op not in _BINARY_NAMES
            if not hidden and not overload.startswith("__") and op not in _REFUSED_OPS:
                packet = getattr(getattr(torch.ops, parts[2]), op, None)
                if isinstance(getattr(packet, overload, None), torch._ops.OpOverload):
                    return
    raise RefusedProgramError(
        f"{MODEL} calls {name[:80]!r}, which is no operator of {', '.join(sorted(namespaces))}: to allow "
        "those of a library that you trust, give namespaces="
    )


def check_expression(text: str, guard: bool = False) -> str:
    """A symbolic size, or with `guard` a condition on sizes, in the one spelling that is evaluated.

    Numbers, symbols, arithmetic, comparisons and sympy's functions of these; of a guard also sizes of
    arguments, ``L['arguments'][0].size()[1]``. Raises RefusedProgramError for anything else.
    """
    try:
        if len(text) > LONGEST_EXPRESSION:
            raise ValueError("it is too long")
        tree = ast.parse(text.strip(), mode="eval").body
        _check_node(tree, guard, DEEPEST_EXPRESSION)
        return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RefusedProgramError(
            f"{MODEL} has the expression {text[:80]!r}, which is not made of sizes and numbers ({error})"
        ) from None


def _check_node(node: ast.AST, guard: bool, depth: int) -> None:
    """Raise ValueError for a part of an expression that is not of the grammar."""
    if depth == 0:
        raise ValueError("it is nested too deeply")
    if isinstance(node, ast.Constant):
        if not isinstance(node.value, (int, float)) or abs(node.value) >= 1 << 64:
            raise ValueError(f"{str(node.value)[:40]!r}")
        return
    if isinstance(node, ast.Name):
        if node.id not in _CONSTANTS:
            raise ValueError(f"the name {node.id}")
        return
    if guard and isinstance(node, ast.Subscript):
        _check_argument(node)
        return
    if isinstance(node, ast.Call):
        if guard and isinstance(node.func, ast.Attribute):
            _check_argument(node)
            return
        _check_call(node, guard, depth)
        return
    if not isinstance(node, _OPERATORS):
        raise ValueError(type(node).__name__)
    for child in ast.iter_child_nodes(node):
        _check_node(child, guard, depth - 1)


def _check_call(node: ast.Call, guard: bool, depth: int) -> None:
    if not isinstance(node.func, ast.Name) or node.func.id not in _FUNCTIONS:
        raise ValueError(f"a call of {ast.unparse(node.func)[:40]}")
    name = node.func.id
    if name == "Symbol":
        _check_symbol(node)
        return
    if node.keywords:
        raise ValueError(f"{name} with a named argument")
    if name in _POWERS:
        _check_power(*node.args)
    for each in node.args:
        for part in each.elts if isinstance(each, ast.Tuple) else [each]:  # a pair of Piecewise
            _check_node(part, guard, depth - 1)


def _check_symbol(node: ast.Call) -> None:
    names = [each.value if isinstance(each, ast.Constant) else None for each in node.args]
    if len(names) != 1 or not isinstance(names[0], str) or not _NAME.fullmatch(names[0]):
        raise ValueError("a symbol without a name")
    for each in node.keywords:
        if each.arg not in _ASSUMPTIONS or not isinstance(each.value, ast.Constant):
            raise ValueError(f"the assumption {each.arg}")


def _check_power(base: ast.AST, power: ast.AST) -> None:
    """Raise ValueError where the number could be too long for the memory."""
    parts = list(ast.walk(power))
    numbers = [each.value for each in parts if isinstance(each, ast.Constant)]
    large = any(isinstance(each, int) and abs(each) > LARGEST_POWER for each in numbers)
    if _called(base) & _POWERS or _called(power) - {"Integer", "Rational", "Symbol"} or large:
        raise ValueError("a large power")
    if any(isinstance(each, ast.BinOp) for each in parts):
        raise ValueError("a computed power")


def _called(node: ast.AST) -> set[str]:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return {each.id if isinstance(each, ast.Name) else "?" for each in calls}


def _check_argument(node: ast.AST) -> None:
    """``L['name'][0]['key'].size()[1]`` and its parts: ValueError for anything else."""
    key: Any = None
    while True:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            key = node.slice.value
            if not (type(key) is int or (isinstance(key, str) and _NAME.fullmatch(key))):
                raise ValueError(f"the place {str(key)[:40]!r}")
            node = node.value
        elif isinstance(node, ast.Call) and not node.args and not node.keywords:
            if not (isinstance(node.func, ast.Attribute) and node.func.attr in _SIZES):
                raise ValueError(f"a call of {ast.unparse(node.func)[:40]}")
            node = node.func.value
        elif isinstance(node, ast.Name) and node.id == "L" and isinstance(key, str):
            return
        else:
            raise ValueError(type(node).__name__)


def _check_treespec(text: str) -> None:
    """The structure of arguments or results: tuples, lists and dicts with plain keys, of tensors."""

    def nodes(spec: Any) -> Iterator[Any]:
        yield spec
        for child in spec["children_spec"]:
            yield from nodes(child)

    try:
        version, spec = json.loads(text)
        if type(version) is not int:
            raise ValueError("its version")
        for each in nodes(spec):
            if each.keys() != {"type", "context", "children_spec"}:
                raise ValueError(f"the keys {sorted(each)}")
            if each["type"] not in (None, "builtins.tuple", "builtins.list", "builtins.dict"):
                raise ValueError(f"the type {str(each['type'])[:60]!r}")
            keys = each["context"] and json.loads(each["context"])
            if keys is not None and not (
                each["type"] == "builtins.dict"
                and all(isinstance(k, str) and _NAME.fullmatch(k) for k in keys)
            ):
                raise ValueError(f"the context {str(keys)[:60]!r}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RefusedProgramError(
            f"{MODEL} has a structure of arguments that is not made of tuples, lists and dicts ({error})"
        ) from None
