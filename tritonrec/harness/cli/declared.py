"""The commands' options as data: ``--help`` shows them without torch.

A command's module loads torch, for its options are settings of what it runs. `declared.json` has the options
of all commands as typer takes them.

    python ci/declared.py      writes the file anew, where an option has changed
"""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.models import ArgumentInfo

FILE = Path(__file__).with_suffix(".json")
KINDS = {kind.__name__: kind for kind in (str, int, float, bool, Path)}
SHOWN = ("help", "rich_help_panel", "metavar", "min", "max", "hidden", "show_default")
"""What help needs of `typer.Option`, beside names and default."""

Declaration = dict[str, Any]


def declaration_of(command: Callable[..., Any]) -> Declaration:
    """The options of a command as JSON holds them, and its docstring."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    options = [_option_of(each) for each in parameters if each.annotation is not typer.Context]
    return {"doc": command.__doc__, "options": options, "keys": getattr(command, "keys", {})}


def command_of(declaration: Declaration) -> Callable[..., None]:
    """A command with these options that does nothing."""

    def command(**_values: Any) -> None:
        pass

    parameters = [_parameter_of(each) for each in declaration["options"]]
    command.__doc__ = declaration["doc"]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def check_numbers(given: dict[str, Any], settings: Declaration) -> None:
    """Raise BadParameter for NaN among the options that are given, and for a number out of bounds in the file
    that is their `config`, whose keys are options of the `settings`. What else is wrong the command says.
    """
    for name, value in given.items():
        if value != value:
            raise typer.BadParameter(f"--{name.replace('_', '-')} must be a number, got {value}")
    file, tables = given.get("config"), dict[str, Any]()
    if isinstance(file, Path) and file.is_file():
        with suppress(OSError, ValueError, RecursionError):
            tables = tomllib.loads(file.read_text("utf-8-sig"))
    options = {each["name"]: each for each in settings["options"]}
    for key, option in settings["keys"].items():
        found: Any = tables
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        kind, shown = options[option]["kind"], options[option]["shown"]
        least, most = shown.get("min", -math.inf), shown.get("max", math.inf)
        is_number = type(found) is int or (type(found) is float and kind == "float")
        if kind in ("int", "float") and is_number and not least <= found <= most:
            number = "a whole number" if kind == "int" else "a number"
            raise typer.BadParameter(f"{file}: {key} takes {number} from {least} to {most}, got {found}")


def _option_of(parameter: inspect.Parameter) -> Declaration:
    annotated, info = get_args(parameter.annotation)[:2]
    # A typer.Option in Annotated has its first name in the place of a default.
    names = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
    required = parameter.default is parameter.empty
    several, kind = _kind_of(annotated)
    usual = vars(type(info)())
    return {
        "name": parameter.name,
        "names": names,
        "kind": kind,
        "default": None if required else _plain(parameter.default),
        "several": several,
        "required": required,
        "argument": isinstance(info, ArgumentInfo),
        "shown": {name: getattr(info, name) for name in SHOWN if getattr(info, name) != usual[name]},
    }


def _kind_of(annotated: Any) -> tuple[bool, str | list[str]]:
    """Whether it is a list, and the name of its type, or the words that it may be."""
    kinds = get_args(annotated) if get_origin(annotated) in (Union, UnionType) else (annotated,)
    (kind,) = (each for each in kinds if each is not NoneType)
    several = get_origin(kind) is list
    if several:
        (kind,) = get_args(kind)
    if get_origin(kind) is Literal:
        return several, list(get_args(kind))
    return several, [str(each) for each in kind] if issubclass(kind, StrEnum) else kind.__name__


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, (Path, StrEnum)) else value


def _parameter_of(option: Declaration) -> inspect.Parameter:
    kind: Any = option["kind"]
    kind = KINDS[kind] if isinstance(kind, str) else StrEnum(option["name"], [(each, each) for each in kind])
    default: Any = inspect.Parameter.empty
    if not option["required"]:
        default = option["default"] if option["default"] is None else kind(option["default"])
    if option["several"]:
        kind = list[kind]
    if default is None:
        kind = kind | None
    info = (typer.Argument if option["argument"] else typer.Option)(*option["names"], **option["shown"])
    return inspect.Parameter(
        option["name"], inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )
