"""Messages of faults: kernel, line of its source, block, thread, and the element of an argument."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import faults, layout
from .arguments import Argument
from .program import Program
from .runtime.shadow import READ_AFTER_WRITE, TWO_WRITES, WRITE_AFTER_READ

_HOW = {
    READ_AFTER_WRITE: "read after a write",
    WRITE_AFTER_READ: "write over a value that was read",
    TWO_WRITES: "writes of two values",
}


def fault_of(
    state: np.ndarray, program: Program, arguments: list[Argument], grid: tuple[int, int, int]
) -> faults.EmulationError:
    """The error of the first fault that a launch noted in its `state`."""
    kind, site, pc, block, warp, lane, address, size, other, warps, detail = (
        int(x) for x in state[layout.FAULT_KIND : layout.FAULT_DETAIL + 1]
    )
    translation = program.translation
    statement = translation.sites[site] if site >= 0 else translation.lines.get(pc)
    source, text = (program.place(statement), statement.text) if statement else ("?", "?")
    shared = int(state[layout.LAUNCH_SHARED_BYTES])
    in_shared = kind != layout.OUTSIDE and 0 <= address < shared
    where = f"byte {address} of shared memory" if in_shared else _element(arguments, address)
    texts: dict[int, tuple[type[faults.EmulationError], Callable[[], str]]] = {
        layout.RACE: (
            faults.RaceError,
            lambda: (
                f"race, {_HOW[detail]} of {where}; the other access is of "
                f"{_other(other, warps, block, warp, in_shared, grid)} and no barrier orders the two"
            ),
        ),
        layout.OUTSIDE: (
            faults.OutsideError,
            lambda: f"access of {size} bytes outside of every tensor, {where}",
        ),
        layout.OUTSIDE_SHARED: (
            faults.OutsideError,
            lambda: f"access of {size} bytes at {address} of {shared} bytes of shared memory",
        ),
        layout.MISALIGNED: (
            faults.MisalignedError,
            lambda: f"access of {size} bytes at address {address:#x}, {where}",
        ),
        layout.UNINITIALISED: (faults.UninitialisedError, lambda: f"read of {where}, which nobody wrote"),
        layout.DIVERGED: (
            faults.BarrierError,
            lambda: f"lanes {detail:#010x} of the warp wait for the others, which are beyond",
        ),
        layout.BARRIER_MISSED: (
            faults.BarrierError,
            lambda: f"barrier that warp {detail} never reaches, since it ended",
        ),
        layout.BARRIERS_DIFFER: (
            faults.BarrierError,
            lambda: f"barrier, while other warps wait at {program.place(translation.sites[detail])}",
        ),
        layout.HANG: (
            faults.HangError,
            lambda: f"no memory has changed for {state[layout.LAUNCH_PATIENCE]} accesses",
        ),
        layout.TOO_MANY: (
            faults.UnsupportedError,
            lambda: "more asynchronous copies under way than the emulator keeps",
        ),
    }
    error, say = texts[kind]
    place = f"block {_coordinates(block, grid)}, thread {32 * warp + lane}"
    return error(f"{program.name} at {source}, {place}: {say()}; instruction `{text}`")


def _coordinates(block: int, grid: tuple[int, int, int]) -> str:
    x, y, _ = grid
    return f"({block % x}, {block // x % y}, {block // x // y})"


def _element(arguments: list[Argument], address: int) -> str:
    """An address as an element of an argument."""
    for each in arguments:
        if each.begin <= address < each.end:
            return f"{each.name}[{each.element(address)}]"
    nearest = min(arguments, key=lambda a: min(abs(address - a.begin), abs(address - a.end)), default=None)
    if nearest is None:
        return f"address {address:#x}"
    size = (nearest.end - nearest.begin) // nearest.tensor.element_size()
    return f"the nearest is {nearest.name}[{nearest.element(address)}] of {size} elements"


def _other(user: int, warps: int, block: int, warp: int, in_shared: bool, grid: tuple[int, int, int]) -> str:
    """The block and the warps of the earlier access."""
    number = user & layout.BLOCK_OF_CELL
    if number == layout.SEVERAL and not in_shared:
        return "several blocks"
    if in_shared or number - 1 == block:
        warps &= ~(1 << warp)
    numbers = [str(index) for index in range(32) if (warps >> index) & 1]
    found = f"warp{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
    return found if in_shared else f"block {_coordinates(number - 1, grid)}, {found}"
