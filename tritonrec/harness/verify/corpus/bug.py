"""How a public bug becomes an injected fault: a function that breaks our code in the same way."""

from __future__ import annotations

from collections.abc import Callable

from ....pipeline import Program, Schedule, Task
from ..cases import Case
from ..faults import Fault
from ..faults import case as case
from ..injections import Injection

CORPUS: list[Fault] = []
"""Public bugs, in the order of their files."""
SOURCES: dict[str, str] = {}
"""Where a fault was found in the wild: ``repository#number`` by the fault's name."""

ProgramFault = Callable[[Program], None]


def bug(
    source: str,
    case: Case,
    schedule: Callable[[Schedule], Schedule] | None = None,
    delay: Callable[[Task], float] | None = None,
    says: str = "",
) -> Callable[[ProgramFault], ProgramFault]:
    """Add a fault to `CORPUS`: it is called as the function, and described by its docstring's first line.

    Args:
        source: the thread, ``repository#number``. case: in which it must show.
        schedule, delay: as `Injection`, beside what the function does to the program. says: as `Fault`.
    """

    def added(break_: ProgramFault) -> ProgramFault:
        name = break_.__name__.replace("_", "-")
        first = (break_.__doc__ or "").splitlines()[0].rstrip(".")
        CORPUS.append(
            Fault(
                name,
                first[:1].lower() + first[1:],
                case,
                Injection(break_, schedule=schedule, delay=delay),
                says,
            )
        )
        SOURCES[name] = source
        return break_

    return added
