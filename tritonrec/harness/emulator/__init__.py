"""Triton's compiled kernels without a GPU: the PTX of sm_80 or sm_90, translated to LLVM and run on the CPU.

    with emulated(Emulation(arch="sm_90", schedules=3)) as session:
        ops.silu(x, impl="triton")

A fault of a kernel (a race, an access outside, a barrier that not all reach, ...) is an `EmulationError` that
names the line of the kernel's source. See docs/emulator.md.
"""

from .driver import Session, emulated
from .faults import (
    BarrierError,
    EmulationError,
    HangError,
    MisalignedError,
    OutsideError,
    RaceError,
    ScheduleError,
    UninitialisedError,
    UnsupportedError,
)
from .settings import Emulation

__all__ = [
    "BarrierError",
    "Emulation",
    "EmulationError",
    "HangError",
    "MisalignedError",
    "OutsideError",
    "RaceError",
    "ScheduleError",
    "Session",
    "UninitialisedError",
    "UnsupportedError",
    "emulated",
]
