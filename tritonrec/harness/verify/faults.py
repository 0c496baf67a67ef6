"""Injected faults: each breaks the promise in one place, and `tritonrec verify --inject-faults` must notice.

A fault is declared where it is done: `fault` decorates the function, or the class, that breaks our code. One
in the schedule is run with the check switched off, so that its effect must show in the bits; beside is
reported whether the check alone would have refused it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from ...pipeline import Program, Schedule, Task
from ..job import Loader
from .cases import Case
from .own_code import OwnLoop
from .variants import tools

Broken = TypeVar("Broken", bound=Callable[..., Any])


@dataclass(frozen=True)
class Injection:
    """How a fault is injected: by changing the program, the schedule, the timing that brings it out, or the
    loader of a rank.

    `tool` takes the place of a part of the case's tool, or changes it; the tool says which.
    With `alone` no two micro-batches share an exchange, for faults of a single one's.
    `loop` changes an `OwnLoop`, which has none of these.
    """

    program: Callable[[Program], None] | None = None
    loader: Callable[[Loader], None] | None = None
    schedule: Callable[[Schedule], Schedule] | None = None
    delay: Callable[[Task], float] | None = None
    loop: Callable[[OwnLoop], None] | None = None
    alone: bool = False
    tool: Any = None


@dataclass(frozen=True)
class Fault:
    """An injected fault and the case in which it must show.

    Args:
        says: the fault ends in an error with these words; empty: the run goes on to other bits. Nothing else
            catches it: an error of another kind is an accident, which says nothing of what was broken.
    """

    name: str
    description: str
    case: Case
    injection: Injection
    says: str = ""


FAULTS: list[Fault] = []
"""Those of the core, and behind them those of the tools that are loaded, in the order of their files."""
SOURCES: dict[str, str] = {}
"""Where a fault was found in the wild: ``repository#number`` by the fault's name."""


def case(**changes: Any) -> Case:
    """The case in which a fault must show: where not said otherwise, two ranks, three micro-batches, Adam."""
    return replace(Case("nestpipe", "batch", 2, 3, False, "adam", steps=5), **changes)


def fault(
    case: Case,
    *,
    of: Literal["program", "loader", "schedule", "loop", "tool"] = "program",
    name: str = "",
    what: str = "",
    says: str = "",
    source: str = "",
    into: list[Fault] = FAULTS,
    **more: Any,
) -> Callable[[Broken], Broken]:
    """Add what this decorates to the faults; it is called as the function or class, and described by the
    first line of its docstring, where `name` and `what` say nothing else.

    Args:
        case: in which it must show. of: the part of an `Injection` that it is. more: the other parts.
        says: as `Fault`. source: the thread of a public bug, ``repository#number``.
    """

    def added(broken: Broken) -> Broken:
        called = name or re.sub(r"_|(?<=[a-z])(?=[A-Z])", "-", broken.__name__).lower()
        first = (broken.__doc__ or "").partition("\n")[0].rstrip(".")
        injected: dict[str, Any] = {of: broken, **more}
        described = what or first[:1].lower() + first[1:]
        into.append(Fault(called, described, case, Injection(**injected), says))
        if source:
            SOURCES[called] = source
        return broken

    return added


def injection_of(name: str) -> Injection:
    """The injection of the fault called `name`, of the core, its corpus or a tool."""
    found: Injection = next(f.injection for f in tools().SELECTIONS[True, True] if f.name == name)
    return found
