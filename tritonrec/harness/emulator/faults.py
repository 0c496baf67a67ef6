"""Faults that the emulator finds in a kernel."""


class EmulationError(RuntimeError):
    """A kernel did something that a GPU does not define, or that the emulator cannot run."""


class RaceError(EmulationError):
    """Two warps use one place of memory in an order that nothing fixes, and the order shows."""


class OutsideError(EmulationError):
    """An access outside of every tensor that the kernel was given, or of its shared memory."""


class MisalignedError(EmulationError):
    """An address that the access's size does not divide."""


class UninitialisedError(EmulationError):
    """A read of memory that nobody wrote."""


class BarrierError(EmulationError):
    """A barrier, or an instruction of a whole warp, that some of its threads never reach."""


class HangError(EmulationError):
    """Warps run on and nothing changes any more."""


class UnsupportedError(EmulationError):
    """An instruction that the emulator does not know."""


class ScheduleError(EmulationError):
    """A result that depends on the order in which warps run."""
