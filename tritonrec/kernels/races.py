"""Declares that a kernel's accesses race on purpose.

The emulator (`tritonrec.harness.emulator`) reports every race, and every result that depends on the order of
programs. A kernel whose races are harmless names the arguments beside its code; a comment says why they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Kernel = TypeVar("Kernel")


def declared(*, races: tuple[str, ...] = (), varies: tuple[str, ...] = ()) -> Callable[[Kernel], Kernel]:
    """Mark a kernel, above ``@triton.jit``.

    Args:
        races: names of arguments that programs read and write with no order between them.
        varies: names of arguments whose contents at the end depend on the order.

    Raises:
        ValueError: the kernel has no argument of that name.
    """

    def mark(kernel: Kernel) -> Kernel:
        names = kernel.arg_names  # type: ignore[attr-defined]
        if unknown := {*races, *varies} - {*names}:
            raise ValueError(f"no arguments named {sorted(unknown)}: the kernel has {', '.join(names)}")
        kernel.declared = {  # type: ignore[attr-defined]
            name: (name in races, name in varies) for name in {*races, *varies}
        }
        return kernel

    return mark
