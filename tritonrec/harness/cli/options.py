"""Options made of the dataclasses that the code uses.

A parameter of a command whose default is a dataclass stands for an option of each of its settings
(`tritonrec.settings`) and of those of the dataclasses in its fields::

    @with_options()
    def train(run: Run = Run(Job(batch_size=128)), world_size: ... = 1): ...

Name, type, help and range come from the field, the default from the instance. The command gets the instance
with the values of the user. Fields of one name are one option: a seed goes to all that have one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import Field, fields, is_dataclass, replace
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ...settings import KEY, Setting, option_of
from ..train.config import keys_of, read_config
from .outputs import checked
from .words import PARSERS

PANELS = {
    "Job": "Data and training",
    "LogFormat": "Format of the log",
    "Target": "Data and training",
    "HSTUConfig": "Sizes of the model",
    "WindowConfig": "Windows and exchanges",
    "ExchangeConfig": "Windows and exchanges",
    "LossScaling": "Windows and exchanges",
    "TablePolicy": "Policies of tables",
    "Placement": "Policies of tables",
    "Run": "Run, checkpoints and evaluation",
    "SlipstreamConfig": "Slipstream, for dlrm (docs/slipstream.md)",
    "SlipstreamRun": "Slipstream, for dlrm (docs/slipstream.md)",
}
"""By dataclass the group of its options in the help."""

MOST_RANKS = 1024
"""Processes of one machine."""

LONGEST_WORD = 24
"""Characters of a word in the help of an option."""

TimeoutOption = Annotated[
    int, typer.Option(min=1, max=1_000_000, help="Seconds a rank waits for another before it gives up.")
]


CONFIG_PARAMETER = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help="TOML file, or directory of a checkpoint, with the settings; options win over it.",
        ),
    ],
)
CONTEXT_PARAMETER = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)


def with_options(
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    config: str | None = None,
    first: Collection[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose parameters with a dataclass for a default become options.

    Args:
        only: names of the options to offer, with underscores; by default those of all settings.
        without: names of those to leave out.
        config: the parameter whose defaults come from a file, where the user names one (`read_config`).
        first: names of the options that most users need, in the order in which the help begins with them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True).parameters
        plans = {name: each.default for name, each in own.items() if is_dataclass(each.default)}
        offered: dict[str, inspect.Parameter] = {}
        names = set()
        for plan in plans.values():
            for name, parameter in _parameters(plan):
                if name not in without and (only is None or name in only):
                    names.add(name)
                    offered.setdefault(parameter.name, parameter)
        if unknown := {*(only or ())} - names:
            raise TypeError(f"{command.__name__} has no settings named {', '.join(sorted(unknown))}")
        offered |= {name: each for name, each in own.items() if name not in plans}

        @wraps(command)
        def run(**values: Any) -> None:
            filled = dict(plans)
            if config:
                context, file = values.pop("context"), values.pop("config")
                if file:
                    filled[config] = checked(lambda: read_config(file, plans[config]))
                    values = {
                        name: value
                        for name, value in values.items()
                        if name in own or context.get_parameter_source(name).name == "COMMANDLINE"
                    }
            given = {name: value for name, value in values.items() if name in own}
            command(**given, **{name: checked(lambda p=p: _filled(p, values)) for name, p in filled.items()})

        if config:
            offered = {"config": CONFIG_PARAMETER, **offered, "context": CONTEXT_PARAMETER}
        for name in first:
            get_args(offered[name].annotation)[1].rich_help_panel = None  # the first one, without a name
        offered = {name: offered[name] for name in first} | offered
        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in offered.values()]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        if config:
            settings = {name: each.setting for name, each in keys_of(plans[config]).items() if each.setting}
            options = {name: each.option or name.split(".")[-1] for name, each in settings.items()}
            run.keys = {key: name for key, name in options.items() if name in offered}  # type: ignore[attr-defined]
        return run

    return decorate


def _settings(kind: Any) -> list[tuple[Field, Setting | None, Any]]:
    """Each field of a dataclass, its setting if it is one, and its type."""
    hints = get_type_hints(kind)
    return [(each, each.metadata.get(KEY), hints[each.name]) for each in fields(kind)]


def _choice(name: str, words: tuple[str, ...]) -> Any:
    return StrEnum(name, [(word, word) for word in words])


def _parameters(plan: Any) -> Iterator[tuple[str, inspect.Parameter]]:
    """The parameters of a command that stand for the settings of `plan`, by name."""
    for each, setting, written in _settings(type(plan)):
        value = getattr(plan, each.name)
        kind: Any = written
        if setting is None:
            if is_dataclass(value):
                yield from _parameters(value)
            continue
        name = option_of(each)
        panel = setting.panel or PANELS.get(type(plan).__name__)
        flag = f"--{name.replace('_', '-')}"
        if kind is bool:
            yield from ((name, each) for each in _switches(name, flag, value, setting.help, panel))
            continue
        limits: dict[str, Any] = {}
        if kind in PARSERS:
            kind, value = str, PARSERS[kind].text(value)
        elif get_origin(kind) is Literal:
            limits = {"metavar": f"<{' | '.join(get_args(kind))}>"}  # with spaces, at which a line may end
            kind = _choice(name, get_args(kind))
            value = kind(value)
        else:
            limits = {"min": setting.least, "max": setting.most}
        if isinstance(value, str) and _foldable(value) != value:
            limits["show_default"] = _foldable(value)
        option = typer.Option(flag, help=_foldable(setting.help), rich_help_panel=panel, **limits)
        yield name, _parameter(name, value, Annotated[kind, option])


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _foldable(help: str) -> str:
    """With spaces in long lists, at which a line may end: a terminal of 80 columns cuts longer words."""
    return " ".join(word.replace(",", ", ") if len(word) > LONGEST_WORD else word for word in help.split())


def _switches(
    name: str, flag: str, default: bool, help: str, panel: str | None
) -> Iterator[inspect.Parameter]:
    """``--name`` and ``--no-name``; help shows the one that changes the default, a config file may be
    overruled by the other.
    """
    negative = f"--no-{flag.removeprefix('--')}"
    if default:
        help = f"Do not {help[0].lower()}{help[1:]}"
    for each, spelled, hidden in ((name, flag, default), (f"no_{name}", negative, not default)):
        option = typer.Option(spelled, help=help, rich_help_panel=panel, hidden=hidden)
        yield _parameter(each, False, Annotated[bool, option])


def _switched(name: str, values: dict[str, Any], value: bool) -> bool:
    """What the user says, or else `value`."""
    on, off = values.get(name, False), values.get(f"no_{name}", False)
    if on and off:
        flag = name.replace("_", "-")
        raise typer.BadParameter(f"--{flag} and --no-{flag} exclude each other")
    return on or (value and not off)


def _filled(plan: Any, values: dict[str, Any]) -> Any:
    """`plan` with the values of its options."""
    changes = {}
    for each, setting, kind in _settings(type(plan)):
        value = getattr(plan, each.name)
        if setting is None:
            if is_dataclass(value):
                changes[each.name] = _filled(value, values)
        elif kind is bool:
            changes[each.name] = _switched(option_of(each), values, value)
        elif (name := option_of(each)) in values:
            given = values[name]
            if kind in PARSERS:
                given = PARSERS[kind].parse(given, f"--{name.replace('_', '-')}", setting)
            changes[each.name] = str(given) if isinstance(given, StrEnum) else given
    return replace(plan, **changes)
