"""Messages of faults, and the table of what ran."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import faults, layout
from .runtime.shadow import READ_AFTER_WRITE, TWO_WRITES, WRITE_AFTER_READ

if TYPE_CHECKING:
    from .driver import Row
    from .launch import Launch

_HOW = {
    READ_AFTER_WRITE: "read after a write",
    WRITE_AFTER_READ: "write over a value that was read",
    TWO_WRITES: "writes of two values",
}


def fault_of(launch: Launch, state: np.ndarray) -> faults.EmulationError:
    """The error of a launch's first fault."""
    kind, site, pc, block, warp, lane, address, size, other, warps, detail = (
        int(x) for x in state[layout.FAULT_KIND : layout.FAULT_DETAIL + 1]
    )
    program = launch.program
    lines = program.translation.lines
    statement = program.translation.sites[site] if site >= 0 else lines.get(pc)
    source = program.place(statement) if statement else "?"
    text = statement.text if statement else "?"
    x, y, _ = launch.grid
    place = f"block ({block % x}, {block // x % y}, {block // x // y}), thread {32 * warp + lane}"
    at = f"{program.name} at {source}, {place}"
    ends = f"instruction `{text}`"
    where = _where(launch, state, kind, address)
    if kind == layout.RACE:
        return faults.RaceError(
            f"{at}: race, {_HOW[detail]} of {where}; the other access is of "
            f"{_other(other, warps, where, x, y)} and no barrier orders the two; {ends}"
        )
    if kind == layout.OUTSIDE:
        return faults.OutsideError(f"{at}: access of {size} bytes outside of every tensor, {where}; {ends}")
    if kind == layout.OUTSIDE_SHARED:
        return faults.OutsideError(
            f"{at}: access of {size} bytes at {address} of {launch.shared} bytes of shared memory; {ends}"
        )
    if kind == layout.MISALIGNED:
        return faults.MisalignedError(
            f"{at}: access of {size} bytes at address {address:#x}, {where}; {ends}"
        )
    if kind == layout.UNINITIALISED:
        return faults.UninitialisedError(f"{at}: read of {where}, which nobody wrote; {ends}")
    if kind == layout.DIVERGED:
        return faults.BarrierError(
            f"{at}: lanes {detail:#010x} of the warp wait for the others, which are beyond; {ends}"
        )
    if kind == layout.BARRIER_MISSED:
        return faults.BarrierError(f"{at}: barrier that warp {detail} never reaches, since it ended; {ends}")
    if kind == layout.BARRIERS_DIFFER:
        other_place = program.place(program.translation.sites[detail])
        return faults.BarrierError(f"{at}: this barrier, while other warps wait at {other_place}; {ends}")
    if kind == layout.HANG:
        return faults.HangError(
            f"{at}: no memory has changed for {launch.settings.patience} accesses; next {ends}"
        )
    return faults.UnsupportedError(
        f"{at}: more asynchronous copies under way than the emulator keeps; {ends}"
    )


def _shared(kind: int, address: int, state: np.ndarray) -> bool:
    return 0 <= address < int(state[layout.LAUNCH_SHARED_BYTES]) + 1


def _where(launch: Launch, state: np.ndarray, kind: int, address: int) -> str:
    """An address as an element of an argument, or as a byte of shared memory."""
    if _shared(kind, address, state):
        return f"byte {address} of shared memory"
    for each in launch.arguments:
        if each.begin <= address < each.end:
            return f"{each.name}[{each.element(address)}]"
    nearest = min(
        launch.arguments, key=lambda a: min(abs(address - a.begin), abs(address - a.end)), default=None
    )
    if nearest is None:
        return f"address {address:#x}"
    size = (nearest.end - nearest.begin) // nearest.tensor.element_size()
    return f"the nearest is {nearest.name}[{nearest.element(address)}] of {size} elements"


def _other(writer: int, warps: int, where: str, x: int, y: int) -> str:
    numbers = [str(index) for index in range(32) if (warps >> index) & 1]
    plural = "warps" if len(numbers) > 1 else "warp"
    if where.endswith("shared memory"):
        return f"{plural} {', '.join(numbers)}"
    block = (writer & layout.BLOCK_OF_CELL) - 1
    if block + 1 == layout.SEVERAL:
        return "several blocks"
    return f"block ({block % x}, {block // x % y}, {block // x // y}), {plural} {', '.join(numbers)}"


def table(rows: dict[str, Row]) -> str:
    """By kernel: launches, instructions of warps, bytes of global memory, barriers, programs, seconds."""
    titles = "kernel", "launches", "instructions", "read", "written", "barriers", "programs", "compiled", "s"
    lines: list[tuple[str, ...]] = [titles]
    for name, row in sorted(rows.items()):
        counts = row.counts
        numbers = (
            row.launches, counts.instructions, counts.bytes_read, counts.bytes_written, counts.barriers,
            row.programs, row.compiled,
        )  # fmt: skip
        lines.append((name, *(f"{number:,}" for number in numbers), f"{row.seconds:.2f}"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
