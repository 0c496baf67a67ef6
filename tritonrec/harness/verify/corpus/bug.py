"""How a public bug becomes an injected fault: a function that breaks our code in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cases import Case
from ..faults import Broken, Fault, fault
from ..faults import case as case

CORPUS: list[Fault] = []
"""Public bugs, in the order of their files."""


def bug(source: str, case: Case, **more: Any) -> Callable[[Broken], Broken]:
    """Add a fault to `CORPUS`, as `fault` adds one to the core's.

    Args:
        source: the thread, ``repository#number``. case: in which it must show. more: of `fault`.
    """
    return fault(case, source=source, into=CORPUS, **more)
